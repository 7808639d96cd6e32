"""Who comes back with state of an era that the run went back from: it counts for nothing, and is told why.

The guidance on virtual time, with members put in by hand; whole runs are in whole/test_going_back.py.
"""

from __future__ import annotations

from farflung.coordinator.ledger.records import (
    DataFixed,
    Genesis,
    Granted,
    ModelFixed,
    Vouched,
    from_bytes,
    to_bytes,
)
from farflung.coordinator.recovery.recovery import Rollback
from farflung.coordinator.run.lease_desk import LeaseDesk
from farflung.coordinator.run.membership import Member
from farflung.coordinator.run.ticks import TickBuilder
from farflung.protocol.manifest import CheckpointSection, Manifest, NetSection, RoundSection, RunSection
from farflung.protocol.messages import Lease, Tick
from farflung.protocol.round_words import Used
from rig.made_part import MODEL
from rig.made_run import NOWHERE, MadeRun, digest_of, holding, peer_of

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
        self.rollback = Rollback(self.core, self.drivers)
        self.tick_builder = TickBuilder(self.core, self.drivers, LeaseDesk(self.core, self.drivers))
        self.rollback.go_back([now] * fragments, "it was lost")
        for name in ("ann", "bob"):
            self.comes(name, *[now] * fragments, era=1)
        self.effects()

    def comes(self, name: str, *versions: int, era: int = 0, **changes: object) -> tuple[Member, Tick]:
        """It says that it holds these versions, of that era; what it is told."""
        member = self.core.members.members.get(peer_of(name)) or self.enters(name)
        beat = self.says(member, **{"fragments": holding(*versions), "era": era, **changes})
        self.tick_builder.on_beat(member, beat)
        return member, self.tick(member)

    def tick(self, member: Member) -> Tick:
        effects = self.core.take_effects()
        self.written += [each.record for each in effects if type(each).__name__ == "Write"]  # type: ignore[union-attr]
        self.said = [each.text for each in effects if type(each).__name__ == "Note"]  # type: ignore[union-attr]
        told = [e.message for e in effects if type(e).__name__ == "Tell" and e.peer == member.peer]  # type: ignore[union-attr]
        return [each for each in told if isinstance(each, Tick)][-1]

    @property
    def versions(self) -> list[int]:
        return [book.version for book in self.core.ledger.books]


def test_P4_newer_state_of_an_older_era_is_no_state_of_the_run() -> None:
    run = Split(was=8, now=4)
    cat, told = run.comes("cat", 8)
    assert (run.versions, run.core.ledger.eras.number) == ([4], 1)
    assert (told.era, told.era_because, told.fragments[0].version) == (1, "it was lost", 4)
    assert cat.beat is not None and cat.beat.fragments == (NOWHERE,) and not cat.standings[0].verified
    _, told = run.comes("cat", 4, era=1)
    assert told.era_because == "", "it has heard that, and took the run's state"


def test_P4_where_the_run_has_gone_as_far_again_a_version_of_the_older_era_settles_nothing() -> None:
    run = Split(was=8, now=4)
    run.commits({peer_of("ann"): ()})
    book = run.core.ledger.books[0]
    book.digests.pop(5)
    run.comes("cat", 5)
    run.drivers[0].settle_digest()
    assert run.versions == [5] and 5 not in book.digests


def test_a_member_that_only_missed_the_news_is_told_of_the_era_at_once() -> None:
    run = Split(was=8, now=4)
    _, told = run.comes("cat", 3)
    assert told.era == 1 and told.era_because == "it was lost"
    _, told = run.comes("dan", -1)
    assert told.era == 1 and NOWHERE.version == -1


def test_a_journal_that_is_folded_says_the_same_of_what_was_gone_back_from() -> None:
    run = Split(was=8, now=4)
    folded = run.new_ledger()
    folded.apply(from_bytes(to_bytes(run.replayed().folded(9))))
    for each in (run.replayed(), folded):
        eras = each.eras
        assert (eras.number, each.version, each.totals.tokens, eras.furthest) == (1, 4, 40, 8)
