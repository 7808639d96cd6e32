"""Recorded steps taken again: the same bits, and what is said of each thing that was changed or is missing.

The trainer is the real inner loop with dropout, Adam and leased samples, in this process; the test plays its agent.
The same over real processes, for the built-in trainer and a script, is in tests/real/test_verify.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from farflung.compression.codec import codec_named
from farflung.compression.feedback import BETA_OF
from farflung.console.main import app
from farflung.peer.identity import Identity
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import Frozen, LeasesNow, Load, Resume, Stop
from farflung.peer.record import verifying
from farflung.peer.record.measuring import distance
from farflung.peer.record.verifying import VerifyOptions, run_verify
from farflung.peer.record.work_files import (
    REDO_VARIABLE,
    ROUNDING_VARIABLE,
    SentOf,
    Work,
    folder_of,
    works_in,
    write_sent,
)
from farflung.peer.trainer.api import Run
from farflung.peer.trainer.inner_loop import InnerLoop
from farflung.peer.trainer.recording import NoWatcher, watcher_for
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Lease, Sent
from farflung.protocol.signed_words import Said, sent_part

STEPS, RUN_ID, ANN = 3, bytes(range(16)), Identity.generate()
SECTIONS: dict[str, dict[str, object]] = {
    "run": {"seed": 5},
    "round": {"sync_every": STEPS, "chunk_kb": 1, "codec": "fp32"},
    "data": {"batch": 3, "lease_samples": 6},
}
MANIFEST = Manifest.model_validate(SECTIONS)


class Samples:
    """Map-style, with a little chance in every sample, as data that is augmented has."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> Tensor:
        return torch.full((4,), float(place)) / 64 + 0.01 * random.random() + 0.01 * np.random.rand()


class Script:
    """A training script in this process, and the test as its agent."""

    def __init__(self, record: Path | None, manifest: Manifest = MANIFEST, seed: int = 1) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.answers: list[object] = []  # said one by one to a trainer that waits
        self.coming: list[object] = []  # said between two steps
        self.said: list[object] = []
        channel: Any = SimpleNamespace(send=self.said.append, recv=self._recv)
        watcher = watcher_for(record, manifest, "ann", self.model, optimizer)
        self.loop = InnerLoop(channel, self.model, manifest, watcher=watcher)
        steps = RunSteps(optimizer, self.loop.after_step, self.loop.before_step, self.loop.before_rates)
        self.run = Run(SimpleNamespace(), self.loop, steps, "ann")  # type: ignore[arg-type]
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        self.batches = self.run.batches(Samples(), fingerprint=False)

    def _recv(self, timeout_s: float) -> object | None:
        words = self.answers if timeout_s else self.coming
        assert words or not timeout_s, "this would wait for ever"
        return words.pop(0) if words else None

    def attach(self, folder: Path, version: int = 4) -> SharedState:
        folder.mkdir(parents=True, exist_ok=True)
        shared = SharedState.create(folder, self.loop.layout.total_elements)
        shared.anchor.copy_(torch.linspace(-0.3, 0.3, shared.elements))
        self.answers += [shared.as_message(), loaded(version)]
        self.loop.attach()
        return shared

    def span(self) -> None:
        for _ in range(STEPS):
            batch = next(self.batches)
            loss = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            self.run.step(loss)
            self.schedule.step()

    def frozen(self) -> Frozen:
        return [word for word in self.said if isinstance(word, Frozen)][-1]


def loaded(version: int, keep: str = "drop") -> Load:
    return Load(version=version, keep=keep, slot=0, tokens=0, steps=0, spare=1)  # type: ignore[arg-type]


def recorded(place: Path, manifest: Manifest = MANIFEST) -> Path:
    """The second span of a run, whose first one no commit used: what was learned in it is carried along."""
    script = Script(place / "work", manifest)
    script.attach(place / "shared")
    first = (Lease(7, 0, 0, 9, 0), Lease(8, 0, 20, 21, 20), Lease(9, 0, 22, 26, 22))
    script.answers = [LeasesNow(leases=first), loaded(5, "all")]
    script.span()
    # A batch of two leases, one that is short because no more is leased just then, and one after that.
    script.answers = [LeasesNow(leases=(*first, Lease(10, 0, 40, 60, 40))), Resume(spare=2)]
    script.span()
    return folder_of(place / "work", 2 * STEPS)


def taken_again(place: Path) -> Callable[..., Tensor]:
    """In this process, with another seed: all chance is put back."""

    def again(work: Work, trainer: verifying.Trainer, patience_s: float) -> Tensor:
        wanted = {name: trainer.environment.get(name, "") for name in (REDO_VARIABLE, ROUNDING_VARIABLE)}
        os.environ.update({name: value for name, value in wanted.items() if value})
        try:
            script = Script(None, seed=99)
            shared = script.attach(place / "again", version=5)
        finally:
            for name in wanted:
                os.environ.pop(name, None)
        spans = [span for step in work.head.steps for span in step.samples]
        leases = tuple(
            Lease(at, epoch, start, stop, start) for at, (epoch, start, stop) in enumerate(spans, 1)
        )
        script.answers = [LeasesNow(leases=leases), Stop(code="left", reason="")]
        script.span()
        return shared.slots[script.frozen().slot].clone()

    return again


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(verifying, "take_again", taken_again(tmp_path))
    return recorded(tmp_path)


