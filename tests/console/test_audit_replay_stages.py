"""The replay of a model that is cut into stages: each stage by itself, to the same bits, and one factor for all.

The archive is written by a peer's own hand in each stage, from a state that torch moves; the replay knows numpy alone.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from farflung.checkpoints.archive import Archive, RoundHead
from farflung.checkpoints.store import Store
from farflung.console.history.audit_replay import Factors, OtherFactor, ReplayOutcome, replay, sources_at
from farflung.console.history.history import History
from farflung.console.main import app
from farflung.protocol.errors import CheckpointError, UserError
from farflung.protocol.manifest import Manifest, OuterSection
from farflung.protocol.round_words import Commit, result_name
from rig.made_archive import RUN_ID, RUN_KEY, STAGED, STAGED_MODEL, KeptStages

OF_LOCAL_STEPS = STAGED.model_copy(
    update={
        "outer": OuterSection(step="nesterov", lr=0.6, momentum=0.7),
        "pipeline": STAGED.pipeline.model_copy(update={"mode": "local", "clip": 0.0}),
    }
)


def seven_versions(place: Path, manifest: Manifest = STAGED, lies_in: int = 0) -> KeptStages:
    """With checkpoints of versions 3 and 6; `lies_in`: there the coordinator's factor is one that fits nothing."""
    run = KeptStages(place / "kept", manifest)
    for version in range(1, 8):
        run.roll(version, 0.5 if version == lies_in else None)
        if version in (3, 6):
            run.save(version)
    run.close()
    return run


@pytest.fixture
def kept(tmp_path: Path) -> KeptStages:
    return seven_versions(tmp_path)


def replayed(place: str) -> tuple[ReplayOutcome, list[str]]:
    lines: list[str] = []
    return replay(sources_at(place, "", RUN_KEY, None), lines.append), lines


def test_P1_every_version_of_every_stage_is_computed_to_the_same_bits(kept: KeptStages) -> None:
    outcome, lines = replayed(kept.place)
    assert not outcome.difference and not outcome.gaps
    assert (outcome.replayed, outcome.settled) == (12, 3)  # 4 to 7 of three stages; 6 is signed
    assert outcome.told.endswith("settled by the run; 4 of 4 factors of [pipeline] clip made again")
    assert min(kept.factors.values()) < 1.0, "nothing was clipped: this shows nothing"
    for stage, peer in enumerate(kept.peers):
        read, *rolled = lines[5 * stage : 5 * stage + 5]
        assert read.startswith(f"version 3 of stage {stage}: read from the checkpoint")
        assert rolled[2].endswith("as the run signed it")
        digest = peer.state.digests[stage].hex()[:16]
        assert rolled[-1].startswith(f"version 7 of stage {stage}: digest {digest} as the archive has it")


def test_P1_so_are_stages_that_step_by_themselves(tmp_path: Path) -> None:
    outcome, lines = replayed(seven_versions(tmp_path, OF_LOCAL_STEPS).place)
    assert not outcome.difference and (outcome.replayed, outcome.settled) == (12, 3)
    assert outcome.told.endswith("settled by the run"), "no factor is spoken of: nothing is clipped"
    assert lines[-1].startswith("version 7 of stage 2")


def test_a_bit_that_is_turned_in_a_kept_result_is_damage_and_names_the_file(kept: KeptStages) -> None:
    file = kept.peers[1].file(1, 5)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"f01-v00000005.round: the result of chunk 2 is damaged"):
        replayed(kept.place)
    done = CliRunner().invoke(app, ["audit", "--replay", kept.place])
    assert isinstance(done.exception, CheckpointError) and "\n" not in str(done.exception)


def test_one_that_was_turned_with_its_hashes_is_found_by_version_stage_and_chunk(kept: KeptStages) -> None:
    def change(head: RoundHead, payloads: list[bytes]) -> tuple[RoundHead, list[bytes]]:
        payloads[1] = payloads[1][:40] + bytes([payloads[1][40] ^ 1]) + payloads[1][41:]
        return head, payloads

    kept.peers[1].rewrite(1, 5, change)
    outcome, lines = replayed(kept.place)
    assert outcome.difference.startswith("version 5, stage 1, chunk 3: the committed results lead to")
    assert lines[-1].startswith("version 4 of stage 1: digest")
    done = CliRunner().invoke(app, ["audit", "--replay", kept.place])
    assert done.exit_code == 1 and "DIFFERS  version 5, stage 1, chunk 3" in done.output


def test_a_factor_that_was_changed_in_the_archive_is_found(kept: KeptStages) -> None:
    def change(head: RoundHead, payloads: list[bytes]) -> tuple[RoundHead, list[bytes]]:
        commit = msgspec.structs.replace(head.commit, factor=0.5)
        return msgspec.structs.replace(head, commit=commit), payloads

    kept.peers[0].rewrite(0, 5, change)
    outcome, _ = replayed(kept.place)
    assert outcome.difference.startswith("version 5, stage 0, chunk 0: the committed results lead to")


def test_a_factor_that_all_stages_took_and_that_does_not_follow_from_their_results_is_found(
    tmp_path: Path,
) -> None:
    """Each stage alone is right: only the results of all of them tell."""
    run = seven_versions(tmp_path, lies_in=5)
    outcome, lines = replayed(run.place)
    assert outcome.difference.startswith(
        "version 5, stage 2: its commit multiplies by 0.5, its results make that 0."
    )
    assert lines[-1].startswith("version 4 of stage 2: digest")


