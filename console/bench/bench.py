"""`farflung bench allreduce`: rounds of the real program with synthetic tensors, on one machine or on many.

Called by the command line.  It starts the real coordinator and, for each peer, a trainer without a model
(console/bench/trainer.py) that starts the real agent; it then reads the agents' event logs.  With `--serve` the
coordinator and one peer run here, and every other host brings one more with `--join`.
Must not know how a round works.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

import zmq

from farflung.console.bench.figures import Killed, result_of
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.door.listener import ListenOn
from farflung.peer.local.folder import sweep_stale
from farflung.protocol.errors import FarflungError, Unreachable, UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import CHUNKS_PER_FRAGMENT, FRAGMENTS_MAX, MEMBERS_PER_ROUND
from farflung.protocol.manifest import Manifest, MergeSection, ResultCodecName
from farflung.protocol.process.journal import JOURNAL_VARIABLE, Follower
from farflung.protocol.process.sockets import CLIENT, REPORTS_SERVER, curve_client, curve_server, opened

# ---- exchange ----------------------------------------------------------------------------------------------
# How the hosts of one bench tell their figures to the one that serves.
#
# One CURVE socket, two ports above the coordinator's door, with the
# coordinator's own key: a caller that has the join URL can check whom it talks to. Must not know what the
# figures mean.

ABOVE_THE_DOOR = 2
SEND_S = 60.0


@dataclass(frozen=True)
class BenchLine:
    port: int

    @classmethod
    def of(cls, url: JoinUrl) -> BenchLine:
        return cls(url.port + ABOVE_THE_DOOR)


class Collector:
    """Use as a context manager: the port is open inside it."""

    def __init__(self, data: Path, host: str, line: BenchLine) -> None:
        self._keys = load_or_create(data)
        self._host = host
        self._line = line

    def __enter__(self) -> Collector:
        self._context = zmq.Context()
        self._socket = opened(self._context, zmq.REP, REPORTS_SERVER, curve_server(self._keys.secret))
        try:
            self._socket.bind(f"tcp://{self._host}:{self._line.port}")
        except zmq.ZMQError as error:
            self.__exit__(None, None, None)
            where = f"{self._host}:{self._line.port}"
            raise FarflungError(f"cannot listen on {where} for the figures: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()

    def collect(self, count: int, patience_s: float) -> list[dict[str, Any]]:
        """So many reports, or as many as came in time."""
        found: list[dict[str, Any]] = []
        end = time.monotonic() + patience_s
        while len(found) < count and self._socket.poll(max(0, round(1000 * (end - time.monotonic())))):
            found.append(json.loads(self._socket.recv()))
            self._socket.send(b"")
        return found


def send_report(url: JoinUrl, report: dict[str, Any]) -> None:
    """Returns when the host that serves has it."""
    context = zmq.Context()
    socket = opened(context, zmq.REQ, CLIENT, curve_client(zmq.curve_keypair(), url.key))
    try:
        host = f"[{url.host}]" if ":" in url.host else url.host
        socket.connect(f"tcp://{host}:{BenchLine.of(url).port}")
        socket.send(json.dumps(report).encode())
        if not socket.poll(round(1000 * SEND_S)):
            raise Unreachable(
                f"{url.host} took no figures on port {BenchLine.of(url).port} within {SEND_S:g} s"
            )
        socket.recv()
    finally:
        socket.close()
        context.term()


# ---- bench -------------------------------------------------------------------------------------------------

LOOK_S = 0.1
AIM_S = 0.002  # between two looks at the log of the peer that is to die
PATIENCE_S = 600.0  # without a single event in any log
OTHERS_S = 120.0  # after this host's peer is done, how long the other hosts' figures are waited for
STOP_S = 15.0
WIDTH = 25_000  # values in a row of the synthetic table: ten rows are one megabyte

# Nothing is timed out: on a slow line a round may take an hour, and who is dead shows by its connection.  All
# vectors are about as long, so that with "robust" nobody's is shortened, and the result is the exact mean.
RUN_TOML = """
[run]
name = "bench"
rounds = {rounds}
min_peers = {min_peers}
max_peers = {peers}
[model]
kind = ""
width = {width}
context = {context}
[data]
source = ""
[outer]
step = "{step}"
lr = 1.0
momentum = 0.0
[round]
codec = "{codec}"
gather_codec = "{gather_codec}"
fragments = {fragments}
chunk_kb = {chunk_kb}
deadline_s = 36000.0
scatter_grace_s = {grace_s}
keep_results = {keep_results}
[merge]
policy = "{policy}"
audit = {audit}
[net]
heartbeat_s = 0.5
dead_after_s = 10.0
"""


PIECES_LEAST = 32  # of a vector that is small


@dataclass(frozen=True)
class BenchOptions:
    peers: int = 4
    mb: int = 100
    rounds: int = 5
    codec: str = "fp32"
    gather_codec: str = ""
    policy: str = "robust"
    audit: float = MergeSection.model_fields["audit"].default
    fragments: int = 1
    chunk_kb: int = 1024
    serve: str | None = None
    join: str | None = None
    kill_at: float | None = None
    pause_s: float = 0.0  # so long a trainer computes before its vector is due
    waits_for: int = 0  # contributions that a round needs; 0: everybody's
    grace_s: float = 36000.0
    keep_results: int = 1
    json: bool = False


def usual_chunk_kb(mb: int) -> int:
    """A run's 1 MB; less where only few pieces would be left, more where there would be too many."""
    kb = mb * 10**6 / 1024
    return max(1, math.ceil(kb / CHUNKS_PER_FRAGMENT), min(1024, int(kb / PIECES_LEAST)))