def verdict(work: Path, **options: Any) -> tuple[int, str]:
    lines: list[str] = []
    code = run_verify(VerifyOptions(work, **options), lines.append)
    return code, "\n".join(lines)


def sends(work: Path, factor: float = 1.0, codec: str = "fp32", residual: Tensor | None = None) -> None:
    """The peer signs and sends it, so many times as large."""
    delta = Work(work).delta() * factor
    if residual is not None:
        delta = residual.clone().mul_(BETA_OF[codec]).add_(delta)
    size = Work(work).head.model.chunk_elements
    payloads = [codec_named(codec).encode(each.contiguous()) for each in delta.split(size)]
    bare = Sent(
        session=bytes(16), seq=1, round_no=8, hashes=b"".join(map(hash_bytes, payloads)), tokens=1, steps=1, loss=None,
        used=(), seat=0, counted=b"", signature=b"",
    )  # fmt: skip
    sent = msgspec.structs.replace(bare, signature=ANN.sign(sent_part(RUN_ID, bare)))
    kept = SentOf(run_id=RUN_ID, fragment=0, codec=codec, said=Said(ANN.public, sent))
    write_sent(work.parent, int(work.name.removeprefix("step-")), kept, residual)


def rewrite(work: Path, **changes: object) -> None:
    head = msgspec.structs.replace(Work(work).head, **changes)
    (work / "work.json").write_bytes(msgspec.json.encode(head))


def change_tensors(work: Path, name: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(work / name)
    change(tensors)
    save_file(tensors, work / name)


# ---- honest work ------------------------------------------------------------------------------------------------


def test_work_is_taken_again_to_the_same_bits(work: Path) -> None:
    """Carried work, Adam's moments, the rates, dropout and chance in the data are as they were."""
    before = load_file(work / "before.safetensors")
    assert "carry.0" in before and float(before["optimizer.0.step"]) == STEPS
    sends(work)
    code, told = verdict(work)
    assert code == 0 and "steps    taken again they give the same pseudo-gradient, bit for bit" in told
    assert (
        f"sent     fragment 0 in round 8: this work is what {ANN.peer_id} signed and sent, byte for byte"
        in told
    )


def test_what_rounding_moves_is_within_the_bound(work: Path) -> None:
    change_tensors(work, "after.safetensors", lambda tensors: tensors["delta"].mul_(1 + 2**-22))
    code, told = verdict(work)
    assert code == 0 and "rounding explains up to" in told and "moved by rounding (fp32)" in told


def test_with_a_coarse_codec_what_it_had_lost_is_added_and_told(work: Path) -> None:
    residual = torch.linspace(-1e-3, 1e-3, Work(work).delta().numel())
    sends(work, codec="int4", residual=residual)
    code, told = verdict(work)
    assert code == 0 and "byte for byte" in told and "of the size of the work, is its own word" in told


def test_the_newest_span_that_was_sent_counts(work: Path) -> None:
    sends(work)
    older = folder_of(work.parent, STEPS)
    assert older in works_in(work.parent)
    assert Work(work.parent).folder == work
    (work / "sent-f00.msgpack").rename(older / "sent-f00.msgpack")
    assert Work(work.parent).folder == older


def test_few_spans_are_kept(work: Path) -> None:
    assert [each.name for each in works_in(work.parent)] == ["step-00000003", "step-00000006"]
    script = Script(work.parent)
    script.attach(work.parent.parent / "shared")
    script.answers = [LeasesNow(leases=(Lease(7, 0, 0, 64, 0),)), *[Resume(spare=2)] * 3]
    for _ in range(3):
        script.span()
    assert [each.name for each in works_in(work.parent)] == ["step-00000006", "step-00000009"]


# ---- what was changed -------------------------------------------------------------------------------------------


def test_a_contribution_scaled_by_3_is_found_though_it_is_signed(work: Path) -> None:
    change_tensors(work, "after.safetensors", lambda tensors: tensors["delta"].mul_(3))
    sends(work)
    code, told = verdict(work)
    assert code == 1 and "byte for byte" in told
    assert "DIFFERS  steps taken again are 0.67 of the work apart (cosine 1.000000, 3 times as long)" in told


def test_a_contribution_that_is_not_the_recorded_work_is_found(work: Path) -> None:
    sends(work, factor=3.0)
    code, told = verdict(work)
    assert code == 1 and "bit for bit" in told
    assert f"chunk 0 of the recorded pseudo-gradient is not what {ANN.peer_id} signed and sent" in told


def test_a_list_that_nobody_signed_is_found(work: Path) -> None:
    sends(work)
    [(sent, _)] = Work(work).sent()
    said = msgspec.structs.replace(sent.said, identity=Identity.generate().public)
    write_sent(work.parent, 2 * STEPS, msgspec.structs.replace(sent, said=said), None)
    code, told = verdict(work)
    assert code == 1 and "has not signed the list of what was sent" in told


def test_a_changed_value_is_found_in_both_ways(work: Path) -> None:
    sends(work)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["delta"][5] += 1.0

    change_tensors(work, "after.safetensors", change)
    code, told = verdict(work)
    assert code == 1 and "is not what" in told and "DIFFERS  steps taken again" in told


def test_another_order_of_samples_is_found(work: Path) -> None:
    head = Work(work).head
    first, *rest = head.steps
    swapped = (msgspec.structs.replace(first, samples=rest[-1].samples), *rest[:-1],
               msgspec.structs.replace(rest[-1], samples=first.samples))  # fmt: skip
    rewrite(work, steps=swapped)
    code, told = verdict(work)
    assert code == 1 and "DIFFERS  steps taken again are" in told


@pytest.mark.parametrize("name", ["optimizer.0.exp_avg", "model.0.weight", "random.torch", "carry.0"])
def test_another_beginning_is_found(work: Path, name: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].roll(8) if name == "random.torch" else tensors[name] + 0.5

    change_tensors(work, "before.safetensors", change)
    try:
        code, told = verdict(work)
    except UserError as error:
        assert name == "random.torch", error
    else:
        assert code == 1 and "DIFFERS" in told


def test_other_rates_are_found(work: Path) -> None:
    head = Work(work).head
    steps = tuple(
        msgspec.structs.replace(each, rates=({**each.rates[0], "lr": 0.05},)) for each in head.steps
    )
    rewrite(work, steps=steps)
    assert verdict(work)[0] == 1


# ---- what is missing or damaged -----------------------------------------------------------------------------------


def test_work_that_was_not_sent_binds_nobody(work: Path) -> None:
    code, told = verdict(work)
    assert code == 0 and "unsent   nothing was signed and sent of this work" in told


@pytest.mark.parametrize("name", ["work.json", "before.safetensors", "after.safetensors"])
@pytest.mark.parametrize("raw", [None, b"", b"noise" * 9])
def test_missing_and_damaged_files_are_told_in_one_line(work: Path, name: str, raw: bytes | None) -> None:
    (work / name).unlink()
    if raw is not None:
        (work / name).write_bytes(raw)
    done = CliRunner().invoke(app, ["verify", str(work)])
    assert isinstance(done.exception, UserError) and "\n" not in str(done.exception), done.output
    assert name in str(done.exception) or "no recorded work there" in str(done.exception)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 9}, "its format is 9"),
        ({"steps": ()}, "it has 0 steps, a period of this run 3"),
        ({"epoch_samples": 9}, "not the one of the recorded work"),
        ({"data": b"x"}, "not the one of the recorded work"),
        ({"optimizer": {"77.step": 1}}, "another number of parameters"),
    ],
)
def test_work_that_does_not_fit_is_refused(work: Path, change: dict[str, object], told: str) -> None:
    rewrite(work, **change)
    with pytest.raises(UserError, match=told):
        verdict(work)


