"""Checkpoints of a model that is cut into stages: each lies in a folder of its own, and all of them are one.  Pure.

Called by the store, which keeps what is needed for a whole one, and by the command line.  A peer holds one stage and
saves that one; a checkpoint of a version is whole when each stage is there.  The peers of different stages need not
share a place: their folders can be copied beside each other.  Of a model in one piece every checkpoint is whole.
Must not know files or tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from farflung.checkpoints.checkpoint_manifest import CheckpointManifest

Age = tuple[int, int]  # era, version


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: of the whole model, or of one of its stages."""

    folder: str
    manifest: CheckpointManifest


@dataclass(frozen=True)
class JoinedStages:
    """What is there of one version of one run."""

    parts: tuple[Saved, ...]  # one of each stage that is there, in their order; or the whole model

    @property
    def manifest(self) -> CheckpointManifest:
        """Of its first part: run, version and model are those of all."""
        return self.parts[0].manifest

    @property
    def stages(self) -> int:
        """That the model is cut into; 0: it is in one piece."""
        return len(self.manifest.model.stages) if self.manifest.is_stage else 0

    @property
    def missing(self) -> tuple[int, ...]:
        there = {part.manifest.first_fragment for part in self.parts}
        return tuple(stage for stage in range(self.stages) if stage not in there)

    @property
    def size_bytes(self) -> int:
        return sum(part.manifest.size_bytes for part in self.parts)

    @property
    def run_key(self) -> bytes:
        """Of the coordinator that has signed all of it; else empty."""
        keys = {part.manifest.run_key for part in self.parts}
        return keys.pop() if len(keys) == 1 else b""

    def missing_text(self) -> str:
        if not self.missing:
            return ""
        numbers = [str(stage) for stage in self.missing]
        listed = " and ".join(filter(None, (", ".join(numbers[:-1]), numbers[-1])))
        many = len(numbers) > 1
        return f"stage{'s' if many else ''} {listed} of {self.stages} {'are' if many else 'is'} missing"


def joined(found: Iterable[Saved]) -> list[JoinedStages]:
    """In the order given, by the first part of each.  Only what is of one run, version and model belongs together."""
    groups: dict[object, dict[object, Saved]] = {}
    for saved in found:
        manifest = saved.manifest
        whole = () if manifest.is_stage else (saved.folder,)
        key = (manifest.run_id, manifest.age, manifest.manifest, manifest.model.hash, whole)
        groups.setdefault(key, {}).setdefault(manifest.first_fragment, saved)
    return [
        JoinedStages(tuple(sorted(parts.values(), key=lambda each: each.manifest.first_fragment)))
        for parts in groups.values()
    ]


def outdated(found: Collection[Saved], keep: int, archived: bool) -> list[Saved]:
    """Of one run: what need not be kept.  The newest `keep` versions of each stage stay, and the newest `keep` that are
    whole: a stage that is ahead of the others must not cost the run its last whole checkpoint.

    `archived`: the oldest of each era stays too: from there the versions after it can be computed anew.
    """
    keep = max(1, keep)
    whole = sorted({each.manifest.age for each in joined(found) if not each.missing}, reverse=True)[:keep]
    ages: dict[int, set[Age]] = {}
    for saved in found:
        ages.setdefault(saved.manifest.first_fragment, set()).add(saved.manifest.age)
    kept = {(stage, age) for stage in ages for age in whole}
    for stage, mine in ages.items():
        newest_first = sorted(mine, reverse=True)
        kept.update((stage, age) for age in newest_first[:keep])
        if archived:
            kept.update((stage, age) for age in {age[0]: age for age in newest_first}.values())
    return [saved for saved in found if (saved.manifest.first_fragment, saved.manifest.age) not in kept]
