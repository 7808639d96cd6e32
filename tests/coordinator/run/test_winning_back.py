"""Who comes back with newer state than the run has: when it is won back, and what everybody is told.

The guidance on virtual time, with members put in by hand; whole runs are in whole/test_going_back.py.
"""

from __future__ import annotations

from msgspec.structs import replace

from farflung.coordinator.ledger.leases import Range
from farflung.coordinator.ledger.records import (
    DataFixed,
    Genesis,
    Granted,
    ModelFixed,
    Vouched,
    WonBack,
    from_bytes,
    to_bytes,
)
from farflung.coordinator.run.going_back import GoingBack
from farflung.coordinator.run.guidance import Guidance
from farflung.coordinator.run.lending import Lending
from farflung.coordinator.run.membership import Member
from farflung.coordinator.run.winning_back import PATIENCE_IN_DEAD
from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_sections import CheckpointSection, NetSection, RoundSection, RunSection
from farflung.protocol.messages import Lease, Tick
from farflung.protocol.round_words import Used
from farflung.protocol.states import Goal
from rig.made_part import MODEL
from rig.made_run import NOWHERE, MadeRun, digest_of, holding, peer_of
from rig.showing import shown_under

DEAD_AFTER_S = 10.0


class Split(MadeRun):
    """Ann, bob and cat made some versions; then the run went back, and ann and bob hold what it went back to."""

    def __init__(self, was: int = 8, now: int = 4, fragments: int = 1) -> None:
        super().__init__(
            Manifest(
                run=RunSection(rounds=20),
                round=RoundSection(fragments=fragments),
                net=NetSection(dead_after_s=DEAD_AFTER_S),
                checkpoint=CheckpointSection(every_rounds=2),
            )
        )
        self.core.write(ModelFixed(model=MODEL, peer=peer_of("ann")))
        digests = [digest_of(0, fragment) for fragment in range(fragments)]
        self.core.write(Genesis(digest=digests[0], peer=peer_of("ann"), others=tuple(digests[1:])))
        self.core.write(DataFixed(samples=1000, peer=peer_of("ann")))
        self.core.write(Granted(peer=peer_of("cat"), lease=Lease(1, 0, 0, 100, 0)))
        for fragment in range(fragments):
            for name in ("ann", "bob", "cat"):
                self.core.write(Vouched(peer=peer_of(name), fragment=fragment))
            for version in range(1, was + 1):
                used = {peer_of("cat"): (Used(1, 10 * version),)}
                self.commits({peer_of("ann"): (), peer_of("bob"): (), **used}, fragment)
        self.going_back = GoingBack(self.core, self.conductors)
        self.guidance = Guidance(
            self.core, self.conductors, Lending(self.core, self.conductors), self.going_back
        )
        self.going_back.go_back([now] * fragments, "it was lost")
        for name in ("ann", "bob"):
            self.comes(name, *[now] * fragments, era=1)
        self.effects()

    def comes(self, name: str, *versions: int, era: int = 0, **changes: object) -> tuple[Member, Tick]:
        """It says that it holds these versions, of that era; what it is told."""
        member = self.core.members.members.get(peer_of(name)) or self.enters(name)
        beat = self.says(member, **{"fragments": holding(*versions), "era": era, **changes})
        self.guidance.on_beat(member, beat)
        return member, self.tick(member)

    def comes_showing(self, name: str, version: int, shown: bytes, digest: bytes = b"") -> None:
        """It names that version's digest, or another one, and shows this under the version's nonce."""
        member = self.enters(name)
        said = replace(holding(version)[0], digest=digest or digest_of(version), shown=shown)
        beat = replace(self.says(member, fragments=holding(version), era=0), fragments=(said,))
        self.guidance.on_beat(member, beat)

    def tick(self, member: Member) -> Tick:
        effects = self.core.take_effects()
        self.written += [each.record for each in effects if type(each).__name__ == "Write"]  # type: ignore[union-attr]
        self.said = [each.text for each in effects if type(each).__name__ == "Note"]  # type: ignore[union-attr]
        told = [e.message for e in effects if type(e).__name__ == "Tell" and e.peer == member.peer]  # type: ignore[union-attr]
        return [each for each in told if isinstance(each, Tick)][-1]

    @property
    def versions(self) -> list[int]:
        return [book.version for book in self.core.ledger.books]


