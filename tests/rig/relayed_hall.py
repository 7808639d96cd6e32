"""The run machine with members that nobody can dial, on virtual time: for tests of the ways that they are told."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.reach.reach import RelayPairs
from farflung.coordinator.roster.ways import RelayNow, Usage
from farflung.coordinator.run.effects import Effect, Tell
from farflung.protocol import messages as m
from farflung.protocol.round_words import RelayRoute
from rig.guests import Guest
from rig.undialled_hall import Hall

KEY = Ed25519PrivateKey.generate()
RELAY = RelayNow(29802, 6_250_000.0)


def hall_with(*guests: Guest, relay: RelayNow | None = RELAY) -> Hall:
    hall = Hall()
    hall.machine.core.prove = lambda statement: KEY.public_key().public_bytes_raw() + KEY.sign(statement)
    hall.machine.modes["reach"].on_relay(relay, "" if relay else "off", Usage(), 0.0)
    for guest in guests:
        welcome = hall.hello(guest, address="")
        assert isinstance(welcome, m.Welcome)
        guest.session, guest.seq = welcome.session, 0
    return hall


def ways_in(effects: list[Effect], guest: Guest) -> tuple[RelayRoute, ...] | None:
    """In its newest tick that has a roster."""
    found = None
    for effect in effects:
        if isinstance(effect, Tell) and effect.peer == guest.peer and isinstance(effect.message, m.Tick):
            found = effect.message.ways if effect.message.roster is not None else found
    return found


def pairs_in(effects: list[Effect]) -> list[tuple[bytes, ...]]:
    return [effect.pairs for effect in effects if isinstance(effect, RelayPairs)]
