"""Scripts of several ranks beside one agent: what they freeze, read and count is what one process would.

Ranks are processes over gloo; the agent is played by the test (rig/lonely_agent.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from farflung.peer.local.words import Attach, FromTrainer, Frozen, Score, Scored
from farflung.protocol.digests import mask_to_bytes
from farflung.protocol.errors import ScoreCause
from farflung.protocol.manifest import Manifest
from rig.lonely_agent import LonelyAgent, close_all
from rig.nursery import Nursery
from rig.ports import free_ports

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).resolve().parents[2] / "rig" / "island_script.py")
SMALL: dict[str, dict[str, object]] = {
    "round": {"sync_every": 4, "chunk_kb": 1},
    "data": {"batch": 2, "lease_samples": 16},
    "model": {"kind": ""},
}
ROUNDS = 3
# How many threads of our group are left to each rank when Python ends; the script's own groups are the script's.
ENDING = """
import atexit, os, sys
import torch.distributed as dist
from farflung.peer.island.group import GlooGroup

def threads():
    return set(os.listdir("/proc/self/task"))

def begin(name):
    place = f"file://{sys.argv[0]}.{name}"
    dist.init_process_group("gloo", place, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))

begin("first")
before = threads()
atexit.register(lambda: print("left", len(ours & threads()), file=sys.stderr))
group = GlooGroup()
assert group.gather(b"all of us")[0] == b"all of us"
ours = threads() - before
assert ours
for word in sys.argv[1:]:
    dist.destroy_process_group() if word == "destroy" else begin(word)