def test_P20_whoever_comes_back_with_newer_state_wins_it_back() -> None:
    run = Split(was=8, now=4)
    run.commits({peer_of("ann"): ()})
    _, told = run.comes("cat", 8)
    assert (run.versions, run.core.ledger.era) == ([8], 2)
    [record] = [each for each in run.written if isinstance(each, WonBack)]
    assert (record.of_era, record.versions) == (0, (8,))
    assert (told.era, told.fragments[0].version, dict(told.fragments[0].digests)[8]) == (2, 8, digest_of(8))
    assert told.era_because.startswith(
        "cat came back with version 8 of an earlier era; what was made since then, up to"
    )
    _, told = run.comes("cat", 8, era=2)
    assert told.era_because == "", "it has heard that"
    _, told = run.comes("ann", 5, era=1)
    assert told.era == 2 and "version 5, is void, and its samples are trained again" in told.era_because


def test_its_books_are_those_of_the_era_that_was_given_up_and_no_lease_from_before_counts() -> None:
    run = Split(was=8, now=4)
    ledger = run.core.ledger
    run.core.write(Granted(peer=peer_of("ann"), lease=Lease(2, 0, 40, 60, 40)))
    run.commits({peer_of("ann"): (Used(2, 50),)})
    assert ledger.leases.committed_samples == 50 and ledger.tokens == 50
    run.comes("cat", 7)
    assert run.versions == [7] and ledger.tokens == 70 and ledger.loss == 1.0
    assert ledger.leases.held == {} and ledger.leases.committed_samples == 70
    assert ledger.leases.returned == [Range(0, 70, 100, (70,))]
    assert sorted(ledger.books[0].digests) == list(range(8)) and max(ledger.books[0].commits) == 7
    replayed, folded = run.replayed(), run.new_ledger()
    folded.apply(from_bytes(to_bytes(replayed.folded(9))))
    for each in (replayed, folded):
        assert (each.leases, each.version, each.tokens, each.abandoned) == (
            ledger.leases, 7, 70, ledger.abandoned
        )  # fmt: skip


def test_who_comes_with_even_more_of_it_wins_that_too() -> None:
    run = Split(was=8, now=4)
    run.comes("cat", 6)
    assert run.versions == [6] and run.core.ledger.abandoned is not None
    run.comes("bob", 8)
    assert run.versions == [8] and run.core.ledger.abandoned is None, "there is no more of it"


def test_where_the_run_has_gone_as_far_the_one_that_comes_back_is_told_so_and_takes_its_state() -> None:
    run = Split(was=6, now=4)
    for _ in range(2):
        run.commits({peer_of("ann"): ()})
    _, told = run.comes("cat", 6)
    assert (run.versions, run.core.ledger.era, told.era) == ([6], 1, 1)
    assert told.era_because == (
        "it holds version 6 of an earlier era, which the run had gone back from; the run has gone as far since, or "
        "further: it is at version 6 now. What was learned in between is lost; the run's state is taken"
    )
    assert run.said == [f"cat: {told.era_because}"], "the host hears it as well"
    _, told = run.comes("cat", 6)
    assert told.era_because and run.said == [], "once"


def test_a_state_that_is_not_that_eras_wins_nothing() -> None:
    run = Split(was=8, now=4)
    wrong = replace(holding(8)[0], digest=digest_of(7))
    run.comes("cat", 8, fragments=(wrong,))
    assert run.versions == [4] and run.core.ledger.era == 1


def test_whoever_was_there_and_names_the_right_digest_wins_nothing_by_that_alone() -> None:
    """Its process is a new one, say, and has read the digest somewhere: by its word the run would be stuck."""
    run = Split(was=8, now=4)
    nonce = run.core.ledger.nonce_of(0, 8)
    for shown in (b"", shown_under(nonce, b"other bytes"), shown_under(bytes(32), digest_of(8))):
        run.comes_showing("cat", 8, shown)
        assert run.versions == [4] and run.core.ledger.era == 1
    run.comes_showing("cat", 8, shown_under(nonce, digest_of(8)))
    assert run.versions == [8], "the same word of one that holds it"


def test_whoever_shows_one_chunk_and_names_another_state_wins_nothing() -> None:
    """It changed a chunk that the nonce does not draw."""
    run = Split(was=8, now=4)
    shown = shown_under(run.core.ledger.nonce_of(0, 8), digest_of(8))
    run.comes_showing("cat", 8, shown, digest=digest_of(7))
    assert run.versions == [4] and run.core.ledger.era == 1


