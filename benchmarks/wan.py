"""The data plane over long lines, in the lab: what rounds take, beside what the lines alone would take.

    python benchmarks/wan.py [ROW ...] [--rounds 4] [--mb N] [--peers N] [--codec fp32] [--congestion reno] [--json]
    python benchmarks/wan.py --list; --buffers keeps the kernel's own bounds of TCP buffers

Each row is one run of the real program (lab_run.py) or two that are compared, medians over the rounds, the first round
left out.  `ideal` is 2 (n - 1) / n times the payload over the rate; the goal of a round is 1.15 times that and six
round trips.  `beside`: plain sockets, unencrypted, that move the same bytes all to all in the next minute.  `tails`: by
how long the last peer's scatter, and its last result after the decision, come after those of the one in the middle.
All hosts, their peers and the router share this machine: `late` is by how long the router was ever late with a packet.
Where that is many milliseconds, or `cpu` (CPU seconds of a peer in a round) comes near to the round, the machine is
measured and not the line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from farflung.console.bench.bench import BenchOptions
from farflung.console.bench.figures import peer_of
from rig.lab.emulator import HostSpec, Lab
from rig.lab_run import Found, Setting, allowed_congestion, run, use_congestion

PLAIN = str(Path(__file__).resolve().with_name("plain_sockets.py"))
RTT_MS = 100.0
FAST_MBIT = 1000.0
BYTES_A_VALUE = {"fp32": 4.0, "int8": 258 / 256}  # of rows that are held against an ideal
COORDINATOR = HostSpec("coordinator", FAST_MBIT, FAST_MBIT, RTT_MS / 4)


@dataclass(frozen=True)
class Asked:
    rounds: int
    mb: int | None
    peers: int | None
    congestion: str
    kernel_buffers: bool
    codec: str


@dataclass
class Row:
    name: str
    what: str
    got: str
    ideal: str
    goal: str
    met: bool
    late_ms: float = 0.0
    cpu_s: float = 0.0


def setting(
    asked: Asked, hosts: list[HostSpec], mb: int, codec: str = "int8", kill_at: float | None = None
) -> Setting:
    options = BenchOptions(
        peers=len(hosts), mb=asked.mb or mb, rounds=asked.rounds, codec=asked.codec or codec, kill_at=kill_at
    )
    buffers = None if asked.kernel_buffers else 64 << 20
    return Setting(options, hosts, COORDINATOR, congestion=asked.congestion, tcp_buffer_bytes=buffers)


def equal(asked: Asked, peers: int, down: float, up: float | None = None, **more: float) -> list[HostSpec]:
    return [
        HostSpec(f"peer-{number}", up or down, down, RTT_MS / 4, **more)
        for number in range(asked.peers or peers)
    ]


def ideal_s(of: Setting, mbit: float) -> float:
    peers = len(of.hosts)
    return 8 * 2 * (peers - 1) / peers * payload_bytes(of) / (mbit * 1e6)


def payload_bytes(of: Setting) -> float:
    return of.options.mb * 1e6 / 4 * BYTES_A_VALUE[of.options.codec]


def row_of(name: str, what: str, found: Found, got: str, ideal: str, goal: str, met: bool) -> Row:
    late_ms = 1000 * found.effort.worst_late_s
    return Row(name, what, got, ideal, goal, met, late_ms, found.result["cpu_seconds_per_peer"] or 0.0)


def shape(of: Setting) -> str:
    spec = of.hosts[0]
    loss = f", {100 * spec.loss:g} % loss" if spec.loss else ""
    kind = f", {of.congestion}" if of.congestion else ""
    line = f"{spec.down_mbit:g}/{spec.up_mbit:g} Mbit/s, {4 * spec.delay_ms:g} ms{loss}{kind}"
    return f"{len(of.hosts)} peers, {line}, {of.options.mb} MB {of.options.codec}"


def a_round(name: str, of: Setting, mbit: float) -> list[Row]:
    found = run(of)
    seconds, least = found.result["median_seconds"], ideal_s(of, mbit)
    goal = 1.15 * least + 6 * RTT_MS / 1000
    phases = ", ".join(
        f"{k} {v:.2f}" for k, v in found.result["phases"].items() if k not in ("seal", "commit")
    )
    tails = ", ".join(f"{tail:.2f}" for tail in tails_of(found, of))
    got = f"{seconds:.2f} s ({phases}; tails {tails})"
    ours = row_of(name, shape(of), found, got, f"{least:.2f} s", f"{goal:.2f} s", seconds <= goal)
    plain = statistics.median(rounds_of_plain_sockets(of))
    beside = f"{seconds:.2f} s, theirs {plain:.2f} s ({seconds / plain:.2f} x)"
    what = "the same bytes over plain sockets, unencrypted, all to all, a minute later"
    return [ours, Row(f"{name}, beside", what, beside, f"{least:.2f} s", "0.9 x", seconds <= 0.9 * plain)]


def rounds_of_plain_sockets(of: Setting) -> list[float]:
    """The seconds of each round after the first, from the first host's beginning to the last one's end."""
    piece = round(payload_bytes(of) / len(of.hosts))
    with Lab(of.hosts, of.seed, of.tcp_buffer_bytes) as lab:
        hosts = [lab.hosts[spec.name] for spec in of.hosts]
        for host in hosts:
            use_congestion(host, of.congestion)
        words = [str(of.options.rounds + 1), str(piece), *(host.address for host in hosts)]
        nodes = [
            host.popen([sys.executable, "-S", PLAIN, str(number), *words], stdout=subprocess.PIPE, text=True)
            for number, host in enumerate(hosts)
        ]
        told = [json.loads(node.communicate(timeout=of.timeout_s)[0]) for node in nodes]
    spans = [*zip(*told, strict=True)][1:]
    return [max(end for _, end in each) - min(begin for begin, _ in each) for each in spans]


def tails_of(found: Found, of: Setting) -> tuple[float, float]:
    """By how long the last peer's scatter, and gather, came after that of the one in the middle: means of rounds."""
    rounds = [*zip(*(found.phases(spec.name) for spec in of.hosts), strict=False)]
    scatters = [[held - encoded for _, encoded, held, _, _ in each] for each in rounds]
    gathers = [[results - decided for *_, decided, results in each] for each in rounds]
    late = ([max(took) - statistics.median(took) for took in phase] for phase in (scatters, gathers))
    scatter, gather = (statistics.mean(each) if each else 0.0 for each in late)
    return scatter, gather


