"""Members before the court: true states and results of a small model, and holders that answer questions, truly or not.

For tests of disputes and of possession.  The second of two fragments is in dispute, so that an index that should be a
chunk of the model, or the reverse, is seen.  Three versions are committed; what each chunk becomes is calculated by the
court's own arithmetic, which tests of its own compare with the peers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from farflung.coordinator.court.dispute import Dispute, DisputedVersion
from farflung.coordinator.court.plain_codecs import encode
from farflung.coordinator.court.plain_steps import ChunkRules
from farflung.coordinator.court.questions import Questions
from farflung.protocol.digests import hash_bytes, keyed_hash, root_of
from farflung.protocol.limits import PART_BYTES
from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_sections import OuterSection, RoundSection
from farflung.protocol.messages import Shown, What
from farflung.protocol.model_schema import ModelSchema, TensorSpec, fragments_of
from farflung.protocol.round_words import Commit

CHUNKS, ELEMENTS, VERSIONS = 6, 5, 3
MODEL = ModelSchema(
    (TensorSpec("w", (CHUNKS * ELEMENTS,), "float32", "param"),), ELEMENTS, CHUNKS, CHUNKS, bytes(32)
)
# The step that depends on the version: an answer about another version leads elsewhere.
ROUND = RoundSection(fragments=2, codec="fp32", gather_codec="fp32")
MANIFEST = Manifest(outer=OuterSection(step="adamw"), round=ROUND)
FRAGMENT = fragments_of(CHUNKS, 2)[1]
RULES = ChunkRules.of(MANIFEST, MODEL)
FACTORS = {1: 1.0, 2: 0.5, 3: 0.125}  # of the commits, as where gradients are clipped


def _payload(chance: np.random.Generator) -> bytes:
    return encode(MANIFEST.round.gather_codec, chance.standard_normal(ELEMENTS).astype(np.float32))


class Truth:
    """States by version, each a list of the fragment's chunks; results by version."""

    def __init__(self) -> None:
        chance = np.random.default_rng(1)
        size = RULES.form.parts * ELEMENTS
        self.states = [
            [np.abs(chance.standard_normal(size)).astype("<f4").tobytes() for _ in FRAGMENT.chunks]
        ]
        self.results: list[list[bytes]] = [[]]
        for version in range(1, VERSIONS + 1):
            payloads = [_payload(chance) for _ in FRAGMENT.chunks]
            after = [
                RULES.after(old, payload, chunk, version, FACTORS[version])
                for old, payload, chunk in zip(self.states[-1], payloads, FRAGMENT.chunks, strict=True)
            ]
            self.results.append(payloads)
            self.states.append(after)

    def hashes(self, version: int) -> list[bytes]:
        return [hash_bytes(state) for state in self.states[version]]

    def digest(self, version: int) -> bytes:
        return root_of(self.hashes(version))

    def commit(self, version: int) -> Commit:
        hashes = b"".join(map(hash_bytes, self.results[version]))
        codec, number, factor = MANIFEST.round.gather_codec, FRAGMENT.number, FACTORS[version]
        return Commit(version, version, ("ann",), (1.0,), hashes, codec, number, factor)


TRUTH = Truth()


def signature_of(peer: str, digest: bytes) -> bytes:
    return keyed_hash(hash_bytes(peer.encode()), digest)


@dataclass
class Holder:
    """A member at a version, which it calculated from `base`.  What it shows is true but for what a test replaces."""

    name: str
    version: int = 3
    base: int = 2
    # Of its version; a lie where these are not the true ones.
    hashes: list[bytes] = field(default_factory=list)
    named: bytes = b""  # the digest that it names, if not that of its hashes
    says: dict[tuple[What, int], bytes | None] = field(default_factory=dict)  # (what, version) -> instead
    value: bytes | None = None  # that it shows under the version's nonce, if not the true one
    signs: bool = True
    mute: bool = False
    after_list_mute: bool = False  # it shows lists, and is silent when it is asked for more
    asked: list[What] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hashes = self.hashes or TRUTH.hashes(self.version)

    @property
    def digest(self) -> bytes:
        return self.named or root_of(self.hashes)

    def shows(self, what: What, version: int, chunk: int) -> bytes | None:
        if (what, version) in self.says:
            return self.says[what, version]
        index = chunk - FRAGMENT.first
        match what:
            case What.HASHES if version == self.version:
                return b"".join(self.hashes)
            case What.HASHES if version == self.base:
                return b"".join(TRUTH.hashes(version))
            case What.BEFORE:
                return self.base.to_bytes(8, "little") + TRUTH.states[self.base][index]
            case What.STATE:
                return TRUTH.states[version][index]
            case What.RESULT:
                return TRUTH.results[version][index]
        return None


def liar(name: str, lie: bytes = b"a lie", at: int = 1, **more: object) -> Holder:
    """It names the state that differs from the true one in one chunk, and has a list to go with it."""
    version = int(more.get("version", 3))  # type: ignore[call-overload]
    hashes = TRUTH.hashes(version)
    hashes[at] = hash_bytes(lie)
    return Holder(name, hashes=hashes, **more)  # type: ignore[arg-type]


class Court:
    """A dispute about a version, and all members that are here.  Time goes on while questions are open."""

    def __init__(self, *members: Holder, settled: Iterable[int] = (0, 1, 2), **case: object) -> None:
        self.members = {member.name: member for member in members}
        self.questions, self.now = Questions(), 0.0
        version = members[0].version
        plain = {
            "fragment": FRAGMENT,
            "version": version,
            "state_bytes": RULES.form.size_bytes,
            "result_bytes_most": RULES.form.part_bytes + 4096,
            "digests": {v: TRUTH.digest(v) for v in settled if v < version},
            "commits": {v: TRUTH.commit(v) for v in range(1, version + 1)},
            "next_state": RULES.after,
            "is_signed": lambda peer, digest, signature: signature == signature_of(peer, digest),
        }
        self.dispute = Dispute(DisputedVersion(**{**plain, **case}), self.questions)  # type: ignore[arg-type]

    @property
    def claims(self) -> dict[bytes, list[str]]:
        claims: dict[bytes, list[str]] = {}
        for member in self.members.values():
            claims.setdefault(member.digest, []).append(member.name)
        return claims

    def sits(self, most_s: float = 300.0, until: Callable[[], bool] = lambda: False) -> float:
        """Until it is over; how long that took."""
        while not self.dispute.step(self.claims, self.now) and not until():
            assert self.now < most_s, "it never ends"
            for name, fields in self.questions.due(set(self.members), self.now):
                self._answer(self.members[name], fields)
            answers = self.questions.take_answers()
            for answer in answers:
                assert self.dispute.on_answer(answer)
            self.now += 0.0 if answers else 1.0
        return self.now

    def _answer(self, member: Holder, fields: dict[str, object]) -> None:
        what, version = What(str(fields["what"])), int(str(fields["version"]))
        member.asked.append(what)
        if member.mute:
            return
        raw = member.shows(what, version, int(str(fields["chunk"]))) or b""
        signature = b""
        if what is What.HASHES and member.signs:
            signature = signature_of(member.name, member.digest)
        number = int(str(fields["question"]))
        for start in range(0, max(1, len(raw)), PART_BYTES):
            part = raw[start : start + PART_BYTES]
            shown = Shown(
                session=bytes(16), seq=1, question=number, start=start, total=len(raw), part=part,
                signature=signature,
            )  # fmt: skip
            self.questions.on_shown(member.name, shown, self.now)
