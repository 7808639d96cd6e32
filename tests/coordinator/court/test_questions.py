"""Questions: answers come in parts, late parts are asked for again, and nobody can make the court wait for ever."""

from __future__ import annotations

from farflung.coordinator.court.questions import ASK_AGAIN_S, PATIENCE_S, Questions, WantedProof
from farflung.protocol.limits import PART_BYTES, PARTS_AT_ONCE
from farflung.protocol.messages import Shown, What

WANTED = WantedProof(What.STATE, 0, 3, 7, most_bytes=30 * PART_BYTES)


def shown(number: int, start: int, total: int, part: bytes) -> Shown:
    return Shown(
        session=bytes(16), seq=1, question=number, start=start, total=total, part=part, signature=b""
    )


def give(questions: Questions, number: int, raw: bytes, start: int, count: int, now: float = 0.0) -> None:
    for at in range(start, min(len(raw), start + count * PART_BYTES), PART_BYTES):
        assert questions.on_shown("a", shown(number, at, len(raw), raw[at : at + PART_BYTES]), now)


def test_a_long_answer_comes_in_parts_and_the_rest_is_asked_for_at_once() -> None:
    questions, raw = Questions(), bytes(range(256)) * (PART_BYTES // 256) * (PARTS_AT_ONCE + 2) + b"end"
    number = questions.ask("a", WANTED, 0.0)
    assert [(of, fields["start"]) for of, fields in questions.due({"a"}, 0.0)] == [("a", 0)]
    give(questions, number, raw, 0, PARTS_AT_ONCE)
    asks = questions.due({"a"}, 0.1)
    assert [fields["start"] for _, fields in asks] == [PARTS_AT_ONCE * PART_BYTES]
    give(questions, number, raw, PARTS_AT_ONCE * PART_BYTES, 3)
    (answer,) = questions.take_answers()
    assert (answer.number, answer.of, answer.raw) == (number, "a", raw)
    assert not questions.asked


def test_a_lost_part_is_asked_for_again_and_one_out_of_order_is_not_taken() -> None:
    questions, raw = Questions(), bytes(2 * PART_BYTES)
    number = questions.ask("a", WANTED, 0.0)
    questions.due({"a"}, 0.0)
    assert not questions.on_shown("a", shown(number, PART_BYTES, len(raw), raw[PART_BYTES:]), 0.1)
    assert questions.due({"a"}, 0.1) == []
    assert [fields["start"] for _, fields in questions.due({"a"}, ASK_AGAIN_S)] == [0]
    give(questions, number, raw, 0, 2)
    assert questions.take_answers()[0].raw == raw


def test_who_shows_nothing_has_no_answer_but_who_is_away_is_waited_for() -> None:
    questions = Questions()
    questions.ask("a", WANTED, 0.0)
    for now in range(0, 100, 5):
        questions.due(set(), float(now))
    assert questions.take_answers() == []
    for now in range(100, int(101 + PATIENCE_S), 5):
        questions.due({"a"}, float(now))
    (answer,) = questions.take_answers()
    assert answer.raw is None and "showed nothing" in answer.why_none


def test_parts_of_another_length_or_too_many_bytes_are_no_answer() -> None:
    for total, part in ((PART_BYTES * 2, b"x"), (WANTED.most_bytes + 1, bytes(PART_BYTES)), (0, b"")):
        questions = Questions()
        number = questions.ask("a", WANTED, 0.0)
        assert questions.on_shown("a", shown(number, 0, total, part), 0.0)
        assert [answer.raw for answer in questions.take_answers()] == [None]


def test_only_the_one_that_was_asked_answers_and_only_once() -> None:
    questions = Questions()
    number = questions.ask("a", WANTED, 0.0)
    assert questions.ask("a", WANTED, 0.5) == number
    assert not questions.on_shown("b", shown(number, 0, 3, b"abc"), 0.0)
    assert questions.on_shown("a", shown(number, 0, 3, b"abc"), 0.0)
    assert not questions.on_shown("a", shown(number, 0, 3, b"abc"), 0.0)
    assert not questions.on_shown("a", shown(number + 1, 0, 3, b"abc"), 0.0)