# ---- what passed the line ------------------------------------------------------------------------------------------


def shares_of_line(found: Found, of: Setting) -> list[float]:
    """Of each round of each peer, scatter and gather, the busier direction's share of the line while it lasted."""
    shares = []
    for spec in of.hosts:
        for begin, end in found.transfers(spec.name):
            if end - begin > 2 * RTT_MS / 1000:
                up = found.wire.rate_mbit(spec.name, 0, begin, end) / spec.up_mbit
                down = found.wire.rate_mbit(spec.name, 1, begin, end) / spec.down_mbit
                shares.append(max(up, down))
    return shares


def share_row(name: str, of: Setting) -> list[Row]:
    found = run(of)
    shares = shares_of_line(found, of)
    median = statistics.median(shares) if shares else 0.0
    what = shape(of) + (", the kernel's own buffers" if of.tcp_buffer_bytes is None else "")
    got = f"{100 * median:.0f} % of the line (best {100 * max(shares, default=0):.0f} %)"
    return [row_of(name, what, found, got, "100 %", "80 %", median >= 0.8)]


def loss(asked: Asked) -> list[Row]:
    rows: list[Row] = []
    for congestion in [asked.congestion] if asked.congestion else allowed_congestion():
        clean = replace(setting(asked, equal(asked, 2, 200), 200), congestion=congestion)
        lossy = replace(clean, hosts=[replace(spec, loss=0.0025) for spec in clean.hosts])
        medians = []
        for of in (clean, lossy):
            found = run(of)
            medians.append(statistics.median(shares_of_line(found, of)))
        share = medians[1] / medians[0]
        got = f"{100 * share:.0f} % ({100 * medians[1]:.0f} % of the line, lossless {100 * medians[0]:.0f} %)"
        rows.append(
            row_of("loss", shape(lossy), found, got, "100 %", "60 % of the lossless rate", share >= 0.6)
        )
    return rows


