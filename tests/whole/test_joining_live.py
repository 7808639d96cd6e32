"""A joiner and its donors: what a crash of the joiner costs, and that donors put rounds first."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from torch import Tensor

from farflung.checkpoints.fetcher import (
    ASKED_OF_ONE_DONOR,
    LATER_BELIEVED_S,
    RESULTS_IN_FLIGHT_BYTES,
    Most,
    RequestBudget,
    Sources,
)
from farflung.checkpoints.kept_state import Arrived, ChunkArrivals
from farflung.checkpoints.state_sync import StateSync
from farflung.collectives.round.effects import Install, SendFrame
from farflung.peer.agent.turns import (
    HELD_MOST_S,
    IDLE_S,
    LATE_MOST_S,
    LEAST_PART,
    PIECES_AWAY,
    UNFILLED_EVERY_S,
    UNKNOWN_EVERY_S,
    USUAL_PIECE_BYTES,
    LineNow,
    Serving,
)
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.errors import StoreError
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Commit
from farflung.simulator.scenario import Scenario
from farflung.simulator.trainer import VirtualTrainer, initial_values
from farflung.simulator.world import World

TAG = bytes(8)
CHUNKS = 12
STATE = [f"state {chunk}".encode() for chunk in range(CHUNKS)]
DIGEST = root_of([b"".join(map(hash_bytes, STATE))])

# ---- what has arrived stays -------------------------------------------------------------------------------------


def arrivals(path: Path, what: bytes = b"run and model") -> ChunkArrivals:
    return ChunkArrivals(path / "x.pieces", what, chunks=4, chunk_bytes=8)


def test_what_had_arrived_is_there_after_a_crash(tmp_path: Path) -> None:
    before = arrivals(tmp_path)
    before.put(1, Arrived(0, 0, DIGEST), b"12345678")
    before.put(3, Arrived(7, 2, b""), b"abcdefgh")
    before.put(3, Arrived(8, 2, b""), b"ABCDEFGH")
    before.close()
    after = arrivals(tmp_path)
    assert after.known() == {1: Arrived(0, 0, DIGEST), 3: Arrived(8, 2, b"")}
    assert [after.get(chunk) for chunk in range(4)] == [None, b"12345678", None, b"ABCDEFGH"]
    after.forget(1)
    assert set(after.known()) == {3} and after.get(1) is None
    after.remove()
    assert not list(tmp_path.iterdir())


def test_a_torn_piece_is_no_piece(tmp_path: Path) -> None:
    before = arrivals(tmp_path)
    before.put(0, Arrived(1, 0, b""), b"12345678")
    before.put(2, Arrived(1, 0, b""), b"12345678")
    before.close()
    raw = bytearray((tmp_path / "x.pieces").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "x.pieces").write_bytes(raw)
    after = arrivals(tmp_path)
    assert after.get(0) == b"12345678" and after.get(2) is None
    after.close()
    (tmp_path / "x.pieces").write_bytes(raw[:-3])
    assert arrivals(tmp_path).get(2) is None


def test_pieces_of_another_model_are_not_taken_and_two_processes_do_not_share_them(tmp_path: Path) -> None:
    before = arrivals(tmp_path)
    before.put(0, Arrived(1, 0, b""), b"12345678")
    with pytest.raises(StoreError):
        arrivals(tmp_path)
    before.close()
    assert arrivals(tmp_path, b"another model").known() == {}


def test_P4_a_recalled_piece_is_taken_only_under_the_digest_that_it_came_with() -> None:
    catch = StateSync(Fragment(number=0, first=0, count=CHUNKS), TAG, 1.0, 2)
    catch.on_run_state(4, {4: DIGEST}, ("ann",), keep=3)
    other = root_of([b"of a version that was founded anew"])
    catch.chunks.recalled({0: (4, DIGEST), 1: (4, other), 2: (3, b""), 3: (9, b""), 99: (4, DIGEST)})
    assert catch.chunks.versions[:5] == [4, -1, 3, -1, -1]
    asked = [e.frame.header for e in catch.ask(0.0) if isinstance(e, SendFrame)]
    assert {header.chunk for header in asked if header.kind == Kind.WANT_STATE}.isdisjoint({0, 2})
    catch.on_run_state(8, {8: DIGEST}, ("ann",), keep=3)
    assert catch.chunks.versions[0] == -1, "nobody keeps the results that it would need"


# ---- a donor that has a round to do ------------------------------------------------------------------------------

BUSY = LineNow(in_round=True, waiting_bytes=10, room_bytes=100, piece_s=0.2)
WAITS = LineNow(in_round=True, waiting_bytes=0, room_bytes=100, piece_s=0.2)
FREE = LineNow(in_round=False, waiting_bytes=0, room_bytes=100, piece_s=0.2)


def want(chunk: int, kind: Kind = Kind.WANT_STATE) -> Frame:
    return Frame(Header(kind, TAG, chunk=chunk))


def passed(serving: Serving, line: LineNow, now: float) -> int | None:
    held = serving.next(lambda held: True, line, now)
    return held.frame.header.chunk if held is not None else None


def test_while_a_round_needs_the_line_state_waits() -> None:
    serving = Serving(fragments=1)
    for chunk in range(3):
        serving.hold("ann", want(chunk), 0.0)
    assert passed(serving, BUSY, 0.1) is None and passed(serving, WAITS, 0.2) is None
    assert passed(serving, FREE, 0.3) == 0, "the round is over"
    full = LineNow(in_round=False, waiting_bytes=100, room_bytes=100, piece_s=0.2)
    assert passed(serving, full, 0.4) is None, (
        "no more than the line takes: the next round may begin at any time"
    )
    assert passed(serving, FREE, 0.5) == 1


def test_what_a_round_leaves_of_the_line_is_used() -> None:
    serving = Serving(fragments=1)
    serving.hold("ann", want(0), 0.0)
    assert passed(serving, BUSY, 1.0) is None
    assert passed(serving, WAITS, 1.0 + 0.9 * IDLE_S) is None
    assert passed(serving, WAITS, 1.0 + 1.1 * IDLE_S) == 0


def test_beside_microbatches_joiners_get_a_quarter_of_the_line() -> None:
    """They cross for most of the time: a fiftieth, as beside rounds, would let nobody in."""
    crossing = LineNow(in_round=False, waiting_bytes=10, room_bytes=100, piece_s=0.2, crossings=True)
    both = LineNow(in_round=True, waiting_bytes=10, room_bytes=100, piece_s=0.2, crossings=True)
    serving = Serving(fragments=1)
    for chunk in range(5):
        serving.hold("ann", want(chunk), 0.0)
    assert passed(serving, crossing, 0.7) is None and passed(serving, crossing, 0.9) == 0
    assert passed(serving, crossing, 1.6) is None and passed(serving, crossing, 1.8) == 1
    assert passed(serving, both, 6.0) is None and passed(serving, both, 12.0) == 2, "a round goes before both"
    quiet = LineNow(in_round=False, waiting_bytes=0, room_bytes=100, piece_s=1.0, crossings=True)
    assert passed(serving, quiet, 12.0 + 3.9) is None and passed(serving, quiet, 12.0 + 4.1) == 3
    unknown = LineNow(in_round=False, waiting_bytes=10, room_bytes=100, piece_s=0.0, crossings=True)
    assert passed(serving, unknown, 17.0) is None and passed(serving, unknown, 17.2) == 4


def slept(serving: Serving, *spans: tuple[bool, float]) -> float:
    """Rounds and pauses, of so many seconds each; returns when they ended."""
    now = 0.0
    for in_round, lasted_s in spans:
        serving.on_turn(in_round, lambda: FREE, now)
        now += lasted_s
    return now


def test_nothing_large_is_given_just_before_the_next_round_and_all_is_again_if_it_does_not_come() -> None:
    serving, lead_s = Serving(fragments=1), PIECES_AWAY * FREE.piece_s
    ended = slept(serving, (True, 5.0), (False, 20.0), (True, 5.0))
    serving.on_turn(False, lambda: FREE, ended)
    for chunk in range(3):
        serving.hold("ann", want(chunk), ended)
    assert passed(serving, FREE, ended + 20.0 - 1.1 * lead_s) == 0
    assert passed(serving, FREE, ended + 20.0 - 0.9 * lead_s) is None, "it would still be on its way"
    assert passed(serving, FREE, ended + 20.0 + 1.0) is None, "it may be a little late"
    assert passed(serving, FREE, ended + 20.0 + LATE_MOST_S) == 1


def test_pauses_of_several_fragments_are_all_remembered_and_short_ones_are_used_by_half() -> None:
    serving = Serving(fragments=1)
    ended = slept(serving, (True, 1.0), (False, 0.6), (True, 1.0), (False, 9.0), (True, 1.0))
    serving.on_turn(False, lambda: FREE, ended)
    near = {
        tenth / 10
        for tenth in range(120)
        if serving.next_round.is_near(PIECES_AWAY * FREE.piece_s, ended + tenth / 10)
    }
    assert min(near) == 0.3, "half of the short pause is used"
    assert 0.7 not in near and 7.3 not in near and {7.5, 9.0, 9.8} < near and 10.0 not in near


def test_a_round_s_results_leave_before_state_does() -> None:
    serving = Serving(fragments=1)
    serving.on_turn(True, lambda: BUSY, 0.0)
    serving.hold("ann", want(0), 0.0)
    still = LineNow(in_round=False, waiting_bytes=10, room_bytes=100, piece_s=0.2)
    serving.on_turn(False, lambda: still, 1.0)
    assert passed(serving, still, 1.0) is None, "others still wait for them"
    serving.on_turn(False, lambda: FREE, 1.1)
    serving.on_turn(False, lambda: still, 1.2)
    assert passed(serving, still, 1.2) == 0, "what waits now is state"


@pytest.mark.parametrize(
    ("piece_s", "waiting_bytes", "apart_s"),
    [(0.5, 10, 25.0), (0.002, 10, 0.1), (0.0, 10, UNKNOWN_EVERY_S), (0.0, 0, UNFILLED_EVERY_S)],
    ids=["slow", "fast", "unknown", "never filled"],
)
def test_rounds_without_end_starve_nobody_and_joiners_take_turns(
    piece_s: float, waiting_bytes: int, apart_s: float
) -> None:
    """On a fast line small pieces take no longer than their part of it: a run whose rounds follow each other at once
    forgets its results within a second, and a piece in five seconds brought nobody in.  Such rounds never fill the
    line, and so nobody knows how fast it is."""
    serving, now, given = Serving(fragments=1), 0.0, []
    for chunk in range(3):
        serving.hold("ann", want(chunk), now)
    serving.hold("bob", want(7), now)
    line = LineNow(in_round=True, waiting_bytes=waiting_bytes, room_bytes=100, piece_s=piece_s)
    while len(given) < 3:
        if (chunk := passed(serving, line, now)) is not None:
            given.append((now, chunk))
        now += apart_s / 50
    assert [chunk for _, chunk in given][:2] == [0, 7]
    assert all(apart_s <= b[0] - a[0] <= 1.1 * apart_s for a, b in pairwise(given))


def test_P6_a_slow_donor_gives_pieces_in_rounds_without_end_though_its_questions_are_forgotten_meanwhile() -> (
    None
):
    """A piece of 3 s waits for 150 s in such rounds.  Nobody waits so long for one question, and each new one began the
    waiting anew: a joiner whose donors were all slow got nothing, ever."""
    serving, now, given = Serving(fragments=1), 0.0, []
    line = LineNow(in_round=True, waiting_bytes=10, room_bytes=100, piece_s=3.0)
    while now < 3600.0:
        serving.let_go(now)
        serving.hold("ann", want(0), now)
        given += [now] if passed(serving, line, now) is not None else []
        now += 5.0
    apart = [b - a for a, b in pairwise(given)]
    assert len(given) >= 20 and min(apart) >= 3.0 / LEAST_PART


def test_P6_a_newer_question_for_a_list_is_no_double_of_an_older_one() -> None:
    serving = Serving(fragments=1)
    older, newer = (Frame(Header(Kind.WANT_MANIFEST, TAG, version=version)) for version in (4, 5))
    assert serving.hold("ann", older, 0.0) and serving.hold("ann", newer, 0.5)
    assert not serving.hold("ann", newer, 0.6) and serving.held == 2


@pytest.mark.parametrize(("waiting_bytes", "usual_s"), [(10, UNKNOWN_EVERY_S), (0, UNFILLED_EVERY_S)])
def test_small_pieces_wait_for_their_part_of_what_usual_ones_wait(waiting_bytes: int, usual_s: float) -> None:
    """One of 32 KB in 50 ms was 640 KB/s, on a loopback, and no joiner kept up with rounds of half a second."""
    serving, small = Serving(fragments=1), USUAL_PIECE_BYTES // 64
    line = LineNow(in_round=True, waiting_bytes=waiting_bytes, room_bytes=0, piece_s=0.0, piece_bytes=small)
    for chunk in range(3):
        serving.hold("ann", want(chunk), 0.0)
    assert (
        passed(serving, line, 0.9 * usual_s / 64) is None and passed(serving, line, 1.1 * usual_s / 64) == 0
    )
    large = replace(line, piece_bytes=16 * USUAL_PIECE_BYTES)
    assert passed(serving, large, 0.9 * usual_s) is None and passed(serving, large, 1.2 * usual_s) == 1


def test_small_answers_wait_for_no_round_and_nothing_is_given_that_is_not_there() -> None:
    serving = Serving(fragments=1)
    serving.hold("ann", want(0), 0.0)
    serving.hold("ann", want(0, Kind.WANT_MANIFEST), 0.0)
    assert serving.next(lambda held: False, FREE, 0.1) is None, "a commit is just being applied"
    held = serving.next(lambda held: True, BUSY, 0.2)
    assert held is not None and held.frame.header.kind == Kind.WANT_MANIFEST


def test_P8_what_waits_is_bounded_told_of_and_forgotten() -> None:
    serving = Serving(fragments=1)
    for chunk in range(100):
        serving.hold("mal", want(chunk), 0.0)
    serving.hold("mal", want(0), 0.0)
    serving.hold("ann", want(0), 0.5)
    told = serving.to_put_off(1.2)
    assert len(told) == 2 * ASKED_OF_ONE_DONOR and not serving.to_put_off(1.3)
    assert {held.to for held in serving.to_put_off(1.6)} == {"ann"}
    assert serving.let_go(HELD_MOST_S + 0.1) == 2 * ASKED_OF_ONE_DONOR
    assert passed(serving, FREE, HELD_MOST_S + 0.1) == 0 and not serving.held


# ---- and its joiner ------------------------------------------------------------------------------------------------


class Joiner:
    """`good` answers at once; `late` answers when it is told to."""

    def __init__(self, *donors: str) -> None:
        self.catch = StateSync(Fragment(number=0, first=0, count=CHUNKS), TAG, 1.0, 2)
        self.catch.on_run_state(1, {1: DIGEST}, donors, keep=3)
        self.installed: list[int] = []
        self.open: dict[int, Header] = {}

    def turn(self, now: float) -> None:
        for effect in self.catch.ask(now):
            if isinstance(effect, SendFrame):
                if effect.to == "good":
                    self.answer("good", effect.frame.header)
                elif effect.frame.header.kind == Kind.WANT_STATE:
                    self.open[effect.frame.header.chunk] = effect.frame.header

    def answer(self, donor: str, asked: Header) -> None:
        header = Header(Kind.STATE, TAG, version=1, chunk=asked.chunk)
        frame = with_payload(header, STATE[asked.chunk])
        if asked.kind == Kind.WANT_MANIFEST:
            header = Header(Kind.MANIFEST, TAG, version=1)
            frame = with_payload(header, b"".join(map(hash_bytes, STATE)))
        self.catch.on_frame(donor, frame)
        self.installed += [effect.chunk for effect in self.catch.chunks.roll() if isinstance(effect, Install)]

    def put_off(self) -> None:
        for asked in self.open.values():
            later = Header(Kind.LATER, TAG, decision_no=int(asked.kind), chunk=asked.chunk)
            self.catch.on_frame("late", Frame(later))


def test_who_says_later_is_waited_for_and_not_for_ever() -> None:
    joiner, now, open_at = Joiner("late"), 0.0, []
    joiner.turn(now)
    while now < 3 * LATER_BELIEVED_S:
        joiner.put_off()
        now += 0.5
        before = len(joiner.open)
        joiner.open.clear() if now > LATER_BELIEVED_S + 2 else None
        joiner.turn(now)
        open_at += [now] if len(joiner.open) > before else []
    assert not open_at or min(open_at) >= LATER_BELIEVED_S, "asked again only when it was believed for long"


def test_a_slow_donors_questions_go_to_one_that_has_nothing_left_to_do() -> None:
    joiner = Joiner("good", "late")
    joiner.turn(0.0)
    for step in range(1, 40):
        joiner.put_off()  # it lives, and gives nothing
        joiner.turn(0.1 * step)
    assert sorted(joiner.installed) == list(range(CHUNKS))


class Lines:
    """Donors that give one piece after the other, each in `piece_s`, but for those named in `stalls`."""

    def __init__(self, piece_s: dict[str, float], stalls: dict[tuple[str, int], float]) -> None:
        self.joiner = Joiner()
        self.joiner.catch.on_run_state(1, {1: DIGEST}, tuple(piece_s), keep=3)
        self._piece_s, self._stalls = piece_s, stalls
        self._free_at = dict.fromkeys(piece_s, 0.0)
        self._given = dict.fromkeys(piece_s, 0)
        self._coming: list[tuple[float, str, Header]] = []
        self.sent = 0

    def join_s(self) -> float:
        now = 0.0
        while len(self.joiner.installed) < CHUNKS:
            for effect in self.joiner.catch.ask(now):
                if isinstance(effect, SendFrame):
                    self._ask(effect.to, effect.frame.header, now)
            now += 0.01
            for at, donor, header in [each for each in self._coming if each[0] <= now]:
                self._coming.remove((at, donor, header))
                self.joiner.answer(donor, header)
            assert now < 60.0
        return now

    def _ask(self, donor: str, header: Header, now: float) -> None:
        at = now + 0.02
        if header.kind == Kind.WANT_STATE:
            took_s = self._stalls.get((donor, self._given[donor]), self._piece_s[donor])
            self._given[donor] += 1
            self.sent += 1
            at = self._free_at[donor] = max(at, self._free_at[donor]) + took_s
        self._coming.append((at, donor, header))


def test_a_piece_that_stalls_at_the_end_is_taken_from_who_is_idle_and_no_other_one() -> None:
    even = Lines({"ann": 0.4, "bob": 0.4}, {})
    assert even.join_s() < 2.6 and even.sent <= CHUNKS + 1
    stalls = Lines({"ann": 0.4, "bob": 0.4}, {("bob", 5): 30.0})
    assert stalls.join_s() < 3.6 and stalls.sent <= CHUNKS + 2
    uneven = Lines({"ann": 0.2, "bob": 1.0}, {})
    assert uneven.join_s() < 2.9 and uneven.sent <= CHUNKS + 4


# ---- what need not be fetched at all ------------------------------------------------------------------------------


class SameSeed(VirtualTrainer):
    def first_values(self) -> Tensor:
        return initial_values("the same for all", self.host.anchor.numel())


class CountsPieces(World):
    """How many pieces of version 0 left a peer."""

    given = 0

    def _send_frame(self, source: str, effect: SendFrame) -> None:
        header = effect.frame.header
        self.given += header.kind == Kind.STATE and header.version == 0
        super()._send_frame(source, effect)


@pytest.mark.parametrize("seed", range(4))
def test_peers_whose_own_first_values_are_the_runs_fetch_nothing(seed: int) -> None:
    calm = Scenario(faults_until_s=0.0, drop=0.0, duplicate=0.0, slow=0.0, kill_per_effect=0.0, cut_per_s=0.0)
    calm = replace(calm, trainer_crash_per_s=0.0, fragments=1 + seed % 2)
    others, same = CountsPieces(seed, calm), CountsPieces(seed, calm)
    same.trainer_class = SameSeed
    assert others.run().outcome == same.run().outcome == "finished"
    assert others.given > 0, "each begins with values of its own: all but the founder fetch"
    assert same.given == 0


# ---- a run of many small rounds ----------------------------------------------------------------------------------


class ManyRounds:
    """A run that commits every `period_s`, donors that answer after `delay_s`, and a joiner; all in virtual time."""

    COUNT, KEEP, DELAY_S, PIECES_PER_S = 96, 3, 0.02, 60

    def __init__(self, period_s: float, result_bytes: int) -> None:
        self.period_s, self.result_bytes = period_s, result_bytes
        self.catch = StateSync(Fragment(number=0, first=0, count=self.COUNT), TAG, 3.0, 2)
        self.version, self.now, self.open_most = 0, 0.0, 0
        self.under_way: list[tuple[float, str, Frame]] = []
        self.asked: list[Header] = []
        self._piece_at: dict[str, float] = {}
        self.commit()

    def result(self, version: int, chunk: int) -> bytes:
        return f"{version} {chunk}".encode().ljust(self.result_bytes)

    def hashes(self, version: int) -> list[bytes]:
        return [hash_bytes(f"state {version} {chunk}".encode()) for chunk in range(self.COUNT)]

    def commit(self) -> None:
        self.version += 1
        hashes = b"".join(hash_bytes(self.result(self.version, chunk)) for chunk in range(self.COUNT))
        self.catch.chunks.on_commit(Commit(self.version, self.version, ("ann",), (1.0,), hashes, "int8"))
        digest = root_of(self.hashes(self.version))
        self.catch.on_run_state(self.version, {self.version: digest}, ("ann", "bob"), self.KEEP)

    def answer(self, donor: str, want: Header) -> tuple[float, str, Frame]:
        """At the version that the donor is at; pieces one by one, as beside its rounds."""
        at, version, chunk = self.now + self.DELAY_S, self.version, want.chunk
        if want.kind == Kind.WANT_STATE:
            at = self._piece_at[donor] = max(at, self._piece_at.get(donor, 0.0) + 1 / self.PIECES_PER_S)
            payload, kind = f"state {version} {chunk}".encode(), Kind.STATE
        elif want.kind == Kind.WANT_MANIFEST:
            payload, kind = b"".join(self.hashes(version)), Kind.MANIFEST
        else:
            version = want.version
            if version <= self.version - self.KEEP:
                missing = Header(Kind.MISSING, TAG, decision_no=int(want.kind), version=version, chunk=chunk)
                return at, donor, Frame(missing)
            payload, kind = self.result(version, chunk), Kind.LOGGED
        return at, donor, with_payload(Header(kind, TAG, version=version, chunk=chunk), payload)

    def turn(self) -> None:
        self.now += 0.005
        if self.now >= self.version * self.period_s:
            self.commit()
        due = [each for each in self.under_way if each[0] <= self.now]
        self.under_way = [each for each in self.under_way if each[0] > self.now]
        for _, donor, frame in due:
            self.catch.on_frame(donor, frame)
        for effect in [*self.catch.chunks.roll(), *self.catch.ask(self.now)]:
            if isinstance(effect, SendFrame):
                self.asked.append(effect.frame.header)
                self.under_way.append(self.answer(effect.to, effect.frame.header))
        logged = sum(each.header.kind == Kind.LOGGED and to == "ann" for _, to, each in self.under_way)
        self.open_most = max(self.open_most, logged)


def test_P1_a_joiner_keeps_up_with_a_run_of_many_small_rounds() -> None:
    """Its pieces came, and were forgotten: four results at a time are 400 a second over such a line, and it needs as
    many as the run makes."""
    run = ManyRounds(period_s=0.22, result_bytes=4096)
    while not run.catch.chunks.done:
        run.turn()
        assert run.now < 10.0, f"{run.catch.chunks.lowest} of {run.version}"
    assert run.open_most > ASKED_OF_ONE_DONOR


def test_P1_a_joiner_keeps_up_with_results_of_the_usual_size_over_a_long_line() -> None:
    """Of chunks of a megabyte, in int8: four at a time are as many bytes as such a line carries in a round trip."""
    run = ManyRounds(period_s=0.3, result_bytes=258 << 10)
    while not run.catch.chunks.done:
        run.turn()
        assert run.now < 10.0, f"{run.catch.chunks.lowest} of {run.version}"
    assert ASKED_OF_ONE_DONOR < run.open_most <= RESULTS_IN_FLIGHT_BYTES // (258 << 10)


def test_of_results_the_oldest_are_asked_first() -> None:
    run = ManyRounds(period_s=1.0, result_bytes=4096)
    for _ in range(3):
        run.commit()
    run.catch.chunks.recalled({chunk: (3 if chunk < 6 else 1, b"") for chunk in range(12)})
    asked = [effect.frame.header for effect in run.catch.ask(0.0) if isinstance(effect, SendFrame)]
    versions = [want.version for want in asked if want.kind == Kind.WANT_LOGGED]
    assert versions and set(versions) == {2}, "they are forgotten first"


def test_pieces_and_results_do_not_take_each_others_room() -> None:
    donors = Sources(retry_s=1.0)
    donors.answered("ann", donors.asked("ann", False, 0.0), 0.1)
    most = Most(pieces=2, others=3)
    results = [donors.asked("ann", False, 0.2, is_result=True)] * 3
    room = RequestBudget(donors, ["ann"], results, most)
    assert room.has("ann", heavy=True) and not room.has("ann", heavy=False)
    room = RequestBudget(donors, ["ann"], [donors.asked("ann", True, 0.2)] * 2, most)
    assert not room.has("ann", heavy=True) and room.has("ann", heavy=False)


def test_a_donor_that_fell_silent_is_asked_one_thing_at_a_time_of_whatever_kind() -> None:
    donors, most = Sources(1.0), Most(pieces=4, others=4)
    lost = donors.asked("ann", False, 0.0)
    assert donors.late([lost], 2.0) == {"ann"}
    room = RequestBudget(donors, ["ann"], [], most)
    assert room.has("ann", heavy=True) and room.has("ann", heavy=False)
    for heavy in (True, False):
        room = RequestBudget(donors, ["ann"], [donors.asked("ann", heavy, 2.0, is_result=not heavy)], most)
        assert not room.has("ann", heavy=True) and not room.has("ann", heavy=False)


def test_P8_large_results_are_asked_for_a_few_at_a_time() -> None:
    run = ManyRounds(period_s=1.0, result_bytes=RESULTS_IN_FLIGHT_BYTES // 2)
    while run.now < 4.0:
        run.turn()
    assert 0 < run.open_most <= ASKED_OF_ONE_DONOR
