"""Catching up: every chunk to the run's version, from donors of which none is believed (P1, P4).

A donor here is a small object with a state per version.  State and result of a chunk are readable bytes; what
is checked is which bytes end up where, and who is asked for what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from farflung.checkpoints import checked_chunks
from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.fetcher import ASKED_OF_ONE_DONOR, FIRST_ASKED, SPOILED_FORGIVEN, Sources
from farflung.checkpoints.state_sync import StateSync
from farflung.collectives.round.effects import DataEffect, Install, Roll, Seal, SendFrame
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Commit

TAG, CHUNKS, RETRY_S, KEEP = bytes(8), 6, 1.0, 3
WHOLE = Fragment(number=0, first=0, count=CHUNKS)


def state(version: int, chunk: int, seed: str = "") -> bytes:
    return f"state {seed} {version} {chunk}".encode()


def result(version: int, chunk: int) -> bytes:
    return f"result {version} {chunk}".encode()


def manifest(version: int, seed: str = "", chunks: int = CHUNKS) -> bytes:
    return b"".join(hash_bytes(state(version, chunk, seed)) for chunk in range(chunks))


def digest(version: int, seed: str = "", chunks: int = CHUNKS) -> bytes:
    return root_of([manifest(version, seed, chunks)])


def commit(version: int) -> Commit:
    hashes = b"".join(hash_bytes(result(version, chunk)) for chunk in range(CHUNKS))
    return Commit(version, version, ("ann",), (1.0,), hashes, "fp32")


@dataclass
class Donor:
    """Serves one version and the results of the last few.  `lies`: kinds for which it sends other bytes."""

    version: int
    seed: str = ""
    lies: tuple[Kind, ...] = ()
    silent: bool = False
    empty: bool = False  # has nothing: answers MISSING to all
    asked: list[Header] = field(default_factory=list)

    def answer(self, want: Header) -> Frame | None:
        self.asked.append(want)
        kind = {
            Kind.WANT_MANIFEST: Kind.MANIFEST,
            Kind.WANT_STATE: Kind.STATE,
            Kind.WANT_LOGGED: Kind.LOGGED,
        }[want.kind]
        version = want.version if kind == Kind.LOGGED else self.version
        has = not self.empty and (kind == Kind.STATE or self.version - KEEP < want.version <= self.version)
        if self.silent:
            return None
        if not has or (kind == Kind.MANIFEST and want.version != self.version):
            header = Header(Kind.MISSING, TAG, decision_no=int(want.kind), version=version, chunk=want.chunk)
            return Frame(header)
        payload = {
            Kind.MANIFEST: manifest(version, self.seed),
            Kind.STATE: state(version, want.chunk, self.seed),
            Kind.LOGGED: result(version, want.chunk),
        }[kind]
        payload = bytes(len(payload)) if kind in self.lies else payload
        return with_payload(Header(kind, TAG, version=version, chunk=want.chunk), payload)


class Joiner:
    def __init__(self, donors: dict[str, Donor], target: int, known: dict[int, bytes] | None = None) -> None:
        self.catch = StateSync(WHOLE, TAG, RETRY_S, 2)
        self.donors, self.now = donors, 0.0
        self.bytes: list[bytes] = [b""] * CHUNKS
        self.sealed: list[int] = []
        self.verdicts: list[Verdict] = []
        self.arrives: Callable[[SendFrame], bool] = lambda want: True
        self.word(target, known if known is not None else {target: digest(target)})

    def word(self, target: int, known: dict[int, bytes]) -> None:
        """The coordinator's."""
        self.catch.on_run_state(target, known, tuple(sorted(self.donors)), KEEP)

    def carry_out(self, effects: list[DataEffect]) -> list[SendFrame]:
        for effect in effects:
            match effect:
                case Install():
                    self.bytes[effect.chunk] = bytes(effect.payload)
                case Roll():
                    self.bytes[effect.chunk] += b" + " + bytes(effect.payload)
                case Seal():
                    self.sealed.append(effect.version)
        return [effect for effect in effects if isinstance(effect, SendFrame)]

    def gets(self, sender: str, frame: Frame | None) -> list[SendFrame]:
        if frame is not None:
            self.catch.on_frame(sender, frame)
        return self.carry_out(self.catch.chunks.roll())

    def turn(self) -> int:
        """Roll, ask, and take the answers in.  Returns how much was asked for."""
        asked = self.carry_out([*self.catch.chunks.roll(), *self.catch.ask(self.now)])
        for send in asked:
            answer = self.donors[send.to].answer(send.frame.header)
            if answer is not None and self.arrives(send):
                self.verdicts.append(self.catch.on_frame(send.to, answer))
        self.carry_out(self.catch.chunks.roll())
        return len(asked)

    def turns(self, count: int = 30, seconds: float = 0.3) -> None:
        for _ in range(count):
            self.turn()
            self.now += seconds

    @property
    def arrived(self) -> bool:
        return self.catch.chunks.done and not [
            c for c in self.catch.chunks.versions if c != self.catch.chunks.target
        ]


