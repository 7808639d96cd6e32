"""Models that are cut into stages, on real processes: each peer holds one, and the update is that of one process.

What a run must come to is computed here, in one process that knows no stages, from the run's first values, its order of
samples and its outer step.
"""

from __future__ import annotations

import functools
import math
import os
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from farflung.console.history.audit import audit
from farflung.console.history.history import read_folder
from farflung.optim.outer import Nesterov, advance
from farflung.optim.recipes import outer_of
from farflung.peer.data.sample_source import permuted_range
from farflung.peer.pipeline.parts import build, seed_of_chance
from farflung.protocol.manifest import Manifest
from farflung.protocol.outer_numbers import Tile, fp32
from rig.pieces import with_time_for

pytestmark = pytest.mark.slow

BATCH, MICRO, ROUNDS, SAMPLES, CLIP = 8, 2, 5, 512, 0.5
RUN = """
[run]
name = "staged"
rounds = {rounds}
min_peers = {min_peers}
[model]
kind = ""
[data]
source = ""
batch = 1
[outer]
step = "adamw"
lr = 4e-3
[merge]
policy = "mean"
[round]
chunk_kb = 1
deadline_s = 300.0
scatter_grace_s = 300.0
[net]
heartbeat_s = 0.2
dead_after_s = {dead_after_s}
[pipeline]
batch = 8
micro = 2
clip = 0.5
stages = 3
cuts = [2, 4]
codec = "{codec}"
"""
SCRIPT = """
from functools import partial
from pathlib import Path
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset
import farflung

NOTED = []  # the bits of each gradient that came back


class Layer(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight.register_hook(lambda gradient: NOTED.append(gradient.numpy().tobytes().hex()))


dice = torch.Generator().manual_seed(9)
DATA = TensorDataset(torch.randn(512, 12, generator=dice), torch.randint(3, (512,), generator=dice))
PARTS = [
    partial(Layer, 12, 24),
    nn.Tanh,
    partial(Layer, 24, 24),
    partial(nn.Dropout, 0.2),
    partial(nn.LayerNorm, 24),
    partial(Layer, 24, 3),
]


def loss(logits, riders):
    return F.cross_entropy(logits, riders["kind"])


if __name__ == "__main__":
    stage = farflung.pipeline(None, PARTS, data=DATA, inputs=("x",), riders=("kind",), loss=loss)
    save_file(stage.state_dict(), Path(__file__).with_suffix(f".{stage.first}.safetensors"))
    Path(__file__).with_suffix(f".{stage.first}.noted").write_text("\\n".join(NOTED))
"""
HIDDEN = ("0.weight", "2.weight")  # matrices that Muon is for: the last layer is for the loss
PEERS = ("ann", "bob", "cid")
CUTS = (0, 2, 4)
LAYERS = {0: "0.weight", 2: "2.weight", 4: "5.weight"}  # of each stage, of which gradients are noted


def add_gradients(script: dict[str, Any], modules: list[nn.Module], version: int, micro: int) -> None:
    """Of one microbatch, with a graph through all parts."""
    first = (version * BATCH + micro) * MICRO
    items = [script["DATA"][place] for place in permuted_range(0, 0, SAMPLES, first, first + MICRO)]
    x = torch.stack([item[0] for item in items])
    for number, module in enumerate(modules):
        torch.manual_seed(seed_of_chance(0, version, micro, number))
        x = module(x)
    (script["loss"](x, {"kind": torch.stack([item[1] for item in items])}) * MICRO).backward()