def test_an_unknown_rounding_is_refused(work: Path) -> None:
    with pytest.raises(UserError, match="there are fp32, tf32, bf16"):
        verdict(work, rounding="fp8")


def test_schedules_whose_results_come_in_the_midst_of_a_span_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for section, value in (("outer", {"schedule": "overlap"}), ("round", {"period_s": 2.0})):
        manifest = Manifest.model_validate({**SECTIONS, section: {**SECTIONS.get(section, {}), **value}})
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        assert isinstance(watcher_for(tmp_path, manifest, "ann", model, optimizer), NoWatcher)
    assert caplog.text.count("nothing is recorded") == 2


def test_a_result_that_comes_in_the_midst_of_a_span_spoils_its_record(tmp_path: Path) -> None:
    script = Script(tmp_path / "work")
    script.attach(tmp_path / "shared")
    script.answers = [LeasesNow(leases=(Lease(7, 0, 0, 40, 0),)), Resume(spare=2)]
    script.coming = [loaded(5, "all")]
    script.span()
    assert not works_in(tmp_path / "work")


def test_steps_on_samples_that_nobody_leased_are_not_recorded(tmp_path: Path) -> None:
    script = Script(tmp_path / "work")
    script.attach(tmp_path / "shared")
    script.batches = iter([torch.ones(2, 4)] * STEPS)
    script.answers = [Resume(spare=2)]
    script.span()
    assert not works_in(tmp_path / "work")


def test_distances() -> None:
    one = torch.tensor([3.0, 4.0])
    assert distance(one, one.clone()).same_bits
    found = distance(one, torch.tensor([3.0, 0.0]))
    assert (found.relative, found.same_bits) == (0.8, False) and found.cosine == pytest.approx(0.6)
    assert not distance(torch.zeros(1), -torch.zeros(1)).same_bits
    assert distance(torch.zeros(2), one).relative == float("inf")
