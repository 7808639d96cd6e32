"""A router that is asked to open a port: what is said when, and a small router on loopback."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from farflung.peer.router.opened_port import OpenedPort, may_be_behind_one, router_towards
from farflung.peer.router.port_request import AGAIN_S, LIFETIME_S, SHORTEST_S, PortRequest, Tongue, pcp_map
from rig.fake_router import OUTSIDE, PCP, PMP, FakeRouter
from rig.waiting import eventually

NONCE = bytes(12)


def asking() -> PortRequest:
    return PortRequest("127.0.0.1", 4000, NONCE)


def answered(router: FakeRouter, asked: PortRequest, now: float) -> None:
    for question in asked.due(now):
        reply = router._answer(question, "127.0.0.1")
        if reply:
            asked.hear(reply, now)


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.mark.parametrize(("knows", "tongue"), [((PCP, PMP), Tongue.PCP), ((PMP,), Tongue.PMP)])
def test_a_port_is_opened_kept_open_and_closed(
    router: FakeRouter, knows: tuple[str, ...], tongue: Tongue
) -> None:
    router.knows, router.other_port = knows, 51000
    asked, now = asking(), 10.0
    answered(router, asked, now)
    answered(router, asked, now)  # the second time in the older tongue
    assert asked.tongue == tongue and asked.address == f"{OUTSIDE}:51000"
    assert asked.due(now + LIFETIME_S / 2 - 1) == [], "not before half of its time"
    router.heard = 0
    now += LIFETIME_S / 2
    answered(router, asked, now)
    assert asked.address and asked.due(now + LIFETIME_S / 2 - 1) == []
    assert router.ports == {4000: ("127.0.0.1", 51000, LIFETIME_S)}
    for question in asked.closing():
        router._answer(question, "127.0.0.1")
    assert router.ports == {}


def test_a_router_that_says_nothing_is_asked_in_both_tongues_and_left() -> None:
    asked, now, said = asking(), 0.0, []
    while not asked.why_not:
        said += asked.due(now)
        now += 0.05
        assert now < 3 * sum(AGAIN_S)
    assert said[0] == pcp_map("127.0.0.1", NONCE, 4000, 4000, LIFETIME_S) and said[-1][:2] == b"\0\x02"
    assert "neither PCP nor NAT-PMP" in asked.why_not and asked.due(now + 99) == [] == asked.closing()


def test_a_router_that_says_no_is_believed(router: FakeRouter) -> None:
    router.result = 2
    asked = asking()
    answered(router, asked, 0.0)
    assert "does not allow" in asked.why_not and not asked.address


def test_a_short_lifetime_is_no_reason_to_ask_all_the_time(router: FakeRouter) -> None:
    router.lifetime_s = 1
    asked = asking()
    answered(router, asked, 0.0)
    assert asked.wait_s(0.0) >= SHORTEST_S


def test_a_router_that_falls_silent_is_asked_until_the_end_and_the_port_is_gone(router: FakeRouter) -> None:
    asked = asking()
    answered(router, asked, 0.0)
    times = [now for now in range(0, 2 * LIFETIME_S, 10) if asked.due(float(now))]
    assert 3 <= len(times) < 40 and times[0] == LIFETIME_S / 2 and times[-1] < LIFETIME_S
    assert not asked.address and "any more" in asked.why_not


@pytest.mark.parametrize("knows", [(PCP, PMP), (PMP,)])
def test_the_real_one_on_loopback(knows: tuple[str, ...]) -> None:
    with FakeRouter(knows=knows, other_port=51000) as router:
        opened = OpenedPort("127.0.0.1", 4000, router.port)
        try:
            assert opened.address(20.0) == f"{OUTSIDE}:51000" and not opened.why_not
        finally:
            opened.close()
        eventually(lambda: not router.ports, "it was closed again")


def test_where_nobody_listens_nobody_waits() -> None:
    with FakeRouter() as router:
        port = router.port
    opened = OpenedPort("127.0.0.1", 4000, port)
    try:
        assert opened.address(20.0) == "" and "neither" in opened.why_not
    finally:
        opened.close()


class FakeUPnP:
    """As miniupnpc has it."""

    lanaddr = "192.168.1.2"
    opened: list[int]

    def discover(self) -> int:
        return 1

    def selectigd(self) -> str:
        return "http://192.168.1.1/igd"

    def externalipaddress(self) -> str:
        return OUTSIDE

    def addportmapping(self, port: int, *more: Any) -> bool:
        assert more[:3] == ("TCP", self.lanaddr, port)
        self.opened.append(port)
        return True

    def deleteportmapping(self, port: int, protocol: str) -> None:
        self.opened.remove(port)


def test_upnp_is_the_last_to_be_tried_and_only_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeUPnP, "opened", [], raising=False)
    monkeypatch.setitem(sys.modules, "miniupnpc", types.SimpleNamespace(UPnP=FakeUPnP))
    with FakeRouter(knows=()) as router:
        router.silent = True
        opened = OpenedPort("127.0.0.1", 4000, router.port)
        assert opened.address(20.0) == f"{OUTSIDE}:4000" and FakeUPnP.opened == [4000]
        opened.close()
    assert FakeUPnP.opened == []

    def broken(self: FakeUPnP) -> int:
        raise Exception("No UPnP device discovered")

    monkeypatch.setattr(FakeUPnP, "discover", broken)
    with FakeRouter(knows=()) as router:
        router.silent = True
        opened = OpenedPort("127.0.0.1", 4000, router.port)
        assert opened.address(20.0) == "" and "No UPnP device" in opened.why_not
        opened.close()


ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
tun0\t0000000A\t0100000A\t0003\t0\t0\t0\t000000FF\t0\t0\t0
"""


@pytest.mark.parametrize(
    ("host", "router"),
    [
        ("203.0.113.9", "192.168.1.1"),
        ("192.168.1.77", ""),
        ("10.9.9.9", "10.0.0.1"),
        ("2001:db8::1", ""),
        ("x", ""),
    ],
)
def test_the_router_on_the_way_is_asked_and_no_other(tmp_path: Path, host: str, router: str) -> None:
    routes = tmp_path / "route"
    routes.write_text(ROUTES)
    assert router_towards(host, routes) == router
    assert router_towards(host, tmp_path / "nothing") == ""


@pytest.mark.parametrize(
    ("here", "asks"),
    [("192.168.1.2", True), ("100.64.1.2", True), ("127.0.0.1", False), ("9.9.9.9", False), ("::1", False)],
)
def test_a_machine_with_an_address_of_its_own_asks_nobody(here: str, asks: bool) -> None:
    assert may_be_behind_one(here) == asks
