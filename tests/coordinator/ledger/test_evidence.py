"""Evidence: a hash list counts only when its author signed it, and shows strangers who sent which bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from farflung.console.history.audit_evidence import (
    read_evidence,
    who_sent,
)
from farflung.console.main import app
from farflung.coordinator import run_files
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.ledger.evidence import Evidence
from farflung.coordinator.ledger.ledger import FragmentBook
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_rules import rules_for
from farflung.coordinator.run.digest_agreement import SignedResults
from farflung.coordinator.run.effects import KeepEvidence
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run.membership import Membership
from farflung.coordinator.run_files import EvidenceFolder
from farflung.peer.identity import Identity
from farflung.protocol.digests import hash_bytes
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Sent
from farflung.protocol.round_words import Commit, Contact, Decision, Plan
from farflung.protocol.signed_words import SignedList, is_signed, sent_part

RUN_ID, SESSION = bytes(range(16)), b"s" * 16
CHUNKS = [b"first chunk", b"second chunk"]
ANN, BOB = Identity.generate(), Identity.generate()


def said(
    by: Identity, chunks: list[bytes] = CHUNKS, round_no: int = 7, signer: Identity | None = None
) -> SignedList:
    hashes = b"".join(hash_bytes(chunk) for chunk in chunks)
    bare = Sent(
        seat=0,
        counted=b"",
        session=SESSION,
        seq=3,
        round_no=round_no,
        hashes=hashes,
        tokens=5,
        steps=1,
        loss=None,
        used=(),
        signature=b"",
    )
    return SignedList(by.public, replace(bare, signature=(signer or by).sign(sent_part(RUN_ID, bare))))


def commit(round_no: int = 7, version: int = 4) -> Commit:
    members = tuple(sorted((ANN.peer_id, BOB.peer_id)))
    return Commit(version, round_no, members, (0.5, 0.5), bytes(64), "fp32")


def flight_of(round_no: int) -> Round:
    members = tuple(sorted((ANN.peer_id, BOB.peer_id)))
    plan = Plan(round_no, 1, 3, members, (0, 1), ("fp32",) * 2)
    rules = rules_for(Manifest(), FragmentBook(), members)
    return Round(plan, rules, 0.0, decision=Decision(round_no, 1, (0.5, 0.5), {}))


def kept(folder: Path, *lists: SignedList, made: Commit | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    signing = load_or_create(folder).signing
    assert signing is not None
    evidence = EvidenceFolder(folder / "evidence", RUN_ID, signing)
    evidence.keep(KeepEvidence(made or commit(), lists))
    return folder / "evidence"


def only(folder: Path) -> Evidence:
    [path] = folder.glob("*.evidence")
    found = read_evidence(path)
    assert isinstance(found, Evidence)
    return found


# ---- what is signed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [{"hashes": bytes(64)}, {"tokens": 6}, {"round_no": 8}, {"session": bytes(16)}, {"seq": 4}, {"steps": 2}],
)
def test_a_hash_list_that_was_changed_after_signing_is_not_signed(changed: dict[str, object]) -> None:
    one = said(ANN)
    assert is_signed(ANN.public, RUN_ID, one.sent)
    assert not is_signed(ANN.public, RUN_ID, replace(one.sent, **changed))
    assert not is_signed(ANN.public, bytes(16), one.sent), "nor for another run"


def test_P9_a_hash_list_signed_by_another_is_out_with_that_reason() -> None:
    machine = RunMachine(Manifest(), RUN_ID, [], lambda size: bytes(size))
    witness = SignedResults(machine.core)
    member = Membership(5.0).admit(Contact(ANN.peer_id, "ann", bytes(32), ""), SESSION, bytes(16), 0.0)
    member.identity = ANN.public
    assert witness.problem(member, said(ANN, signer=BOB).sent) == "its hash list is not signed by it"
    assert witness.problem(member, said(ANN).sent) == ""
    assert witness.problem(member, said(ANN, signer=BOB).sent) == "", "the first good one of a round counts"
    witness.on_commit(commit(), flight_of(7), {})
    [effect] = machine.core.take_effects()
    assert isinstance(effect, KeepEvidence) and [each.peer for each in effect.said] == [ANN.peer_id]


def test_lists_of_rounds_that_failed_are_no_evidence_of_the_next_commit() -> None:
    core = RunMachine(Manifest(), RUN_ID, [], lambda size: bytes(size)).core
    witness = SignedResults(core)
    member = Membership(5.0).admit(Contact(ANN.peer_id, "ann", bytes(32), ""), SESSION, bytes(16), 0.0)
    member.identity = ANN.public
    witness.problem(member, said(ANN, round_no=6).sent)
    witness.on_commit(commit(round_no=7), flight_of(7), {})
    assert core.take_effects() == [KeepEvidence(commit(round_no=7), ())]


# ---- what is kept ----------------------------------------------------------------------------------------------


def test_what_is_kept_convinces_somebody_who_was_not_there(tmp_path: Path) -> None:
    folder = kept(tmp_path, said(ANN), said(BOB, [b"first chunk", b"other"]))
    found = only(folder)
    assert found.problem() == ""
    assert found.who_sent(hash_bytes(b"second chunk")) == [(ANN.peer_id, 1)]
    assert {peer for peer, _ in found.who_sent(hash_bytes(b"first chunk"))} == {ANN.peer_id, BOB.peer_id}


def test_evidence_that_was_changed_or_is_not_whole_proves_nothing(tmp_path: Path) -> None:
    assert "no hash list of" in only(kept(tmp_path / "a", said(ANN))).problem()
    assert "another round" in only(kept(tmp_path / "b", said(ANN, round_no=6), said(BOB))).problem()
    forged = only(kept(tmp_path / "c", said(ANN, signer=BOB), said(BOB)))
    assert forged.problem() == f"the signature of {ANN.peer_id} does not fit its hash list"
    good = only(kept(tmp_path / "d", said(ANN), said(BOB)))
    changed = replace(good, commit=commit(version=5))
    assert changed.problem() == "the coordinator's signature does not fit the content"


def test_only_so_many_commits_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "EVIDENCE_COMMITS_KEPT", 3)
    for number in range(1, 8):
        folder = kept(tmp_path, said(ANN, round_no=number), made=commit(number, number))
    assert [path.name[:10] for path in sorted(folder.iterdir())] == ["0000000005", "0000000006", "0000000007"]
    monkeypatch.setattr(run_files, "EVIDENCE_BYTES_MOST", 1)
    kept(tmp_path, said(ANN, round_no=8), made=commit(8, 8))
    assert [path.name[:10] for path in folder.iterdir()] == ["0000000008"]


def test_a_place_that_takes_no_more_costs_no_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "evidence").write_text("a file is in the way")
    kept(tmp_path, said(ANN))
    assert ".evidence is not kept: " in caplog.text


@pytest.mark.parametrize("raw", [b"", b"\x81", b"\xc1" * 50, b"\x91" * 100_000])
def test_files_that_are_none_are_named(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.evidence"
    path.write_bytes(raw)
    assert str(read_evidence(path)).startswith("cannot be read")


# ---- the command -----------------------------------------------------------------------------------------------


def test_the_audit_shows_who_sent_some_bytes(tmp_path: Path) -> None:
    kept(tmp_path, said(ANN), said(BOB, [b"x", b"y"]))
    file = tmp_path / "chunk.bin"
    file.write_bytes(b"second chunk")
    told = CliRunner().invoke(app, ["audit", str(tmp_path), "--who-sent", str(file)])
    assert told.output.strip() == (
        f"{ANN.peer_id} signed that it sent these bytes: chunk 1 of fragment 0, round 7"
    )
    file.write_bytes(b"nobody's")
    assert who_sent(tmp_path, file) == [
        "nobody signed that it sent these bytes (in the evidence of 1 commits)"
    ]
