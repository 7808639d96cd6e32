"""Owns the keys of `run.toml`: the sections, and of each key its default, its bounds and their words.

Called by the manifest, which holds them together and says what is wrong.  Pure.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from farflung.protocol.limits import FRAGMENTS_MAX, MAX_PEERS, MEMBERS_PER_ROUND, MICROS_PER_BATCH

HUGE = 2**53 - 1  # the bound of numbers without a natural one; every JSON reader keeps integers up to it
_NAME = "^[a-z0-9-]{1,64}$"
# What a run begins with.  A path is a name and no more: nobody opens it on the run's word.
_BEGINNING = (
    r"^(((https|s3)://[A-Za-z0-9.-]{1,253}(:\d{1,5})?|(file://)?)/[A-Za-z0-9/._~%+=&?,@ -]{1,2000})?$"
)
_COLUMN = r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]{1,256}$"  # terminals obey those
_PLACE = r"^(https|s3)://[A-Za-z0-9.-]{1,253}(:\d{1,5})?/[A-Za-z0-9/._~%+=&?,@*-]{1,2000}$"

# By name: this process has no torch, and compression/ needs it.  A test holds the two lists together.
CodecName = Literal["fp32", "bf16", "int8", "int4", "int2", "topk", "auto"]
Count = Annotated[int, Field(ge=1, le=HUGE)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]


class Section(BaseModel):
    """Strict: `lr = "0.1"` is an error, not a guess.  Frozen: the digest names the content."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )


class RunSection(Section):
    name: Annotated[str, Field(pattern=_NAME, description="1 to 64 of a-z, 0-9 and -")] = "my-run"
    seed: Annotated[int, Field(ge=0, le=HUGE)] = 0
    min_peers: Annotated[int, Field(ge=1, le=1024)] = 1
    max_peers: Annotated[int, Field(ge=1, le=MAX_PEERS)] = 64
    rounds: Count = 100


class ModelSection(Section):
    builtin: Literal["tiny-gpt", ""] = "tiny-gpt"
    layers: Annotated[int, Field(ge=1, le=1024)] = 2
    width: Annotated[int, Field(ge=1, le=65536)] = 64
    heads: Annotated[int, Field(ge=1, le=1024)] = 4
    context: Annotated[int, Field(ge=1, le=2**20)] = 64


class StartSection(Section):
    """What version 0 is made of; without it, it is what the founder's trainer makes from the run's seed."""

    source: Annotated[
        str,
        Field(
            alias="from",  # a word of Python's own
            pattern=_BEGINNING,
            description='"", or one checkpoint, or a .safetensors file, at https://, s3:// or /a/full/path',
        ),
    ] = ""
    hash: Annotated[str, Field(pattern="^([0-9a-f]{64})?$", description="64 hexadecimal digits")] = ""
    momentum: Literal["fresh", "keep"] = "fresh"

    @property
    def is_file(self) -> bool:
        """One file of tensors by name; else a checkpoint."""
        return self.source.partition("?")[0].endswith(".safetensors")

    @property
    def for_all(self) -> bool:
        """It is read on the run's word; else whoever has it says where, by --start."""
        return self.source.startswith(("https://", "s3://"))

    @property
    def founder(self) -> str:
        """Who can give such a run its initial state, in words."""
        if not self.source or self.for_all:
            return "a peer that trains"
        return (
            f"a peer that joins with --start PATH and has what the run begins with (hash {self.hash[:16]}...)"
        )


# Of token shards, read by everybody on the run's word: nothing that a volunteer's machine alone can reach.
Place = Annotated[str, Field(pattern=_PLACE, description="https://HOST/... or s3://BUCKET/...")]

# As betas of [inner]: a list in the file.
Places = Annotated[tuple[Place, ...], Field(strict=False, min_length=1, max_length=1024)]


class DataSection(Section):
    source: Annotated[
        Literal["python-stdlib", ""] | Place | Places,
        Field(description='"python-stdlib", "", or token shards at https:// or s3://, one place or a list'),
    ] = "python-stdlib"
    length: Annotated[int, Field(ge=0, le=2**24)] = 0
    dtype: Literal["uint8", "uint16", "int16", "uint32", "int32", "int64"] = "uint16"
    column: Annotated[
        str,
        Field(
            pattern=_COLUMN, description="the name of a column, 1 to 256 characters, none of them a control"
        ),
    ] = "input_ids"
    batch: Annotated[int, Field(ge=1, le=65536)] = 8
    lease_samples: Annotated[int, Field(ge=1, le=2**24)] = 256


class InnerSection(Section):
    optimizer: Literal[
        "adamw", "muon", "adamw8bit", "galore", "apollo", "apollo-mini", "adam-mini", "soap"
    ] = "adamw"
    lr: Annotated[float, Field(gt=0, le=10)] = 4e-4
    # TOML and JSON have lists only, which strict mode would refuse for a tuple; the two numbers stay strict.
    betas: Annotated[
        tuple[Decay, Decay], Field(strict=False, description="two numbers from 0 up to but not 1")
    ] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    warmup_steps: Annotated[int, Field(ge=0, le=HUGE)] = 0
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    last_lr: Annotated[
        Annotated[float, Field(ge=0, le=10)] | Auto, Field(description='a number >= 0 and <= 10, or "auto"')
    ] = "auto"
    decay_steps: Annotated[Count | Auto, Field(description='an integer >= 1, or "auto"')] = "auto"
    rejoin_warmup_steps: Annotated[int, Field(ge=0, le=HUGE)] = 10
    clip: Annotated[float, Field(gt=0, le=1e9)] = 1.0


