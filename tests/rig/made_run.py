"""The parts of the run machine put together by hand: members are simply there, and say what a test lets them say.

For tests of one part alone, on virtual time.  No door, no hello, no guidance: who needs these takes the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.records import (
    Admitted,
    CommittedRound,
    DigestFixed,
    Record,
    from_bytes,
    to_bytes,
)
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_rules import rules_for
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import Effect, Note, Tell, Write
from farflung.coordinator.run.membership import Member
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.digests import hash_bytes
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Beat, FragmentBeat, Message
from farflung.protocol.round_words import Commit, Contact, Plan, Used
from farflung.protocol.states import PeerEvent
from rig.showing import showing, value_of

RUN_ID = bytes(range(16))
NOWHERE = FragmentBeat(
    fragment=0, version=-1, digest=b"", round_no=0, epoch=0, decision_no=0, ready=False, need=()
)
BARE_BEAT = Beat(
    session=bytes(16), seq=0, roster_no=0, fragments=(NOWHERE,), phase="inner", step=0, tokens=0, loss=None, tx_bytes=0,
    rx_bytes=0, up_bytes_per_s=0, down_bytes_per_s=0, have=(), want=0, samples=0, rough=False, era=0, saved=-1,
    unsure=False, leaving=False, data=b"",
)  # fmt: skip


def peer_of(name: str) -> str:
    """A peer id that shows whose it is."""
    return (name * 16)[:16]


def digest_of(version: int, fragment: int = 0) -> bytes:
    """What the run settles as the digest of that version."""
    return hash_bytes(f"version {version} of {fragment}".encode())


def holding(*versions: int) -> tuple[FragmentBeat, ...]:
    """A member's word of its fragments: each at such a version, with the run's digest; -1: it holds nothing."""
    return tuple(
        replace(NOWHERE, fragment=at, version=version, digest=digest_of(version, at) if version >= 0 else b"")
        for at, version in enumerate(versions)
    )


@dataclass
class MadeRun:
    manifest: Manifest = field(default_factory=Manifest)
    written: list[Record] = field(default_factory=list)  # all that the parts wrote; `replayed` folds it again

    def __post_init__(self) -> None:
        self.core = Core(self.manifest, RUN_ID, self.new_ledger())
        self.drivers = [RoundDriver(self.core, number) for number in range(self.core.ledger.rules.fragments)]

    def new_ledger(self) -> Ledger:
        rules = self.manifest.round
        lease_samples, every_rounds = self.manifest.data.lease_samples, self.manifest.checkpoint.every_rounds
        return Ledger(LedgerRules(lease_samples, rules.keep_results, rules.fragments, every_rounds))

    def replayed(self) -> Ledger:
        """What a coordinator that starts again makes of the journal."""
        self.effects()
        ledger = self.new_ledger()
        for record in self.written:
            ledger.apply(from_bytes(to_bytes(record)))
        return ledger

    # ---- members ---------------------------------------------------------------------------------------

    def enters(self, name: str, restarts: int = 0, network: str = "", verified: bool = True) -> Member:
        """A session of a peer that holds the run's state, unless it does not."""
        core, peer = self.core, peer_of(name)
        process = hash_bytes(f"{name} {restarts}".encode())
        core.write(Admitted(peer=peer, name=name, session=process[:16]))
        contact = Contact(peer, name, process, "")
        member = core.members.admit(
            contact, process[:16], process[16:], core.now, network, range(core.ledger.rules.fragments)
        )
        for standing in member.standings.values():
            standing.verified = standing.vouched = verified
        return member

    def says(self, member: Member, **changes: object) -> Beat:
        """The member's newest beat; of the versions that it names it shows that it holds them."""
        plain = {"seq": member.heard.seq + 1, "fragments": holding(*[0] * self.core.ledger.rules.fragments)}
        beat = replace(BARE_BEAT, session=member.session, **{**plain, **changes})
        shown = tuple(showing(self.core.ledger, said) for said in beat.fragments)
        member.beat = replace(beat, fragments=shown)
        member.heard.seq, member.heard.at = member.beat.seq, self.core.now
        return member.beat

    def loses(self, member: Member, how: PeerEvent = PeerEvent.FELL_SILENT) -> None:
        self.core.members.lose(member, how)

    # ---- rounds ----------------------------------------------------------------------------------------

    def opens(self, *members: Member, fragment: int = 0) -> Round:
        """A round is in flight, and counts on these processes."""
        driver = self.drivers[fragment]
        peers = tuple(sorted(member.peer for member in members))
        owners, codecs = (0,) * 2, ("fp32",) * len(peers)
        plan = Plan(self.core.ledger.round_no + 1, 1, driver.book.version, peers, owners, codecs, fragment)
        driver.round = Round(plan, rules_for(self.manifest, driver.book, peers), self.core.now)
        driver.participants.begin(peers)
        return driver.round

    def commits(
        self,
        used: dict[str, tuple[Used, ...]] | None = None,
        fragment: int = 0,
        tokens_by: dict[str, int] | None = None,
        seconds: float = 1.0,
    ) -> int:
        """The next version of the fragment, its digest settled: with the work of these peers."""
        used = used if used is not None else {peer_of("ann"): ()}
        version, peers = self.core.ledger.books[fragment].version + 1, tuple(sorted(used))
        tokens_by = tokens_by or {peer: (10 + at) // len(peers) for at, peer in enumerate(peers)}
        weights = tuple(1 / len(peers) for _ in peers)
        commit = Commit(version, version, peers, weights, bytes(32), "fp32", fragment)
        self.core.write(
            CommittedRound(
                commit=commit,
                used=used,
                excluded={},
                tokens=sum(tokens_by.values()),
                steps=1,
                loss=1.0,
                seconds=seconds,
                tx_bytes=0,
                tokens_by=tokens_by,
                at_s=self.core.now,
            )
        )
        digest = digest_of(version, fragment)
        shown = value_of(self.core.ledger, fragment, version, digest)
        self.core.write(DigestFixed(version=version, digest=digest, fragment=fragment, shown=shown))
        self.drivers[fragment].round = None
        self.drivers[fragment].participants.end()
        return version

    # ---- what came of it -------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Since the last time."""
        effects = self.core.take_effects()
        self.written += [each.record for each in effects if isinstance(each, Write)]
        return effects

    def records(self) -> list[Record]:
        return [each.record for each in self.effects() if isinstance(each, Write)]

    def notes(self) -> list[str]:
        return [each.text for each in self.effects() if isinstance(each, Note) and not each.routine]

    def told(self, member: Member) -> list[Message]:
        return [
            each.message for each in self.effects() if isinstance(each, Tell) and each.peer == member.peer
        ]
