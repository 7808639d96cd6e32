"""P19 in groups: a sum of either kind convicts its maker before anybody, and nothing that is made up does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from farflung.console.main import app
from farflung.coordinator.audits.audits import OneSum
from farflung.coordinator.court.proofs import (
    WrongSum,
    WrongSumOfSums,
    proof_from_bytes,
    proof_to_bytes,
)
from farflung.protocol.digests import hash_bytes
from farflung.protocol.round_words import THE_RESULT
from farflung.protocol.signed_words import inputs_of, results_part, sums_of_groups_part
from rig.made_mesh import MadeMesh
from rig.made_sums import RUN_ID

CHUNK = 1


def proof_of(made: MadeMesh, group: int = THE_RESULT) -> WrongSum | WrongSumOfSums:
    audited = OneSum(made.sums, CHUNK, group)
    return audited.proof(RUN_ID, dict(zip(audited.authors, made.of_chunk(CHUNK, group), strict=True)))


def of_result(made: MadeMesh) -> WrongSumOfSums:
    proof = proof_of(made)
    assert isinstance(proof, WrongSumOfSums)
    return proof


@pytest.mark.parametrize("group", [THE_RESULT, 0, 1])
def test_a_wrong_one_convicts_its_maker_also_when_it_is_read_again(group: int) -> None:
    made = MadeMesh(wrong=((CHUNK, group),))
    proof = proof_from_bytes(proof_to_bytes(proof_of(made, group)))
    assert proof.problem() == "" and proof.guilty == made.maker(CHUNK, group)


@pytest.mark.parametrize("group", [THE_RESULT, 0, 1])
def test_a_right_one_convicts_nobody(group: int) -> None:
    assert proof_of(MadeMesh(), group).problem() == "the sum is right"


def test_a_root_is_not_convicted_of_what_a_group_added_up_wrongly() -> None:
    made = MadeMesh(wrong=((CHUNK, 0),))
    assert proof_of(made).problem() == "the sum is right" and proof_of(made, 0).problem() == ""


def other_sums(made: MadeMesh, proof: WrongSumOfSums) -> WrongSumOfSums:
    return replace(proof, sums=tuple(made.of_chunk(2)))


def other_hashes(made: MadeMesh, proof: WrongSumOfSums) -> WrongSumOfSums:
    """As if it had used what an owner only says to have sent."""
    hashes = hash_bytes(made.of_chunk(2)[0]) + proof.inputs[32:]
    return replace(proof, inputs=hashes, sums=(made.of_chunk(2)[0], *proof.sums[1:]))


def a_group_less(made: MadeMesh, proof: WrongSumOfSums) -> WrongSumOfSums:
    return replace(proof, results=replace(proof.results, groups=(0,)), sums=proof.sums[:1])


def another_order(made: MadeMesh, proof: WrongSumOfSums) -> WrongSumOfSums:
    return replace(proof, sums=proof.sums[::-1])


def another_codec(made: MadeMesh, proof: WrongSumOfSums) -> WrongSumOfSums:
    return replace(proof, results=replace(proof.results, codec="bf16"))


def another_chunk(made: MadeMesh, proof: WrongSumOfSums) -> WrongSumOfSums:
    return replace(proof, chunk=0)


def another_run(made: MadeMesh, proof: WrongSumOfSums) -> WrongSumOfSums:
    return replace(proof, run_id=bytes(16))


def an_accuser_that_signs_for_it(made: MadeMesh, proof: WrongSumOfSums) -> WrongSumOfSums:
    results = replace(proof.results, hashes=bytes(32))
    return replace(proof, results=results, signature=made.keys[0].sign(sums_of_groups_part(RUN_ID, results)))


def what_it_signed_of_its_group(made: MadeMesh, proof: WrongSumOfSums) -> WrongSumOfSums:
    """Its other word, which is of the same shape where it counts: sums and results never stand for each other."""
    root = made.maker(CHUNK)
    word = made.word(root)
    results = replace(proof.results, hashes=word.hashes, inputs=word.inputs, chunks=word.chunks, codec="bf16")
    return replace(proof, results=results, signature=word.signature)


FORGERIES: list[Callable[[MadeMesh, WrongSumOfSums], WrongSumOfSums]] = [
    other_sums,
    other_hashes,
    a_group_less,
    another_order,
    another_codec,
    another_chunk,
    another_run,
    an_accuser_that_signs_for_it,
    what_it_signed_of_its_group,
]


@pytest.mark.parametrize("forge", FORGERIES)
def test_nothing_that_is_made_up_convicts_an_honest_root(
    forge: Callable[[MadeMesh, WrongSumOfSums], WrongSumOfSums],
) -> None:
    made = MadeMesh()
    assert forge(made, of_result(made)).problem() not in ("", "the sum is right")


def test_a_root_that_signed_a_result_of_what_are_no_sums_is_convicted() -> None:
    """An honest one refuses such bytes when they come, so it never has a result."""
    made = MadeMesh()
    of, root = of_result(made), made.maker(CHUNK)
    junk = b"no payload at all"
    hashes = hash_bytes(junk) + of.inputs[32:]
    results = replace(of.results, inputs=inputs_of([hashes[:32], hashes[32:]]))
    signed = made.key_of(root).sign(sums_of_groups_part(RUN_ID, results))
    false = replace(of, results=results, signature=signed, inputs=hashes, sums=(junk, *of.sums[1:]))
    assert false.problem() == ""
    assert results_part(RUN_ID, results) != sums_of_groups_part(RUN_ID, results)


@pytest.mark.parametrize("group", [THE_RESULT, 0])
def test_a_file_convinces_somebody_who_was_not_there(tmp_path: Path, group: int) -> None:
    made = MadeMesh(wrong=((CHUNK, group),))
    path = tmp_path / "some.proof"
    path.write_bytes(proof_to_bytes(proof_of(made, group)))
    told = CliRunner().invoke(app, ["audit", "--evidence", str(path)])
    assert told.exit_code == 1, told.output
    of = "2 groups' sums" if group < 0 else "3 contributions"
    assert f"{made.maker(CHUNK, group)} signed a wrong sum of {of}: chunk 1 of version 1" in told.output