"""


@pytest.fixture(autouse=True)
def agents_that_a_failed_test_left() -> Iterator[None]:
    yield
    close_all()


@dataclass
class Outcome:
    heard: list[FromTrainer]
    slots: list[Tensor]  # as they were frozen
    anchor: Tensor
    codes: list[int]
    said: list[str]
    seen: list[dict[str, Any]]  # by each rank
    weights: Path
    norm: float | None  # of the first step's gradient

    @property
    def frozen(self) -> list[Frozen]:
        return [each for each in self.heard if isinstance(each, Frozen)]

    @property
    def model(self) -> Any:
        return next(each.model for each in self.heard if isinstance(each, Attach))


def played(
    nursery: Nursery,
    folder: Path,
    mode: str,
    ranks: int = 1,
    batch: int = 4,
    score: Score | None = None,
    **sections: Any,
) -> Outcome:
    agent = LonelyAgent(Manifest.model_validate({**SMALL, **sections}), ROUNDS, score)
    out = folder / f"{mode}.{ranks}"
    environ = {"FARFLUNG_AGENT": str(agent.folder), "ISLAND_WATCH": "1", "FARFLUNG_DATA": str(folder)}
    port = next(free_ports())
    children = []
    for rank in range(ranks):
        if ranks > 1:
            environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            environ["MASTER_PORT"] = str(port)
        words = [SCRIPT, mode, str(out), str(batch)]
        children.append(nursery.popen(words, environ, subprocess.DEVNULL, subprocess.PIPE))
    agent.serve(*children)
    said = [each.communicate()[1] for each in children]
    files = [Path(f"{out}.{rank}.json") for rank in range(ranks)]
    seen = [json.loads(each.read_text()) for each in files if each.exists()]
    anchor = agent.shared.anchor.clone() if agent.shared is not None else torch.empty(0)
    norm = agent.shared.read_gradient_norm() if agent.shared is not None else None
    agent.close()
    codes = [each.wait() for each in children]
    return Outcome(agent.heard, agent.frozen, anchor, codes, said, seen, Path(f"{out}.safetensors"), norm)


def assert_one_peer(found: Outcome) -> None:
    """What holds for every island that came to the end of its run."""
    assert set(found.codes) == {0}, found.said
    first, *others = found.seen
    for key in ("samples", "steps", "version", "tokens", "model"):
        assert all(each[key] == first[key] for each in others), key
    assert [each["wrong"] for each in found.seen] == [[]] * len(found.seen), (
        "a slot is not anchor - model there"
    )
    assert first["version"] == ROUNDS and [each.steps for each in found.frozen] == [4] * ROUNDS
    places = [place for batch in first["samples"] for start, stop in batch for place in range(start, stop)]
    assert places == list(range(len(places))), "every sample once, in order"
    assert [sum(used.upto - 16 * used.lease for used in each.used) for each in found.frozen] == [
        each.tokens // 9 + sum(before.tokens for before in found.frozen[:at]) // 9
        for at, each in enumerate(found.frozen)
    ]
    weights = load_file(found.weights)
    assert torch.equal(weights["few"].float().flatten(), found.anchor[: weights["few"].numel()])


@pytest.mark.parametrize("mode", ["ddp-same", pytest.param("fsdp-same", marks=pytest.mark.hard)])
def test_ranks_learn_what_one_process_learns_from_the_same_samples(
    nursery: Nursery, tmp_path: Path, mode: str
) -> None:
    """With shards of unlike sizes, and short ends: of 16 samples that are leased, 15 are a batch of three ranks."""
    found = played(nursery, tmp_path, mode, ranks=3, batch=5)
    assert_one_peer(found)
    weights = [weight for each in found.seen for weight in each["weights"]]
    assert found.norm == pytest.approx(1.0, rel=1e-3), "it was clipped to one, over all ranks together"
    assert 1.0 in weights and any(weight != 1.0 for weight in weights)
    done = nursery.call([SCRIPT, "replay-same", f"{tmp_path}/{mode}.3.0", "12"], {}, timeout_s=60.0)
    assert done.returncode == 0, done.stderr
    # Every round took all that was learned, so the run's weights are those after twelve steps.
    expected, learned = load_file(f"{tmp_path}/{mode}.3.0.replayed"), load_file(found.weights)
    assert expected.keys() == learned.keys()
    for name, tensor in expected.items():
        assert torch.allclose(tensor, learned[name], atol=2e-5), name


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("ddp-cp-same", 2),
        ("ep-same", 2),
        pytest.param("fsdp-cp-same", 4, marks=pytest.mark.hard),
        pytest.param("fsdp-ep-same", 4, marks=pytest.mark.hard),
        pytest.param("fsdp-ep-swap-same", 4, marks=pytest.mark.hard),
    ],
)
def test_ranks_that_work_on_one_batch_learn_what_one_process_learns(
    nursery: Nursery, tmp_path: Path, mode: str, ranks: int
) -> None:
    """Each has half of a sequence, or half of the experts; but those that swap tokens have samples of their own."""
    found = played(nursery, tmp_path, mode, ranks, batch=4)
    assert_one_peer(found)
    data_ranks = ranks if "swap" in mode else ranks // 2
    assert {each.tokens for each in found.frozen} == {4 * 4 * data_ranks * 9}
    words = "-".join(each for each in ("replay", *mode.split("-")) if each not in ("ddp", "fsdp", "swap"))
    done = nursery.call([SCRIPT, words, f"{tmp_path}/{mode}.{ranks}.0", "12"], {}, timeout_s=60.0)
    assert done.returncode == 0, done.stderr
    expected, learned = load_file(f"{tmp_path}/{mode}.{ranks}.0.replayed"), load_file(found.weights)
    assert expected.keys() == learned.keys()
    for name, tensor in expected.items():
        assert torch.allclose(tensor, learned[name], atol=2e-5), name


@pytest.mark.parametrize("mode", ["fsdp-bf16-eval-accumulate", "ddp-bn-scaler"])
def test_what_two_ranks_freeze_is_the_anchor_minus_the_whole_model(
    nursery: Nursery, tmp_path: Path, mode: str
) -> None:
    found = played(nursery, tmp_path, mode, ranks=2)
    if "bn" in mode:  # after the last load there is one step, and each rank's statistics are its own
        for each in found.seen:
            each["model"] = ""
    assert_one_peer(found)


@pytest.mark.hard
@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("ddp", 2),
        ("fsdp", 2),
        ("fsdp-frozen-same", 3),
        ("fsdp-scaler", 2),
        ("hsdp", 2),
        ("hsdp-bf16", 4),
        ("tp-same", 2),
        ("tp-fsdp", 4),
    ],
)
def test_every_way_to_spread_a_model_over_ranks(
    nursery: Nursery, tmp_path: Path, mode: str, ranks: int
) -> None:
    found = played(nursery, tmp_path, mode, ranks)
    assert_one_peer(found)
    if "frozen" in mode:  # such parameters are hashed as a whole
        assert found.model == played(nursery, tmp_path, "plain-frozen-same").model


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("fsdp-nodes", 2),
        pytest.param("hsdp-nodes-bf16", 4, marks=pytest.mark.hard),
        pytest.param("ddp-nodes", 2, marks=pytest.mark.hard),
        pytest.param("fsdp-nodes-frozen-same", 4, marks=pytest.mark.hard),
        pytest.param("tp-fsdp-nodes", 4, marks=pytest.mark.hard),
    ],
)
def test_ranks_on_another_node_write_and_read_by_one_on_the_agents(
    nursery: Nursery, tmp_path: Path, mode: str, ranks: int
) -> None:
    found = played(nursery, tmp_path, mode, ranks)
    assert_one_peer(found)


@pytest.mark.parametrize("schedule", ["overlap", pytest.param("streaming", marks=pytest.mark.hard)])
def test_training_goes_on_during_rounds_on_two_nodes(nursery: Nursery, tmp_path: Path, schedule: str) -> None:
    fragments = 2 if schedule == "streaming" else 1
    sections = {"outer": {"schedule": schedule}, "round": {**SMALL["round"], "fragments": fragments}}
    found = played(nursery, tmp_path, "fsdp-nodes", ranks=2, **sections)
    assert set(found.codes) == {0}, found.said
    assert len(found.frozen) >= ROUNDS * fragments
    assert found.seen[0]["model"] == found.seen[1]["model"]


def test_frozen_parameters_in_parts_have_the_hash_of_the_whole(nursery: Nursery, tmp_path: Path) -> None:
    found = played(nursery, tmp_path, "fsdp-frozen-same", ranks=2)
    assert found.model == played(nursery, tmp_path, "plain-frozen-same").model
    assert found.model.frozen != bytes(32)


@pytest.mark.hard
@pytest.mark.parametrize("schedule", ["overlap", "streaming"])
def test_training_goes_on_during_rounds(nursery: Nursery, tmp_path: Path, schedule: str) -> None:
    fragments = 2 if schedule == "streaming" else 1
    sections = {"outer": {"schedule": schedule}, "round": {**SMALL["round"], "fragments": fragments}}
    found = played(nursery, tmp_path, "hsdp", ranks=2, **sections)
    assert set(found.codes) == {0}, found.said
    assert len(found.frozen) >= ROUNDS * fragments
    assert found.seen[0]["model"] == found.seen[1]["model"]


def test_ranks_whose_gradients_nobody_sums_are_told_so(nursery: Nursery, tmp_path: Path) -> None:
    found = played(nursery, tmp_path, "alone-same", ranks=2)
    assert 2 in found.codes and 0 not in found.codes and not found.frozen
    told = next(each for code, each in zip(found.codes, found.said, strict=True) if code == 2)
    assert "rank 1 and rank 0 have different values of" in told and "Traceback" not in told


def test_plain_tensors_that_begin_unlike_are_refused_on_all_ranks_before_an_agent_hears_anything(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Are they copies that were not seeded alike, or experts of each rank's own?  Nobody says."""
    found = played(nursery, tmp_path, "alone", ranks=2)
    assert found.codes == [2, 2] and not found.heard
    for each in found.said:
        assert "rank 1 and rank 0 begin with different values of 'embed.weight', a plain tensor" in each
        assert "make it a DTensor" in each and "Traceback" not in each


