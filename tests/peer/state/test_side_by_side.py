"""The outer state worked on by several threads: the same bytes everywhere as by one, whatever is asked in between."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from farflung.collectives.round.effects import Install, Measure, Merge, Roll, Weigh
from farflung.optim.outer import Nesterov
from farflung.peer.machine.effects import Encode
from farflung.peer.state.delta_encoder import CHUNKS_AT_ONCE, Encoded, Encoding
from farflung.peer.state.outer_state import Files, OuterState, unnamed_file
from farflung.peer.worker import Inbox, Pool, shares
from farflung.protocol.frames import Payload
from farflung.protocol.manifest import RoundSection
from farflung.protocol.model_schema import ModelSchema
from rig.residuals import residual_of

CHUNKS, ELEMENTS, ROUNDS, WEIGHTS = 18, 4096, 4, (0.5, 0.25, 0.25)
MODEL = ModelSchema((), ELEMENTS, CHUNKS, CHUNKS, bytes(32))


def random_values(seed: int) -> torch.Tensor:
    return torch.randn(CHUNKS * ELEMENTS, generator=torch.Generator().manual_seed(seed))


class Side:
    """What an agent does with its state in some rounds, asked at once and followed in the order of asking."""

    def __init__(self, threads: int, codec: str, folder: Path) -> None:
        self.inbox = Inbox()
        self.pool = Pool("arithmetic", self.inbox.submit, threads)
        self.marks: list[bool] = []
        files = Files(unnamed_file(folder), unnamed_file(folder))
        rules = RoundSection(codec=codec, gather_codec="sparse" if codec == "topk" else "int8")
        step = Nesterov(lr=0.7, momentum=0.9)
        self.state = OuterState(random_values(0), MODEL, rules, step, self.marks.append, files=files)
        self.told: list[object] = []
        self.codec = codec

    def done(self) -> list[object]:
        """All that was asked."""
        before = len(self.told)
        ended: list[bool] = []
        self.pool.submit(lambda: True, ended.append)
        while not ended:
            self.inbox.collect()
        return self.told[before:]

    def encoded(self, slot: torch.Tensor) -> dict[int, Payload]:
        order = tuple(reversed(range(CHUNKS)))
        encoding = self.state.encoding(slot, Encode(1, 0, self.codec, order, 0))
        self.pool.submit(encoding.begin)
        for first in encoding.firsts:
            self.pool.beside(("encode", first), partial(encoding.some, first), self._follow(encoding))
        self.pool.submit(encoding.end)
        payloads: dict[int, Payload] = {}
        for made in self.done():
            assert isinstance(made, tuple)
            payloads |= made[0]
        return payloads

    def _follow(self, encoding: Encoding) -> Callable[[Encoded], None]:
        def follow(made: Encoded) -> None:
            if encoding.is_wanted(made):
                self.told.append(made)

        return follow

    def round(self, version: int) -> None:
        sent = [self.encoded(random_values(100 * version))]
        state, pool, tell = self.state, self.pool, self.told.append
        others = [self._of_another(version, member) for member in (1, 2)]
        for chunk in range(CHUNKS):
            payloads = tuple(each[chunk] for each in (*sent, *others))
            pool.beside(chunk, partial(state.calculate, Merge(version, 0, chunk, payloads, WEIGHTS)), tell)
            pool.beside(chunk, partial(state.calculate, Weigh(version, chunk, 7, payloads)), tell)
        results = [each for each in self.done() if isinstance(each, bytes)]
        pool.submit(partial(state.resolve, random_values(100 * version), version % 2 == 0))
        pool.submit(partial(state.keep_before, 0, version - 1))
        for chunk, result in enumerate(results):
            pool.beside(chunk, partial(state.calculate, Measure(version, chunk, b"", result)), tell)
            pool.beside(chunk, partial(state.piece_bytes, chunk), tell)
            pool.beside(chunk, partial(state.roll, Roll(chunk, version, result)))
            pool.beside(chunk, partial(state.chunk_bytes, chunk), tell)
        pool.spread([partial(state.hash, part) for part in shares(range(CHUNKS), pool.size)])
        pool.submit(state.seal, tell)
        for chunk in range(CHUNKS):
            pool.submit(partial(state.before.shown, 0, chunk), tell)
        self.done()

    def _of_another(self, version: int, member: int) -> dict[int, Payload]:
        rules = RoundSection(codec="int8", gather_codec="int8")
        other = OuterState(torch.zeros(CHUNKS * ELEMENTS), MODEL, rules, Nesterov())
        effect = Encode(1, 0, "int8", tuple(range(CHUNKS)), 0)
        made = other.encode(random_values(100 * version + member), effect)
        return {index: payload for payloads, _ in made for index, payload in payloads.items()}

    def close(self) -> None:
        self.pool.close()
        self.inbox.close()


@pytest.fixture
def made(tmp_path: Path) -> Callable[[int, str], Side]:
    return lambda threads, codec: Side(threads, codec, tmp_path / str(threads))


@pytest.mark.parametrize("codec", ["int8", "int4", "topk", "fp32"])
def test_P1_rounds_end_in_the_same_bytes_whatever_the_number_of_threads(
    made: Callable[[int, str], Side], codec: str
) -> None:
    one, many = made(1, codec), made(4, codec)
    for side in (one, many):
        for version in range(1, ROUNDS + 1):
            side.round(version)
        side.close()
    assert len(one.told) >= 6 * CHUNKS * ROUNDS
    assert [_plain(each) for each in one.told] == [_plain(each) for each in many.told]
    assert one.state.digests == many.state.digests
    assert one.marks == many.marks == [True, False] * ROUNDS, "marked once, before anything changes"
    residuals = residual_of(one.state), residual_of(many.state)
    assert all(each is None for each in residuals) or torch.equal(*residuals)  # type: ignore[arg-type]


def _plain(told: object) -> object:
    if isinstance(told, tuple) and isinstance(told[0], dict):
        return {index: bytes(payload) for index, payload in told[0].items()}, told[1]
    return told


def test_pieces_that_are_installed_side_by_side_are_a_whole_version(
    made: Callable[[int, str], Side],
) -> None:
    donor, joiner = made(1, "int8"), made(4, "int8")
    donor.round(1)
    for chunk in range(CHUNKS):
        install = Install(chunk, 1, donor.state.piece_bytes(chunk))
        joiner.pool.beside(chunk, partial(joiner.state.install, install))
    joiner.pool.submit(joiner.state.seal, joiner.told.append)
    assert joiner.done() == [donor.state.digests[0]]
    donor.close()
    joiner.close()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_of_two_values_that_are_not_finite_the_first_in_the_order_is_told_and_what_was_lost_is_forgotten(
    made: Callable[[int, str], Side], codec: str
) -> None:
    side, slot = made(4, codec), random_values(1)
    side.encoded(random_values(2))
    side.pool.submit(partial(side.state.resolve, random_values(2), True))
    first, last = (
        3 * ELEMENTS + 5,
        (CHUNKS - CHUNKS_AT_ONCE) * ELEMENTS + 7,
    )  # the order is the other way round
    slot[first], slot[last] = math.nan, math.inf
    before = len(side.told)
    side.encoded(slot)
    told = [problem for _, problem in side.told[before:]]  # type: ignore[misc]
    assert told == [f"element {last} of the pseudo-gradient is inf"], "and nothing comes after it"
    assert residual_of(side.state) is None
    side.close()