def by_one_process(
    path: Path, rounds: int = ROUNDS, run: str = RUN, as_noted: bool = False
) -> dict[str, Tensor]:
    """One microbatch after the other, with a graph through all parts.  `as_noted`: each stage's gradients are added in
    the order in which they came back to it, since a microbatch may overtake another one on its way."""
    torch.set_num_threads(1)
    script = runpy.run_path(str(path), run_name="script")
    text = run.format(rounds=rounds, min_peers=1, dead_after_s=9, codec="fp32")
    exact = outer_of(Manifest.from_toml(text, "run.toml"))
    modules = [build(part, number, 0) for number, part in enumerate(script["PARTS"])]
    parameters = dict(nn.ModuleList(modules).named_parameters())
    moments = {name: (torch.zeros(p.numel()), torch.zeros(p.numel())) for name, p in parameters.items()}
    noted = {first: noted_by(path, first) for first in CUTS} if as_noted else {}
    for version in range(rounds):
        gradients: list[dict[str, Tensor]] = []
        for micro in range(BATCH):
            add_gradients(script, modules, version, micro)
            gradients.append({name: gradient_of(p) for name, p in parameters.items()})
        orders = {first: order_of(first, noted[first], gradients) for first in noted}
        sums: dict[str, Tensor] = {}
        for name in parameters:
            order = orders.get(stage_of(name), range(BATCH))
            sums[name] = functools.reduce(torch.add, (gradients[micro][name] for micro in order))
        means = {name: sums[name] / (BATCH * MICRO) for name in parameters}
        factor = clip_factor(list(means.values()))
        with torch.no_grad():
            for name, parameter in parameters.items():
                tiles = [Tile(0, *parameter.shape)] if name in HIDDEN else []
                advance(
                    exact,
                    [parameter.view(-1), *moments[name]],
                    means[name].flatten(),
                    version + 1,
                    factor,
                    tiles,
                )
    return {name: parameter.detach() for name, parameter in parameters.items()}


def gradient_of(parameter: nn.Parameter) -> Tensor:
    found, parameter.grad = parameter.grad, None
    assert found is not None
    return found


def stage_of(name: str) -> int:
    """Its first part."""
    return max(first for first in CUTS if first <= int(name.partition(".")[0]))


def noted_by(path: Path, first: int) -> dict[str, int]:
    """Gradients that came back to the stage that begins there, by their bits: when, for the last time."""
    noted = path.with_suffix(f".{first}.noted").read_text().splitlines()
    return {bits: at for at, bits in enumerate(noted)}


def order_of(first: int, noted: dict[str, int], gradients: list[dict[str, Tensor]]) -> list[int]:
    """Microbatches, as the stage added them up.  Each gradient is the stage's own, to the last bit."""
    found = [each[LAYERS[first]].numpy().tobytes().hex() for each in gradients]
    assert noted.keys() >= set(found), f"stage {first} got other gradients than one process"
    return sorted(range(BATCH), key=lambda micro: noted[found[micro]])


def clip_factor(gradients: list[Tensor]) -> float:
    """In fp64, then rounded; torch's own differs by what its norm in fp32 is off."""
    norm = math.sqrt(math.fsum(float(each.double().square().sum()) for each in gradients))
    factor = fp32(min(1.0, CLIP / (norm + 1e-6)))
    before, copies = gradients[0], [nn.Parameter(each.clone()) for each in gradients]
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.grad = gradient.clone()
    nn.utils.clip_grad_norm_(copies, CLIP)
    assert copies[0].grad is not None
    assert factor < 1.0 and torch.allclose(copies[0].grad, before * factor, rtol=1e-6, atol=0.0)
    return factor


def start(stage: Any, codec: str, run: str = RUN, *more: str) -> Path:
    script: Path = stage.folder / "train.py"
    script.write_text(SCRIPT)
    stage.write_run(run, rounds=ROUNDS, min_peers=3, codec=codec)
    stage.coordinate()
    for name in PEERS:
        stage.join(name, "--script", str(script), *more)
    return script


def finish(stage: Any, *names: str) -> None:
    names = names or PEERS
    stage.until(lambda status: status["phase"] == "finished", "the run is finished")
    assert [stage.wait(name) for name in names] == [0] * len(names)
    stage.processes["coordinator"].send_signal(signal.SIGTERM)
    assert stage.wait("coordinator") == 0
    report = audit(read_folder(stage.folder))
    assert report.kept, "\n".join(report.lines())


def stages_of(script: Path) -> dict[str, Tensor]:
    """Each stage was held by somebody, and saved what it has."""
    found: dict[str, Tensor] = {}
    for first in CUTS:
        found |= load_file(script.with_suffix(f".{first}.safetensors"))
    return found


# Chunks in which each stage's matrices are whole.
MUON = RUN.replace('"adamw"', '"muon"').replace("chunk_kb = 1\n", "chunk_kb = 16\n")