def states(version: int, seed: str = "") -> list[bytes]:
    return [state(version, chunk, seed) for chunk in range(CHUNKS)]


# ---- from scratch ------------------------------------------------------------------------------------------


def test_a_joiner_takes_every_chunk_at_the_runs_version_and_seals_once() -> None:
    joiner = Joiner({"ann": Donor(4), "bob": Donor(4)}, target=4)
    joiner.turns()
    assert joiner.arrived and joiner.bytes == states(4) and joiner.sealed == [4]
    assert joiner.turn() == 0, "who has all asks for nothing"


def test_no_digest_is_ever_taken_from_a_donor() -> None:
    """Two donors agree with each other, and with nothing that the coordinator said (P4)."""
    joiner = Joiner({"ann": Donor(4, seed="false"), "bob": Donor(4, seed="false")}, target=4)
    joiner.turns()
    assert joiner.catch.chunks.versions == [NO_VERSION] * CHUNKS and joiner.sealed == []
    assert joiner.bytes == [b""] * CHUNKS
    assert Verdict.BAD_HASH in joiner.verdicts


def test_without_the_coordinators_digest_nothing_is_asked_for() -> None:
    joiner = Joiner({"ann": Donor(4)}, target=4, known={3: digest(3)})
    joiner.turns()
    assert joiner.donors["ann"].asked == []


def test_a_manifest_for_another_number_of_chunks_is_refused() -> None:
    joiner = Joiner({"ann": Donor(4)}, target=4, known={4: digest(4, chunks=CHUNKS + 1)})
    longer = with_payload(Header(Kind.MANIFEST, TAG, version=4), manifest(4, chunks=CHUNKS + 1))
    assert joiner.catch.on_frame("ann", longer) == Verdict.BAD_HASH


def test_a_chunk_that_nobody_has_and_one_that_was_not_asked_for_are_refused() -> None:
    joiner = Joiner({"ann": Donor(4)}, target=4)
    beyond = with_payload(Header(Kind.STATE, TAG, version=4, chunk=CHUNKS), b"x")
    assert joiner.catch.on_frame("ann", beyond) == Verdict.MALFORMED
    unasked = with_payload(Header(Kind.STATE, TAG, version=4, chunk=0), state(4, 0))
    assert joiner.catch.on_frame("ann", unasked) == Verdict.STALE


def test_pieces_that_overtake_the_list_of_their_hashes_are_kept_and_checked_then() -> None:
    """Donors apply a commit at different times: one gives state before another gives the manifest."""
    joiner = Joiner({"ann": Donor(4), "bob": Donor(4)}, target=4)
    wants = [effect for effect in joiner.catch.ask(0.0) if isinstance(effect, SendFrame)]
    answers = [(want.to, joiner.donors[want.to].answer(want.frame.header)) for want in wants]
    false = Frame(answers[-1][1].header, b"") if answers[-1][1] else None  # type: ignore[union-attr]
    assert false is not None
    lie = with_payload(false.header, b"something else")
    for sender, frame in [*reversed(answers[1:-1]), (answers[-1][0], lie)]:
        assert frame is not None
        assert joiner.catch.on_frame(sender, frame) == Verdict.ACCEPTED
    assert not joiner.carry_out(joiner.catch.ask(0.1)) or len(joiner.catch._unvouched) < CHUNKS
    first = answers[0][1]
    assert first is not None and first.header.kind == Kind.MANIFEST
    joiner.gets(answers[0][0], first)
    arrived = {frame.header.chunk for _, frame in answers[1:-1] if frame is not None}
    assert {chunk for chunk in range(CHUNKS) if joiner.bytes[chunk]} == arrived
    joiner.turns()
    assert joiner.arrived and joiner.bytes == states(4)


def test_P4_a_piece_may_come_without_a_second_half_of_zeros_and_its_hash_is_that_of_all_of_it() -> None:
    halves = [b"anchor %d" % chunk for chunk in range(CHUNKS)]
    hashes = [hash_bytes(half, bytes(len(half))) for half in halves]
    catch = StateSync(WHOLE, TAG, RETRY_S, 2)
    catch.on_run_state(0, {0: root_of(hashes)}, ("ann",), KEEP)
    catch.ask(0.0)
    listed = with_payload(Header(Kind.MANIFEST, TAG, chunk=0), b"".join(hashes))
    assert catch.on_frame("ann", listed) == Verdict.ACCEPTED

    def come(chunk: int, payload: bytes) -> Verdict:
        return catch.on_frame("ann", with_payload(Header(Kind.STATE, TAG, chunk=chunk), payload))

    assert come(0, halves[0]) == Verdict.ACCEPTED and catch.chunks.roll() == [Install(0, 0, halves[0])]
    assert come(1, halves[1] + bytes(len(halves[1]))) == Verdict.ACCEPTED, "or with it"
    for wrong in (halves[3], halves[2] + b"\0", halves[2][:-1], b"", halves[2] + b"another"):
        assert come(2, wrong) == Verdict.BAD_HASH


