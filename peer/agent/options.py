"""What an agent is started with, and what its machine and its hands are told of that.

Made by whoever starts an agent: by join.py for `farflung join` and `farflung assist`, by main.py for a script of the
user's own.  Read by the agent when it begins, once.  An `AgentOptions` is what was said on the command line; a
`PeerConfig` is what follows from it for the machine, which knows no folders and no codecs; a `Store` is the place of
checkpoints, where there is one.

Must not know sockets, rounds or trainers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from farflung.checkpoints.store import Store
from farflung.compression.codec import check_payload, payload_bytes
from farflung.peer.first_contact import RememberedPlaces
from farflung.peer.footprint import AGENT_BYTES, FreeMemory, MemoryRules, need_of, of_helper, told
from farflung.peer.line.reachability import RelayHere
from farflung.peer.machine.handshake import Me, PeerConfig
from farflung.peer.settings import OwnConfig, refuse_contradictions
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.process.host_memory import available_bytes


@dataclass(frozen=True)
class AgentOptions:
    url: JoinUrl
    folder: Path
    own: OwnConfig
    journal: Path | None = None  # what happens is written here (journal_writer.py)
    relay: RelayHere | None = None  # that it offers to others
    helps: bool = False  # no trainer comes: it owns chunks and gives state (`farflung assist`)


def store_of(own: OwnConfig) -> Store | None:
    """For checkpoints, where the volunteer named a place; UserError for what has no place without it."""
    refuse_contradictions(own)
    return Store(own.checkpoints) if own.checkpoints else None


def config_of(
    options: AgentOptions, me: Me, saves: bool, remembered: RememberedPlaces, folder: Path
) -> PeerConfig:
    """`folder`: of all that this peer keeps beside its key."""
    url, own = options.url, options.own
    return PeerConfig(
        me,
        url.run,
        check_payload,
        payload_bytes,
        results_on_disk=own.kept_results.on_disk,
        results_limit_bytes=own.kept_results.limit_bytes,
        saves=saves,
        keeps_in=str(folder) if own.keep else "",
        recalls=True,
        pinned=url.key,
        places=url.addresses,
        kept=remembered.load(),
        kept_commits=remembered.load_commits(),
        start=_start_of(own),
        helps=options.helps,
    )


def _start_of(own: OwnConfig) -> str:
    """A path that leads nowhere is told at once, not when the run is to be founded."""
    if own.start and "://" not in own.start and not Path(own.start).exists():
        raise UserError(f"--start {own.start}: there is no such file or folder")
    return own.start


def memory_of_helper(manifest: Manifest, model: ModelSchema, own: OwnConfig) -> str:
    """The line that says whether it fits; of others the trainer says it, who knows more.  UserError where it can't: the
    coordinator alone has said how large the model is."""
    rules = MemoryRules.of(manifest, *own.kept_results)
    values = model.chunk_count * model.chunk_elements
    rows, room = of_helper(rules, values), FreeMemory(None, available_bytes())
    found = told(rows, rules, values, room)
    if need_of(rows).host_bytes - AGENT_BYTES > room.host_bytes > 0:
        raise UserError(f"run '{manifest.run.name}' does not fit this machine: {found.text}")
    return f"memory: {found.text}" if found.fits else f"memory: it may not fit: {found.text}; {found.todo}"
