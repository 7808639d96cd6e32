"""P18: who says that it holds a version shows the list of its hashes and one chunk, or does not hold it."""

from __future__ import annotations

import pytest

from farflung.coordinator.court.questions import (
    HoldingClaim,
    HoldingProof,
    MemberAnswer,
    Questions,
    WantedProof,
    shown_value,
)
from farflung.protocol.digests import drawn_chunk, hash_bytes, keyed_hash, root_of
from farflung.protocol.messages import TAG_BYTES, What
from farflung.protocol.model_schema import Fragment

CHUNKS, NONCE, OTHER_NONCE = 4, hash_bytes(b"a nonce"), hash_bytes(b"another nonce")
STATE = [bytes([chunk]) * 8 for chunk in range(CHUNKS)]
HASHES = [hash_bytes(chunk) for chunk in STATE]
FRAGMENT = Fragment(number=0, first=10, count=CHUNKS)
HELD = HoldingClaim("ann", FRAGMENT, 5, root_of(HASHES), NONCE, len(STATE[0]))
DRAWN = drawn_chunk(NONCE, CHUNKS)


class Asked(Questions):
    """Keeps what is asked; nobody is told."""

    def __init__(self) -> None:
        self.wanted: list[WantedProof] = []

    def ask(self, of: str, wanted: WantedProof, now: float) -> int:
        assert of == "ann"
        self.wanted.append(wanted)
        return len(self.wanted)

    def drop(self, number: int) -> None:
        pass


def check_of(*answers: bytes | None) -> tuple[HoldingProof, Asked]:
    asked = Asked()
    check = HoldingProof(HELD, asked, 0.0)
    for raw in answers:
        why_none = "" if raw is not None else "it has none"
        answer = MemberAnswer(len(asked.wanted), "ann", asked.wanted[-1], raw, b"", why_none)
        assert check.on_answer(answer, 0.0)
    return check, asked


def test_P18_the_list_and_the_chunk_that_the_nonce_names_prove_it() -> None:
    check, asked = check_of(b"".join(HASHES), STATE[DRAWN])
    assert [(w.what, w.chunk) for w in asked.wanted] == [(What.HASHES, 10), (What.STATE, 10 + DRAWN)]
    assert check.over and not check.unproven and check.value == keyed_hash(NONCE, STATE[DRAWN])


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ((None,), "did not show that it holds version 5: it has none"),
        ((b"".join(HASHES[:-1]),), "the hashes that it shows of version 5 are not the run's"),
        ((b"".join([*HASHES[:-1], HASHES[0]]),), "the hashes that it shows of version 5 are not the run's"),
        ((b"".join(HASHES), None), "did not show that it holds version 5: it has none"),
        ((b"".join(HASHES), STATE[DRAWN - 1]), "the chunk that it shows of version 5 is not the run's"),
    ],
)
def test_P18_anything_else_does_not(answers: tuple[bytes | None, ...], told: str) -> None:
    check, _ = check_of(*answers)
    assert check.over and not check.value and told in check.unproven


def test_P18_what_is_shown_under_another_nonce_is_nothing() -> None:
    value = keyed_hash(NONCE, STATE[DRAWN])
    assert shown_value(NONCE[:TAG_BYTES] + value, NONCE) == value
    assert shown_value(OTHER_NONCE[:TAG_BYTES] + value, NONCE) == b""
    assert shown_value(b"", NONCE) == b""
