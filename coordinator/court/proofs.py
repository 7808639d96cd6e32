"""Proof that a peer cheated, for somebody who was not there and trusts nobody: what it signed, and what shows it wrong.

Made by the run machine's judges, kept in files by coordinator/run_files.py, read by the audit
(console/history/audit_evidence.py).  Each part of a wrong sum is signed by the one that it speaks against, or by the
authors of what that one signed to have used: the coordinator can have invented nothing.  A false claim speaks of the
run's own state as well: which that was, the run says with its key.  Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from farflung.compression.plain_codecs import (
    NUMBER_AT,
    Bytes,
    NonFinite,
    codec_in,
    codec_named,
    is_unknown_here,
)
from farflung.optim.outer import advance, outer_step_for, sum_by_halves
from farflung.protocol.digests import (
    HASH_BYTES,
    bits,
    hash_at,
    hash_bytes,
    mask_from_bytes,
    root_of,
    split_hashes,
)
from farflung.protocol.errors import FrameError, UserError, Verdict
from farflung.protocol.limits import CHUNKS_PER_FRAGMENT, GROUPS_MOST, MEMBERS_PER_ROUND
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.outer_numbers import (
    ADAMW_PARTS,
    MOMENTUM_PARTS,
    AdamWNumbers,
    MuonNumbers,
    OuterNumbers,
    OwnNumbers,
    StateForm,
    StepNumbers,
    Tile,
)
from farflung.protocol.round_words import Count, Hash, HashList, Session
from farflung.protocol.run_terms import Terms
from farflung.protocol.signed_words import (
    Results,
    Signature,
    SignedList,
    SumsOfGroups,
    claim_part,
    inputs_of,
    is_signed,
    results_part,
    sums_of_groups_part,
)
from farflung.protocol.signing import peer_id_of, verify

# ---- plain steps -------------------------------------------------------------------------------------------
# A round's arithmetic on one chunk, in numpy: the owner's sum, a result's length, and the state after it.
#
# Owns: the order of the sum, which is that of collectives/arithmetic/merge.py; the steps are those of optim/.
# Called by: the coordinator where two reports of a chunk differ, the audit of a sum, and the replay of a run.
# Must not know: who reported what, digests of fragments, torch.
#
# Each operation is a single one in fp32 and rounded on its own, so compiled or not it ends with the same
# bits.

_LARGEST = np.finfo(np.float32).max
_BUFFERS = OuterNumbers(nesterov=False, lr=1.0, momentum=0.0)


def merged(codec_name: str, elements: int, payloads: Sequence[Bytes], weights: Sequence[float]) -> bytes:
    """encode(sum_i w_i * decode(x_i)), in this order; `codec_name` is that of results.

    Each payload names its own codec.  FrameError where one is no payload of so many values, or where the sum has no
    encoding because a weight is no finite number.
    """
    total_n = np.zeros(elements if payloads else 0, np.float32)
    with np.errstate(all="ignore"):
        for payload, weight in zip(payloads, weights, strict=True):
            codec = codec_in(payload)
            codec.check_head(payload, elements)
            total_n += codec.decode(payload, elements) * np.float32(weight)
        total_n = total_n.clip(-_LARGEST, _LARGEST)  # each value is finite, but their sum need not be
    try:
        return codec_named(codec_name).encode(total_n)
    except NonFinite as error:
        raise FrameError(Verdict.MALFORMED, f"the sum of {len(payloads)} contributions: {error}") from None


def square_length(codec_name: str, elements: int, payload: Bytes) -> float:
    """The sum of the squares of a result's values, in fp64: halves are added to each other until one is left."""
    squares_n = codec_named(codec_name).decode(payload, elements).astype(np.float64)
    squares_n *= squares_n
    return sum_by_halves(squares_n)


def chunk_hash(state: Bytes) -> bytes:
    """Of a chunk's parameters and then its moments: what a fragment's digest is the root of."""
    return hash_bytes(state)


