"""P19 by replay: sums made again from what members sent, and what is told of each thing that was changed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from farflung.checkpoints.archive import Archive, RoundHead
from farflung.checkpoints.sent_files import SentFiles, SentHead
from farflung.console.history.audit_evidence import evidence_below
from farflung.console.history.audit_replay import NOT_MERGED, Outcome, replay, sources_at
from farflung.console.main import app
from farflung.coordinator.ledger.evidence import FORMAT, Evidence
from farflung.protocol.errors import CheckpointError
from farflung.protocol.manifest import Manifest
from farflung.protocol.signed_words import Said
from rig.made_archive import HOST, MANIFEST, RUN_ID, RUN_KEY, KeptWithWork, said_by


def kept_at(place: Path, scaled_in: int = 0, manifest: Manifest = MANIFEST) -> KeptWithWork:
    """Versions 1 to 5 with a checkpoint of 2; in one of them the first member is archived with three times its work."""
    peer = KeptWithWork(place / "kept", manifest)
    for version in range(1, 6):
        peer.scaled = 3.0 if version == scaled_in else 1.0
        peer.roll(version)
        if version == 2:
            peer.save(version)
    peer.hand.close(finished=True)
    assert not peer.told
    return peer


@pytest.fixture
def kept(tmp_path: Path) -> KeptWithWork:
    return kept_at(tmp_path)


def replayed(kept: KeptWithWork) -> tuple[Outcome, list[str]]:
    lines: list[str] = []
    return replay(sources_at(kept.place, "", RUN_KEY, None), lines.append), lines


def test_P19_every_chunk_is_merged_again_to_the_committed_bits(kept: KeptWithWork) -> None:
    outcome, lines = replayed(kept)
    assert not outcome.difference and (outcome.merged.done, outcome.merged.due) == (15, 15)
    assert outcome.told.endswith("; 15 of 15 chunks merged again from what members sent")
    assert lines[1].endswith("as the archive has it; 2 of 2 chunks merged again")
    assert not kept.sent_file(1, 0, 3).exists(), "who was out counted nothing"


def test_a_changed_byte_of_a_contribution_is_damage_and_names_its_author(kept: KeptWithWork) -> None:
    file = kept.sent_file(2, 1, 4)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"sent: chunk 2 is not what {kept.members[2].peer_id} signed"):
        replayed(kept)
    done = CliRunner().invoke(app, ["audit", "--replay", kept.place])
    assert isinstance(done.exception, CheckpointError) and "\n" not in str(done.exception)


def test_a_contribution_scaled_by_3_is_found_though_its_author_signed_it(tmp_path: Path) -> None:
    kept = kept_at(tmp_path, scaled_in=4)
    outcome, lines = replayed(kept)
    assert outcome.difference.startswith(
        "version 4, fragment 0, chunk 0: what members sent, with the committed"
    )
    assert lines[-1].startswith("version 3 of fragment 1: digest")
    done = CliRunner().invoke(app, ["audit", "--replay", kept.place])
    assert done.exit_code == 1 and "DIFFERS  version 4, fragment 0, chunk 0: what members sent" in done.output


@pytest.mark.parametrize("weights", [(0.75, 0.0, 0.25), (0.25, 0.0, 0.5)])
def test_a_wrong_weight_is_found(kept: KeptWithWork, weights: tuple[float, ...]) -> None:
    def change(head: RoundHead, payloads: list[bytes]) -> tuple[RoundHead, list[bytes]]:
        commit = msgspec.structs.replace(head.commit, weights=weights)
        return msgspec.structs.replace(head, commit=commit), payloads

    kept.rewrite(1, 4, change)
    outcome, _ = replayed(kept)
    assert outcome.difference.startswith(
        "version 4, fragment 1, chunk 2: what members sent, with the committed"
    )


def test_commits_are_compared_with_what_the_coordinator_signed_of_them(
    kept: KeptWithWork, tmp_path: Path
) -> None:
    """A sum that fits its own weights is still not the run's."""
    head = Archive(kept.place).head(RUN_ID.hex()[:8], (0, 1, 4))
    for weights, differs in (
        (head.commit.weights, ""),
        ((0.5, 0.0, 0.5), "version 4, fragment 1: its members, weights"),
    ):
        commit = msgspec.structs.replace(head.commit, weights=weights)
        said = tuple(said_by(kept.members[at], commit.round_no, [b"1"]) for at in (0, 2))
        bare = Evidence(FORMAT, RUN_ID, commit, said, HOST.public)
        whole = msgspec.structs.replace(bare, signature=HOST.sign(bare.signed_part()))
        (tmp_path / whole.name).write_bytes(msgspec.msgpack.encode(whole))
        signed = evidence_below(tmp_path, RUN_KEY)
        assert signed and not evidence_below(tmp_path, bytes(32))
        outcome = replay(sources_at(kept.place, "", RUN_KEY, None, signed), lambda line: None)
        assert outcome.difference.startswith(differs) and bool(outcome.difference) == bool(differs)