def death(name: str, asked: Asked, kill_at: float) -> list[Row]:
    undisturbed = run(setting(asked, equal(asked, 4, 100), 60)).result["median_seconds"]
    of = setting(replace(asked, rounds=max(3, asked.rounds)), equal(asked, 4, 100), 60, kill_at=kill_at)
    found = run(of)
    killed, goal = found.result["killed"], 1.6 * undisturbed + 1
    got = (
        f"{killed['seconds']:.2f} s (killed at {killed['at']:.2f}, {found.result['aborted_rounds']} aborted)"
    )
    return [
        row_of(
            name, shape(of), found, got, f"{undisturbed:.2f} s", f"{goal:.2f} s", killed["seconds"] <= goal
        )
    ]


def slow(asked: Asked) -> list[Row]:
    """One line ten times slower.  Owning nothing, it must still send and fetch its own vector: that is the ideal."""
    rows = []
    hosts = equal(asked, 8, 200)
    hosts[-1] = replace(hosts[-1], up_mbit=20, down_mbit=20)
    for codec in ("int8", "auto"):
        of = setting(asked, hosts, 40, codec)
        if codec == "auto":
            of = replace(of, options=replace(of.options, gather_codec="int8"))
        found = run(of)
        payload = of.options.mb * 1e6 / 4 * BYTES_A_VALUE["int8"]
        own_s = 2 * 8 * payload / 20e6
        even_s = ideal_s(replace(of, options=replace(of.options, codec="int8")), 20)
        seconds, goal = found.result["median_seconds"], 1.15 * own_s + 6 * RTT_MS / 1000
        owned = [e["owned"] for e in found.events["peer-0"] if e["event"] == "plan"]
        got = f"{seconds:.2f} s {found.result['seconds']} (slowest owns {min(owned[-1])} of {sum(owned[-1])} chunks)"
        what = f"{shape(of)}, the last at 20/20"
        ideal = f"{own_s:.2f} s (with even shares {even_s:.1f} s)"
        rows.append(row_of("slow", what, found, got, ideal, f"{goal:.2f} s", seconds <= goal))
    return rows


def one_slow(asked: Asked) -> list[Row]:
    """One of six at 5 Mbit/s up and 20 down: the others' rounds beside those that they make without it, and how much of
    what it computed counts.  With other sizes than 100 MB the time between rounds is shorter or longer alike."""
    hosts = equal(asked, 6, 200)
    hosts[-1] = replace(hosts[-1], up_mbit=5, down_mbit=20)
    of = setting(asked, hosts, 100, "auto")
    pause_s = 20.0 * of.options.mb / 100
    options = replace(
        of.options,
        codec="auto",
        gather_codec="int8",
        pause_s=pause_s,
        waits_for=2,
        grace_s=10.0,
        keep_results=8,
    )
    with_it = replace(of, options=options, timeout_s=120 + (asked.rounds + 1) * (pause_s + 30))
    without = replace(with_it, hosts=hosts[:-1], options=replace(options, peers=len(hosts) - 1))
    found, alone = run(with_it), run(without)
    fast = [spec.name for spec in hosts[:-1]]
    took, usual = (statistics.median(rounds_of(each, fast)) for each in (found, alone))
    told = found.told[hosts[-1].name]
    share, ratio = told["counted"] / told["computed"], took / usual
    got = f"{took:.2f} s instead of {usual:.2f} s ({ratio:.2f} x), {100 * share:.0f} % of its tokens count"
    what = f"{shape(with_it)}, the last at 5/20, {pause_s:g} s between rounds"
    met = ratio <= 1.3 and share >= 0.8
    return [row_of("one-slow", what, found, got, f"{usual:.2f} s, 100 %", "1.3 x, 80 %", met)]


