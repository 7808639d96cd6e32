"""A pipeline on this machine: three stages of two peers, one peer killed in mid-batch, its stage refilled by another.

    python benchmarks/demo_pipeline.py [--keep FOLDER]        (make demo-pipeline)

It uses the program as people do: real processes, the command line, encrypted loopback, the status from outside, and
`farflung checkpoint export` for the model at the end.  Activations and gradients cross as fp32.

What is compared: the exported model, against a loop in one process that knows no stages, seats or peers and takes the
same microbatches in order with the run's own AdamW.  Within a stage peers add up gradients in the order in which
microbatches came to them, and the round adds their sums: sums of fp32 in another order differ in last bits, which AdamW
carries into the weights.  So the check is not "equal", it is: no value is apart by more than a hundredth of what one
update moves it (`lr`), and the report says by how much.  Samples are exact: the event journal is audited, so each
microbatch of each batch counted once in every stage.  The exit code is 1 where anything of that does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from farflung.console.history.audit import audit
from farflung.console.history.history import read_folder
from farflung.console.screen.status_client import StatusClient
from farflung.optim.outer import AdamW
from farflung.optim.recipes import outer_of
from farflung.peer.data.sample_source import permuted_range
from farflung.peer.pipeline.parts import build, seed_of_chance
from farflung.protocol.errors import FarflungError, Unreachable
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest import Manifest

STAGES, SEATS, SAMPLES = 3, 2, 2048
KILL_AT, PATIENCE_S = 3, 240.0
LR = 4e-3
RUN = f"""
[run]
name = "demo-pipeline"
rounds = 8
min_peers = {STAGES * SEATS}
[model]
kind = ""
[data]
source = ""
batch = 1
[outer]
step = "adamw"
lr = {LR}
[merge]
policy = "mean"
[round]
chunk_kb = 4
deadline_s = 60.0
[net]
heartbeat_s = 0.3
dead_after_s = 3.0
[checkpoint]
every_rounds = 4
keep = 1
[pipeline]
batch = 32
micro = 4
stages = {STAGES}
cuts = [3, 5]
codec = "fp32"
min_per_stage = 1
"""
SCRIPT = f"""
import time
from functools import partial
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import farflung

UNIT_S = 0.02  # a stage takes so long for a microbatch, each way


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(UNIT_S)
        return x


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


dice = torch.Generator().manual_seed(9)
X = torch.randn({SAMPLES}, 24, generator=dice)
DATA = TensorDataset(X, (X[:, :5].sum(1) > 0).long())
PARTS = [
    partial(nn.Linear, 24, 64), Slow, partial(Block, 64),
    Slow, partial(Block, 64),
    Slow, partial(nn.Linear, 64, 2),
]


def loss(logits, riders):
    return F.cross_entropy(logits, riders["kind"])


if __name__ == "__main__":
    farflung.pipeline(None, PARTS, data=DATA, inputs=("x",), riders=("kind",), loss=loss)