def test_P6_a_donor_that_cannot_be_reached_delays_nothing_that_another_comes_to_have() -> None:
    """Seen in the lab: the founder is cut off from the joiner, and the third peer has its state a little later."""
    count = 40
    whole = b"".join(hash_bytes(state(4, chunk)) for chunk in range(count))
    catch = StateSync(Fragment(number=0, first=0, count=count), TAG, RETRY_S, 2)
    catch.on_run_state(4, {4: root_of([whole])}, ("ann", "bob"), KEEP)
    now, asked_of_ann = 0.0, []
    while not catch.chunks.done and now < 20 * RETRY_S:
        for send in [*catch.chunks.roll(), *catch.ask(now)]:
            if not isinstance(send, SendFrame):
                continue
            want = send.frame.header
            if send.to == "ann":
                asked_of_ann.append(now)  # and it never answers
            elif now < 2 * RETRY_S:
                missing = Header(Kind.MISSING, TAG, decision_no=int(want.kind), version=4, chunk=want.chunk)
                catch.on_frame("bob", Frame(missing))
            elif want.kind == Kind.WANT_MANIFEST:
                catch.on_frame("bob", with_payload(Header(Kind.MANIFEST, TAG, version=4), whole))
            else:
                has = with_payload(Header(Kind.STATE, TAG, version=4, chunk=want.chunk), state(4, want.chunk))
                catch.on_frame("bob", has)
        now += RETRY_S / 10
    assert catch.chunks.done and now < 6 * RETRY_S
    assert len([at for at in asked_of_ann if at > 2 * RETRY_S]) <= 4, (
        "one question now and then, to see it back"
    )


def test_only_a_few_requests_are_in_flight_per_donor() -> None:
    joiner = Joiner({"ann": Donor(4, silent=True), "bob": Donor(4, silent=True)}, target=4)
    joiner.catch = StateSync(Fragment(number=0, first=0, count=5 * CHUNKS), TAG, RETRY_S, 2)
    joiner.word(4, {4: digest(4, chunks=5 * CHUNKS)})
    assert joiner.turn() == 2 * FIRST_ASKED
    assert joiner.turn() == 0
    assert {len(donor.asked) for donor in joiner.donors.values()} == {FIRST_ASKED}
    hashes = with_payload(Header(Kind.MANIFEST, TAG, version=4), manifest(4, chunks=5 * CHUNKS))
    asked = [
        name for name, donor in joiner.donors.items() if Kind.WANT_MANIFEST in {h.kind for h in donor.asked}
    ]
    joiner.catch.on_frame(asked[0], hashes)
    assert 0 < joiner.turn() <= ASKED_OF_ONE_DONOR, "it answers, and may have more; the other one may not"


def test_what_has_come_goes_on_with_the_run_while_its_donors_hold_the_rest_back() -> None:
    """A piece now and then, and versions that follow each other more quickly: what had come was forgotten before the
    rest was there, since its results were not even asked for, and nobody ever got in."""
    joiner, donor = Joiner({"ann": Donor(4)}, target=4), Donor(4)
    held: list[Header] = []
    for version in range(4, 4 + 4 * CHUNKS):
        donor.version = version
        joiner.catch.chunks.on_commit(commit(version))
        joiner.word(version, {version: digest(version)})
        for _ in range(4):
            asked = [
                s.frame.header
                for s in joiner.carry_out([*joiner.catch.chunks.roll(), *joiner.catch.ask(joiner.now)])
            ]
            held += [want for want in asked if want.kind == Kind.WANT_STATE]
            given = [want for want in asked if want.kind != Kind.WANT_STATE]
            for answer in map(donor.answer, given):
                assert answer is not None
                joiner.gets("ann", answer)
            joiner.now += 0.01
        piece = donor.answer(held.pop(0)) if held and version % 3 == 0 else None
        joiner.gets("ann", piece)
    assert joiner.catch.chunks.lowest >= 4, "all of it is here"


def quickly(joiner: Joiner, versions: range) -> None:
    """What is held is forgotten within a time in which no donor is found to be late."""
    for version in versions:
        for donor in joiner.donors.values():
            donor.version = version
        joiner.catch.chunks.on_commit(commit(version))
        joiner.word(version, {version: digest(version)})
        joiner.turns(count=4, seconds=RETRY_S / 20)


def test_P6_pieces_that_got_lost_are_asked_for_again_though_results_come_at_all_times() -> None:
    """Seen with a peer that had been stopped: eight questions were under way when the others closed their lines to it.
    All who owed them gave results from then on, so that nobody was late, and none was idle: it never got in."""
    joiner, lost = Joiner({"ann": Donor(4), "bob": Donor(4)}, target=4), set[int]()

    def arrives(want: SendFrame) -> bool:
        chunk = want.frame.header.chunk
        is_lost = want.frame.header.kind == Kind.WANT_STATE and chunk > 1 and chunk not in lost
        lost.update([chunk] if is_lost else [])
        return not is_lost

    joiner.arrives = arrives
    quickly(joiner, range(4, 10))
    assert lost == {2, 3, 4, 5} and not joiner.arrived
    quickly(joiner, range(10, 30))
    assert joiner.arrived