def rounds_of(found: Found, hosts: list[str]) -> list[float]:
    """The seconds of each round after the first, as the slowest of these hosts saw it."""
    peers = [peer_of(found.events[name]).rounds for name in hosts]
    common = set.intersection(*(set(rounds) for rounds in peers))
    return [max(rounds[version].seconds for rounds in peers) for version in sorted(common) if version]


def cap(name: str, asked: Asked, way: int) -> list[Row]:
    variable = ("FARFLUNG_UPLOAD_LIMIT", "FARFLUNG_DOWNLOAD_LIMIT")[way]
    of = setting(asked, equal(asked, 2, 200), 80)
    of = replace(of, environ={"peer-1": {variable: "20 Mbit/s"}})
    found = run(of)
    rates = []
    for begin, end in found.transfers("peer-1" if way else "peer-0"):
        rates.append(found.wire.rate_mbit("peer-1", way, begin, end))
    median = statistics.median(rates)
    got = f"{median:.1f} Mbit/s ({min(rates):.1f} to {max(rates):.1f})"
    what = f"{shape(of)}, one peer's {('upload', 'download')[way]} capped at 20"
    return [row_of(name, what, found, got, "20 Mbit/s", "19 to 21", 19 <= median <= 21)]


def control(asked: Asked) -> list[Row]:
    rows = []
    for congestion in [asked.congestion] if asked.congestion else allowed_congestion():
        for queue_s in (0.1, 1.0):
            hosts = equal(asked, 3, 10, queue_kb=queue_s * 1250)
            of = replace(setting(replace(asked, rounds=3 * asked.rounds), hosts, 6), congestion=congestion)
            found = run(of)
            told, goal_s = found.result["control"], 0.25 + RTT_MS / 1000
            p99, median, most = (round(1000 * told[key]) for key in ("p99_s", "median_s", "most_s"))
            got = f"{p99} ms (median {median}, most {most}"
            got += f", {told['beats']} beats, contact lost {found.result['lost_contact']} times)"
            what = f"{shape(of)}, queues of {queue_s:g} s"
            met = told["p99_s"] <= goal_s and not found.result["lost_contact"]
            ideal = f"{RTT_MS:g} ms"
            rows.append(row_of("control", what, found, got, ideal, f"p99 {1000 * goal_s:.0f} ms", met))
    return rows


def spot_checked(asked: Asked) -> list[Row]:
    """What spot checks of sums after the commit cost, at the default share: the same run with none and with them.

    Turn by turn, twice each, since this machine's speed drifts; the medians are over all rounds of a kind.
    """
    mb, mbit = (
        100,
        50,
    )  # so slow that the lines are the limit, and not two cores that run all peers and the router
    checked = setting(asked, equal(asked, 4, mbit), mb)
    plain = replace(checked, options=replace(checked.options, audit=0.0))
    found = [run(of) for of in (plain, checked, checked, plain)]
    pairs = [(found[0], found[3]), (found[1], found[2])]
    before, after = (statistics.median([s for one in two for s in one.result["seconds"]]) for two in pairs)
    sent = [statistics.mean(one.result["tx_bytes_per_peer"] for one in two) for two in pairs]
    more, bytes_more = after / before - 1, sent[1] / sent[0] - 1
    got = f"{after:.2f} s instead of {before:.2f} s ({100 * more:+.1f} %), {100 * bytes_more:+.1f} % bytes"
    what = f"{shape(checked)}, a share of {checked.options.audit:g} of the chunks merged again by another one"
    met = more <= 0.02 and bytes_more <= 0.02
    return [row_of("spot-checked", what, found[1], got, "+0 %", "+2 % time, +2 % bytes", met)]


def foreseen(asked: Asked) -> list[Row]:
    """What it gains that results leave before the decision: the same run without that and with it, turn by turn."""
    early = setting(asked, equal(asked, 4, 200), 100)
    late = replace(early, foresees=False)
    found = [run(of) for of in (late, early, early, late)]
    pairs = [(found[0], found[3]), (found[1], found[2])]
    before, after = (statistics.median([s for one in two for s in one.result["seconds"]]) for two in pairs)
    each = ", ".join(f"{statistics.median(one.result['seconds']):.2f}" for one in found)
    gain = 1 - after / before
    got = (
        f"{after:.2f} s instead of {before:.2f} s ({100 * gain:+.1f} %; without, with, with, without: {each})"
    )
    return [row_of("foreseen", shape(early), found[1], got, "", "5 % of a round", gain >= 0.05)]


