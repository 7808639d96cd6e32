"""The public API of pipelines: `farflung.pipeline`, which takes part in a run of synchronous batches until it ends.

Called by users' scripts; the built-in trainer calls its second half.  Starting, watching and ending the agent is in
peer/trainer; what happens with each microbatch is in summing_loop.py and pipeline_loop.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypedDict, Unpack

import torch

from farflung.peer.footprint import FreeMemory, MemoryNeed, MemoryRules, need_of, of_stage
from farflung.peer.local.words import FINISHED
from farflung.peer.pipeline.parts import Loss, Part, Stage, checked_parts, survey_parts
from farflung.peer.pipeline.pipeline_loop import PipelineLoop, StageModel
from farflung.peer.pipeline.samples import Samples
from farflung.peer.pipeline.stage_loop import StageLoop
from farflung.peer.pipeline.summing_loop import BatchLoop
from farflung.peer.pipeline.whole import WholeModel, whole_model
from farflung.peer.room import best_device, room_on, rules_here, say_whether_it_fits
from farflung.peer.trainer.api import Connection, connect
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import FarflungError, UserError
from farflung.protocol.outer_numbers import VALUE_BYTES
from farflung.protocol.process.log_lines import Teller, mistakes_in_one_line

# ---- stage fit ---------------------------------------------------------------------------------------------
# Which stages of a run fit this machine: what each needs, what is here, and the words where none fits.
#
# Called by `farflung.pipeline`, before the run hears of this peer. Must not know: the network, other peers,
# which stage the coordinator will choose.
#
# What is counted is what footprint.py says of a stage. What the parts keep between their forward and their
# backward pass comes on top, is known only when it runs, and is tried out with one microbatch as soon as the
# stage is built.


def room_here(device: torch.device, limit: str | None = None) -> FreeMemory:
    """`limit`: "6 GB", at most so much for a stage: of the GPU, or of the host where there is none."""
    found = room_on(device)
    if limit is None:
        return found
    most = size_bytes(limit)
    if found.gpu_bytes is None:
        return found._replace(host_bytes=min(found.host_bytes, most))
    return found._replace(gpu_bytes=min(found.gpu_bytes, most))


def size_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([MG])B", text.strip())
    if found is None:
        raise UserError(f'memory: expected a size such as "500 MB" or "6 GB", found {text!r}')
    return round(float(found[1]) * (1e6 if found[2] == "M" else 1e9))


def needs_of(whole: WholeModel, rules: MemoryRules) -> list[MemoryNeed]:
    return [
        need_of(
            of_stage(
                rules,
                plan.memory_bytes,
                layout.total_elements,
                layout.first_plain_chunk * layout.chunk_elements,
            )
        )
        for plan, layout in zip(whole.plans, whole.layouts, strict=True)
    ]


def fitting_stages(needs: Sequence[MemoryNeed], room: FreeMemory) -> tuple[int, ...]:
    """Numbers of those that fit; UserError if there is none, with what the smallest needs."""
    fit = tuple(number for number, need in enumerate(needs) if need.within(room))
    if fit:
        return fit
    where = "memory" if room.gpu_bytes is None else "GPU memory"
    here = room.host_bytes if room.gpu_bytes is None else room.gpu_bytes
    beside = [need.gpu_bytes + (need.host_bytes if room.gpu_bytes is None else 0) for need in needs]
    if min(beside) <= here:  # so it is not the GPU
        where, here = "host memory", room.host_bytes
        beside = [need.host_bytes for need in needs]
    raise UserError(
        f"no stage of this run fits: the smallest needs {_gb(min(beside))} of {where}, here are {_gb(here)}; end other "
        "programs, or ask for a run with more [pipeline] stages"
    )


def say_which_fit(fitting: Sequence[int], stages: int) -> None:
    which = "all stages fit" if len(fitting) == stages else f"stages {', '.join(map(str, fitting))} fit"
    Teller.from_environment("trainer")(f"memory: {which} this machine, of {stages} that the run has")


def _gb(count: float) -> str:
    size, unit = next(
        (size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= size or size == 1e3
    )
    return f"{count / size:.1f} {unit}"


# ---- api ---------------------------------------------------------------------------------------------------


class OwnSettings(TypedDict, total=False):
    """Of this machine's owner."""

    identity: str | None
    memory: str | None