"""


@dataclass
class Demo:
    folder: Path
    url: JoinUrl | None = None
    coordinator: subprocess.Popen[bytes] | None = None
    peers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    killed: str = ""
    killed_stage: int = -1
    short: bool = False  # its stage was seen with one peer
    refilled: bool = False  # and with two again, before the end
    last: dict[str, Any] = field(default_factory=dict)

    # ---- processes ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        (self.folder / "run.toml").write_text(RUN, encoding="utf-8")
        (self.folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        words = [
            "coordinate",
            str(self.folder / "run.toml"),
            "--listen",
            "127.0.0.1:0",
            "--json",
            "--exit-when-done",
        ]
        self.coordinator = self._start("coordinator", words, subprocess.PIPE)
        assert self.coordinator.stdout is not None
        line = self.coordinator.stdout.readline()
        if not line:
            raise SystemExit((self.folder / "coordinator.log").read_text())
        self.url = JoinUrl.parse(json.loads(line)["url"])

    def join(self, name: str) -> None:
        words = [
            "join",
            "--identity",
            str(self.folder / f"{name}.pem"),
            "--script",
            str(self.folder / "train.py"),
        ]
        words += ["--checkpoints", str(self.folder / "checkpoints"), str(self.url)]
        self.peers[name] = self._start(name, words, None)

    def _start(self, name: str, words: list[str], stdout: int | None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "farflung", *words],
                stdin=subprocess.DEVNULL,
                stdout=log if stdout is None else stdout,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,  # a peer is killed with its trainer
            )

    def end(self) -> None:
        everybody = [*self.peers.values(), *([self.coordinator] if self.coordinator is not None else [])]
        for process in everybody:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    # ---- the story ---------------------------------------------------------------------------------------------

    def follow(self, client: StatusClient) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            try:
                self.last = status = client.fetch(10.0)
            except Unreachable:
                if self.last.get("phase") == "finished":
                    return
                raise
            if status["phase"] == "finished" and not any(each["alive"] for each in status["members"]):
                return
            if not self.killed and status["version"] >= KILL_AT and status["batch"]["counted"]:
                self._kill(status)
            elif self.killed:
                self._look(status)
            time.sleep(0.1)
        raise SystemExit(f"the demo did not end within {PATIENCE_S:g} s; its logs are in {self.folder}")

    def _kill(self, status: dict[str, Any]) -> None:
        self.killed = "peer-2"
        victim = self.peers[self.killed]
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
        at = f"version {status['version']}, {status['batch']['counted']} of {status['batch']['microbatches']} counted"
        print(f"killed {self.killed} with -9 at {at}", flush=True)

    def _look(self, status: dict[str, Any]) -> None:
        living = [each["members"] for each in status["stages"]]
        if not self.short and min(living) == SEATS - 1:
            self.short, self.killed_stage = True, living.index(SEATS - 1)
            print(f"stage {self.killed_stage} has one peer left: {living}; a fresh one joins", flush=True)
            self.join("peer-7")
        elif self.short and not self.refilled and status["stages"][self.killed_stage]["verified"] >= SEATS:
            self.refilled = True
            print(
                f"stage {self.killed_stage} is refilled at version {status['version']}: {living}", flush=True
            )


def by_one_process(script: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model as it began, and as it is after all updates: one microbatch after the other through all parts."""
    torch.set_num_threads(1)
    found, manifest = runpy.run_path(str(script), run_name="script"), Manifest.from_toml(RUN, "run.toml")
    found["Slow"].forward = lambda self, x: x
    exact, pipeline = outer_of(manifest), manifest.pipeline
    assert isinstance(exact, AdamW)
    modules = [build(part, number, manifest.run.seed) for number, part in enumerate(found["PARTS"])]
    parameters = dict(nn.ModuleList(modules).named_parameters())
    began = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    moments = {name: (torch.zeros(p.numel()), torch.zeros(p.numel())) for name, p in parameters.items()}
    samples = pipeline.batch * pipeline.micro
    for version in range(manifest.run.rounds):
        for parameter in parameters.values():
            parameter.grad = None
        for micro in range(pipeline.batch):
            first = version * samples + micro * pipeline.micro
            places = permuted_range(manifest.run.seed, 0, SAMPLES, first, first + pipeline.micro)
            items = [found["DATA"][place] for place in places]
            x = torch.stack([item[0] for item in items])
            for number, module in enumerate(modules):
                torch.manual_seed(seed_of_chance(manifest.run.seed, version, micro, number))
                x = module(x)
            (found["loss"](x, {"kind": torch.stack([item[1] for item in items])}) * pipeline.micro).backward()
        with torch.no_grad():
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                m_n, v_n = moments[name]
                exact.step(
                    parameter.detach().view(-1), m_n, v_n, (parameter.grad / samples).flatten(), version + 1
                )
    return began, {name: parameter.detach() for name, parameter in parameters.items()}


def tell(demo: Demo, seconds: float) -> int:
    script, out = demo.folder / "train.py", demo.folder / "model.safetensors"
    words = ["checkpoint", "export", str(demo.folder / "checkpoints"), "--out", str(out)]
    export = subprocess.run([sys.executable, "-m", "farflung", *words], capture_output=True, text=True)
    print((export.stdout + export.stderr).strip())
    began, due = by_one_process(script)
    got = load_file(out) if out.exists() else {}
    report = audit(read_folder(demo.folder))
    same_names = got.keys() == due.keys()
    apart = (
        max((float((got[n] - due[n]).abs().max()) for n in due), default=0.0) if same_names else float("inf")
    )
    moved = max(float((due[name] - began[name]).abs().max()) for name in due)
    values = sum(tensor.numel() for tensor in due.values())
    equal = sum(int((got[name] == due[name]).sum()) for name in due) if same_names else 0
    ended = {name: process.returncode for name, process in demo.peers.items() if name != demo.killed}
    checks = {
        "all updates were committed, in all stages": demo.last["version"] == demo.last["target"],
        f"{demo.killed} was killed in mid-batch, and its stage had one peer": demo.short,
        "a fresh peer took that stage before the end": demo.refilled,
        "all others ended well": not any(ended.values()),
        "each microbatch counted once in every stage (audit of the journals)": report.kept,
        "the exported model has the weights of one process, but for the order of sums": apart <= 0.01 * LR,
    }
    print(
        f"{values} weights, of which {equal} have the very bits of one process; the farthest is {apart:.1e} apart, and "
        f"training moved the farthest by {moved:.3f}; {seconds:.0f} s"
    )
    for text, holds in checks.items():
        print(f"{'ok    ' if holds else 'FAILED'} {text}")
    if not report.kept:
        print("\n".join(report.lines()))
    return 0 if all(checks.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, help="an empty folder for logs, journals and the model")
    options = parser.parse_args()
    with _folder(options.keep) as folder:
        demo, started = Demo(folder), time.monotonic()
        print(
            f"a coordinator and {STAGES * SEATS} peers in {STAGES} stages start here; logs in {folder}",
            flush=True,
        )
        try:
            demo.begin()
            assert demo.url is not None
            for number in range(STAGES * SEATS):
                demo.join(f"peer-{number + 1}")
            with StatusClient(demo.url) as client:
                demo.follow(client)
            for name, process in demo.peers.items():
                if name != demo.killed:
                    process.wait(60)
            assert demo.coordinator is not None
            demo.coordinator.wait(60)
            return tell(demo, time.monotonic() - started)
        except FarflungError as error:
            print(f"{error}; logs are in {folder}", file=sys.stderr)
            return 1
        finally:
            demo.end()


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="farflung-demo-pipeline-") as name:
        yield Path(name)


if __name__ == "__main__":
    sys.exit(main())