class OuterSection(Section):
    step: Literal["nesterov", "mean", "sparse", "adamw", "muon"] = "nesterov"
    lr: Annotated[
        Annotated[float, Field(gt=0, le=10)] | Auto, Field(description='a number > 0 and <= 10, or "auto"')
    ] = "auto"
    last_lr: Annotated[
        Annotated[float, Field(ge=0, le=10)] | Auto, Field(description='a number >= 0 and <= 10, or "auto"')
    ] = "auto"
    momentum: Annotated[Decay | Auto, Field(description='a number from 0 up to but not 1, or "auto"')] = (
        "auto"
    )
    schedule: Literal["blocking", "streaming", "overlap"] = "blocking"
    overlap_steps: Annotated[int, Field(ge=0, le=HUGE)] = 0
    mix: Annotated[Decay | Auto, Field(description='a number from 0 up to but not 1, or "auto"')] = "auto"


class RoundSection(Section):
    sync_every: Count = 50
    period_s: Annotated[float, Field(ge=0, le=7 * 86400)] = 0.0
    codec: CodecName = "auto"
    gather_codec: CodecName = "auto"
    chunk_kb: Annotated[int, Field(ge=1, le=16384)] = 1024
    fragments: Annotated[int, Field(ge=1, le=FRAGMENTS_MAX)] = 1
    deadline_s: Seconds = 60.0
    scatter_grace_s: Seconds = 10.0
    round_timeout_s: Seconds = 120.0
    weight_cap: Annotated[float, Field(ge=1, le=1000)] = 4.0
    keep_results: Annotated[int, Field(ge=1, le=1024)] = 3
    group: Annotated[int, Field(ge=0, le=MEMBERS_PER_ROUND)] = 0  # members of a mesh's group; 0: all in one


class MergeSection(Section):
    policy: Literal["robust", "mean"] = "robust"
    clip: Annotated[float, Field(ge=1, le=1000)] = 2.0
    guard: Annotated[float, Field(ge=0, le=1e6)] = 10.0
    audit: Annotated[float, Field(ge=0, le=1)] = 0.037


class NetSection(Section):
    heartbeat_s: Annotated[float, Field(ge=0.01, le=60)] = 1.0
    dead_after_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    upload_limit: Annotated[str, Field(max_length=200, description='a limit such as "20 Mbit/s"')] = "none"
    download_limit: Annotated[str, Field(max_length=200, description='a limit such as "20 Mbit/s"')] = "none"
    relay: Annotated[str, Field(max_length=60, description='such as "50 Mbit/s, 1 TB a month", or "off"')] = (
        "50 Mbit/s, 1 TB a month"
    )


class CheckpointSection(Section):
    every_rounds: Annotated[int, Field(ge=0, le=HUGE)] = 0
    keep: Annotated[int, Field(ge=1, le=1000)] = 3
    go_back_after_s: Annotated[float, Field(ge=0, le=7 * 86400)] = 300.0


class PipelineSection(Section):
    """Batches that all compute together: one update of the model comes from so many microbatches, each of them once."""

    batch: Annotated[int, Field(ge=0, le=MICROS_PER_BATCH)] = 0  # 0: every peer takes steps of its own
    micro: Annotated[int, Field(ge=1, le=65536)] = 1
    clip: Annotated[float, Field(ge=0, le=1e9)] = 0.0  # the batch's gradient, over all stages; 0: as it is
    stages: Annotated[int, Field(ge=1, le=FRAGMENTS_MAX)] = 1  # 1: every peer holds the whole model
    # Numbers of the parts at which stages 1, 2, ... begin.
    cuts: Annotated[
        Auto | Annotated[tuple[int, ...], Field(strict=False)],
        Field(description='"auto", or a list with the number of the part at which each later stage begins'),
    ] = "auto"
    codec: Literal["fp32", "bf16", "int8", "int4"] = "int8"  # of activations
    gradient_codec: Literal["fp32", "bf16", "int8", "int4"] = "int8"  # of their gradients
    turn: bool = False  # what goes through int4 is turned before, so that no value stands out
    min_per_stage: Annotated[int, Field(ge=1, le=MEMBERS_PER_ROUND)] = 1
    rebalance_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0  # 0: nobody is moved
    rebalance_gain: Annotated[float, Field(ge=1.01, le=10)] = 1.15
    mode: Literal["sync", "local"] = "sync"  # local: stages take inner steps of their own within a batch
    local_micros: Annotated[int, Field(ge=1, le=MICROS_PER_BATCH)] = 8  # in such a step


class AdmissionSection(Section):
    mode: Literal["open", "token", "allowlist"] = "open"
    joins_per_minute: Annotated[int, Field(ge=1, le=100_000)] = 30
    joins_at_once: Annotated[int, Field(ge=1, le=1024)] = 16
    probation_rounds: Annotated[int, Field(ge=0, le=1000)] = 0
    ban_strikes: Annotated[int, Field(ge=0, le=1000)] = 5
    trusted: Annotated[
        tuple[Annotated[str, Field(pattern="^[a-z2-7]{16}$")], ...],
        Field(
            strict=False,
            max_length=64,
            description="a list of at most 64 peer ids, as farflung status shows them",
        ),
    ] = ()
