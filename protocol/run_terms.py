"""What is known of a run: its terms, version by version, and, in two steps, a peer's own part in it.  Pure data.

The manifest's digest is the identity of a run and never changes.  An amendment is what its host has signed: these keys
have these values in every round that starts from version `version` or a later one.  What a round makes of a state
follows from the version alone, so every peer, whoever recomputes a peer, and whoever replays the run take the same
step.  Amendments are numbered from 1, and each names the terms that it changes: none can be left out, repeated, or put
into another run.

A peer that knocks knows nothing yet.  With the coordinator's challenge it is `Known`; when a trainer has said what its
model is, it is `Attached`.  Each is made once and never changed, so whatever needs one is built when it is there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from farflung.protocol.errors import UserError
from farflung.protocol.limits import AMENDMENT_BYTES
from farflung.protocol.manifest import COORDINATORS_OWN, Manifest
from farflung.protocol.model_schema import Fragment, ModelSchema
from farflung.protocol.outer_numbers import StateForm
from farflung.protocol.signing import Amendment, is_hosts

TAG_BYTES = 8

# What every party reads anew at each version, or asks the coordinator for.
MAY_CHANGE: dict[str, frozenset[str]] = {
    "run": frozenset({"rounds", "min_peers", "max_peers"}),
    "inner": frozenset({"lr"}),
    "outer": frozenset({"lr", "momentum"}),
    "round": frozenset(
        {
            "sync_every",
            "codec",
            "deadline_s",
            "scatter_grace_s",
        }
    ),
    "net": frozenset({"upload_limit", "download_limit"}),
    "checkpoint": frozenset({"go_back_after_s"}),
}
# Why not, for people.
_WHY_NOT = {
    "model": "a run has one model",
    "data": "every sample is committed once, of one data set",
    "start": "the run has begun",
    ("run", "name"): "it stands in the join URL",
    ("run", "seed"): "the order of the data follows from it",
    ("inner", "optimizer"): "trainers have begun with it",
    ("outer", "step"): "the state has its moments",
    ("outer", "schedule"): "trainers have begun with it",
    ("round", "chunk_kb"): "the state is cut by it",
    ("round", "fragments"): "the state is cut by it",
    ("round", "gather_codec"): "results that are kept are read with it",
    "pipeline": "seats and stages are made by it",
}


class Terms:
    """What a run's parties agree on, at each version.  Never changed: `plus` makes another one."""

    def __init__(self, first: Manifest) -> None:
        self.first = first
        self.amendments: tuple[Amendment, ...] = ()
        self._manifests: tuple[Manifest, ...] = (first,)

    @classmethod
    def of(cls, first: Manifest, amendments: Sequence[Amendment]) -> Terms:
        terms = cls(first)
        for each in amendments:
            terms = terms.plus(each)
        return terms

    @property
    def count(self) -> int:
        return len(self.amendments)

    @property
    def newest(self) -> Manifest:
        """With all amendments, also where the newest does not hold yet."""
        return self._manifests[-1]

    def includes(self, manifest: Manifest) -> bool:
        """It is what the run began with, or what some amendment made of it; not only the newest one."""
        return any(each.digest == manifest.digest for each in self._manifests)

    def number_at(self, version: int, era: int | None = None) -> int:
        """Which amendment holds in a round that starts from this version; 0: none does.  `era`: left out, the present
        one, in which all hold that were made."""
        for each in reversed(self.amendments):
            if each.version <= version and (era is None or each.era <= era):
                return each.number
        return 0

    def at(self, version: int, era: int | None = None) -> Manifest:
        """What holds in a round that starts from this version."""
        return self._manifests[self.number_at(version, era)] if self.amendments else self.first

    def steps_before(self, version: int) -> int:
        """The run's own inner steps until this version: each round counts as one period of its own terms."""
        borders = sorted({0, version, *(min(each.version, version) for each in self.amendments)})
        spans = ((self.at(start).periods, start, stop) for start, stop in pairwise(borders))
        return sum(periods.before(stop) - periods.before(start) for periods, start, stop in spans)

    def total_steps(self, version: int) -> int:
        """Of the whole run, as it looks from this version."""
        return self.steps_before(self.at(version).run.rounds)

    def plus(self, amendment: Amendment) -> Terms:
        """UserError for one that does not follow, or that changes what may not be changed."""
        if amendment.number != self.count + 1 or amendment.before != self.newest.digest:
            raise UserError(
                f"amendment {amendment.number} does not follow on the {self.count} that are known"
            )
        made = Terms(self.first)
        made.amendments = (*self.amendments, amendment)
        made._manifests = (*self._manifests, _amended(self.newest, amendment))
        return made

    def with_own(self, manifest: Manifest) -> Terms:
        """What the coordinator alone reads is as this manifest has it, at every version."""
        made = Terms(_with_own(self.first, manifest))
        made.amendments = self.amendments
        made._manifests = tuple(_with_own(each, manifest) for each in self._manifests)
        return made

    def believed(self, told: Sequence[Amendment], run_id: bytes, pinned: bytes) -> Terms:
        """With those of them that are new.  UserError if one is not the host's, or does not follow."""
        terms = self
        for each in told:
            if each.number <= terms.count:
                continue  # known, by what the host has signed
            if pinned and not is_hosts(each, run_id, pinned):
                raise UserError(f"amendment {each.number} is not signed by the host of this run")
            terms = terms.plus(each)
        return terms


