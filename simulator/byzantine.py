"""Members of the simulator that lie to the coordinator, alone or in league: about the state that they hold, or about
the work of others.

Called by the simulator with every message that such a member is about to send; what comes back is sent instead.  A
liar's machine is an honest one underneath: it has the run's true state and was believed before it lies, so its lies
are as good as lies can be.  The ways to lie (scenario.py names them as well):

    forge  one false digest of the whole league, a list of hashes that fits it, true answers to all else
    mute   the same digest, and no answer to anything
    junk   the same digest, and answers that fit nothing
    lone   forge, but each one has a digest of its own
    echo   the true digest, and a proof of holding it that is none
    hush   forge, but when it has shown its list of hashes it is asked in vain for anything else

Others tell the truth about their state, and lie about something else:

    serve    false pieces of state, lists of hashes and results to whoever catches up
    censor   as owners they say that nobody's contribution has come but the league's
    pick     as owners each of them says so of fewer than half of the others
    slander  as owners they say that what came from others are other bytes than these say they sent
    keep     what they merge, and all that follows from it, they give to nobody but to each other
    refuse   each says of as many others as it may be believed about that their frames are of no use
    deny     they say that no result has come to them
    misname  as owners they name other hashes of what they merged than it has, and sign that
    length   as owners they say that what they merged is longer than it is
    deaf     no lie at all: no result comes to them, neither from owners nor from whom they ask instead
    twist    in a mesh, as owners they send roots other sums than they signed
    disown   in a mesh, as roots they say that the sums which they got were others than their owners signed
"""

from __future__ import annotations

from msgspec.structs import replace

from farflung.protocol.digests import (
    HASH_BYTES,
    LENGTH_BYTES,
    combined,
    hash_bytes,
    length_to_bytes,
    root_of,
    split_hashes,
)
from farflung.protocol.frames import FrameKind, Kind
from farflung.protocol.messages import (
    TAG_BYTES,
    Beat,
    FragmentBeat,
    FromMember,
    ProgressReport,
    Shown,
    Tick,
    ToMember,
    What,
)
from farflung.protocol.round_words import SUM_TAG_BYTES
from farflung.protocol.signed_words import (
    Results,
    SumsOfGroups,
    claim_part,
    results_part,
    sums_of_groups_part,
)
from farflung.protocol.verdicts import Verdict
from farflung.simulator.hostile import all_is_here, other_values
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import ABOUT_OTHERS, ABOUT_RESULTS, ABOUT_SUMS, ABOUT_THEMSELVES

SERVED = (Kind.STATE, Kind.MANIFEST, Kind.LOGGED)


