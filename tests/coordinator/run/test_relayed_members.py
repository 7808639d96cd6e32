"""The run machine with members that nobody can dial: who is told of which way, and who owns."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from farflung.coordinator.reach.tickets import pair_of
from farflung.coordinator.reach.ways import ASKED_S, RelayNow, Usage
from farflung.coordinator.run.effects import AnswerDoor, Effect, RelayPairs, Tell
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run.member_status import member_status
from farflung.coordinator.run.status import build_status
from farflung.protocol import messages as m
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest, RunSection
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import Way
from farflung.protocol.signed_words import hello_part
from farflung.protocol.verdicts import Counters
from rig.guests import Guest

KEY = Ed25519PrivateKey.generate()
RELAY = RelayNow(29802, 6_250_000.0)
RUN_ID = bytes(range(16))
MANIFEST = Manifest(run=RunSection(name="demo", min_peers=2, max_peers=4))
MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))


class Hall:
    def __init__(self) -> None:
        self.drawn = 0
        self.effects: list[Effect] = []  # of the last word at the door
        self.machine = RunMachine(MANIFEST, RUN_ID, [], self.random)
        self.machine.start(0.0, 4000)

    def random(self, count: int) -> bytes:
        self.drawn += 1
        return hash_bytes(str(self.drawn).encode())[:count]

    def hello(self, guest: Guest, address: str = "host:1") -> m.ToDoor:
        knocked = self.machine.on_door(
            guest.key, guest.key, m.Knock(protocol=PROTOCOL_VERSION, run="demo"), 0.0
        )
        [challenge] = [each.message for each in knocked if isinstance(each, AnswerDoor)]
        assert isinstance(challenge, m.Challenge)
        bare = m.Hello(
            protocol=PROTOCOL_VERSION, run_id=RUN_ID, identity=guest.identity, key=guest.key, address=address,
            software="test", manifest=MANIFEST.digest, model=MODEL, fragments=(0,), version=-1, digest=b"",
            process=guest.process, token="", signature=b"",
        )  # fmt: skip
        signed = replace(bare, signature=guest.signer.sign(hello_part(bare, challenge.nonce)))
        self.effects = self.machine.on_door(guest.key, guest.key, signed, 0.0)
        [answer] = [each.message for each in self.effects if isinstance(each, AnswerDoor)]
        return answer

    def says(self, guest: Guest, message: m.FromMember) -> list[Effect]:
        return self.machine.on_member(guest.key, message, 0.0)

    def beat(self, guest: Guest, roster_no: int = 0) -> m.Tick:
        guest.seq += 1
        where = m.FragmentBeat(
            fragment=0, version=-1, digest=b"", round_no=0, epoch=0, decision_no=0, ready=False, need=()
        )
        beat = m.Beat(
            session=guest.session, seq=guest.seq, roster_no=roster_no, fragments=(where,), phase="inner", step=0,
            tokens=0, loss=None, tx_bytes=0, rx_bytes=0, up_bytes_per_s=0, down_bytes_per_s=0, have=(), want=0,
            samples=0, rough=False, era=0, saved=-1, unsure=False, leaving=False, data=b"", batch=None,
        )  # fmt: skip
        ticks = [
            each.message
            for each in self.says(guest, beat)
            if isinstance(each, Tell) and each.peer == guest.peer
        ]
        return next(tick for tick in ticks if isinstance(tick, m.Tick))


def hall_with(*guests: Guest, relay: RelayNow | None = RELAY) -> Hall:
    hall = Hall()
    hall.machine.core.prove = lambda statement: KEY.public_key().public_bytes_raw() + KEY.sign(statement)
    hall.machine.on_relay(relay, "" if relay else "off", Usage(), 0.0)
    for guest in guests:
        welcome = hall.hello(guest, address="")
        assert isinstance(welcome, m.Welcome)
        guest.session, guest.seq = welcome.session, 0
    return hall


def ways_in(effects: list[Effect], guest: Guest) -> tuple[Way, ...] | None:
    """In its newest tick that has a roster."""
    found = None
    for effect in effects:
        if isinstance(effect, Tell) and effect.peer == guest.peer and isinstance(effect.message, m.Tick):
            found = effect.message.ways if effect.message.roster is not None else found
    return found


def pairs_in(effects: list[Effect]) -> list[tuple[bytes, ...]]:
    return [effect.pairs for effect in effects if isinstance(effect, RelayPairs)]


def test_both_hear_of_each_other_and_the_relay_hears_first() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_with(ann)
    hall.beat(ann)
    assert not pairs_in(hall.effects)
    welcome = hall.hello(bob, address="")
    assert isinstance(welcome, m.Welcome)
    bob.session, bob.seq = welcome.session, 0
    name = pair_of(ann.key, bob.key)
    assert pairs_in(hall.effects) == [(name,)]
    kinds = [type(effect) for effect in hall.effects]
    assert kinds.index(RelayPairs) < kinds.index(Tell), "or its ticket would be refused once"
    [way] = ways_in(hall.effects, ann) or ()
    assert (way.peer, way.port) == (bob.peer, RELAY.port)
    tick = hall.beat(bob)
    assert tick.roster is not None and [each.peer for each in tick.ways] == [ann.peer]
    assert tick.ways[0].ticket != way.ticket, "each has its own side"
    assert hall.beat(bob, roster_no=tick.roster_no).ways == (), "told once"


def test_whoever_goes_takes_its_pair_along() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_with(ann, bob)
    hall.beat(ann)
    hall.beat(bob)
    bob.seq += 1
    effects = hall.says(bob, m.Leave(session=bob.session, seq=bob.seq, reason="bye"))
    effects += hall.machine.on_timer(1.0)
    assert pairs_in(effects) == [()] and ways_in(effects, ann) == ()


def test_dialled_a_member_needs_no_way_and_not_dialled_it_gets_one() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_with(ann)
    welcome = hall.hello(bob)
    assert isinstance(welcome, m.Welcome)
    bob.session = welcome.session
    assert not pairs_in(hall.effects), "it is tried first"
    effects = hall.machine.on_dialled(bob.peer, bob.session, False, 0.5)
    assert len(pairs_in(effects)[0]) == 1
    ways = hall.machine.core.members.ways
    assert ways.way_of(hall.machine.core.members.alive[bob.peer]) == "relayed"
    effects = hall.machine.on_dialled(bob.peer, bob.session, True, 60.0)
    assert pairs_in(effects) == [()]
    assert hall.machine.core.members.can_own(60.0, [ann.peer, bob.peer]) == {bob.peer}


def test_no_answer_to_the_attempt_is_not_waited_for_long() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_with(ann)
    hall.hello(bob)
    assert not pairs_in(hall.machine.on_timer(ASKED_S / 2))
    assert len(pairs_in(hall.machine.on_timer(ASKED_S))[0]) == 1


def test_without_a_relay_nothing_is_told_and_the_status_says_why() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_with(ann, bob, relay=None)
    assert hall.beat(ann).ways == ()
    core, conductors = hall.machine.core, hall.machine.conductors
    member = core.members.alive[ann.peer]
    shown = member_status(core, conductors, None, member)
    assert (
        shown["way"] == "none"
        and "--listen off" in shown["why_this_way"]
        and "no relay: off" in shown["why_this_way"]
    )
    told = build_status(core, conductors, Counters(), 0.0)["relay"]
    assert told["on"] is False and told["why_not"] == "off"
    hall.machine.on_relay(RELAY, "", Usage(pairs=1, moved_bytes=5), 1.0)
    told = build_status(core, conductors, Counters(), 1.0)["relay"]
    assert (told["on"], told["port"], told["pairs_allowed"], told["pairs"], told["moved_bytes"]) == (
        True,
        29802,
        1,
        1,
        5,
    )
    assert member_status(core, conductors, None, member)["way"] == "relayed"


def test_a_plan_over_the_relay_reckons_with_a_share_of_it() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_with(ann, bob)
    members = hall.machine.core.members
    owners = members.can_own(0.0, [ann.peer, bob.peer])
    assert owners == {ann.peer, bob.peer}
    assert members.ways.share_bytes_per_s([ann.peer, bob.peer], owners) == RELAY.bytes_per_s / 2
