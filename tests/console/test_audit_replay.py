"""The replay of an archive: what a peer kept is computed anew to the same bits, and whatever was changed is named.

The archive is written by the peer's own hand, from a state that torch moves; the replay knows numpy alone.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from farflung.checkpoints.archive import Archive, RoundHead
from farflung.checkpoints.store import Store
from farflung.collectives.round.effects import Install
from farflung.compression.plain_codecs import encode
from farflung.console.history.audit_evidence import evidence_below
from farflung.console.history.audit_replay import ReplayOutcome, replay, sources_at
from farflung.console.main import app
from farflung.coordinator.ledger.evidence import FORMAT, Evidence
from farflung.peer.identity import Identity
from farflung.protocol.errors import CheckpointError, UserError
from farflung.protocol.messages import Sent
from farflung.protocol.signed_words import SignedList, sent_part
from rig.made_archive import ELEMENTS, FRAGMENTS, HOST, MANIFEST, ME, RUN_ID, RUN_KEY, WITH_ADAMW, Kept


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """Versions 1 to 7, with checkpoints of 3 and 6."""
    return seven_versions(Kept(tmp_path / "kept"))


def seven_versions(peer: Kept) -> Kept:
    for version in range(1, 8):
        peer.roll(version)
        if version in (3, 6):
            peer.save(version)
    peer.hand.close(finished=True)
    return peer


def replayed(kept: Kept) -> tuple[ReplayOutcome, list[str]]:
    lines: list[str] = []
    return replay(sources_at(kept.place, "", RUN_KEY, None), lines.append), lines


def test_P1_every_version_after_a_checkpoint_is_computed_to_the_same_bits(kept: Kept) -> None:
    outcome, lines = replayed(kept)
    assert not outcome.difference and not outcome.gaps and not kept.told
    assert (outcome.replayed, outcome.settled) == (8, 2)  # 4 to 7 of two fragments; 6 is signed
    assert lines[0].startswith("version 3: read from the checkpoint")
    assert [line for line in lines if line.endswith("as the run signed it")] == lines[5:7]
    kept.state.seal(1)
    assert lines[-1].startswith(f"version 7 of fragment 1: digest {kept.state.digests[1].hex()[:16]} as the")


def test_P1_with_a_second_moment_too(tmp_path: Path) -> None:
    peer = seven_versions(Kept(tmp_path / "kept", manifest=WITH_ADAMW))
    outcome, lines = replayed(peer)
    assert not outcome.difference and (outcome.replayed, outcome.settled) == (8, 2)
    peer.state.seal(1)
    assert lines[-1].startswith(f"version 7 of fragment 1: digest {peer.state.digests[1].hex()[:16]} as the")


def test_a_result_that_was_exchanged_is_found_by_version_fragment_and_chunk(kept: Kept) -> None:
    def change(head: RoundHead, payloads: list[bytes]) -> tuple[RoundHead, list[bytes]]:
        payloads[2] = encode("int8", np.ones(ELEMENTS, np.float32))
        return head, payloads

    kept.rewrite(1, 5, change)
    outcome, lines = replayed(kept)
    assert outcome.difference.startswith("version 5, fragment 1, chunk 4: the committed results lead to")
    assert lines[-1].startswith("version 5: digest")
    done = CliRunner().invoke(app, ["audit", "--replay", kept.place])
    assert done.exit_code == 1 and "DIFFERS  version 5, fragment 1, chunk 4" in done.output


def test_a_state_that_does_not_follow_is_found_even_if_its_lists_fit_together(kept: Kept) -> None:
    def change(head: RoundHead, payloads: list[bytes]) -> tuple[RoundHead, list[bytes]]:
        return msgspec.structs.replace(head, chunks=head.chunks[:32] + bytes(32)), payloads

    kept.rewrite(0, 7, change)
    outcome, _ = replayed(kept)
    assert outcome.difference.startswith("version 7, fragment 0, chunk 1: the committed results lead to")


def test_what_the_run_signed_counts_and_not_what_the_archive_says(kept: Kept) -> None:
    """All of version 6 was made anew, so that it follows from version 5; but the run signed another state."""
    other = Kept(Path(kept.place).with_name("other"))
    for version in range(1, 4):
        other.roll(version)
    other.save(3)
    other.chance = np.random.default_rng(2)
    for version in range(4, 8):
        other.roll(version)
    other.hand.close(finished=True)
    for version in range(4, 8):
        for fragment in range(FRAGMENTS):
            kept.file(fragment, version).write_bytes(other.file(fragment, version).read_bytes())
    outcome, _ = replayed(kept)
    assert outcome.difference.startswith("version 6, fragment 0: the digest is")
    assert "the run signed" in outcome.difference


def test_commits_are_compared_with_what_the_coordinator_signed_of_them(kept: Kept, tmp_path: Path) -> None:
    head = Archive(kept.place).head(RUN_ID.hex()[:8], (0, 1, 4))
    bare = Sent(
        session=bytes(16), seq=1, round_no=head.commit.round_no, hashes=bytes(32), tokens=1, steps=1, loss=None,
        used=(), seat=0, counted=b"", signature=b"",
    )  # fmt: skip
    said = SignedList(ME.public, msgspec.structs.replace(bare, signature=ME.sign(sent_part(RUN_ID, bare))))
    for weights, differs in (
        (head.commit.weights, ""),
        ((0.5,), "version 4, fragment 1: its members, weights"),
    ):
        commit = msgspec.structs.replace(head.commit, weights=weights)
        unsigned = Evidence(FORMAT, RUN_ID, commit, (said,), HOST.public)
        whole = msgspec.structs.replace(unsigned, signature=HOST.sign(unsigned.signed_part()))
        (tmp_path / whole.name).write_bytes(msgspec.msgpack.encode(whole))
        signed = evidence_below(tmp_path, RUN_KEY)
        assert signed and not evidence_below(tmp_path, bytes(32))
        told = difference_from(kept, signed)
        assert told.startswith(differs) and bool(told) == bool(differs)


def test_of_rounds_in_groups_a_commit_names_as_much_as_a_peer_was_told(tmp_path: Path) -> None:
    in_groups = MANIFEST.model_copy(update={"round": MANIFEST.round.model_copy(update={"group": 2})})
    flat, grouped = (
        seven_versions(Kept(tmp_path / str(manifest.round.group), manifest=manifest))
        for manifest in (MANIFEST, in_groups)
    )
    for kept, weights, differs in (
        (grouped, (0.25, 1.0), False),
        (grouped, (0.25, 0.5), True),
        (flat, (0.25, 1.0), True),  # of a flat round all are told all
    ):
        commit = Archive(kept.place).head(RUN_ID.hex()[:8], (0, 1, 4)).commit
        of_all = msgspec.structs.replace(commit, members=("another", *commit.members), weights=weights)
        evidence = {(of_all.round_no, 1): Evidence(FORMAT, RUN_ID, of_all, (), HOST.public)}
        assert bool(difference_from(kept, evidence)) == differs


def difference_from(kept: Kept, evidence: dict[tuple[int, int], Evidence]) -> str:
    return replay(sources_at(kept.place, "", RUN_KEY, None, evidence), lambda line: None).difference


def test_damage_is_told_from_a_lie(kept: Kept) -> None:
    raw = bytearray(kept.file(0, 5).read_bytes())
    raw[-1] ^= 1
    kept.file(0, 5).write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"v00000005.round: the result of chunk 1 is damaged"):
        replayed(kept)
    for broken, told in (
        (raw[:-1], "cut off"),
        (raw[:20], "damaged"),
        (b"", "damaged"),
        (bytes([255] * 99), "damaged"),
    ):
        kept.file(0, 5).write_bytes(broken)
        with pytest.raises(CheckpointError, match=told):
            replayed(kept)
    kept.file(0, 5).write_bytes(kept.file(0, 4).read_bytes())
    with pytest.raises(CheckpointError, match="another version"):
        replayed(kept)


def test_a_version_that_nobody_kept_is_named_and_the_next_checkpoint_goes_on(kept: Kept) -> None:
    kept.file(1, 5).unlink()
    outcome, lines = replayed(kept)
    assert not outcome.difference and outcome.replayed == 4
    assert [line for line in lines if line.startswith("missing")] == [f"missing  {outcome.gaps[0]}"]
    assert outcome.gaps[0].startswith("version 5 of fragment 1 is not in the archive; another peer's")
    assert any(line.startswith("version 6: read from the checkpoint") for line in lines)
    assert lines[-1].startswith("version 7 of fragment 1")


def test_without_a_checkpoint_or_an_archive_it_is_said_what_keeps_them(kept: Kept, tmp_path: Path) -> None:
    for folder in Path(kept.place).glob("*-e0000-v*"):
        for file in folder.iterdir():
            file.unlink()
    with pytest.raises(
        UserError, match="no checkpoint from which version 1 follows; .checkpoint. every_rounds"
    ):
        replayed(kept)
    with pytest.raises(
        UserError, match="no archive of a run there; farflung join --checkpoints FOLDER --archive"
    ):
        sources_at(str(tmp_path / "nowhere"), "", RUN_KEY, None)
    done = CliRunner().invoke(app, ["audit"])
    assert isinstance(done.exception, UserError) and "--replay" in str(done.exception)


def test_what_another_coordinator_signed_is_refused(tmp_path: Path) -> None:
    peer = Kept(tmp_path / "kept", host=Identity.generate())
    peer.roll(1)
    peer.save(1)
    peer.hand.close(finished=True)
    with pytest.raises(CheckpointError, match="not signed by the coordinator of this join URL"):
        replayed(peer)


def test_a_version_that_was_not_rolled_whole_is_not_archived(tmp_path: Path) -> None:
    peer = Kept(tmp_path / "kept")
    peer.roll(1)
    peer.roll(2, skipped=(3,))
    peer.roll(3)
    peer.hand.close(finished=True)
    assert [key[1:] for key in Archive(peer.place).keys(RUN_ID.hex()[:8])] == [
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 1),
        (1, 3),
    ]


def test_a_state_that_had_to_be_given_up_is_not_archived(tmp_path: Path) -> None:
    """It was not the run's: what comes next is fetched, not rolled on it."""
    peer = Kept(tmp_path / "kept")
    peer.roll(1)
    peer.hand.changed(Install(0, 1, b""))
    peer.hand.close(finished=False)
    assert [key[1:] for key in Archive(peer.place).keys(RUN_ID.hex()[:8])] == [(1, 1)]


def test_a_place_that_fails_is_told_once_and_costs_no_round(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    peer = Kept(tmp_path / "kept")
    for version in (1, 2, 3):
        peer.roll(version)
    peer.hand.close(finished=True)
    assert len(peer.told) == 1 and peer.told[0].endswith("training goes on")


def test_the_oldest_checkpoint_of_each_era_stays_beside_an_archive(kept: Kept) -> None:
    store = Store(kept.place)
    for era, version in ((0, 9), (1, 7), (1, 8), (1, 9)):
        kept.save(version, era)
    store.retain(RUN_ID.hex(), keep=1)
    assert [s.manifest.age for s in store.list_saved().complete] == [(1, 9), (1, 7), (0, 3)]
