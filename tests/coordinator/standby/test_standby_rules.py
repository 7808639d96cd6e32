"""What is decided without a store: how a URL reads, when a lease is over, what a standby says and when it claims."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.standby.etcd_store import StoreLease
from farflung.coordinator.standby.etcd_url import StoreUrl
from farflung.coordinator.standby.standby_rules import (
    Leading,
    ShowLeader,
    Sight,
    StandbyNote,
    StandbyRules,
    StoredRun,
    TryToLead,
)
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import Address, Whereabouts
from farflung.protocol.signing import curve_key_of

SECRET = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = SECRET.public_key().public_bytes_raw()
KEY = curve_key_of(PUBLIC)
KEPT = StoredRun(b"r" * 16, KEY, b"{}")
HERE, THERE = Address("b.example", 1), Address("a.example", 1)


def waiting() -> StandbyRules:
    return StandbyRules("etcd://h", KEY, "demo", (HERE,))


def told(*places: Address) -> bytes:
    said = Whereabouts("demo", 1, 0, tuple(map(str, places)), 0, b"")
    return said.signed(lambda statement: PUBLIC + SECRET.sign(statement)).raw


# ---- the URL -----------------------------------------------------------------------------------------------------


def test_a_store_url_is_read_as_it_was_meant() -> None:
    url = StoreUrl.parse("etcds://me:p%40ss@h1,[::1]:7,h1:2379/runs/demo?lease_s=10", "demo")
    assert url.members == (Address("h1", 2379), Address("::1", 7)) and url.tls and url.lease_s == 10
    assert (url.user, url.password, url.prefix) == ("me", "p@ss", "runs/demo")
    assert str(url) == "etcds://me@h1:2379,[::1]:7/runs/demo?lease_s=10" and "p@ss" not in repr(url)
    assert str(StoreUrl.parse("etcd://h/", "demo")) == "etcd://h:2379/farflung/demo"


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "expected etcd://HOST:PORT"),
        ("http://h:1", "expected etcd://HOST:PORT"),
        ("etcd://", "no host"),
        ("etcd://h:99999", "port 99999 is out of range"),
        ("etcd://me@h", "USER:PASSWORD"),
        ("etcd://me:hunter2@h:x", "port"),
        ("etcd://h/a b", "a prefix is made of"),
        ("etcd://h/../x/" + "y/" * 9, "a prefix is made of"),
        ("etcd://h?lease=3", "lease_s=N alone"),
        ("etcd://h?lease_s=1", "from 2 to 600"),
        ("etcd://" + ",".join(f"h{n}" for n in range(10)), "at most 9"),
    ],
)
def test_a_wrong_store_url_is_one_line_without_the_password(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as error:
        StoreUrl.parse(text, "demo")
    assert "hunter2" not in str(error.value) and "\n" not in str(error.value)


# ---- the lease ---------------------------------------------------------------------------------------------------


def test_a_lease_counts_from_the_moment_of_the_question() -> None:
    """So that it is over here before it is over there."""
    lease = StoreLease(asked_at=100.0, length_s=3.0)
    assert not lease.why_over(102.9) and "did not renew its lease of 3 s" in lease.why_over(103.0)
    lease.on_answer(asked_at=101.0, left_s=3.0)
    assert not lease.why_over(103.9) and lease.why_over(104.0) and lease.left_s(102.0) == 2.0
    lease.on_answer(asked_at=100.5, left_s=3.0)  # an old answer takes nothing back
    assert not lease.why_over(103.9)


def test_a_lease_that_the_store_does_not_know_is_over() -> None:
    lease = StoreLease(100.0, 3.0)
    lease.on_answer(100.1, 0.0)
    assert lease.why_over(100.2) == "its lease ran out at the store" and lease.left_s(100.2) == 0.0


# ---- standing by -------------------------------------------------------------------------------------------------


def test_who_finds_no_leader_claims_the_lead() -> None:
    assert waiting().on_sight(Sight(None, None)) == [ShowLeader(b""), TryToLead()]
    assert waiting().on_sight(Sight(KEPT, None)) == [ShowLeader(b""), TryToLead()]


def test_a_standby_says_once_who_leads_and_claims_nothing() -> None:
    one, leading = waiting(), Leading("anna", b"", 7, "1")
    says, shows = one.on_sight(Sight(KEPT, leading))
    assert isinstance(says, StandbyNote) and "stands by: anna leads" in says.text and shows == ShowLeader(b"")
    assert one.on_sight(Sight(KEPT, leading)) == []
    at_its_place = Leading("anna", told(THERE, HERE), 7, "1")
    assert one.on_sight(Sight(KEPT, at_its_place)) == [ShowLeader(told(THERE, HERE))]
    assert one.on_sight(Sight(KEPT, None)) == [ShowLeader(b""), TryToLead()]
    again = one.on_sight(Sight(KEPT, Leading("carl", told(THERE, HERE), 9, "2")))
    assert isinstance(again[0], StandbyNote) and "carl leads" in again[0].text


def test_a_standby_that_peers_are_not_told_of_says_so() -> None:
    steps = waiting().on_sight(Sight(KEPT, Leading("anna", told(THERE), 7, "1")))
    assert any(
        isinstance(each, StandbyNote) and "peers are not told of b.example:1" in each.text for each in steps
    )


def test_a_store_that_is_silent_is_told_once_and_nobody_leads() -> None:
    one = waiting()
    [says] = one.on_silence("no answer")
    assert isinstance(says, StandbyNote) and "cannot see who leads: no answer" in says.text
    assert one.on_silence("no answer") == []
    [says, *_] = one.on_sight(Sight(KEPT, Leading("anna", b"", 7, "1")))
    assert isinstance(says, StandbyNote) and "answers again" in says.text


@pytest.mark.parametrize(
    "then, why",
    [
        (Sight(None, None), "the records of run 7272.* are gone from there"),
        (Sight(StoredRun(b"s" * 16, KEY, b"{}"), None), "another run has taken the place"),
        (
            Sight(StoredRun(b"r" * 16, b"k" * 32, b"{}"), None),
            "began with another coordinator.key; copy that file",
        ),
    ],
)
def test_a_standby_takes_over_nothing_but_its_run(then: Sight, why: str) -> None:
    one = waiting()
    one.on_sight(Sight(KEPT, Leading("anna", b"", 7, "1")))
    with pytest.raises(UserError, match=why):
        one.on_sight(then)