def test_a_factor_that_is_not_the_one_of_the_coordinators_journal_is_found(
    kept: KeptStages, tmp_path: Path
) -> None:
    history = History(tmp_path)
    made = Archive(kept.place).head(RUN_ID.hex()[:8], (0, 1, 5)).commit
    told = history.eras[0].commits[1, 5] = {"result": result_name(made), "factor": made.factor}
    lines: list[str] = []
    assert not replay(sources_at(kept.place, "", RUN_KEY, history), lines.append).difference
    told["factor"] = 0.5
    outcome = replay(sources_at(kept.place, "", RUN_KEY, history), lines.append)
    assert outcome.difference == (
        "version 5, stage 1: its factor is not the one that the coordinator's journal has"
    )


def test_of_the_stages_that_are_there_each_is_replayed_and_who_may_have_the_rest_is_said(
    kept: KeptStages,
) -> None:
    for file in kept.peers[2].file(2, 4).parent.glob("*-f02-*"):
        file.unlink()
    kept.peers[1].file(1, 5).unlink()
    outcome, lines = replayed(kept.place)
    assert (
        not outcome.difference and outcome.replayed == 6
    )  # of stage 0 all four, of stage 1 versions 4 and 7
    assert [gap.partition(";")[0] for gap in outcome.gaps] == [
        "version 5 of stage 1 is not in the archive",
        "nothing of stage 2 is in the archive",
    ]
    assert outcome.told.endswith("0 of 4 factors of [pipeline] clip made again (the others need all stages)")
    assert sum(line.startswith("missing") for line in lines) == 2


def test_a_stage_without_a_checkpoint_is_named_and_so_is_a_place_with_nothing(kept: KeptStages) -> None:
    def remove(stage: int) -> None:
        for saved in Store(kept.place).list_saved().complete:
            if saved.manifest.first_fragment == stage:
                Store(kept.place).files.remove(saved.folder, "manifest.json")

    remove(1)
    outcome, _ = replayed(kept.place)
    assert outcome.replayed == 8
    assert outcome.gaps[0].startswith("no checkpoint of stage 1 from which version 1 follows")
    remove(0)
    remove(2)
    with pytest.raises(UserError, match="nothing can be replayed: no checkpoint of stage 0 from which"):
        replayed(kept.place)


def test_a_stage_goes_on_in_an_era_that_began_at_an_older_version(tmp_path: Path) -> None:
    """All stages went back to version 3, from different peers' checkpoints, and made 4 and 5 anew."""
    run = KeptStages(tmp_path / "kept")
    for version in (1, 2, 3):
        run.roll(version)
    run.save(3)
    before = [peer.state.chunk_bytes(chunk) for peer in run.peers for chunk in peer.fragments[0].chunks]
    run.roll(4)
    run.roll(5)
    run.go_back(before, era=1)
    run.roll(4)
    run.roll(5)
    run.close()
    outcome, lines = replayed(run.place)
    assert not outcome.difference and outcome.replayed == 9  # 5 was given up, and never archived
    assert sum(" in era 1: digest" in line for line in lines) == 6


def test_checkpoints_of_two_models_are_refused(kept: KeptStages, tmp_path: Path) -> None:
    other = msgspec.structs.replace(STAGED_MODEL, frozen=bytes([1] * 32))
    strange = KeptStages(tmp_path / "kept", model=other)
    for version in range(1, 6):
        strange.roll(version)
    strange.save(5)
    with pytest.raises(CheckpointError, match="these checkpoints are of different models; remove those of"):
        replayed(kept.place)


def test_stages_of_one_version_with_different_factors_are_told_apart_at_once() -> None:
    factors = Factors(STAGED)
    factors.hear(0, commit(1, 0, 0.25), [3601.0])
    with pytest.raises(OtherFactor, match=r"its commit multiplies by 0.5, that of stage 0 by 0.25"):
        factors.hear(0, commit(1, 2, 0.5), [0.0])
    factors.hear(0, commit(1, 1, 0.25), [0.0])
    with pytest.raises(OtherFactor, match=r"its commit multiplies by 0.25, its results make that 0.24996"):
        factors.hear(0, commit(1, 2, 0.25), [0.0])


def test_a_run_that_clips_nothing_has_no_factor() -> None:
    factors = Factors(OF_LOCAL_STEPS)
    factors.hear(0, commit(1, 0, 1.0), [9.0])
    with pytest.raises(OtherFactor, match=r"its commit multiplies by 0.5, and this run clips no batch"):
        factors.hear(0, commit(1, 1, 0.5), [9.0])
    assert factors.told == ""


def commit(version: int, stage: int, factor: float) -> Commit:
    return Commit(version, version, ("ann",), (1.0,), bytes(32), "int8", stage, factor)


def test_stages_archive_beside_each_other_in_one_folder(kept: KeptStages) -> None:
    names = sorted(file.name for file in (Path(kept.place) / f"{RUN_ID.hex()[:8]}-archive").glob("*.round"))
    assert len(names) == 21 and names[0] == "e0000-f00-v00000001.round"
