"""Our pipeline beside that of torch.distributed, on loopback: what `python benchmarks/pipeline.py beside` measures.

Theirs: a rank for each stage, GPipe and 1F1B over gloo.  Ours: a coordinator, and for each stage an agent and trainer,
as `farflung join --script` starts them; fp32 crossings.  The same layers, microbatches and steps of AdamW
(beside_ranks.py).  They take turns within one run, and each turn is processes of its own; a batch lasts from barrier to
barrier, or from commit to commit, and the first one of a turn is left out.  Then one rank of each is killed in the
middle of a batch.

Ours goes the way there a second time on the way back, as a pipeline does that keeps no activations; torch's does so
only where it is asked to, which is a column of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from beside_ranks import BETAS, LR, WEIGHT_DECAY, Shape

from farflung.console.history.audit import audit
from farflung.console.history.history import read_folder
from farflung.protocol.errors import FarflungError
from farflung.protocol.process.journal import Event, read_events
from rig.nursery import Child, Nursery, end_in_turn

RANKS = str(Path(__file__).resolve().with_name("beside_ranks.py"))
ENVIRON = {"OMP_NUM_THREADS": "1"}
LOOK_S = 0.02
PATIENCE_S = 300.0
HANGS_S = 20.0  # whoever is still there so long after the death is said to hang
LONG = 100_000  # batches: such a run goes on until somebody ends it
BEFORE = 3  # batches of the kind that somebody dies in
SEATS = 2  # of a stage of ours where somebody dies: somebody has to be left who holds its state
THEIRS = {"GPipe": ("GPipe", False), "1F1B": ("1F1B", False), "1F1B, the way there again": ("1F1B", True)}
RUN = f"""
[run]
name = "beside"
rounds = {{rounds}}
min_peers = {{stages}}
[model]
kind = ""
[data]
source = ""
batch = 1
[inner]
betas = [{BETAS[0]}, {BETAS[1]}]
weight_decay = {WEIGHT_DECAY}
[outer]
step = "adamw"
lr = {LR}
[merge]
policy = "mean"
[round]
codec = "fp32"
gather_codec = "fp32"
chunk_kb = 64
[checkpoint]
every_rounds = 0
[pipeline]
batch = {{micros}}
micro = 1
stages = {{stages}}
cuts = {{cuts}}
codec = "fp32"
min_per_stage = 1
rebalance_s = 0.0
"""


@dataclass(frozen=True)
class Asked:
    runs: int = 3
    batches: int = 4  # that are measured, in a turn
    micros: tuple[int, ...] = (8, 64)
    stages: int = 3
    layers: int = 1
    width: int = 256
    tokens: int = 256
    hangs_s: float = HANGS_S
    deaths: bool = True
    pause_ms: float = 20.0  # of a stage, each way there, in one more row; 0: no such row
    paused: int = 32  # microbatches of a batch, there

    def shape(self, micros: int, pause_ms: float = 0.0) -> Shape:
        return Shape(
            self.stages, self.layers, self.width, self.tokens, micros, self.batches + 1, pause_ms=pause_ms
        )

    @property
    def rows(self) -> dict[str, Shape]:
        rows = {str(micros): self.shape(micros) for micros in self.micros}
        if self.pause_ms:
            name = f"{self.paused}, {self.pause_ms:g} ms waited each way there"
            rows[name] = self.shape(self.paused, self.pause_ms)
        return rows


@dataclass(frozen=True)
class Turn:
    seconds: list[float]  # of each batch but the first
    loss: float  # of the last batch
    aside_s: float = 0.0  # of ours: in a batch, while nobody counted

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Group:
    """Processes that are started and ended together; what they say lies in the folder."""

    nursery: Nursery
    folder: Path
    children: dict[str, Child] = field(default_factory=dict)

    def start(self, name: str, words: list[str]) -> Child:
        with (self.folder / f"{name}.out").open("w") as out, (self.folder / f"{name}.log").open("w") as log:
            self.children[name] = self.nursery.popen(words, ENVIRON, out, log)
        return self.children[name]

    def said(self, name: str) -> list[dict[str, float]]:
        lines = (self.folder / f"{name}.out").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def last_words(self, name: str) -> str:
        lines = [line.strip() for line in (self.folder / f"{name}.log").read_text().splitlines()]
        return next((line for line in reversed(lines) if line), "it said nothing")

    def wait_for_all(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while running := [name for name, child in self.children.items() if child.poll() is None]:
            self._complain()
            if time.monotonic() > until:
                raise FarflungError(f"{', '.join(running)}: not done within {PATIENCE_S:g} s")
            time.sleep(LOOK_S)
        self._complain()

    def _complain(self) -> None:
        for name, child in self.children.items():
            if child.poll():
                raise FarflungError(f"{name} ended with code {child.returncode}: {self.last_words(name)}")

    def wait_until(self, holds: Callable[[], object], what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not holds():
            self._complain()
            if time.monotonic() > until:
                raise FarflungError(f"{what}: not within {PATIENCE_S:g} s")
            time.sleep(LOOK_S)

    def end(self) -> None:
        end_in_turn(self.children.values(), 20.0)


@contextlib.contextmanager
def group(nursery: Nursery) -> Iterator[Group]:
    with tempfile.TemporaryDirectory(prefix="farflung-beside-") as name:
        made = Group(nursery, Path(name))
        try:
            yield made
        finally:
            made.end()


# ---- theirs --------------------------------------------------------------------------------------------------------


def start_theirs(them: Group, shape: Shape) -> None:
    for rank in range(shape.stages):
        them.start(
            f"rank {rank}",
            [RANKS, "theirs", json.dumps(asdict(shape)), str(rank), str(them.folder / "store")],
        )


def their_turn(nursery: Nursery, shape: Shape) -> Turn:
    with group(nursery) as them:
        start_theirs(them, shape)
        them.wait_for_all()
        told = them.said(f"rank {shape.stages - 1}")
        return Turn([each["seconds"] for each in told[1:]], told[-1]["loss"])


def their_death(nursery: Nursery, shape: Shape, hangs_s: float) -> str:
    victim = f"rank {shape.stages // 2}"
    with group(nursery) as them:
        start_theirs(them, replace(shape, batches=LONG))
        them.wait_until(lambda: len(them.said(victim)) >= BEFORE, f"{BEFORE} batches of theirs")
        # Into the next batch.
        time.sleep(statistics.median(each["seconds"] for each in them.said(victim)) / 2)
        them.children[victim].kill()
        died_at, told = time.monotonic(), {}
        others = {name: child for name, child in them.children.items() if name != victim}
        while len(told) < len(others) and time.monotonic() - died_at < hangs_s:
            for name, child in others.items():
                if name not in told and child.poll() is not None:
                    seconds = time.monotonic() - died_at
                    told[name] = f"{name} ends with code {child.returncode} after {seconds:.1f} s"
            time.sleep(LOOK_S)
        return ", ".join(told.get(name, f"{name} hangs ({hangs_s:g} s and longer)") for name in others)


# ---- ours ----------------------------------------------------------------------------------------------------------


def start_ours(us: Group, shape: Shape, seats: int) -> None:
    """The coordinator, and so many peers for each stage."""
    text = RUN.format(
        rounds=shape.batches,
        micros=shape.micros,
        stages=shape.stages,
        cuts=shape.cuts,
    )
    (us.folder / "run.toml").write_text(text, encoding="utf-8")
    words = ["coordinate", str(us.folder / "run.toml"), "--listen", "127.0.0.1:0", "--json"]
    us.start("coordinator", [*words, "--exit-when-done"])
    us.wait_until(lambda: us.said("coordinator"), "the coordinator's join URL")
    url = str(us.said("coordinator")[0]["url"])
    for number in range(shape.stages * seats):
        join = ["join", "--identity", str(us.folder / f"peer-{number}.pem"), "--script", RANKS, url]
        us.start(f"peer-{number}", [*join, "ours", json.dumps(asdict(shape))])


def events_of(us: Group) -> list[Event]:
    journal = us.folder / "run.data" / "events.jsonl"
    return read_events(journal) if journal.exists() else []


def committed(events: list[Event]) -> list[Event]:
    return [event for event in events if event["event"] == "committed_batch"]


def commits_after(us: Group, at: float) -> list[float]:
    return [event["at"] for event in committed(events_of(us)) if event["at"] > at]


def our_turn(nursery: Nursery, shape: Shape) -> Turn:
    with group(nursery) as us:
        start_ours(us, shape, 1)
        us.wait_for_all()
        events = events_of(us)
    commits = committed(events)
    begun = {event["version"]: event["at"] for event in events if event["event"] == "batch"}
    opened = {event["round"]: event["at"] for event in events if event["event"] == "opened"}
    aside_s = []
    for before, commit in itertools.pairwise(commits):
        counted_from = begun[commit["rounds"][0]["version"] - 1]
        counted_to = min(opened[made["round"]] for made in commit["rounds"])
        aside_s.append(counted_from - before["at"] + commit["at"] - counted_to)
    seconds = [commit["at"] - before["at"] for before, commit in itertools.pairwise(commits)]
    return Turn(seconds, commits[-1]["rounds"][-1]["loss"], statistics.median(aside_s))


def our_death(nursery: Nursery, shape: Shape) -> str:
    stage = shape.stages // 2
    with group(nursery) as us:
        start_ours(us, replace(shape, batches=LONG), SEATS)
        us.wait_until(lambda: len(seated(us)) == shape.stages * SEATS, "everybody has a seat")
        whole = len(committed(events_of(us))) + 1
        us.wait_until(lambda: len(committed(events_of(us))) >= whole + BEFORE, "batches with all of them")
        commits = committed(events_of(us))[-BEFORE:]
        usual_s = statistics.median(b["at"] - a["at"] for a, b in itertools.pairwise(commits))
        victim = next(
            n for n in us.children if f"I hold stage {stage} of" in (us.folder / f"{n}.log").read_text()
        )
        time.sleep(usual_s / 2)  # into a batch
        kill_peer(us, victim)
        died_at = time.monotonic()
        us.wait_until(lambda: len(commits_after(us, died_at)) >= 2, "two commits after the death")
        first_s, second_s = (at - died_at for at in commits_after(us, died_at)[:2])
        for name in [name for name in us.children if name != "coordinator"]:
            kill_peer(us, name)  # to leave in good order would take each of them a round
        us.end()
        kept = "every microbatch counts once" if audit(read_folder(us.folder)).kept else "THE AUDIT FAILS"
    return (
        f"the others commit that batch {first_s:.1f} s after the death and the next one after {second_s:.1f} s, where "
        f"a batch took {usual_s:.1f} s; {kept}"
    )


def seated(us: Group) -> set[str]:
    return {event["peer"] for event in events_of(us) if event["event"] == "seated"}


def kill_peer(us: Group, name: str) -> None:
    """Its trainer and its agent, without a word."""
    events = read_events(us.folder / f"{name}.events.jsonl")
    trainer = [event["trainer_pid"] for event in events if "trainer_pid" in event][-1]
    us.children.pop(name).kill()
    with contextlib.suppress(ProcessLookupError):  # it found its agent gone just now
        os.kill(trainer, signal.SIGKILL)


# ---- the table -----------------------------------------------------------------------------------------------------


def beside(asked: Asked, nursery: Nursery) -> tuple[bool, str]:
    """Whether all learned the same, and the table."""
    head = ["microbatches", *(f"torch {name}" for name in THEIRS), "farflung", "of it nobody counts"]
    head += [f"over {name}" for name in THEIRS]
    rows, same = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"], True
    for name, shape in asked.rows.items():
        turns = [a_turn_each(nursery, shape) for _ in range(asked.runs)]
        same &= all(alike(turn) for turn in turns)
        rows.append(row_of(name, turns))
    how = (
        f"{asked.stages} stages, a microbatch of {asked.tokens} x {asked.width} in fp32, {2 * asked.layers} square "
        f"layers a stage; medians of {asked.batches} batches in each of {asked.runs} turns, seconds a batch"
        f"{'' if same else '; THE LOSSES DIFFER'}; {len(os.sched_getaffinity(0))} cores"
    )
    return same, "\n".join([f"{how}.", "", *rows, "", *(deaths(asked, nursery) if asked.deaths else [])])


def deaths(asked: Asked, nursery: Nursery) -> list[str]:
    shape = asked.shape(asked.micros[len(asked.micros) // 2])
    notes = [
        f"torch {name}, a rank of the middle stage killed in mid-batch: "
        f"{their_death(nursery, replace(shape, schedule=name), asked.hangs_s)}."
        for name in ("GPipe", "1F1B")
    ]
    notes.append(
        f"farflung, {SEATS} peers in each stage, one of the middle stage killed in mid-batch (agent and trainer): "
        f"{our_death(nursery, shape)}."
    )
    return [f"- {note}" for note in notes]


def a_turn_each(nursery: Nursery, shape: Shape) -> dict[str, Turn]:
    turns = {
        name: their_turn(nursery, replace(shape, schedule=schedule, again=again))
        for name, (schedule, again) in THEIRS.items()
    }
    return {"farflung": our_turn(nursery, shape), **turns}


def alike(turn: Mapping[str, Turn]) -> bool:
    """They learned the same: sums of fp32 in another order leave the loss of the last batch nearly as it is."""
    return all(abs(each.loss / turn["farflung"].loss - 1) < 1e-3 for each in turn.values())


def row_of(what: str, turns: list[dict[str, Turn]]) -> str:
    def median(name: str) -> float:
        return statistics.median(turn[name].median_s for turn in turns)

    def over(name: str) -> float:
        """Within each turn, where the machine was the same."""
        return statistics.median(turn["farflung"].median_s / turn[name].median_s for turn in turns)

    aside = statistics.median(turn["farflung"].aside_s for turn in turns)
    cells = [what, *(f"{median(name):.3f}" for name in (*THEIRS, "farflung")), f"{aside:.3f}"]
    return f"| {' | '.join([*cells, *(f'{over(name):.2f}' for name in THEIRS)])} |"
