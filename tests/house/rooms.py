"""The rooms of the house as one table: what each may import of ours, and whether it is pure.

Read by test_layers.py, and by whatever else walks the product's files.  `ROOMS` names folders; `PURE_MODULES` names
single modules in rooms that are not pure as a whole.  A name that is not on the disk is an error, whoever wrote it.
"""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Room(NamedTuple):
    """`may`: rooms, or single modules, that it may import of ours besides itself.  `pure`: every module in it."""

    may: tuple[str, ...]
    pure: bool = False


PROTOCOL = ("protocol", "protocol/process")
# A peer's process knows nothing of a coordinator's code, and a coordinator has no model and no peer.  Of codecs and
# outer steps it has those that are pure and know no torch.
ARITHMETIC = ("compression/plain_codecs", "optim/outer")
ROOMS: dict[str, Room] = {
    "protocol": Room((), pure=True),
    "protocol/process": Room(("protocol",)),
    "compression": Room(("protocol",)),
    "optim": Room(("protocol",)),
    "collectives/round": Room(("protocol", "protocol/process/mode_folders"), pure=True),
    "collectives/pipeline": Room(("protocol",), pure=True),
    # Of modes: nobody else may import them.
    "collectives/mesh": Room(("collectives/round", "protocol"), pure=True),
    "collectives/arithmetic": Room(("compression", "protocol")),
    "collectives/link": Room(PROTOCOL),
    "checkpoints": Room(("collectives/round", *PROTOCOL)),
    "coordinator/rounds": Room(("protocol",), pure=True),
    "coordinator/court": Room((*ARITHMETIC, "protocol"), pure=True),
    "coordinator/modes": Room(
        (
            "coordinator/rounds",
            "coordinator/court",
            "coordinator/door/hello_check",
            "protocol/process/mode_folders",
            "protocol",
        ),
        pure=True,
    ),
    "coordinator/ledger": Room(("coordinator/modes", "coordinator/court", *PROTOCOL)),
    "coordinator/door": Room(PROTOCOL),
    "coordinator/roster": Room(("protocol",), pure=True),
    "coordinator/run": Room(
        (
            "coordinator/modes",
            "coordinator/rounds",
            "coordinator/court",
            "coordinator/ledger",
            "coordinator/roster",
            "coordinator/door/hello_check",
            "coordinator/door/allowance",
            "protocol/process/networks",
            "protocol",
        ),
        pure=True,
    ),
    "coordinator": Room(
        (
            "coordinator/rounds",
            "coordinator/court",
            "coordinator/ledger",
            "coordinator/door",
            "coordinator/modes",
            "coordinator/roster",
            "coordinator/run",
            *PROTOCOL,
        )
    ),
    # Modes that can be taken out: nobody may import them.
    "coordinator/admission": Room(
        (
            "coordinator/modes",
            "coordinator/run",
            "coordinator/ledger",
            "coordinator/door/hello_check",
            "coordinator/door/allowance",
            *PROTOCOL,
        )
    ),
    "coordinator/audits": Room(
        (
            "coordinator/modes",
            "coordinator/run",
            "coordinator/roster",
            "coordinator/rounds",
            "coordinator/court",
            "coordinator/ledger",
            "protocol",
        ),
        pure=True,
    ),
    "coordinator/batches": Room(
        (
            "coordinator/modes",
            "coordinator/run",
            "coordinator/rounds/round_policy",
            "coordinator/ledger",
            "collectives/pipeline/seats",
            "protocol",
        ),
        pure=True,
    ),
    "coordinator/evaluation": Room(
        ("coordinator/modes", "coordinator/run", "coordinator/ledger", "protocol"), pure=True
    ),
    "coordinator/pace": Room(("coordinator/modes", "coordinator/run", "protocol"), pure=True),
    "coordinator/mesh": Room(
        ("coordinator/modes", "coordinator/run", "coordinator/rounds", "protocol"), pure=True
    ),
    "coordinator/recovery": Room(
        ("coordinator/modes", "coordinator/run", "coordinator/ledger", "protocol"), pure=True
    ),
    "coordinator/reach": Room(
        (
            "coordinator/modes",
            "coordinator/roster",
            "coordinator/run",
            "coordinator/door/allowance",
            "protocol",
        ),
        pure=True,
    ),
    "coordinator/relay": Room(
        ("coordinator/modes", "coordinator/reach", "coordinator/roster", "coordinator/run", *PROTOCOL)
    ),
    "coordinator/restoring": Room(
        (
            "coordinator/modes",
            "coordinator/run",
            "coordinator/ledger",
            "coordinator/roster/partial_view",
            "coordinator/door",
            *PROTOCOL,
        )
    ),
    "coordinator/slow_lines": Room(
        ("coordinator/modes", "coordinator/run", "coordinator/rounds", "protocol"), pure=True
    ),
    "coordinator/standby": Room(("coordinator", "coordinator/door", "coordinator/ledger", *PROTOCOL)),
    "peer": Room(PROTOCOL),
    "peer/local": Room(PROTOCOL),
    "peer/data": Room(("peer", *PROTOCOL)),
    "peer/machine": Room(
        (
            "peer/local/words",
            "collectives/round",
            "checkpoints/checked_chunks",
            "checkpoints/state_sync",
            "checkpoints/fetcher",
            "checkpoints/swarm",
            "checkpoints/result_log",
            "optim/schedule",
            "protocol/process/mode_folders",
            "protocol",
        ),
        pure=True,
    ),
    # Modes at a peer that can be taken out: nobody may import them.
    "peer/audits": Room(("peer/machine", "collectives/round", "protocol"), pure=True),
    "peer/batches": Room(
        (
            "peer/machine",
            "peer/local/words",
            "collectives/pipeline",
            "collectives/round/effects",
            "checkpoints/checked_chunks",
            "optim/schedule",
            "protocol",
        ),
        pure=True,
    ),
    "peer/evaluation": Room(("peer/machine", "peer/local/words", "peer/builtin", "peer/data", "protocol")),
    "peer/pace": Room(("peer/machine", "peer/local/words", "protocol"), pure=True),
    "peer/restoring": Room(("peer/machine", "collectives/round/effects", "protocol"), pure=True),
    "peer/slow_lines": Room(("peer/machine", "peer/local/words", "collectives/round", "protocol"), pure=True),
    "peer/crossings": Room(
        (
            "peer/agent/mode_hand",
            "peer/batches",
            "peer/local",
            "peer/machine/effects",
            "peer/state/outer_state",
            "collectives/pipeline/effects",
            "compression",
            *PROTOCOL,
        )
    ),
    "peer/router": Room(("protocol",)),
    "peer/line": Room(("peer", "peer/router", "collectives/link", *PROTOCOL)),
    "peer/state": Room(
        (
            "peer",
            "peer/machine/disk_words",
            "peer/machine/effects",
            "checkpoints",
            "collectives/round",
            "collectives/arithmetic",
            "compression",
            "optim",
            *PROTOCOL,
        )
    ),
    "peer/island": Room(("peer/local", "peer/data/leased_data", *PROTOCOL)),
    "peer/checks": Room(("peer/island/sharded", "protocol")),
    "peer/trainer": Room(
        (
            "peer",
            "peer/checks",
            "peer/data",
            "peer/island",
            "peer/local",
            "compression/native",
            "optim",
            *PROTOCOL,
        )
    ),
    "peer/adapters": Room(("peer/trainer", *PROTOCOL)),
    "peer/builtin": Room(("peer", "peer/data", "peer/trainer", "optim", *PROTOCOL)),
    # The trainer's side of a mode that can be taken out: nobody else may import it.
    "peer/pipeline/machines": Room(
        (
            "peer/local/words",
            "peer/trainer/effects",
            "peer/trainer/machine",
            "optim/schedule",
            "protocol",
        ),
        pure=True,
    ),
    "peer/pipeline": Room(
        (
            "peer",
            "peer/local",
            "peer/crossings/shared_slots",
            "peer/pipeline/machines",
            "peer/builtin",
            "peer/checks/finite",
            "peer/checks/forward_check",
            "peer/data",
            "peer/trainer",
            "collectives/pipeline/crossing",
            "compression",
            "optim",
            *PROTOCOL,
        )
    ),
    "peer/agent": Room(
        (
            "peer",
            "peer/local",
            "peer/machine",
            "peer/line",
            "peer/state",
            "peer/trainer/agent_process",
            "collectives/round",
            "collectives/link",
            "checkpoints",
            "compression",
            "optim",
            *PROTOCOL,
        )
    ),
    "simulator": Room(
        (
            "coordinator/run",
            "coordinator/modes",
            "coordinator/court",
            "coordinator/ledger",
            "coordinator/roster",
            "peer",
            "peer/machine",
            "peer/state",
            "peer/data",
            "peer/local",
            "peer/trainer",
            "collectives/round",
            "collectives/arithmetic",
            "compression",
            "optim",
            "checkpoints",
            *PROTOCOL,
        )
    ),
    "simulator/laboratory": Room(
        (
            "simulator",
            "coordinator/ledger",
            "peer/local",
            "peer/machine",
            "peer/trainer",
            "collectives/round",
            "compression",
            "protocol",
        )
    ),
    # Goes with the mode.
    "simulator/batches": Room(
        (
            "simulator",
            "coordinator/batches",
            "coordinator/ledger",
            "peer/batches",
            "peer/local",
            "peer/machine",
            "peer/pipeline/machines",
            "peer/trainer/effects",
            "collectives/pipeline",
            "collectives/round",
            "compression",
            "protocol",
        )
    ),
    "console/screen": Room(PROTOCOL),
    "console/phonebook": Room(PROTOCOL),
    "console/web": Room(("console/screen", "coordinator/door/allowance", *PROTOCOL)),
    "console/history": Room(
        (
            "compression/plain_codecs",
            "console/screen",
            "coordinator/court",
            "coordinator/ledger",
            "checkpoints",
            *PROTOCOL,
        )
    ),
    "console/doctor": Room(
        (
            "console/screen",
            "coordinator/door",
            "peer",
            "peer/line",
            "peer/machine/modes",
            "collectives/link",
            *PROTOCOL,
        )
    ),
    # Goes with the mode.
    "console/batches": Room(
        (
            "console/doctor/advice",
            "console/screen/text",
            "collectives/pipeline/seats",
            "peer/footprint",
            "protocol",
        ),
        pure=True,
    ),
    "console/bench": Room(
        (
            "console/screen",
            "coordinator/door",
            "peer/local",
            "peer/trainer/agent_process",
            *PROTOCOL,
        )
    ),
    "console": Room(
        (
            "console/screen",
            "console/history",
            "console/doctor",
            "console/bench",
            "console/phonebook",
            "console/web",
            "coordinator",
            "coordinator/ledger/provenance",
            "coordinator/modes",
            "coordinator/relay",
            "peer",
            "peer/agent",
            "peer/builtin",
            "peer/data",
            "peer/line",
            "peer/local",
            "checkpoints",
            "simulator/laboratory",
            *PROTOCOL,
        )
    ),
}

