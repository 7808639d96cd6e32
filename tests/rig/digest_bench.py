"""Members that name digests of a version: what of it is settled, and what is asked of whom.

Version 3 of the small model of rig/court_scene.py has just been committed.  What members show is signed with their
keys.  Nobody judges here, unless the bench is given a mode that does.
"""

from __future__ import annotations

from typing import Self

import pytest
from msgspec.structs import replace as changed

from farflung.coordinator.ledger.records import (
    CommittedRound,
    DigestFixed,
    Genesis,
    ModelFixed,
    Record,
    Started,
    Vouched,
)
from farflung.coordinator.modes.registry import Modes
from farflung.coordinator.run import digest_agreement
from farflung.coordinator.run.core import Offences
from farflung.coordinator.run.effects import KeepProof
from farflung.coordinator.run.membership import Member
from farflung.protocol.digests import drawn_chunk, hash_bytes, keyed_hash, root_of
from farflung.protocol.limits import PART_BYTES
from farflung.protocol.messages import TAG_BYTES, FragmentBeat, Shown, What
from farflung.protocol.signed_words import claim_part
from rig.court_scene import FRAGMENT, MANIFEST, MODEL, TRUTH, Holder
from rig.guests import Guest
from rig.made_run import NOWHERE, RUN_ID, MadeRun

TRUE = TRUTH.digest(3)
NUMBER = FRAGMENT.number


class Bench(MadeRun):
    def __init__(self, *holders: Holder) -> None:
        super().__init__(MANIFEST)
        self.core.modes = self.judges()
        write = self.core.write
        write(Started(incarnation=1, secret=hash_bytes(b"secret")))
        write(ModelFixed(model=MODEL, peer="ann"))
        write(Genesis(digest=hash_bytes(b"of the other fragment"), peer="ann", others=(TRUTH.digest(0),)))
        for version in (1, 2):
            self.makes(version)
            shown = self.true_value(version)
            write(DigestFixed(version=version, digest=TRUTH.digest(version), fragment=NUMBER, shown=shown))
        self.agreement = self.drivers[NUMBER].agreement
        self.book = self.core.ledger.books[NUMBER]
        self.people: dict[str, tuple[Member, Holder, Guest]] = {}
        for holder in holders:
            self.comes(holder)
        self.makes(3)
        self.effects()

    def judges(self) -> Modes:
        return ()

    @classmethod
    def in_a_crowd(cls, monkeypatch: pytest.MonkeyPatch, *names: str, makers: tuple[str, ...]) -> Self:
        """These are here, and hear of a commit with their beats; but its makers do at once."""
        monkeypatch.setattr(digest_agreement, "CROWD", 2)
        run = cls(*(Holder(name, version=2, base=1) for name in names))
        made = tuple(run.people[name][0].peer for name in makers)
        run.book.commits[3] = changed(run.book.commits[3], members=made, weights=(1.0,) * len(made))
        return run

    def comes(self, holder: Holder, vouched: bool = True) -> Member:
        member, guest = self.enters(holder.name, verified=False), Guest(len(self.people))
        member.identity = guest.identity
        self.people[holder.name] = member, holder, guest
        if vouched:
            self.core.write(Vouched(peer=member.peer, fragment=NUMBER))
        return member

    def becomes(self, holder: Holder) -> None:
        """Who is there by that name."""
        member, _, guest = self.people[holder.name]
        self.people[holder.name] = member, holder, guest

    def makes(self, version: int) -> None:
        commit = TRUTH.commit(version)
        self.core.write(
            CommittedRound(
                commit=commit, used={}, excluded={}, tokens=10, steps=1, loss=1.0, seconds=1.0, tx_bytes=0
            )
        )

    def true_value(self, version: int) -> bytes:
        nonce = self.core.ledger.nonce_of(NUMBER, version)
        return keyed_hash(nonce, TRUTH.states[version][drawn_chunk(nonce, FRAGMENT.count)])

    def word(self, name: str) -> FragmentBeat:
        """What its beat says: of a state of its own it shows what the league has agreed on."""
        _, holder, _ = self.people[name]
        if holder.version < 0:
            return changed(NOWHERE, fragment=NUMBER)
        nonce = self.core.ledger.nonce_of(NUMBER, holder.version)
        true = holder.digest == TRUTH.digest(holder.version)
        value = self.true_value(holder.version) if true else keyed_hash(nonce, holder.digest)
        value = value if holder.value is None else holder.value
        said = changed(NOWHERE, fragment=NUMBER, version=holder.version, digest=holder.digest)
        return changed(said, shown=nonce[:TAG_BYTES] + value if value else b"")

    def goes_on(self, seconds: float = 0.0, patience_over: bool = False) -> list[Record]:
        """Everybody's beats are heard and all questions are answered; what was written."""
        until = self.core.now + seconds
        self.records_and_effects()
        while True:
            words = [(self.people[name][0], self.word(name)) for name in self.people]
            words = [(member, said) for member, said in words if member.alive]
            for member, said in words:
                self.agreement.recognise(member, said)
            moved = self.agreement.settle(words, patience_over)
            asks = self.core.questions.due({member.peer for member, _ in words}, self.core.now)
            for peer, fields in asks:
                self._answers(peer, fields)
            for answer in self.core.questions.take_answers():
                moved |= self.agreement.on_answer(answer)
            if not moved and self.core.now >= until:
                return self.records_and_effects()
            self.core.now += 0.0 if moved else 0.5

    def records_and_effects(self) -> list[Record]:
        self.kept = [each for each in self.effects() if isinstance(each, KeepProof)]
        records, self.written = self.written, []
        return records

    def _answers(self, peer: str, fields: dict[str, object]) -> None:
        _, holder, guest = next(each for each in self.people.values() if each[0].peer == peer)
        what, version = What(str(fields["what"])), int(str(fields["version"]))
        holder.asked.append(what)
        if holder.after_list_mute and what is not What.HASHES:
            return
        raw = b"" if holder.mute else holder.shows(what, version, int(str(fields["chunk"]))) or b""
        if holder.mute:
            return
        claim = claim_part(RUN_ID, self.core.ledger.eras.number, NUMBER, version, root_of(holder.hashes))
        shown = Shown(
            session=bytes(16), seq=1, question=int(str(fields["question"])), start=0, total=len(raw), part=raw,
            signature=guest.signer.sign(claim) if what is What.HASHES else b"",
        )  # fmt: skip
        assert len(raw) <= PART_BYTES
        self.core.questions.on_shown(peer, shown, self.core.now)

    def is_verified(self, name: str) -> bool:
        return self.people[name][0].standings[NUMBER].verified

    def banned(self) -> set[str]:
        """Since it was asked last."""
        over, self.core.offences = self.core.offences, Offences()
        return {self.core.name(peer) for peer, _ in over.convicted}


def holders(*names: str, **more: object) -> list[Holder]:
    return [Holder(name, **more) for name in names]  # type: ignore[arg-type]


def fixed(digest: bytes, shown: bytes) -> DigestFixed:
    return DigestFixed(version=3, digest=digest, fragment=NUMBER, shown=shown)
