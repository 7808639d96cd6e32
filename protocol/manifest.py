"""Owns the run manifest: what every peer of a run must agree on, its rules, and its digest.

Called by the coordinator and the peers (both hold the same bytes).  [admission] alone is the coordinator's own: it
is not in those bytes, so it may be changed between two starts.  What each key may be, the sections say;
console/run_toml.py is the file that `farflung init` writes.  Must not know files, sockets or torch: text or bytes come
in, a checked value or a UserError comes out.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, Self

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from farflung.protocol.caps import shown, shown_key, wrong_caps
from farflung.protocol.errors import UserError
from farflung.protocol.extensions import CODEC, MERGE_RULE, OUTER_STEP, WORD, loaded
from farflung.protocol.limits import (
    CHUNKS_PER_FRAGMENT,
    FRAGMENTS_MAX,
    MAX_PEERS,
    MEMBERS_PER_ROUND,
    MICROS_PER_BATCH,
    SEATS_TOLD,
    WINDOWS_MOST,
)
from farflung.protocol.model_schema import CONTEXT_MOST, filled_in, size_problems, values_of
from farflung.protocol.outer_numbers import (
    BUILT_IN_STEPS,
    EXACT_STEPS,
    MUON_MOMENTUM,
    AdamWNumbers,
    MuonNumbers,
    OwnNumbers,
    StateForm,
    StepNumbers,
    outer_numbers,
)

# ---- manifest sections -------------------------------------------------------------------------------------
# Owns the keys of `run.toml`: the sections, and of each key its default, its bounds and their words.
#
# Called by the manifest, which holds them together and says what is wrong. Pure.

CHUNK_KB_MOST = 16384
HUGE = 2**53 - 1  # the bound of numbers without a natural one; every JSON reader keeps integers up to it
_NAME = "^[a-z0-9-]{1,64}$"
# What a run begins with.  A path is a name and no more: nobody opens it on the run's word.
_BEGINNING = (
    r"^(((https|s3)://[A-Za-z0-9.-]{1,253}(:\d{1,5})?|(file://)?)/[A-Za-z0-9/._~%+=&?,@ -]{1,2000})?$"
)
_COLUMN = r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]{1,256}$"  # terminals obey those
_PLACE = r"^(https|s3)://[A-Za-z0-9.-]{1,253}(:\d{1,5})?/[A-Za-z0-9/._~%+=&?,@*-]{1,2000}$"


def _listed(words: Sequence[str]) -> str:
    return " or ".join(f'"{word}"' for word in words)


# By name: this process has no torch, and compression/ needs it.  A test holds the two lists together.
CODECS = ("fp32", "bf16", "int8", "int4", "int2", "topk", "auto")
POLICIES = ("robust", "mean")
# One of ours, or of an installed package, which the checks between keys look up.
CodecName = Annotated[str, Field(pattern=WORD, description=_listed(CODECS))]
StepName = Annotated[str, Field(pattern=WORD, description=_listed(BUILT_IN_STEPS))]
PolicyName = Annotated[str, Field(pattern=WORD, description=_listed(POLICIES))]
# What a result loses is lost to all: so none in which most is, but one that says what it left out.
ResultCodecName = Literal["fp32", "bf16", "int8", "int4", "sparse", "auto"]
Count = Annotated[int, Field(ge=1, le=HUGE)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]


LAST_RATE = 0.1  # at the end of a schedule that goes down, as a share of the whole rate
START_SHARES = (8, 4, 2)  # sync_every divided by each is a period of the start, for a third of its rounds


class Periods(NamedTuple):
    """Inner steps of a run's periods, by the version from which a period begins: short ones first, then all alike."""

    steps: int
    start: int = 0  # rounds whose periods are shorter

    def at(self, version: int) -> int:
        version = max(0, version)  # nothing is loaded before version 0
        if version >= self.start:
            return self.steps
        return max(1, self.steps // START_SHARES[version * len(START_SHARES) // self.start])

    def before(self, version: int) -> int:
        """Steps until this version, each round counted as one period."""
        borders = [-(-self.start * part // len(START_SHARES)) for part in range(len(START_SHARES) + 1)]
        short = sum(
            (min(version, stop) - first) * self.at(first)
            for first, stop in pairwise(borders)
            if first < min(version, stop)
        )
        return short + max(0, version - self.start) * self.steps


def wsd_decay_begins(total_steps: int) -> int:
    """The rate of "wsd" goes down in the last fifth of all steps."""
    return total_steps - total_steps // 5


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
    """Sizes that are not written are those of the preset, or follow from others (model_schema.py): below are tiny's."""

    kind: Literal["llama", "hf", ""] = "llama"
    preset: Literal["tiny", "15M", "125M", "350M", "1B", "7B"] = "tiny"
    layers: Annotated[int, Field(ge=1, le=1024)] = 2
    width: Annotated[int, Field(ge=8, le=65536)] = 64
    heads: Annotated[int, Field(ge=1, le=1024)] = 4
    kv_heads: Annotated[int, Field(ge=1, le=1024)] = 4
    head_dim: Annotated[int, Field(ge=2, le=1024)] = 16
    mlp_width: Annotated[int, Field(ge=1, le=2**18)] = 192
    context: Annotated[int, Field(ge=1, le=CONTEXT_MOST)] = 64
    vocab: Annotated[int, Field(ge=2, le=2**22)] = 256
    rope_theta: Annotated[float, Field(ge=1, le=1e9)] = 10_000.0
    norm_eps: Annotated[float, Field(ge=1e-12, le=1e-2)] = 1e-5
    qk_norm: bool = False
    tied: bool = True
    config: Annotated[
        dict[str, bool | int | float | str], Field(description='a table, with kind = "hf"')
    ] = {}  # what it may have, hf_config.py says

    @model_validator(mode="before")
    @classmethod
    def _sizes(cls, written: Any) -> Any:
        return filled_in(written) if isinstance(written, dict) else written


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
    # Of the tokenizer.json that the shards were made with: its hash, after the place where all can fetch it.
    tokenizer: Annotated[
        str,
        Field(
            pattern=r"^(" + _PLACE.strip("^$").replace("*", "") + r"#)?[0-9a-f]{64}$|^$",
            description='"https://.../tokenizer.json#" and its hash, or the hash alone: data prepare prints it',
        ),
    ] = ""

    @property
    def tokenizer_place(self) -> tuple[str, str]:
        """Place, or empty, and hash."""
        place, _, digest = self.tokenizer.rpartition("#")
        return place, digest


class EvalSection(Section):
    """The loss on text that nobody learns from, at versions that all peers have alike."""

    source: Annotated[
        Literal["python-stdlib", ""] | Place | Places,
        Field(description='"", "python-stdlib", or token shards at https:// or s3://, one place or a list'),
    ] = ""
    every_rounds: Annotated[Count | Auto, Field(description='an integer >= 1, or "auto"')] = "auto"
    windows: Annotated[int, Field(ge=16, le=WINDOWS_MOST)] = 256
    bytes_per_token: Annotated[float, Field(ge=0, le=64)] = 0.0  # 0: not known


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
    clip: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"  # of products; parameters are fp32 in any case


class OuterSection(Section):
    step: StepName = "nesterov"
    lr: Annotated[
        Annotated[float, Field(gt=0, le=10)] | Auto, Field(description='a number > 0 and <= 10, or "auto"')
    ] = "auto"
    momentum: Annotated[Decay | Auto, Field(description='a number from 0 up to but not 1, or "auto"')] = (
        "auto"
    )
    schedule: Literal["blocking", "streaming", "overlap"] = "blocking"


class RoundSection(Section):
    sync_every: Count = 50
    period_s: Annotated[float, Field(ge=0, le=7 * 86400)] = 0.0
    start_rounds: Annotated[int, Field(ge=0, le=HUGE)] = 0  # with shorter periods
    codec: CodecName = "auto"
    gather_codec: ResultCodecName = "auto"
    chunk_kb: Annotated[int, Field(ge=1, le=CHUNK_KB_MOST)] = 1024
    fragments: Annotated[int, Field(ge=1, le=FRAGMENTS_MAX)] = 1
    deadline_s: Seconds = 60.0
    scatter_grace_s: Seconds = 10.0
    keep_results: Annotated[int, Field(ge=1, le=1024)] = 3
    group: Annotated[int, Field(ge=0, le=MEMBERS_PER_ROUND)] = 0  # members of a mesh's group; 0: all in one

    @property
    def round_timeout_s(self) -> float:
        """A round that takes longer is given up."""
        return 2 * max(self.deadline_s, self.scatter_grace_s)


class MergeSection(Section):
    policy: PolicyName = "robust"
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
    min_per_stage: Annotated[int, Field(ge=1, le=MEMBERS_PER_ROUND)] = 1
    rebalance_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0  # 0: nobody is moved
    mode: Literal["sync", "local"] = "sync"  # local: stages take inner steps of their own within a batch
    local_micros: Annotated[int, Field(ge=1, le=MICROS_PER_BATCH)] = 8  # in such a step


class AdmissionSection(Section):
    mode: Literal["open", "token", "allowlist"] = "open"
    joins_at_once: Annotated[int, Field(ge=1, le=1024)] = 16
    trusted: Annotated[
        tuple[Annotated[str, Field(pattern="^[a-z2-7]{16}$")], ...],
        Field(
            strict=False,
            max_length=64,
            description="a list of at most 64 peer ids, as farflung status shows them",
        ),
    ] = ()


# ---- manifest ----------------------------------------------------------------------------------------------

MAX_MANIFEST_BYTES = 64 * 1024
MAX_PROBLEMS = 5  # more than this at once is noise: mend these, then see the rest
COORDINATORS_OWN: dict[str, Any] = {"admission": True, "net": {"relay"}}  # no peer needs it
_SAME_VERSION = "are both sides on the same farflung version, with the same packages beside it?"


class Manifest(Section):
    """The whole `run.toml`, checked.  Two peers may train together only if their digests are equal."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    start: StartSection = StartSection()
    data: DataSection = DataSection()
    eval: EvalSection = EvalSection()
    inner: InnerSection = InnerSection()
    outer: OuterSection = OuterSection()
    round: RoundSection = RoundSection()
    merge: MergeSection = MergeSection()
    net: NetSection = NetSection()
    checkpoint: CheckpointSection = CheckpointSection()
    pipeline: PipelineSection = PipelineSection()
    admission: AdmissionSection = AdmissionSection()

    @property
    def fragments(self) -> int:
        """Parts of the state with versions of their own: stages of a pipeline, else what [round] asks for."""
        return self.pipeline.stages if self.pipeline.stages > 1 else self.round.fragments

    @property
    def makes_exact_batches(self) -> bool:
        """The update of a batch is that of one machine, so its gradient is not rounded unless [round] says how."""
        return self.pipeline.batch > 0 and self.pipeline.mode == "sync"

    @property
    def total_steps(self) -> int:
        """Inner steps of the run, each round counted as one period."""
        return self.periods.before(self.run.rounds)

    @property
    def periods(self) -> Periods:
        return Periods(self.round.sync_every, self.round.start_rounds)

    @model_validator(mode="before")
    @classmethod
    def _head_of_its_own(cls, written: Any) -> Any:
        """The ends of a model that is cut lie with different peers, so by default it is not tied."""
        pipeline = written.get("pipeline") if isinstance(written, dict) else None
        stages = pipeline.get("stages") if isinstance(pipeline, dict) else getattr(pipeline, "stages", 1)
        model = written.get("model", {}) if pipeline else None
        if not (isinstance(stages, int) and stages > 1 and isinstance(model, dict)):
            return written
        config = model.get("config")
        if model.get("kind") == "hf" and isinstance(config, dict):
            return written | {"model": {**model, "config": {"tie_word_embeddings": False, **config}}}
        return written | {"model": {"tied": False, **model}}

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        rules = _with_codecs(self.round, self.makes_exact_batches, self.outer.step == "sparse")
        self.__dict__["round"] = _with_chunks(rules, self.least_chunk_kb)
        problems = _cross_checks(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @classmethod
    def from_toml(cls, text: str, name: str, changes: Sequence[tuple[str, str, Any]] = ()) -> Manifest:
        """Check the text of the file `name`, with `changes` (section, key, value); UserError: a line per problem."""
        try:
            # Some editors put a byte order mark first, which TOML does not allow.
            table = tomllib.loads(text.removeprefix("\ufeff"))
            for section, key, value in changes:
                if isinstance(table.setdefault(section, {}), dict):  # else it is told as the file's mistake
                    table[section][key] = value
            return cls.model_validate(table)
        except ValidationError as error:
            raise UserError("\n".join(f"{name}: {line}" for line in _explain(error))) from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}: {_syntax_problem(text, error)}") from None

    @classmethod
    def from_canonical(cls, data: bytes) -> Manifest:
        """Read what `canonical` wrote; anything else is refused, so that equal content has equal bytes."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise UserError(f"run manifest: {len(data)} bytes, at most {MAX_MANIFEST_BYTES} are allowed")
        manifest = cls.from_json(data)
        if manifest.canonical() != data:
            raise UserError(f"run manifest: not in canonical form; {_SAME_VERSION}")
        return manifest

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """In any form, and with what is the coordinator's own."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise UserError(f"run manifest: {_explain(error)[0]}; {_SAME_VERSION}") from None

    def canonical(self) -> bytes:
        """The one byte string of what all must agree on: JSON, sorted keys, no spaces, defaults spelled out."""
        content = self.model_dump(mode="json", exclude=COORDINATORS_OWN)
        if not self.model.config:
            del content["model"]["config"]
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")

    @property
    def outer_numbers(self) -> StepNumbers:
        """[outer] as every peer takes it, and whoever recomputes a peer's step: no "auto" is left in it."""
        outer, inner, rounds = self.outer, self.inner, self.run.rounds
        if outer.step not in BUILT_IN_STEPS:
            return _own_numbers(outer)
        if outer.step not in EXACT_STEPS:
            return outer_numbers(outer.step, outer.lr, outer.momentum, rounds, self.periods.start)
        lr = inner.lr if isinstance(outer.lr, str) else outer.lr
        last_lr = lr if inner.schedule == "constant" else LAST_RATE * lr
        rest = AdamWNumbers(lr, last_lr, inner.warmup_steps, rounds, *inner.betas, inner.weight_decay)
        if outer.step == "adamw":
            return rest
        return MuonNumbers(rest, MUON_MOMENTUM if isinstance(outer.momentum, str) else outer.momentum)

    @property
    def row_tokens(self) -> int:
        """Of a row of token shards: by itself what the built-in model learns from at once, and one to be predicted."""
        return self.data.length or self.model.context + 1

    @property
    def least_eval_rounds(self) -> int:
        """So many rounds make windows of [eval] no more than 1 % of the time, where every peer computes all of them: a
        forward pass takes a third of a step.  With batches all compute them once, there and back."""
        if self.pipeline.batch:
            return -(-100 * -(-self.eval.windows // self.pipeline.micro) // self.pipeline.batch)
        steps = self.total_steps * self.data.batch
        return -(-100 * self.eval.windows * self.run.rounds // (3 * steps))

    @property
    def eval_rounds(self) -> int:
        """Between two versions at which the held-out loss is computed."""
        every = self.eval.every_rounds
        return self.least_eval_rounds if isinstance(every, str) else every

    @property
    def bytes_per_token(self) -> float:
        """Of the text behind [eval]; 0: not known."""
        return 1.0 if self.eval.source == "python-stdlib" else self.eval.bytes_per_token

    @property
    def least_chunk_kb(self) -> int:
        """Of a model that the run names and that is in one piece: with smaller ones there would be too many chunks."""
        if not self.model.kind or self.pipeline.stages > 1:
            return 1
        return -(-4 * values_of(self.model) // (CHUNKS_PER_FRAGMENT * 1024))

    @property
    def batch_clip(self) -> float:
        """The largest norm of the gradient of a batch, over the whole model; infinite: it is not clipped."""
        return self.pipeline.clip if self.pipeline.batch and self.pipeline.clip else math.inf

    def state_form(self, chunk_elements: int) -> StateForm:
        """Of each chunk of the outer state of a model that is cut into chunks of so many values."""
        return StateForm(chunk_elements, self.outer_numbers.parts)

    @property
    def digest(self) -> bytes:
        """blake3 of `canonical()`, 32 bytes: the identity of what is trained and how."""
        return blake3(self.canonical()).digest()


def _with_codecs(rules: RoundSection, exact: bool, sparse: bool) -> RoundSection:
    """What "auto" stands for is part of what all agree on; only the codec of contributions may go by the lines."""
    due = {}
    if rules.codec == "auto" and (exact or sparse):
        due["codec"] = "fp32" if exact else "topk"
    if rules.gather_codec == "auto":
        both = sparse and due.get("codec", rules.codec) == "topk" and not rules.group
        due["gather_codec"] = "fp32" if exact else "sparse" if both else "int8"
    return rules.model_copy(update=due)


def _with_chunks(rules: RoundSection, least_kb: int) -> RoundSection:
    """Where nobody chose, chunks are as large as the model needs."""
    if "chunk_kb" in rules.model_fields_set or rules.chunk_kb >= least_kb:
        return rules
    return rules.model_copy(update={"chunk_kb": min(least_kb, CHUNK_KB_MOST)})


def _cross_checks(m: Manifest) -> list[str]:
    """Rules between keys; each line says what is wrong with which value and how it must be."""
    problems = []

    def expect(holds: bool, key: str, rule: str, found: float) -> None:
        if not holds:
            problems.append(f"{key}: expected {rule}, found {found}")

    least, batch, begins = m.run.min_peers, m.data.batch, m.round.start_rounds
    expect(not (m.pipeline.batch and begins), "[round] start_rounds", "0 with [pipeline] batch > 0", begins)
    problems += [f"[net] {told}" for told in wrong_caps(m.net.model_dump())]
    expect(m.run.max_peers >= least, "[run] max_peers", f"at least min_peers ({least})", m.run.max_peers)
    seated = not m.pipeline.batch or m.run.max_peers <= SEATS_TOLD
    expect(seated, "[run] max_peers", f"at most {SEATS_TOLD} with [pipeline] batch", m.run.max_peers)
    problems += size_problems(m.model, m.pipeline.stages) + _token_problems(m) if m.model.kind else []
    samples, beat, dead = m.data.lease_samples, m.net.heartbeat_s, m.net.dead_after_s
    expect(samples >= batch, "[data] lease_samples", f"at least one batch ({batch})", samples)
    fits = m.data.length != 1 and m.data.length <= m.model.context + 1
    if m.model.kind:
        expect(fits, "[data] length", f"0, or 2 to context + 1 ({m.model.context + 1})", m.data.length)
    small = m.round.chunk_kb < m.least_chunk_kb
    if m.least_chunk_kb > CHUNK_KB_MOST:
        problems.append(
            f"[model]: {values_of(m.model)} values are too many for one piece: make it smaller, or cut it into stages "
            "([pipeline])"
        )
    else:
        expect(not small, "[round] chunk_kb", f"at least {m.least_chunk_kb} for this model", m.round.chunk_kb)
    problems += _own_problems(m) or _sparse_problems(m)
    problems += _outer_problems(m) + _start_problems(m) + _eval_problems(m)
    problems += _rate_problems(m) if m.inner.schedule != "constant" else []
    if m.outer.schedule == "streaming" and m.round.fragments < 2:
        problems.append(
            f'[round] fragments: expected at least 2 with schedule = "streaming", found {m.round.fragments}'
        )
    problems += _batch_checks(m) if m.pipeline.batch else []
    problems += _clip_problems(m) if m.pipeline.clip else []
    problems += _stage_checks(m) if m.pipeline.stages > 1 else _no_stage_checks(m)
    problems += _local_problems(m) if m.pipeline.mode == "local" else []
    problems += _mesh_problems(m) if m.round.group else []
    # One lost heartbeat is an everyday event and must not look like a death.
    expect(dead > 2 * beat, "[net] dead_after_s", f"more than twice heartbeat_s ({beat})", dead)
    return problems


def _own_problems(m: Manifest) -> list[str]:
    """What is not part of farflung, is here and can take part; whoever recomputes a sum knows no rule but the mean."""
    problems = []
    keys = (
        ("[outer] step", m.outer.step, BUILT_IN_STEPS, OUTER_STEP),
        ("[round] codec", m.round.codec, CODECS, CODEC),
        ("[merge] policy", m.merge.policy, POLICIES, MERGE_RULE),
    )
    for key, word, ours, kind in keys:
        try:
            if word in ours:
                continue
            loaded(kind, word)
            if kind is OUTER_STEP:
                _own_numbers(m.outer).made()
            if m.pipeline.batch:
                problems.append(f'{key}: expected {_listed(ours)} with [pipeline] batch > 0, found "{word}"')
        except UserError as error:
            problems.append(f'{key}: expected {_listed(ours)}, found "{word}": {error}')
    rule = m.merge.policy
    if rule not in POLICIES:
        for key, due, found in (("[merge] audit", 0, m.merge.audit), ("[round] group", 0, m.round.group)):
            if found != due:
                problems.append(f'{key}: expected {due} with [merge] policy = "{rule}", found {found:g}')
    return problems


def _own_numbers(outer: OuterSection) -> OwnNumbers:
    lr, momentum = (None if isinstance(at, str) else at for at in (outer.lr, outer.momentum))
    return OwnNumbers(outer.step, lr, momentum)


def _sparse_problems(m: Manifest) -> list[str]:
    step, codec, problems = m.outer.step, m.round.codec, []
    if step == "sparse" and codec not in ("topk", "int2"):
        problems.append(
            f'[outer] step: "sparse" expects [round] codec = "topk" or "int2", found codec = "{codec}"'
        )
    if m.round.gather_codec == "sparse" and (step != "sparse" or codec != "topk"):
        found = f'step = "{step}", codec = "{codec}"'
        problems.append(
            f'[round] gather_codec: "sparse" expects [outer] step = "sparse" and codec = "topk", found {found}'
        )
    if m.round.gather_codec == "sparse" and m.round.group:
        problems.append(
            '[round] group: expected 0 with gather_codec = "sparse", found '
            f"{m.round.group}: sums of groups are dense"
        )
    return problems


def _outer_problems(m: Manifest) -> list[str]:
    """Keys of [outer] that its step does not know."""
    outer, inner = m.outer, m.inner
    if outer.step not in EXACT_STEPS:
        return []
    problems = []
    if outer.step == "muon" and not m.makes_exact_batches:
        found = 'mode = "local"' if m.pipeline.batch else "batch = 0"
        problems.append(
            f'[outer] step: "muon" takes the gradient of a batch, and expects [pipeline] batch > 0 with mode = "sync", '
            f'found {found}; for steps of each peer\'s own write [inner] optimizer = "muon"'
        )
    if outer.step == "adamw" and outer.momentum != "auto":
        problems.append(
            f'[outer] momentum: step = "adamw" takes betas of [inner] instead, found {outer.momentum}; leave it out'
        )
    if inner.schedule != "constant" and inner.warmup_steps >= m.run.rounds:
        problems.append(
            f'[inner] warmup_steps: expected less than rounds ({m.run.rounds}) with schedule = "{inner.schedule}" and '
            f'[outer] step = "{outer.step}", which counts them in rounds, found {inner.warmup_steps}'
        )
    return problems


def _start_problems(m: Manifest) -> list[str]:
    """All must begin with the same bytes, and with a momentum that the step of this run knows."""
    start = m.start
    if not start.source:
        found = [
            key for key, value in (("hash", start.hash), ("momentum", start.momentum)) if value != "fresh"
        ]
        return [
            f"[start] {key}: expected to be left out without from" for key in found if getattr(start, key)
        ]
    problems = []
    if not start.hash:
        problems.append(
            f"[start] hash: expected the hash of what from names; farflung init --start {start.source} - prints it"
        )
    if start.momentum == "keep" and start.is_file:
        problems.append(
            '[start] momentum: expected "fresh" with a .safetensors file, which holds none, found "keep"'
        )
    if start.momentum == "keep" and m.outer.step != "nesterov":
        problems.append(
            f'[start] momentum: expected "fresh" with [outer] step = "{m.outer.step}", found "keep": only nesterov\'s '
            "goes on where it was"
        )
    return problems


def _eval_problems(m: Manifest) -> list[str]:
    """What is held out is other text than what is learned, in the same tokens, and costs little."""
    rules = m.eval
    if not rules.source:
        changed = rules.model_dump(exclude={"source"}).items() - EvalSection().model_dump().items()
        return [f"[eval] {key}: expected to be left out without source" for key in sorted(dict(changed))]
    problems = []
    if rules.source == "python-stdlib" != m.data.source:
        told = "as [data] source has" if m.data.source else 'where [data] source is ""'
        problems.append(f'[eval] source: expected token shards, {told}, found "python-stdlib"')
    elif rules.source != "python-stdlib" and rules.source == m.data.source:
        problems.append(
            "[eval] source: expected other shards than [data] source, which the model learns from"
        )
    if m.eval_rounds < m.least_eval_rounds:
        problems.append(
            f"[eval] every_rounds: expected at least {m.least_eval_rounds} with windows = {rules.windows}, found "
            f"{rules.every_rounds}: it would take more than 1 % of the time"
        )
    return problems


def _rate_problems(m: Manifest) -> list[str]:
    """A rate that goes down does so between the warm-up and the last step."""
    inner, total = m.inner, m.total_steps
    if m.pipeline.batch and m.pipeline.mode == "sync":
        if inner.schedule == "linear" and m.outer.step in EXACT_STEPS:
            return []
        return [
            f'[inner] schedule: expected "constant" with [pipeline] batch > 0, whose steps are those of [outer], or '
            f'"linear" where those are of "adamw" or "muon", found "{inner.schedule}"'
        ]
    most = wsd_decay_begins(total) if inner.schedule == "wsd" else total
    if inner.warmup_steps < most:
        return []
    of_what = f"{total} steps of the run (rounds * sync_every)" + (
        " without its last fifth" if most < total else ""
    )
    return [f"[inner] warmup_steps: expected less than the {of_what}, found {inner.warmup_steps}"]


def _batch_checks(m: Manifest) -> list[str]:
    """A batch is whole: nobody goes on during its round, and nothing in it is shortened or left out."""
    rules = (
        (m.outer.schedule, "blocking", "[outer] schedule"),
        (m.merge.policy, "mean", "[merge] policy"),
        (m.round.fragments, 1, "[round] fragments"),
        (m.inner.precision, "fp32", "[inner] precision"),
    )
    return [
        f"{key}: expected {shown(due)} with [pipeline] batch > 0, found {shown(found)}"
        for found, due, key in rules
        if found != due
    ]


def _no_stage_checks(m: Manifest) -> list[str]:
    """What only a cut model has would be passed over in silence."""
    if m.pipeline.cuts == "auto":
        return []
    return [f"[pipeline] cuts: a model in one stage has none, found {list(m.pipeline.cuts)}; set stages"]


def _stage_checks(m: Manifest) -> list[str]:
    """A model in stages learns by batches: of exact steps of AdamW or Muon, or of each peer's own in mode "local"."""
    pipeline = m.pipeline
    problems = []
    needed = pipeline.stages * pipeline.min_per_stage
    if m.run.max_peers < needed:
        problems.append(
            f"[run] max_peers: expected at least {needed}, for {pipeline.stages} stages with min_per_stage = "
            f"{pipeline.min_per_stage}, found {m.run.max_peers}: no batch would ever begin"
        )
    if 0 < pipeline.batch < pipeline.min_per_stage:
        problems.append(
            f"[pipeline] batch: expected at least min_per_stage ({pipeline.min_per_stage}), found {pipeline.batch}: "
            "some peers of a stage would have nothing to do"
        )
    parts = m.model.layers + 2  # of the built-in model: embedding, layers, head
    if m.model.kind and pipeline.stages > parts:
        problems.append(
            f'[pipeline] stages: expected at most {parts} for kind = "{m.model.kind}" with {m.model.layers} layers, '
            f"found {pipeline.stages}"
        )
    if not pipeline.batch:
        problems.append("[pipeline] batch: expected at least 1 with stages > 1, found 0")
    if pipeline.mode == "sync" and m.outer.step not in EXACT_STEPS:
        problems.append(
            f'[outer] step: expected "adamw" or "muon" with [pipeline] stages > 1, found "{m.outer.step}"'
        )
    if pipeline.cuts != "auto":
        cuts = list(pipeline.cuts)
        rising = all(before < cut for before, cut in pairwise([0, *cuts]))
        if len(cuts) != pipeline.stages - 1 or not rising:
            due = f"{pipeline.stages - 1} rising part numbers for {pipeline.stages} stages"
            problems.append(f"[pipeline] cuts: expected {due}, found {cuts}")
    return problems


def _token_problems(m: Manifest) -> list[str]:
    """Shards that cannot hold the model's tokens, and text that has others."""
    vocab, dtype = m.model.vocab, m.data.dtype
    if m.data.source == "python-stdlib" and m.data.tokenizer:
        return ['[data] tokenizer: expected "" with source = "python-stdlib", whose tokens are bytes']
    if m.data.source == "python-stdlib":
        return [] if vocab >= 256 else [f"[model] vocab: expected at least 256 for bytes, found {vocab}"]
    places = (m.data.source,) if isinstance(m.data.source, str) else m.data.source
    plain = any(each.partition("?")[0].endswith(".bin") for each in places)
    held = {"uint8": 2**8, "uint16": 2**16, "int16": 2**15}.get(dtype, vocab)
    if plain and vocab > held:
        told = f'"{dtype}" holds {held} tokens, [model] vocab is {vocab}'
        return [f"[data] dtype: {told}: write the type that the shards have, or make vocab smaller"]
    return []


def _clip_problems(m: Manifest) -> list[str]:
    """Only the gradient of a synchronous batch is clipped as a whole."""
    if m.pipeline.batch and m.pipeline.mode == "sync":
        return []
    found = "batch = 0" if not m.pipeline.batch else 'mode = "local"'
    return [
        f"[pipeline] clip: expected 0 with {found}, found {m.pipeline.clip:g}: steps of each peer's own are clipped by "
        "[inner] clip"
    ]


def _local_problems(m: Manifest) -> list[str]:
    """Steps of each peer's own are merged by an outer step that takes what they moved for a pseudo-gradient."""
    pipeline, problems = m.pipeline, []
    if pipeline.stages == 1:
        problems.append(
            '[pipeline] mode: expected "sync" with stages = 1, found "local": a model in one piece takes steps of each '
            "peer's own with batch = 0"
        )
    if m.outer.step not in ("nesterov", "mean"):
        problems.append(
            f'[outer] step: expected "nesterov" or "mean" with [pipeline] mode = "local", found "{m.outer.step}"'
        )
    if 0 < pipeline.batch < pipeline.local_micros:
        problems.append(
            f"[pipeline] batch: expected at least local_micros ({pipeline.local_micros}), found {pipeline.batch}"
        )
    return problems


def _mesh_problems(m: Manifest) -> list[str]:
    """What a round in groups can't do yet is said, not passed over in silence."""
    found = {
        "[round] group: expected 0, or at least 2": (m.round.group, m.round.group >= 2),
        "[pipeline] batch: expected 0 with [round] group > 0": (m.pipeline.batch, not m.pipeline.batch),
    }
    return [f"{rule}, found {value}" for rule, (value, holds) in found.items() if not holds]


def _explain(error: ValidationError) -> list[str]:
    lines: list[str] = []
    for item in error.errors(include_url=False):
        loc = item["loc"]
        if item["type"] == "value_error" and len(loc) < 2:  # of the whole, or of a section
            lines += str(item["ctx"]["error"]).splitlines()
        elif not loc:
            lines.append(item["msg"].splitlines()[0][:120])  # bytes that are no JSON, or no JSON object
        elif len(loc) == 1:
            lines.append(_section_problem(str(loc[0]), item["type"], item["input"]))
        else:
            lines.append(_key_problem(str(loc[0]), str(loc[1]), item["type"], item["input"]))
    lines = list(dict.fromkeys(lines))  # where a key may be of two kinds, it was refused as each of them
    if len(lines) > MAX_PROBLEMS:
        lines = [*lines[: MAX_PROBLEMS - 1], f"and {len(lines) - MAX_PROBLEMS + 1} more problems"]
    return lines


def _section_problem(section: str, kind: str, found: Any) -> str:
    if kind != "extra_forbidden":
        return f"[{section}]: expected a table, found {shown(found)}"
    if not isinstance(found, dict):
        return f"{shown_key(section)}: unknown key; {_hint(section, _homes(section), [])}"
    return f"[{shown_key(section)}]: unknown section; {_hint(section, [], list(Manifest.model_fields))}"


def _key_problem(section: str, key: str, kind: str, found: Any) -> str:
    where = f"[{section}] {shown_key(key)}"
    if kind == "extra_forbidden":
        return f"{where}: unknown key; {_hint(key, _homes(key), list(_keys(section)))}"
    return f"{where}: expected {_expected(_keys(section)[key], found)}, found {shown(found)}"


def _keys(section: str) -> dict[str, dict[str, Any]]:
    """The rules of a section's keys, as its JSON schema states them."""
    annotation: Any = Manifest.model_fields[section].annotation
    return dict(annotation.model_json_schema()["properties"])


def _homes(key: str) -> list[str]:
    return [section for section in Manifest.model_fields if key in _keys(section)]


def _hint(word: str, homes: list[str], known: list[str]) -> str:
    if homes:
        return "it belongs in " + " or ".join(f"[{section}]" for section in homes)
    if near := difflib.get_close_matches(word, known, n=1):
        return f'did you mean "{near[0]}"?'
    return "known are " + ", ".join(known or [f"[{section}]" for section in Manifest.model_fields])


def _expected(rule: dict[str, Any], found: Any) -> str:
    """The rule of one key in words, from the same schema that refused the value."""
    if "description" in rule:
        return str(rule["description"])
    if "enum" in rule:
        return " or ".join(shown(value) for value in rule["enum"])
    if rule.get("type") == "boolean":
        return "true or false"
    noun = {"integer": "an integer", "number": "a number"}.get(rule.get("type", ""), "text")
    low = f">= {rule['minimum']}" if "minimum" in rule else f"> {rule['exclusiveMinimum']}"
    if rule.get("maximum") == HUGE and not (isinstance(found, int) and found > HUGE):
        return f"{noun} {low}"  # a bound that only keeps numbers finite would distract from this one
    high = f"<= {rule['maximum']}" if "maximum" in rule else f"< {rule['exclusiveMaximum']}"
    return f"{noun} {low} and {high}"


def _syntax_problem(text: str, error: Exception) -> str:
    message = (str(error) or type(error).__name__).splitlines()[0]
    found = re.search(r"^(.*) \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    if not found:
        return f"not valid TOML: {message[:120]}"
    lines = text.split("\n")
    line, column = found[2] or len(lines), found[3] or len(lines[-1]) + 1
    return f"line {line}, column {column}: not valid TOML: {found[1]}"
