"""Mutants of members' connections as a whole, and of what the host changes about who may come in.  Read by
mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

COUNTED = ("tests/protocol/process/test_lines.py",)
AT_SOCKETS = ("tests/coordinator/test_members_lines.py",)

LINES = (
    Mutant(
        "P8 one key has few connections",
        "protocol/process/networks.py",
        "if known == key or (len(mine) <= self._bounds.of_key and len(self) <= self._room):",
        "if known == key or len(self) <= self._room:",
        COUNTED,
    ),
    Mutant(
        "P8 of one key the longest silent connection makes room",
        "protocol/process/networks.py",
        "        oldest = next(iter(mine))\n",
        "        oldest = line\n",
        COUNTED,
    ),
    Mutant(
        "P8 silent connections are bounded in all",
        "protocol/process/networks.py",
        "(len(self._silent) >= self._bounds.silent or ",
        "(",
        COUNTED,
    ),
    Mutant(
        "P8 silent connections make room where descriptors are few",
        "protocol/process/networks.py",
        " or len(self) >= self._room)",
        ")",
        COUNTED,
    ),
    Mutant(
        "P8 silent connections of one network are bounded",
        "protocol/process/networks.py",
        "if network and len(neighbours) >= self._bounds.silent_of_network:",
        "if False:",
        COUNTED,
    ),
    Mutant(
        "a key that is let in again keeps its connections",
        "protocol/process/networks.py",
        "leave = {key for key in keys if not stays(key)}",
        "leave = keys",
        COUNTED,
    ),
    Mutant(
        "a number that is used again is whose name came last",
        "protocol/process/networks.py",
        "if known != key and line not in self._going:",
        "if not known and line not in self._going:",
        COUNTED,
    ),
    Mutant(
        "members leave descriptors to all else",
        "protocol/process/descriptors.py",
        "return max(most - OTHER_DESCRIPTORS, most // 2)",
        "return most",
        COUNTED,
    ),
    Mutant(
        "the end of a connection is not told of the one with its number",
        "coordinator/door/listener.py",
        "ended.pop(descriptor, None)",
        "ended.get(descriptor, None)",
        COUNTED,
    ),
    Mutant(
        "P8 after a ban silent connections are cut at the coordinator's own socket",
        "coordinator/server.py",
        "for descriptor in self._own.silent():",
        "for descriptor in list[int]():",
        AT_SOCKETS,
    ),
    Mutant(
        "P8 after a ban silent connections are cut at a gateway",
        "coordinator/door/gateway.py",
        "for descriptor in self._lines.silent():",
        "for descriptor in list[int]():",
        AT_SOCKETS,
    ),
    Mutant(
        "P8 who speaks with a key that is not in is hung up on",
        "coordinator/server.py",
        "self._own.send_away(arrival.key, now + GOODBYE_MS / 1000)",
        "pass",
        AT_SOCKETS,
    ),
    Mutant(
        "P8 who speaks at a gateway with a key that is not in is hung up on",
        "coordinator/door/gateway.py",
        "self._lines.send_away(arrival.key, now + GOODBYE_MS / 1000)",
        "pass",
        AT_SOCKETS,
    ),
    Mutant(
        "the operator is answered where descriptors have run out",
        "coordinator/operator_socket.py",
        "if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._give_spare():",
        "if True:",
        ("tests/coordinator/door/test_door_limits.py",),
    ),
    Mutant(
        "a descriptor is kept for the next operator, too",
        "coordinator/operator_socket.py",
        "        self._spare = None\n",
        "        self._spare = -1\n",
        ("tests/coordinator/door/test_door_limits.py",),
    ),
    Mutant(
        "amended to a list the coordinator reads one",
        "coordinator/admission/allowlist.py",
        "self._mode.allowed = self._list.refreshed()",
        "self._list.refreshed()",
        ("tests/coordinator/admission/test_allowlist.py",),
    ),
)
