"""Three etcd on this machine, for a coordinator with a standby to be tried with: `make etcd`, until Ctrl-C.

    python benchmarks/etcd.py [--folder runs/etcd]

Their ports are 2379, 22379 and 32379 for clients, each with the next one for the others; what they keep stays in the
folder, and is there at the next start.  On three machines of their own: docs/operate.md.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from rig.etcd_cluster import EtcdCluster

PORTS = (2379, 22379, 32379)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "etcd")
    given = parser.parse_args()
    if shutil.which("etcd") is None:
        print("etcd is not installed; Debian has it as etcd-server", file=sys.stderr)
        return 2
    stops = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        with EtcdCluster(given.folder, 3, ["--auto-compaction-retention=1h"], PORTS, on_disk=True) as cluster:
            print(f"farflung coordinate --store {cluster.url()} run.toml", flush=True)
            signal.sigwait(stops)
    except AssertionError as error:
        print(f"etcd did not start: {error}; its logs are in {given.folder}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
