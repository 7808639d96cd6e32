"""What an archive of the demo's run costs, and its replay: `python -m farflung.benchmarks.replay`.

The run of `farflung demo` (its model, its three peers, nobody killed), with a checkpoint after each version and 21
versions, of which one peer archives the results.  Then every process of the run is gone, and
one process computes 20 versions anew.  Prints the command, the time, and the bytes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from farflung.console.demo import PEERS, RUN_TOML, Demo
from farflung.protocol.caps import si

ROUNDS = 21  # the first checkpoint is of version 1
CHECKPOINTS = "\n[checkpoint]\nevery_rounds = 1\nkeep = 1\n"


class ArchivedDemo(Demo):
    """One of its peers archives."""

    def archive_of(self, number: int) -> list[str]:
        place = str(self.folder / "kept")
        return ["--checkpoints", place, "--archive"] if number == 1 else []

    def run(self) -> None:
        toml = RUN_TOML.replace("rounds = 40", f"rounds = {ROUNDS}") + CHECKPOINTS
        coordinator = self.start_coordinator(toml)
        try:
            for number in range(1, PEERS + 1):
                self.start_peer(self.archive_of(number))
            for party in [*self.peers, coordinator]:
                if code := party.process.wait(300):
                    raise SystemExit(f"{party.name} ended with {code}:\n{party.log.read_text()[-2000:]}")
        finally:
            self.stop_everybody(coordinator)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        demo = ArchivedDemo(Path(folder))
        began = time.monotonic()
        demo.run()
        print(f"{PEERS} peers, {ROUNDS} versions in {time.monotonic() - began:.0f} s")
        kept = demo.folder / "kept"
        sizes = [file.stat().st_size for file in kept.rglob("*.round")]
        print(f"results: {len(sizes)} files, {si(sum(sizes))}B")
        words = ["audit", "--replay", str(kept), "--url", str(demo.url), str(demo.folder)]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "farflung", *words], capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - began
        print(re.sub(re.escape(folder), "FOLDER", f"farflung {' '.join(words)}: {seconds:.1f} s"))
        print("\n".join(line for line in done.stdout.splitlines() if line.startswith("missing")))
        print((done.stdout.splitlines() or [done.stderr])[-1])
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