def test_ranks_that_do_not_take_the_same_steps_are_told_so(nursery: Nursery, tmp_path: Path) -> None:
    found = played(nursery, tmp_path, "alone-uneven-same", ranks=2)
    assert found.codes == [2, 2]
    assert all("the ranks are not at the same place: rank 0 has taken step" in each for each in found.said)


def test_a_rank_that_dies_ends_the_others_at_their_next_look(nursery: Nursery, tmp_path: Path) -> None:
    found = played(nursery, tmp_path, "alone-die-same", ranks=2)
    assert found.codes == [1, 9] and "another rank of this peer is gone" in found.said[0]


@pytest.mark.skipif(sys.platform != "linux", reason="it counts threads in /proc")
@pytest.mark.parametrize("then", [[], ["destroy"], ["destroy", "again"]])
def test_no_thread_of_our_group_is_left_when_python_ends(
    nursery: Nursery, tmp_path: Path, then: list[str]
) -> None:
    """One that let go of a tensor then would abort the process."""
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    children = []
    for rank in range(2):
        environ = {"RANK": str(rank), "WORLD_SIZE": "2"}
        children.append(nursery.popen([str(script), *then], environ, subprocess.DEVNULL, subprocess.PIPE))
    said = [each.communicate()[1] for each in children]
    assert [each.wait() for each in children] == [0, 0], said
    assert all("left 0\n" in each and "Error" not in each for each in said), said


