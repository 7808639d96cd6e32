"""Does it learn as if in one room?  Seeded experiments over the real protocol, in virtual time.

    python benchmarks/learning/learning.py room       [--steps 1000] [--plot room.svg]
    python benchmarks/learning/learning.py starts     short periods at first
    python benchmarks/learning/learning.py rates      the inner rate over the run
    python benchmarks/learning/learning.py schedules  blocking, streaming and overlap, at equal tokens
    python benchmarks/learning/learning.py outer      the outer steps, and what momentum a short run wants
    python benchmarks/learning/learning.py sparse     few values both ways, beside int8 and beside plain averaging
    python benchmarks/learning/learning.py shards     each peer reads a part of the text of its own
    python benchmarks/learning/learning.py slow       one peer of four at a fifth of the speed
    python benchmarks/learning/learning.py unequal    eight peers of four speeds
    python benchmarks/learning/learning.py inner      the words of [inner] optimizer: loss, and bytes of state
    python benchmarks/learning/learning.py idle       how long training waits while bytes are on their way (no model)

Each prints a table and, with --plot, draws held-out loss over steps.  A long one is given a file by --keep: each row
is written there as soon as it is made, and the same command goes on after the last one.  The figures are told in
docs/learning.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from learning_lab import LearningWorld, Row, Setting, synchronous

from farflung.console.history.curves import draw
from farflung.optim.inner import WORDS
from farflung.protocol.errors import UserError

Make = Callable[[Setting], Row]
Rows = list[tuple[Setting, Make]]


def farflung(setting: Setting) -> Row:
    return LearningWorld(setting).learn()


def in_one_room(setting: Setting) -> Row:
    return synchronous(setting, setting.peers)


def alone(setting: Setting) -> Row:
    return synchronous(setting, 1)


def room(base: Setting) -> Rows:
    int8 = {"codec": "int8", "gather_codec": "int8"}
    int4 = {"codec": "int4", "gather_codec": "int8"}
    return [
        (replace(base, name="synchronous AdamW"), in_one_room),
        (replace(base, name="one worker alone"), alone),
        (replace(base, name="H=20, int8", rounds=int8), farflung),
        (replace(base, name="H=50, int4", period=50, rounds=int4), farflung),
        (replace(base, name="H=100, int4", period=100, rounds=int4), farflung),
        (replace(base, name="H=20, int8, Muon", rounds=int8, inner={"optimizer": "muon"}), farflung),
    ]


def starts(base: Setting) -> Rows:
    """Short periods and little momentum at first, and what as many bytes do otherwise."""
    return [
        (replace(base, name="synchronous AdamW"), in_one_room),
        (replace(base, name="no start"), farflung),
        (replace(base, name="40 rounds of start", start=40), farflung),
        (replace(base, name="half the period", period=base.period // 2), farflung),
    ]


def rates(base: Setting) -> Rows:
    """The inner rate over the run, as [inner] says it."""
    keys = (("constant", 0), ("constant", 50), ("cosine", 50), ("linear", 50), ("wsd", 50))
    return [
        (replace(base, name=f"{word}, {steps}", inner={"schedule": word, "warmup_steps": steps}), farflung)
        for word, steps in keys
    ]


def schedules(base: Setting) -> Rows:
    streaming = {"schedule": "streaming", "overlap_steps": 5}
    late = {"schedule": "overlap", "overlap_steps": base.period - 1}
    two = {"fragments": 2}
    return [
        (replace(base, name="blocking"), farflung),
        (replace(base, name="streaming", outer=streaming, rounds=two), farflung),
        (replace(base, name="streaming, mix 0.5", outer={**streaming, "mix": 0.5}, rounds=two), farflung),
        (replace(base, name="overlap, a round late", outer=late), farflung),
        (replace(base, name="the same, mix 0", outer={**late, "mix": 0.0}), farflung),
        (
            replace(base, name="the same, plain averaging", outer={**late, "step": "mean", "mix": 0.0}),
            farflung,
        ),
        (
            replace(base, name="as published, a round late", outer={**late, "mix": 0.0}, eager="published"),
            farflung,
        ),
        (
            replace(base, name="from where it stands, mix 0.5", outer={**late, "mix": 0.5}, eager="stay"),
            farflung,
        ),
        *(
            (
                replace(base, name=f"streaming, alpha {alpha}", outer=streaming, rounds=two, alpha=alpha),
                farflung,
            )
            for alpha in (0.0, 0.5)
        ),
        (replace(base, name="overlap, a round late, alpha 0.5", outer=late, alpha=0.5), farflung),
    ]


def outer(base: Setting) -> Rows:
    topk = {"codec": "topk", "gather_codec": "int8"}
    momenta = [0.0, 0.3, 0.6, 0.9]
    return [
        (replace(base, name="nesterov, auto"), farflung),
        *((replace(base, name=f"nesterov, {mu}", outer={"momentum": mu}), farflung) for mu in momenta),
        (replace(base, name="mean", outer={"step": "mean"}), farflung),
        (replace(base, name="sparse, topk", outer={"step": "sparse"}, rounds=topk), farflung),
    ]


def sparse(base: Setting) -> Rows:
    """Bytes against loss: what the codecs cost, and what the outer step without momentum does by itself."""
    int8 = {"codec": "int8", "gather_codec": "int8"}
    return [
        (replace(base, name="int8 both ways", rounds=int8), farflung),
        (replace(base, name="the same, plain averaging", rounds=int8, outer={"step": "mean"}), farflung),
        (replace(base, name="sparse both ways", outer={"step": "sparse"}), farflung),
    ]


def inner(base: Setting) -> Rows:
    """Each at the same rate; several after --lr are tried one after the other."""
    return [(replace(base, name=word, inner={"optimizer": word}), farflung) for word in WORDS]


def shards(base: Setting) -> Rows:
    return [
        (replace(base, name="any peer reads any text"), farflung),
        (replace(base, name="own shards", shards=True), farflung),
    ]


def slow(base: Setting) -> Rows:
    fifth = replace(base, slow=(5.0,))
    return [
        (replace(base, name="four equal peers"), farflung),
        (replace(base, name="three equal peers", peers=3), farflung),
        (replace(fifth, name="one at 1/5, by steps"), farflung),
        (replace(fifth, name="one at 1/5, by the clock", rounds={"period_s": float(base.period)}), farflung),
        (
            replace(base, name="three, by the clock", peers=3, rounds={"period_s": float(base.period)}),
            farflung,
        ),
        (replace(fifth, name="one at 1/5, overlap", outer={"schedule": "overlap"}), farflung),
    ]


def unequal(base: Setting) -> Rows:
    """Eight peers, five of which have half, a fifth and a tenth of the speed of the others."""
    eight = replace(base, peers=8)
    slow = replace(eight, slow=(10.0, 5.0, 5.0, 2.0, 2.0))
    return [
        (replace(eight, name="eight equal peers"), farflung),
        (replace(slow, name="unequal ones"), farflung),
        (replace(slow, name="by the clock", rounds={"period_s": float(base.period)}), farflung),
        (replace(slow, name="overlap", outer={"schedule": "overlap"}), farflung),
    ]


def idle(base: Setting) -> Rows:
    names = {"blocking": {}, "overlap": {}, "streaming": {"fragments": 2}}
    timed = replace(base, learns=False)
    return [
        (
            replace(
                timed,
                name=f"{name}, {share:.0%} of a period",
                outer={"schedule": name},
                rounds=rounds,
                transfer=share,
            ),
            farflung,
        )
        for share in (0.2, 0.8, 1.2)
        for name, rounds in names.items()
    ]


EXPERIMENTS = {
    each.__name__: each
    for each in (room, starts, rates, schedules, outer, sparse, inner, shards, slow, unequal, idle)
}


def with_words(setting: Setting, words: list[str]) -> Setting:
    """The same row with other words in its run.toml: section.key=value."""
    for word in words:
        place, value = word.split("=")
        section, key = place.split(".")
        field = {"round": "rounds"}.get(section, section)
        setting = replace(setting, **{field: {**getattr(setting, field), key: plain(value)}})
    return setting


def plain(value: str) -> float | str:
    try:
        return float(value) if "." in value or "e" in value else int(value)
    except ValueError:
        return value


class Kept:
    """Rows in a file, one a line, each behind what it was made of: a table that was stopped is not lost."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text("utf-8").splitlines() if path is not None and path.exists() else []
        self._rows = {made_of: Row(**row) for made_of, row in map(json.loads, lines)}

    def row(self, setting: Setting, make: Make) -> Row:
        made_of = json.dumps([make.__name__, asdict(setting)], sort_keys=True)
        if made_of not in self._rows:
            self._rows[made_of] = row = make(setting)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([made_of, asdict(row)]) + "\n")
        return self._rows[made_of]