def check(asked: BenchOptions) -> Manifest:
    """The run as its coordinator will read it; UserError for what cannot be."""

    def expect(holds: bool, option: str, rule: str) -> None:
        if not holds:
            raise UserError(f"--{option}: expected {rule}")

    expect(2 <= asked.peers <= MEMBERS_PER_ROUND, "peers", f"2 to {MEMBERS_PER_ROUND}, found {asked.peers}")
    expect(1 <= asked.mb <= 100_000, "mb", f"1 to 100000, found {asked.mb}")
    expect(1 <= asked.rounds <= 10_000, "rounds", f"1 to 10000, found {asked.rounds}")
    expect(1 <= asked.chunk_kb <= 16384, "chunk-kb", f"1 to 16384, found {asked.chunk_kb}")
    chunks = -(-asked.mb * 10**6 // (asked.chunk_kb * 1024))
    most = min(chunks, FRAGMENTS_MAX)
    expect(1 <= asked.fragments <= most, "fragments", f"1 to {most} here, found {asked.fragments}")
    least_kb = -(-asked.mb * 10**6 // (CHUNKS_PER_FRAGMENT * asked.fragments * 1024))
    expect(
        asked.chunk_kb >= least_kb,
        "chunk-kb",
        f"at least {least_kb} for {asked.mb} MB, found {asked.chunk_kb}",
    )
    kill = asked.kill_at
    expect(kill is None or 0.0 <= kill <= 2.0, "kill-at", f"0 to 2 (1 to 2: of the gather), found {kill}")
    serves = asked.serve is not None
    expect(not serves or kill is None, "kill-at", "to be given with --join, on the host whose peer is to die")
    # On many hosts nobody here knows whether somebody will die; the trainers then wait for each other.
    spare = 1 if serves or kill is not None else 0
    text = RUN_TOML.format(
        rounds=asked.rounds + 1,
        min_peers=asked.waits_for or asked.peers - spare,
        peers=asked.peers,
        width=WIDTH,
        context=10 * asked.mb,
        step="sparse" if asked.codec in ("topk", "int2") else "nesterov",
        codec=asked.codec,
        gather_codec=asked.gather_codec
        or (asked.codec if asked.codec in get_args(ResultCodecName) else "auto"),
        chunk_kb=asked.chunk_kb,
        fragments=asked.fragments,
        policy=asked.policy,
        audit=asked.audit,
        grace_s=asked.grace_s,
        keep_results=asked.keep_results,
    )
    try:
        return Manifest.from_toml(text, "bench")
    except (
        UserError
    ) as error:  # only a codec, which may stand there twice, and the policy are left to be wrong
        first = str(error).splitlines()[0]
        raise UserError(first.replace("bench: [round] ", "--").replace("bench: [merge] ", "--")) from None


def bench_allreduce(asked: BenchOptions, announce: Callable[[str], None]) -> dict[str, Any]:
    """The figures, as they are printed with --json; `announce` gets what --serve says at once."""
    with tempfile.TemporaryDirectory(prefix="farflung-bench-") as name, stopped_in_good_order():
        stage = BenchProcesses(Path(name))
        try:
            if asked.join is not None:
                return _join(stage, asked)
            manifest = check(asked)
            reports, killed = (_local if asked.serve is None else _serve)(stage, asked, manifest, announce)
        finally:
            stage.close()
    shape = {key: getattr(asked, key) for key in ("peers", "mb", "codec", "chunk_kb", "fragments")}
    return shape | {"gather_codec": manifest.round.gather_codec} | result_of(reports, killed)


@contextlib.contextmanager
def stopped_in_good_order() -> Iterator[None]:
    """A SIGTERM, too, ends the processes that were started."""

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- the three ways to run it


def _local(
    stage: BenchProcesses, asked: BenchOptions, manifest: Manifest, announce: Callable[[str], None]
) -> tuple[list[dict[str, Any]], Killed | None]:
    url = stage.coordinate(manifest, "127.0.0.1:0")
    parties = [stage.start_peer(url, check=number == 0) for number in range(asked.peers)]
    aim = None
    if asked.kill_at is not None:
        aim = Aim(parties[-1], asked.kill_at, manifest.run.rounds)
    stage.wait_for(parties, aim)
    return [
        p.report() for p in parties if aim is None or p is not aim.victim
    ], aim.killed if aim is not None else None


def _serve(
    stage: BenchProcesses, asked: BenchOptions, manifest: Manifest, announce: Callable[[str], None]
) -> tuple[list[dict[str, Any]], Killed | None]:
    assert asked.serve is not None
    listen = ListenOn.parse(asked.serve)
    if listen.port == 0 or listen.member_port or listen.port > 65533:
        raise UserError(f"--serve {asked.serve}: expected HOST:PORT; PORT and the two after it are used")
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    first = stage.coordinate(manifest, f"{host}:{listen.port}:{listen.port + 1}")
    with Collector(stage.folder, listen.host, BenchLine.of(first)) as collector:
        announce(json.dumps({"url": str(first)}))
        party = stage.start_peer(first, check=True)
        stage.wait_for([party], None)
        others = collector.collect(asked.peers - 1, OTHERS_S)
    dead = [Killed(**other["killed"]) for other in others if "killed" in other]
    reports = [party.report(), *(other for other in others if "killed" not in other)]
    if len(others) < asked.peers - 1:
        raise FarflungError(f"only {len(others)} of {asked.peers - 1} other hosts told their figures")
    return reports, dead[0] if dead else None


def _join(stage: BenchProcesses, asked: BenchOptions) -> dict[str, Any]:
    assert asked.join is not None
    if asked.serve is not None:
        raise UserError("--join: not together with --serve: one host serves, the others join")
    url = JoinUrl.parse(asked.join)
    if asked.kill_at is not None and not 0.0 <= asked.kill_at <= 2.0:
        raise UserError(f"--kill-at: expected 0 to 2 (1 to 2: of the gather), found {asked.kill_at}")
    party = stage.start_peer(url, check=False)
    aim = None
    if asked.kill_at is not None:
        from farflung.console.screen.status_client import StatusClient

        with StatusClient(url) as client:
            aim = Aim(party, asked.kill_at, client.fetch(30.0)["target"])
    stage.wait_for([party], aim)
    if aim is not None:
        report: dict[str, Any] = {"killed": aim.killed.__dict__}
    else:
        report = party.report()
    send_report(url, report)
    return {"joined": True} | ({"killed_at": aim.killed.at} if aim is not None else {})


# ---- processes


@dataclass
class BenchParty:
    name: str
    process: subprocess.Popen[str]
    folder: Path

    @property
    def journal(self) -> Path:
        return self.folder / f"{self.name}.events"

    @property
    def figures(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def last_words(self) -> str:
        lines = (self.folder / f"{self.name}.log").read_text(encoding="utf-8").strip().splitlines()
        return lines[-1].removeprefix("farflung: ") if lines else "it said nothing"

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.figures.read_text(encoding="utf-8"))
        return found


@dataclass
class Aim:
    """One peer dies when so much of the scatter, or of the gather, of the middle round is done.

    A round that was over before it was looked at is not the last one: then it is the next in which that is seen.
    """

    victim: BenchParty
    fraction: float
    rounds: int
    killed: Killed = field(init=False)

    def __post_init__(self) -> None:
        self.killed = Killed(self.fraction)
        self._follower = Follower(self.victim.journal)
        self._agent = 0
        self._round = self._version = -1
        self._decided = self.done = False

    def fire_if_due(self) -> None:
        """Kill it if it is time to."""
        for event in self._follower.new_events():
            match event["event"]:
                case "start":
                    self._agent = event["pid"]
                case "plan":
                    self._round, self._version, self._decided = event["round"], event["version"], False
                    self.killed.at = 0.0
                case "decided" if event["round"] == self._round:
                    self._decided, self.killed.at = True, 1.0
                case "progress" if event["round"] == self._round:
                    self.killed.at = 1.0 + event["got"] if self._decided else min(1.0, event["held"])
        if self._version >= self.rounds // 2 and self.killed.at >= self.fraction and not self.done:
            os.kill(self._agent, signal.SIGKILL)
            self.victim.process.kill()
            self.done, self.killed.version = True, self._version


class BenchProcesses:
    """What runs on this machine.  Everything is ended by `close`, by process id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parties: list[BenchParty] = []
        self._coordinator: BenchParty | None = None

    def coordinate(self, manifest: Manifest, listen: str) -> JoinUrl:
        (self.folder / "run.toml").write_text(as_toml(manifest), encoding="utf-8")
        words = ["-m", "farflung", "coordinate", str(self.folder / "run.toml"), "--listen", listen]
        words += ["--data", str(self.folder), "--json", "--exit-when-done"]
        self._coordinator = self._start("coordinator", words, {}, subprocess.PIPE)
        assert self._coordinator.process.stdout is not None
        line = self._coordinator.process.stdout.readline()
        if not line:
            self._coordinator.process.wait()
            raise UserError(f"the coordinator did not start: {self._coordinator.last_words}")
        return JoinUrl.parse(json.loads(line)["url"])

    @property
    def coordinator_pid(self) -> int:
        if self._coordinator is None:
            raise RuntimeError("no coordinator is started")
        return self._coordinator.process.pid

    def start_peer(self, url: JoinUrl, check: bool) -> BenchParty:
        name = f"peer-{len(self._parties)}"
        words = ["--url", str(url), "--identity", str(self.folder / f"{name}.pem")]
        words += ["--check"] if check else []
        journal = {JOURNAL_VARIABLE: str(self.folder / f"{name}.events")}
        return self.start(name, "farflung.console.bench.trainer", words, journal)

    def start(
        self, name: str, module: str, words: list[str], more: dict[str, str] | None = None
    ) -> BenchParty:
        """A process that tells its figures at its end; `more`: in its environment."""
        words = ["-m", module, *words, "--figures", str(self.folder / f"{name}.json")]
        party = self._start(name, words, more or {}, None)
        self._parties.append(party)
        return party

    def _start(self, name: str, words: list[str], more: dict[str, str], stdout: int | None) -> BenchParty:
        with (self.folder / f"{name}.log").open("w") as log:
            # A group of its own: Ctrl-C reaches the bench alone, which then ends all in good order.
            process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=log if stdout is None else stdout,
                stderr=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | more,
                process_group=0,
            )
        return BenchParty(name, process, self.folder)

    def wait_for(self, parties: list[BenchParty], aim: Aim | None) -> None:
        """Until all have told their figures, the one that is to die aside."""
        quiet_since, seen = time.monotonic(), -1
        while True:
            if aim is not None and not aim.done:
                aim.fire_if_due()
            running = [p for p in parties if p.process.poll() is None]
            for party in parties:
                dead = aim is not None and aim.done and party is aim.victim
                if party not in running and party.process.returncode and not dead:
                    raise FarflungError(f"{party.name} ended: {party.last_words}")
            if not running:
                return
            written = sum(p.journal.stat().st_size for p in parties if p.journal.exists())
            if written != seen:
                quiet_since, seen = time.monotonic(), written
            elif time.monotonic() - quiet_since >= PATIENCE_S:
                raise FarflungError(f"nothing has happened for {PATIENCE_S:g} s; {parties[0].last_words}")
            time.sleep(LOOK_S if aim is None or aim.done else AIM_S)

    def close(self) -> None:
        everybody = [*self._parties, *([self._coordinator] if self._coordinator is not None else [])]
        for party in everybody:
            if party.process.poll() is None:
                party.process.terminate()
        for party in everybody:
            try:
                party.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                party.process.kill()
                party.process.wait()
            if party.process.stdout is not None:
                party.process.stdout.close()
        sweep_stale()  # the memory of a peer that was killed


def as_toml(manifest: Manifest) -> str:
    lines = []
    for section, keys in manifest.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"
