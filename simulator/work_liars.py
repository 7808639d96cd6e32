"""Members of a simulated run that lie about their data and their work, alone and in league; and what must hold then.

Used by the simulator.  A liar is an honest peer whose words are changed on their way to the coordinator, and signed
anew.  Lies draw their own chance: a scenario without liars keeps its course.

Lies about data may be told from the start on where honest members decide what is committed first: `work_lies_early`.
Else they begin when something that was leased is committed, or when enough rounds show what is usual: a run that
liars begin among themselves is theirs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import CommittedRound, Record
from farflung.optim.schedule import ScheduleRules
from farflung.peer.data.leased_data import Span
from farflung.peer.machine.effects import Exit
from farflung.protocol.messages import UNKNOWN_LENGTH, Beat, Message, Sent
from farflung.protocol.signed_words import sent_part
from farflung.simulator.invariants import Broken
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import Scenario
from farflung.simulator.trainer import VirtualTrainer
from farflung.simulator.trainer_surroundings import TrainerHost, TrainerSurroundings

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
        read = [replace(span, stop=min(span.stop, self._samples)) for span in spans]
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
