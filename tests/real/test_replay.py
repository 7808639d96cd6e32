"""A run of real processes is over; one process without any of them computes all of its versions anew."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from safetensors import safe_open

pytestmark = pytest.mark.slow

ROUNDS = 21
DENSE = '[round]\ncodec = "int8"\ngather_codec = "int4"\n'
SPARSE = 'step = "sparse"\n[round]\n'  # behind [outer]


@pytest.mark.hard
@pytest.mark.forked_peers
@pytest.mark.parametrize("terms", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_P1_twenty_versions_of_a_run_are_computed_anew_to_the_same_digests(stage: Any, terms: str) -> None:
    stage.write_run(rounds=ROUNDS, fragments=2, every_rounds=1, sync_every=2)
    run_toml = stage.folder / "run.toml"
    run_toml.write_text(run_toml.read_text().replace("[round]\n", terms))
    stage.coordinate("--exit-when-done")
    place = str(stage.folder / "kept")
    stage.join("ann", "--checkpoints", place, "--archive")
    stage.join("bob")
    assert [stage.wait(name) for name in ("ann", "bob", "coordinator")] == [0, 0, 0]
    alone = stage.call("audit", "--replay", place, "--url", stage.url)
    assert alone.returncode == 0, alone.stderr
    assert "40 versions replayed, bit for bit the same" in alone.stdout
    with_journals = stage.call("audit", "--replay", place, str(stage.folder))
    assert with_journals.returncode == 0, with_journals.stderr
    *lines, told = with_journals.stdout.splitlines()
    assert told.startswith("40 versions replayed, bit for bit the same; 40 of them settled by the run")
    sealed = {
        (e["version"], e["fragment"]): e["digest"] for e in stage.events("bob") if e["event"] == "sealed"
    }
    for version in range(2, ROUNDS + 1):  # the first checkpoint is of version 1
        line = f"version {version}: digest {sealed[version, 0][:16]} as the run settled it"
        assert any(each.startswith(line) for each in lines)
    told = stage.call(
        "audit", "--provenance", str(stage.folder / "run.data/provenance.jsonl"), "--url", stage.url
    )
    assert told.returncode == 0, told.stdout + told.stderr
    # One fragment may be a version further when the other has had its rounds.
    versions = [int(each) for each in re.findall(r"in (\d+) versions", told.stdout)]
    assert len(versions) == 2 and min(versions) >= ROUNDS and f"version {max(versions)} of run" in told.stdout
    kept, model = str(stage.folder / "run.data/provenance.jsonl"), str(stage.model("exported"))
    words = ["checkpoint", "export", place, "--url", stage.url, "--provenance", kept, "--out", model]
    assert stage.call(*words).returncode == 0
    with safe_open(model, "pt") as file:
        facts = json.loads(file.metadata()["provenance"])
    assert facts["version"] >= ROUNDS and all(count >= ROUNDS for _, count in facts["peers"].values())