def test_P6_what_no_donor_had_just_now_is_asked_for_as_soon_as_the_run_has_moved_on() -> None:
    """All were busy with the version that they were leaving.  After a pause, what had come was forgotten again."""
    joiner = Joiner({"ann": Donor(4), "bob": Donor(4)}, target=4)
    refused = set[tuple[str, int]]()

    def arrives(want: SendFrame) -> bool:
        header = want.frame.header
        if header.kind != Kind.WANT_STATE or header.chunk > 1 or (want.to, header.chunk) in refused:
            return True
        refused.add((want.to, header.chunk))
        missing = Header(Kind.MISSING, TAG, decision_no=int(header.kind), chunk=header.chunk)
        joiner.catch.on_frame(want.to, Frame(missing))
        return False

    joiner.arrives = arrives
    quickly(joiner, range(4, 7))
    assert len(refused) == 4 and joiner.arrived


def test_P6_who_is_let_in_again_asks_anew_at_once() -> None:
    joiner = Joiner({"ann": Donor(4), "bob": Donor(4)}, target=4)
    joiner.arrives = lambda want: False
    joiner.turn()
    joiner.arrives = lambda want: True
    assert joiner.turn() == 0, "all questions that are allowed are under way"
    joiner.catch.fetcher.came_back()
    joiner.turns(count=6, seconds=RETRY_S / 20)
    assert joiner.arrived


@pytest.mark.parametrize("donors", [("ann",), ("ann", "bob")])
def test_P6_one_damaged_answer_of_each_donor_keeps_nobody_out(donors: tuple[str, ...]) -> None:
    """From then on each was asked one thing at a time, and pieces came first: of results, which are forgotten, none."""
    joiner = Joiner({name: Donor(4) for name in donors}, target=4)
    for name in donors:
        joiner.catch.fetcher.on_spoiled(name, Header(Kind.STATE, TAG, version=4, chunk=0))
    pieces: list[tuple[str, Header]] = []
    for version in range(4, 4 + 4 * CHUNKS):
        joiner.catch.chunks.on_commit(commit(version))
        joiner.word(version, {version: digest(version)})
        for donor in joiner.donors.values():
            donor.version = version
        for _ in range(4):
            asked = joiner.carry_out([*joiner.catch.chunks.roll(), *joiner.catch.ask(joiner.now)])
            pieces += [
                (send.to, send.frame.header) for send in asked if send.frame.header.kind == Kind.WANT_STATE
            ]
            for send in asked:
                answer = joiner.donors[send.to].answer(send.frame.header)
                if answer is not None and send.frame.header.kind != Kind.WANT_STATE:
                    joiner.gets(send.to, answer)
            joiner.now += 0.01
        if pieces and version % 3 == 0:  # a donor in a round gives one now and then
            name, want = pieces.pop(0)
            answer = joiner.donors[name].answer(want)
            joiner.gets(name, answer)
    assert joiner.catch.chunks.lowest >= 4, "all of it is here"


def test_what_a_liar_was_asked_for_takes_the_room_of_one_piece() -> None:
    joiner = Joiner({"ann": Donor(4)}, target=4)
    joiner.turns(count=1)
    joiner.catch.reset()
    joiner.catch.fetcher.on_spoiled("ann", Header(Kind.STATE, TAG, version=4, chunk=0))
    joiner.catch.on_frame("ann", with_payload(Header(Kind.MANIFEST, TAG, version=4, chunk=0), manifest(4)))
    asked = [send.frame.header.kind for send in joiner.carry_out(joiner.catch.ask(joiner.now))]
    assert asked == [Kind.WANT_STATE]


def test_P9_late_results_of_what_a_run_has_gone_back_from_are_no_lies() -> None:
    """They are on their way when the coordinator says so, and nobody can check them any more."""
    joiner = Joiner({"ann": Donor(4)}, target=4)
    joiner.catch.chunks.on_commit(commit(5))
    joiner.catch.go_back(4, keep=False)
    for chunk in range(SPOILED_FORGIVEN + 1):
        late = with_payload(Header(Kind.LOGGED, TAG, version=5, chunk=chunk), result(5, chunk))
        assert joiner.catch.on_frame("ann", late) == Verdict.STALE
    assert joiner.catch.fetcher.take_dropped() == []


def test_P9_a_run_that_has_gone_back_holds_nothing_against_its_donors() -> None:
    joiner = Joiner({"ann": Donor(4), "bob": Donor(4)}, target=4)
    for _ in range(SPOILED_FORGIVEN + 1):
        joiner.catch.fetcher.on_spoiled("ann", Header(Kind.STATE, TAG, version=4, chunk=0))
    assert joiner.catch.fetcher.take_dropped() == ["ann"]
    joiner.catch.go_back(4, keep=False)
    joiner.word(4, {4: digest(4)})
    joiner.turn()
    assert joiner.donors["ann"].asked


