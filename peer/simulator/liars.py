"""Members of the simulator that lie to the coordinator about the state that they hold, alone or in league.

Called by the simulator with every message that such a member is about to send; what comes back is sent instead.  A
liar's machine is an honest one underneath: it has the run's true state and was believed before it lies, so its lies
are as good as lies can be.  The ways to lie (scenario.py names them as well):

    forge  one false digest of the whole league, a list of hashes that fits it, true answers to all else
    mute   the same digest, and no answer to anything
    junk   the same digest, and answers that fit nothing
    lone   forge, but each one has a digest of its own
    echo   the true digest, and a proof of holding it that is none
"""

from __future__ import annotations

from msgspec.structs import replace

from farflung.peer.simulator.peer import VirtualPeer
from farflung.protocol.digests import HASH_BYTES, hash_bytes, root_of, split_hashes
from farflung.protocol.messages import TAG_BYTES, Beat, FragmentBeat, FromMember, Shown, Tick, ToMember, What
from farflung.protocol.signed_words import claim_part


class League:
    def __init__(self, way: str, members: set[str], run_id: bytes) -> None:
        self.way, self.members, self._run_id = way, members, run_id
        # (member, fragment) -> the version at which it was believed first: it lies from the next one on.
        self._believed: dict[tuple[str, int], int] = {}
        self.lied: dict[tuple[str, int], int] = {}  # and the version that it lied about first

    def says(self, peer: VirtualPeer, message: FromMember) -> FromMember | None:
        """What the liar says instead; None: nothing."""
        match message:
            case Beat():
                lies = tuple(self._beat(peer, said) for said in message.fragments)
                return replace(message, fragments=lies)
            case Shown():
                return self._shown(peer, message)
            case _:
                return message

    def hears(self, peer: VirtualPeer, message: ToMember) -> ToMember:
        """A liar knows what it holds, whatever the run believes."""
        part = peer.machine.part
        if not isinstance(message, Tick) or part is None:
            return message
        for word in message.fragments:
            if word.verified:
                self._believed.setdefault((peer.peer, word.fragment), word.version)
        words = [
            replace(word, digests=(), verified=False, refuted=b"")
            if (lane := part.lanes[word.fragment]).whole
            and dict(word.digests).get(lane.version, lane.digest) != lane.digest
            else word
            for word in message.fragments
        ]
        return replace(message, fragments=tuple(words))

    # ---- what it names --------------------------------------------------------------------------------------------

    def _beat(self, peer: VirtualPeer, said: FragmentBeat) -> FragmentBeat:
        if said.version <= self._believed.get((peer.peer, said.fragment), said.version) or not said.digest:
            return said
        self.lied.setdefault((peer.peer, said.fragment), said.version)
        if self.way == "echo":
            return replace(said, shown=said.shown[:TAG_BYTES] + bytes(HASH_BYTES))
        digest = root_of(self._list(peer, said.fragment))
        value = hash_bytes(b"what the league shows", said.shown[:TAG_BYTES])
        shown = said.shown and said.shown[:TAG_BYTES] + value
        return replace(said, digest=digest, shown=shown)

    def _list(self, peer: VirtualPeer, fragment: int) -> list[bytes]:
        """The true list but for its last hash."""
        hashes = split_hashes(peer.state.manifest_bytes(fragment))
        own = peer.peer.encode() if self.way == "lone" else b""
        return [*hashes[:-1], hash_bytes(b"a lie", hashes[-1], own)]

    # ---- what it shows --------------------------------------------------------------------------------------------

    def _shown(self, peer: VirtualPeer, shown: Shown) -> Shown | None:
        show = peer.asked.get(shown.question)
        if self.way == "mute" or show is None:
            return None
        if self.way == "junk":
            return replace(shown, part=bytes(len(shown.part)))
        lane = peer.machine.joined.part.lanes[show.fragment] if peer.machine.joined is not None else None
        believed = self._believed.get((peer.peer, show.fragment), show.version)
        if (
            self.way == "echo"
            or show.version <= believed
            or show.what is not What.HASHES
            or lane is None
            or show.version != lane.version
        ):
            return shown
        raw = b"".join(self._list(peer, show.fragment))
        era, digest = peer.machine.era, root_of(split_hashes(raw))
        claim = claim_part(self._run_id, era, show.fragment, show.version, digest)
        return replace(shown, part=raw, signature=peer.me.sign(claim))