# ---- the held-out loss

EVALUATED: dict[str, Any] = {
    "data": {**SMALL["data"], "source": "https://127.0.0.1:9/none.bin", "length": 9},
    "eval": {"source": "https://127.0.0.1:9/held_out.bin", "windows": 16},
}


def scored(nursery: Nursery, folder: Path, mode: str, ranks: int = 1) -> tuple[Outcome, Scored]:
    """Asked for while steps are taken from version 0: sixteen windows."""
    tokens = (np.arange(9 * 40) * 7 % 16).astype(np.uint16)
    (folder / "held_out").mkdir(exist_ok=True)
    tokens.tofile(folder / "held_out" / "held_out.bin")
    score = Score(number=7, versions=(0,), windows=mask_to_bytes((1 << 16) - 1))
    found = played(nursery, folder, mode, ranks, score=score, **EVALUATED)
    [said] = [each for each in found.heard if isinstance(each, Scored)]
    assert_one_peer(found)
    return found, said


@pytest.mark.mode("evaluation")
@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("ddp-held-same", 2),
        ("fsdp-held-same", 2),
        pytest.param("fsdp-nodes-held-same", 2, marks=pytest.mark.hard),
        pytest.param("tp-fsdp-held-same", 4, marks=pytest.mark.hard),
    ],
)
def test_ranks_compute_the_held_out_loss_of_a_version_together_and_train_on_as_if_they_had_not(
    nursery: Nursery, tmp_path: Path, mode: str, ranks: int
) -> None:
    _, alone = scored(nursery, tmp_path, "tp-held-same" if "tp" in mode else "held-same")
    found, said = scored(nursery, tmp_path, mode, ranks)
    expected = np.frombuffer(alone.nats, "<f4")
    assert len(expected) == 16 and said.why_not == ""
    assert np.allclose(np.frombuffer(said.nats, "<f4"), expected, atol=1e-5), "that of rank 0"
    assert all(each["held_out"] == found.seen[0]["held_out"] for each in found.seen), "all have computed"
    without = played(nursery, tmp_path, mode.replace("-held", ""), ranks)
    assert torch.equal(found.anchor, without.anchor)


@pytest.mark.mode("evaluation")
def test_where_one_rank_alone_says_what_the_loss_is_none_is_computed(
    nursery: Nursery, tmp_path: Path
) -> None:
    _, said = scored(nursery, tmp_path, "ddp-first-same", 2)
    assert said.why_not == ScoreCause.NO_SCRIPT
