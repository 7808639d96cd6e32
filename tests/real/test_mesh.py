"""Rounds in groups with real processes over encrypted loopback: one model at all peers, whoever dies."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from farflung.console.history.audit import audit
from farflung.console.history.history import read_folder
from farflung.protocol.process.exit_codes import REFUSED
from rig import wrong_owner
from rig.pieces import with_time_for

pytestmark = [pytest.mark.slow, pytest.mark.hard]

IN_GROUPS = "[round]\ngroup = 2\n"
NAMES = ("ann", "bob", "cid", "dan")


@pytest.mark.forked_peers
def test_P1_P3_rounds_in_groups_commit_also_when_an_owner_is_killed(stage: Any) -> None:
    stage.write_run(min_peers=3, patience_s=10.0)
    run = stage.folder / "run.toml"
    run.write_text(run.read_text().replace("[round]\n", IN_GROUPS))
    stage.coordinate()
    for name in NAMES:
        stage.join(name)
    stage.until(lambda seen: full_rounds(seen) >= 3, "rounds of all four")
    in_groups = [
        each for each in stage.events("coordinator") if each["event"] == "opened" and "groups" in each
    ]
    assert any(sorted(each["groups"]) == [0, 0, 1, 1] for each in in_groups)
    version = stage.status()["version"]
    stage.processes["dan"].send_signal(signal.SIGKILL)
    stage.until(lambda seen: seen["version"] >= version + 3, "the others go on")
    stage.join("dan")
    before = full_rounds(stage.status())
    stage.until(lambda seen: full_rounds(seen) > before, "it takes part again")
    for name in NAMES:
        stage.processes[name].send_signal(signal.SIGTERM)
    assert [stage.wait(name) for name in NAMES] == [0, 0, 0, 0]
    report = audit(read_folder(stage.folder))
    assert report.kept, "\n".join(report.lines())


@pytest.mark.forked_peers
@pytest.mark.parametrize(
    ("kind", "of"), with_time_for([("group", "contributions")], in_ci=[("result", "groups' sums")])
)
def test_P19_in_groups_a_peer_that_adds_up_wrongly_is_convicted_by_its_own_signature(
    stage: Any, kind: str, of: str
) -> None:
    stage.write_run(min_peers=3, patience_s=10.0)
    run = stage.folder / "run.toml"
    run.write_text(run.read_text().replace("[round]\n", IN_GROUPS) + "\n[merge]\naudit = 1.0\n")
    stage.coordinate()
    for name in NAMES[:3]:
        stage.join(name)
    words = ["join", "--identity", str(stage.folder / "dan.pem"), "--out", str(stage.model("dan")), stage.url]
    stage.run_python("dan", [str(Path(wrong_owner.__file__)), kind, *words])
    seen = stage.until(lambda seen: any(map(is_banned, seen["members"])), "dan is found out")
    [dan] = [each["id"] for each in filter(is_banned, seen["members"])]
    assert stage.wait("dan") == REFUSED
    version = stage.status()["version"]
    stage.until(lambda seen: seen["version"] >= version + 2, "the others go on")
    for name in NAMES[:3]:
        stage.processes[name].send_signal(signal.SIGTERM)
    assert [stage.wait(name) for name in NAMES[:3]] == [0, 0, 0]

    proofs = sorted((stage.folder / "run.data" / "evidence").glob("*.proof"))
    told = stage.call("audit", "--evidence", str(proofs[0]))
    assert told.returncode == 1, told.stdout + told.stderr
    assert of in told.stdout
    report = audit(read_folder(stage.folder))
    assert report.kept, "\n".join(report.lines())
    assert told.stdout.startswith(f"{dan} signed a wrong sum of")


def is_banned(member: dict[str, Any]) -> bool:
    return bool(member["state"] == "banned")


def full_rounds(seen: dict[str, Any]) -> int:
    return sum(len(each["included"]) == len(NAMES) for each in seen["rounds"])