PURE_MODULES = (
    "checkpoints/state_sync",
    "checkpoints/checked_chunks",
    "checkpoints/fetcher",
    "checkpoints/checkpoint_manifest",
    "checkpoints/swarm",
    "checkpoints/result_log",
    "compression/plain_codecs",
    "collectives/link/frame_queue",
    "collectives/link/link",
    "collectives/link/rates",
    "collectives/link/sealed_records",
    "collectives/link/stalled_streams",
    "console/bench/figures",
    "console/doctor/advice",
    "console/history/plots",
    "console/history/recorded_run",
    "console/phonebook/book",
    "console/screen/dashboard",
    "console/screen/health",
    "console/screen/stages",
    "console/screen/text",
    "console/web/page",
    "console/web/public",
    "console/web/requests",
    "coordinator/door/allowance",
    "coordinator/admission/admission",
    "coordinator/door/hello_check",
    "coordinator/relay/socks",
    "coordinator/relay/switchboard",
    "coordinator/ledger/run_store",
    "coordinator/ledger/ledger",
    "coordinator/ledger/evidence",
    "coordinator/ledger/leases",
    "coordinator/ledger/pace",
    "coordinator/ledger/provenance",
    "coordinator/ledger/records",
    "coordinator/restoring/kept_books",
    "coordinator/restoring/restoration",
    "coordinator/standby/etcd_url",
    "coordinator/standby/standby_rules",
    "optim/outer",
    "optim/schedule",
    "peer/footprint",
    "peer/agent/turns",
    "console/run_toml",
    "peer/builtin/sizes",
    "peer/agent/waits",
    "peer/island/blocks",
    "peer/island/parts",
    "peer/line/doors",
    "peer/local/words",
    "peer/router/port_request",
    "peer/trainer/effects",
    "peer/data/leased_data",
    "peer/trainer/machine",
    "protocol/process/networks",
    "protocol/process/mode_folders",
)

