"""When nobody holds the newest version any more: whether, when and how far the run goes back.  Pure.

Part of the run machine, looked at on every timer.  The run goes back only to a version of its own: a state whose
digest stands in the ledger and that a living member holds, from its memory or from a checkpoint.  It does so by itself
only when those who may hold newer state are accounted for (coordinator/ledger/eras.py): a line that is cut
looks from here like the death of everybody behind it.  Else the host decides (operator_orders.py).
The record `RolledBack` begins a new era; what peers say of versions in an older era does not count any more, unless
they win it back (winning_back.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from farflung.coordinator.ledger.eras import are_accounted_for
from farflung.coordinator.ledger.records import RolledBack, WonBack
from farflung.coordinator.run.conductor import Conductor
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Member
from farflung.protocol.causes import AbortCause
from farflung.protocol.messages import Beat, FragmentBeat
from farflung.protocol.states import Phase

# A coordinator that has just begun waits so many times dead_after_s before it says that everybody is gone.
AWAIT_DEAD = 2.0
NAMED = 3  # so many of those who are waited for are named; of the others the number is told


class GoingBack:
    def __init__(self, core: Core, conductors: list[Conductor]) -> None:
        self._core = core
        self._conductors = conductors
        # Of each fragment: the newest version that somebody held at the last look, and since when it is not the newest.
        self._held = [-1] * len(conductors)
        self._lost_since: list[float | None] = [None] * len(conductors)
        self._told_waiting = ""
        # (peer, its first fragment) -> versions of which it wrote a checkpoint
        self._saved: dict[tuple[str, int], deque[int]] = {}

    # ---- what members say --------------------------------------------------------------------------------

    def in_this_era(self, beat: Beat) -> Beat:
        """A member that has not heard yet that the run went back holds nothing of it, whatever its numbers say."""
        if beat.era >= self._core.ledger.era:
            return beat
        return msgspec.structs.replace(beat, fragments=tuple(map(_nothing_of, beat.fragments)))

    def hear_of_checkpoints(self, member: Member, beat: Beat) -> None:
        if beat.saved < 0 or beat.era != self._core.ledger.era:
            return
        keep = max(1, self._core.manifest.checkpoint.keep)
        saved = self._saved.setdefault((member.peer, member.stage), deque(maxlen=keep))
        if beat.saved not in saved:
            saved.append(beat.saved)

    @property
    def saved(self) -> set[int]:
        """Versions of which somebody who is here wrote a checkpoint."""
        alive = self._core.members.alive
        return {version for (peer, _), those in self._saved.items() if peer in alive for version in those}

    def saved_of(self, conductor: Conductor) -> set[int]:
        """Of these, the versions of this fragment."""
        here = {(member.peer, member.stage) for member in conductor.holders}
        return {version for place, those in self._saved.items() if place in here for version in those}

    def saved_by(self, stage: int) -> set[str]:
        """Who wrote a checkpoint of this stage, wherever it is now."""
        return {peer for peer, at in self._saved if at == stage}

    def together(self, held: Sequence[int]) -> list[int]:
        """Stages of a model go back to one version, the newest that all of them have: somebody holds it (`held`: of
        each stage the newest), or wrote a checkpoint of it.  -1: there is none."""
        if self._core.manifest.pipeline.stages == 1:
            return list(held)
        found = []
        for conductor, version in zip(self._conductors, held, strict=True):
            known = conductor.book.digests
            saved = {v for v in self.saved_of(conductor) if v in known and v < conductor.book.version}
            found.append(saved | {version})
        return [max(set.intersection(*found), default=-1)] * len(found)

    # ---- going back by itself ----------------------------------------------------------------------------

    def check_what_is_held(self) -> bool:
        """True if the run went back now."""
        core = self._core
        may = core.ledger.learned and not (core.finished and core.ledger.delivered) and core.members.alive
        for at, conductor in enumerate(self._conductors):
            held, before = self.newest_held(conductor), self._held[at]
            if held >= conductor.book.version or not may:
                self._lost_since[at] = None
            elif self._lost_since[at] is None or held != before:
                self._lost_since[at] = core.now
            self._held[at] = held
        lost_s = [core.now - since for since in self._lost_since if since is not None]
        if not lost_s:
            self._told_waiting = ""
        patience_s = core.manifest.checkpoint.go_back_after_s
        if not lost_s or not patience_s or max(lost_s) < patience_s:
            return False
        if min(lost_s) < min(patience_s, core.members.dead_after_s):
            return False  # some fragment's newest version is just being applied: it shall not be lost as well
        settled = self.settled_held()
        if settled != self._held and max(lost_s) < patience_s + 2 * core.members.dead_after_s:
            return False  # that much later the digest of a version that is held is settled, or never will be
        back_to = self.together(settled)
        if settled != self.settled_held(core.now - core.members.dead_after_s / 2):
            return False  # whoever holds it says nothing any more: it comes back, or is dead in a moment
        if self._is_being_taken(back_to) and max(lost_s) < patience_s + 2 * core.members.dead_after_s:
            return False
        if min(back_to) < 0 or not self._are_accounted_for(back_to):
            self._tell_who_is_waited_for(settled)
            return False
        now, was = _listed(back_to), self._versions
        self.go_back(back_to, f"no living peer held version {was}; version {now} was the newest that one did")
        return True

    def _is_being_taken(self, versions: Sequence[int]) -> bool:
        """Somebody made what would be given up, was never away since, and is about to take it: it may hear late that
        its own version is committed."""
        for conductor, version, since in zip(self._conductors, versions, self._lost_since, strict=True):
            for member in conductor.holders:
                takes = member.beat is not None and member.beat.phase == Phase.APPLY
                stayed = since is not None and member.admitted_at <= since
                if takes and stayed and conductor.book.may_hold(member.peer) > version:
                    return True
        return False

    def _are_accounted_for(self, versions: Sequence[int]) -> bool:
        """Nobody who is away can win what the run would give up; or too few to matter."""
        present = [member.peer for member in self._core.members.alive.values() if member.beat is not None]
        pairs = zip(self._conductors, versions, strict=True)
        return all(are_accounted_for(each.book.holders, version, present) for each, version in pairs)

    def is_lost(self, conductor: Conductor) -> bool:
        """Nobody holds its newest version, and it is not just being applied."""
        since = self._lost_since[conductor.fragment]
        return since is not None and self._core.now - since >= self._core.members.dead_after_s

    def lost(self) -> dict[int, str]:
        """Fragments whose newest version nobody has, each with why, who may bring it and what the host can do."""
        core = self._core
        # Nobody is here at all: after a restart everybody may be on the way.
        alone = core.ledger.learned and not core.members.alive and not core.finished
        alone = alone and core.now - core.began_at >= AWAIT_DEAD * core.members.dead_after_s
        return {each.fragment: self.reason(each) for each in self._conductors if alone or self.is_lost(each)}

    def newest_held(
        self, conductor: Conductor, settled: bool = False, heard_since: float = float("-inf")
    ) -> int:
        """`settled`: that the run has agreed on the digest of.  `heard_since`: by somebody who spoke since then."""
        book, newest = conductor.book, -1
        for member in conductor.holders:
            said = conductor.beat_of(member)
            if newest >= book.version:
                break  # in a crowd it is nearly always the first one
            if said is None or said.version <= newest or member.heard_at < heard_since:
                continue
            # A version whose digest is not settled yet is held; so is one that this journal does not know.
            known = book.digests.get(said.version)
            unknown = known is None and said.version >= book.version and not settled
            due = book.shown.get(said.version)
            # An echo of the digest holds nothing.
            shows = due is None or conductor.settling.has_shown(said) == due
            if (said.digest == known and shows) or unknown:
                newest = said.version
        return min(newest, book.version)

    def settled_held(self, heard_since: float = float("-inf")) -> list[int]:
        """Of each fragment the newest settled version that a living member holds; -1 if there is none."""
        return [self.newest_held(conductor, True, heard_since) for conductor in self._conductors]

    # ---- a new era ---------------------------------------------------------------------------------------

    def go_back(self, versions: Sequence[int], reason: str, final: bool = False) -> None:
        """`final`: what is given up was undone by the host, and nobody wins it back."""
        core = self._core
        if min(versions) > 0 or self.newest_held(self._conductors[0], settled=True) == 0:
            core.note(f"the run went back from version {self._versions} to {_listed(versions)}: {reason}")
        else:
            core.note(f"the run starts again at version {_listed(versions)}: {reason}")
        self.begin_era(RolledBack(versions=tuple(versions), reason=reason, final=final), "an older state")
        for place, saved in self._saved.items():
            kept = [version for version in saved if version <= min(versions)]
            self._saved[place] = deque(kept, maxlen=saved.maxlen)

    def win_back(self, of_era: int, versions: Sequence[int], reason: str) -> None:
        self._core.note(f"the run goes on from version {_listed(versions)}: {reason}")
        record = WonBack(of_era=of_era, versions=tuple(versions), reason=reason)
        self.begin_era(record, "a newer state that was won back")
        self._saved.clear()  # they are of the era that is void now, for all that is known

    def begin_era(self, record: RolledBack | WonBack, what: str) -> None:
        core = self._core
        for conductor in self._conductors:
            if conductor.round is not None:
                conductor.abort(AbortCause.WENT_BACK, f"the run goes to {what}")
        self._lost_since = [None] * len(self._conductors)
        core.write(record)
        for member in core.members.alive.values():
            for standing in member.standings.values():
                standing.verified = standing.vouched = False
                standing.ready_since = None
            if member.beat is not None:
                member.beat = self.in_this_era(member.beat)

    @property
    def _versions(self) -> str:
        return _listed([conductor.book.version for conductor in self._conductors])

    # ---- in plain words ----------------------------------------------------------------------------------

    def may_hold_more(self, conductor: Conductor, version: int) -> list[str]:
        """Peers that are away, did not say good-bye, and may hold a newer version than this; those first of whom most
        went into the run."""
        alive, holders = self._core.members.alive, conductor.book.holders
        away = [peer for peer, holder in holders.items() if holder.reached > version and peer not in alive]
        return sorted(away, key=lambda peer: (-holders[peer].tokens, peer))

    def named(self, peers: Sequence[str]) -> str:
        """For texts."""
        names = [self._core.name(peer) for peer in peers[:NAMED]]
        more = len(peers) - len(names)
        if more:
            names.append("1 other peer" if more == 1 else f"{more} other peers")
        return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)

    def _tell_who_is_waited_for(self, settled: Sequence[int]) -> None:
        """To the host, once: it can go back without them."""
        lost = [c for c, version in zip(self._conductors, settled, strict=True) if version < c.book.version]
        told = self.reason(lost[0]) if lost else ""
        if told != self._told_waiting:
            self._told_waiting = told
            self._core.note(told)

    def reason(self, conductor: Conductor) -> str:
        """Why a member that lacks this fragment's newest version has to wait, for whom, and what the host can do."""
        core, newest = self._core, conductor.book.version
        lost = f"no living peer holds version {newest}{core.of(conductor.fragment)}"
        patience_s = core.manifest.checkpoint.go_back_after_s
        offer = self._held[conductor.fragment]
        if offer >= newest:
            return f"waiting for the peers that hold version {newest}{core.of(conductor.fragment)} to show it"
        if core.finished and core.ledger.delivered:
            out = (
                "its model was handed out already; waiting for a peer with a checkpoint of it (Ctrl-C leaves)"
            )
            return f"the run is complete, and {lost}: {out}"
        all_held = self.together(self._held)
        offer = all_held[conductor.fragment]
        newest_is = (
            "the newest held is"
            if core.manifest.pipeline.stages == 1
            else "the newest that all stages have is"
        )
        away = self.may_hold_more(conductor, offer)
        whom = f"{self.named(away)}, which may hold it" if away else "one that does"
        if min(all_held) < 0:
            return (
                f"{lost}: waiting for {whom}, or for one with a checkpoint (join --checkpoints); the host can found "
                "the run anew: farflung go-back --to 0 run.toml"
            )
        if not patience_s:
            return (
                f"{lost}, {newest_is} {offer}; go_back_after_s = 0: waiting for {whom}; the host can go back: "
                "farflung go-back run.toml"
            )
        if self._are_accounted_for(all_held):
            # No countdown: a text that changes would be told again and again.
            return f"{lost}: the run goes back to version {offer} unless one comes within {patience_s:g} s that does"
        return (
            f"{lost}, {newest_is} {offer}: waiting for {whom} and did not say good-bye; the host can go back "
            "without: farflung go-back run.toml"
        )


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(str(version) for version in versions)


def _nothing_of(said: FragmentBeat) -> FragmentBeat:
    return FragmentBeat(said.fragment, -1, b"", 0, 0, 0, False, ())