@dataclass(frozen=True)
class ChunkRules:
    """What a committed result makes of one chunk, by the manifest's [outer] and the model's layout."""

    outer: StepNumbers
    gather_codec: str
    form: StateForm  # of a chunk
    is_plain: Callable[[int], bool]  # the chunk holds buffers, which take the mean
    tiles_of: Callable[[int], tuple[Tile, ...]] = lambda chunk: ()  # what a step takes as matrices
    # By the version that is made, where the run's host has changed its terms.
    making: Callable[[int], StepNumbers] | None = None

    @classmethod
    def of(
        cls, manifest: Manifest, model: ModelSchema, terms: Terms | None = None, era: int | None = None
    ) -> ChunkRules:
        """`manifest`: that the run began with.  `era`: of the versions that are made; left out, the present one."""

        def making(version: int) -> StepNumbers:
            return (terms.at(version - 1, era) if terms is not None else manifest).outer_numbers

        return cls(
            manifest.outer_numbers,
            manifest.round.gather_codec,
            manifest.state_form(model.chunk_elements),
            model.is_plain,
            functools.cache(lambda chunk: model.tiles(range(chunk, chunk + 1)).get(chunk, ())),
            functools.cache(making) if terms is not None and terms.count else None,
        )

    def outer_of(self, chunk: int, version: int | None = None) -> StepNumbers:
        """`version`: that is made; left out where it is the same for all."""
        if self.is_plain(chunk):
            return _BUFFERS
        return self.outer if self.making is None or version is None else self.making(version)

    def after(self, old: Bytes, payload: Bytes, chunk: int, version: int, factor: float = 1.0) -> bytes:
        """The chunk's state at this version, from that at the one before.  `chunk` is its number in the whole model,
        `factor` that of the commit.  FrameError for what is no state, and for what is no result of this run.
        """
        delta_n = codec_named(self.gather_codec).decode(payload, self.form.elements)
        parts = np.frombuffer(self.form.whole(old), "<f4").astype(np.float32).reshape(self.form.parts, -1)
        step = outer_step_for(self.outer_of(chunk, version))
        factor = 1.0 if self.is_plain(chunk) else factor
        advance(step, tuple(parts), delta_n, version, factor, self.tiles_of(chunk))
        return parts.tobytes()


# ---- proofs ------------------------------------------------------------------------------------------------

SUFFIX = ".proof"
FORMAT = 1
HEAD_BYTES = 16  # of a payload; the number of its values stands in bytes 8 to 12


