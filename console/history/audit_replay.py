"""The audit by replay: from a checkpoint and the archive beside it, every version computed anew, bit for bit.

Called by `farflung audit --replay`.  Needs no process of the run, no GPU and no torch: numpy alone, one chunk after the
other.  Believes no file: a checkpoint's state must be what its digests say, a result what its commit says, and each
state that follows what the run settled, by the coordinator's signature in a checkpoint, or by its event journal where
one is given.  Holds the state of the whole model in memory; of a model that is cut into stages that of one stage, since
they are replayed one after the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from msgspec.structs import replace

from farflung.checkpoints.archive import Archive, Key, RoundHead
from farflung.checkpoints.checkpoint_manifest import CheckpointManifest, Saved, chunk_hash
from farflung.checkpoints.store import Store
from farflung.compression.plain_codecs import Bytes
from farflung.console.history.audit_evidence import evidence_below
from farflung.console.history.history import History, read_folder
from farflung.coordinator.court.proofs import ChunkRules, square_length
from farflung.coordinator.ledger.evidence import Evidence
from farflung.protocol.digests import split_hashes
from farflung.protocol.errors import CheckpointError, FrameError, UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import Fragment
from farflung.protocol.outer_numbers import factor_of, total
from farflung.protocol.process import exit_codes
from farflung.protocol.round_words import Commit, result_name
from farflung.protocol.run_terms import Terms
from farflung.protocol.signing import is_hosts

# ---- audit factors -----------------------------------------------------------------------------------------
# Of the audit by replay: the factor of a batch's commits computed anew, from the results of all stages that
# were kept.
#
# Computed for each version of each stage whose state was replayed. `[pipeline] clip`
# bounds the gradient of the whole model, so no stage alone tells by what its result is multiplied: a version
# is checked when each of its stages was replayed. Until then it must be the same number in all of them.


class OtherFactor(Exception):
    """A commit multiplies its results by another number than follows from them."""


@dataclass
class _Version:
    factor: float  # of the first commit of it that was heard
    by: int  # the stage of that one
    squares: dict[int, float] = field(default_factory=dict)  # by stage: of all its results, without buffers


class Factors:
    """Of one run.  One that clips no gradient of a batch has a factor of 1 in each commit."""

    def __init__(self, manifest: Manifest) -> None:
        self._clip, self._stages = manifest.batch_clip, manifest.fragments
        self._versions: dict[tuple[int, int], _Version] = {}  # by era and version
        self._checked = 0

    @property
    def told(self) -> str:
        """How much was checked, in words; empty where there is nothing to be checked."""
        if math.isinf(self._clip) or not self._versions:
            return ""
        due = len(self._versions)
        why = "" if self._checked == due else " (the others need all stages)"
        return f"; {self._checked} of {due} factors of [pipeline] clip made again{why}"

    def square_of(self, rules: ChunkRules, chunk: int, payload: Bytes) -> float:
        """Of a chunk's result, as its holders have proven it: buffers are no gradient."""
        if math.isinf(self._clip) or rules.is_plain(chunk):
            return 0.0
        return square_length(rules.gather_codec, rules.form.elements, payload)

    def hear(self, era: int, commit: Commit, squares: Sequence[float]) -> None:
        """`squares`: of the chunks of the stage that this commit is of.  OtherFactor if it does not fit."""
        if math.isinf(self._clip):
            if commit.factor != 1.0:
                raise OtherFactor(f"its commit multiplies by {commit.factor}, and this run clips no batch")
            return
        first = _Version(commit.factor, commit.fragment)
        version = self._versions.setdefault((era, commit.version), first)
        if commit.factor != version.factor:
            raise OtherFactor(
                f"its commit multiplies by {commit.factor}, that of stage {version.by} by {version.factor}"
            )
        version.squares[commit.fragment] = total(squares)
        if len(version.squares) < self._stages:
            return
        due = factor_of(list(version.squares.values()), self._clip)
        if due != commit.factor:
            raise OtherFactor(f"its commit multiplies by {commit.factor}, its results make that {due}")
        self._checked += 1


# ---- audit replay ------------------------------------------------------------------------------------------

SHOWN_CHARS = 16  # of a digest
KEEP_IT = "farflung join --checkpoints FOLDER --archive keeps them, at every peer that is asked to"


class Differs(Exception):
    """What was computed is not what the run says.  The text names the version, the fragment and the chunk."""


@dataclass
class ReplayOutcome:
    replayed: int = 0  # versions, of each fragment
    settled: int = 0  # of these, so many that the run settled, by its signature or its journal
    gaps: list[str] = field(default_factory=list)
    difference: str = ""
    factors: str = ""  # how many were made again, where the run clips the gradient of a batch

    @property
    def told(self) -> str:
        if self.difference:
            return f"DIFFERS  {self.difference}"
        missing = f"; missing: {len(self.gaps)} (named above)" if self.gaps else ""
        same = f"{self.replayed} versions replayed, bit for bit the same"
        return f"{same}; {self.settled} of them settled by the run{missing}{self.factors}"


