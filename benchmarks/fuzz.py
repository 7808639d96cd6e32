"""Feeds damaged bytes to every parser of what strangers and peers send: no crash, and no memory that stays.

    python benchmarks/fuzz.py                      # 10^6 control and bulk frames, fewer of the rest; minutes
    python benchmarks/fuzz.py --frames 20000 bulk  # less of it, one target

Valid bytes are mutated; an input that a parser answers in words not heard before is mutated further.  Each target
names the errors it may raise: anything else is a crash, and its bytes are printed.  tests/house/test_fuzz.py runs
the same targets for a moment.  Ends with 1 if anything crashed or grew.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import random
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from live_table import Table

from farflung.checkpoints import checkpoint_manifest as checkpoint
from farflung.checkpoints.store import PartsNote
from farflung.compression.codec import codec_named, codec_names
from farflung.console.history.audit_evidence import read_evidence
from farflung.console.run_toml import TEMPLATE
from farflung.console.screen.dashboard import render
from farflung.console.screen.health import plain_line
from farflung.console.screen.status_client import _parsed
from farflung.coordinator.ledger.evidence import Evidence
from farflung.coordinator.ledger.records import (
    UNREADABLE,
    Admitted,
    CommittedRound,
    Opened,
    from_bytes,
    to_bytes,
)
from farflung.peer.identity import Identity
from farflung.peer.machine.modes import kinds_of
from farflung.protocol import messages
from farflung.protocol.errors import CheckpointError, FrameError, UserError
from farflung.protocol.frames import (
    Header,
    check_payload,
    claimed,
    parse,
    with_payload,
)
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import KINDS
from farflung.protocol.outer_numbers import StateForm
from farflung.protocol.process.journal import Follower
from farflung.protocol.process.metrics import Exporter
from farflung.protocol.signed_words import SignedList
from rig.steered import KINDS as KINDS_OF_RUNS
from rig.steered import steered

ROOT = Path(__file__).resolve().parent.parent
GROWTH_MB = 64.0
MOST_KEPT = 256  # inputs that led somewhere new
INTERESTING = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xc0",
    b"\xdc\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"[[[[",
    b"9" * 25,
    b"-1",
    b"1e999",
    b"NaN",
    b'"',
    b"\\u0000",
    b"\n",
    b"[",
    b"{",
)


@dataclass
class Target:
    name: str
    seeds: list[bytes] = field(repr=False)
    call: Callable[[bytes], object]
    allowed: tuple[type[BaseException], ...]
    share: float = 1.0  # of the frames asked for: some parsers are slow
    new: list[bytes] = field(default_factory=list, repr=False)


@dataclass
class Outcome:
    frames: int = 0
    accepted: int = 0
    shapes: set[str] = field(default_factory=set)
    crashes: list[tuple[bytes, str]] = field(default_factory=list)


# ---- mutations -----------------------------------------------------------------------------------------------


def mutated(raw: bytes, other: bytes, chance: random.Random) -> bytes:
    made = bytearray(raw)
    for _ in range(1 + int(chance.expovariate(1.0))):
        at = chance.randrange(len(made) + 1)
        match chance.randrange(8):
            case 0 if made:
                made[at % len(made)] ^= 1 << chance.randrange(8)
            case 1 if made:
                made[at % len(made)] = chance.randrange(256)
            case 2:
                made[at:at] = chance.choice(INTERESTING)
            case 3:
                piece = chance.choice(INTERESTING)
                made[at : at + len(piece)] = piece
            case 4:
                del made[at : at + chance.randrange(1, 9)]
            case 5:
                del made[at:]
            case 6 if other:
                start = chance.randrange(len(other))
                made[at : at + 8] = other[start : start + chance.randrange(1, 64)]
            case 7 if made:
                start = chance.randrange(len(made))
                made[at:at] = made[start : start + chance.randrange(1, 64)] * chance.choice((1, 1, 2, 50))
    return bytes(made)


def run(target: Target, frames: int, chance: random.Random) -> Outcome:
    outcome = Outcome()
    pool = target.seeds + target.new
    for _ in range(frames):
        raw = mutated(chance.choice(pool), chance.choice(pool), chance)
        shape = try_one(target, raw, outcome)
        if shape not in outcome.shapes:
            outcome.shapes.add(shape)
            if len(target.new) < MOST_KEPT:
                target.new.append(raw)
                pool.append(raw)
    return outcome


def try_one(target: Target, raw: bytes, outcome: Outcome) -> str:
    """The shape of what came of it: its words without numbers and names."""
    outcome.frames += 1
    try:
        target.call(raw)
    except target.allowed as error:
        return re.sub(r"[0-9a-f]{4,}|\d+|'.*'|\".*\"", "#", str(error))[:80]
    except BaseException as error:  # the outermost loop of a fuzzer: this is what it looks for
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome.crashes.append((raw, f"{type(error).__name__}: {error}"))
        return type(error).__name__
    outcome.accepted += 1
    return "accepted"


# ---- targets -------------------------------------------------------------------------------------------------


def examples() -> dict[str, Any]:
    """One message of every kind, from the tests of the wire."""
    spec = importlib.util.spec_from_file_location(
        "wire_examples", ROOT / "tests" / "protocol" / "test_messages.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return dict(module.EXAMPLES)


def control_target(said: dict[str, Any]) -> Target:
    everything = frozenset(KINDS)
    return Target(
        "control",
        [messages.encode(each) for each in said.values()],
        lambda raw: messages.decode(raw, everything),
        (FrameError,),
    )


def bulk_target() -> Target:
    tag, kinds = bytes(range(8)), kinds_of(stages=True)
    frames = [
        with_payload(Header(kind, tag, 3, 1, 2, 5), b"" if kind.bare else bytes(range(100)))
        for kind in kinds.values()
    ]

    def call(raw: bytes) -> None:
        head, payload = raw[:96], raw[96:]
        claimed(head, tag, kinds)
        check_payload(parse(head, len(payload), tag, 4096, kinds), payload)

    return Target("bulk", [each.header.pack() + bytes(each.payload) for each in frames], call, (FrameError,))


def codec_target() -> Target:
    values = 300
    codecs = [codec_named(name) for name in codec_names()]
    seeds = [codec.encode(torch.linspace(-1, 1, values)) for codec in codecs]

    def call(raw: bytes) -> None:
        for codec, seed in zip(codecs, seeds, strict=True):
            if len(raw) == len(seed) and raw[:4] == seed[:4]:
                assert bool(torch.isfinite(codec.decode(raw, values)).all())
                return
        codecs[len(raw) % len(codecs)].check(raw, values)

    return Target("codec payloads", seeds, call, (FrameError,), 0.2)


def text_targets() -> Iterator[Target]:
    url = str(JoinUrl("host.example", 7000, "demo", bytes(range(32)), "abc"))
    seeds = [url.encode(), str(JoinUrl("::1", 7000, "demo", bytes(32))).encode()]
    yield Target(
        "join URL", seeds, lambda raw: JoinUrl.parse(raw.decode("utf-8", "replace")), (UserError,), 0.2
    )
    seeds = [b'[run]\nname = "a"\nrounds = 3\n[net]\nheartbeat_s = 1.5\n', TEMPLATE.encode()]
    yield Target(
        "run.toml",
        seeds,
        lambda raw: Manifest.from_toml(raw.decode("utf-8", "replace"), "run.toml"),
        (UserError,),
        0.01,
    )
    yield Target("manifest", [Manifest().canonical()], Manifest.from_canonical, (UserError,), 0.02)


def stored_targets(said: dict[str, Any], folder: Path) -> Iterator[Target]:
    records = [
        Opened(plan=said["open"].plan),
        Admitted(peer="ann", name="amber-fox", session=bytes(16)),
        CommittedRound(
            commit=said["committed"].commit,
            used={"ann": said["sent"].used},
            excluded={},
            tokens=1,
            steps=1,
            loss=2.5,
            seconds=1.0,
            tx_bytes=1,
        ),
    ]
    yield Target("journal", [to_bytes(each) for each in records], from_bytes, UNREADABLE, 0.2)
    yield checkpoint_target()
    yield evidence_target(said, folder)
    note = b'{"size_bytes":12,"blake3":"%s","chunks":"%s","writer":"ann"}' % (b"a" * 64, b"b" * 64)
    yield Target(
        "checkpoint note",
        [note],
        lambda raw: msgspec.json.decode(raw, type=PartsNote),
        (msgspec.MsgspecError, UnicodeDecodeError, RecursionError),
        0.1,
    )
    path = folder / "events.jsonl"

    def events(raw: bytes) -> None:
        path.write_bytes(raw)
        for event in Follower(path).new_events():
            assert isinstance(event, dict)

    yield Target(
        "events", [b'{"event":"start","at":1.5,"peer":"ann"}\n{"event":"end","at":2}\n'], events, (), 0.02
    )


def checkpoint_target() -> Target:
    identity = Identity.generate()
    model = said_model()
    form = StateForm(model.chunk_elements, parts=2)
    chunks = tuple(f"{number:064x}" for number in range(model.chunk_count))
    (fragment,) = model.fragments(1)
    digest = checkpoint.root_of(bytes.fromhex(each) for each in chunks).hex()
    files = [
        checkpoint.ShardFile(
            checkpoint.shard_name(first),
            first,
            count,
            len(checkpoint.shard_header(first, count, form)) + form.size_bytes * count,
            "c" * 64,
        )
        for first, count in checkpoint.shards_of(fragment.first, fragment.count, form)
    ]
    unsigned = checkpoint.CheckpointManifest(
        format=1,
        run="demo",
        run_id="0" * 32,
        manifest="d" * 64,
        era=0,
        version=3,
        incarnation=1,
        model=model,
        fragments=(checkpoint.SavedFragment(3, digest, 3, chunks),),
        files=tuple(files),
        writer=identity.peer_id,
        key=identity.public.hex(),
    )

    def call(raw: bytes) -> None:
        try:  # whoever holds a key can sign what he likes: what lies behind the signature must hold as well
            found = msgspec.json.decode(raw, type=checkpoint.CheckpointManifest)
            raw = checkpoint.canonical(
                msgspec.structs.replace(found, writer=identity.peer_id, key=identity.public.hex()).signed(
                    identity.sign
                )
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        checkpoint.parse(raw, "here")

    return Target(
        "checkpoint manifest",
        [checkpoint.canonical(unsigned.signed(identity.sign))],
        call,
        (CheckpointError,),
        0.02,
    )


def evidence_target(said: dict[str, Any], folder: Path) -> Target:
    path = folder / "one.evidence"
    lists = (SignedList(bytes(32), said["sent"]),)
    raw = msgspec.msgpack.encode(
        Evidence(1, bytes(16), said["committed"].commit, lists, bytes(32), bytes(64))
    )

    def call(raw: bytes) -> None:
        path.write_bytes(raw)
        found = read_evidence(path)
        if isinstance(found, Evidence):
            found.problem()
            found.who_sent(bytes(32))

    return Target("evidence", [raw], call, (), 0.02)


def said_model() -> Any:
    return examples()["hello"].model


def http_target() -> Target:
    exporter = Exporter("0")
    exporter.tell(b"farflung_x 1\n")

    def call(raw: bytes) -> None:
        assert exporter._answer(raw).startswith(b"HTTP/1.1 ")

    return Target("metrics request", [b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"], call, (), 0.2)


def status_target() -> Target:
    def call(raw: bytes) -> None:
        status = _parsed(raw)
        plain_line(status)
        render(status, 100, 30)

    return Target("status", [(ROOT / "docs" / "sample_status.json").read_bytes()], call, (FrameError,), 0.002)


def coordinator_target() -> Target:
    """Frames of a member that means ill, in a run of four that goes on beside it."""
    table = Table(4)
    return Target("a member's frames", table.seeds(), table.hostile, (FrameError,), 0.05)


def run_target() -> Target:
    """Both machines in a small run whose chance these bytes are: what fails is a promise, or a machine that falls."""
    chance = random.Random("schedules")
    return Target(
        "a run's schedule",
        [bytes([kind]) + chance.randbytes(400) for kind in range(len(KINDS_OF_RUNS))],
        steered,
        (),
        0.0005,
    )


def all_targets(folder: Path) -> list[Target]:
    said = examples()
    return [
        control_target(said),
        bulk_target(),
        codec_target(),
        *text_targets(),
        *stored_targets(said, folder),
        http_target(),
        status_target(),
        coordinator_target(),
        run_target(),
    ]


# ---- the long run --------------------------------------------------------------------------------------------


def rss_mb() -> float:
    told = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", told)[1]) / 1024  # type: ignore[index]


def bounded(mb: int) -> None:
    """So much more memory than now, and no more: a bomb is a MemoryError, not a dead machine."""
    told = Path("/proc/self/status").read_text()
    now = int(re.search(r"VmSize:\s+(\d+)", told)[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (now + (mb << 20), now + (mb << 20)))


def report(target: Target, outcome: Outcome, took_s: float, grown_mb: float) -> bool:
    good = not outcome.crashes and grown_mb <= GROWTH_MB
    print(
        f"| {target.name} | {outcome.frames:,} | {outcome.accepted:,} | {len(outcome.shapes)} | "
        f"{len(outcome.crashes)} | {grown_mb:+.0f} MB | {took_s:.0f} s |",
        flush=True,
    )
    for raw, why in outcome.crashes[:3]:
        print(f"    {why[:200]}\n    {raw[:400]!r}")
    return good


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help="parts of the names of those wanted [all]")
    parser.add_argument("--frames", type=int, default=500_000, help="of each of the quick targets")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(
        f"seed {seed}\n\n| parser | frames | accepted | answers | crashes | memory | time |\n"
        + "|---" * 7
        + "|"
    )
    good, frames = True, 0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets = all_targets(folder)
        bounded(1024)
        for target in targets:
            if options.targets and not any(word in target.name for word in options.targets):
                continue
            chance = random.Random(f"{seed} {target.name}")
            count = max(200, int(options.frames * target.share))
            warm = run(target, min(count, 1000), chance)  # what is kept for good is there from now on
            before, begun = rss_mb(), time.monotonic()
            outcome = run(target, count, chance)
            outcome.crashes += warm.crashes
            frames += outcome.frames + warm.frames
            good &= report(target, outcome, time.monotonic() - begun, rss_mb() - before)
    print(
        f"\n{frames:,} frames, {'nothing crashed or grew' if good else 'NOT GOOD'}; peak "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