def sparse(asked: Asked) -> list[Row]:
    """Home lines: few values both ways, beside the same rounds in int8."""
    int8 = setting(asked, equal(asked, 4, 20, 5), 40)
    few = replace(int8, options=replace(int8.options, codec="topk"))
    found, dense = run(few), run(int8)
    seconds, before = found.result["median_seconds"], dense.result["median_seconds"]
    sent, more = found.result["tx_bytes_per_peer"] / 1e6, dense.result["tx_bytes_per_peer"] / 1e6
    got = f"{seconds:.2f} s instead of {before:.2f} s (1/{before / seconds:.1f}), {sent:.1f} MB instead of {more:.1f}"
    return [row_of("sparse", shape(few), found, got, "", "1/8", 8 * seconds <= before)]


ROWS: dict[str, Callable[[Asked], list[Row]]] = {
    "even": lambda asked: a_round("even", setting(asked, equal(asked, 4, 200), 100), 200),
    # A quarter of the rate: here the lines are the limit, and not two cores that run four peers and the router.
    "even-50": lambda asked: a_round("even-50", setting(asked, equal(asked, 4, 50), 100), 50),
    "asymmetric": lambda asked: a_round("asymmetric", setting(asked, equal(asked, 8, 500, 100), 100), 100),
    "gigabit": lambda asked: share_row("gigabit", setting(asked, equal(asked, 2, 1000), 400, "fp32")),
    "loss": loss,
    "death-scatter": lambda asked: death("death-scatter", asked, 0.5),
    "death-gather": lambda asked: death("death-gather", asked, 1.5),
    "slow": slow,
    "one-slow": one_slow,
    "cap-up": lambda asked: cap("cap-up", asked, 0),
    "cap-down": lambda asked: cap("cap-down", asked, 1),
    "control": control,
    "spot-checked": spot_checked,
    "foreseen": foreseen,
    "sparse": sparse,
}


def as_markdown(rows: list[Row]) -> str:
    lines = [
        "| row | what | measured | ideal | goal | met | late ms | cpu s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        met = "yes" if row.met else "**no**"
        cells = (
            row.name,
            row.what,
            row.got,
            row.ideal,
            row.goal,
            met,
            f"{row.late_ms:.0f}",
            f"{row.cpu_s:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"which; all if none is named: {', '.join(ROWS)}"
    )
    parser.add_argument("--list", action="store_true", help="the names of the rows")
    parser.add_argument("--rounds", type=int, default=4, help="to measure; one more warms up")
    parser.add_argument("--mb", type=int, help="of fp32 a peer, instead of the row's own")
    parser.add_argument("--peers", type=int, help="instead of the row's own")
    parser.add_argument("--congestion", default="", help="of TCP in every host, such as reno")
    parser.add_argument("--codec", default="", help="instead of the row's own: int8 or fp32")
    parser.add_argument("--buffers", action="store_true", help="keep the kernel's own bounds of TCP buffers")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    unknown = set(words.rows) - set(ROWS)
    if unknown:
        raise SystemExit(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if words.codec and words.codec not in BYTES_A_VALUE:
        raise SystemExit(f"--codec {words.codec}: there are {', '.join(BYTES_A_VALUE)}")
    if words.list:
        print("\n".join(ROWS))
        return
    asked = Asked(words.rounds, words.mb, words.peers, words.congestion, words.buffers, words.codec)
    rows: list[Row] = []
    for name in words.rows or ROWS:
        rows += ROWS[name](asked)
        print(f"{name}: {rows[-1].got}", file=sys.stderr, flush=True)
    print(json.dumps([asdict(row) for row in rows]) if words.json else as_markdown(rows))


if __name__ == "__main__":
    main()
