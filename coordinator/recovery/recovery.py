"""Recovery: the run goes back to an older state where nobody has the newest any more, by itself or by the host's word.

Where the mode begins.  Pure.  The core knows what it means that a run went back (the record `RolledBack`, eras); this
says whether, when and how far.  Without this folder a run that lost its newest state waits for a peer that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from farflung.coordinator.ledger.ledger import HolderMark
from farflung.coordinator.ledger.records import RolledBack
from farflung.coordinator.modes.registry import CoordinatorMode, ModeTools
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.round_driver import RoundDriver, in_this_era, newest_held
from farflung.protocol.errors import AbortCause, UserError
from farflung.protocol.messages import Beat, GoBack, Order, Reply, Rewind
from farflung.protocol.mode_words import ShelfBeat, ShelvedList
from farflung.protocol.round_words import section
from farflung.protocol.states import Phase

# ---- rollback ----------------------------------------------------------------------------------------------
# When nobody holds the newest version any more: whether, when and how far the run goes back. Pure.
#
# Looked at on every timer. The run goes back only to a version of its own: a state whose digest stands in the
# ledger and that a living member holds, or says that it can bring (`Shelves`). Peers that hold the whole
# model do so by themselves only when those who may hold newer state are accounted for: a connection that is
# cut looks from here like the death of everybody behind it, and behind it such a run goes on. Else the host
# decides.
#
# A run of stages waits for nobody's word. Nothing can go on behind a cut connection, since every version of
# it is one record of this coordinator; and one dead peer is often the only one with its stage's newest
# version. So it goes back by one version within seconds, in all stages, and further after `go_back_after_s`.
# The record `RolledBack` begins a new era; what peers say of versions in an older era does not count any
# more, and what they hold of it is given up: they take the run's state.

# ---- shelves -----------------------------------------------------------------------------------------------
# Which versions lie on disks, by what peers say. Pure.

REMEMBERED_MOST = 1024  # peers that are away


class Shelves:
    """Which versions peers say they can bring, by what each of them says in its beats.

    A word counts while its digest is one that the run knows: so it stays true over eras, and a checkpoint of a version
    that was undone counts for nothing.  Who may lie: everybody.  A claim makes nobody a holder; it is a reason to go
    back to that version, or to wait for it for a while.  What peers said that are away now is remembered for
    people: before the host begins from scratch, they are worth waiting for.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._said: dict[str, ShelvedList] = {}  # by peer

    def hear(self, peer: str, beat: Beat) -> None:
        said = section(ShelfBeat, beat.sections)
        shelf = said.shelf if said is not None else ()
        if shelf == self._said.get(peer, ()):
            return
        self._said.pop(peer, None)  # the last one that said something new is the last one to be forgotten
        self._said[peer] = shelf
        away = [each for each in self._said if each not in self._core.members.alive]
        for each in away[: max(0, len(away) - REMEMBERED_MOST)]:
            del self._said[each]

    def brought(self, driver: RoundDriver) -> set[int]:
        """Versions that members which hold this fragment, or are to hold it, can bring."""
        return self._versions(driver, (member.peer for member in driver.holders))

    def here(self, driver: RoundDriver) -> set[int]:
        """... or any member, whatever it holds: its place may have checkpoints of several stages."""
        return self._versions(driver, self._core.members.alive)

    def peers_with(self, driver: RoundDriver) -> set[str]:
        """Who can bring some version of this fragment that the run knows, wherever that peer is now."""
        return {peer for peer in self._said if self._versions(driver, [peer])}

    def _versions(self, driver: RoundDriver, peers: Iterable[str]) -> set[int]:
        # Version 0 is founded by the host's word alone.
        known, number = driver.book.digests, driver.fragment
        return {
            each.version
            for peer in peers
            for each in self._said.get(peer, ())
            if each.version > 0 and each.is_of(number, known.get(each.version, b""))
        }


# ---- rollback ----------------------------------------------------------------------------------------------

# A coordinator that has just begun waits so many times dead_after_s before it says that everybody is gone.
AWAIT_DEAD = 2.0
# A run of stages that can go back by one version waits so much longer for the newest than until its holder counts as
# dead; and so long for others who may bring more.
SOON_S = 5.0
# What a member is at that has no word of its commit.
TAKING = frozenset({Phase.SCATTER, Phase.GATHER, Phase.APPLY})
NAMED = 3  # so many of those who are waited for are named; of the others the number is told