@pytest.mark.forked_peers
@pytest.mark.parametrize(
    "run", [pytest.param(RUN, id="adamw"), pytest.param(MUON, id="muon", marks=pytest.mark.hard)]
)
def test_F1_three_peers_with_a_stage_each_have_the_bits_of_one_process_that_clips_its_gradient(
    stage: Any, run: str
) -> None:
    script = start(stage, "fp32", run)
    finish(stage)
    found, expected = stages_of(script), by_one_process(script, run=run, as_noted=True)
    assert found.keys() == expected.keys()
    apart = {name: float((found[name] - expected[name]).abs().max()) for name in expected}
    assert all(torch.equal(found[name], expected[name]) for name in expected), apart


@pytest.mark.hard
@pytest.mark.forked_peers
def test_with_int8_crossings_they_come_close_to_it(stage: Any) -> None:
    script = start(stage, "int8")
    finish(stage)
    found, expected = stages_of(script), by_one_process(script)
    moved = 4e-3 * ROUNDS  # AdamW moves a value by about the rate with each update
    assert 0 < max(float((found[name] - expected[name]).abs().max()) for name in expected) < moved


@pytest.mark.forked_peers
def test_a_peer_that_can_hold_no_stage_says_so_in_one_line_and_never_joins(stage: Any) -> None:
    script = stage.folder / "train.py"
    script.write_text(SCRIPT.replace("loss=loss)", 'loss=loss, memory="0.000001 GB")'))
    stage.write_run(RUN, rounds=ROUNDS, min_peers=3, codec="fp32")
    stage.coordinate()
    stage.join("ann", "--script", str(script))
    assert stage.wait("ann") != 0
    assert "no stage of this run fits: the smallest needs " in stage.log("ann")
    assert "ann" not in stage.log("coordinator") and "joined" not in stage.log("coordinator")


@pytest.mark.hard
@pytest.mark.forked_peers
def test_a_trainer_that_is_killed_in_mid_batch_costs_its_share_and_changes_nothing(stage: Any) -> None:
    """Its stage has no other peer: its agent starts it again, and all that its sums had is computed once more."""
    script: Path = stage.folder / "train.py"
    script.write_text(SCRIPT)
    stage.write_run(RUN, rounds=ROUNDS, min_peers=3, codec="fp32")
    stage.coordinate()
    for name in PEERS:
        stage.environ = {"FARFLUNG_FAILPOINTS": "trainer.step=kill@5"} if name == "bob" else {}
        stage.join(name, "--script", str(script))
    stage.environ = {}
    finish(stage)
    assert "the trainer ended with signal 9; it starts again" in stage.log("bob")
    found, expected = stages_of(script), by_one_process(script)
    # Microbatches may be added up in another order after the loss: last bits of fp32, no sample.
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-4


# ---- steps of each stage's own ------------------------------------------------------------------------------------

LOCAL = RUN.replace("clip = 0.5\n", "").replace(
    'step = "adamw"\nlr = 4e-3', 'step = "nesterov"\nlr = 0.6\nmomentum = 0.7\n[inner]\nlr = 4e-3\nclip = 0.5'
)
LOCAL = LOCAL.replace("[round]\n", '[round]\ncodec = "fp32"\ngather_codec = "fp32"\n')
LOCAL += 'mode = "local"\nlocal_micros = {local_micros}\n'


def local_run(local_micros: int) -> str:
    return LOCAL.replace("{local_micros}", str(local_micros))


