"""The all-reduce beside others': farflung, torch.distributed (gloo), hivemind's averager; loopback or a made-up WAN.

    python benchmarks/allreduce.py [--peers 2 4 8] [--mb 100] [--rounds 5] [--hivemind-python PATH] [--json] [--write]
    python benchmarks/allreduce.py --peers 4 --lab 200,100       # Mbit/s each way, round trip in ms
    python benchmarks/allreduce.py --peers 4 --lab 500/100,100   # Mbit/s down/up

Every row is one process per peer on this machine, medians over the rounds, the first round left out.  A round of
farflung encrypts, hashes, decides, commits durably and applies an outer step; gloo's does none of these, so gloo is
the floor and no rival.  hivemind needs an environment of its own (numpy < 2.4): name its Python.

`ideal` is 2 (n - 1) / n times the payload, over the rate of a line; on loopback there is no rate and no ideal.
`--lab` gives each peer a host of its own (docs/lab.md); the first one's also holds the coordinator.
`--write` puts the table into docs/performance.md, between its two markers.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from hosts import Hosts, Line, hosts_for

HERE = Path(__file__).resolve()
PAGE = HERE.parent.parent / "docs" / "performance.md"
MARK, LAB_MARK = "allreduce", "allreduce in the lab"
BYTES_A_VALUE = {"fp32": 4.0, "bf16": 2.0, "int8": 258 / 256, "int4": 4.25 / 8, "none": 4.0, "8-bit": 1.0}
TIMEOUT_S = 900.0


@dataclass
class Row:
    system: str
    codec: str
    peers: int
    mb: int
    seconds: float | None = None
    ideal_s: float | None = None
    sent_mb: float | None = None
    cpu_s: float | None = None
    error: float | None = None
    note: str = ""


def free_port(count: int = 1) -> int:
    """The first of so many free ports in a row."""
    for port in range(31000, 60000, count):
        try:
            for each in range(port, port + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", each))
        except OSError:
            continue
        return port
    raise SystemExit("no free ports")


def last_lines(processes: list[subprocess.Popen[str]]) -> list[dict[str, object]]:
    """The JSON object on the last line of each; whoever fails takes the others along."""
    end, found = time.monotonic() + TIMEOUT_S, []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
            if process.returncode:
                raise RuntimeError((err.strip().splitlines() or ["it said nothing"])[-1])
            found.append(json.loads(out.strip().splitlines()[-1]))
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return found


# ---- the three systems -------------------------------------------------------------------------------------------


def farflung(hosts: Hosts, row: Row, rounds: int) -> None:
    """One process per host, as on real hosts: the first serves, the others join."""
    bench = [sys.executable, "-m", "farflung", "bench", "allreduce"]
    where = f"{hosts.address(0)}:{free_port(3)}"
    words = ["--peers", str(row.peers), "--mb", str(row.mb), "--rounds", str(rounds), "--codec", row.codec]
    server = hosts.start(0, [*bench, "--serve", where, *words])
    processes = [server]
    assert server.stdout is not None
    try:
        first = server.stdout.readline()
        if not first:
            raise RuntimeError(server.stderr.read().strip() if server.stderr is not None else "")
        url = json.loads(first)["url"]
        processes += [hosts.start(n, [*bench, "--join", url]) for n in range(1, row.peers)]
    finally:
        found = last_lines(processes)[0]
    row.seconds, row.cpu_s, row.error = (
        found["median_seconds"],
        found["cpu_seconds_per_peer"],
        found["rel_error"],
    )
    row.sent_mb = found["tx_bytes_per_peer"] / 1e6
    if not found["identical"]:
        row.note = "peers ended with different bytes"


def gloo(hosts: Hosts, row: Row, rounds: int) -> None:
    master = f"tcp://{hosts.address(0)}:{free_port()}"
    words = [
        sys.executable,
        str(HERE),
        "worker-gloo",
        master,
        str(row.peers),
        str(row.mb),
        str(rounds),
        row.codec,
    ]
    take(row, last_lines([hosts.start(n, [*words, str(n)]) for n in range(row.peers)]))


def hivemind(hosts: Hosts, row: Row, rounds: int, python: str) -> None:
    words = [
        python,
        str(HERE.with_name("hivemind_worker.py")),
        str(row.peers),
        str(row.mb),
        str(rounds),
        row.codec,
    ]
    first = hosts.start(0, [*words, "0", hosts.address(0), ""])
    processes = [first]
    assert first.stdout is not None
    try:
        line = first.stdout.readline()
        if not line:
            raise RuntimeError("its first peer did not start")
        seed = json.loads(line)["maddr"]
        processes += [hosts.start(n, [*words, str(n), hosts.address(n), seed]) for n in range(1, row.peers)]
    finally:
        found = last_lines(processes)
    take(row, found)


def take(row: Row, found: list[dict[str, object]]) -> None:
    """A round takes as long as its slowest peer."""
    per_round = zip(*(one["seconds"] for one in found), strict=True)  # type: ignore[misc]
    row.seconds = statistics.median(max(seconds) for seconds in per_round)
    row.cpu_s = statistics.fmean(float(one["cpu_s"]) for one in found)  # type: ignore[arg-type]
    row.error = max(float(one["error"]) for one in found)  # type: ignore[arg-type]


def worker_gloo(master: str, peers: int, mb: int, rounds: int, codec: str, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=master, world_size=peers, rank=rank)
    dtype = torch.bfloat16 if codec == "bf16" else torch.float32
    vectors = [torch.randn(250_000 * mb, generator=torch.Generator().manual_seed(n)) for n in range(peers)]
    exact = torch.stack(vectors).double().mean(0) if peers * mb <= 800 else None
    mine = vectors[rank]
    del vectors
    seconds, cpu_at = [], 0.0
    for number in range(rounds + 1):
        dist.barrier()
        cpu_at = time.process_time() if number == 1 else cpu_at
        start = time.perf_counter()
        sent = mine.to(dtype) if dtype != torch.float32 else mine.clone()
        dist.all_reduce(sent)
        merged = sent.float().div_(peers)
        seconds.append(time.perf_counter() - start)
    error = float((merged - exact).norm() / exact.norm()) if exact is not None else float("nan")
    cpu_s = (time.process_time() - cpu_at) / rounds
    print(json.dumps({"seconds": seconds[1:], "cpu_s": cpu_s, "error": error}), flush=True)
    dist.destroy_process_group()


# ---- the table -----------------------------------------------------------------------------------------------------


def measured(hosts: Hosts, row: Row, rounds: int, python: str | None) -> Row:
    try:
        if row.system == "farflung":
            farflung(hosts, row, rounds)
        elif row.system == "gloo":
            gloo(hosts, row, rounds)
        elif python is None:
            row.note = "not installed"
        else:
            hivemind(hosts, row, rounds, python)
    except (RuntimeError, subprocess.TimeoutExpired, OSError) as error:
        row.note = f"fails: {str(error)[:90]}"
    return row


def rows_for(peers: int, mb: int, line: Line) -> list[Row]:
    kinds = [("farflung", c) for c in ("fp32", "int8", "int4")]
    kinds += [("gloo", c) for c in ("fp32", "bf16")] + [("hivemind", c) for c in ("none", "8-bit")]
    return [
        Row(s, c, peers, mb, ideal_s=line.ideal_s(peers, mb * 1e6 / 4 * BYTES_A_VALUE[c])) for s, c in kinds
    ]


def as_markdown(rows: list[Row]) -> str:
    lines = ["| system | codec | peers | seconds a round | ideal s | sent MB a peer | CPU s a peer | error |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        said = [row.note or shown(row.seconds, 2), shown(row.ideal_s, 2), shown(row.sent_mb, 1)]
        error = "" if row.error is None or row.error != row.error else f"{row.error:.1e}"
        lines.append(
            f"| {row.system} | {row.codec} | {row.peers} | {' | '.join(said)} | {shown(row.cpu_s, 2)} | {error} |"
        )
    return "\n".join(lines)


def shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def write_page(rows: list[Row], mark: str, command: str) -> None:
    text, begin, end = PAGE.read_text(encoding="utf-8"), f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"{PAGE}: the markers {begin} and {end} are not there")
    body = f"{begin}\n`{command}`: {rows[0].mb} MB of fp32 a peer.\n\n{as_markdown(rows)}\n{end}"
    PAGE.write_text(before + body + after, encoding="utf-8")


def main() -> None:
    if sys.argv[1:2] == ["worker-gloo"]:
        master, peers, mb, rounds, codec, rank = sys.argv[2:]
        worker_gloo(master, int(peers), int(mb), int(rounds), codec, int(rank))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lab", type=Line.parse, default=Line(), metavar="MBIT,RTT_MS")
    parser.add_argument("--hivemind-python", help="the Python of an environment with hivemind")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the processes started so far end with us
    rows: list[Row] = []
    for peers in asked.peers:
        for row in rows_for(peers, asked.mb, asked.lab):
            # A lab for each row: no row inherits what an earlier one left in its queues.
            with hosts_for(peers, asked.lab) as hosts:
                rows.append(measured(hosts, row, asked.rounds, asked.hivemind_python))
            print(
                f"{row.system} {row.codec} {peers}: {row.note or shown(row.seconds, 3)}",
                file=sys.stderr,
                flush=True,
            )
    if asked.write:
        counts, line = " ".join(map(str, asked.peers)), f" --lab {asked.lab}" if asked.lab.up_mbit else ""
        command = (
            f"python benchmarks/allreduce.py --peers {counts} --mb {asked.mb} --rounds {asked.rounds}{line}"
        )
        write_page(rows, LAB_MARK if line else MARK, command)
    print(json.dumps([asdict(row) for row in rows]) if asked.json else as_markdown(rows))


if __name__ == "__main__":
    main()