class Rollback:
    def __init__(self, core: Core, drivers: Sequence[RoundDriver]) -> None:
        self._core = core
        self._drivers = drivers
        # Of each fragment: the newest version that somebody held at the last look, and since when it is not the newest.
        self._held = [-1] * len(drivers)
        self._lost_since: list[float | None] = [None] * len(drivers)
        self._told_waiting = ""
        self.shelves = Shelves(core)
        self._short_since: float | None = None  # nobody holds the newest version of some fragment
        self._offer: tuple[list[int], float] = [], 0.0  # where it could go back to, and since when

    def together(self, held: Sequence[int]) -> list[int]:
        """Stages of a model go back to one version, the newest that all of them have: somebody there holds it (`held`:
        of each stage the newest), or can bring it.  -1: there is none."""
        if self._core.manifest.pipeline.stages == 1:
            return list(held)
        found = []
        for driver, version in zip(self._drivers, held, strict=True):
            # The newest one of all is there once it is shown: until then somebody reads it, or lies.
            brought = {v for v in self.shelves.brought(driver) if v < driver.book.version}
            found.append(brought | {version})
        return [max(set.intersection(*found), default=-1)] * len(found)

    # ---- going back by itself ----------------------------------------------------------------------------

    def check_what_is_held(self) -> bool:
        """True if the run went back now."""
        core = self._core
        may = (
            core.ledger.learned and not (core.finished and core.ledger.eras.delivered) and core.members.alive
        )
        for at, driver in enumerate(self._drivers):
            held, before = newest_held(driver), self._held[at]
            if held >= driver.book.version or not may:
                self._lost_since[at] = None
            elif self._lost_since[at] is None or held != before:
                self._lost_since[at] = core.now
            self._held[at] = held
        lost_s = [core.now - since for since in self._lost_since if since is not None]
        if not lost_s:
            self._told_waiting, self._short_since = "", None
            return False
        if self._short_since is None:
            self._short_since = core.now
        settled = self.settled_held()
        back_to, dead_after_s = self.together(settled), core.members.liveness.dead_after_s
        if back_to != self._offer[0]:
            self._offer = back_to, core.now
        patience_s, waited_s = self._patience_s(back_to), max(lost_s)
        if patience_s and self._may_be_soon(back_to):
            waited_s = max(waited_s, core.now - self._short_since) if self._is_steady else 0.0
        if not patience_s or waited_s < patience_s:
            return False
        if min(lost_s) < min(patience_s, dead_after_s):
            return False  # some fragment's newest version is just being applied: it shall not be lost as well
        if settled != self._held and waited_s < patience_s + 2 * dead_after_s:
            return False  # that much later the digest of a version that is held is settled, or never will be
        if settled != self.settled_held(core.now - dead_after_s / 2):
            return False  # whoever holds it says nothing any more: it comes back, or is dead in a moment
        if self._is_being_taken(back_to) and waited_s < patience_s + 2 * dead_after_s:
            return False
        if min(back_to) < 0 or not self._are_accounted_for(back_to):
            self._tell_who_is_waited_for(settled)
            return False
        now, was = _listed(back_to), self._versions
        self.go_back(back_to, f"nobody online had version {was}; version {now} was the newest in reach")
        return True

    @property
    def _in_stages(self) -> bool:
        return self._core.manifest.pipeline.stages > 1

    def _patience_s(self, back_to: Sequence[int]) -> float:
        """0: the run never goes back by itself."""
        usual_s = self._core.manifest.checkpoint.go_back_after_s
        soon_s = self._core.members.liveness.dead_after_s + SOON_S
        return min(usual_s, soon_s) if self._may_be_soon(back_to) else usual_s

    def _may_be_soon(self, back_to: Sequence[int]) -> bool:
        """A run of stages gives up one version, of all that it ever had, and nobody here says that it can bring it: who
        does may be about to read it, or lie, and is waited for as long as for any other."""
        if not self._in_stages:
            return False
        furthest = max(self._core.ledger.eras.furthest, *(each.book.version for each in self._drivers))
        short = [
            each for each, since in zip(self._drivers, self._lost_since, strict=True) if since is not None
        ]
        return min(back_to) >= furthest - 1 and not any(
            each.book.version in self.shelves.brought(each) for each in short
        )

    @property
    def _is_steady(self) -> bool:
        """Those who were here before this coordinator began had the time to come back, and nobody brought more in the
        last seconds."""
        core = self._core
        begun_s = core.now - core.began_at - AWAIT_DEAD * core.members.liveness.dead_after_s
        return min(begun_s, core.now - self._offer[1]) >= SOON_S

    def _is_being_taken(self, versions: Sequence[int]) -> bool:
        """Somebody made what would be given up, was never away since, and is about to take it, or still in its round:
        it may hear late that its own version is committed."""
        for driver, version, since in zip(self._drivers, versions, self._lost_since, strict=True):
            for member in driver.holders:
                takes = member.beat is not None and member.beat.phase in TAKING
                stayed = since is not None and member.place.since <= since
                if takes and stayed and driver.book.may_hold(member.peer) > version:
                    return True
        return False

    def _are_accounted_for(self, versions: Sequence[int]) -> bool:
        """Nobody who is away holds what the run would give up; or too few to matter.  Of a pipeline nobody can."""
        if self._in_stages:
            return True
        core = self._core
        here = [member for member in core.members.alive.values() if member.beat is not None]
        # Who was cut off together comes back together: the first one, who may well have done most of the work, is given
        # time to be followed by the rest.
        back_s = AWAIT_DEAD * core.members.liveness.dead_after_s
        all_here = [member.peer for member in here]
        settled = [member.peer for member in here if core.now - member.place.since >= back_s]
        pairs = zip(self._drivers, versions, strict=True)
        return all(
            are_accounted_for(each.book.holders, version, all_here, settled) for each, version in pairs
        )

    def is_lost(self, driver: RoundDriver) -> bool:
        """Nobody holds its newest version, and it is not just being applied."""
        since = self._lost_since[driver.fragment]
        return since is not None and self._core.now - since >= self._core.members.liveness.dead_after_s

    def lost(self) -> dict[int, str]:
        """Fragments whose newest version nobody has, each with why, who may bring it and what the host can do."""
        core = self._core
        # Nobody is here at all: after a restart everybody may be on the way.
        alone = core.ledger.learned and not core.members.alive and not core.finished
        alone = alone and core.now - core.began_at >= AWAIT_DEAD * core.members.liveness.dead_after_s
        return {each.fragment: self.reason(each) for each in self._drivers if alone or self.is_lost(each)}

    def settled_held(self, heard_since: float = float("-inf")) -> list[int]:
        """Of each fragment the newest settled version that a living member holds; -1 if there is none."""
        return [newest_held(driver, True, heard_since) for driver in self._drivers]

    # ---- a new era ---------------------------------------------------------------------------------------

    def go_back(self, versions: Sequence[int], reason: str, undone: bool = False) -> None:
        """`undone`: by the host, though somebody has it."""
        core = self._core
        if min(versions) > 0 or newest_held(self._drivers[0], settled=True) == 0:
            core.note(f"the run went back from version {self._versions} to {_listed(versions)}: {reason}")
        else:
            core.note(f"the run starts again at version {_listed(versions)}: {reason}")
        for driver in self._drivers:
            if driver.round is not None:
                driver.abort(AbortCause.WENT_BACK, "the run goes to an older state")
        self._lost_since = [None] * len(self._drivers)
        self._short_since = None
        core.write(RolledBack(versions=tuple(versions), reason=reason, undone=undone))
        for member in core.members.alive.values():
            for standing in member.standings.values():
                standing.verified = standing.vouched = False
                standing.ready_since = None
            if member.beat is not None:
                member.beat = in_this_era(member.beat, core.ledger.eras.number)

    @property
    def _versions(self) -> str:
        return _listed([driver.book.version for driver in self._drivers])

    # ---- in plain words ----------------------------------------------------------------------------------

    def may_hold_more(self, driver: RoundDriver, version: int) -> list[str]:
        """Peers that are away, did not say good-bye, and may hold a newer version than this; those first of whom most
        went into the run."""
        alive, holders = self._core.members.alive, driver.book.holders
        away = [peer for peer, holder in holders.items() if holder.reached > version and peer not in alive]
        return sorted(away, key=lambda peer: (-holders[peer].tokens, peer))

    def may_bring(self, driver: RoundDriver) -> list[str]:
        """Peers that are away, and on whose disk some version of this fragment may lie: those first that may hold the
        newest, then who said that it has one, then all that ever held any."""
        alive, holders = self._core.members.alive, driver.book.holders
        said = self.shelves.peers_with(driver)
        others = sorted(holders, key=lambda peer: (peer not in said, -holders[peer].tokens, peer))
        those = [*self.may_hold_more(driver, -1), *sorted(said), *others]
        return [peer for peer in dict.fromkeys(those) if peer not in alive]

    def named(self, peers: Sequence[str]) -> str:
        """For texts."""
        names = [self._core.name(peer) for peer in peers[:NAMED]]
        more = len(peers) - len(names)
        if more:
            names.append("1 other peer" if more == 1 else f"{more} other peers")
        return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)

    def _tell_who_is_waited_for(self, settled: Sequence[int]) -> None:
        """To the host, once: it can go back without them."""
        lost = [c for c, version in zip(self._drivers, settled, strict=True) if version < c.book.version]
        told = self.reason(lost[0]) if lost else ""
        if told != self._told_waiting:
            self._told_waiting = told
            self._core.note(told)

    def reason(self, driver: RoundDriver) -> str:
        """Why a member that lacks this fragment's newest version has to wait, for whom, and what the host can do."""
        core, newest = self._core, driver.book.version
        lost = f"nobody online has version {newest}{core.of(driver.fragment)}"
        patience_s = core.manifest.checkpoint.go_back_after_s
        offer = self._held[driver.fragment]
        if offer >= newest:
            return f"waiting for the peers that hold version {newest}{core.of(driver.fragment)} to show it"
        if core.finished and core.ledger.eras.delivered:
            out = (
                "its model was handed out already; waiting for a peer with a checkpoint of it (Ctrl-C leaves)"
            )
            return f"the run is complete, and {lost}: {out}"
        all_held = self.together(self._held)
        offer = all_held[driver.fragment]
        newest_is = (
            "the newest held is"
            if core.manifest.pipeline.stages == 1
            else "the newest that all stages have is"
        )
        if min(all_held) < 0:
            return f"{lost}: {self._nothing_in_reach(self._drivers[all_held.index(min(all_held))], driver)}"
        away = self.may_hold_more(driver, offer)
        whom = f"{self.named(away)}, which may have it" if away else "a peer that has it"
        if not patience_s:
            return (
                f"{lost}, {newest_is} {offer}; go_back_after_s = 0: waiting for {whom}; the host can go back: "
                "farflung rewind run.toml"
            )
        if self._are_accounted_for(all_held):
            # No countdown: a text that changes would be told again and again.
            within_s = self._patience_s(all_held)
            return (
                f"{lost}: the run goes back to version {offer} unless a peer brings it within {within_s:g} s"
            )
        return (
            f"{lost}, {newest_is} {offer}: waiting for {whom} and did not say good-bye; the host can go back "
            "without: farflung rewind run.toml"
        )

    def _nothing_in_reach(self, empty: RoundDriver, lost: RoundDriver) -> str:
        """Nobody who is here has any version of `empty`, or, of stages, one in common.  To begin from scratch is named
        only where no disk is left that may have one."""
        away = self.may_bring(lost) or self.may_bring(empty)
        if away:
            return (
                f"waiting for {self.named(away)}, which may have it or an older one on disk, or for a peer with a "
                "checkpoint (join --checkpoints)"
            )
        return (
            "waiting for a peer with a checkpoint (join --checkpoints); the host can restart from scratch: "
            "farflung rewind --from-scratch run.toml"
        )