IN_GROUPS = MANIFEST.model_copy(update={"round": MANIFEST.round.model_copy(update={"group": 2})})


def test_of_rounds_in_groups_states_are_replayed_and_it_is_said_that_sums_are_not(tmp_path: Path) -> None:
    """What lies there is not merged in one go, which would be another sum than was committed."""
    outcome, lines = replayed(kept_at(tmp_path, 4, IN_GROUPS))
    assert not outcome.difference and outcome.replayed and not outcome.merged.due
    assert lines[0] == NOT_MERGED and "merged again from" not in outcome.told


def test_of_rounds_in_groups_a_commit_names_as_much_as_a_peer_was_told(tmp_path: Path) -> None:
    places = [
        kept_at(tmp_path / str(manifest.round.group), 0, manifest).place for manifest in (MANIFEST, IN_GROUPS)
    ]
    head = Archive(places[1]).head(RUN_ID.hex()[:8], (0, 1, 4))
    others = ("another member", *head.commit.members), (0.25, *head.commit.weights)
    of_all = msgspec.structs.replace(head.commit, members=others[0], weights=others[1])
    for weights, differs in ((others[1], False), ((0.25, 0.5, 0.0, 0.5), True)):
        whole = msgspec.structs.replace(of_all, weights=weights)
        evidence = {(whole.round_no, 1): Evidence(FORMAT, RUN_ID, whole, (), HOST.public)}
        assert bool(told_of(places[1], evidence)) == differs
    flat = Archive(places[0]).head(RUN_ID.hex()[:8], (0, 1, 4)).commit
    more = msgspec.structs.replace(flat, members=("another", *flat.members), weights=(0.0, *flat.weights))
    other = {(more.round_no, 1): Evidence(FORMAT, RUN_ID, more, (), HOST.public)}
    assert told_of(places[0], other), "of a flat round all are told all"


def told_of(place: str, evidence: dict[tuple[int, int], Evidence]) -> str:
    return replay(sources_at(place, "", RUN_KEY, None, evidence), lambda line: None).difference


def test_a_missing_file_is_counted_and_the_rest_is_merged(kept: KeptWithWork) -> None:
    kept.sent_file(0, 1, 4).unlink()
    outcome, lines = replayed(kept)
    assert not outcome.difference and (outcome.merged.done, outcome.merged.due) == (12, 15)
    [missing] = [line for line in lines if line.startswith("missing")]
    assert missing == (
        "missing  version 4 of fragment 1: 3 of 3 chunks not merged again: the archive lacks all of "
        f"{kept.members[0].peer_id}"
    )
    assert (
        "12 of 15 chunks merged again from what members sent (what is missing is named above)" in outcome.told
    )