# Rooms of maths, and those that any language could read: besides the standard library only these.
THIRD_PARTY = {
    "compression": {"torch", "numpy", "triton"},
    "optim": {"torch", "numpy"},
    "collectives/mesh": set(),
    "collectives/round": {"msgspec"},
    "collectives/pipeline": set(),
    "coordinator/rounds": {"msgspec", "numpy"},
    "coordinator/court": {"msgspec", "numpy"},
    "coordinator/roster": set(),
    "coordinator/reach": set(),
    "coordinator/run": {"msgspec"},
    "peer/batches": {"msgspec"},
    "peer/restoring": {"msgspec"},
    "peer/machine": {"msgspec"},
    "protocol": {"msgspec", "msgpack", "pydantic", "blake3", "cryptography"},
}

# The thin shells around the pure code: the only files that see a socket of ZeroMQ's.
ZMQ_MODULES = (
    "protocol/process/sockets",
    "collectives/link/peer_connections",
    "collectives/link/port",
    "collectives/link/tcp_counts",
    "collectives/link/undialled",
    "collectives/link/zmq_link",
    "coordinator/restoring/restoring_door",
    "coordinator/server",
    "coordinator/door/dialer",
    "coordinator/door/front_door",
    "coordinator/door/gateway",
    "coordinator/door/keys",
    "coordinator/door/listener",
    "peer/agent/agent",
    "peer/first_contact",
    "peer/line/control",
    "peer/line/reachability",
    "peer/local/channel",
    "console/bench/bench",
    "console/doctor/facts",
    "console/screen/status_client",
)

