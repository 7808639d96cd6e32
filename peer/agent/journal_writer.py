"""What the agent writes into its event journal: what it hears, says and does, and what a round costs it.

Called by the agent with every effect before it is carried out, with the coordinator's and the trainer's words, with
finished arithmetic and after each batch of frames.  It looks and never touches; with the journal off every call
returns at once.  The format is told in docs/events.md; what only benchmarks want to know is written only where
the journal is detailed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from farflung.collectives.round.member import MemberRound
from farflung.peer.local.words import (
    Attach,
    Finish,
    FromTrainer,
    Frozen,
    LoadState,
    Logged,
    ResumeSteps,
    Scored,
)
from farflung.peer.machine import effects as do
from farflung.peer.machine.handshake import Me
from farflung.peer.settings import default_path
from farflung.peer.worker import Pool
from farflung.protocol.errors import UserError
from farflung.protocol.frames import Kind
from farflung.protocol.messages import Aborted, Beat, Committed, Decided, OpenRound, Sent
from farflung.protocol.process.journal import FRAMES_EVERY_S, EventLog, journal_path
from farflung.protocol.round_words import result_name

if TYPE_CHECKING:
    from farflung.collectives.link.link import FrameCounts
    from farflung.peer.agent.mode_hand import ModeHand
    from farflung.peer.line.control import ControlLink
    from farflung.peer.machine.machine import MemberMachine, PeerMachine

TRAINED_EVERY_S = 5.0  # how often it is written how far the trainer is
STEPS = 20  # of a phase: as fine as progress is told

Use = dict[str, float]
Counts = dict[str, Any]


class TrainerProgress(NamedTuple):
    """How far a trainer is."""

    step: int
    tokens: int
    loss: float | None
    grad_norm: float | None


@dataclass
class WrittenProgress:
    """What was written of one round's progress."""

    at: tuple[int, int] = (0, 0)  # steps of what is held, and of results
    complete: tuple[bool, bool, bool] = (False, False, False)
    encoded: bool = False


