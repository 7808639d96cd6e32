"""The public API of pipelines: `farflung.pipeline`, which takes part in a run of synchronous batches until it ends.

Called by users' scripts; the built-in trainer calls its second half.  Starting, watching and ending the agent is in
peer/trainer; what happens with each microbatch is in summing_loop.py and pipeline_loop.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from farflung.peer.footprint import of_stage
from farflung.peer.local.words import FINISHED
from farflung.peer.pipeline.part_checks import Loss, survey_parts
from farflung.peer.pipeline.parts import Part, Stage, checked_parts
from farflung.peer.pipeline.pipeline_loop import PipelineLoop, StageModel
from farflung.peer.pipeline.samples import Samples
from farflung.peer.pipeline.stage_fit import fitting_stages, needs_of, room_here, say_which_fit
from farflung.peer.pipeline.stage_loop import StageLoop
from farflung.peer.pipeline.summing_loop import BatchLoop
from farflung.peer.pipeline.whole import whole_model
from farflung.peer.room import best_device, rules_here, say_whether_it_fits
from farflung.peer.trainer.api import Connection, connect
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import FarflungError, UserError
from farflung.protocol.outer_numbers import VALUE_BYTES
from farflung.protocol.process.log_lines import mistakes_in_one_line


def pipeline(
    url: str | None,
    parts: Sequence[Part],
    *,
    data: Any,
    inputs: Sequence[str],
    riders: Sequence[str] = (),
    loss: Loss,
    identity: str | None = None,
    memory: str | None = None,
) -> Stage:
    """Take part in a run of synchronous batches (`[pipeline] batch` of run.toml) until it ends; gives the final model.

    One update of the run is the exact gradient of one batch, whoever computed which part of it and whoever was lost
    meanwhile; the optimizer is the run's (`[outer]`), so the script has none.  `parts`: the model (docs/pipelines.md),
    or a list with one module in it.  `data`: a data set with a length, the same on every peer, or what makes one when
    it is called.  Its items are mappings with the names in `inputs` and `riders`, or tuples in that order.  `inputs`:
    what the first part takes.  `riders`: integers that travel along to the loss, such as labels.  `loss`: from what the
    last part gives, and the riders by name, to the mean loss of a token.  `url` and `identity`: as for `join`.

    Where the run has `[pipeline] stages` > 1, this peer holds one of them, which the coordinator chooses among those
    that fit its memory.  `memory`: "6 GB", at most so much for it, on the GPU or, without one, on the host.

    What comes back is a module: calling it with the inputs runs all parts; of a run in stages, those of this peer.
    """
    mistakes_in_one_line()
    parts = checked_parts(parts)
    with TakesPart(connect(url, {"identity": identity})) as connection:
        refuse_local_steps(connection)
        samples = Samples(data, inputs, riders, connection.manifest.run.seed)
        if connection.manifest.pipeline.stages > 1:
            return hold_a_stage(connection, parts, samples, loss, memory).stage
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