def change_head(kept: KeptWithWork, **changes: object) -> None:
    """Of the last member's contribution to version 4."""
    files, key = SentFiles(kept.place), (0, 1, 4)
    opened = files.open(RUN_ID.hex()[:8], key, kept.members[2].peer_id)
    payloads = list(opened.payloads())
    kept.sent_file(2, 1, 4).unlink()
    if "without" in changes:
        payloads[int(str(changes.pop("without")))] = b""
        changes["sizes"] = tuple(map(len, payloads))
    files.put(msgspec.structs.replace(opened.head, **changes), payloads)


def test_a_chunk_that_could_not_be_got_costs_that_chunk_alone(kept: KeptWithWork) -> None:
    change_head(kept, without=1)
    outcome, lines = replayed(kept)
    assert (outcome.merged.done, outcome.merged.due) == (14, 15)
    assert f"1 of 3 chunks not merged again: the archive lacks 1 of {kept.members[2].peer_id}" in "".join(
        lines
    )


def test_the_larger_one_of_two_files_of_a_contribution_stays(kept: KeptWithWork) -> None:
    file = kept.sent_file(2, 1, 4)
    whole = file.read_bytes()
    change_head(kept, without=1)
    part = file.read_bytes()
    assert len(part) < len(whole)
    file.write_bytes(whole)
    opened = SentFiles(kept.place).open(RUN_ID.hex()[:8], (0, 1, 4), kept.members[2].peer_id)
    smaller = [b"", *list(opened.payloads())[1:]]
    head = msgspec.structs.replace(opened.head, sizes=tuple(map(len, smaller)))
    SentFiles(kept.place).put(head, smaller)
    assert file.read_bytes() == whole


def forged(kept: KeptWithWork) -> Said:
    """Another's list under this member's name."""
    said = said_by(kept.members[0], 4, [b"1", b"2", b"3"])
    return Said(kept.members[2].public, said.sent)


def other_round(kept: KeptWithWork) -> Said:
    files = SentFiles(kept.place)
    payloads = list(files.open(RUN_ID.hex()[:8], (0, 1, 4), kept.members[2].peer_id).payloads())
    return said_by(kept.members[2], 3, payloads)


def test_a_list_that_its_author_did_not_sign_is_refused(kept: KeptWithWork) -> None:
    change_head(kept, said=forged(kept))
    with pytest.raises(CheckpointError, match="has not signed this list of what it sent"):
        replayed(kept)


def test_a_contribution_to_another_round_is_no_contribution_to_this_one(kept: KeptWithWork) -> None:
    change_head(kept, said=other_round(kept))
    outcome, _ = replayed(kept)
    assert "is of round 3, the version was made by round 4" in outcome.difference


def test_files_that_are_not_what_their_names_say_are_refused(kept: KeptWithWork) -> None:
    file = kept.sent_file(2, 1, 4)
    raw = file.read_bytes()
    for broken, told in (
        (raw[:-1], "cut off"),
        (raw[:20], "damaged"),
        (b"", "damaged"),
        (kept.sent_file(2, 1, 5).read_bytes(), "another version"),
        (kept.sent_file(0, 1, 4).read_bytes(), "not by whom its name says"),
    ):
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match=told):
            replayed(kept)


def test_bytes_that_are_no_contribution_are_named(kept: KeptWithWork) -> None:
    payloads = [b"1", b"2", b"3"]
    head = SentHead(
        run_id=RUN_ID,
        era=0,
        fragment=1,
        version=4,
        said=said_by(kept.members[2], 4, payloads),
        sizes=(1, 1, 1),
    )
    kept.sent_file(2, 1, 4).unlink()
    SentFiles(kept.place).put(head, payloads)
    outcome, _ = replayed(kept)
    assert "version 4, fragment 1, chunk 2: what members sent cannot be merged" in outcome.difference


def test_an_archive_without_contributions_says_nothing_of_them(kept: KeptWithWork) -> None:
    for file in Path(kept.place).rglob("*.sent"):
        file.unlink()
    outcome, lines = replayed(kept)
    assert not outcome.difference and "merged again" not in outcome.told + "".join(lines)
