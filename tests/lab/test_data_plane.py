"""Rounds of real peers over lines that are slow, far, cut, or closed from one side."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from farflung.console.bench.bench import BenchOptions
from farflung.protocol.errors import FarflungError
from rig.lab.emulator import HostSpec, Lab
from rig.lab_run import CONGESTION_FILE, Found, LabRun, Setting
from rig.nursery import Nursery
from rig.waiting import LONG_S, PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("lab")]

SMALL = BenchOptions(mb=4, rounds=2, codec="int8", chunk_kb=64)
COORDINATOR = HostSpec("coordinator", 100, 100, delay_ms=5)


@pytest.fixture(scope="module", autouse=True)
def _available() -> None:
    reason = Lab.unavailable()
    if reason:
        pytest.skip(reason)


def setting(
    peers: int, mbit: float, environ: Mapping[str, Mapping[str, str]] | None = None, **options: float | int
) -> Setting:
    hosts = [HostSpec(f"peer-{number}", mbit, mbit, delay_ms=5) for number in range(peers)]
    return Setting(
        replace(SMALL, peers=peers, **options),  # type: ignore[arg-type]
        hosts,
        COORDINATOR,
        environ or {},
        timeout_s=LONG_S,
    )


@pytest.mark.hard
def test_a_congestion_control_that_hosts_may_not_use_is_refused_and_another_holds(nursery: Nursery) -> None:
    with (
        pytest.raises(FarflungError, match=r"use nonsense, but: .*reno"),
        LabRun(replace(setting(2, 50), congestion="nonsense")),
    ):
        pass
    with LabRun(replace(setting(2, 50), congestion="reno"), nursery) as running:
        told = running.lab.hosts["peer-0"].popen(["cat", CONGESTION_FILE], stdout=subprocess.PIPE, text=True)
        assert told.communicate(timeout=PATIENCE_S)[0] == "reno\n"


def plans(found: Found, host: str) -> Iterator[dict[str, int]]:
    """Of each round: the number of chunks that each peer owned at its beginning."""
    for event in found.events[host]:
        if event["event"] == "plan":
            yield dict(zip(event["members"], event["owned"], strict=True))


def is_whole(found: Found, peers: int) -> bool:
    """Every round was committed, with everybody in it, and all ended with the same bytes."""
    decided = [e for events in found.events.values() for e in events if e["event"] == "decided"]
    all_in = all(len(e["weights"]) == peers and min(e["weights"]) > 0 for e in decided)
    return bool(found.result["identical"] and all_in and not found.result["aborted_rounds"])


def test_a_capped_upload_stays_below_its_cap_on_the_wire(nursery: Nursery) -> None:
    limit = {"peer-1": {"FARFLUNG_UPLOAD_LIMIT": "4 Mbit/s"}}
    with LabRun(setting(2, 100, limit, mb=2), nursery) as running:
        found = running.finish()
    assert is_whole(found, 2)
    spans = list(found.transfers("peer-0"))
    assert len(spans) == 2
    # Half a megabyte each.  The cap counts payloads; headers, acknowledgements and beats come on top.  Medians,
    # because a process that stood still for a while begins, or ends, its span late.
    assert statistics.median(end - begin for begin, end in spans) > 0.8
    assert statistics.median(found.wire.rate_mbit("peer-1", 0, begin, end) for begin, end in spans) < 5.0


def test_P3_two_peers_that_cannot_reach_each_other_take_part_all_the_same(nursery: Nursery) -> None:
    with LabRun(replace(setting(3, 50), audits=False), nursery) as running:
        running.lab.cut("peer-0", "peer-1")
        found = running.finish()
    assert is_whole(found, 3)
    # Of the two at least one can't have owned anything to the end, or the other would lack its results.
    moved = any(event["event"] == "moved" for event in found.events["peer-2"])
    a, b = found.peers["peer-0"], found.peers["peer-1"]
    assert moved or all(not (owned[a] and owned[b]) for owned in plans(found, "peer-2"))


@pytest.mark.hard
def test_a_peer_that_nobody_can_dial_takes_part_and_owns_nothing(nursery: Nursery) -> None:
    with LabRun(setting(2, 50, {"peer-1": {"FARFLUNG_ADVERTISE": "10.77.0.2:9"}}), nursery) as running:
        found = running.finish()
    assert is_whole(found, 2)
    assert "can't be dialled at 10.77.0.2:9" in found.log
    hidden = found.peers["peer-1"]
    assert all(owned[hidden] == 0 < sum(owned.values()) for owned in plans(found, "peer-0"))


def test_P3_a_death_in_mid_scatter_costs_no_round_over_a_long_line(nursery: Nursery) -> None:
    with LabRun(setting(3, 10, kill_at=0.5, mb=2), nursery) as running:
        found = running.finish()
    killed = found.result["killed"]
    assert killed["at"] >= 0.5 and killed["survivors"] == 2 and killed["included"] >= 2
    assert found.result["identical"] and found.result["aborted_rounds"] == 0
