"""Who may come in, who has to go, and what the operator may ask for.  Virtual time, no sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from farflung.console.operator_commands import folder_of, seconds
from farflung.coordinator.admission import admission
from farflung.coordinator.admission.admission import NEWCOMERS_PER_MINUTE, STRIKE_LASTS_S
from farflung.coordinator.admission.allowlist import Allowlist, parsed
from farflung.coordinator.door.allowance import KEYS_KEPT, Quota
from farflung.coordinator.door.hello_check import HelloPassed
from farflung.coordinator.ledger.ledger import FragmentBook, RunClock
from farflung.coordinator.ledger.records import Record, Started, Struck
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_rules import rules_for
from farflung.coordinator.run.effects import AnswerDoor, Effect, Forbid, Tell, Write
from farflung.coordinator.run.machine import COMES_PER_MINUTE, RESTORED_AHEAD, Entrance, RunMachine
from farflung.coordinator.run.round_driver import found_useless
from farflung.peer.machine.handshake import Handshake, Me, Offer
from farflung.protocol import messages as m
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import AbortCause, UserError, Verdict
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import AdmissionSection, Manifest, RunSection
from farflung.protocol.messages import (
    Ban,
    Bans,
    Drain,
    Invite,
    Invites,
    Kick,
    Pause,
    Reply,
    Resume,
    Revoke,
    Unban,
)
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.process.networks import network_of
from farflung.protocol.round_words import Plan
from farflung.protocol.run_terms import Attached, Known
from farflung.protocol.signed_words import hello_part
from farflung.protocol.signing import name_of
from rig.guests import Guest
from rig.showing import showing

RUN_ID = bytes(range(16))
MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))
DAY_S = 86400.0


class House:
    """A coordinator whose journal is a list: `restart` reads it again."""

    def __init__(self, **rules: object) -> None:
        run = RunSection(name="demo", max_peers=64)
        self.manifest = Manifest(run=run, admission=AdmissionSection(**rules))  # type: ignore[arg-type]
        self.records: list[Record] = []
        self.now = 1000.0
        self.effects: list[Effect] = []
        self.drawn = 0
        self.start()

    def start(self, wall_s: float = 1e9) -> None:
        self.machine = RunMachine(self.manifest, RUN_ID, self.records, self.random)
        self.take(self.machine.start(self.now, 4000, wall_s))

    def random(self, count: int) -> bytes:
        self.drawn += 1
        return hash_bytes(str(self.drawn).encode())[:count]

    def take(self, effects: list[Effect]) -> list[Effect]:
        self.effects = effects
        self.records = [*self.records, *(each.record for each in effects if isinstance(each, Write))]
        return effects

    def ask(self, guest: Guest, message: m.FromDoor) -> m.ToDoor:
        self.take(self.machine.on_door(guest.key, guest.key, message, self.now, guest.comes_from))
        [answer] = [each.message for each in self.effects if isinstance(each, AnswerDoor)]
        return answer

    def hello(self, guest: Guest, token: str = "", signed_by: Guest | None = None) -> m.ToDoor:
        challenge = self.ask(guest, m.Knock(protocol=PROTOCOL_VERSION, run="demo"))
        assert isinstance(challenge, m.Challenge)
        bare = self.bare_hello(guest, token)
        signature = (signed_by or guest).signer.sign(hello_part(bare, challenge.nonce))
        return self.ask(guest, replace(bare, signature=signature))

    def bare_hello(self, guest: Guest, token: str = "") -> m.Hello:
        """Not signed."""
        return m.Hello(
            protocol=PROTOCOL_VERSION,
            run_id=RUN_ID,
            identity=guest.identity,
            key=guest.key,
            address="",
            software="test",
            manifest=self.manifest.digest,
            model=MODEL,
            fragments=(0,),
            version=-1,
            digest=b"",
            process=guest.process,
            token=token,
            signature=b"",
        )

    def join(self, *guests: Guest, token: str = "") -> None:
        for guest in guests:
            welcome = self.hello(guest, token)
            assert isinstance(welcome, m.Welcome), welcome
            guest.session, guest.seq = welcome.session, 0

    def refuses(self, code: str, text: str, answer: m.ToDoor) -> m.Refuse:
        assert isinstance(answer, m.Refuse), answer
        assert (answer.code, text in answer.reason) == (code, True), answer
        return answer

    def beat(self, guest: Guest, version: int = -1, digest: bytes = b"", ready: bool = False) -> list[Effect]:
        guest.seq += 1
        bare = m.FragmentBeat(0, version, digest, 0, 0, 0, ready, ())
        where = showing(self.machine.core.ledger, bare)
        beat = m.Beat(

            session=guest.session, seq=guest.seq, roster_no=0, fragments=(where,), phase="inner", step=0, tokens=0,
            loss=None, tx_bytes=0, rx_bytes=0, up_bytes_per_s=0, down_bytes_per_s=0, have=(), want=0, samples=0,
            rough=False, era=0, saved=-1, unsure=False, leaving=False, data=b"",
        )  # fmt: skip
        return self.take(self.machine.on_member(guest.key, beat, self.now))

    def tick(self, guest: Guest, *where: object) -> m.Tick:
        told = [e.message for e in self.beat(guest, *where) if isinstance(e, Tell) and e.peer == guest.peer]  # type: ignore[arg-type]
        return next(each for each in told if isinstance(each, m.Tick))

    def obey(self, order: object) -> Reply:
        reply, effects = self.machine.obey(order, self.now)  # type: ignore[arg-type]
        self.take(effects)
        return reply

    def invite(self, uses: int = 1, lasts_s: float = DAY_S, note: str = "") -> str:
        return str(self.obey(Invite(uses=uses, lasts_s=lasts_s, note=note)).found["token"])

    def alive(self, guest: Guest) -> bool:
        return guest.peer in self.machine.core.members.alive


# ---- open --------------------------------------------------------------------------------------------------


def test_newcomers_from_one_network_are_let_in_at_a_bounded_rate() -> None:
    house, most = House(), int(NEWCOMERS_PER_MINUTE)
    house.join(*[Guest(number) for number in range(most)])
    refusal = house.refuses("rate", "from your network (192.0.2.0/24)", house.hello(Guest(90, "192.0.2.200")))
    assert 0 < refusal.retry_after_s <= 30.0
    house.join(Guest(91, "192.0.3.1"), Guest(92, "2001:db8::1"), Guest(93, "127.0.0.1"), Guest(94, "::1"))
    house.now += refusal.retry_after_s
    house.join(Guest(90, "192.0.2.200"))


def test_who_comes_back_is_not_held_up_by_the_rate() -> None:
    house, most = House(), int(NEWCOMERS_PER_MINUTE)
    guests = [Guest(number) for number in range(most // 2)]
    house.join(*guests)
    house.start()
    house.join(*[Guest(guest.number, restarts=1) for guest in guests])
    house.join(*[Guest(50 + number) for number in range(most)])
    house.refuses("rate", "more than 30 newcomers a minute", house.hello(Guest(90)))


def test_one_identity_comes_in_only_so_often() -> None:
    house, guest = House(), Guest(1)
    for _ in range(int(COMES_PER_MINUTE)):
        house.join(guest)
    refusal = house.refuses("rate", "came in more than 30 times in a minute", house.hello(guest))
    house.join(Guest(2))  # the others are not held up by it
    house.now += refusal.retry_after_s
    house.join(guest)


def test_so_many_newcomers_fetch_the_model_at_the_same_time() -> None:
    house = House(joins_at_once=2)
    founder = Guest(0)
    house.join(founder)
    genesis = hash_bytes(b"version 0")
    house.beat(founder, 0, genesis)
    house.machine.core.ledger.books[0].version = 1
    house.machine.core.ledger.books[0].digests[1] = genesis
    house.join(Guest(1), Guest(2, "198.51.100.2"))
    house.refuses("busy", "2 newcomers are fetching", house.hello(Guest(3, "203.0.113.3")))
    house.now += 4.0
    second = Guest(2)
    member = house.machine.core.members.members[second.peer]
    member.standings[0].vouched = True
    house.join(Guest(3, "203.0.113.3"))
    house.refuses("busy", "2 newcomers", house.hello(Guest(4, "127.0.0.1")))
    house.now += 10.0
    house.join(Guest(4, "127.0.0.1"))  # who fetches nothing keeps nobody out


def test_networks() -> None:
    assert network_of("::ffff:192.0.2.77") == "192.0.2.0/24"
    assert network_of("2001:db8:1:2::9%eth0") == "2001:db8:1::/48"
    assert [network_of(each) for each in ("127.0.0.1", "::1", "::ffff:127.0.0.9", "", "here")] == [""] * 5


def test_a_quota_comes_back_and_its_table_is_bounded() -> None:
    allowance: Quota[str] = Quota(per_s=2.0, burst=3.0)
    assert [allowance.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert allowance.wait_s("a", 0.0) == 0.5
    assert allowance.take("b", 0.0)
    assert allowance.take("a", 0.5) and not allowance.take("a", 0.5)
    for number in range(KEYS_KEPT + 10):
        allowance.take(str(number), 1.0)
    assert len(allowance._left) == KEYS_KEPT


# ---- by invitation -------------------------------------------------------------------------------------------


def test_without_an_invitation_nobody_comes_in() -> None:
    house = House(mode="token")
    house.refuses("token", "has no invitation (&t=...); ask the host", house.hello(Guest(0)))
    house.refuses("token", "nobody was invited with this invitation", house.hello(Guest(0), "made-up"))


def test_an_invitation_lets_in_so_many_and_each_as_often_as_it_comes() -> None:
    house = House(mode="token")
    token = house.invite(uses=2)
    house.join(Guest(0), Guest(1), token=token)
    house.refuses("token", "used up: it was for 2", house.hello(Guest(2), token))
    house.start()
    house.refuses("token", "used up: it was for 2", house.hello(Guest(2), token))
    house.join(Guest(0, restarts=1))  # with the plain URL: it was let in once
    assert not any(token.encode() in repr(record).encode() for record in house.records), "no token is kept"


def test_an_invitation_ends_by_the_coordinators_clock_whatever_the_wall_clock_says() -> None:
    house = House(mode="token")
    token, long = house.invite(lasts_s=3600.0), house.invite(lasts_s=3 * 3600.0)
    house.now += 3599.0
    house.join(Guest(0), token=token)
    other = house.invite(lasts_s=10.0)
    house.start(wall_s=1e9 - 5e8)  # the wall clock was set back: no time is won by that
    house.now += 10.0
    house.refuses("token", "has expired", house.hello(Guest(1), other))
    house.start(wall_s=1e9 - 5e8 + 3 * 3600.0)  # three hours without a coordinator
    house.refuses("token", "has expired", house.hello(Guest(1), long))


def test_a_revoked_invitation_lets_in_nobody_and_says_why_also_after_a_restart() -> None:
    house, ann = House(mode="token"), Guest(0)
    lab, school = house.invite(uses=9, note="the lab"), house.invite(uses=9, note="school")
    house.join(ann, token=lab)
    told = house.obey(Revoke(which="the lab", reason="it was posted in public")).text
    assert "the 1 that came in by it stay" in told
    house.start()
    why = "revoked by the host of the run: it was posted in public; ask it for another one"
    house.refuses("revoked", why, house.hello(Guest(1), lab))
    house.join(Guest(2), token=school)
    house.join(Guest(0, restarts=1))  # it was let in once, and only its invitation is gone
    listed = house.obey(Invites())
    assert [each["revoked"] for each in listed.found["invitations"]] == ["it was posted in public", None]
    lines = listed.text.splitlines()
    assert "(the lab): 1 of 9 used; revoked: it was posted in public" in lines[0]
    assert f"1 of 9 used ({name_of(Guest(2).identity)}); 24 h more" in lines[1]
    assert not house.obey(Revoke(which="the lab", reason="again")).ok


def test_revoked_with_its_guests_they_have_to_go_and_need_another_one() -> None:
    house, ann, bob = House(mode="token"), Guest(0), Guest(1)
    lab, other = house.invite(uses=9, note="lab"), house.invite()
    house.join(ann, token=lab)
    house.join(bob, token=other)
    url = f"farflung://example.org:7000/demo?k={'A' * 43}&t={lab}"
    assert "sent 1 away" in house.obey(Revoke(which=url, reason="closed", guests=True)).text
    assert list(house.machine.core.members.alive) == [bob.peer]
    house.refuses("revoked", "closed", house.hello(Guest(0, restarts=1), lab))
    house.refuses("token", "has no invitation", house.hello(Guest(0, restarts=1)))
    house.join(Guest(0, restarts=1), token=house.invite())


def test_an_invitation_that_is_not_there_or_could_be_two_is_not_revoked() -> None:
    house = House(mode="token")
    assert house.obey(Invites()).text == "nobody was invited"
    for which in ("", "nothing"):
        assert "no such invitation" in house.obey(Revoke(which=which, reason="x")).text
    house.invite(note="lab")
    house.invite(note="lab")
    assert "name one of them by its id" in house.obey(Revoke(which="lab", reason="x")).text
    first = house.obey(Invites()).found["invitations"][0]["id"]
    assert house.obey(Revoke(which=first, reason="x")).ok
    assert house.obey(Revoke(which="lab", reason="y")).ok, "the one that is left"


def test_the_runs_clock_never_goes_back() -> None:
    clock = RunClock()
    clock.apply(Started(incarnation=1, clock_s=0.0, wall_s=5000.0))
    assert clock.at_start(5060.0) == 60.0
    clock.apply(Started(incarnation=2, clock_s=60.0, wall_s=5060.0))
    assert clock.at_start(4000.0) == 60.0
    clock.apply(Struck(peer="p", reason="", at_s=70.0))
    assert clock.at_start(0.0) == 70.0


# ---- by list -------------------------------------------------------------------------------------------------


def test_only_who_is_on_the_list_comes_in(tmp_path: Path) -> None:
    house, ann, bob = House(mode="allowlist"), Guest(0), Guest(1)
    listed = Allowlist(tmp_path)
    listed.create()
    assert listed.refreshed() == frozenset()
    refusal = house.refuses(
        "not-listed", f"tell the host your id: this peer is {name_of(ann.identity)}", house.hello(ann)
    )
    assert ann.peer in refusal.reason
    listed.path.write_text(f"# friends\n{ann.peer}  Ann's box\nnobody\n", encoding="utf-8")
    house.machine.modes["admission"].allowed = listed.refreshed()
    house.join(ann)
    house.refuses("not-listed", "on its host's list", house.hello(bob))
    listed.path.unlink()
    assert listed.refreshed() == {ann.peer}, (
        "a list that can't be read lets in nobody new, and keeps nobody out"
    )
    assert parsed("x\n\n # y\n" + ann.peer) == (
        frozenset({ann.peer}),
        ["line 1: 'x' is no peer id: 16 of a-z and 2-7"],
    )


# ---- kicks, bans, strikes ------------------------------------------------------------------------------------


def test_who_is_kicked_goes_and_may_come_again() -> None:
    house, ann = House(), Guest(0)
    house.join(ann)
    name = name_of(ann.identity)
    assert house.obey(Kick(who=name, reason="a test")).text.startswith(f"sent {name} ({ann.peer}) away")
    [gone] = [e.message for e in house.effects if isinstance(e, Tell) and isinstance(e.message, m.Gone)]
    assert gone.final and "a test" in gone.reason
    assert Forbid(ann.key, cut=True) in house.effects and not house.alive(ann)
    assert not house.obey(Kick(who=name, reason="again")).ok
    house.join(Guest(0, restarts=1))


def test_a_ban_holds_over_restarts_and_ends() -> None:
    house, ann, bob = House(), Guest(0), Guest(1, "198.51.100.1")
    house.join(ann, bob)
    house.obey(Ban(who=ann.peer[:6], reason="it lies", lasts_s=3600.0))
    assert not house.alive(ann) and house.alive(bob)
    house.start()
    told = house.refuses(
        "banned", "banned from the run for 60 min more: it lies", house.hello(Guest(0, restarts=1))
    )
    assert told.retry_after_s == 0.0
    house.join(Guest(2))  # its neighbour
    assert ann.peer in house.obey(Bans()).text
    house.now += 3601.0
    house.join(Guest(0, restarts=2))


def test_a_network_can_be_banned_with_a_peer_and_both_unbanned() -> None:
    house, ann, neighbour, bob = House(), Guest(0), Guest(1, "192.0.2.9"), Guest(2, "198.51.100.1")
    house.join(ann, neighbour, bob)
    house.obey(Ban(who=ann.peer, reason="a herd", lasts_s=3600.0, network=True))
    assert [house.alive(each) for each in (ann, neighbour, bob)] == [False, False, True]
    house.refuses("banned", "the network 192.0.2.0/24 is banned", house.hello(Guest(3, "192.0.2.50")))
    house.obey(Unban(who=ann.peer))
    house.join(Guest(3, "192.0.2.50"), Guest(0, restarts=1))
    assert house.obey(Bans()).text == "nobody is banned, and nobody has strikes"


def test_names_that_fit_nobody_or_several_are_said() -> None:
    house = House()
    house.join(Guest(0), Guest(1))
    assert "nobody called 'zzz' was ever here" in house.obey(Kick(who="zzz", reason="")).text
    assert "nobody called 'zzz' is banned" in house.obey(Unban(who="zzz")).text
    house.machine.core.ledger.peers.names[Guest(1).peer] = name_of(Guest(0).identity)
    assert "name one of them by its id" in house.obey(Kick(who=name_of(Guest(0).identity), reason="")).text


def test_strikes_add_up_to_a_ban_and_are_forgotten_after_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BAN_STRIKES", 2)
    house, ann = House(), Guest(0)
    house.join(ann)
    house.take(house.machine.on_garbage(ann.peer, ann.session, house.now))
    assert house.alive(ann)
    house.now += STRIKE_LASTS_S
    house.beat(ann)
    house.take(house.machine.on_garbage(ann.peer, ann.session, house.now))
    assert house.alive(ann), "the first one is a day old"
    house.start()
    again = Guest(0, restarts=1)
    house.join(again)
    house.take(house.machine.on_garbage(again.peer, again.session, house.now))
    assert not house.alive(again), "strikes outlive the coordinator"
    house.refuses("banned", "2 strikes, the last one: it sent frames", house.hello(Guest(0, restarts=2)))


def test_who_speaks_in_the_name_of_another_is_struck_and_the_other_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "BAN_STRIKES", 1)
    house, victim, thief = House(), Guest(0), Guest(1)
    house.join(victim, thief)
    forged = Guest(0)
    forged.session, forged.seq = victim.session, 50
    leave = m.Leave(session=victim.session, seq=50, reason="")
    house.take(house.machine.on_member(thief.key, leave, house.now))
    assert house.alive(victim) and not house.alive(thief)


def test_a_forged_hello_counts_against_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BAN_STRIKES", 1)
    house, victim, thief = House(), Guest(0), Guest(1)
    house.refuses("signature", "not signed", house.hello(victim, signed_by=thief))
    house.join(victim)
    assert house.obey(Bans()).text == "nobody is banned, and nobody has strikes"


def test_the_doorkeepers_word_for_a_signature_is_not_taken() -> None:
    """That process talks to strangers, who may have taken it over."""
    house, guest, other = House(), Guest(0), Guest(1)
    challenge = house.ask(guest, m.Knock(protocol=PROTOCOL_VERSION, run="demo"))
    assert isinstance(challenge, m.Challenge)
    bare = house.bare_hello(guest)
    entrance = Entrance(house.machine.core)
    for signer, code in ((other, "signature"), (guest, "")):
        hello = replace(bare, signature=signer.signer.sign(hello_part(bare, challenge.nonce)))
        found = entrance.refuses(HelloPassed(hello, challenge.nonce, guest.comes_from))
        assert (found.code if isinstance(found, m.Refuse) else "") == code


def in_flight(*members: str) -> Round:
    plan = Plan(1, 1, 0, members, tuple(range(len(members))), ("fp32",) * len(members))
    return Round(plan, rules_for(Manifest(), FragmentBook(), plan.members), 0.0)


def test_the_word_of_one_member_strikes_nobody() -> None:
    flight, of_two = in_flight("ann", "bob", "cyd", "dan"), in_flight("ann", "dan")
    report = m.ProgressReport(
lengths=b"", got_by={},
        session=bytes(16), seq=1, round_no=1, decision_no=0, held={}, refused={"dan": Verdict.BAD_HASH}, cut_off=(),
        merged=b"", merged_hashes=b"", got=b"", got_hash=bytes(32), dots=None, inputs=b"", signature=b"",
    )  # fmt: skip
    flight.on_progress("ann", report)
    assert flight.scatter.barred == {} and found_useless(flight) == []
    flight.on_progress("bob", report)
    assert flight.scatter.barred.keys() == {"dan"} and found_useless(flight) == ["dan"]
    of_two.on_progress("ann", report)
    assert of_two.scatter.barred.keys() == {"dan"} and found_useless(of_two) == [], (
        "all of the others are one"
    )


# ---- pause, drain --------------------------------------------------------------------------------------------


def ready_house() -> tuple[House, Guest, bytes]:
    house, ann, genesis = House(), Guest(0, "127.0.0.1"), hash_bytes(b"version 0")
    house.join(ann)
    house.beat(ann, 0, genesis)
    house.machine.core.members.members[ann.peer].contact = replace(
        house.machine.core.members.members[ann.peer].contact, address="host:1"
    )
    return house, ann, genesis


def test_a_paused_run_opens_no_round_says_why_and_stays_paused_over_a_restart() -> None:
    house, ann, genesis = ready_house()
    house.obey(Pause(reason="the disk is full"))
    tick = house.tick(ann, 0, genesis, True)
    assert (tick.goal, tick.reason) == (
        "alone",
        "the host paused the run (the disk is full); training goes on alone",
    )
    assert house.machine.drivers[0].round is None
    house.start()
    assert house.machine.core.held
    assert house.obey(Resume()).ok and not house.machine.core.held
    assert not house.obey(Resume()).ok


def test_resume_opens_the_round_that_was_held() -> None:
    house, ann, genesis = ready_house()
    house.obey(Pause(reason=""))
    house.beat(ann, 0, genesis, True)
    house.obey(Resume())
    assert house.machine.drivers[0].round is not None


def test_drain_waits_for_the_round_in_flight_and_takes_nobody_in() -> None:
    house, ann, genesis = ready_house()
    house.beat(ann, 0, genesis, True)
    assert house.machine.drivers[0].round is not None
    house.obey(Drain())
    assert not house.machine.drained
    refusal = house.refuses("draining", "is about to end", house.hello(Guest(1)))
    assert refusal.retry_after_s > 0
    house.machine.drivers[0].abort(AbortCause.TIMED_OUT, "a test")
    house.take(house.machine.on_timer(house.now))
    assert house.machine.drained and house.machine.drivers[0].round is None


# ---- the command line ----------------------------------------------------------------------------------------


def test_times_and_places_of_the_command_line(tmp_path: Path) -> None:
    assert [seconds(each) for each in ("90m", "24h", "7d", "1.5h", "30s")] == [5400, 86400, 604800, 5400, 30]
    for wrong in ("", "24", "h", "0h", "-1h", "1w"):
        with pytest.raises(UserError, match="is no time"):
            seconds(wrong)
    (tmp_path / "run.data").mkdir()
    assert folder_of(tmp_path / "run.toml") == folder_of(tmp_path / "run.data") == tmp_path / "run.data"
    with pytest.raises(UserError, match="there is no data folder"):
        folder_of(tmp_path / "other.toml")


# ---- one coordinator at a time --------------------------------------------------------------------------------


def test_a_restored_coordinator_is_far_ahead_and_nobody_follows_the_one_before() -> None:
    house = House()
    house.join(Guest(0))
    machine = RunMachine(house.manifest, RUN_ID, house.records, house.random)
    machine.start(house.now, 4000, restored=True)
    assert machine.core.ledger.incarnation == house.machine.core.ledger.incarnation + RESTORED_AHEAD
    me = Me("p", "n", b"", b"", bytes(16), "test", lambda message: bytes(64))
    doorway = Handshake(me, "demo")
    for incarnation, follows in ((1001, True), (3, False), (1002, True)):
        doorway.greet(Offer(Attached(Known(house.manifest, RUN_ID), MODEL), ""), -1, b"", 0.0)
        welcome = m.Welcome(
            session=bytes(16),
            incarnation=incarnation,
            member_port=1,
            fragments=(0,),
            roster=(),
            whereabouts=b"",
        )
        assert doorway.on_welcome(welcome) == follows