class RoundEvents:
    def __init__(
        self, log: EventLog, who: Mapping[str, object], use: Callable[[], Use], counts: Callable[[], Counts]
    ) -> None:
        """`who`: the journal's first words, of `beginning_of`."""
        self._log = log
        log.write_start(**who)
        self._use = use
        self._counts = counts
        self._counts_at = 0.0
        self._counted: Counts | None = None
        self._saved = -1
        self._step = 0  # of the trainer, when it was written last
        self._trained_at = 0.0
        self._served: set[tuple[str, int, int]] = set()  # (to, version, fragment) of what was told last
        self._told: tuple[int, int] = (0, 0)  # (round, epoch) of the plan that was written last
        self._decided: tuple[int, int] = (0, 0)
        self._seen: dict[int, WrittenProgress] = {}  # by round

    def on_piece(self, chunk: int, version: int) -> None:
        if self._log.detailed:
            self._log.write("piece", chunk=chunk, version=version)

    # ---- what it does --------------------------------------------------------------------------------------

    def on_effect(self, effect: do.Effect, machine: PeerMachine) -> None:
        """About to be carried out."""
        if not self._log.is_on:
            return
        match effect:
            case do.ToCoordinator(message=Sent() as sent):
                self._on_sent(sent, machine.member)
            case do.ToCoordinator(message=Beat() as beat) if self._log.detailed:
                self._log.write("beat", up=beat.up_bytes_per_s, down=beat.down_bytes_per_s)
            case do.EnterMembers():
                session, incarnation = machine.member.reports.session, machine.doorway.incarnation
                self._log.write("entered", session=session.hex(), incarnation=incarnation)
            case do.LeaveMembers():
                self._log.write("apart")
            case do.TellTrainer(message=LoadState() as load):
                self._on_load(load)
            case do.TellTrainer(message=Finish(loads=loads)):
                for load in loads:
                    self._on_load(load)
            case do.Serve(to=to, kind=Kind.MANIFEST, version=version, fragment=fragment):
                self._on_serve(to, version, fragment, machine.member)
            case do.TellTrainer(message=ResumeSteps(fragment=fragment)):
                self._log.write("resume", fragment=fragment)
            case do.Restore():
                self._log.write("restoring")
            case do.Note(text=text):
                self._log.write("note", text=text)

    def _on_load(self, load: LoadState) -> None:
        what = {"keep": load.keep, "steps": load.steps, "tokens": load.tokens}
        self._log.write("load", fragment=load.fragment, version=load.version, **what)

    def _on_sent(self, sent: Sent, member: MemberMachine) -> None:
        replica = member.part.replica_of_round(sent.round_no) if member.part is not None else None
        if replica is None or not sent.hashes:
            return  # it has nothing to contribute
        where = {
            "version": replica.held.version,
            "fragment": replica.fragment.number,
            "era": member.reports.era,
        }
        what = {"digest": replica.held.digest.hex(), "steps": sent.steps, "tokens": sent.tokens}
        self._log.write("sent", round=sent.round_no, **where, **what)

    def _on_serve(self, to: str, version: int, fragment: int, member: MemberMachine) -> None:
        """A peer that takes chunks has taken their hashes first."""
        if (to, version, fragment) in self._served or member.part is None:
            return
        self._served = {each for each in self._served if each[1] >= version - 1} | {(to, version, fragment)}
        digest = member.part.replicas[fragment].held.digest.hex()
        where = {"version": version, "fragment": fragment, "era": member.reports.era}
        self._log.write("serves", to=to, **where, digest=digest)

    def on_failpoint(self, point: str, action: str) -> None:
        self._log.write("failpoint", point=point, action=action)

    def on_tick(self, now: float, saved: int, trained: Callable[[], TrainerProgress | None]) -> None:
        """`saved`: the newest version of which a checkpoint is complete."""
        if saved > self._saved:
            self._saved = saved
            self._log.write("saved", version=saved)
        if self._log.is_on and now >= self._counts_at:
            self._counts_at = now + FRAMES_EVERY_S
            self._tell_counts()
        if self._log.is_on and now >= self._trained_at:
            self._tell_trained(trained(), now)

    def _tell_trained(self, trained: TrainerProgress | None, now: float) -> None:
        if trained is not None and trained.step != self._step:
            self._trained_at, self._step = now + TRAINED_EVERY_S, trained.step
            self._log.write("trained", **trained._asdict())

    def _tell_counts(self) -> None:
        counts = self._counts()
        if counts != self._counted:
            self._counted = counts
            self._log.write("frames", **counts)

    # ---- what it hears -------------------------------------------------------------------------------------

    def on_trainer(self, what: str) -> None:
        self._log.write("trainer", what=what)

    def on_local(self, message: FromTrainer, member: MemberMachine) -> None:
        match message:
            case Attach(pid=pid):
                self._log.write("trainer", what="attached", trainer_pid=pid)
            case Frozen() as frozen if frozen.fragment in member.training.works:  # else of a stage given up
                what = {"fragment": frozen.fragment, "slot": frozen.slot, "steps": frozen.steps}
                what |= {"tokens": frozen.tokens, "step": frozen.step}
                crossed = {"crossed": True} if member.training.works[frozen.fragment].loading else {}
                self._log.write("frozen", **what, loss=frozen.loss, **crossed)
            case Logged(figures=figures):
                self._log.write("logged", figures={name: value for name, value in figures if isfinite(value)})
            case Scored(nats=nats, seconds=seconds, why_not=why_not):
                self._log.write("scored", windows=len(nats) // 4, seconds=round(seconds, 4), why_not=why_not)

    def on_answer(self, took_s: float) -> None:
        if self._log.detailed:
            self._log.write("tick", seconds=took_s)

    def on_control(self, message: object) -> None:
        """The coordinator repeats what it thinks is not known: only what is new is written."""
        if not self._log.is_on:
            return
        match message:
            case OpenRound(plan=plan) if (plan.round_no, plan.epoch) > self._told:
                new = plan.round_no > self._told[0]
                self._told = (plan.round_no, plan.epoch)
                if new:
                    body = {"version": plan.version, "members": plan.members, "fragment": plan.fragment}
                    body["owned"] = [plan.owners.count(index) for index in range(len(plan.members))]
                    self._log.write("plan", round=plan.round_no, **body, use=self._use())
                else:
                    self._log.write("moved", round=plan.round_no, epoch=plan.epoch)
            case Decided(decision=made) if (
                not made.foreseen and (made.round_no, made.decision_no) > self._decided
            ):
                self._decided = (made.round_no, made.decision_no)
                self._log.write("decided", round=made.round_no, weights=made.weights)
            case Committed(commit=commit):
                where = {"version": commit.version, "fragment": commit.fragment}
                self._log.write("committed", round=commit.round_no, **where, result=result_name(commit))
            case Aborted(round_no=round_no, reason=reason):
                self._log.write("aborted", round=round_no, reason=reason)

    def on_progress(self, flights: Iterable[MemberRound]) -> None:
        """After frames: how much of each round is here.  Asked often, so it only counts."""
        if not self._log.detailed:
            return
        on = {flight.plan.round_no: flight for flight in flights}
        self._seen = {number: self._seen.get(number, WrittenProgress()) for number in on}
        for number, flight in on.items():
            self._look(number, flight, self._seen[number])

    def _look(self, number: int, flight: MemberRound, seen: WrittenProgress) -> None:
        if flight.pieces.encoded and not seen.encoded:
            seen.encoded = True
            self._log.write("encoded", round=number)
        held, due, got, chunks = flight.counts
        at, complete = (STEPS * held // max(1, due), STEPS * got // max(1, chunks)), flight.complete
        if at != seen.at:
            seen.at = at
            self._log.write("progress", round=number, held=held / max(1, due), got=got / max(1, chunks))
        for event, now, before in zip(("held", "weighed", "results"), complete, seen.complete, strict=True):
            if now and not before:
                self._log.write(event, round=number)
        seen.complete = complete

    def on_rolled(self, version: int, fragment: int) -> None:
        """The last result was applied; hashing comes next."""
        self._log.write("rolled", version=version, fragment=fragment)

    def sealing(self, version: int, fragment: int, era: int, seal: Callable[[], bytes]) -> bytes:
        """Around the end of the hashing."""
        digest = seal()
        self._log.write("sealed", version=version, fragment=fragment, era=era, digest=digest.hex())
        return digest

    def close(self, end: do.Exit | None) -> None:
        if self._log.is_on:
            self._tell_counts()
            code, reason = (end.code, end.reason) if end is not None else ("failed", "an error ended it")
            how = {"code": code, "reason": reason}
            self._log.write("end", **how, use=self._use(), peak_rss_bytes=_peak_rss_bytes())
        self._log.close()


def beginning_of(me: Me, run: str, upload_limits: tuple[str, ...]) -> dict[str, object]:
    return {
        "role": "peer",
        "peer": me.peer,
        "name": me.name,
        "run": run,
        "process": me.process.hex(),
        "software": me.software,
        "upload_limits": upload_limits,
    }


def open_journal(
    named: Path | None,
    identity: Path | None,
    say: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> EventLog:
    """One that was asked for is detailed.  Else it is beside the key file, so that each peer has one of its own."""
    path, asked_for = journal_path(named, identity or default_path(environ), environ)
    if asked_for:
        return EventLog(path)
    try:
        return EventLog(path, detailed=False)
    except (
        UserError
    ) as error:  # nobody asked for it: a folder that can only be read is no reason to stay away
        say(f"no event journal: {error}")
        return EventLog(None)


def use_of(frames: FrameCounts, arithmetic: Pool, control: ControlLink, kept: ModeHand) -> Use:
    return {
        "tx": frames.sent_bytes,
        "rx": frames.arrived_bytes,
        "control_tx": control.sent_bytes,
        "control_rx": control.received_bytes,
        "kept_memory": kept.memory_bytes,
        "kept_disk": kept.disk_bytes,
        "cpu_s": time.process_time(),
        "loop_s": cpu_seconds_of(threading.main_thread().ident or 0),
        "arithmetic_s": arithmetic.cpu_seconds(),
    }


def counts_of(frames: FrameCounts, member: MemberMachine, held: int) -> Counts:
    """What became of every bulk frame; `waiting` ones overtook their explanation, or are questions that are `held`
    back, and end in a counter later."""
    both = verdicts_of(frames, member)
    tx = {"tx": frames.sent_bytes, "rx": frames.arrived_bytes}
    return {
        **tx,
        "counters": both,
        "arrived": frames.arrived_frames,
        "waiting": held + (member.joined.early_count if member.joined is not None else 0),
    }


def verdicts_of(frames: FrameCounts, member: MemberMachine) -> dict[str, int]:
    inside = member.counters.as_dict()
    return {name: count + inside[name] for name, count in frames.verdicts.as_dict().items()}


def cpu_seconds_of(thread_ident: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread_ident))


def _peak_rss_bytes() -> int:
    """Of this program alone: what getrusage tells may still be its parent's."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux always tells VmHWM")
