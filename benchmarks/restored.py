"""A coordinator that lost its disk: how long until the next commit, with the real program on loopback.

    python benchmarks/restored.py [--peers 2] [--how key copy] [--json]

The coordinator is killed in the middle of a run, its folder is taken away but for `coordinator.key` (key), or an older
state of its journal is put in its place (copy), and it is started again with `--restored`.  Figures: seconds from that
start until it lets peers in, and until the next commit; and how many committed rounds are lost, which must be none.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from moved import Party, Stage, free_port, until

from farflung.console.screen.status_client import StatusClient
from farflung.protocol.errors import FrameError, Refused, Unreachable

GOAL_S = 30.0
HOW = ("key", "copy")
SEALED = "sealed"


def status(stage: Stage) -> dict[str, Any]:
    """Empty while nobody answers, or the run is still being put together."""
    assert stage.url is not None
    try:
        with StatusClient(stage.url) as client:
            return client.fetch(2.0)
    except (Refused, Unreachable, FrameError):
        return {}


def held(stage: Stage, count: int) -> int:
    """The newest version that a peer made, by their event journals."""
    newest = 0
    for at in range(count):
        for line in (stage.folder / f"peer-{at}" / "identity.events.jsonl").read_text().splitlines():
            event = json.loads(line) if line.endswith("}") else {}
            newest = max(newest, event.get("version", 0) if event.get("event") == SEALED else 0)
    return newest


def restored(folder: Path, count: int, how: str) -> dict[str, float]:
    stage, port = Stage(folder), free_port()
    data = folder / "run.data"
    try:
        stage.coordinate(port, [])
        assert stage.url is not None
        for at in range(count):
            stage.join(f"peer-{at}", stage.url)
        until(lambda: status(stage).get("version", 0) >= 2, "the run has begun")
        stage.kill_coordinator()
        shutil.copytree(data, folder / "old", ignore=shutil.ignore_patterns("*.sock"))
        stage.coordinate(port, [])
        version = status(stage)["version"]
        until(lambda: status(stage).get("version", 0) >= version + 2, "it went on")
        stage.kill_coordinator()
        shutil.rmtree(data)
        if how == "copy":
            (folder / "old").rename(data)
        else:
            data.mkdir(mode=0o700)
            shutil.copy2(folder / "old" / "coordinator.key", data)
        began = time.monotonic()
        stage.coordinator = coordinate_restored(stage, port)
        opened_s = time.monotonic() - began
        first = status(stage)["version"]
        lost = max(0, held(stage, count) - first)
        until(lambda: status(stage).get("version", 0) > first, "the next commit")
        return {"opened": opened_s, "committed": time.monotonic() - began, "lost": float(lost)}
    finally:
        stage.close()


def coordinate_restored(stage: Stage, port: int) -> Party:
    """Returns when it lets peers in."""
    words = ["coordinate", str(stage.folder / "run.toml"), "--plain", "--json", "--restored"]
    party = stage._start(f"restored-{port}", [*words, "--listen", f"127.0.0.1:{port}"], subprocess.PIPE)
    assert party.process.stdout is not None
    if not party.process.stdout.readline():
        raise SystemExit(f"the coordinator did not start:\n{party.log.read_text()}")
    return party


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--how", nargs="+", choices=HOW, default=HOW)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    for how in asked.how:
        with tempfile.TemporaryDirectory() as folder:
            figures[how] = restored(Path(folder), asked.peers, how)
    if asked.json:
        print(json.dumps(figures))
    else:
        print(
            "| what was left | peers are in, s | next commit, s | rounds lost | goal |\n|---|---|---|---|---|"
        )
        for how, each in figures.items():
            left = {"key": "the key alone", "copy": "an old copy of the folder"}[how]
            print(
                f"| {left} | {each['opened']:.1f} | {each['committed']:.1f} | {each['lost']:.0f} | {GOAL_S:g} s, 0 |"
            )
    return 0 if all(each["committed"] <= GOAL_S and not each["lost"] for each in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