def test_P6_with_donors_that_are_met_again_one_is_as_patient_as_at_first() -> None:
    silent = {"ann": Donor(4, silent=True), "bob": Donor(4, silent=True)}
    joiner = Joiner(dict(silent), target=4)
    joiner.turns(count=40)
    assert all(map(joiner.catch.fetcher.sources.is_silent, silent))
    joiner.catch.fetcher.came_back()
    assert not any(map(joiner.catch.fetcher.sources.is_silent, silent))


def test_P6_a_list_of_a_newer_version_than_was_asked_for_is_taken_and_closes_the_question() -> None:
    """Of a donor whose version is another one whenever a question arrives, no list was ever had."""
    joiner = Joiner({"ann": Donor(4)}, target=4, known={4: digest(4), 5: digest(5)})
    joiner.carry_out(joiner.catch.ask(0.0))
    newer = with_payload(Header(Kind.MANIFEST, TAG, version=5, chunk=0), manifest(5))
    assert joiner.catch.on_frame("ann", newer) == Verdict.ACCEPTED
    assert (Kind.WANT_MANIFEST, 4, 0) not in joiner.catch.fetcher.asked
    given = with_payload(Header(Kind.STATE, TAG, version=5, chunk=3), state(5, 3))
    assert joiner.gets("ann", given) == [] and joiner.bytes[3] == state(5, 3)
    false = with_payload(Header(Kind.MANIFEST, TAG, version=5, chunk=0), manifest(4))
    assert joiner.catch.on_frame("ann", false) == Verdict.BAD_HASH


def test_P6_a_list_that_comes_too_late_to_be_known_closes_its_question() -> None:
    joiner = Joiner({"ann": Donor(4)}, target=4)
    joiner.carry_out(joiner.catch.ask(0.0))
    unknown = with_payload(Header(Kind.MANIFEST, TAG, version=9, chunk=0), manifest(9))
    assert joiner.catch.on_frame("ann", unknown) == Verdict.STALE
    assert (Kind.WANT_MANIFEST, 4, 0) not in joiner.catch.fetcher.asked
    joiner.word(9, {9: digest(9)})
    joiner.donors["ann"].version = 9
    joiner.turns()
    assert joiner.arrived and joiner.bytes == states(9)


def test_P6_pieces_wait_for_the_list_of_their_own_version_as_long_as_it_may_come() -> None:
    """One of another version came first, and all that waited was thrown away; or was kept for good, and its chunks were
    never asked for again."""
    joiner = Joiner({"ann": Donor(5), "bob": Donor(5)}, target=5, known={4: digest(4), 5: digest(5)})
    joiner.carry_out(joiner.catch.ask(0.0))
    [state_key, *_] = [key for key in joiner.catch.fetcher.asked if key[0] == Kind.WANT_STATE]
    chunk, donor = state_key[2], joiner.catch.fetcher.asked[state_key].donor
    early = with_payload(Header(Kind.STATE, TAG, version=5, chunk=chunk), state(5, chunk))
    assert joiner.catch.on_frame(donor, early) == Verdict.ACCEPTED
    other = with_payload(Header(Kind.MANIFEST, TAG, version=4, chunk=0), manifest(4))
    joiner.gets("bob", other)
    assert not joiner.bytes[chunk] and chunk in joiner.catch._unvouched
    joiner.catch.chunks.on_commit(commit(6))
    joiner.carry_out(joiner.catch.ask(0.1))
    assert chunk in joiner.catch._unvouched, "that list is on its way"
    [manifest_key] = [
        key for key in joiner.catch.fetcher.asked if key[0] == Kind.WANT_MANIFEST and key[1] == 5
    ]
    missing = Header(Kind.MISSING, TAG, decision_no=int(manifest_key[0]), version=5, chunk=0)
    joiner.catch.on_frame(joiner.catch.fetcher.asked[manifest_key].donor, Frame(missing))
    joiner.word(6, {6: digest(6)})
    joiner.carry_out(joiner.catch.ask(0.2))
    assert chunk not in joiner.catch._unvouched, "it never will"


# ---- donors of all kinds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        Donor(4, silent=True),
        Donor(4, empty=True),
        Donor(2),
        Donor(4, lies=(Kind.STATE,)),
        Donor(4, lies=(Kind.MANIFEST,)),
        Donor(4, seed="false"),
    ],
    ids=["silent", "empty", "behind", "lies about chunks", "lies about the manifest", "holds another state"],
)
def test_a_donor_that_does_not_deliver_is_replaced(bad: Donor) -> None:
    joiner = Joiner({"ann": bad, "bob": Donor(4)}, target=4)
    joiner.turns()
    assert joiner.arrived and joiner.bytes == states(4)