def by_one_process_alone(path: Path) -> dict[str, Tensor]:
    """Each stage takes one step of torch's AdamW in a batch, and Nesterov's of what that moved."""
    torch.set_num_threads(1)
    script = runpy.run_path(str(path), run_name="script")
    text = local_run(BATCH).format(rounds=ROUNDS, min_peers=1, dead_after_s=9, codec="fp32")
    exact = outer_of(Manifest.from_toml(text, "run.toml"))
    assert isinstance(exact, Nesterov)
    modules = [build(part, number, 0) for number, part in enumerate(script["PARTS"])]
    stages = [nn.ModuleList(modules[first : first + 2]) for first in CUTS]
    inner = [torch.optim.AdamW(s.parameters(), 4e-3, (0.9, 0.95), weight_decay=0.1) for s in stages]
    parameters = dict(nn.ModuleList(modules).named_parameters())
    moments = {name: torch.zeros(p.numel()) for name, p in parameters.items()}
    for version in range(ROUNDS):
        anchor = {name: p.detach().clone() for name, p in parameters.items()}
        for micro in range(BATCH):
            add_gradients(script, modules, version, micro)
        for stage, optimizer in zip(stages, inner, strict=True):
            for p in stage.parameters():
                assert p.grad is not None
                p.grad /= BATCH * MICRO
            nn.utils.clip_grad_norm_(list(stage.parameters()), 0.5 / math.sqrt(3))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for name, p in parameters.items():
                moved_n = (anchor[name] - p).flatten()
                p.copy_(anchor[name])
                exact.step(p.detach().view(-1), moments[name], moved_n, version + 1)
    return {name: p.detach() for name, p in parameters.items()}


@pytest.mark.hard
@pytest.mark.forked_peers
def test_three_peers_that_step_by_themselves_learn_what_one_process_does(stage: Any) -> None:
    """One step of each peer in a batch: with more, what is on its way when one is taken is a matter of time."""
    script = start(stage, "fp32", local_run(BATCH))
    finish(stage)
    found, expected = stages_of(script), by_one_process_alone(script)
    apart = {name: float((found[name] - expected[name]).abs().max()) for name in expected}
    # A microbatch that overtakes another one on its way is added up before it: last bits of fp32, no sample.
    assert max(apart.values()) < 1e-6, apart


# ---- what was kept is computed anew -------------------------------------------------------------------------------

KEPT = "[checkpoint]\nevery_rounds = 1\nkeep = 1\n"


@pytest.mark.forked_peers
@pytest.mark.parametrize("mode", [pytest.param("sync"), pytest.param("local", marks=pytest.mark.hard)])
def test_P1_what_each_stage_kept_is_computed_anew_to_the_same_digests(stage: Any, mode: str) -> None:
    """By one process, without any of the run; a bit that is turned afterwards is found.  The synchronous run takes
    Muon's steps, in chunks with rows of matrices, parts of rows, and vectors."""
    place = str(stage.folder / "kept")
    run = RUN.replace('"adamw"', '"muon"') if mode == "sync" else local_run(2)
    start(stage, "int8", run + KEPT, "--checkpoints", place, "--archive")
    finish(stage)
    versions = 3 * (ROUNDS - 1)  # the first checkpoint is of version 1
    alone = stage.call("audit", "--replay", place, "--url", stage.url)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert f"{versions} versions replayed, bit for bit the same" in alone.stdout
    assert f"; {versions // 3} of {versions // 3} factors" in alone.stdout or mode == "local"
    with_journals = stage.call("audit", "--replay", place, str(stage.folder))
    assert with_journals.returncode == 0, with_journals.stderr
    assert f"the same; {versions} of them settled by the run" in with_journals.stdout
    sealed = {each["digest"] for name in PEERS for each in stage.events(name) if each["event"] == "sealed"}
    told = [line for line in with_journals.stdout.splitlines() if ": digest " in line]
    assert len(told) == versions and all(any(one[:16] in line for one in sealed) for line in told)
    [file] = Path(place).glob("*-archive/e0000-f02-v00000003.round")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    turned = stage.call("audit", "--replay", place)
    assert turned.returncode == 2 and turned.stderr.count("\n") == 1
    assert "f02-v00000003.round: the result of chunk" in turned.stderr and "is damaged" in turned.stderr


SOURCE, MIDDLE, LAST = range(3)
TWO_EACH = ("ann", "bob", "cid", "dan", "eve", "fay")  # as they come: stages 0, 1, 2, and the same again


def join_in_turn(stage: Any, script: Path, *names: str) -> None:
    for name in names:
        stage.join(name, "--script", str(script))
        log = stage.folder / f"{name}.log"
        stage.eventually(lambda log=log: log.exists() and "I hold stage" in log.read_text(), f"{name} is in")