def rows_of(asked: argparse.Namespace) -> Rows:
    """All of one rate, then all of the next."""
    base = Setting("", asked.steps, asked.period, batch=asked.batch, seed=asked.seed)
    base = replace(base, layers=asked.layers, width=asked.width, peers=asked.peers)
    base = replace(base, merge={"policy": asked.merge})
    found: Rows = []
    for lr in asked.lr:
        rows = EXPERIMENTS[asked.experiment](replace(base, lr=lr))
        rows = [rows[number] for number in asked.only] if asked.only is not None else rows
        for setting, make in rows:
            name = f"{setting.name}, {lr:g}" if len(asked.lr) > 1 else setting.name
            setting = replace(setting, name=name, learns=setting.learns and not asked.time_only)
            found.append((with_words(setting, asked.set), make))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--steps", type=int, default=1000, help="that each peer takes")
    parser.add_argument(
        "--period", type=int, default=20, help="steps between rounds, where an experiment leaves it open"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4, help="windows that a peer reads at each step")
    parser.add_argument(
        "--lr", type=float, nargs="+", default=[6e-3], help="of the inner optimizer, at its highest"
    )
    parser.add_argument("--peers", type=int, default=Setting.peers, help="where an experiment leaves it open")
    parser.add_argument("--layers", type=int, default=Setting.layers)
    parser.add_argument("--width", type=int, default=Setting.width)
    parser.add_argument("--merge", choices=("robust", "mean"), default="robust", help="[merge] policy")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="for all rows, such as outer.momentum=0.9"
    )
    parser.add_argument("--only", nargs="*", type=int, help="these rows, counted from 0")
    parser.add_argument(
        "--time-only", action="store_true", help="without a model: only the last columns mean anything"
    )
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    parser.add_argument("--keep", type=Path, help="a file of rows: those in it are not made again")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows, kept = rows_of(asked), Kept(asked.keep)
    print(
        f"{asked.experiment}: {asked.steps} steps of {rows[0][0].peers} peers, seed {asked.seed}; loss in nats per byte"
    )
    names = ("loss", "vs first", "tokens", "sent/peer", "tokens/s", "idle", "took s", "state B/p", "used")
    print(f"{'row':28} {' '.join(f'{name:>10}' for name in names)}")
    done: list[Row] = []
    for setting, make in rows:
        try:
            row = kept.row(setting, make)
        except UserError as error:  # a package that is not installed
            print(f"{setting.name:28} not run: {error}", flush=True)
            continue
        done.append(row)
        gap = 100 * (row.loss / done[0].loss - 1)
        cells = (
            f"{row.loss:.4f}",
            f"{gap:+.2f}%",
            row.tokens,
            row.sent_bytes,
            f"{row.tokens_per_s:.1f}",
            f"{row.idle:.2%}",
            f"{row.seconds:.1f}",
            f"{row.state:.2f}",
            f"{row.used:.1%}",
        )
        print(f"{row.name:28} {' '.join(f'{cell:>10}' for cell in cells)}", flush=True)
    if asked.plot is not None:
        title = f"{asked.experiment}, {asked.steps} steps, seed {asked.seed}: held-out loss, nats per byte"
        draw(asked.plot, title, "steps of a peer", {row.name: row.curve for row in done})


if __name__ == "__main__":
    main()