def test_a_lie_is_counted_and_never_installed() -> None:
    joiner = Joiner({"ann": Donor(4, lies=(Kind.STATE,)), "bob": Donor(4)}, target=4)
    joiner.turns()
    assert Verdict.BAD_HASH in joiner.verdicts
    assert joiner.bytes == states(4)


def test_many_who_join_at_once_do_not_all_ask_the_same_donor_first() -> None:
    first = set()
    for number in range(64):
        catch = StateSync(WHOLE, TAG, RETRY_S, 2, f"guest{number}")
        catch.on_run_state(3, {3: digest(3)}, ("ann", "bob", "cid", "dan"), KEEP)
        wants = [effect for effect in catch.ask(0.0) if isinstance(effect, SendFrame)]
        first |= {want.to for want in wants if want.frame.header.kind == Kind.WANT_MANIFEST}
    assert first == {"ann", "bob", "cid", "dan"}


def test_an_answer_that_got_lost_is_asked_for_again_though_the_donor_gives_other_things() -> None:
    joiner = Joiner({"ann": Donor(2)}, target=2)
    lost = []

    def deliver(want: SendFrame) -> bool:
        """The first manifest and the first answer for chunk 3 never arrive."""
        key = (want.frame.header.kind, want.frame.header.chunk)
        first = key in ((Kind.WANT_MANIFEST, 0), (Kind.WANT_STATE, 3)) and key not in lost
        lost.extend([key] if first else [])
        return not first

    joiner.arrives = deliver
    joiner.turns(60)
    assert len(lost) == 2 and joiner.arrived


def test_when_all_donors_failed_they_are_asked_again_after_a_pause() -> None:
    only = Donor(4, empty=True)
    joiner = Joiner({"ann": only}, target=4)
    joiner.turns(count=20, seconds=0.1)
    assert len(only.asked) <= 3 * (CHUNKS + 1), "not in a hurry"
    only.empty = False
    joiner.turns()
    assert joiner.arrived


def test_a_donor_that_moves_on_meanwhile_serves_chunks_at_its_newer_version() -> None:
    moving = Donor(4)
    joiner = Joiner({"ann": moving}, target=4)
    joiner.turn()  # the manifest of 4 and some chunks
    moving.version = 5
    joiner.catch.chunks.on_commit(commit(5))
    joiner.word(5, {4: digest(4), 5: digest(5)})
    joiner.turns()
    assert joiner.arrived and joiner.sealed == [5]
    rolled = [state(4, c) + b" + " + result(5, c) for c in range(CHUNKS)]
    assert all(mine in (state(5, c), rolled[c]) for c, mine in enumerate(joiner.bytes))
    assert [c for c, mine in enumerate(joiner.bytes) if mine == rolled[c]], (
        "what was there was rolled, not fetched"
    )


def test_a_donor_that_keeps_giving_wrong_bytes_is_asked_no_more_as_long_as_there_are_others() -> None:
    of = Sources(RETRY_S)
    for count in range(1, SPOILED_FORGIVEN + 2):
        assert of.trusted(("bad", "good")) == ("bad", "good"), "so much is forgiven"
        assert of.strike("bad") == (count == SPOILED_FORGIVEN + 1), "told once"
    assert of.trusted(("bad", "good")) == ("good",)
    assert of.trusted(("bad",)) == ("bad",), "what it gives is checked: better than nobody"
    of.forgive()
    assert of.trusted(("bad", "good")) == ("bad", "good")


def test_a_third_party_cannot_take_an_honest_donor_away() -> None:
    """Bad answers to a question that was put to somebody else say nothing about that donor."""
    ann = Donor(4)
    joiner = Joiner({"ann": ann}, target=4, known={3: digest(3), 4: digest(4)})
    joiner.catch.chunks.versions = [3] * CHUNKS
    joiner.catch.chunks.on_commit(commit(4))
    [first, *_] = joiner.catch.ask(0.0)
    assert isinstance(first, SendFrame)
    chunk = first.frame.header.chunk
    lie = with_payload(Header(Kind.LOGGED, TAG, version=4, chunk=chunk), b"another result")
    joiner.catch.on_frame("eve", lie)
    answer = ann.answer(first.frame.header)
    assert answer is not None and joiner.catch.on_frame("ann", answer) == Verdict.ACCEPTED


# ---- rolling forward ---------------------------------------------------------------------------------------


def test_a_peer_that_missed_commits_fetches_results_only() -> None:
    joiner = Joiner({"ann": Donor(4)}, target=4, known={4: digest(4)})
    joiner.catch.chunks.versions, joiner.bytes = [2] * CHUNKS, states(2)
    joiner.catch.chunks.sealed = 2
    joiner.catch.chunks.on_commit(commit(3))
    joiner.catch.chunks.on_commit(commit(4))
    joiner.turns()
    assert joiner.arrived and joiner.sealed[-1] == 4
    assert joiner.bytes == [
        b" + ".join([state(2, chunk), result(3, chunk), result(4, chunk)]) for chunk in range(CHUNKS)
    ]
    assert {want.kind for want in joiner.donors["ann"].asked} == {Kind.WANT_LOGGED}


