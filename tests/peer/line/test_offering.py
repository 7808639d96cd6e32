"""A relay beside an agent: what the coordinator orders of it reaches it, and what it says reaches the beats."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farflung.console.offered_relay import OfferedRelay, offered_relay
from farflung.coordinator.relay.relay_hand import Month
from farflung.peer.line.data_line import DataLine
from farflung.peer.line.reachability import Offering, RelayTerms
from farflung.peer.settings import OwnConfig, own_config
from farflung.protocol.errors import RelayCause, UserError
from farflung.protocol.messages import Tick
from farflung.protocol.mode_words import ReachTick, RelayOffer, RelayOrder
from farflung.protocol.round_words import RelayRoute
from rig.relay_rig import JOINED, RUN, RelayRig
from rig.waiting import eventually

RUN_ID, PUBLIC = b"r" * 16, b"k" * 32
ORDER = RelayOrder(3, 2, PUBLIC, (b"p" * 16,), "it was not tried yet")


@dataclass
class Here:
    """A relay, without one."""

    heard: list[tuple[RelayTerms, tuple[bytes, ...], float]] = field(default_factory=list)
    closed: bool = False

    def follow(self, terms: RelayTerms, pairs: tuple[bytes, ...], clock_ahead_s: float) -> None:
        self.heard.append((terms, pairs, clock_ahead_s))

    def turn(self, now: float) -> RelayOffer:
        return RelayOffer(7000, 5, 0, 1, 2, 3, 4, "why")

    def close(self) -> None:
        self.closed = True


def tick(order: RelayOrder | None, heard_s: float = 1000.0) -> Tick:
    return Tick(
        session=b"s" * 16, seq=1, answers=1, heard_s=heard_s, fragments=(), goal="", reason="", roster_no=0,
        roster=None, leases=None, void=(), era=0, advice="", era_because="", sections=(ReachTick(relay=order),),
    )  # fmt: skip


def test_an_order_is_followed_once_and_the_beat_says_so() -> None:
    here, said = Here(), []
    offering = Offering(here, "me", lambda text, **_: said.append(text))
    assert offering.turn(0.0) == RelayOffer(7000, 5, 0, 1, 2, 3, 4, "why")
    for _ in range(3):
        offering.on_tick(tick(ORDER), RUN_ID, 400.0)
    assert here.heard == [(RelayTerms(RUN_ID, 2, PUBLIC, "me"), ORDER.pairs, 600.0)]
    assert offering.turn(0.0) == RelayOffer(7000, 5, 3, 1, 2, 3, 4, "why")
    offering.on_tick(tick(None), RUN_ID, 400.0)
    offering.on_tick(tick(msgspec.structs.replace(ORDER, number=4, why_not="")), RUN_ID, 400.0)
    assert len(here.heard) == 2 and said == [
        "the relay that I offer is not used: it was not tried yet",
        "others can use my relay",
    ]
    offering.leave()
    offering.on_tick(tick(ORDER), RUN_ID, 400.0)
    assert len(here.heard) == 3, "another coordinator numbers from the beginning"
    offering.close()
    assert here.closed


def test_without_a_relay_nothing_is_offered() -> None:
    offering = Offering(None, "me", lambda text, **_: None)
    offering.on_tick(tick(ORDER), RUN_ID, 0.0)
    assert offering.turn(0.0) is None
    offering.close()


def test_it_listens_for_the_pairs_of_its_order_and_lets_nobody_in_with_a_ticket_for_another_relay(
    tmp_path: Path,
) -> None:
    one, other = b"1" * 32, b"2" * 32
    with RelayRig() as rig:  # whose key signs tickets
        relay = OfferedRelay(
            "127.0.0.1", 0, 1e8, Month.load(tmp_path / "relay.json", 10**9), lambda text: None
        )
        try:
            assert relay.turn(0.0).port == 0 and relay.turn(0.0).why_not == RelayCause.NO_ORDER
            relay.follow(
                RelayTerms(RUN.run_id, RUN.incarnation, rig.public, "hal"), (rig.pair(one, other),), 0.0
            )
            now = [0.0]

            def port() -> int:
                now[0] += 0.05
                return relay.turn(now[0]).port

            eventually(port, "it listens")
            rig.at = port()
            refused = rig.guest(rig.ticket(one, other))
            assert refused.recv(2) == b"\x05\x02", "its ticket is for the coordinator's relay"
            rig.relay = "hal"
            ends = rig.guest(rig.ticket(one, other)), rig.guest(rig.ticket(other, one))
            assert [each.recv(len(JOINED)) for each in ends] == [JOINED, JOINED]
            ends[0].sendall(b"here")
            assert ends[1].recv(4) == b"here"
            eventually(lambda: port() and relay.turn(now[0]).moved_bytes == 4, "it is counted")
            for each in (refused, *ends):
                each.close()
        finally:
            relay.close()


@pytest.mark.parametrize(
    ("limit_bytes", "host", "cause"),
    [(0, "127.0.0.1", RelayCause.MONTH_OVER), (10**9, "203.0.113.7", RelayCause.NOT_OPEN)],
)
def test_why_it_does_not_listen_leaves_this_machine_as_a_code(
    limit_bytes: int, host: str, cause: RelayCause, tmp_path: Path
) -> None:
    """A sentence would name its owner's settings, or what lies on the disk."""
    said: list[str] = []
    relay = OfferedRelay(host, 0, 1e8, Month.load(tmp_path / "relay.json", limit_bytes), said.append)
    try:
        relay.follow(RelayTerms(RUN_ID, 2, PUBLIC, "hal"), (), 0.0)
        offer = relay.turn(0.0)
        if cause is RelayCause.NOT_OPEN:
            eventually(lambda: relay.turn(0.0) and said, "its owner reads why")
            offer = relay.turn(20.0)
        assert (offer.port, offer.why_not) == (0, cause)
    finally:
        relay.close()


@pytest.mark.parametrize(
    ("given", "why"),
    [({"relay": "20 Mbit/s", "listen": "off"}, "leave --listen off away"), ({"relay": "fast"}, "relay: ")],
)
def test_a_relay_that_nobody_could_reach_is_a_users_mistake(
    given: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=why):
        own = own_config({"identity": str(tmp_path / "id.pem"), **given}, {}, tmp_path / "none.toml")
        offered_relay(own, lambda text: None)


@pytest.mark.parametrize("rate", ["", "off"])
def test_without_a_rate_there_is_none(rate: str) -> None:
    assert offered_relay(OwnConfig(relay=rate), lambda text: None) is None


def test_a_relay_is_dialled_in_numbers_and_one_without_a_host_where_the_coordinator_is() -> None:
    line = DataLine.__new__(DataLine)
    line._coordinator = "192.0.2.1"
    ways = (
        RelayRoute("a", 1, "t"),
        RelayRoute("b", 2, "t", "192.0.2.7"),
        RelayRoute("c", 3, "t", "[2001:db8::1]"),
        RelayRoute("d", 4, "t", "x.org"),
    )
    found = {peer: way.relay for peer, way in line.relayed_by(ways).items()}
    assert found == {"a": "192.0.2.1:1", "b": "192.0.2.7:2", "c": "[2001:db8::1]:3"}
