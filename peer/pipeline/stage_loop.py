"""The work of one stage on its device: forward, backward, the sums of gradients.

Owns: randomness, buffers between a microbatch's way there and its way back, the sums.
Called by: the local pipeline, and the loops of batches and of stages.
Must not know: how activations travel, who keeps them, which microbatches come, versions beyond a number, the optimizer.

On the way there no graph is made and nothing but buffers is kept; on the way back the forward pass runs again on the
same input, with the same random numbers, and then backwards.  The last stage does all at once.  A gradient is
d(loss x tokens), summed over microbatches in fp32, so that the sum over all stages' peers, divided by the tokens of the
batch, is the gradient of the mean loss of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farflung.peer.pipeline.parts import (
    Loss,
    Riders,
    Stage,
    Tensors,
    as_output,
    check_scalar,
    run_part,
    seed_of_chance,
)
from farflung.protocol.errors import UserError
from farflung.protocol.limits import NATS_MOST

_NARROW = (torch.bfloat16, torch.float16)  # sums of these would lose what single microbatches say


@dataclass(frozen=True, slots=True)
class MicroActivations:
    """One microbatch: which one of the batch that makes the version after `version`, and what rides along."""

    version: int
    number: int
    tokens: int
    riders: Riders


class NonFiniteTensor(Exception):
    """The loss of a microbatch, or a gradient of it, is no number.  Nothing of it is in the sums of this stage."""


class StageLoop:
    """`loss` of all but the last stage is None."""

    def __init__(self, stage: Stage, run_seed: int, loss: Loss | None) -> None:
        self.stage = stage
        self.sums = GradientSums(stage)
        self._run_seed = run_seed
        self._loss = loss
        # Of microbatches that went forward: the buffers that changed on the way, as they were before.
        self._before: dict[int, dict[str, Tensor]] = {}
        self._cuda = sorted({p.device for p in stage.parameters() if p.device.type == "cuda"}, key=str)

    @property
    def open_count(self) -> int:
        """Microbatches that went forward and have not come back."""
        return len(self._before)

    @torch.no_grad()
    def forward(self, micro: MicroActivations, given: Tensors) -> Tensors:
        """What goes to the next stage.  `given` stays as it is: `backward` wants it again."""
        before = self._buffers()
        gives = self._run(micro, tuple(t.clone() for t in given))
        self._before[micro.number] = self._changed(before)
        return gives

    def undo_forward(self, number: int) -> None:
        """What it gave is of no use to anybody: the buffers are as if it had not been."""
        self._put_back(self._before.pop(number))

    def backward(self, micro: MicroActivations, given: Tensors, gradients: Tensors) -> Tensors:
        """`gradients`: one for each floating tensor that `forward` gave.  What goes to the stage before, likewise.

        NotFinite if one of those, or of this stage's own, is no number.  A microbatch need not have gone forward here:
        where its peer was lost another one gets the gradient that is there already.  Then it counts in the buffers now.
        """
        before, after = self._before.pop(micro.number, None), self._buffers()
        is_new = before is None
        self._put_back(before or {})
        try:
            with torch.enable_grad():
                leaves = self._leaves(given)
                # A part may work in place, which torch allows on no leaf.
                gave = self._run(micro, tuple(leaf.clone() for leaf in leaves))
                self._go_back([t for t in gave if t.is_floating_point()], gradients)
            returned = _gradients_of(leaves)
            self._add_gradients(micro, returned)
        except NonFiniteTensor:
            is_new = False
            raise
        finally:
            if not is_new:
                self._put_back(after)  # it was counted on the way there, or does not count
        return returned

    def last(self, micro: MicroActivations, given: Tensors) -> tuple[Tensors, float]:
        """The last stage's way there and back: what goes to the stage before, and the mean loss of a token.

        NotFinite if it, or a gradient, is no number.
        """
        assert self._loss is not None, "the last stage has the loss"
        before = self._buffers()
        with torch.enable_grad():
            leaves = self._leaves(given)
            gave = self._run(micro, tuple(leaf.clone() for leaf in leaves))
            loss = self._loss(as_output(gave), micro.riders)
            check_scalar(loss)
            mean = float(loss.detach())
            if not torch.isfinite(loss.detach()).all():
                self._put_back(before)
                raise NonFiniteTensor(
                    f"the loss of microbatch {micro.number} of version {micro.version} is {mean}"
                )
            if not loss.requires_grad:
                raise UserError(
                    "the loss depends on no parameter that trains: is it detached, or everything frozen?"
                )
            (loss.reshape(()) * micro.tokens).backward()  # type: ignore[no-untyped-call]
        returned = _gradients_of(leaves)
        try:
            self._add_gradients(micro, returned)
        except NonFiniteTensor:
            self._put_back(before)
            raise
        return returned, mean

    def evaluate(self, micro: MicroActivations, given: Tensors) -> tuple[Tensors, float]:
        """What `last` gives, with no gradient: the loss of what nobody learns from.  Nothing of it is in the sums."""
        assert self._loss is not None, "the last stage has the loss"
        with torch.no_grad():
            found = self._loss(as_output(self._run(micro, tuple(t.clone() for t in given))), micro.riders)
        check_scalar(found)
        loss = float(found)
        if not 0.0 <= loss <= NATS_MOST:
            raise NonFiniteTensor(f"its loss is {loss:g}, which is no number of nats from 0 to {NATS_MOST:g}")
        return self.no_gradients(given), loss

    def no_gradients(self, given: Tensors) -> Tensors:
        """What goes back of a microbatch that nobody learns from."""
        return tuple(torch.zeros_like(leaf) for leaf in self._leaves(given) if leaf.requires_grad)

    def trial(self, micro: MicroActivations, given: Tensors) -> float:
        """The loss of a microbatch of a model in one stage, of which nothing remains: no sums, no buffers."""
        before = self._buffers()
        try:
            return self.last(micro, given)[1]
        finally:
            self._put_back(before)
            self.drop()

    def trial_back(self, micro: MicroActivations, given: Tensors, gradients: Tensors) -> None:
        """The same of a stage that is not the last: a way back."""
        before = self._buffers()
        try:
            self.backward(micro, given, gradients)
        finally:
            self._put_back(before)
            self.drop()

    def drop(self) -> None:
        """Forget all microbatches and all sums."""
        self._before.clear()
        self.sums.clear()

    # ---- helpers

    def _leaves(self, given: Tensors) -> Tensors:
        wanted = self.stage.first > 0  # nobody asks for the gradient of the run's data
        return tuple(t.detach().requires_grad_(wanted and t.is_floating_point()) for t in given)

    def _run(self, micro: MicroActivations, given: Tensors) -> Tensors:
        with torch.random.fork_rng(devices=[d.index for d in self._cuda]):
            for number, module in self.stage.numbered():
                seed = seed_of_chance(self._run_seed, micro.version, micro.number, number)
                torch.default_generator.manual_seed(seed)
                for device in self._cuda:
                    torch.cuda.default_generators[device.index].manual_seed(seed)
                given = run_part(number, module, given, micro.riders)
        return given

    def _go_back(self, gave: list[Tensor], gradients: Tensors) -> None:
        if len(gave) != len(gradients):
            raise ValueError(f"{len(gradients)} gradients for {len(gave)} floating tensors")
        pairs = [(out, g.to(out.dtype)) for out, g in zip(gave, gradients, strict=True) if out.requires_grad]
        if pairs:  # else this stage, and all before it, are frozen
            torch.autograd.backward([out for out, _ in pairs], [g for _, g in pairs])

    def _add_gradients(self, micro: MicroActivations, returned: Tensors) -> None:
        if not self.sums.add_gradients(returned):
            raise NonFiniteTensor(
                f"the gradient of microbatch {micro.number} of version {micro.version} is not finite"
            )

    @torch.no_grad()
    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.stage.named_buffers()}

    def _changed(self, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        now = dict(self.stage.named_buffers())
        return {name: old for name, old in before.items() if name in now and not _same(old, now[name])}

    @torch.no_grad()
    def _put_back(self, then: Mapping[str, Tensor]) -> None:
        for name, buffer in self.stage.named_buffers():
            if name in then:
                buffer.copy_(then[name])


class GradientSums:
    """What all microbatches since `clear` say of each parameter that trains: in fp32, or fp64 of one that is fp64."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._sums: dict[
            Tensor, Tensor
        ] = {}  # a parameter is found as itself, whatever it is called elsewhere

    def add_gradients(self, returned: Tensors = ()) -> bool:
        """After each backward pass: into the sums with what it left in the parameters.  False: that, or what goes to
        the stage before, is not finite, and the sums are as they were."""
        found = {p: p.grad for p in self._parameters.values() if p.grad is not None}
        for parameter in found:
            parameter.grad = None
        finite = [gradient.isfinite().all() for gradient in (*found.values(), *returned)]
        if not all([bool(each) for each in finite]):
            return False
        for parameter, gradient in found.items():
            if parameter in self._sums:
                self._sums[parameter].add_(gradient)
            else:
                narrow = gradient.dtype in _NARROW
                self._sums[parameter] = gradient.to(torch.float32) if narrow else gradient
        return True

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """By name."""
        for name, parameter in self._parameters.items():
            yield name, self.of(parameter)

    def tensors(self) -> Iterable[Tensor]:
        """Where a microbatch said anything."""
        return self._sums.values()

    def of(self, parameter: Tensor) -> Tensor:
        """Zeros where no microbatch said anything."""
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        found = self._sums.get(parameter)
        return torch.zeros_like(parameter, dtype=wide).detach() if found is None else found

    def take_means(self, tokens: int) -> dict[Tensor, Tensor]:
        """The mean gradient of a token, by parameter, where a microbatch said anything; the sums are zero then."""
        found, self._sums = self._sums, {}
        return {parameter: each.div_(tokens) for parameter, each in found.items()}

    def clear(self) -> None:
        self._sums.clear()


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _gradients_of(leaves: Tensors) -> Tensors:
    """Zeros where this stage made no use of a tensor."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return tuple(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in wanted)