@pytest.mark.parametrize("missed", range(1, KEEP + 2))
def test_a_peer_cut_off_for_K_rounds_or_fewer_catches_up_without_state_transfer(missed: int) -> None:
    """K = keep_results; one more, and the state itself is fetched."""
    now = 2 + missed
    joiner = Joiner({"ann": Donor(now)}, target=2)
    joiner.catch.chunks.versions, joiner.bytes, joiner.catch.chunks.sealed = [2] * CHUNKS, states(2), 2
    joiner.word(now, {now: digest(now)})
    for version in range(3, now + 1):
        joiner.catch.chunks.on_commit(commit(version))
    joiner.turns()
    asked = {want.kind for want in joiner.donors["ann"].asked}
    assert joiner.arrived
    assert asked == ({Kind.WANT_LOGGED} if missed <= KEEP else {Kind.WANT_MANIFEST, Kind.WANT_STATE})
    if missed <= KEEP:
        rolled = [
            b" + ".join([state(2, c), *(result(v, c) for v in range(3, now + 1))]) for c in range(CHUNKS)
        ]
        assert joiner.bytes == rolled


def test_a_commit_that_is_not_known_is_named_and_nothing_is_rolled_without_it() -> None:
    joiner = Joiner({"ann": Donor(4)}, target=4)
    joiner.catch.chunks.versions = [2] * CHUNKS
    assert joiner.catch.chunks.needs_commits == (3, 4)
    joiner.catch.chunks.on_commit(commit(4))
    assert joiner.catch.chunks.needs_commits == (3,)
    joiner.turns(count=3)
    assert joiner.catch.chunks.versions == [2] * CHUNKS, "version 4 cannot be applied before version 3"
    joiner.catch.chunks.on_commit(commit(3))
    joiner.turns()
    assert joiner.arrived and joiner.catch.chunks.needs_commits == ()


def test_results_at_hand_need_no_donor_and_wrong_ones_are_not_taken() -> None:
    joiner = Joiner({}, target=3)
    joiner.catch.chunks.versions = [3] * CHUNKS
    assert not joiner.catch.chunks.offer(4, 0, result(4, 0), hash_bytes(result(4, 0))), (
        "a result without a commit is worth nothing (P2)"
    )
    joiner.catch.chunks.on_commit(commit(4))
    assert not joiner.catch.chunks.offer(4, 0, result(4, 1), hash_bytes(result(4, 1)))
    for chunk in range(CHUNKS):
        assert joiner.catch.chunks.offer(4, chunk, result(4, chunk), hash_bytes(result(4, chunk)))
    joiner.turns(count=1)
    assert joiner.arrived and joiner.sealed == [4]


def test_P6_a_whole_state_is_left_only_when_all_results_of_the_next_version_are_here() -> None:
    """Those that lack may be nowhere any more: then the version before is the newest that anybody can show."""
    joiner = Joiner({"ann": Donor(4)}, target=4)
    joiner.catch.chunks.versions, joiner.bytes, joiner.catch.chunks.sealed = [3] * CHUNKS, states(3), 3
    joiner.catch.chunks.on_commit(commit(4))
    joiner.arrives = lambda want: want.frame.header.chunk != 1
    joiner.turns(3)
    assert joiner.catch.chunks.versions == [3] * CHUNKS and joiner.bytes == states(3)
    joiner.arrives = lambda want: True
    joiner.turns()
    assert joiner.arrived and joiner.sealed == [4]


def test_large_results_of_one_version_only_wait_for_the_last_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_chunks, "WAITING_RESULTS_BYTES", 1)
    joiner = Joiner({"ann": Donor(6)}, target=6)
    joiner.catch.chunks.versions, joiner.bytes, joiner.catch.chunks.sealed = [3] * CHUNKS, states(3), 3
    for version in range(4, 7):
        joiner.catch.chunks.on_commit(commit(version))
    joiner.arrives = lambda want: want.frame.header.chunk != 1 or want.frame.header.version != 4
    joiner.turns(3)
    assert {want.version for want in joiner.donors["ann"].asked} == {4}
    joiner.arrives = lambda want: True
    joiner.turns()
    assert joiner.arrived and joiner.catch.chunks.versions == [6] * CHUNKS


@pytest.mark.parametrize(
    "bad",
    [Donor(4, lies=(Kind.LOGGED,)), Donor(4, silent=True), Donor(2)],
    ids=["lies", "silent", "behind"],
)
def test_a_donor_without_the_true_result_is_replaced(bad: Donor) -> None:
    joiner = Joiner({"ann": bad, "bob": Donor(4)}, target=4)
    joiner.catch.chunks.versions, joiner.bytes = [3] * CHUNKS, states(3)
    joiner.catch.chunks.on_commit(commit(4))
    joiner.turns()
    assert joiner.arrived
    assert joiner.bytes == [state(3, c) + b" + " + result(4, c) for c in range(CHUNKS)]