class StepRules(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a committed result does to one chunk, in numbers."""

    nesterov: bool
    lr: float
    momentum: float
    codec: Annotated[str, Meta(max_length=64)]
    elements: Count
    # Left out where they say nothing: the run's key has signed older proofs without them.
    parts: Annotated[int, Meta(ge=MOMENTUM_PARTS, le=ADAMW_PARTS)] = MOMENTUM_PARTS  # of the chunk's state
    adamw: AdamWNumbers | None = None  # instead of the first three
    muon: MuonNumbers | None = None  # the same
    tiles: tuple[Tile, ...] = ()  # of the chunk, in their order, for Muon
    start: Count = 0  # versions with less momentum
    own: OwnNumbers | None = None  # instead of the first three

    @property
    def tiles_fit(self) -> bool:
        """Each begins where the one before has ended, or later, and the last one ends with the chunk, or before."""
        ends = [0, *(tile.stop for tile in self.tiles)]
        begins = [*(tile.first for tile in self.tiles), self.elements]
        return all(end <= begin for end, begin in zip(ends, begins, strict=True))

    @property
    def outer(self) -> StepNumbers:
        exact = self.adamw or self.muon or self.own
        return exact or OuterNumbers(self.nesterov, self.lr, self.momentum, self.start)


def step_factors(rules: ChunkRules, chunk: int, factors: tuple[float, ...]) -> tuple[float, ...]:
    """Those of the commits, as a claim about this chunk has them: none where nothing is multiplied."""
    return () if rules.is_plain(chunk) or set(factors) <= {1.0} else factors


def step_rules(rules: ChunkRules, chunk: int, version: int | None = None) -> StepRules:
    """Of this chunk of the model.  `version`: that is made; left out where it is the same for all."""
    outer, form = rules.outer_of(chunk, version), rules.form
    if isinstance(outer, AdamWNumbers):
        return StepRules(False, 0.0, 0.0, rules.gather_codec, form.elements, form.parts, outer)
    if isinstance(outer, MuonNumbers):
        tiles = rules.tiles_of(chunk)
        return StepRules(
            False, 0.0, 0.0, rules.gather_codec, form.elements, form.parts, muon=outer, tiles=tiles
        )
    if isinstance(outer, OwnNumbers):
        return StepRules(False, 0.0, 0.0, rules.gather_codec, form.elements, form.parts, own=outer)
    numbers = outer.nesterov, outer.lr, outer.momentum
    return StepRules(*numbers, rules.gather_codec, form.elements, form.parts, start=outer.start)


class WrongSum(Struct, frozen=True, forbid_unknown_fields=True, tag="wrong_sum"):
    """An owner signed a result of one chunk that is not the sum of what it signed to have merged; in a mesh, what its
    group adds to the result."""

    run_id: Session
    fragment: Count
    version: Count  # that the round made
    chunk: Annotated[int, Meta(ge=0, lt=CHUNKS_PER_FRAGMENT)]  # of the fragment
    maker: Hash  # its identity
    results: Results
    signature: Signature  # of the maker
    # Of each that counts, in the sum's order.
    said: Annotated[tuple[SignedList, ...], Meta(max_length=MEMBERS_PER_ROUND)]
    contributions: Annotated[tuple[bytes, ...], Meta(max_length=MEMBERS_PER_ROUND)]  # of the same

    @property
    def guilty(self) -> str:
        return peer_id_of(self.maker)

    @property
    def name(self) -> str:
        return f"{self.results.round_no:010d}-{self.fragment:02d}-{self.chunk:04d}-{self.guilty}{SUFFIX}"

    @property
    def details(self) -> list[str]:
        """For people: what it was calculated from."""
        weighed = zip(self.results.included, [w for w in self.results.weights if w > 0.0], strict=True)
        of = f"of the run {self.run_id.hex()}, round {self.results.round_no}"
        return [
            f"{of}; calculated here from these bytes, whose hashes their authors signed:",
            *(f"{peer}: weight {weight:.6g}" for peer, weight in weighed),
        ]

    @property
    def told(self) -> str:
        what = f"chunk {self.chunk} of version {self.version}, fragment {self.fragment}"
        return f"{self.guilty} signed a wrong sum of {len(self.said)} contributions: {what}"

    def problem(self) -> str:
        """Why this proves nothing, or empty."""
        results = self.results
        if len(results.weights) != len(results.members):
            return "it does not say who counts for how much"
        if not verify(self.maker, results_part(self.run_id, results), self.signature):
            return "the owner's signature does not fit its results"
        return self._problem_of_inputs() or self._problem_of_sum()

    def _problem_of_inputs(self) -> str:
        """Are these the contributions that the owner signed to have used?"""
        results, chunks = self.results, list(bits(mask_from_bytes(self.results.chunks)))
        if self.chunk not in chunks or len(results.hashes) != HASH_BYTES * len(chunks):
            return "the owner has not signed a result of this chunk"
        if tuple(each.peer for each in self.said) != results.included or len(self.contributions) != len(
            self.said
        ):
            return "there is not one hash list and one contribution of each that counts"
        for each in self.said:
            if not is_signed(each.identity, self.run_id, each.sent) or each.sent.round_no != results.round_no:
                return f"{each.peer} has not signed this hash list for this round"
        lists = [split_hashes(each.sent.hashes) for each in self.said]
        if any(len(hashes) <= max(chunks) for hashes in lists):
            return "a hash list is too short"
        if inputs_of(hashes[chunk] for chunk in chunks for hashes in lists) != results.inputs:
            return "the owner merged other contributions than these lists name"
        for each, hashes, payload in zip(self.said, lists, self.contributions, strict=True):
            if hash_bytes(payload) != hashes[self.chunk]:
                return f"these are not the bytes that {each.peer} signed"
        return ""

    def _problem_of_sum(self) -> str:
        weights = [weight for weight in self.results.weights if weight > 0.0]
        place = list(bits(mask_from_bytes(self.results.chunks))).index(self.chunk)
        return _problem_of_sum(self.results, place, self.contributions, weights)


def _problem_of_sum(
    results: Results | SumsOfGroups, place: int, payloads: Sequence[bytes], weights: Sequence[float]
) -> str:
    """`place`: of the chunk, among those that were signed."""
    elements = int.from_bytes(payloads[0][8:12], "little") if payloads else 0
    if any(len(each) > NUMBER_AT and is_unknown_here(each[NUMBER_AT]) for each in payloads):
        return "a contribution is in a codec of a package that is not installed here"
    try:
        made = merged(results.codec, elements, payloads, weights)
    except FrameError:
        return ""  # whoever does as it should refuses these bytes, and has no result
    return "the sum is right" if hash_bytes(made) == hash_at(results.hashes, place) else ""


class WrongSumOfSums(Struct, frozen=True, forbid_unknown_fields=True, tag="wrong_sum_of_sums"):
    """The root of a mesh signed a result of one chunk that is not the sum of the groups' sums that it signed to have
    used.  Whoever made these needs to have signed nothing: what the root used, the root says."""

    run_id: Session
    fragment: Count
    version: Count  # that the round made
    chunk: Annotated[int, Meta(ge=0, lt=CHUNKS_PER_FRAGMENT)]  # of the fragment
    maker: Hash  # its identity
    results: SumsOfGroups
    signature: Signature  # of the maker
    # The hashes of all sums that the maker signed for, in the order of `inputs_of`: each stands for itself.
    inputs: Annotated[bytes, Meta(max_length=CHUNKS_PER_FRAGMENT * GROUPS_MOST * HASH_BYTES)]
    sums: Annotated[
        tuple[bytes, ...], Meta(max_length=GROUPS_MOST)
    ]  # of the chunk, in the order of the groups

    @property
    def guilty(self) -> str:
        return peer_id_of(self.maker)

    @property
    def name(self) -> str:
        return f"{self.results.round_no:010d}-{self.fragment:02d}-{self.chunk:04d}-root-{self.guilty}{SUFFIX}"

    @property
    def details(self) -> list[str]:
        """For people: what it was calculated from."""
        of = f"of the run {self.run_id.hex()}, round {self.results.round_no}"
        groups = ", ".join(map(str, self.results.groups))
        return [f"{of}; calculated here from the sums of the groups {groups}, whose hashes it signed itself"]

    @property
    def told(self) -> str:
        what = f"chunk {self.chunk} of version {self.version}, fragment {self.fragment}"
        return f"{self.guilty} signed a wrong sum of {len(self.sums)} groups' sums: {what}"

    def problem(self) -> str:
        """Why this proves nothing, or empty."""
        results, chunks = self.results, list(bits(mask_from_bytes(self.results.chunks)))
        if not verify(self.maker, sums_of_groups_part(self.run_id, results), self.signature):
            return "the root's signature does not fit its results"
        if self.chunk not in chunks or len(results.hashes) != HASH_BYTES * len(chunks):
            return "the root has not signed a result of this chunk"
        inputs, groups = split_hashes(self.inputs), len(results.groups)
        if len(self.inputs) != HASH_BYTES * groups * len(chunks) or inputs_of(inputs) != results.inputs:
            return "the root used other sums than these hashes name"
        place = chunks.index(self.chunk)
        if [hash_bytes(each) for each in self.sums] != inputs[place * groups : (place + 1) * groups]:
            return "these are not the sums that the root signed to have used"
        return _problem_of_sum(results, place, self.sums, [1.0] * groups)


class FalseClaim(Struct, frozen=True, forbid_unknown_fields=True, tag="false_claim"):
    """A member signed a list of chunk hashes as a version of the run, and the run's own results lead elsewhere."""

    run_id: Session
    era: Count
    fragment: Count
    version: Count  # that it claimed
    chunk: Annotated[int, Meta(ge=0, lt=CHUNKS_PER_FRAGMENT)]  # of the fragment
    maker: Hash  # its identity
    claimed: HashList
    claim: Signature  # of the maker, over the root of these
    base: Count  # the settled version that the step starts from
    base_hashes: HashList
    before: bytes  # the chunk's state at it
    results: tuple[bytes, ...]  # the committed payloads of the chunk since
    rules: StepRules
    key: Annotated[bytes, Meta(max_length=32)] = b""  # the run's, ed25519
    signature: Signature = b""  # of the run: these were its state, its results and its rules
    factors: tuple[float, ...] = ()  # of each result's commit, where a gradient was clipped

    @property
    def guilty(self) -> str:
        return peer_id_of(self.maker)

    @property
    def name(self) -> str:
        return f"state-{self.era:04d}-{self.fragment:02d}-{self.version:010d}-{self.guilty}{SUFFIX}"

    @property
    def told(self) -> str:
        what = f"version {self.version}, fragment {self.fragment}: wrong in chunk {self.chunk}"
        return f"{self.guilty} signed a state that is not the run's: {what}"

    @property
    def details(self) -> list[str]:
        """For people: what it was calculated from."""
        return [
            f"of the run {self.run_id.hex()}, era {self.era}; calculated here from version {self.base} of the chunk, "
            f"whose hash the run settled, and {len(self.results)} committed results; signed by the run's key "
            f"{self.key.hex()}"
        ]

    def signed_part(self) -> bytes:
        """What the run vouches for: not what the maker claimed, which has the maker's own signature."""
        numbers = (self.era, self.fragment, self.base, self.version, self.chunk)
        said = (*(number.to_bytes(8, "big") for number in numbers), root_of(split_hashes(self.base_hashes)))
        results = (hash_bytes(payload) for payload in self.results)
        rules = hash_bytes(msgspec.msgpack.encode(self.rules))
        factors = hash_bytes(msgspec.msgpack.encode(self.factors)) if self.factors else b""
        return b"farflung/false-claim/1\0" + self.run_id + b"".join((*said, *results, rules, factors))

    def problem(self) -> str:
        """Why this proves nothing, or empty."""
        if not verify(self.key, self.signed_part(), self.signature):
            return "the run's signature does not fit its state and results"
        claimed, base = split_hashes(self.claimed), split_hashes(self.base_hashes)
        digest = root_of(claimed)
        signed = claim_part(self.run_id, self.era, self.fragment, self.version, digest)
        if not verify(self.maker, signed, self.claim):
            return "the member's signature does not fit the list of hashes"
        if len(claimed) != len(base) or self.chunk >= len(base):
            return "the two lists of hashes are not of one fragment"
        if hash_bytes(self.before) != base[self.chunk]:
            return f"this is not what the chunk was at version {self.base}"
        if self.base + len(self.results) != self.version:
            return "there is not one result for each version"
        if len(self.factors) not in (0, len(self.results)):
            return "there is not one factor for each result"
        try:
            parts = self.rules.outer.parts
        except UserError as error:
            return str(error)
        if parts > self.rules.parts or (self.rules.own is not None and parts != self.rules.parts):
            return "its step needs a larger state than it has"
        if not self.rules.tiles_fit:
            return "its matrices do not lie in its chunk"
        form = StateForm(self.rules.elements, self.rules.parts)
        rules = ChunkRules(
            self.rules.outer, self.rules.codec, form, lambda chunk: False, lambda chunk: self.rules.tiles
        )
        state, factors = self.before, self.factors or (1.0,) * len(self.results)
        try:
            multiplied = zip(self.results, factors, strict=True)
            for version, (payload, factor) in enumerate(multiplied, self.base + 1):
                state = rules.after(state, payload, 0, version, factor)
        except FrameError as error:
            return f"nothing follows from these results: {error}"
        return "the claim is right" if hash_bytes(state) == claimed[self.chunk] else ""


# A file has one of these; each kind has a tag of its own.
Proof = WrongSum | WrongSumOfSums | FalseClaim


class ProofFile(Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    proof: Proof


def proof_to_bytes(proof: Proof) -> bytes:
    return msgspec.msgpack.encode(ProofFile(FORMAT, proof))


def proof_from_bytes(raw: bytes) -> Proof:
    """Raises what `records.UNREADABLE` names."""
    found = msgspec.msgpack.decode(raw, type=ProofFile)
    if found.format != FORMAT:
        raise msgspec.ValidationError(f"its format is {found.format}, this farflung reads {FORMAT}")
    return found.proof
