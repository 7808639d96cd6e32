"""The BitTorrent DHT as a phone book: signed records (BEP 44), put and found by a client that is no node itself.

Called by `farflung find` and by the process that announces a run (feeding.py).  It asks the nodes nearest to where a
record belongs, over UDP and IPv4, and needs no package.  Nodes are other people's, or of `farflung phonebook`
(`BitTorrentNode`, by libtorrent).  The run's key is not here: records come signed.  Must not know runs.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import time
from dataclasses import dataclass, field
from typing import Any, cast

from farflung.console.phonebook.bencode import (
    DATAGRAM_BYTES,
    ID_BYTES,
    SALT,
    Answer,
    Node,
    Value,
    answer_in,
    question,
    target_of,
)
from farflung.console.phonebook.book import Entry
from farflung.protocol.errors import Unreachable, UserError
from farflung.protocol.join_url import Address
from farflung.protocol.signing import ed25519_keys_of

NEAREST = 8  # nodes that keep a record
ASKED_MOST = 64  # nodes in one search
AT_ONCE = 8
PATIENCE_S = 1.0  # with one node
SEARCH_S = 6.0
LISTENS_WITHIN_S = 5.0
At = tuple[str, int]


@dataclass
class Search:
    """For the nodes nearest to a target.  Pure: whoever drives it asks, and brings answers."""

    target: bytes
    known: dict[At, Node] = field(default_factory=dict)
    asked: dict[At, float] = field(default_factory=dict)  # until when its answer is waited for
    answers: dict[At, Answer] = field(default_factory=dict)

    def next(self, now: float) -> list[At]:
        """Whom to ask now."""
        open_now = sum(until > now and at not in self.answers for at, until in self.asked.items())
        room = min(AT_ONCE - open_now, ASKED_MOST - len(self.asked))
        chosen = [at for at in self._near(now) if at not in self.asked][: max(0, room)]
        self.asked |= dict.fromkeys(chosen, now + PATIENCE_S)
        return chosen

    def is_over(self, now: float) -> bool:
        """Those nearest have answered, as far as they do."""
        return all(at in self.answers for at in self._near(now)) or (
            len(self.asked) >= ASKED_MOST and all(until <= now for until in self.asked.values())
        )

    def on_answer(self, at: At, answer: Answer) -> None:
        if at in self.asked and at not in self.answers:
            self.answers[at] = answer
            self.known[at] = Node(answer.number, at)
            for node in answer.nodes:
                # A stranger's word must not make this machine speak with its own network.
                if not _is_inside(node.at) or _is_inside(at):
                    self.known.setdefault(node.at, node)

    def _near(self, now: float) -> list[At]:
        """Nearest first; those that did not answer in time count for nothing, and those who are not known yet first."""
        alive = [at for at in self.known if at in self.answers or self.asked.get(at, now + 1.0) > now]
        return sorted(alive, key=lambda at: self._far(self.known[at].number))[:NEAREST]

    def _far(self, number: bytes) -> int:
        return int.from_bytes(number, "big") ^ int.from_bytes(self.target, "big") if number else -1


def _is_inside(at: At) -> bool:
    """Of this machine or its network."""
    return not ipaddress.ip_address(at[0]).is_global


class BitTorrentBook:
    def __init__(self, nodes: tuple[Address, ...]) -> None:
        """`nodes`: where to begin."""
        self._nodes = nodes
        self._mine = os.urandom(ID_BYTES)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def put(self, entry: Entry) -> int:
        record, number = entry.whereabouts.raw, entry.whereabouts.order
        found = self._search(target_of(entry.key))
        near = sorted(found.answers, key=lambda at: found._far(found.known[at].number))[:NEAREST]
        words: dict[At, dict[bytes, Value]] = {
            at: {
                b"k": entry.key, b"salt": SALT, b"seq": number, b"sig": entry.signature,
                b"token": found.answers[at].token, b"v": record,
            }
            for at in near if found.answers[at].token
        }  # fmt: skip
        waiting = {self._ask(at, b"put", each): at for at, each in words.items()}
        taken, until = 0, time.monotonic() + PATIENCE_S
        while waiting and (now := time.monotonic()) < until:
            for tag, at, answer in self._heard(until - now):
                if waiting.get(tag) == at:
                    del waiting[tag]
                    taken += answer is not None
        return taken

    def find(self, key: bytes) -> list[bytes]:
        """The key of a URL is that of two ed25519 keys, of which the run has one."""
        records: list[bytes] = []
        for each in ed25519_keys_of(key):
            answers = self._search(target_of(each)).answers.values()
            records += dict.fromkeys(answer.record for answer in answers if answer.record)
        return records

    def named(self, name: str) -> list[bytes]:
        raise UserError(
            f"'{name}': the BitTorrent DHT finds keys only, k= in a join URL; names need a book of hivemind's"
        )

    def close(self) -> None:
        self._socket.close()

    def _search(self, target: bytes) -> Search:
        search, tags = Search(target), dict[bytes, At]()
        for at in self._begin():
            search.known[at] = Node(b"", at)
        until = time.monotonic() + SEARCH_S
        while (now := time.monotonic()) < until and not search.is_over(now):
            for at in search.next(now):
                tags[self._ask(at, b"get", {b"target": target})] = at
            for tag, at, answer in self._heard(0.05):
                if answer is not None and tags.get(tag) == at:
                    search.on_answer(at, answer)
        if not search.answers:
            asked = ", ".join(map(str, self._nodes))
            raise Unreachable(
                f"no node of the phone book answers: {asked}; is UDP let through, and does one run there?"
            )
        return search

    def _begin(self) -> list[At]:
        found: list[At] = []
        for node in self._nodes:
            try:
                infos = socket.getaddrinfo(node.host, node.port, socket.AF_INET, socket.SOCK_DGRAM)
            except OSError:
                continue  # the others may do
            found += [(str(info[4][0]), node.port) for info in infos[:2]]
        return found

    def _ask(self, at: At, kind: bytes, words: dict[bytes, Value]) -> bytes:
        tag = os.urandom(4)
        try:
            self._socket.sendto(question(tag, self._mine, kind, words), at)
        except OSError:
            pass  # as if it did not answer
        return tag

    def _heard(self, wait_s: float) -> list[tuple[bytes, At, Answer | None]]:
        """What came, once something did."""
        select.select([self._socket], [], [], wait_s)
        heard: list[tuple[bytes, At, Answer | None]] = []
        for _ in range(2 * ASKED_MOST):
            try:
                raw, at = self._socket.recvfrom(DATAGRAM_BYTES)
            except OSError:
                break
            said = answer_in(raw)
            if said is not None:
                heard.append((said[0], (str(at[0]), int(at[1])), said[1]))
        return heard


# ---- a node -------------------------------------------------------------------------------------------------------


class BitTorrentNode:
    """Of the DHT, by libtorrent: it keeps others' records, and no torrent.  `port`: where it listens."""

    def __init__(
        self, listen: Address, nodes: tuple[Address, ...], more: dict[str, Any] | None = None
    ) -> None:
        """`nodes`: where to begin; none for the first one.  `more`: settings of libtorrent's, for tests."""
        try:
            import libtorrent
        except ImportError:
            raise UserError(
                "this kind of phone book needs libtorrent: pip install 'farflung[phonebook]'"
            ) from None
        here = ipaddress.ip_address(listen.host)
        settings: dict[str, Any] = {
            "listen_interfaces": str(listen),
            "enable_lsd": False,
            "enable_upnp": False,
            "enable_natpmp": False,
            "dht_bootstrap_nodes": "",
            "enable_dht": True,
            "alert_mask": 0,
        }
        if here.is_private or here.is_loopback:  # a book of one network: all its nodes may be neighbours
            for rule in ("dht_restrict_routing_ips", "dht_restrict_search_ips", "dht_ignore_dark_internet"):
                settings[rule] = False
        self._session = libtorrent.session(cast(Any, {**settings, **(more or {})}))
        for node in nodes:
            self._session.add_dht_node((node.host, node.port))
        until = time.monotonic() + LISTENS_WITHIN_S
        while not self._session.listen_port() and time.monotonic() < until:
            self._session.wait_for_alert(20)
        self.port = int(self._session.listen_port())
        if not self.port:
            raise UserError(f"cannot listen on {listen} for the phone book; choose another with --listen")

    def close(self) -> None:
        self._session.pause()
        del self._session