def test_who_is_too_far_behind_for_the_result_logs_takes_the_state_again() -> None:
    joiner = Joiner({"ann": Donor(9)}, target=2)
    joiner.catch.chunks.versions = [2] * CHUNKS
    joiner.word(2 + KEEP, {})
    assert joiner.catch.chunks.versions == [2] * CHUNKS, "as far as the logs reach, results are enough"
    joiner.word(9, {9: digest(9)})
    assert joiner.catch.chunks.versions == [NO_VERSION] * CHUNKS
    joiner.turns()
    assert joiner.arrived and joiner.bytes == states(9)


def test_a_chunk_that_was_stuck_once_waits_for_its_next_result_like_any_other() -> None:
    ann = Donor(3)
    joiner = Joiner({"ann": ann}, target=4)
    joiner.catch.chunks.versions, joiner.bytes = [3] * CHUNKS, states(3)
    joiner.catch.chunks.on_commit(commit(4))
    joiner.turns(8)  # nobody has the result: from now on its state would do as well
    ann.version = 4
    for chunk in range(CHUNKS):
        joiner.catch.chunks.offer(4, chunk, result(4, chunk), hash_bytes(result(4, chunk)))
    joiner.turns()
    assert joiner.arrived
    ann.version, before = 5, len(ann.asked)
    joiner.word(5, {5: digest(5)})
    joiner.turns()
    assert ann.asked[before:] == [], "its commit has not been told yet"


# ---- one of several fragments ------------------------------------------------------------------------------


def test_a_fragment_is_fetched_and_rolled_under_the_chunk_numbers_of_the_whole_model() -> None:
    here = Fragment(number=2, first=10, count=3)
    hashes = b"".join(hash_bytes(state(4, chunk)) for chunk in here.chunks)
    catch = StateSync(here, TAG, RETRY_S, 2)
    catch.on_run_state(4, {4: root_of([hashes])}, ("ann",), KEEP)
    asked = [(e.frame.header.kind, e.frame.header.chunk) for e in catch.ask(0.0) if isinstance(e, SendFrame)]
    assert asked == [(Kind.WANT_MANIFEST, 10), (Kind.WANT_STATE, 10)]
    for chunk in (9, 13):
        beyond = with_payload(Header(Kind.STATE, TAG, version=4, chunk=chunk), state(4, chunk))
        assert catch.on_frame("ann", beyond) == Verdict.MALFORMED
    catch.on_frame("ann", with_payload(Header(Kind.MANIFEST, TAG, version=4, chunk=10), hashes))
    more = [e.frame.header.chunk for e in catch.ask(0.1) if isinstance(e, SendFrame)]
    assert more == [11, 12]
    for chunk in here.chunks:
        frame = with_payload(Header(Kind.STATE, TAG, version=4, chunk=chunk), state(4, chunk))
        assert catch.on_frame("ann", frame) == Verdict.ACCEPTED
    came = [Install(chunk, 4, state(4, chunk)) for chunk in here.chunks]
    assert catch.chunks.roll() == [*came, Seal(4, fragment=2)]

    results = b"".join(hash_bytes(result(5, chunk)) for chunk in here.chunks)
    catch.chunks.on_commit(Commit(5, 9, ("ann",), (1.0,), results, "fp32", fragment=2, factor=0.5))
    catch.on_run_state(5, {}, ("ann",), KEEP)
    wanted = [e.frame.header.chunk for e in catch.ask(1.0) if isinstance(e, SendFrame)]
    assert wanted == [10, 11, 12]
    assert all(
        catch.chunks.offer(5, chunk, result(5, chunk), hash_bytes(result(5, chunk))) for chunk in here.chunks
    )
    rolls = [Roll(chunk, 5, result(5, chunk), 0.5) for chunk in here.chunks]
    assert catch.chunks.roll() == [*rolls, Seal(5, fragment=2)], "by what it is multiplied says the commit"


# ---- version 0 ---------------------------------------------------------------------------------------------


def test_the_founder_is_at_version_zero_and_asks_nobody() -> None:
    catch = StateSync(WHOLE, TAG, RETRY_S, 2)
    assert catch.founded() == [Seal(0)]
    catch.on_run_state(0, {0: digest(0)}, ("bob",), KEEP)
    assert catch.chunks.done and catch.ask(0.0) == []


def test_a_run_that_is_founded_anew_makes_a_joiner_start_again() -> None:
    old, new = Donor(0, seed="old"), Donor(0, seed="new")
    joiner = Joiner({"ann": old}, target=0, known={0: digest(0, "old")})
    joiner.turn()
    assert any(joiner.bytes) and not joiner.catch.chunks.done
    joiner.donors = {"bob": new}
    joiner.word(0, {0: digest(0, "new")})
    assert joiner.catch.chunks.versions == [NO_VERSION] * CHUNKS
    joiner.turns()
    assert joiner.arrived and joiner.bytes == states(0, "new")
