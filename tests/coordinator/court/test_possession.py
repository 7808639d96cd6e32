"""Possession: by the list of hashes and one chunk, which the nonce names; an echo, or another chunk, shows nothing."""

from __future__ import annotations

import pytest

from farflung.coordinator.court.possession import Held, PossessionCheck, shown_value
from farflung.coordinator.court.questions import PATIENCE_S, Answer, Questions
from farflung.protocol.digests import drawn_chunk, hash_bytes, keyed_hash
from farflung.protocol.messages import TAG_BYTES, Shown, What
from rig.court_scene import FRAGMENT, RULES, TRUTH

LIST = b"".join(TRUTH.hashes(3))
NONCES = [hash_bytes(bytes([number])) for number in range(6)]


class Check:
    """Of one member; `asks` is what it is asked now."""

    def __init__(self, nonce: bytes) -> None:
        self.questions, self.nonce = Questions(), nonce
        held = Held("eve", FRAGMENT, 3, TRUTH.digest(3), nonce, RULES.state_bytes)
        self.check = PossessionCheck(held, self.questions, 0.0)

    def asks(self, now: float = 0.0) -> list[tuple[object, object]]:
        return [(fields["what"], fields["chunk"]) for _, fields in self.questions.due({"eve"}, now)]

    def shows(self, raw: bytes) -> None:
        [number] = self.questions._open
        shown = Shown(
            session=bytes(16), seq=1, question=number, start=0, total=len(raw), part=raw, signature=b""
        )
        assert self.questions.on_shown("eve", shown, 0.0)
        self.hears()

    def hears(self) -> None:
        for answer in self.questions.take_answers():
            assert self.check.on_answer(answer, 0.0)

    @property
    def index(self) -> int:
        return drawn_chunk(self.nonce, FRAGMENT.count)


def test_the_nonces_of_these_tests_name_every_chunk() -> None:
    assert {Check(nonce).index for nonce in NONCES} == set(range(FRAGMENT.count))


@pytest.mark.parametrize("nonce", NONCES)
def test_P18_what_a_holder_shows_follows_from_the_chunk_that_the_nonce_names(nonce: bytes) -> None:
    at = Check(nonce)
    assert at.asks() == [(What.HASHES, FRAGMENT.first)]
    at.shows(LIST)
    assert at.asks() == [(What.STATE, FRAGMENT.first + at.index)] and not at.check.over
    at.shows(TRUTH.states[3][at.index])
    assert at.check.over and at.check.value == keyed_hash(nonce, TRUTH.states[3][at.index])
    assert not at.check.unproven


@pytest.mark.parametrize(
    "raw", [LIST[:-32], LIST + bytes(32), b"".join(TRUTH.hashes(2)), b"x" * len(LIST), b""]
)
def test_P18_another_list_than_the_settled_one_shows_nothing(raw: bytes) -> None:
    at = Check(NONCES[0])
    at.shows(raw)
    assert at.check.unproven and not at.check.value and at.asks() == []


def test_P18_another_chunk_or_an_older_one_shows_nothing() -> None:
    for nonce in NONCES:
        index = Check(nonce).index
        for raw in (
            TRUTH.states[2][index],
            TRUTH.states[3][(index + 1) % FRAGMENT.count],
            bytes(RULES.state_bytes),
            TRUTH.states[3][index][:-1],
        ):
            at = Check(nonce)
            at.shows(LIST)
            at.shows(raw)
            assert at.check.unproven == "the chunk that it shows of version 3 is not the run's"
            assert not at.check.value


def test_P18_who_does_not_answer_shows_nothing() -> None:
    at = Check(NONCES[0])
    at.asks()
    at.asks(PATIENCE_S)
    at.hears()
    assert at.check.unproven.startswith("it did not show that it holds version 3: it showed nothing for")


def test_an_answer_to_another_question_is_not_taken_for_this_one() -> None:
    at = Check(NONCES[0])
    [number] = at.questions._open
    wanted = at.questions._open[number].wanted
    for other in (Answer(number + 1, "eve", wanted, None), Answer(number, "ann", wanted, None)):
        assert not at.check.on_answer(other, 0.0) and not at.check.over


def test_what_is_over_asks_nothing_any_more() -> None:
    at = Check(NONCES[0])
    at.check.close()
    assert at.asks() == []


@pytest.mark.parametrize(
    "said", [b"", bytes(TAG_BYTES), NONCES[0], NONCES[0][:TAG_BYTES] + bytes(31), bytes(40)]
)
def test_P18_a_value_that_is_none_or_of_another_nonce_is_not_looked_at(said: bytes) -> None:
    assert shown_value(said, NONCES[0]) == b""


def test_P18_a_value_under_its_nonce_is() -> None:
    value = hash_bytes(b"value")
    assert shown_value(NONCES[0][:TAG_BYTES] + value, NONCES[0]) == value
    assert shown_value(NONCES[0][:TAG_BYTES] + value, NONCES[1]) == b""
