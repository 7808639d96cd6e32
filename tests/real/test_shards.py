"""A run that names its data: token shards in S3, read there by one peer, and from a copy of its own by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from farflung.protocol.process import exit_codes

pytestmark = pytest.mark.slow

TEXT = b"Many people, each with one small computer, train one model together. " * 300


@pytest.mark.hard
@pytest.mark.forked_peers
def test_P7_one_reads_the_runs_shards_in_S3_and_the_other_a_copy_of_its_own(stage: Any, buckets: Any) -> None:
    pieces = {f"{number}.bin": TEXT[number * 5000 : number * 5000 + 5000] for number in range(3)}
    place = buckets.publish(pieces)
    copy = stage.folder / "copy"
    copy.mkdir()
    for name, piece in pieces.items():
        (copy / name).write_bytes(piece)
    stage.write_run(rounds=4, min_peers=2)
    toml: Path = stage.folder / "run.toml"
    named = f'[data]\nsource = "{place}/*.bin"\ndtype = "uint8"\n'
    toml.write_text(toml.read_text().replace("[data]\n", named))
    stage.environ = {"XDG_CACHE_HOME": str(stage.folder / "cache")}
    stage.coordinate("--exit-when-done")
    stage.join("ann")
    stage.join("bob", "--data", str(copy))
    assert [stage.wait(name) for name in ("ann", "bob", "coordinator")] == [0, 0, 0], stage.log("ann")[-2000:]
    ann, bob = (load_file(stage.model(name)) for name in ("ann", "bob"))
    assert all((ann[name] == bob[name]).all() for name in ann)
    fetched = sorted(path.name[33:] for path in (stage.folder / "cache" / "farflung" / "shards").glob("*-*"))
    assert fetched == ["0.bin", "1.bin", "2.bin"], "the one that has a copy fetches nothing"


@pytest.mark.hard
@pytest.mark.forked_peers
def test_a_peer_whose_copy_is_another_text_is_told_so(stage: Any, buckets: Any) -> None:
    place = buckets.publish({"0.bin": TEXT})
    other = stage.folder / "0.bin"
    other.write_bytes(TEXT.upper())
    stage.write_run(min_peers=1)
    toml: Path = stage.folder / "run.toml"
    named = f'[data]\nsource = "{place}/0.bin"\ndtype = "uint8"\n'
    toml.write_text(toml.read_text().replace("[data]\n", named))
    stage.environ = {"XDG_CACHE_HOME": str(stage.folder / "cache")}
    stage.coordinate()
    stage.join("ann")
    stage.until(lambda status: status["version"] >= 1, "ann has committed something")
    stage.join("bob", "--data", str(other))
    assert stage.wait("bob") == exit_codes.REFUSED, stage.log("bob")[-2000:]
    assert "data set has fingerprint" in stage.log("bob") and "Traceback" not in stage.log("bob")