def pipeline(
    url: str | None,
    parts: Sequence[Part],
    *,
    data: Any,
    inputs: Sequence[str],
    riders: Sequence[str] = (),
    loss: Loss,
    held_out: Any = None,
    **own: Unpack[OwnSettings],
) -> Stage:
    """Take part in a run of synchronous batches (`[pipeline] batch` of run.toml) until it ends; gives the final model.

    One update of the run is the exact gradient of one batch, whoever computed which part of it and whoever was lost
    meanwhile; the optimizer is the run's (`[outer]`), so the script has none.  `parts`: the model (docs/pipelines.md),
    or a list with one module in it.  `data`: a data set with a length, the same on every peer, or what makes one when
    it is called.  Its items are mappings with the names in `inputs` and `riders`, or tuples in that order.  `inputs`:
    what the first part takes.  `riders`: integers that travel along to the loss, such as labels.  `loss`: from what the
    last part gives, and the riders by name, to the mean loss of a token.  `held_out`: like `data`, of items that nobody
    learns from; where the run has [eval], their loss is shown to everybody.  `url` and `identity`: as for `join`.

    Where the run has `[pipeline] stages` > 1, this peer holds one of them, which the coordinator chooses among those
    that fit its memory.  `memory`: "6 GB", at most so much for it, on the GPU or, without one, on the host.

    What comes back is a module: calling it with the inputs runs all parts; of a run in stages, those of this peer.
    """
    mistakes_in_one_line()
    parts = checked_parts(parts)
    with TakesPart(connect(url, {"identity": own.get("identity")})) as connection:
        refuse_local_steps(connection)
        samples = Samples(data, inputs, riders, connection.manifest.run.seed, held_out)
        if connection.manifest.pipeline.stages > 1:
            return hold_a_stage(connection, parts, samples, loss, own.get("memory")).stage
        loop, stage = _ready(connection, parts, samples, loss)
        loop.run()
    return stage


def _ready(
    connection: Connection, parts: Sequence[Part], samples: Samples, loss: Loss
) -> tuple[BatchLoop, Stage]:
    """All that can be wrong is found here, before the run hears of this peer."""
    survey_parts(parts, samples.one_item(), samples.inputs, loss)
    seed = connection.manifest.run.seed
    stage = Stage.build(parts, 0, len(parts), seed).to(best_device())
    agent = connection.agent
    loop = BatchLoop(
        agent.channel, stage, StageLoop(stage, seed, loss), samples, connection.manifest, agent.problem
    )
    _say_memory(loop.layout, stage, connection)
    loop.try_out()
    return loop, stage


def _say_memory(layout: ModelLayout, stage: Stage, connection: Connection) -> None:
    rules, values = rules_here(connection.manifest), layout.total_elements
    device = layout.local_tensors(stage)[0].device
    sums_bytes = VALUE_BYTES * values  # the weights are here by now
    say_whether_it_fits(of_stage(rules, sums_bytes, values, values), rules, values, device)


def hold_a_stage(
    connection: Connection, parts: Sequence[Part], samples: Samples, loss: Loss, memory: str | None = None
) -> PipelineLoop:
    """Until the run ends; what comes back holds the stage.

    Whatever can be wrong without values is found before the run hears of this peer.
    """
    manifest, device = connection.manifest, best_device()
    item = samples.one_item()
    whole = whole_model(survey_parts(parts, item, samples.inputs, loss), item, samples.riders, manifest)
    fitting = fitting_stages(needs_of(whole, rules_here(manifest)), room_here(device, memory))
    say_which_fit(fitting, len(whole.plans))
    agent = connection.agent
    loop = PipelineLoop(
        agent.channel, StageModel(parts, whole, samples, loss, manifest), fitting, device, agent.problem
    )
    loop.run()
    return loop


def refuse_local_steps(connection: Connection) -> None:
    if not connection.manifest.pipeline.batch:
        raise UserError(
            f"run '{connection.manifest.run.name}' has no synchronous batches: join it with farflung.join, or set "
            "[pipeline] batch in its run.toml"
        )


class TakesPart:
    """For a `with` block: leaves the run as what happened in it asks for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> Connection:
        return self._connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._connection.close(FINISHED)
        elif isinstance(error, KeyboardInterrupt):
            self._connection.close("interrupted")
        elif isinstance(error, FarflungError) and not isinstance(error, UserError):
            self._connection.close(str(error))
        else:
            self._connection.abandon()  # an agent that started this script ends too, or starts it again
