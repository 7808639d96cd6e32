"""What a coordinator does that does not lead yet: it tells what it sees, and claims the lead when nobody has it.  Pure.

Driven by standby.py, which asks the store and has a door.  Must not know how a store is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.protocol.errors import UserError
from farflung.protocol.join_url import Address, whereabouts_of

LOOK_EVERY_S = 0.25


@dataclass(frozen=True)
class StoredRun:
    """What is fixed about the run that is kept here."""

    run_id: bytes
    key: bytes  # the coordinator's, as join URLs pin it
    manifest: bytes


@dataclass(frozen=True)
class Leading:
    who: str  # for people
    whereabouts: bytes  # signed; empty: it has not said where it is
    made: int  # the revision that made its key
    lease: str


@dataclass(frozen=True)
class Sight:
    """Of the run and its leader, both at one moment."""

    kept: StoredRun | None
    leading: Leading | None


@dataclass(frozen=True)
class TryToLead:
    """Try to lead: nobody does."""


@dataclass(frozen=True)
class ShowLeader:
    """At the door: where who leads is to be found."""

    whereabouts: bytes


@dataclass(frozen=True)
class StandbyNote:
    text: str


Step = TryToLead | ShowLeader | StandbyNote


class StandbyRules:
    def __init__(self, where: str, key: bytes, run: str, places: tuple[Address, ...]) -> None:
        """`where`: of the store, for people; `key`, `run`: as the join URL has them; `places`: of this coordinator, as
        peers dial it."""
        self._where, self._key, self._run = where, key, run
        self._places = frozenset(places)
        self._run_id = b""
        self._leader = 0  # the revision of its key; 0: nobody
        self._shown: bytes | None = None
        self._is_away = False

    def on_sight(self, sight: Sight) -> list[Step]:
        """UserError: this is not what it waits for any more."""
        steps: list[Step] = []
        if self._is_away:
            self._is_away = False
            steps.append(StandbyNote(f"{self._where} answers again"))
        self._same_run(sight)
        leading = sight.leading
        if leading is None:
            self._leader = 0
            return [*steps, *self._show(b""), TryToLead()]
        if leading.made != self._leader:
            self._leader = leading.made
            steps.append(
                StandbyNote(f"stands by: {leading.who} leads; this one takes over when that one is gone")
            )
        return steps + self._show(leading.whereabouts)

    def on_silence(self, why: str) -> list[Step]:
        """The store does not answer: nobody can lead without it, and it may come back."""
        if self._is_away:
            return []
        self._is_away = True
        return [StandbyNote(f"stands by, and cannot see who leads: {why}")]

    def _same_run(self, sight: Sight) -> None:
        if sight.kept is None:
            if self._run_id:
                raise UserError(
                    f"{self._where}: the records of run {self._run_id.hex()} are gone from there; restore the store "
                    "from its backup, and start with --restored"
                )
            return
        if sight.kept.key != self._key:
            raise UserError(
                f"{self._where}: the run there began with another coordinator.key; copy that file from the data "
                "folder of the coordinator that leads, or choose another prefix for a run of your own"
            )
        if self._run_id not in (b"", sight.kept.run_id):
            raise UserError(f"{self._where}: another run has taken the place of run {self._run_id.hex()}")
        self._run_id = sight.kept.run_id

    def _show(self, whereabouts: bytes) -> list[Step]:
        if whereabouts == self._shown:
            return []
        self._shown = whereabouts
        steps: list[Step] = [ShowLeader(whereabouts)]
        said = whereabouts_of(whereabouts, self._key, self._run) if whereabouts else None
        missing = sorted(map(str, self._places - set(said.places))) if said is not None else []
        if missing:
            steps.append(
                StandbyNote(
                    f"peers are not told of {', '.join(missing)}, and may not find this coordinator when it leads: "
                    "start both with --public for each of the two"
                )
            )
        return steps
