"""Peers of a simulated run that break rules, and pairs of them that can't reach each other.

`Neighbours` are those of a pipeline: peers that are mute, damage what they send, or slander others.  The world asks
for every frame and every word of a peer; all of it lasts from a moment on until the run ends.  `LastPeer` damages
frames, changes what it has learned, makes wrong sums, lies about those of others, or keeps to itself what auditors ask
for.  The world asks whenever that peer sends something or has calculated something.  Nothing here draws anything in a
run without such peers.  Must not know the clock, the network, or what anybody makes of it.
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs
from msgspec.structs import replace

from farflung.collectives.round.effects import Merge, SendFrame
from farflung.compression.codec import codec_of
from farflung.compression.plain_codecs import HEADER_BYTES
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import CommittedRound, Record
from farflung.optim.schedule import ScheduleRules
from farflung.peer.data.leased_data import Span
from farflung.peer.machine.effects import Exit
from farflung.peer.machine.replicas import Replicas
from farflung.protocol.digests import (
    HASH_BYTES,
    LENGTH_BYTES,
    combined,
    hash_bytes,
    length_to_bytes,
    root_of,
    split_hashes,
)
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import FrameKind, Kind, Payload
from farflung.protocol.messages import (
    TAG_BYTES,
    UNKNOWN_LENGTH,
    Beat,
    FragmentBeat,
    FromMember,
    Message,
    ProgressReport,
    Sent,
    Shown,
    Tick,
    ToMember,
    What,
)
from farflung.protocol.mode_words import Audited, BatchBeat, ChunkVerdict, Complaint, MeshReport
from farflung.protocol.round_words import SUM_CODEC, SUM_TAG_BYTES, section
from farflung.protocol.signed_words import (
    Results,
    SumsOfGroups,
    claim_part,
    results_part,
    sent_part,
    sums_of_groups_part,
)
from farflung.simulator.invariants import Broken
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import ABOUT_OTHERS, ABOUT_RESULTS, ABOUT_SUMS, ABOUT_THEMSELVES, Scenario
from farflung.simulator.trainer import TrainerHost, TrainerSurroundings, VirtualTrainer

# ---- hostile -----------------------------------------------------------------------------------------------
# How a hostile peer of the simulator damages the frames that it sends, or what it has learned.
#
# Called by the simulator, which feeds the outcome to the receiver as the data plane would. Knows frames as
# bytes; the randomness is the caller's, so that a seed replays.

LARGEST_BYTES = 1 << 20  # more than any frame of the simulator
_LENGTH_AT, _HASH_AT, _CHUNK_AT = 44, 48, 40  # in the header; see protocol/frames.py

Parts = tuple[bytes, bytes]


def damaged(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    """As a bad line or memory does it: one bit.  A frame without a payload is left as it is."""
    return _flipped(header, payload, draw) if payload else (header, payload)


def _flipped(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    at = draw.randrange(len(payload))
    return header, payload[:at] + bytes([payload[at] ^ 1 << draw.randrange(8)]) + payload[at + 1 :]


def _cut(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    return header, payload[: draw.randrange(len(payload))]


def _too_long(header: bytes, payload: bytes, _: random.Random) -> Parts:
    return header, bytes(LARGEST_BYTES + 1)


def _garbage(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    return draw.randbytes(len(header)), payload


def _of_another_run(header: bytes, payload: bytes, _: random.Random) -> Parts:
    return header[:8] + b"another!" + header[16:], payload


def _for_another_chunk(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    """A frame that is whole and true, but for the chunk that it names."""
    return header[:_CHUNK_AT] + struct.pack("<I", draw.randrange(5)) + header[_LENGTH_AT:], payload


def _other_values(header: bytes, payload: bytes, _: random.Random) -> Parts:
    return other_values(header, payload)


def other_values(header: bytes, payload: bytes) -> Parts:
    """Another payload of the same form under its own hash: only what others know of it gives it away."""
    return _with_payload(header, payload[:-1] + bytes([payload[-1] ^ 1]))


def all_is_here(header: bytes, payload: bytes) -> Parts:
    """Of the word which pieces somebody has: all of them."""
    return _with_payload(header, b"\xff" * len(payload))


def _with_payload(header: bytes, payload: bytes) -> Parts:
    return header[:_HASH_AT] + hash_bytes(payload) + header[_HASH_AT + 32 :], payload


def _not_finite(header: bytes, payload: bytes, _: random.Random) -> Parts:
    return _with_payload(header, payload[:16] + b"\xff" * (len(payload) - 16))


_WAYS: tuple[Callable[[bytes, bytes, random.Random], Parts], ...] = (
    _flipped,
    _cut,
    _too_long,
    _garbage,
    _of_another_run,
    _for_another_chunk,
    _other_values,
    _not_finite,
)


def forged(payloads: Mapping[int, Payload], elements: int, how: str) -> dict[int, Payload]:
    """A contribution as a malicious peer makes it, in a form that is right: "1000x", "flip" or "nan"."""
    return {chunk: _forged(payload, elements, how) for chunk, payload in payloads.items()}


def _forged(payload: Payload, elements: int, how: str) -> Payload:
    if how == "nan":
        return bytes(payload)[:HEADER_BYTES] + b"\xff" * (len(payload) - HEADER_BYTES)
    codec = codec_of(payload)
    return codec.encode(codec.decode(payload, elements).mul_({"1000x": 1000.0, "flip": -1.0}[how]))


def forged_sum(payload: bytes) -> bytes:
    """A result that is a result in every way, but not the sum: the lowest bit of its first value is another one."""
    return payload[:HEADER_BYTES] + bytes([payload[HEADER_BYTES] ^ 1]) + payload[HEADER_BYTES + 1 :]


def lied(audited: Audited, wrong: bool) -> Audited:
    """What an auditor found, as a liar tells it."""
    chunks = tuple(ChunkVerdict(each.chunk, wrong) for each in audited.chunks)
    return msgspec.structs.replace(audited, chunks=chunks)


def spoil(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    """Header and payload as a hostile peer sends them.  A frame without a payload stays as it is."""
    return draw.choice(_WAYS)(header, payload, draw) if payload else (header, payload)


# ---- bad peers ---------------------------------------------------------------------------------------------

# A peer whose hand for crossings hangs still says that there is room: that was somebody else's work.
_STILL_SAID = "ROOM"


@dataclass
class Neighbours:
    scenario: Scenario
    peers: Sequence[str]  # in order
    random: random.Random
    ledger: Callable[[], Ledger | None]  # of the coordinator, which knows who sits where
    now: Callable[[], float]

    def __post_init__(self) -> None:
        name, drawn = self.peers.__getitem__, self.scenario
        self._apart = {frozenset(map(name, pair)) for pair in drawn.apart}
        self._mute, self._damages = set(map(name, drawn.mute)), set(map(name, drawn.damages))
        self.slanderers = set(map(name, drawn.slanders))

    @property
    def _began(self) -> bool:
        return self.now() >= self.scenario.bad_from_s

    def holds_back(self, source: str, effect: SendFrame) -> bool:
        """It never leaves."""
        if not self._began:
            return False
        if frozenset((source, effect.to)) in self._apart:
            return True
        kind = effect.frame.header.kind
        about = kind.crossing or kind in (Kind.LATER, Kind.MISSING)
        return source in self._mute and about and kind.name != _STILL_SAID

    def spoils(self, source: str, effect: SendFrame, header: bytes, payload: bytes, calm: bool) -> Parts:
        if not effect.frame.header.kind.crossing:
            return header, payload
        by_line = not calm and self.random.random() < self.scenario.damaged
        if by_line or (source in self._damages and self._began):
            return damaged(header, payload, self.random)
        return header, payload

    def says(self, source: str, message: FromMember) -> FromMember:
        """A slanderer complains of one neighbour, or of all of them."""
        ledger = self.ledger()
        lies = source in self.slanderers and self._began
        if not lies or not isinstance(message, Beat) or ledger is None:
            return message
        book = ledger.parts["batches"]
        mine = book.seat_of(source)
        batch = section(BatchBeat, message.sections)
        if batch is None or mine is None:
            return message
        near = [seat.number for seat in book.seats.values() if abs(seat.stage - mine.stage) == 1]
        few = near if self.scenario.chunks % 2 else near[:1]
        said = tuple(Complaint(number, self.scenario.batch == 12) for number in few)
        lie = replace(batch, complains=said)
        return replace(message, sections=(*(each for each in message.sections if each is not batch), lie))


@dataclass
class LastPeer:
    scenario: Scenario
    peer: str
    random: random.Random
    elements: int  # of a chunk
    cheated: dict[int, int] = field(default_factory=dict)  # by round, the chunk that is made wrong
    wrong: set[bytes] = field(default_factory=set)  # hashes of the sums that it made wrong
    wrong_sums: dict[bytes, bytes] = field(default_factory=dict)  # of groups: by the hash of the right one
    told_by_auditors: list[Audited] = field(default_factory=list)

    @property
    def hostile(self) -> str:
        """Its name, where it damages its frames."""
        return self.peer if self.scenario.hostile > 0.0 else ""

    def spoils(self, source: str, header: bytes, payload: bytes, now: float) -> Parts:
        if source == self.hostile and now < self.scenario.hostile_until_s:  # else a seed keeps its course
            if self.random.random() < self.scenario.hostile:
                return spoil(header, payload, self.random)
        return header, payload

    def forges(self, source: str, payloads: dict[int, Payload]) -> dict[int, Payload]:
        how = self.scenario.forges if source == self.peer else ""
        return forged(payloads, self.elements, how) if how else payloads

    def forges_sum(self, source: str, effect: Merge, made: bytes) -> bytes:
        """One chunk of each round that it owns any of: of a mesh the result, or what its group adds to it."""
        of_group = effect.codec == SUM_CODEC
        if not self.scenario.cheats or source != self.peer or of_group != self.scenario.cheats_in_group:
            return made
        if self.cheated.setdefault(effect.round_no, effect.chunk) != effect.chunk:
            return made
        wrong = forged_sum(made)
        self.wrong.add(hash_bytes(wrong))
        if of_group:
            self.wrong_sums[hash_bytes(made)] = wrong
        return wrong

    def says(self, message: FromMember, lies: bool) -> FromMember | None:
        """What an auditor says; `lies`: it is of the league.  None: it keeps silent."""
        if isinstance(message, Audited) and lies:
            if self.scenario.mutes:
                return None
            message = lied(message, wrong=self.scenario.accuses)
        if isinstance(message, Audited):
            self.told_by_auditors.append(message)
        return message

    def withholds(self, source: str, effect: SendFrame, part: Replicas | None) -> bool:
        """Owners get its contribution, and auditors do not."""
        if not self.scenario.withholds or source != self.peer:
            return False
        header = effect.frame.header
        replica = part.replica_of_chunk(header.chunk) if part is not None else None
        if header.kind != Kind.CONTRIBUTION or replica is None:
            return False
        plan = replica.rounds.flight.plan if replica.rounds.flight is not None else None
        if plan is None or plan.round_no != header.round_no:
            return True
        return plan.owner_of(header.chunk - replica.fragment.first) != effect.to


# ---- byzantine ---------------------------------------------------------------------------------------------
# Members of the simulator that lie to the coordinator, alone or in league: about the state that they hold, or
# about the work of others.
#
# Called by the simulator with every message that such a member is about to send; what comes back is sent
# instead. A liar's machine is an honest one underneath: it has the run's true state and was believed before
# it lies, so its lies are as good as lies can be. The ways to lie (scenario.py names them as well):
#
#     forge  one false digest of the whole league, a list of hashes that fits it, true answers to all else
#     mute   the same digest, and no answer to anything
#     junk   the same digest, and answers that fit nothing
#     lone   forge, but each one has a digest of its own
#     echo   the true digest, and a proof of holding it that is none
#     hush   forge, but when it has shown its list of hashes it is asked in vain for anything else
#
# Others tell the truth about their state, and lie about something else:
#
#     serve    false pieces of state, lists of hashes and results to whoever catches up
#     censor   as owners they say that nobody's contribution has come but the league's
#     pick     as owners each of them says so of fewer than half of the others
#     slander  as owners they say that what came from others are other bytes than these say they sent
#     keep     what they merge, and all that follows from it, they give to nobody but to each other
#     refuse   each says of as many others as it may be believed about that their frames are of no use
#     deny     they say that no result has come to them
#     misname  as owners they name other hashes of what they merged than it has, and sign that
#     length   as owners they say that what they merged is longer than it is
#     deaf     no lie at all: no result comes to them, neither from owners nor from whom they ask instead
#     twist    in a mesh, as owners they send roots other sums than they signed
#     disown   in a mesh, as roots they say that the sums which they got were others than their owners signed

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
        if self.way == "twist" and kind.name == "SUM":
            return other_values(header, payload)
        if self.way != "serve" or not payload or kind not in SERVED:
            return header, payload
        return other_values(header, payload)

    def hears(self, peer: VirtualPeer, message: ToMember) -> ToMember:
        """A liar knows what it holds, whatever the run believes."""
        part = peer.member.part
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
        part = peer.member.part
        replica = part.replica_of_round(said.round_no) if part is not None else None
        flight = replica.rounds.flight if replica is not None else None
        if not said.merged or flight is None or flight.deciding.newest is None:
            return said
        false = b"".join(hash_bytes(b"another", each) for each in split_hashes(said.merged_hashes))
        lie = replace(said, merged_hashes=false)
        codec = peer.manifest.round.gather_codec
        results = Results.of(flight.plan, flight.deciding.newest, codec, lie)
        return replace(lie, signature=peer.me.sign(results_part(self._run_id, results)))

    def _disown(self, peer: VirtualPeer, said: ProgressReport) -> ProgressReport:
        """Of the first sum of each result that it makes."""
        part = peer.member.part
        replica = part.replica_of_round(said.round_no) if part is not None else None
        flight = replica.rounds.flight if replica is not None else None
        of_mesh = section(MeshReport, said.sections)
        if of_mesh is None or not of_mesh.tags or flight is None or flight.deciding.newest is None:
            return said
        groups = len(SumsOfGroups.of(flight.deciding.newest, "", said).groups)
        column = flight.plan.column
        first = 0 if column and column.group else 1  # not its own
        of_all = of_mesh.tags
        tags = [of_all[at : at + SUM_TAG_BYTES] for at in range(0, len(of_all), SUM_TAG_BYTES)]
        tags[first::groups] = [hash_bytes(b"another", tag)[:SUM_TAG_BYTES] for tag in tags[first::groups]]
        lie = replace(
            said, sections=(replace(of_mesh, tags=b"".join(tags)),), inputs=hash_bytes(b"others", said.inputs)
        )
        results = SumsOfGroups.of(flight.deciding.newest, peer.manifest.round.gather_codec, lie)
        return replace(lie, signature=peer.me.sign(sums_of_groups_part(self._run_id, results)))

    # ---- what it shows --------------------------------------------------------------------------------------------

    def _shown(self, peer: VirtualPeer, shown: Shown) -> Shown | None:
        show = peer.asked.get(shown.question)
        if self.way == "mute" or show is None or (self.way == "hush" and show.what is not What.HASHES):
            return None
        if self.way == "junk":
            return replace(shown, part=bytes(len(shown.part)))
        replica = peer.member.joined.part.replicas[show.fragment] if peer.member.joined is not None else None
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
        era, digest = peer.member.reports.era, root_of(split_hashes(raw))
        claim = claim_part(self._run_id, era, show.fragment, show.version, digest)
        return replace(shown, part=raw, signature=peer.me.sign(claim))


# ---- work liars --------------------------------------------------------------------------------------------
# Members of a simulated run that lie about their data and their work, alone and in league; and what must hold
# then.
#
# Used by the simulator. A liar is an honest peer whose words are changed on their way to the coordinator, and
# signed anew. Lies draw their own chance: a scenario without liars keeps its course.
#
# Lies about data may be told from the start on where honest members decide what is committed first:
# `work_lies_early`. Else they begin when something that was leased is committed, or when enough rounds show
# what is usual: a run that liars begin among themselves is theirs.

MANY_TIMES = 1000  # as many tokens as it has learned from
LIES = ("length", "end", "print", "wild", "tokens")
GOOD_ENDS = ("", "left", "finished")


class StreamTrainer(VirtualTrainer):
    """Reads a stream of so many samples, and does not know how many these are before it has read to the end."""

    def __init__(
        self,
        host: TrainerHost,
        world: TrainerSurroundings,
        rules: ScheduleRules,
        samples: int,
        reads_ahead: int = 0,
        looks_every: int = 1,
    ) -> None:
        super().__init__(host, world, rules, reads_ahead, looks_every)
        self.dataset_samples = UNKNOWN_LENGTH
        self._samples = samples

    def _take(self, spans: tuple[Span, ...]) -> None:
        if any(span.stop > self._samples for span in spans):
            self.dataset_samples = self._samples
        read = [dataclasses.replace(span, stop=min(span.stop, self._samples)) for span in spans]
        read = [span for span in read if span.start < span.stop]
        if read:
            super()._take(tuple(read))
        else:
            self._again()


def trainer_for(scenario: Scenario, usual: type[VirtualTrainer]) -> Callable[..., VirtualTrainer]:
    made: Callable[..., VirtualTrainer] = usual
    if scenario.stream_samples:
        made = partial(StreamTrainer, samples=scenario.stream_samples)
    made = partial(made, reads_ahead=scenario.reads_ahead) if scenario.reads_ahead else made
    return partial(made, looks_every=scenario.looks_every) if scenario.looks_every > 1 else made


@dataclass
class WorkLeague:
    """The liars of one run: they say the same."""

    scenario: Scenario
    run_id: bytes
    keys: Mapping[str, Ed25519PrivateKey]  # of the liars, by peer
    ledger: Callable[[], Ledger | None]  # what the coordinator knows, if it is there
    draw: random.Random

    @staticmethod
    def of(
        scenario: Scenario,
        run_id: bytes,
        keys: Mapping[str, Ed25519PrivateKey],
        ledger: Callable[[], Ledger | None],
        seed: int,
    ) -> WorkLeague:
        """The last so many of the peers in `keys`."""
        liars = list(keys)[len(keys) - scenario.work_liars :]
        league = {peer: keys[peer] for peer in liars}
        return WorkLeague(scenario, run_id, league, ledger, random.Random(f"liars {seed}"))

    def lies(self, what: str) -> bool:
        if what not in self.scenario.work_lies.split():
            return False
        ledger = self.ledger()
        if ledger is None:
            return False
        if what == "tokens":
            return self.scenario.work_lies_early or len(ledger.books[0].figures.rates) >= 4
        return self.scenario.work_lies_early or ledger.leases.settled

    @property
    def ends_the_stream(self) -> bool:
        """They have most of the committed tokens: with what they say of its end the others may be left without data."""
        ledger = self.ledger()
        if ledger is None or not self.scenario.stream_samples or not self.scenario.work_liars:
            return False
        theirs = sum(tokens for peer, tokens in ledger.peers.tokens.items() if peer in self.keys)
        return 2 * theirs >= ledger.peers.tokens.total()

    # ---- what they say ----------------------------------------------------------------------------------

    def said(self, peer: str, message: Message) -> Message:
        if peer not in self.keys:
            return message
        if isinstance(message, Sent) and self.lies("tokens"):
            lie = structs.replace(message, tokens=MANY_TIMES * message.tokens)
            return structs.replace(lie, signature=self.keys[peer].sign(sent_part(self.run_id, lie)))
        if isinstance(message, Beat) and message.samples:
            return self._beat(message)
        return message

    def _beat(self, beat: Beat) -> Beat:
        if self.lies("length"):
            beat = structs.replace(beat, samples=7)
        if self.lies("end"):
            beat = structs.replace(beat, samples=3 if self.scenario.stream_samples else beat.samples)
        if self.lies("print"):
            beat = structs.replace(beat, data=b"a print of others")
        if self.lies("wild"):
            samples = self.draw.choice((1, 7, 59, 61, UNKNOWN_LENGTH, beat.samples))
            beat = structs.replace(beat, samples=samples, data=self.draw.choice((b"", b"one", beat.data)))
        return beat

    # ---- what must hold ---------------------------------------------------------------------------------

    def saw(self, what: str, details: object) -> None:
        """Nobody who told the truth is sent away for what others said."""
        if what != "exit" or not self.scenario.work_liars:
            return
        peer, effect = cast("tuple[VirtualPeer, Exit]", details)
        if peer.peer not in self.keys and effect.code not in GOOD_ENDS:
            raise Broken(f"P18 is broken: {peer.peer} told the truth and was sent away: {effect.reason}")

    def on_record(self, record: Record, truth: Callable[[str, int], int]) -> None:
        """P9: what is believed of a liar is not what it says, and of the others it is all.  `truth`: the tokens
        of a contribution."""
        if not (isinstance(record, CommittedRound) and self.lies("tokens") and record.tokens_by):
            return
        for peer, believed in record.tokens_by.items():
            true = truth(peer, record.commit.round_no)
            if peer in self.keys and believed > self.scenario.believed_most * true:
                raise Broken(f"P9 is broken: {believed} tokens are believed of {peer}, which has {true}")
            if peer not in self.keys and believed < true:
                raise Broken(f"P9 is broken: {believed} tokens are believed of {peer}, which has {true}")
