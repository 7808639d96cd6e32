"""Finds out what the doctor needs to know of this machine, and of its way to a run.  A shell.

Called by console/inspect_commands.py.  Judges nothing.  Leaves nothing behind: no key file is made.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import shutil
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

import zmq

from farflung import __version__
from farflung.collectives.link.link import Link
from farflung.collectives.link.zmq_link import LinkSettings, ZmqLink
from farflung.console.doctor.advice import (
    CheckpointPlace,
    LineToCoordinator,
    MachineFacts,
    RelayFacts,
    SeenPort,
)
from farflung.console.screen.gpu import read_gpus
from farflung.console.screen.status_client import StatusClient
from farflung.console.screen.text import known, records
from farflung.coordinator.door.dialer import DIAL_S
from farflung.peer.line.data_line import OUTBOUND_ONLY, address_towards, both_ends, checked_listen
from farflung.peer.machine.modes import missing
from farflung.peer.settings import Caps, OwnConfig, default_path
from farflung.protocol import messages
from farflung.protocol.errors import FarflungError, FrameError, Refused, Unreachable
from farflung.protocol.hf_config import lacking
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.limits import CONTROL_BIN_BYTES, PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Challenge, Knock, Message, Probe, Probed, Refuse
from farflung.protocol.mode_words import StandsBy
from farflung.protocol.process.host_memory import available_bytes
from farflung.protocol.process.mode_folders import made_by_first
from farflung.protocol.process.sockets import STRANGER, Options, curve_client, curve_raw, end_abruptly, opened

# ---- dial back ---------------------------------------------------------------------------------------------
# Asks a coordinator to dial this machine where the data plane would listen: can other peers reach it?
#
# Called by `farflung doctor`. Listens with the data plane's own link, so that a firewall treats it the same
# way.

POLL_MS = 50


def dial_back(client: StatusClient, own: OwnConfig, port_hint: int = 0) -> tuple[str, str]:
    """(the address that was tried, the coordinator's word: yes, no, or why it was not tried)."""
    keys = zmq.curve_keypair()
    link = ZmqLink(keys, LinkSettings(visitor=client.url.key))
    done = threading.Event()
    try:
        host, port = checked_listen(own.listen) if own.listen else ("", port_hint)
        mine = address_towards(client.url)
        bound = link.listen(host or mine, port)
        seen = own.advertise or (mine if host in ("", "0.0.0.0", "*", "[::]") else host)
        address = seen if own.advertise and ":" in own.advertise else f"{seen}:{bound}"
        # The link answers handshakes in its turns: from here on the thread's alone, while the question below waits.
        answers = threading.Thread(target=_let_in, args=(link, done), name="link")
        answers.start()
        try:
            question = Probe(padding=b"", want=0, address=address, key=curve_raw(keys[0]))
            return address, client.ask(question, Probed, DIAL_S + 5.0).dialled
        except Unreachable:
            return address, "the coordinator did not say"
        finally:
            done.set()
            answers.join()
    finally:
        link.close()


def _let_in(link: Link, done: threading.Event) -> None:
    """The turns of the link's owner, as an agent takes them."""
    while not done.is_set():
        poller = zmq.Poller()
        for each, events in link.sockets():
            poller.register(each, events)
        poller.poll(POLL_MS)
        for _ in link.receive():
            pass  # nobody is a contact: whatever comes is counted and dropped
        link.on_tick()


# ---- line probe --------------------------------------------------------------------------------------------
# How good the line to the coordinator is: the way there and back, and bytes per second in both directions.
#
# Called by `farflung doctor`. What it measures is the line to that one machine, and at most what that machine
# gives to strangers: a line may carry more.

PINGS = 5
PIECE_BYTES = CONTROL_BIN_BYTES - 1024
FIRST_PIECES, MORE_PIECES = 4, 24
LONG_ENOUGH_S = 0.5  # a transfer that took so long says something
PIECE_PATIENCE_S = 20.0  # for one piece: 10 kB/s


def measure(client: StatusClient) -> LineToCoordinator:
    """Takes some seconds on a slow line."""
    took, probed = [], Probed(came_from="", wall_s=0.0, padding=b"", dialled="")
    for _ in range(PINGS):
        begun = time.monotonic()
        probed = client.ask(_probe(0, 0), Probed, PIECE_PATIENCE_S)
        took.append(time.monotonic() - begun)
    ahead_s = time.time() - probed.wall_s - min(took) / 2
    up, up_bounded = _rate(client, up=True)
    down, down_bounded = _rate(client, up=False)
    return LineToCoordinator(
        statistics.median(took),
        up,
        down,
        probed.came_from.removeprefix("::ffff:"),
        ahead_s,
        up_bounded or down_bounded,
    )


def _rate(client: StatusClient, up: bool) -> tuple[float, bool]:
    """(bytes per second, whether the coordinator had no more to give)."""
    rate, took_s = 0.0, 0.0
    for pieces in (FIRST_PIECES, MORE_PIECES):
        begun = time.monotonic()
        question = _probe(PIECE_BYTES, 0) if up else _probe(0, PIECE_BYTES)
        try:
            client.ask_all([question] * pieces, Probed, PIECE_PATIENCE_S)
        except Refused:
            if rate == 0.0:
                raise
            client.forget()  # answers to the other pieces may still come
            return rate, True
        took_s = time.monotonic() - begun
        rate = pieces * PIECE_BYTES / took_s
        if took_s >= LONG_ENOUGH_S:
            break
    return rate, took_s < LONG_ENOUGH_S  # so fast that the machines, not the line, were measured


def _probe(padding_bytes: int, want_bytes: int) -> Probe:
    return Probe(padding=bytes(padding_bytes), want=want_bytes, address="", key=b"")


# ---- nat probe ---------------------------------------------------------------------------------------------
# Asks two ports of the coordinator from where they see one port of this machine: what does its router do?
#
# Called by `farflung doctor`. The door answers a probe with the caller's port; the relay answers whoever asks
# it where it is (coordinator/relay/socks.py). Both are asked from one local port, as a peer does that meets
# others. Judges nothing.

NAT_PATIENCE_S = 3.0
_ASK = b"\x05\x01\x00\x03\x05where\x00\x01"
_GREETING, _CHOSEN = b"\x05\x01\x00", b"\x05\x00"
_HOST_BYTES = {1: 4, 4: 16}  # by the kind of address in a SOCKS5 answer


def look(url: JoinUrl, relay_port: int) -> SeenPort:
    """`relay_port`: 0 where there is none.  OSError where there is no way to the coordinator."""
    _, there = both_ends(url)
    every = "[::]" if ":" in there else "0.0.0.0"
    with socket.socket(socket.AF_INET6 if ":" in there else socket.AF_INET) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((every.strip("[]"), 0))
        port = int(kept.getsockname()[1])
        door = _by_door(url, f"tcp://{every}:{port};{there}:{url.port}")
        relay = _by_relay(kept.family, port, (there.strip("[]"), relay_port)) if relay_port else ""
    return SeenPort(port, door, relay)


def _by_door(url: JoinUrl, endpoint: str) -> str:
    context: zmq.Context[zmq.SyncSocket] = zmq.Context()
    family: Options = {zmq.IPV6: int("[" in endpoint)}
    line = opened(context, zmq.DEALER, STRANGER, family, curve_client(zmq.curve_keypair(), url.key))
    try:
        line.connect(endpoint)
        line.send(messages.encode(Probe(padding=b"", want=0, address="", key=b"")))
        if not line.poll(round(1000 * NAT_PATIENCE_S)):
            return ""
        said = messages.decode(line.recv(), frozenset({"probed", "refuse"}))
    except (zmq.ZMQError, FrameError):
        return ""
    finally:
        context.destroy(linger=0)
    if not isinstance(said, Probed) or not said.port:
        return ""
    return str(Address(said.came_from.removeprefix("::ffff:"), said.port))


def _by_relay(family: int, port: int, relay: tuple[str, int]) -> str:
    with socket.socket(family, socket.SOCK_STREAM) as line:
        try:
            line.settimeout(NAT_PATIENCE_S)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            line.bind(("", port))
            end_abruptly(line.fileno())
            line.connect(relay)
            line.sendall(_GREETING)
            if line.recv(len(_CHOSEN), socket.MSG_WAITALL) != _CHOSEN:
                return ""
            line.sendall(_ASK)
            head = line.recv(4, socket.MSG_WAITALL)
            size = _HOST_BYTES.get(head[3], 0) if len(head) == 4 else 0
            told = line.recv(size + 2, socket.MSG_WAITALL) if size else b""
        except OSError:
            return ""
    if not size or len(told) != size + 2:
        return ""
    seen_port = int(struct.unpack(">H", told[size:])[0])
    return str(Address(str(ipaddress.ip_address(told[:size])), seen_port)) if seen_port else ""


# ---- places ------------------------------------------------------------------------------------------------
# Asks every address that a join URL names, at the same time: does the coordinator of this run answer there?
#
# Called by `farflung doctor`. A peer tries them side by side and takes the first that answers, so one that is
# dead is seen by nobody until it is the only one left. Whoever answers has shown the key that the URL pins:
# it can't be somebody else, only another machine of the same host, or an older start of the same run. Judges
# nothing.

SILENT = "nobody answers there"
_ANSWERS = frozenset({"challenge", "refuse", "stands_by"})


def ask_each(url: JoinUrl, patience_s: float) -> tuple[CheckpointPlace, ...]:
    """In the order of the URL; waits for all of them, or so long."""
    context: zmq.Context[zmq.SyncSocket] = zmq.Context()
    told: dict[Address, str] = {}
    try:
        lines = {}
        for place in url.addresses:
            try:
                lines[_dial(context, url, place)] = place
            except zmq.ZMQError as error:
                told[place] = str(error)
        poller, until = zmq.Poller(), time.monotonic() + patience_s
        for line in lines:
            poller.register(line, zmq.POLLIN)
        while lines and (left_s := until - time.monotonic()) > 0:
            for line, _ in poller.poll(round(1000 * left_s)):
                poller.unregister(line)
                told[lines.pop(line)] = _word(line.recv())
    finally:
        context.destroy(linger=0)
    return tuple(CheckpointPlace(str(each), told.get(each, SILENT)) for each in url.addresses)


def by_who_answers(url: JoinUrl, places: tuple[CheckpointPlace, ...]) -> JoinUrl:
    """The same URL, with the addresses first at which somebody answered."""
    good = {each.address for each in places if not each.problem}
    ordered = sorted(url.addresses, key=lambda each: str(each) not in good)
    return JoinUrl.at(tuple(ordered), url.run, url.key, url.token)


def _dial(context: zmq.Context[zmq.SyncSocket], url: JoinUrl, place: Address) -> zmq.SyncSocket:
    line = opened(context, zmq.DEALER, STRANGER, curve_client(zmq.curve_keypair(), url.key))
    line.connect(f"tcp://{place}")
    line.send(messages.encode(Knock(protocol=PROTOCOL_VERSION, run=url.run)))
    return line


def _word(raw: bytes) -> str:
    """What is wrong there; empty: nothing."""
    try:
        said: Message = messages.decode(raw, _ANSWERS)
    except FrameError as error:
        return f"what answers there is not understood: {error}"
    if isinstance(said, Refuse):
        return "" if said.code == "protocol" else said.reason  # whether both fit is asked once, of the run
    if isinstance(said, StandsBy):
        return ""  # it names who leads to whoever knocks
    return "" if isinstance(said, Challenge) else "it answered another question"


# ---- facts -------------------------------------------------------------------------------------------------

PATIENCE_S = 5.0
RELAY_S = 3.0
SHARED = Path("/dev/shm")
TRIED_BYTES = 256 * 1024  # more than a key, a lock and the first lines of a journal
# Modules of modes in whose runs a peer holds something else than the model: `made(manifest, status)` is a `HeldPart`.
OTHER_PARTS: Final = ("farflung.console.batches.stage_advice",)
GREETING, ANSWER = b"\x05\x01\x00", b"\x05\x00"  # of SOCKS5


def of_this_machine() -> MachineFacts:
    home = default_path().parent
    place = next(folder for folder in (home, *home.parents) if folder.is_dir())
    gpus = read_gpus()
    return MachineFacts(
        farflung=__version__,
        python=platform.python_version(),
        torch=_version_of("torch"),
        cuda=_why_no_cuda() if gpus else "",
        gpus=gpus,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=available_bytes(),
        shared_bytes=shutil.disk_usage(SHARED).free if SHARED.is_dir() else 0,
        shared_problem=why_not_writable(SHARED),
        home=str(place),
        disk_bytes=shutil.disk_usage(place).free,
        disk_problem=why_not_writable(place),
    )


def why_not_writable(folder: Path) -> str:
    """What the system says to a file there that is written to the disk; empty: it takes it.  Nothing is left.

    What it says of free bytes is no proof: a mount may be read-only, a quota or the blocks for root alone be left."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="farflung-doctor-") as file:
            file.write(os.urandom(TRIED_BYTES))  # a disk that packs files must find room for these
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def of_the_run(facts: MachineFacts, url: JoinUrl, own: OwnConfig) -> None:
    """Adds what the run needs, and how the way there is."""
    facts.results_limit_bytes, facts.results_on_disk = own.kept_results
    facts.wants_dialling = own.listen != OUTBOUND_ONLY
    facts.limits = Caps.of(*own.upload_limits).now(), Caps.of(*own.download_limits).now()
    if url.others:
        facts.places = ask_each(url, PATIENCE_S)
        url = by_who_answers(url, facts.places)
    try:
        with StatusClient(url) as client:
            said = client.ask(Knock(protocol=PROTOCOL_VERSION, run=url.run), Challenge, PATIENCE_S)
            facts.manifest = Manifest.from_canonical(said.manifest)
            status = client.fetch(PATIENCE_S)
            facts.run_software = str(status.get("software") or "")
            facts.alive = sum(member.get("alive") is True for member in records(status, "members"))
            size = known(status, "model_bytes")
            facts.model_bytes = int(size) if size is not None else None
            of_model = lacking(_version_of("transformers")) if facts.manifest.model.config else ""
            facts.lacking = missing(facts.manifest) or of_model
            facts.part = made_by_first(OTHER_PARTS, facts.manifest, status) or facts.part
            hosts = [str(each.address) for each in facts.places if not each.problem] or [url.address]
            facts.relay = _relay_of(status, [Address.parse(each).host for each in hosts])
            facts.line = measure(client)
            facts.local_address = address_towards(url).strip("[]")
            names_instants = status.get("meetings")
            if isinstance(names_instants, Mapping) and names_instants.get("on") is True:
                facts.seen = look(url, facts.relay.port if facts.relay is not None else 0)
            if facts.wants_dialling:
                facts.dialled = dial_back(client, own)
    except Refused as error:
        facts.refused = error.reason
    except Unreachable as error:
        facts.unreachable = str(error) if facts.manifest is None else f"it stopped answering: {error}"
    except OSError as error:
        facts.unreachable = f"no way to {url.host}: {error.strerror or error}"
    except FarflungError as error:
        facts.refused = str(error)


def _relay_of(status: Mapping[str, object], hosts: Sequence[str]) -> RelayFacts | None:
    """As the status tells of it, and whether it can be reached from here, at any of these addresses of its host; with
    those that members offer.  None: it does not tell."""
    told, others = status.get("relay"), status.get("relays_offered")
    if not isinstance(told, Mapping):
        return None
    listed = [each for each in others if isinstance(each, Mapping)] if isinstance(others, list) else []
    offered = tuple(float(each.get("bytes_per_s") or 0.0) for each in listed if each.get("on") is True)
    if told.get("on") is not True:
        return RelayFacts(why_not=str(told.get("why_not") or "its host does not say why"), offered=offered)
    port, rate = int(told.get("port") or 0), float(told.get("bytes_per_s") or 0.0)
    silent = ""
    for host in dict.fromkeys(hosts):
        if not (silent := _silence_of(host, port)):
            break
    return RelayFacts(port, rate, silent=silent, offered=offered)


def _silence_of(host: str, port: int) -> str:
    """Why no relay can be asked there; empty: one answers."""
    try:
        with socket.create_connection((host, port), RELAY_S) as guest:
            guest.sendall(GREETING)
            return "" if guest.recv(len(ANSWER)) == ANSWER else "it is something else that answers there"
    except OSError as error:
        return error.strerror or str(error)


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _why_no_cuda() -> str:
    """Loads torch: some seconds, and only where there is a GPU to use."""
    import torch

    if torch.cuda.is_available():
        return ""
    return (
        "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable device"
    )