@pytest.mark.forked_peers
@pytest.mark.parametrize(
    "lost",
    [
        pytest.param("ann", id="source", marks=pytest.mark.hard),
        pytest.param("bob", id="middle", marks=pytest.mark.hard),
        pytest.param("cid", id="last", marks=pytest.mark.hard),
    ],
)
def test_P11_what_a_killed_peer_had_counted_is_computed_again_and_nothing_counts_twice(
    stage: Any, lost: str
) -> None:
    script = run_and_lose(stage, lost, RUN)
    expected, seen = by_one_process(script), set()
    for path in script.parent.glob("train.*.*.safetensors"):
        for name, tensor in load_file(path).items():
            # Two peers' sums are added in another order than one's: last bits of fp32, no sample.
            assert float((tensor - expected[name]).abs().max()) < 1e-4, f"{name} of {path.name}"
            seen.add(name)
    assert seen == expected.keys()


@pytest.mark.forked_peers
@pytest.mark.hard
def test_P11_so_it_is_where_peers_step_by_themselves_and_each_stage_is_one_again(stage: Any) -> None:
    """The audit says that every microbatch counts once; whoever holds a stage at the end holds the same bits."""
    script = run_and_lose(stage, "bob", local_run(2))
    due, held = by_one_process(script).keys(), dict[str, Tensor]()
    for path in script.parent.glob("train.*.*.safetensors"):
        for name, tensor in load_file(path).items():
            assert torch.equal(held.setdefault(name, tensor), tensor), f"{name} of {path.name}"
            assert tensor.isfinite().all()
    assert held.keys() == due


# A peer is killed while its stage counts, with its sums frozen, in SCATTER, at the end of its stage's round (prepared,
# as far as a peer can tell) and at the commit.
PHASES = (
    "counting.made=kill@3",
    "ready.arrived=kill",
    "scatter.mid=kill",
    "gather.before_progress=kill",
    "commit.arrived=kill",
)


@pytest.mark.forked_peers
@pytest.mark.hard
@pytest.mark.parametrize("at", with_time_for([SOURCE, LAST], in_ci=[MIDDLE]))
def test_P3_a_peer_of_any_stage_may_be_killed_in_any_phase_and_so_may_the_coordinator(
    stage: Any, at: int
) -> None:
    """It comes back each time; the others commit meanwhile, and the audit finds every microbatch counted once."""
    script, lost = stage.folder / "train.py", TWO_EACH[at]
    script.write_text(SCRIPT)
    # Nobody moves into the gap: the one who is killed comes back to it.
    stage.write_run(
        RUN + "rebalance_s = 0.0\n", rounds=1_000_000, min_peers=5, codec="fp32", dead_after_s=5.0
    )
    stage.coordinate()
    join_in_turn(stage, script, *TWO_EACH)
    two_more_commits(stage, "with all six")
    for phase in PHASES:
        stage.processes[lost].kill()
        stage.wait(lost)
        stage.environ = {"FARFLUNG_FAILPOINTS": phase}
        stage.join(lost, "--script", str(script))
        stage.environ = {}
        assert stage.wait(lost) == -signal.SIGKILL, phase
        two_more_commits(stage, f"after {phase}")
    stage.join(lost, "--script", str(script))
    two_more_commits(stage, f"with {lost} again")
    # Between the moment in which all stages are prepared and the record of all of them, and right after it.
    for phase in ("commit.before_fsync=kill", "commit.after_fsync=kill"):
        stage.processes["coordinator"].kill()
        stage.wait("coordinator")
        stage.environ = {"FARFLUNG_FAILPOINTS": phase}
        stage.coordinate()
        stage.environ = {}
        assert stage.wait("coordinator") == -signal.SIGKILL, phase
        stage.coordinate()
        two_more_commits(stage, f"after {phase}")
    for name in TWO_EACH:
        stage.processes[name].kill()
    stage.processes["coordinator"].send_signal(signal.SIGTERM)
    assert stage.wait("coordinator") == 0
    report = audit(read_folder(stage.folder))
    assert report.kept, "\n".join(report.lines())