def are_accounted_for(
    holders: Mapping[str, HolderMark],
    version: int,
    present: Sequence[str],
    settled: Sequence[str],
) -> bool:
    """May the run go back to this version, held by somebody who is here, while nobody here holds more?

    Yes, if nobody who is away can hold more; or if of those who can, by their committed tokens, more than half are here
    (and hold no more), and have been for a while (`settled`).  Who never brought anything has no say, however many they
    are.
    """
    can = {peer: holder.tokens for peer, holder in holders.items() if holder.reached > version}
    if can.keys() <= set(present):
        return True
    long_here = can.keys() & set(settled)
    return 2 * sum(can[peer] for peer in long_here) > sum(can.values())


# ---- rollback orders ---------------------------------------------------------------------------------------
# The host's orders about older states, both by `farflung rewind`. Pure.
#
# To go back is for a run that lost its newest state: it goes to the newest version that somebody here holds
# or has a checkpoint of, without waiting for those who are away; what they hold is given up. To rewind is to
# undo rounds that somebody may well hold, because they were found to be spoiled. Neither is done before the
# host has read what is lost by it, and has said so again.


class RollbackOrders:
    def __init__(self, core: Core, drivers: Sequence[RoundDriver], rollback: Rollback) -> None:
        self._core = core
        self._drivers = drivers
        self._rollback = rollback

    def obey(self, order: GoBack | Rewind) -> Reply:
        if not self._core.ledger.learned:
            raise UserError("the run has not learned anything yet: there is nothing to go back from")
        if isinstance(order, Rewind):
            return self._rewind(order)
        return self._go_back(order)

    # ---- going back to what is left ------------------------------------------------------------------------

    def _go_back(self, order: GoBack) -> Reply:
        now, there = self._now, self._there
        if there == now:
            raise UserError(
                f"somebody here holds version {self._listed(now)}, the run's newest: there is nothing to go back from "
                "(to undo rounds: farflung rewind run.toml VERSION)"
            )
        if order.to == 0:
            if min(there) >= 0 and max(there) > 0:
                raise UserError(
                    f"version {self._listed(there)} is here: farflung rewind run.toml goes to that; the run restarts "
                    "from scratch only when nothing is left of it, or of a fragment"
                )
            return self._done(order, [0] * len(now), self._lost_by_founding(there))
        if min(there) < 0:
            raise UserError(
                f"nobody online has any version of {self._what_is_lost(there)}, or a checkpoint of one"
                f"{self._where_it_may_be(there)}"
            )
        versions = there if order.to is None else self._at_most(order.to)
        if order.to is not None and versions != there:
            raise UserError(
                f"the newest that is here is version {self._listed(there)}: farflung rewind run.toml goes to that, "
                f"and farflung rewind run.toml {order.to} undoes more rounds"
            )
        awaited = self._awaited(versions)
        told = (
            f"nobody online has version {self._listed(now)}. Going back to version {self._listed(versions)} discards "
            f"{self._rounds(versions)} for good; their samples are trained again. {awaited}Whoever comes back with them"
            " drops them, and takes the run's state"
        )
        return self._done(order, versions, told)

    def _what_is_lost(self, there: Sequence[int]) -> str:
        """The run, or the fragments of which nothing is left: what is here of others makes no model without them."""
        if self._in_stages:
            return "the run that all stages have in common"
        gone = [str(number) for number, version in enumerate(there) if version < 0]
        if max(there) <= 0 or not gone:
            return "the run"
        return f"fragment{'s' if len(gone) > 1 else ''} {', '.join(gone)}"

    def _lost_by_founding(self, there: Sequence[int]) -> str:
        nothing = [0] * len(self._now)
        tokens = self._core.ledger.totals.tokens
        lost = f"{self._rounds(nothing)}, {tokens:,} tokens, up to version {self._listed(self._now)}"
        what = self._what_is_lost(there)
        useless = "" if self._in_stages or what == "the run" else ", and a model without it is none"
        away = self._may_bring(there)
        wait = f"{away} may still have it on disk: wait for them if you can. " if away else ""
        return (
            f"nobody online has any version of {what}{useless}. This restarts training from the oldest peer's initial "
            f"weights and discards all that was learned: {lost}. {wait}{self._awaited(nothing)}Whoever comes back with "
            "them drops them, and checkpoints of them are not read any more"
        )

    def _may_bring(self, there: Sequence[int]) -> str:
        """Who is away, and may have some version of what is not here; empty: nobody."""
        short = [each for each, version in zip(self._drivers, there, strict=True) if version < 0]
        away = {peer: None for each in short or self._drivers for peer in self._rollback.may_bring(each)}
        return self._rollback.named(list(away))

    def _where_it_may_be(self, there: Sequence[int]) -> str:
        """To restart from scratch is named only where no disk is left that the run knows of."""
        found = f" ({self._of_each_stage()})" if self._in_stages else ""
        if away := self._may_bring(there):
            return (
                f"{found}. {away} may have one in memory or on disk: wait for them, or start a peer that has a "
                "checkpoint (join --checkpoints)"
            )
        return (
            f"{found}. Start a peer that has one (join --checkpoints), or restart from scratch: "
            "farflung rewind --from-scratch run.toml"
        )

    def _of_each_stage(self) -> str:
        held = self._rollback.settled_held()
        told = []
        for driver in self._drivers:
            has = self._rollback.shelves.brought(driver) | {held[driver.fragment]} - {-1}
            told.append(f"stage {driver.fragment} has {_listed(sorted(has)) if has else 'none'}")
        return ", ".join(told)

    # ---- undoing rounds ------------------------------------------------------------------------------------

    def _rewind(self, order: Rewind) -> Reply:
        versions, now = self._at_most(order.to), self._now
        if versions == now:
            raise UserError(
                f"the run is at version {self._listed(now)}: there is nothing to undo after {order.to}"
            )
        if not self._is_there(versions):
            raise UserError(f"nobody online has version {order.to}, or a checkpoint of it; {self._offers()}")
        told = (
            f"Rewinding to version {self._listed(versions)} undoes {self._rounds(versions)} for good: every peer drops "
            "them, and their samples are trained again"
        )
        return self._done(order, versions, told)

    def _is_there(self, versions: Sequence[int]) -> bool:
        """The digest of each is kept, and somebody has it whole."""
        held, brought = self._rollback.settled_held(), self._rollback.shelves.brought
        return all(
            version in driver.book.digests and version in (brought(driver) | {held[driver.fragment]})
            for driver, version in zip(self._drivers, versions, strict=True)
        )

    def _offers(self) -> str:
        brought, now = self._rollback.shelves.brought, max(self._now)
        versions = {v for driver in self._drivers for v in brought(driver) if v < now}
        known = sorted(version for version in versions if self._is_there(self._at_most(version)))
        if not known:
            return "no older version is online, or in a checkpoint of a peer that is"
        return f"rewind can go to {_listed(known)}"

    # ---- what both need ------------------------------------------------------------------------------------

    def _done(self, order: GoBack | Rewind, versions: list[int], told: str) -> Reply:
        found = {"from": self._now, "to": versions, "done": order.sure}
        if not order.sure:
            return Reply(text=told, found=found)
        why = f" ({order.reason})" if order.reason else ""
        undone = isinstance(order, Rewind)
        what = (
            f"the host undid the rounds after version {self._listed(versions)}"
            if undone
            else "the host said so"
        )
        self._rollback.go_back(versions, f"{what}{why}; what was learned after it is void", undone)
        return Reply(
            text=f"the run is at version {self._listed(versions)}, era {self._core.ledger.eras.number}",
            found=found,
        )

    @property
    def _now(self) -> list[int]:
        return [driver.book.version for driver in self._drivers]

    @property
    def _in_stages(self) -> bool:
        return self._core.manifest.pipeline.stages > 1

    def _listed(self, versions: Sequence[int]) -> str:
        """Stages of a model have one version; fragments have one each."""
        return _listed(versions[:1] if self._in_stages else versions)

    @property
    def _there(self) -> list[int]:
        """Of each fragment the newest settled version that somebody here holds, or else has a checkpoint of; -1 if
        there is none."""
        held, brought = self._rollback.settled_held(), self._rollback.shelves.brought
        if self._in_stages:
            return self._rollback.together(held)
        return [max([held[driver.fragment], *brought(driver)]) for driver in self._drivers]

    def _at_most(self, version: int) -> list[int]:
        return [min(version, now) for now in self._now]

    def _rounds(self, versions: Sequence[int]) -> str:
        lost = [now - version for now, version in zip(self._now, versions, strict=True)]
        # One round moves all stages of a model; fragments have rounds of their own.
        count = max(lost) if self._in_stages else sum(lost)
        return "1 round" if count == 1 else f"{count} rounds"

    def _awaited(self, versions: Sequence[int]) -> str:
        """Who may have more than this, as a sentence or nothing."""
        pairs = zip(self._drivers, versions, strict=True)
        away = {peer: None for each, version in pairs for peer in self._rollback.may_hold_more(each, version)}
        if not away:
            return ""
        return f"{self._rollback.named(list(away))} may hold them and did not say good-bye. "


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(str(version) for version in versions)


# ---- recovery ----------------------------------------------------------------------------------------------


class Recovery(CoordinatorMode):
    def __init__(self, core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> None:
        self._drivers = drivers
        self.rollback = Rollback(core, drivers)
        self._orders = RollbackOrders(core, drivers, self.rollback)

    def hear(self, peer: str, beat: Beat) -> None:
        self.rollback.shelves.hear(peer, beat)

    def on_timer(self) -> bool:
        return self.rollback.check_what_is_held()

    def why_wait(self, fragment: int, is_given: bool) -> str:
        driver = self._drivers[fragment]
        return "" if is_given and not self.rollback.is_lost(driver) else self.rollback.reason(driver)

    def lost(self) -> Mapping[int, str]:
        return self.rollback.lost()

    def saved_by(self, fragment: int) -> AbstractSet[str]:
        return self.rollback.shelves.peers_with(self._drivers[fragment])

    def obey(self, order: Order) -> Reply | None:
        return self._orders.obey(order) if isinstance(order, GoBack | Rewind) else None


made = Recovery