@dataclass(frozen=True)
class ReplaySources:
    """Where everything lies, and whom to believe about digests."""

    store: Store
    archive: Archive
    run: str  # the beginning of its id
    manifest: Manifest
    checkpoints: tuple[Saved, ...]
    run_key: bytes = b""  # the key of the join URL: signatures of anybody else prove nothing
    history: History | None = None  # the coordinator's event journals
    evidence: Mapping[tuple[int, int], Evidence] = field(default_factory=dict)  # by round and fragment

    @property
    def stages(self) -> tuple[int | None, ...]:
        """What is replayed by itself: each stage, or the whole model."""
        count = self.manifest.pipeline.stages
        return tuple(range(count)) if count > 1 else (None,)

    def of_part(self, fragment: int) -> str:
        """For people: " of stage 0", " of fragment 1", or nothing."""
        cut = self.stages != (None,)
        return f" of {'stage' if cut else 'fragment'} {fragment}" if cut or fragment else ""

    def starts(self, era: int, first: int, stage: int | None) -> list[Saved]:
        """Checkpoints from which this era's versions, of which `first` is the first, follow; the oldest first.

        An era begins at a version of an earlier one: a checkpoint of that very version will do, too.
        """
        found = [
            saved
            for saved in self.checkpoints
            if saved.manifest.is_stage == (stage is not None)
            and saved.manifest.first_fragment == (stage or 0)
            and (
                saved.manifest.era == era
                or (saved.manifest.era < era and saved.manifest.version == first - 1)
            )
        ]
        nearest = max(
            (saved.manifest.version for saved in found if saved.manifest.version < first), default=0
        )
        found = [saved for saved in found if saved.manifest.version >= nearest]
        return sorted(found, key=lambda saved: (saved.manifest.version, saved.manifest.era, saved.folder))

    def settled(self, era: int, fragment: int, version: int) -> Iterator[tuple[str, str]]:
        """(digest, by what) of what the run itself has said of this version."""
        if self.history is not None and (fragment, version) in self.history.era(era).digests:
            yield self.history.era(era).digests[fragment, version], "the run settled"
        for saved in self.checkpoints:
            signed = saved.manifest.digest_of if saved.manifest.run_key else {}
            if saved.manifest.age == (era, version) and fragment in signed:
                yield signed[fragment].hex(), "the run signed"


def sources_at(
    place: str,
    run: str,
    run_key: bytes,
    history: History | None,
    evidence: Mapping[tuple[int, int], Evidence] = MappingProxyType({}),
) -> ReplaySources:
    """UserError if there is nothing to replay, or more than one run."""
    archive, store = Archive(place), Store(place)
    runs = [each for each in archive.runs() if each.startswith(run[:8])]
    if not runs:
        raise UserError(f"{place}: no archive of a run there; {KEEP_IT}")
    if len(runs) > 1:
        raise UserError(f"{place}: archives of several runs; choose one with --run: {', '.join(runs)}")
    found = [each for each in store.list_saved().complete if each.manifest.run_id.startswith(runs[0])]
    models = {each.manifest.model.hash: each.folder for each in found}
    if len(models) > 1:
        told = "these checkpoints are of different models; remove those of which you know nothing"
        raise CheckpointError(f"{place}: {told}: {', '.join(sorted(models.values()))}")
    foreign = [each.folder for each in found if run_key and each.manifest.run_key != run_key]
    if foreign:
        raise CheckpointError(
            f"{place}: not signed by the coordinator of this join URL: {', '.join(foreign)}"
        )
    mine = {key: each for key, each in evidence.items() if each.run_id.hex().startswith(runs[0])}
    manifest = archive.manifest(runs[0])
    return ReplaySources(store, archive, runs[0], manifest, tuple(found), run_key, history, mine)


def run_replay(place: str, run: str, run_key: bytes, folder: Path | None, say: Callable[[str], None]) -> int:
    """The command: its exit code.  `folder`: the coordinator's, with its event journals and its evidence."""
    history = read_folder(folder) if folder is not None else None
    evidence = evidence_below(folder, run_key) if folder is not None else {}
    outcome = replay(sources_at(place, run, run_key, history, evidence), say)
    say(outcome.told)
    return exit_codes.UNEXPECTED if outcome.difference else exit_codes.OK


