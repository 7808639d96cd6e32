"""P19: a wrong sum convicts its maker before anybody, offline; nothing that is made up convicts an honest owner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from farflung.console.main import app
from farflung.coordinator.court.proofs import (
    ChunkRules,
    FalseClaim,
    StepRules,
    WrongSum,
    proof_from_bytes,
    proof_to_bytes,
    step_factors,
    step_rules,
)
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.run.effects import KeepProof
from farflung.coordinator.run_files import EvidenceFolder
from farflung.peer.identity import Identity
from farflung.protocol.digests import root_of
from farflung.protocol.limits import PROOFS_KEPT
from farflung.protocol.outer_numbers import AdamWNumbers, MuonNumbers, StateForm, Tile
from farflung.protocol.signed_words import claim_part, results_part
from rig.court_scene import FRAGMENT, RULES, TRUTH, Holder, liar
from rig.dispute_scene import Court
from rig.made_sums import RUN_ID, MadeSums


def test_a_wrong_sum_convicts_its_maker() -> None:
    made = MadeSums(wrong=(1,))
    proof = proof_from_bytes(proof_to_bytes(made.proof(1)))
    assert proof.problem() == "" and proof.guilty == made.members[1]


def test_a_right_sum_convicts_nobody() -> None:
    assert MadeSums(wrong=(1,)).proof(0).problem() == "the sum is right"


def other_weights(made: MadeSums, proof: WrongSum) -> WrongSum:
    return replace(proof, results=replace(proof.results, weights=tuple(reversed((0.1, 0.2, 0.7)))))


def other_members(made: MadeSums, proof: WrongSum) -> WrongSum:
    """As if one of them had been left out."""
    results = replace(proof.results, weights=(*proof.results.weights[:2], 0.0))
    return replace(proof, results=results, said=proof.said[:2], contributions=proof.contributions[:2])


def other_codec(made: MadeSums, proof: WrongSum) -> WrongSum:
    return replace(proof, results=replace(proof.results, codec="bf16"))


def another_chunk(made: MadeSums, proof: WrongSum) -> WrongSum:
    return replace(proof, chunk=1)


def other_bytes(made: MadeSums, proof: WrongSum) -> WrongSum:
    return replace(proof, contributions=tuple(made.of_chunk(1)))


def other_lists(made: MadeSums, proof: WrongSum) -> WrongSum:
    """An author that is in league with the coordinator signs another list later on."""
    made.payloads[made.members[2]][0] = made.payloads[made.members[2]][1]
    lists = tuple(made.said(key) for key in made.keys)
    return replace(proof, said=lists, contributions=tuple(made.of_chunk(0)))


def a_list_of_another_round(made: MadeSums, proof: WrongSum) -> WrongSum:
    made.round_no = 2
    return replace(proof, said=tuple(made.said(key) for key in made.keys))


def a_list_that_another_signed(made: MadeSums, proof: WrongSum) -> WrongSum:
    forged = replace(proof.said[0], sent=proof.said[1].sent)
    return replace(proof, said=(forged, *proof.said[1:]))


def other_order(made: MadeSums, proof: WrongSum) -> WrongSum:
    return replace(proof, said=proof.said[::-1], contributions=proof.contributions[::-1])


def an_accuser_that_signs_for_it(made: MadeSums, proof: WrongSum) -> WrongSum:
    results = replace(proof.results, hashes=bytes(32))
    return replace(proof, results=results, signature=made.keys[2].sign(results_part(RUN_ID, results)))


def another_run(made: MadeSums, proof: WrongSum) -> WrongSum:
    return replace(proof, run_id=bytes(16))


def a_list_too_short(made: MadeSums, proof: WrongSum) -> WrongSum:
    return replace(proof, said=proof.said[:2])


FORGERIES: list[Callable[[MadeSums, WrongSum], WrongSum]] = [
    other_weights,
    other_members,
    other_codec,
    another_chunk,
    other_bytes,
    other_lists,
    a_list_of_another_round,
    a_list_that_another_signed,
    other_order,
    an_accuser_that_signs_for_it,
    another_run,
    a_list_too_short,
]


@pytest.mark.parametrize("forge", FORGERIES)
def test_nothing_that_is_made_up_convicts_an_honest_owner(
    forge: Callable[[MadeSums, WrongSum], WrongSum],
) -> None:
    made = MadeSums()
    forged = forge(made, made.proof(0))
    assert forged.problem() not in ("", "the sum is right"), "it is refused before anything is calculated"


def test_an_owner_that_signed_a_sum_of_no_contributions_is_convicted() -> None:
    """An honest one refuses such bytes when they come, so it never has a result."""
    made = MadeSums()
    made.payloads[made.members[1]][0] = b"no payload at all"
    assert made.proof(0).problem() == ""


# ---- claims about a state ------------------------------------------------------------------------------------


def claim_of(court: Court) -> FalseClaim:
    """What the run keeps of the one digest that its dispute refuted; all that the liar signs is signed by a key."""
    [(_, found)] = court.dispute.refuted.items()
    liar_key, host = Identity.generate(), Identity.generate()
    digest = root_of(found.claim.hashes)
    claim = FalseClaim(
        run_id=RUN_ID,
        era=0,
        fragment=FRAGMENT.number,
        version=3,
        chunk=FRAGMENT.index(found.chunk),
        maker=liar_key.public,
        claimed=b"".join(found.claim.hashes),
        claim=liar_key.sign(claim_part(RUN_ID, 0, FRAGMENT.number, 3, digest)),
        base=found.base,
        base_hashes=b"".join(found.base_hashes),
        before=found.before,
        results=found.results,
        factors=step_factors(RULES, found.chunk, found.factors),
        rules=step_rules(RULES, found.chunk),
        key=host.public,
    )
    return replace(claim, signature=host.sign(claim.signed_part()))


def test_P18_a_false_state_convicts_its_maker_also_where_the_step_depends_on_the_version() -> None:
    court = Court(Holder("ann"), liar("eve"))
    court.sits()
    claim = proof_from_bytes(proof_to_bytes(claim_of(court)))
    assert isinstance(claim, FalseClaim) and claim.problem() == ""
    assert claim.rules.adamw is not None and claim.rules.parts == 3


def test_a_true_state_convicts_nobody() -> None:
    court = Court(Holder("ann"), liar("eve"))
    court.sits()
    claim, host = claim_of(court), Identity.generate()
    maker, true = Identity.generate(), TRUTH.hashes(3)
    part = claim_part(RUN_ID, 0, FRAGMENT.number, 3, root_of(true))
    honest = replace(
        claim, maker=maker.public, claimed=b"".join(true), claim=maker.sign(part), key=host.public
    )
    assert replace(honest, signature=host.sign(honest.signed_part())).problem() == "the claim is right"
    other = replace(honest, factors=(1.0,) * len(honest.results))
    assert "signature does not fit its state" in other.problem(), "the run signs by what it multiplied"
    assert replace(other, signature=host.sign(other.signed_part())).problem() == "", "and that decides"
    fewer = replace(honest, factors=honest.factors[1:] + (1.0, 1.0))
    assert "one factor for each" in replace(fewer, signature=host.sign(fewer.signed_part())).problem()
    short = replace(honest, rules=replace(honest.rules, parts=2))
    assert "needs a larger state" in replace(short, signature=host.sign(short.signed_part())).problem()


def test_a_claim_about_matrices_says_which_rows_of_its_chunk_they_are() -> None:
    muon = MuonNumbers(AdamWNumbers(0.1, 0.1, 0, 9, 0.9, 0.95, 0.0), 0.95)
    rules = ChunkRules(
        muon, "fp32", StateForm(6, 3), lambda chunk: chunk == 1, lambda chunk: (Tile(1, 2, 2),)
    )
    told = step_rules(rules, 0)
    assert told.outer == muon and told.tiles == (Tile(1, 2, 2),) and told.tiles_fit
    assert step_rules(rules, 1).muon is None, "buffers take the mean"
    for wrong in ((Tile(3, 2, 2),), (Tile(0, 2, 2), Tile(3, 1, 2)), (Tile(7, 1, 1),)):
        assert not replace(told, tiles=wrong).tiles_fit
    court = Court(Holder("ann"), liar("eve"))
    court.sits()
    claim, host = claim_of(court), Identity.generate()
    false = replace(claim, key=host.public, rules=replace(claim.rules, tiles=(Tile(0, 99, 99),)))
    assert "do not lie in its chunk" in replace(false, signature=host.sign(false.signed_part())).problem()


def test_a_claim_has_factors_only_of_chunks_that_are_multiplied() -> None:
    plain = ChunkRules(RULES.outer, RULES.gather_codec, RULES.form, is_plain=lambda chunk: chunk == 3)
    assert step_factors(plain, 2, (1.0, 0.5)) == (1.0, 0.5)
    assert step_factors(plain, 3, (1.0, 0.5)) == step_factors(plain, 2, (1.0, 1.0)) == ()


def test_what_runs_signed_of_steps_without_a_second_moment_is_the_same_bytes_as_ever() -> None:
    plain = StepRules(True, 0.7, 0.9, "fp32", 4)
    told = {"nesterov": True, "lr": 0.7, "momentum": 0.9, "codec": "fp32", "elements": 4}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain)) == told


# ---- files, and the command --------------------------------------------------------------------------------


def kept(folder: Path, *proofs: WrongSum) -> list[Path]:
    folder.mkdir(exist_ok=True)
    signing = load_or_create(folder).signing
    assert signing is not None
    for proof in proofs:
        EvidenceFolder(folder / "evidence", RUN_ID, signing).keep(KeepProof(proof))
    return sorted((folder / "evidence").glob("*.proof"))


def test_a_file_convinces_somebody_who_was_not_there(tmp_path: Path) -> None:
    made = MadeSums(wrong=(2,))
    [path] = kept(tmp_path, made.proof(2))
    told = CliRunner().invoke(app, ["audit", "--evidence", str(path)])
    assert told.exit_code == 1, told.output
    assert (
        f"{made.members[2]} signed a wrong sum of 3 contributions: chunk 2 of version 1, fragment 0"
        in told.output
    )


def test_a_file_that_proves_nothing_says_why(tmp_path: Path) -> None:
    [path] = kept(tmp_path, MadeSums().proof(2))
    told = CliRunner().invoke(app, ["audit", "--evidence", str(path)])
    assert told.exit_code == 0 and "it proves nothing: the sum is right" in told.output


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x82", bytes(100), proof_to_bytes(MadeSums().proof(0))[:-1]])
def test_a_damaged_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "some.proof"
    path.write_bytes(raw)
    told = CliRunner().invoke(app, ["audit", "--evidence", str(path)])
    assert told.exit_code != 0 and told.exception is not None
    assert "cannot be read" in str(told.exception)


def test_so_many_proofs_are_kept_and_commits_do_not_push_them_out(tmp_path: Path) -> None:
    made = MadeSums(wrong=(0,))
    proofs = [replace(made.proof(0), chunk=at) for at in range(PROOFS_KEPT + 3)]
    assert len(kept(tmp_path, *proofs)) == PROOFS_KEPT
