"""Members before the court: true states and results of a small model, and holders that answer questions, truly or not.

For tests of disputes and of possession.  The second of two fragments is in dispute, so that an index that should be a
chunk of the model, or the reverse, is seen.  Three versions are committed; what each chunk becomes is calculated by the
court's own arithmetic, which tests of its own compare with the peers'.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from farflung.compression.plain_codecs import encode
from farflung.coordinator.court.proofs import ChunkRules
from farflung.protocol.digests import hash_bytes, keyed_hash, root_of
from farflung.protocol.manifest import Manifest, OuterSection, RoundSection
from farflung.protocol.messages import What
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
