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

import dataclasses
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs
from msgspec.structs import replace

from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import CommittedRound, Record
from farflung.optim.schedule import ScheduleRules
from farflung.peer.data.leased_data import Span
from farflung.peer.machine.effects import Exit
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
from farflung.protocol.frames import FrameKind, Kind
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
from farflung.protocol.round_words import SUM_TAG_BYTES
from farflung.protocol.signed_words import (
    Results,
    SumsOfGroups,
    claim_part,
    results_part,
    sent_part,
    sums_of_groups_part,
)
from farflung.simulator.bad_peers import all_is_here, other_values
from farflung.simulator.invariants import Broken
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import ABOUT_OTHERS, ABOUT_RESULTS, ABOUT_SUMS, ABOUT_THEMSELVES, Scenario
from farflung.simulator.trainer import VirtualTrainer
from farflung.simulator.trainer_surroundings import TrainerHost, TrainerSurroundings

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
            return self.scenario.work_lies_early or len(ledger.books[0].rates) >= 4
        return self.scenario.work_lies_early or ledger.leases.settled

    @property
    def ends_the_stream(self) -> bool:
        """They have most of the committed tokens: with what they say of its end the others may be left without data."""
        ledger = self.ledger()
        if ledger is None or not self.scenario.stream_samples or not self.scenario.work_liars:
            return False
        theirs = sum(tokens for peer, tokens in ledger.committed_tokens.items() if peer in self.keys)
        return 2 * theirs >= ledger.committed_tokens.total()

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
