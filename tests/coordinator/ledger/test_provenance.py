"""Provenance: whoever has the rows and the run's key knows who contributed, and sees whatever was changed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from farflung.console.history.audit_evidence import facts_of, lines_of, provenance_in
from farflung.console.main import app
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.ledger.provenance import ProvenanceRow, line_of, row_of
from farflung.coordinator.run.effects import KeepEvidence
from farflung.coordinator.run_files import ProvenanceFile
from farflung.peer.identity import Identity
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.messages import Sent
from farflung.protocol.round_words import Commit
from farflung.protocol.signed_words import SignedList

RUN_ID = bytes(range(16))
ANN, BOB = sorted((Identity.generate(), Identity.generate()), key=lambda each: each.peer_id)


def committed(
    version: int, tokens: dict[Identity, int], fragment: int = 0, round_no: int = 0
) -> KeepEvidence:
    members = tuple(sorted(each.peer_id for each in tokens))
    weights = tuple(1 / len(members) for _ in members)
    commit = Commit(version, round_no or version, members, weights, bytes(64), "fp32", fragment)
    said = tuple(
        SignedList(
            each.public,
            Sent(
                seat=0,
                counted=b"",
                session=bytes(16),
                seq=1,
                round_no=commit.round_no,
                hashes=b"",
                tokens=count,
                steps=1,
                loss=None,
                used=(),
                signature=b"",
            ),
        )
        for each, count in tokens.items()
    )
    return KeepEvidence(commit, said)


class Host:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.keys = folder, load_or_create(folder)
        self.path = folder / "provenance.jsonl"
        self.start()

    def start(self) -> None:
        assert self.keys.signing is not None
        self.file = ProvenanceFile(self.path, RUN_ID, self.keys.signing)

    @property
    def url(self) -> str:
        return str(JoinUrl("127.0.0.1", 1, "small", self.keys.public_raw))

    def lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path / "run.data")
    made.file.keep(committed(1, {ANN: 30, BOB: 10}))
    made.file.keep(committed(2, {ANN: 30}))
    made.file.keep(committed(3, {ANN: 5, BOB: 25}))
    return made


def test_who_contributed_how_much_to_which_version(host: Host) -> None:
    found = provenance_in(host.path, host.keys.public_raw)
    assert found.problems == [] and found.version == 3
    assert found.tokens() == {ANN.peer_id: 65, BOB.peer_id: 35}
    assert found.versions() == {ANN.peer_id: 3, BOB.peer_id: 2}
    assert lines_of(found)[0].split() == [ANN.peer_id, "65", "tokens", "65.0", "%", "in", "3", "versions"]
    earlier = provenance_in(host.path, host.keys.public_raw, upto=2)
    assert earlier.problems == [] and earlier.tokens() == {ANN.peer_id: 60, BOB.peer_id: 10}
    assert f'"{BOB.peer_id}":[10,1]' in facts_of(earlier)
    later = provenance_in(host.path, host.keys.public_raw, upto=4)
    assert later.problems == ["it ends at version 3, before version 4"]


def test_a_coordinator_that_starts_again_goes_on_where_the_file_ends(host: Host) -> None:
    with host.path.open("ab") as file:
        file.write(b'{"row":4,"before":"half of a l')  # it was killed here
    host.start()
    host.file.keep(committed(4, {BOB: 1}))
    found = provenance_in(host.path, host.keys.public_raw)
    assert found.problems == [] and found.version == 4 and len(host.lines()) == 4


def test_the_tokens_of_all_fragments_are_the_same_tokens(host: Host) -> None:
    for version in (1, 2):
        host.file.keep(committed(version, {ANN: 30, BOB: 10}, fragment=1))
    found = provenance_in(host.path, host.keys.public_raw)
    assert found.problems == [] and sum(found.tokens().values()) == 100


def test_versions_that_the_run_went_back_behind_are_not_counted(host: Host) -> None:
    host.file.keep(committed(2, {BOB: 7}, round_no=4))
    found = provenance_in(host.path, host.keys.public_raw)
    assert found.problems == [] and (found.version, found.void) == (2, 2)
    assert found.tokens() == {ANN.peer_id: 30, BOB.peer_id: 17}
    assert "2 commits that the run went back behind" in lines_of(found)[-1]


def test_whatever_was_changed_is_seen(host: Host) -> None:
    good = host.lines()
    more = good[1].replace(b",30,", b",31,")
    assert more != good[1]
    for broken, told in (
        ([good[0], more, good[2]], "line 2: the signature does not fit it"),
        ([good[0], good[2]], "line 2: it does not follow"),
        ([good[1], good[2]], "line 1: it does not follow"),
        ([good[0], good[0], good[1], good[2]], "line 2: it does not follow"),
        ([good[0], b"[]", good[2]], "line 2: it is no row"),
        ([good[0], b" " + good[1], good[2]], "line 2: it is no row"),
        ([good[0], b"x" * 100_000, good[2]], "line 2: it is no row"),
    ):
        host.path.write_bytes(b"\n".join(broken) + b"\n")
        found = provenance_in(host.path, host.keys.public_raw)
        assert found.problems and found.problems[0].startswith(told), (found.problems, told)
    done = CliRunner().invoke(app, ["audit", "--provenance", str(host.path), "--url", host.url])
    assert done.exit_code == 1 and "BROKEN  line 2" in done.output


def test_a_commit_without_a_row_is_missed(host: Host) -> None:
    host.file.keep(committed(5, {ANN: 1}))
    assert provenance_in(host.path).problems == ["fragment 0: version 4 is missing"]


def test_rows_of_another_key_are_not_the_runs(host: Host, tmp_path: Path) -> None:
    other = Host(tmp_path / "other.data")
    done = CliRunner().invoke(app, ["audit", "--provenance", str(host.path), "--url", other.url])
    assert done.exit_code == 1 and "signed by another coordinator" in done.output
    assert (
        CliRunner().invoke(app, ["audit", "--provenance", str(host.path), "--url", host.url]).exit_code == 0
    )
    assert other.keys.signing is not None
    forged = []  # the same rows, each signed anew by somebody else behind the first
    for number, line in enumerate(host.lines()):
        row = row_of(line)
        assert isinstance(row, ProvenanceRow)
        if number:
            key = other.keys.signing.public_key().public_bytes_raw().hex()
            bare = msgspec.structs.replace(row, key=key, signature="")
            row = msgspec.structs.replace(bare, signature=other.keys.signing.sign(bare.signed_part()).hex())
        forged.append(line_of(row))
    host.path.write_bytes(b"\n".join(forged) + b"\n")
    assert (
        provenance_in(host.path, host.keys.public_raw).problems[0].startswith("line 2: it is of another run")
    )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        provenance_in(tmp_path / "nothing")
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match=r"a coordinator writes it as provenance.jsonl"):
        provenance_in(tmp_path / "empty")
