"""The admission's part of the ledger: folded like the rest of it, bounded, and missed where it was taken out."""

from __future__ import annotations

import msgspec
import pytest

from farflung.coordinator.admission.admission import (
    NAME,
    PEERS_KEPT,
    Banned,
    CameByInvitation,
    Invited,
    Register,
    Revoked,
    Unbanned,
)
from farflung.coordinator.ledger import records
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules, packed, unpacked
from farflung.coordinator.ledger.records import Record, Struck, from_bytes, to_bytes
from farflung.coordinator.modes import registry
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import AdmissionSection, Manifest

TOKEN = b"i" * 32
PEOPLE: list[Record] = [
    Invited(digest=TOKEN, uses=3, until_s=100.0, at_s=1.0, note="lab"),
    CameByInvitation(peer="q", digest=TOKEN),
    Revoked(digest=TOKEN, reason="posted", at_s=2.0),
    Struck(peer="q", reason="garbage", at_s=3.0),
    Struck(peer="r", reason="garbage", at_s=3.0),
    Banned(peer="q", reason="garbage", at_s=4.0, until_s=5.0, network="192.0.2.0/24"),
    Banned(peer="s", reason="garbage", at_s=4.0, until_s=9.0),
    Unbanned(peer="s"),
]


def ledger_of(written: list[Record]) -> Ledger:
    ledger = Ledger(LedgerRules(256, 8))
    for record in written:
        ledger.apply(from_bytes(to_bytes(record)))
    return ledger


def test_strikes_and_bans_are_kept_of_a_bounded_number_of_peers() -> None:
    register, ledger = Register(), Ledger(LedgerRules(8, 3))
    for number in range(PEERS_KEPT + 10):
        register.apply(Struck(peer=str(number), reason="x", at_s=0.0), ledger)
        register.apply(Banned(peer=str(number), reason="x", at_s=0.0, until_s=9.0), ledger)
    assert (len(register.strikes), len(register.bans)) == (PEERS_KEPT, PEERS_KEPT)


def test_folded_with_the_ledger_it_is_the_same_and_goes_on() -> None:
    ledger = ledger_of(PEOPLE)
    again = unpacked(packed(ledger), Ledger)
    register: Register = again.parts[NAME]
    assert again == ledger and register == ledger.parts[NAME]
    assert (
        register.guests == {"q"}
        and register.invitations[TOKEN].revoked == "posted"
        and set(register.bans) == {"q"}
    )
    for record in PEOPLE:
        ledger.apply(record)
        again.apply(record)
    assert again == ledger and register.strikes["q"].maxlen == ledger.parts[NAME].strikes["q"].maxlen
    assert again.clock.newest_s == 4.0


def test_a_journal_with_its_records_is_refused_where_it_was_taken_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else whoever is banned would be back, and nobody would notice."""
    folded, [invited, *_] = packed(ledger_of(PEOPLE)), map(to_bytes, PEOPLE)
    monkeypatch.setattr(registry, "found", lambda name: None)
    records._decoder.cache_clear()
    try:
        with pytest.raises(msgspec.ValidationError, match="invited"):
            from_bytes(invited)
        with pytest.raises(msgspec.ValidationError, match=r"installed without: \['admission', "):
            unpacked(folded, Ledger)
    finally:
        records._decoder.cache_clear()


def test_a_run_by_invitation_is_refused_where_it_was_taken_out_and_not_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "found", lambda name: None)
    registry.check(Manifest())
    for rules in ({"mode": "token"}, {"mode": "allowlist"}, {"joins_at_once": 1}):
        wanted = Manifest(admission=AdmissionSection(**rules))  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"\[admission\] of run.toml .* installed without admission"):
            RunMachine(wanted, bytes(16), [], bytes)