FOLDERS = tuple(sorted({room.partition("/")[0] for room in ROOMS}))
IMPURE = {"torch", "zmq", "socket", "time", "os", "random", "threading", "asyncio", "logging", "sqlite3"}


@dataclass(frozen=True)
class Import:
    """One imported thing, as a dotted name, with a farflung module named in full where there is one."""

    name: str
    line: int
    relative: bool
    typing_only: bool  # under `if TYPE_CHECKING:`, never executed

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def path(self) -> str:
        """`farflung.peer.settings` is `peer/settings`; empty where it is not ours."""
        return self.name.partition(".")[2].replace(".", "/") if self.top == "farflung" else ""


@dataclass(frozen=True)
class Module:
    file: Path

    @property
    def label(self) -> str:
        return self.file.relative_to(ROOT).as_posix()

    @property
    def path(self) -> str:
        """As in the tables above: without `.py`."""
        return self.label.removesuffix(".py")

    @property
    def room(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def dotted(self) -> str:
        return "farflung." + self.path.replace("/", ".")

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.file.read_text(encoding="utf-8").splitlines()

    @functools.cached_property
    def tree(self) -> ast.Module:
        """It stays to the end, and is a million nodes with those of all modules: no search for garbage goes through
        them, while they are made or later, or that would take longer than to parse them."""
        searched = gc.isenabled()
        gc.disable()
        try:
            return ast.parse("\n".join(self.lines), filename=self.label)
        finally:
            gc.freeze()
            if searched:
                gc.enable()

    @functools.cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, typing_only=False))


def _imports(node: ast.AST, typing_only: bool) -> Iterator[Import]:
    """Every import below `node`, also those inside functions."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, False, typing_only)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield Import(_full_name(node.module or "", alias.name), node.lineno, node.level > 0, typing_only)
    elif isinstance(node, ast.If) and _is_for_types(node.test):
        for child in node.body:
            yield from _imports(child, typing_only=True)
        for child in node.orelse:
            yield from _imports(child, typing_only)
    else:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # in an expression there is no import
                yield from _imports(child, typing_only)


def _is_for_types(test: ast.expr) -> bool:
    name = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else ""
    return name == "TYPE_CHECKING"


def _full_name(module: str, name: str) -> str:
    """`from farflung.peer import settings` names a module, `from farflung.peer.settings import Caps` does not."""
    inside = module.split(".")[1:] + [name]
    if module == "farflung" or ROOT.joinpath(*inside).with_suffix(".py").is_file():
        return f"{module}.{name}"
    return module


def product_files() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def modules() -> list[Module]:
    return [Module(path) for path in product_files()]


@functools.cache
def python_outside_the_rooms() -> list[Module]:
    folders = [ROOT / name for name in ("tests", "examples", "benchmarks", "docs")]
    inside = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [Module(path) for path in sorted(ROOT.glob("*.py")) + inside]
