"""What a scenario of the simulator is for the run that is simulated: its run.toml, and what its model looks like.

Read by the world.  One tensor, four values a chunk; or one of each stage.
"""

from __future__ import annotations

from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import BorderTensor, ModelSchema, StageSpec, TensorSpec
from farflung.simulator.scenario import Scenario

_STEP_KEYS = {
    "nesterov": "momentum = 0.9",
    "mean": 'step = "mean"',
    "adamw": 'step = "adamw"\nlr = 0.01\nlast_lr = 0.001',
    "muon": 'step = "muon"\nlr = 0.01\nlast_lr = 0.001',
}


def manifest_for(scenario: Scenario) -> Manifest:
    return Manifest.from_toml(
        f"""
        [run]
        name = "simulated"
        rounds = {scenario.rounds}
        min_peers = {scenario.min_peers}
        max_peers = {max(64, scenario.peers + 1)}
        [data]
        lease_samples = 8
        batch = 2
        [outer]
        {_STEP_KEYS[scenario.step]}
        schedule = "{scenario.schedule}"
        overlap_steps = {scenario.overlap_steps}
        mix = {scenario.mix}
        [round]
        period_s = {scenario.period_s}
        codec = "{scenario.codec}"
        gather_codec = "{scenario.gather_codec}"
        fragments = {scenario.fragments}
        group = {scenario.group}
        sync_every = 4
        deadline_s = {scenario.deadline_s}
        scatter_grace_s = {scenario.grace_s}
        round_timeout_s = {scenario.round_timeout_s}
        keep_results = 3
        [merge]
        policy = "{scenario.policy}"
        audit = {scenario.audit}
        [net]
        heartbeat_s = 1.0
        dead_after_s = {scenario.dead_after_s}
        [checkpoint]
        every_rounds = {scenario.every_rounds}
        go_back_after_s = {scenario.go_back_after_s}
        [pipeline]
        batch = {scenario.batch}
        micro = {scenario.micro}
        clip = {scenario.clip}
        stages = {scenario.stages}
        rebalance_s = {scenario.rebalance_s}
        rebalance_gain = {scenario.rebalance_gain}
        codec = "fp32"
        gradient_codec = "fp32"
        mode = "{"local" if scenario.local_micros else "sync"}"
        local_micros = {max(1, scenario.local_micros)}
        """,
        "simulated",
    )


def model_for(scenario: Scenario) -> ModelSchema:
    """One tensor, four values a chunk; or one of each stage.  For Muon a chunk has two rows of a matrix."""
    passed = (BorderTensor("float32", (2 + scenario.stages,)),)  # see stage_trainer.py
    chunks = scenario.stage_chunks or (scenario.chunks,)
    names = [f"w{number}" for number in range(len(chunks))] if scenario.stage_chunks else ["w"]
    with_matrices = scenario.step == "muon"
    return ModelSchema(
        tensors=tuple(
            TensorSpec(name, (count * 2, 2) if with_matrices else (count * 4,), "float32", "param")
            for name, count in zip(names, chunks, strict=True)
        ),
        chunk_elements=4,
        chunk_count=scenario.chunks,
        first_plain_chunk=scenario.chunks,
        frozen=bytes(32),
        stages=tuple(
            StageSpec(
                number, number, count, plain_chunks=0, gives=passed if number < scenario.stages - 1 else ()
            )
            for number, count in enumerate(scenario.stage_chunks)
        ),
        matrices=tuple(range(len(names))) if with_matrices else (),
    )