def two_more_commits(stage: Any, when: str) -> None:
    """The first one may have been on its way."""
    began = stage.until(lambda status: True, "a status")["version"]
    stage.until(lambda status: status["version"] >= began + 2, f"two more commits, {when}")


def run_and_lose(stage: Any, lost: str, run: str) -> Path:
    """Two peers a stage.  One stops in the first batch, with microbatches in its sums and others in hand, and is
    killed, agent and trainer; somebody else comes in its place and fetches the state of the stage that it gets."""
    script: Path = stage.folder / "train.py"
    script.write_text(
        SCRIPT.replace("{stage.first}.", "{stage.first}.{os.getpid()}.", 1).replace(
            "from", "import os\nfrom", 1
        )
    )
    stage.write_run(run, rounds=ROUNDS, min_peers=6, codec="fp32")
    stage.coordinate()
    for name in TWO_EACH:
        stage.environ = {"FARFLUNG_FAILPOINTS": "trainer.step=stop@7"} if name == lost else {}
        join_in_turn(stage, script, name)
    stage.environ = {}
    held = [stage.log(name).partition("I hold stage ")[2][0] for name in TWO_EACH]
    assert held == ["0", "1", "2"] * 2
    stage.eventually(lambda: is_stopped(stage, lost), f"{lost}'s trainer stops")
    os.kill(stage.trainer_of(lost), signal.SIGKILL)
    stage.processes[lost].kill()
    join_in_turn(stage, script, "gus")  # batches begin with six
    finish(stage, *(name for name in (*TWO_EACH, "gus") if name != lost))
    return script


def is_stopped(stage: Any, name: str) -> bool:
    """Its trainer stands at its failpoint."""
    if not any("trainer_pid" in each for each in stage.events(name)):
        return False
    status = Path(f"/proc/{stage.trainer_of(name)}/stat").read_text()
    return status.rpartition(")")[2].split()[0] == "T"


MOVED_ROUNDS = 30


@pytest.mark.forked_peers
@pytest.mark.hard
def test_P17_a_peer_moves_to_a_stage_that_is_left_with_a_single_seat_and_nothing_is_computed_twice(
    stage: Any,
) -> None:
    """Three peers and two; one of the two is killed.  A peer of the other stage gives up its own between two batches,
    in the same processes, and serves the short one from then on."""
    script: Path = stage.folder / "train.py"
    script.write_text(
        SCRIPT.replace("{stage.first}.", "{stage.first}.{os.getpid()}.", 1).replace(
            "from", "import os\nfrom", 1
        )
    )
    run = RUN.replace("stages = 3\ncuts = [2, 4]", "stages = 2\ncuts = [3]\nrebalance_s = 1.0")
    stage.write_run(run, rounds=MOVED_ROUNDS, min_peers=2, codec="fp32", dead_after_s=2)
    stage.coordinate()
    names = ("ann", "bob", "cid", "dan", "eve")
    stage.environ = {"FARFLUNG_FAILPOINTS": "trainer.step=sleep:0.05@1+"}
    join_in_turn(stage, script, *names)
    held = {name: stage.log(name).partition("I hold stage ")[2][0] for name in names}
    assert sorted(held.values()) == ["0", "0", "0", "1", "1"]
    taking_part = "all count in one batch: before that a stage's newest state may lie with a single peer"
    stage.until(lambda s: sum(m["alive"] and m["participating"] for m in s["members"]) == 5, taking_part)
    stage.processes[next(name for name in names if held[name] == "1")].kill()
    lost = next(name for name in names if held[name] == "1")
    stage.eventually(lambda: "serves stage 1 now" in stage.log("coordinator"), "somebody moves")
    rest = [name for name in names if name != lost]
    [mover] = [name for name in rest if "moves from stage 0 to stage 1, which is short" in stage.log(name)]
    assert "I hold stage 1 of 2" in stage.log(mover)
    finish(stage, *rest)
    expected, seen = by_one_process(script, MOVED_ROUNDS), set()
    for path in script.parent.glob("train.*.*.safetensors"):
        for name, tensor in load_file(path).items():
            assert float((tensor - expected[name]).abs().max()) < 1e-3, f"{name} of {path.name}"
            seen.add(name)
    assert seen == expected.keys()