def replay(sources: ReplaySources, say: Callable[[str], None]) -> ReplayOutcome:
    """All that is there, era by era and stage by stage, up to the first difference.  `say` is told a line for each
    version."""
    factors, outcome = Factors(sources.manifest), ReplayOutcome()
    keys: dict[int, list[Key]] = defaultdict(list)
    for key in sources.archive.keys(sources.run):
        keys[key[0]].append(key)
    shared = _Shared(sources, outcome, factors, say)
    try:
        for era, there in sorted(keys.items()):
            for stage in sources.stages:
                _Replay(shared, era, stage, [key for key in there if stage in (None, key[1])]).run()
    except Differs as difference:
        outcome.difference = str(difference)
    outcome.factors = factors.told
    if not outcome.replayed and not outcome.difference:
        say_why = "\n".join(outcome.gaps) or f"nothing is in the archive; {KEEP_IT}"
        raise UserError(f"{sources.store.url}: nothing can be replayed: {say_why}")
    return outcome


@dataclass(frozen=True)
class _Shared:
    """By the replays of all eras and stages."""

    sources: ReplaySources
    outcome: ReplayOutcome
    factors: Factors
    say: Callable[[str], None]


class _Replay:
    """Of one era, and of one stage where the model is cut."""

    def __init__(self, shared: _Shared, era: int, stage: int | None, keys: list[Key]) -> None:
        """`keys`: of what is in the archive."""
        self._sources, self._outcome, self._say = shared.sources, shared.outcome, shared.say
        self._factors, self._era, self._stage = shared.factors, era, stage
        self._there = set(keys)
        newest = {fragment: version for _, fragment, version in keys}
        self._first, self._last = min((key[2] for key in keys), default=0), min(newest.values(), default=0)
        self._starts = self._sources.starts(era, self._first, stage) if keys else []
        self._state: dict[int, bytes] = {}  # chunk -> its parameters and moments

    def run(self) -> None:
        of = self._sources.of_part(self._stage or 0)
        if not self._there:
            self._gap(
                f"nothing{of} is in the archive; who holds that stage may have it (copy its *.round files and its "
                "checkpoints into the folder)"
            )
            return
        if not self._starts:
            self._gap(
                f"no checkpoint{of} from which version {self._first} follows; [checkpoint] every_rounds in run.toml "
                "asks for them, farflung join --checkpoints keeps them"
            )
            return
        manifest = self._manifest_of(self._starts[0].manifest)
        rules = ChunkRules.of(manifest, self._starts[0].manifest.model, self._terms(), self._era)
        fragments = self._starts[0].manifest.model.fragments(manifest.fragments)
        if self._stage is not None:
            fragments = (fragments[self._stage],)
        at = -1  # the version that the state is at
        for version in range(self._starts[0].manifest.version, self._last + 1):
            saved = next((each for each in self._starts if each.manifest.version == version), None)
            if at == version - 1 and at >= 0 and self._is_kept(version, fragments):
                for fragment in fragments:
                    self._step(rules, fragment, version)
                at = version
                if saved is not None:
                    self._compare(saved, fragments)
            elif saved is not None:
                self._load(saved)
                at = version

    def _manifest_of(self, start: CheckpointManifest) -> Manifest:
        manifest = self._sources.manifest
        if manifest.digest.hex() != start.manifest:
            raise CheckpointError(
                f"{self._sources.archive.url}: run.json of the archive is not the manifest of the checkpoints' run"
            )
        return manifest

    def _terms(self) -> Terms:
        """What held at each version, if the run's own key has signed what its host changed."""
        sources, start = self._sources, self._starts[0].manifest
        terms, run_id = sources.archive.terms(sources.run), bytes.fromhex(start.run_id)
        keys = {sources.run_key or start.run_key} - {b""}
        foreign = [
            each.number for each in terms.amendments if not all(is_hosts(each, run_id, k) for k in keys)
        ]
        if foreign:
            raise CheckpointError(
                f"{sources.archive.url}: amendment {foreign[0]} is not signed by the run's host"
            )
        return terms

    def _is_kept(self, version: int, fragments: tuple[Fragment, ...]) -> bool:
        missing = [f.number for f in fragments if (self._era, f.number, version) not in self._there]
        if missing:
            cut = self._stage is not None or len(fragments) > 1
            of = f" of {self._kind} {missing[0]}" if cut else ""
            self._gap(
                f"version {version}{of} is not in the archive; another peer's may have it (copy its *.round "
                "files into the folder); it goes on at the next checkpoint"
            )
        return not missing

    def _gap(self, told: str) -> None:
        where = f"era {self._era}: " if self._era else ""
        self._outcome.gaps.append(where + told)
        self._say(f"missing  {where}{told}")

    # ---- a checkpoint ----------------------------------------------------------------------------------------

    def _load(self, saved: Saved) -> None:
        manifest = saved.manifest
        for fragment, digest in manifest.digest_of.items():
            self._look_elsewhere(manifest.era, fragment, manifest.version, digest.hex())
        self._state = dict(self._sources.store.chunks(saved))
        of = self._sources.of_part(self._stage or 0)
        self._say(f"version {manifest.version}{of}: read from the checkpoint {saved.folder}")

    def _compare(self, saved: Saved, fragments: tuple[Fragment, ...]) -> None:
        for fragment, there in zip(fragments, saved.manifest.fragments, strict=True):
            for chunk, expected in zip(fragment.chunks, there.chunks, strict=True):
                if chunk_hash(self._state[chunk]) != expected:
                    raise Differs(self._named(there.version, fragment, chunk) + f", in {saved.folder}")

    # ---- a version -------------------------------------------------------------------------------------------

    def _step(self, rules: ChunkRules, fragment: Fragment, version: int) -> None:
        run, key = self._sources.run, (self._era, fragment.number, version)
        head = self._sources.archive.head(run, key)
        payloads = self._sources.archive.payloads(run, key)
        expected = split_hashes(head.chunks)
        if len(expected) != fragment.count:
            raise Differs(f"version {version} of {self._kind} {fragment.number} has {len(expected)} chunks")
        self._check_commit(head)
        squares: list[float] = []
        for chunk, payload, told in zip(fragment.chunks, payloads, expected, strict=True):
            where = self._named(version, fragment, chunk)
            try:
                state = rules.after(self._state[chunk], payload, chunk, version, head.commit.factor)
            except FrameError as error:
                raise Differs(f"{where}: its result is none: {error}") from None
            if chunk_hash(state) != told.hex():
                raise Differs(
                    f"{where}: the committed results lead to {chunk_hash(state)[:SHOWN_CHARS]}, the archive "
                    f"has {told.hex()[:SHOWN_CHARS]}"
                )
            self._state[chunk] = state
            squares.append(self._factors.square_of(rules, chunk, payload))
        self._check_factor(head, squares)
        self._tell(head, self._look_elsewhere(*key, head.digest.hex()))

    def _check_factor(self, head: RoundHead, squares: list[float]) -> None:
        """By which the results of all stages are multiplied: it follows from the length of all of them."""
        try:
            self._factors.hear(self._era, head.commit, squares)
        except OtherFactor as other:
            where = f"version {head.commit.version}, {self._kind} {head.commit.fragment}"
            raise Differs(f"{where}: {other}") from None

    @property
    def _kind(self) -> str:
        return "fragment" if self._stage is None else "stage"

    def _named(self, version: int, fragment: Fragment, chunk: int) -> str:
        return f"version {version}, {self._kind} {fragment.number}, chunk {chunk}"

    def _look_elsewhere(self, era: int, fragment: int, version: int, digest: str) -> str:
        """By what the run said that this is the version's digest, empty if nothing here tells; Differs if it said
        another one."""
        by = ""
        for other, who in self._sources.settled(era, fragment, version):
            if other != digest:
                told = f"the digest is {digest[:SHOWN_CHARS]}, {who} {other[:SHOWN_CHARS]}"
                raise Differs(f"version {version}, {self._kind} {fragment}: {told}")
            by = by or who
        return by

    def _check_commit(self, head: RoundHead) -> None:
        commit, history = head.commit, self._sources.history
        where = f"version {commit.version}, {self._kind} {commit.fragment}"
        made = history.era(self._era).commits.get((commit.fragment, commit.version)) if history else None
        if made is not None and made["result"] != result_name(commit):
            raise Differs(f"{where}: its results are not those that the coordinator's journal has")
        if made is not None and made.get("factor", 1.0) != commit.factor:
            raise Differs(f"{where}: its factor is not the one that the coordinator's journal has")
        signed = self._sources.evidence.get((commit.round_no, commit.fragment))
        if signed is not None and not self._is_of(commit, signed.commit):
            told = "its members, weights or results are not those that the coordinator signed as evidence"
            raise Differs(f"{where}: {told}")

    def _is_of(self, told: Commit, whole: Commit) -> bool:
        """Of rounds in groups most peers are told no more of the members than their own part."""
        if not self._sources.manifest.round.group:
            return told == whole
        bare = [replace(each, members=(), weights=()) for each in (told, whole)]
        weighed = [set(zip(each.members, each.weights, strict=True)) for each in (told, whole)]
        return bare[0] == bare[1] and weighed[0] <= weighed[1]

    def _tell(self, head: RoundHead, settled: str) -> None:
        commit = head.commit
        self._outcome.replayed += 1
        self._outcome.settled += bool(settled)
        of = self._sources.of_part(commit.fragment)
        era = f" in era {self._era}" if self._era else ""
        how = f"as {settled} it" if settled else "as the archive has it"
        self._say(f"version {commit.version}{of}{era}: digest {head.digest.hex()[:SHOWN_CHARS]} {how}")