def _with_own(manifest: Manifest, other: Manifest) -> Manifest:
    return manifest.model_copy(update={"admission": other.admission})


def _amended(manifest: Manifest, amendment: Amendment) -> Manifest:
    try:
        changed = amendment.changed
        content = manifest.model_dump(mode="json")
        for section, keys in changed.items():
            for key, value in keys.items():
                if key not in MAY_CHANGE.get(section, ()):
                    raise UserError(f"amendment {amendment.number}: {why_not(section, key)}")
                content[section][key] = value
        return Manifest.model_validate_json(json.dumps(content))
    except ValidationError as error:
        told = error.errors(include_url=False)[0]
        raise UserError(
            f"amendment {amendment.number}: {told['msg'].removeprefix('Value error, ')}"
        ) from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"amendment {amendment.number}: damaged") from None


# ---- making one


def changes_of(now: Manifest, wanted: Manifest) -> dict[str, dict[str, Any]]:
    """What the host wants to be otherwise.  UserError with the first key that may not change, and why."""
    ours, theirs = (each.model_dump(mode="json", exclude=COORDINATORS_OWN) for each in (now, wanted))
    changed: dict[str, dict[str, Any]] = {}
    for section, keys in theirs.items():
        for key, value in keys.items():
            if value == ours[section][key]:
                continue
            if key not in MAY_CHANGE.get(section, ()):
                raise UserError(why_not(section, key))
            changed.setdefault(section, {})[key] = value
    if "round" in changed and "sync_every" in changed["round"] and now.pipeline.mode == "local":
        raise UserError('[round] sync_every may not change with [pipeline] mode = "local"; begin a new run')
    if "inner" in changed and now.pipeline.mode == "local":
        raise UserError('[inner] may not change with [pipeline] mode = "local"; begin a new run')
    return changed


def why_not(section: str, key: str) -> str:
    why = _WHY_NOT.get((section, key)) or _WHY_NOT.get(section) or "peers have begun with it"
    return (
        f"[{section}] {key} may not change while a run goes on: {why}; put the value back, or begin a new run, "
        "with [start] from a checkpoint of this one"
    )


def encoded(changes: dict[str, dict[str, Any]]) -> bytes:
    raw = json.dumps(changes, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(raw) > AMENDMENT_BYTES:
        raise UserError(f"the changes have {len(raw)} bytes, at most {AMENDMENT_BYTES} are allowed")
    return raw


# ---- a peer's part in it


def tag_of(run_id: bytes) -> bytes:
    """Stands in every bulk frame: a frame of another run is none of ours."""
    return run_id[:TAG_BYTES]


@dataclass(frozen=True)
class Known:
    manifest: Manifest
    run_id: bytes

    @property
    def tag(self) -> bytes:
        return tag_of(self.run_id)


@dataclass(frozen=True)
class Attached:
    known: Known
    model: ModelSchema
    stages: tuple[int, ...] = ()  # of a model that is cut: the one held, or those that could be

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """UserError if the model has fewer chunks than the run has fragments."""
        return tuple(self.model.fragments(self.known.manifest.fragments))

    @property
    def held(self) -> tuple[Fragment, ...]:
        """Those that this peer holds: all of them, but of a model that is cut into stages."""
        return tuple(self.fragments[stage] for stage in self.stages) if self.stages else self.fragments

    def as_holder_of(self, fragments: tuple[int, ...]) -> Attached | None:
        """What the coordinator says that I hold: all of it, or one of the stages that I offered.  None: neither."""
        if not self.stages:
            return self if fragments == tuple(each.number for each in self.fragments) else None
        chosen = len(fragments) == 1 and fragments[0] in self.stages
        return Attached(self.known, self.model, fragments) if chosen else None

    def of_part(self, fragment: int) -> str:
        """For people: " of stage 2", " of fragment 2", or nothing where there is only one."""
        kind = "stage" if self.model.stages else "fragment"
        return f" of {kind} {fragment}" if len(self.fragments) > 1 else ""

    @property
    def name(self) -> bytes:
        """Of this model in this run: what lies on disk under another name is none of ours."""
        of_stages = b"".join(stage.to_bytes(2, "little") for stage in self.stages)
        return self.known.run_id + self.known.manifest.digest + self.model.hash + of_stages

    @cached_property
    def form(self) -> StateForm:
        """Of one chunk of the outer state."""
        return self.known.manifest.state_form(self.model.chunk_elements)

    def fragment_of(self, chunk: int) -> Fragment:
        return next(fragment for fragment in self.fragments if chunk in fragment.chunks)
