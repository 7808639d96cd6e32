"""Finds out what the doctor needs to know of this machine, and of its way to a run.  A shell.

Called by console/inspect_commands.py.  Judges nothing.  Leaves nothing behind: no key file is made.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from farflung import __version__
from farflung.console.doctor.advice import MachineFacts, RelayFacts
from farflung.console.doctor.dial_back import dial_back
from farflung.console.doctor.line_probe import measure
from farflung.console.doctor.nat_probe import look
from farflung.console.doctor.places import ask_each, by_who_answers
from farflung.console.screen.gpu import read_gpus
from farflung.console.screen.status_client import StatusClient
from farflung.console.screen.text import known, records
from farflung.peer.line.data_line import OUTBOUND_ONLY, address_towards
from farflung.peer.machine.modes import missing
from farflung.peer.settings import Caps, OwnConfig, default_path
from farflung.protocol.errors import FarflungError, Refused, Unreachable
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Challenge, Knock
from farflung.protocol.process.host_memory import available_bytes
from farflung.protocol.process.mode_folders import made_by_first

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
            facts.lacking = missing(facts.manifest)
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