def test_a_version_whose_digest_was_never_settled_is_not_waited_for() -> None:
    """All who made it were lost before they agreed: nothing says which state was the right one."""
    run = Split(was=8, now=4)
    abandoned = run.core.ledger.abandoned
    assert abandoned is not None
    del abandoned.books[0].digests[8], abandoned.books[0].shown[8]
    _, told = run.comes("cat", 8)
    assert (run.versions, told.era) == ([4], 1)
    assert "its digest was never settled" in told.era_because


def test_a_stranger_that_names_the_right_digest_wins_nothing() -> None:
    """It was not there when the version was made, and never showed that it holds it."""
    run = Split(was=8, now=4)
    run.comes("zoe", 8)
    assert run.versions == [4] and run.core.ledger.era == 1


def test_what_the_host_undid_is_not_won_back() -> None:
    run = Split(was=8, now=6)
    run.going_back.go_back([4], "spoiled", final=True)
    _, told = run.comes("cat", 8)
    assert run.versions == [4] and told.era == 2 and told.era_because == "spoiled"


def test_of_two_eras_that_were_given_up_the_one_that_came_further_is_kept() -> None:
    run = Split(was=8, now=4)
    run.commits({peer_of("ann"): ()})
    run.going_back.go_back([2], "lost again")
    run.comes("cat", 8)
    assert run.versions == [8] and run.core.ledger.era == 3


def test_until_it_is_decided_a_member_hears_nothing_of_the_younger_era() -> None:
    """Fragment 1 of that era is with nobody here yet, and the younger era has another version of it."""
    run = Split(was=8, now=4, fragments=2)
    run.commits({peer_of("ann"): ()}, fragment=1)
    _, told = run.comes("cat", 8, -1)
    assert (told.era, told.goal, run.versions) == (0, Goal.WAIT, [4, 5])
    assert [(each.version, each.digests, each.verified) for each in told.fragments] == [(8, (), False)] * 2
    assert (
        "waiting for whether that can be won back" in told.reason and told.leases is None and told.void == ()
    )
    run.comes("bob", -1, 7)
    assert (run.versions, run.core.ledger.era) == ([8, 7], 2), "bob brought the rest of it"


def test_what_cannot_be_won_back_is_not_waited_for_for_ever() -> None:
    run = Split(was=8, now=4, fragments=2)
    run.commits({peer_of("ann"): ()}, fragment=1)
    run.comes("cat", 8, -1)
    run.core.now += PATIENCE_IN_DEAD * DEAD_AFTER_S
    _, told = run.comes("cat", 8, -1)
    assert told.era == 1 and "nobody came with the rest of it" in told.era_because


def test_what_is_newer_of_one_fragment_does_not_cost_a_newer_version_of_another() -> None:
    run = Split(was=6, now=4, fragments=2)
    for _ in range(3):
        run.commits({peer_of("ann"): ()}, fragment=1)
    run.comes("cat", 6, 6)
    assert (run.versions, run.core.ledger.era) == ([4, 7], 1)


def test_a_fragment_that_stayed_where_the_eras_part_belongs_to_both() -> None:
    run = Split(was=8, now=4, fragments=2)
    _, told = run.comes("cat", 8, -1)
    assert (run.versions, told.era) == ([8, 4], 2)


def test_a_fragment_that_nobody_holds_keeps_a_run_that_is_founded_anew_from_being_won_back() -> None:
    run = Split(was=3, now=0, fragments=2)
    for name in ("ann", "bob"):
        run.comes(name, 0, -1, era=1)
    run.comes("cat", 3, -1)
    assert run.versions == [0, 0], "version 3 of fragment 0 is no model without fragment 1"
    run.comes("ann", -1, 0, era=1)
    run.comes("cat", 3, -1)
    assert run.versions == [3, 0]


def test_a_member_that_only_missed_the_news_is_told_of_the_era_at_once() -> None:
    run = Split(was=8, now=4)
    _, told = run.comes("cat", 3)
    assert told.era == 1 and told.era_because == "it was lost"
    _, told = run.comes("dan", -1)
    assert told.era == 1 and NOWHERE.version == -1
