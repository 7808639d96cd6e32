"""A peer without a trainer, in real processes: it helps a run, and the run outlives all others by what it keeps."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from farflung.console.history.audit import audit
from farflung.console.history.history import read_folder

pytestmark = pytest.mark.slow


def member(status: dict[str, Any], name: str) -> dict[str, Any]:
    """The living one whose identity that is, or nothing."""
    return next((each for each in status["members"] if each["alive"] and each["id"] == name), {})


@pytest.mark.hard
@pytest.mark.forked_peers
def test_one_who_helps_sums_and_gives_its_state_when_it_alone_is_left(stage: Any) -> None:
    stage.write_run(min_peers=2)
    stage.coordinate()
    stage.assist("hal")
    stage.join("ann")
    stage.join("bob")
    found = stage.until(
        lambda s: (
            s["version"] >= 2 and s["helping"] == 1 and any(m["helps"] and m["same"] for m in s["members"])
        ),
        "two train, and one who helps has what they made",
    )
    [hal] = [each for each in found["members"] if each["helps"]]
    assert all(hal["name"] not in past["included"] for past in found["rounds"])
    stage.until(lambda s: member(s, hal["id"]).get("tx_bytes", 0) > 0, "it gives results to the others")
    for name in ("ann", "bob"):
        stage.processes[name].send_signal(signal.SIGTERM)
    assert [stage.wait("ann"), stage.wait("bob")] == [0, 0]
    stage.join("cid")
    left = stage.until(
        lambda s: any(m["alive"] and not m["helps"] and m["same"] for m in s["members"]),
        "a newcomer has the state, which one who helps alone had",
    )
    assert left["version"] >= 2 and left["era"] == 0 and left["phase"] == "waiting"
    stage.join("dan")
    stage.until(lambda s: s["version"] > left["version"], "the run goes on from there")
    stage.processes["hal"].send_signal(signal.SIGTERM)
    assert stage.wait("hal") == 0
    report = audit(read_folder(stage.folder))
    assert report.kept, "\n".join(report.lines())
    assert not [each for each in stage.events("hal") if each["event"] == "frozen"]


@pytest.mark.hard
@pytest.mark.forked_peers
@pytest.mark.mode("reach")
def test_two_that_nobody_can_dial_meet_at_the_relay_of_a_third_where_the_host_has_none(stage: Any) -> None:
    stage.write_run(min_peers=3)
    stage.coordinate("--set", "net.relay=off")
    stage.assist("hal", "--relay", "20 Mbit/s")
    stage.join("ann", "--listen", "off")
    stage.join("bob", "--listen", "off")
    found = stage.until(
        lambda s: [each for each in s["relays_offered"] if each["pairs"] and each["moved_bytes"]],
        "bytes pass its relay",
    )
    [offered] = found["relays_offered"]
    assert (offered["on"], offered["bytes_per_s"], offered["why_not"]) == (True, 2_500_000, "")
    ways = {each["id"]: each["way"] for each in found["members"]}
    assert sorted(ways.values()) == ["dialled", "relayed", "relayed"] and ways[offered["peer"]] == "dialled"
    assert found["relay"]["on"] is False and "others can use my relay" in stage.log("hal")
    stage.processes["hal"].send_signal(signal.SIGKILL)
    stage.until(lambda s: not s["relays_offered"], "with its member it is gone")