class LiarsLeague:
    def __init__(self, way: str, members: set[str], run_id: bytes) -> None:
        self.way, self.members, self._run_id = way, members, run_id
        # (member, fragment) -> the version at which it was believed first: it lies from the next one on.
        self._believed: dict[tuple[str, int], int] = {}
        self.lied: dict[tuple[str, int], int] = {}  # and the version that it lied about first

    def says(self, peer: VirtualPeer, message: FromMember) -> FromMember | None:
        """What the liar says instead; None: nothing."""
        match message:
            case ProgressReport() if self.way == "deny":
                return replace(message, got=b"", got_hash=combined(()))
            case ProgressReport() if self.way in ABOUT_RESULTS:
                return self._results(peer, message)
            case ProgressReport() if self.way == "disown":
                return self._disown(peer, message)
            case ProgressReport() if self.way in ABOUT_OTHERS and self.way != "keep":
                return self._report(peer, message)
            case _ if self.is_true_to_its_state:
                return message
            case Beat():
                lies = tuple(self._beat(peer, said) for said in message.fragments)
                return replace(message, fragments=lies)
            case Shown():
                return self._shown(peer, message)
            case _:
                return message

    @property
    def is_true_to_its_state(self) -> bool:
        about_rounds = *ABOUT_OTHERS, *ABOUT_THEMSELVES, *ABOUT_RESULTS, *ABOUT_SUMS
        return self.way == "serve" or self.way in about_rounds

    def keeps(self, kind: FrameKind, source: str, target: str) -> bool:
        """That does not go from the one to the other."""
        if self.way == "deaf":
            return target in self.members and kind is Kind.RESULT
        among_liars = source not in self.members or target in self.members
        return self.way == "keep" and not among_liars and kind in (Kind.RESULT, *SERVED)

    def serves(self, kind: FrameKind, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        """What goes to another member instead of this frame, which is whole: only what others know gives it away."""
        if self.way == "serve" and kind is Kind.HAVE:  # whatever it has
            return all_is_here(header, payload)
        if self.way == "twist" and kind is Kind.SUM:
            return other_values(header, payload)
        if self.way != "serve" or not payload or kind not in SERVED:
            return header, payload
        return other_values(header, payload)

    def hears(self, peer: VirtualPeer, message: ToMember) -> ToMember:
        """A liar knows what it holds, whatever the run believes."""
        part = peer.machine.part
        if not isinstance(message, Tick) or part is None or self.is_true_to_its_state:
            return message
        for word in message.fragments:
            if word.verified:
                self._believed.setdefault((peer.peer, word.fragment), word.version)
        words = [
            replace(word, digests=(), verified=False, refuted=b"")
            if (held := part.replicas[word.fragment].held).whole
            and dict(word.digests).get(held.version, held.digest) != held.digest
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

    # ---- what it says of others ---------------------------------------------------------------------------------

    def _report(self, peer: VirtualPeer, said: ProgressReport) -> ProgressReport:
        others = sorted(said.held.keys() - self.members)
        match self.way:
            case "censor":
                return replace(said, held={m: shown for m, shown in said.held.items() if m in self.members})
            case "slander":
                false = {m: (said.held[m][0], hash_bytes(b"other bytes", said.held[m][1])) for m in others}
                return replace(said, held=said.held | false)
        # A different few for each of the league.
        turn = sorted(self.members).index(peer.peer) % max(1, len(others))
        few = (others[turn:] + others[:turn])[: max(1, (len(said.held) - 1) // 2)]
        if self.way == "pick":
            return replace(said, held={m: shown for m, shown in said.held.items() if m not in few})
        return replace(said, refused=dict.fromkeys(few, Verdict.BAD_HASH))

    def _results(self, peer: VirtualPeer, said: ProgressReport) -> ProgressReport:
        """What it says of what it merged itself."""
        if self.way == "length":
            return replace(said, lengths=length_to_bytes(1e9) * (len(said.lengths) // LENGTH_BYTES))
        part = peer.machine.part
        replica = part.replica_of_round(said.round_no) if part is not None else None
        flight = replica.rounds.flight if replica is not None else None
        if not said.merged or flight is None or flight.decision is None:
            return said
        false = b"".join(hash_bytes(b"another", each) for each in split_hashes(said.merged_hashes))
        lie = replace(said, merged_hashes=false)
        codec = peer.manifest.round.gather_codec
        results = Results.of(flight.plan, flight.decision, codec, lie)
        return replace(lie, signature=peer.me.sign(results_part(self._run_id, results)))

    def _disown(self, peer: VirtualPeer, said: ProgressReport) -> ProgressReport:
        """Of the first sum of each result that it makes."""
        part = peer.machine.part
        replica = part.replica_of_round(said.round_no) if part is not None else None
        flight = replica.rounds.flight if replica is not None else None
        if not said.sum_tags or flight is None or flight.decision is None:
            return said
        groups = len(SumsOfGroups.of(flight.decision, "", said).groups)
        column = flight.plan.column
        first = 0 if column and column.group else 1  # not its own
        tags = [said.sum_tags[at : at + SUM_TAG_BYTES] for at in range(0, len(said.sum_tags), SUM_TAG_BYTES)]
        tags[first::groups] = [hash_bytes(b"another", tag)[:SUM_TAG_BYTES] for tag in tags[first::groups]]
        lie = replace(said, sum_tags=b"".join(tags), inputs=hash_bytes(b"others", said.inputs))
        results = SumsOfGroups.of(flight.decision, peer.manifest.round.gather_codec, lie)
        return replace(lie, signature=peer.me.sign(sums_of_groups_part(self._run_id, results)))

    # ---- what it shows --------------------------------------------------------------------------------------------

    def _shown(self, peer: VirtualPeer, shown: Shown) -> Shown | None:
        show = peer.asked.get(shown.question)
        if self.way == "mute" or show is None or (self.way == "hush" and show.what is not What.HASHES):
            return None
        if self.way == "junk":
            return replace(shown, part=bytes(len(shown.part)))
        replica = (
            peer.machine.joined.part.replicas[show.fragment] if peer.machine.joined is not None else None
        )
        believed = self._believed.get((peer.peer, show.fragment), show.version)
        if (
            self.way == "echo"
            or show.version <= believed
            or show.what is not What.HASHES
            or replica is None
            or show.version != replica.held.version
        ):
            return shown
        raw = b"".join(self._list(peer, show.fragment))
        era, digest = peer.machine.era, root_of(split_hashes(raw))
        claim = claim_part(self._run_id, era, show.fragment, show.version, digest)
        return replace(shown, part=raw, signature=peer.me.sign(claim))
