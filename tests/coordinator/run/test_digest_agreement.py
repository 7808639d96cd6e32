"""Which digest a version has, and who holds it: settled while nobody contradicts, proven where somebody does.

A settling with members that are simply there; version 3 of the small model of rig/court_scene.py has just been
committed.  What they show is signed with their keys, and the court calculates with the model's real states.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from farflung.coordinator.court.dispute import TRIED_AT_ONCE
from farflung.coordinator.court.questions import PATIENCE_S
from farflung.coordinator.ledger.records import (
    CommittedRound,
    Departed,
    DigestFixed,
    DigestRefuted,
    DigestWithdrawn,
    Genesis,
    ModelFixed,
    Record,
    RolledBack,
    ShownFixed,
    Started,
    Struck,
    Vouched,
)
from farflung.coordinator.run import digest_agreement
from farflung.coordinator.run.effects import KeepProof
from farflung.coordinator.run.membership import Member
from farflung.protocol.causes import DepartureCause
from farflung.protocol.digests import drawn_chunk, hash_bytes, keyed_hash, root_of, split_hashes
from farflung.protocol.limits import PART_BYTES
from farflung.protocol.messages import TAG_BYTES, FragmentBeat, Shown, What
from farflung.protocol.signed_words import claim_part
from rig.court_scene import FRAGMENT, MANIFEST, MODEL, TRUTH, Holder, liar
from rig.guests import Guest
from rig.made_run import NOWHERE, RUN_ID, MadeRun, peer_of

TRUE = TRUTH.digest(3)
NUMBER = FRAGMENT.number


class Bench(MadeRun):
    def __init__(self, *holders: Holder) -> None:
        super().__init__(MANIFEST)
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
        claim = claim_part(RUN_ID, self.core.ledger.era, NUMBER, version, root_of(holder.hashes))
        shown = Shown(
            session=bytes(16), seq=1, question=int(str(fields["question"])), start=0, total=len(raw), part=raw,
            signature=guest.signer.sign(claim) if what is What.HASHES else b"",
        )  # fmt: skip
        assert len(raw) <= PART_BYTES
        self.core.questions.on_shown(peer, shown, self.core.now)

    def is_verified(self, name: str) -> bool:
        return self.people[name][0].standings[NUMBER].verified

    def banned(self) -> set[str]:
        return {self.core.name(peer) for peer, _ in self.core.take_convicted()}


def holders(*names: str, **more: object) -> list[Holder]:
    return [Holder(name, **more) for name in names]  # type: ignore[arg-type]


def fixed(digest: bytes, shown: bytes) -> DigestFixed:
    return DigestFixed(version=3, digest=digest, fragment=NUMBER, shown=shown)


# ---- in a crowd -----------------------------------------------------------------------------------------------------


def in_a_crowd(monkeypatch: pytest.MonkeyPatch, *names: str, makers: tuple[str, ...]) -> Bench:
    """These are here, and hear of a commit with their beats; but its makers do at once."""
    monkeypatch.setattr(digest_agreement, "CROWD", 2)
    run = Bench(*(Holder(name, version=2, base=1) for name in names))
    made = tuple(run.people[name][0].peer for name in makers)
    run.book.commits[3] = changed(run.book.commits[3], members=made, weights=(1.0,) * len(made))
    return run


def test_P18_in_a_crowd_a_digest_is_settled_when_most_of_those_have_spoken_who_heard_of_the_commit_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    makers = ("ann", "bob", "cyd")
    run = in_a_crowd(monkeypatch, *makers, *(f"other{n}" for n in range(9)), makers=makers)
    for name in ("ann", "bob"):
        assert not any(isinstance(each, DigestFixed) for each in run.goes_on()), name
        run.becomes(Holder(name))
    assert fixed(TRUE, run.true_value(3)) in run.goes_on(), "two of three"


def test_P18_in_a_crowd_who_hears_of_a_commit_late_and_knows_better_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = tuple(f"other{n}" for n in range(5))
    run = in_a_crowd(monkeypatch, "eve", "ivy", *others, makers=("eve", "ivy"))
    for name in ("eve", "ivy"):
        run.becomes(liar(name))
    [lie] = [each for each in run.goes_on() if isinstance(each, DigestFixed)]
    assert lie.digest != TRUE, "all who made it say so"
    for name in others:
        run.becomes(Holder(name))
    assert fixed(TRUE, run.true_value(3)) in run.goes_on(30.0)
    assert run.banned() == {"eve", "ivy"}


# ---- all name one ---------------------------------------------------------------------------------------------------


def test_P18_what_all_name_is_settled_and_who_shows_it_holds_it() -> None:
    run = Bench(*holders("ann", "bob"))
    assert run.goes_on() == [fixed(TRUE, run.true_value(3))]
    run.goes_on()
    assert run.is_verified("ann") and run.is_verified("bob")
    assert run.people["ann"][1].asked == [], "nobody is asked for bytes"


def test_P18_who_never_held_the_runs_state_is_not_heard_and_starts_no_dispute() -> None:
    run = Bench(*holders("ann", "bob"))
    for number in range(8):
        run.comes(liar(f"eve{number}"), vouched=False)
    assert run.goes_on() == [fixed(TRUE, run.true_value(3))] and run.agreement.reason == ""


def test_P18_for_newcomers_that_never_held_the_runs_state_nobody_waits() -> None:
    run = Bench(*holders("ann"))
    for number in range(8):
        run.comes(Holder(f"new{number}", version=2, base=1), vouched=False)
    assert fixed(TRUE, run.true_value(3)) in run.goes_on()


def test_P18_an_echo_of_the_digest_shows_nothing() -> None:
    """It knows the digest and the nonce, from its tick, and not the bytes."""
    run = Bench(*holders("ann", "bob"))
    run.goes_on()
    run.comes(Holder("eve", value=bytes(32), says={(What.HASHES, 3): None}))
    records = run.goes_on(1.0)
    assert not run.is_verified("eve") and run.is_verified("ann")
    assert [type(each).__name__ for each in records] == ["Struck"]
    member, _, _ = run.people["eve"]
    assert run.agreement.refuted(member, run.word("eve")) == TRUE, "it is told to take the run's state"


def test_P18_without_a_value_or_under_another_versions_nonce_nothing_is_shown() -> None:
    run = Bench(*holders("ann", "bob"))
    run.goes_on()
    for value in (b"", run.true_value(2)):
        run.people["bob"][1].value = value
        run.people["bob"][1].mute = True
        run.goes_on()
        assert not run.is_verified("bob")


def test_P18_a_false_value_that_was_settled_is_corrected_by_an_honest_members_bytes() -> None:
    """Liars that were the first to show it name the true digest and a value of their own: nobody else could show it."""
    run = Bench(*holders("eve", "mal", value=hash_bytes(b"agreed"), mute=True))
    assert run.goes_on() == [fixed(TRUE, hash_bytes(b"agreed"))]
    run.goes_on()
    assert run.is_verified("eve")
    run.comes(Holder("ann"), vouched=False)
    records = run.goes_on(1.0)
    assert ShownFixed(version=3, fragment=NUMBER, shown=run.true_value(3)) in records
    assert run.is_verified("ann") and not run.is_verified("eve")
    assert What.STATE in run.people["ann"][1].asked


# ---- some name another one -----------------------------------------------------------------------------------


@pytest.mark.parametrize("league", [1, 2, 9])
def test_P18_a_lie_is_refuted_its_liars_are_banned_and_the_truth_is_settled(league: int) -> None:
    run = Bench(Holder("ann"), *[liar(f"eve{number}") for number in range(league)])
    records = run.goes_on(1.0)
    [refuted] = [each for each in records if isinstance(each, DigestRefuted)]
    liars = {f"eve{number}" for number in range(league)}
    assert {run.core.name(peer) for peer in refuted.peers} == liars == run.banned()
    assert fixed(TRUE, run.true_value(3)) in records and run.is_verified("ann")
    assert (refuted.version, refuted.fragment, refuted.chunk) == (3, NUMBER, FRAGMENT.first + 1)
    [kept] = run.kept
    assert (
        set(kept.peers) == set(refuted.peers) and root_of(split_hashes(kept.proof.claimed)) == refuted.digest
    )
    assert not run.book.vouched & set(refuted.peers), "whoever comes back is heard no more"


def test_P18_nothing_is_settled_and_no_round_opens_while_members_contradict_each_other() -> None:
    run = Bench(Holder("ann"), Holder("bob"), replace(liar("eve"), mute=True))
    run.people["ann"][1].mute = run.people["bob"][1].mute = True
    assert run.goes_on(PATIENCE_S / 2, patience_over=True) == []
    assert "claim different states of version 3" in run.agreement.reason


def test_P3_where_who_held_the_state_lacks_what_only_others_have_those_that_fetched_it_are_heard() -> None:
    """Both who made a version died before they had it; of two that fetched its results one lacks a piece."""
    run = Bench(Holder("ann", version=2, base=1))
    run.comes(Holder("bob"), vouched=False)
    assert run.goes_on() == [], "ann may be about to say"
    assert fixed(TRUE, run.true_value(3)) in run.goes_on(patience_over=True) and run.is_verified("bob")


def test_P3_a_peer_that_left_before_it_named_the_version_it_made_is_heard_at_once_when_it_comes_back() -> (
    None
):
    """It trained alone, and its disk has that version.  A stranger that is here meanwhile is not heard."""
    run = Bench(Holder("ann"))
    ann = run.people["ann"][0].peer
    run.book.commits[3] = changed(run.book.commits[3], members=(ann,), weights=(1.0,))
    run.core.write(Departed(peer=ann, cause=DepartureCause.LEFT, reason="it left"))
    came_back = run.people.pop("ann")
    run.comes(liar("eve"), vouched=False)
    assert [each for each in run.goes_on(1.0) if isinstance(each, DigestFixed)] == []
    run.people["ann"] = came_back
    assert fixed(TRUE, run.true_value(3)) in run.goes_on() and not run.is_verified("eve")
    run.goes_on()
    assert run.is_verified("ann")


def test_P18_a_stranger_that_lies_while_who_knows_better_is_behind_is_out_as_soon_as_that_one_is_there() -> (
    None
):
    run = Bench(Holder("ann", version=2, base=1))
    run.comes(liar("eve"), vouched=False)
    lie = run.people["eve"][1].digest
    settled = [each.digest for each in run.goes_on(patience_over=True) if isinstance(each, DigestFixed)]
    assert settled == [lie]
    run.people["ann"] = run.people["ann"][0], Holder("ann"), run.people["ann"][2]
    run.goes_on(1.0)
    assert run.banned() == {"eve"} and run.is_verified("ann")


def test_P18_an_objection_long_after_settling_withdraws_the_lie_and_settles_the_truth() -> None:
    run = Bench(liar("eve"), liar("mal"), Holder("ann", version=2, base=1))
    lie = run.people["eve"][1].digest
    assert [
        each.digest for each in run.goes_on(0.0, patience_over=True) if isinstance(each, DigestFixed)
    ] == [lie]
    run.core.now += 3600.0
    run.goes_on()
    assert run.is_verified("eve"), "nobody knows better yet"
    run.people["ann"] = (run.people["ann"][0], Holder("ann"), run.people["ann"][2])
    records = run.goes_on(1.0)
    assert DigestWithdrawn(version=3, fragment=NUMBER, digest=lie) in records
    assert fixed(TRUE, run.true_value(3)) in records and run.book.digests[3] == TRUE
    assert run.banned() == {"eve", "mal"}


def test_P18_who_was_told_a_lie_by_the_coordinator_and_fetched_it_is_not_banned_with_its_liars() -> None:
    run = Bench(liar("eve"), liar("mal"), Holder("ann", version=2, base=1), Holder("bob", version=-1))
    [lie] = [each.digest for each in run.goes_on(patience_over=True) if isinstance(each, DigestFixed)]
    joe = liar("joe", says={(What.BEFORE, 3): None})
    assert joe.digest == lie
    run.comes(joe, vouched=False)
    run.becomes(liar("bob", says=joe.says))  # it was here before, and took the run's state again
    run.goes_on()
    assert run.is_verified("joe") and run.is_verified("bob")
    run.goes_on()
    run.becomes(Holder("ann"))
    run.goes_on(1.0)
    assert run.banned() == {"eve", "mal"} and run.is_verified("ann")
    assert not run.is_verified("joe") and not run.is_verified("bob")


def test_P18_who_changed_its_word_answers_for_both() -> None:
    run = Bench(Holder("ann", mute=True), liar("eve"))
    run.goes_on()
    member, _, guest = run.people["eve"]
    run.people["eve"] = (member, Holder("eve"), guest)
    run.comes(liar("mal"))
    run.people["ann"][1].mute = False
    run.goes_on(5.0)
    assert {"eve", "mal"} <= run.banned(), "eve named what is refuted now, and says the truth too late"


def test_P18_a_late_lie_against_a_settled_digest_costs_nobody_honest_its_state() -> None:
    """The honest ones have dropped what the chunks were: the run had confirmed the version.  They can prove nothing."""
    lost = {(What.BEFORE, 3): None}
    run = Bench(*holders("ann", "bob", says=lost))
    run.goes_on()
    run.comes(liar("eve", says=lost))
    records = run.goes_on(2 * PATIENCE_S)
    assert run.book.digests[3] == TRUE and run.is_verified("ann") and run.is_verified("bob")
    assert not [each for each in records if isinstance(each, DigestWithdrawn | DigestRefuted)]
    for name in ("ann", "bob"):
        member, _, _ = run.people[name]
        assert run.agreement.refuted(member, run.word(name)) == b""
    assert run.agreement.refuted(run.people["eve"][0], run.word("eve")) != b"" and run.agreement.reason == ""
    assert not run.banned()


def test_P18_of_states_of_which_nobody_can_show_how_he_came_to_them_the_settled_one_stands() -> None:
    lost = {(What.BEFORE, 3): None}
    run = Bench(Holder("ann", says=lost))
    run.goes_on()
    for number in range(5):
        run.comes(liar(f"eve{number}", says=lost))
    run.goes_on(3.0)
    assert run.book.digests[3] == TRUE and run.is_verified("ann") and run.agreement.reason == ""
    assert run.agreement.refuted(run.people["ann"][0], run.word("ann")) == b""


def test_P18_who_has_taken_the_runs_state_again_holds_it_whatever_it_could_not_show_before() -> None:
    """Or it would be told again and again, until the next version, that what it has just fetched is not the run's."""
    lost = {(What.BEFORE, 3): None}
    run = Bench(*holders("ann", "bob", says=lost))
    run.goes_on()
    run.comes(liar("eve", says=lost))
    run.goes_on(3.0)
    member = run.people["eve"][0]
    assert run.agreement.refuted(member, run.word("eve")) == run.word("eve").digest != TRUE
    run.becomes(Holder("eve"))
    run.goes_on(1.0)
    assert run.agreement.refuted(member, run.word("eve")) == b"" and run.is_verified("eve")


def test_P18_a_league_that_shows_lists_and_then_nothing_does_not_hold_the_run_for_long_nor_often() -> None:
    lost = {(What.BEFORE, 3): None}
    run = Bench(*holders("ann", "bob", says=lost))
    run.goes_on()
    league = {f"eve{number}" for number in range(2 * TRIED_AT_ONCE)}
    for name in sorted(league):
        run.comes(liar(name, after_list_mute=True))
    records = run.goes_on(2 * PATIENCE_S + 3.0)
    assert run.agreement.reason == "" and run.book.digests[3] == TRUE and run.is_verified("ann")
    assert {run.core.name(each.peer) for each in records if isinstance(each, Struck)} == league


def test_P18_a_list_that_nobody_shows_is_no_claim_and_the_second_time_it_costs_its_member_its_place() -> None:
    """A busy machine may be late once: it is not heard about that version, keeps its state, and has a strike."""
    run = Bench(Holder("ann"), liar("eve", mute=True))
    records = run.goes_on(PATIENCE_S + 3.0)
    assert fixed(TRUE, run.true_value(3)) in records and run.banned() == set()
    assert [run.core.name(each.peer) for each in records if isinstance(each, Struck)] == ["eve"]
    member = run.people["eve"][0]
    assert not run.is_verified("eve") and run.agreement.refuted(member, run.word("eve")) == b""
    run.core.write(RolledBack(versions=(0, 3), reason="lost"))
    run.goes_on(PATIENCE_S + 3.0)
    assert run.banned() == {"eve"}


def test_P18_a_list_that_fits_nothing_costs_its_member_its_place_at_once() -> None:
    run = Bench(Holder("ann"), liar("eve", says={(What.HASHES, 3): b"no hashes"}))
    run.goes_on(PATIENCE_S + 3.0)
    assert run.banned() == {"eve"}


def test_P18_where_nobody_can_show_anything_most_of_those_that_are_here_are_believed() -> None:
    """All fetched it: nobody calculated it.  It is said in docs/security.md."""
    lost = {(What.BEFORE, 3): None}
    run = Bench(*holders("ann", "bob", says=lost), liar("eve", says=lost))
    records = run.goes_on(2.0)
    assert fixed(TRUE, run.true_value(3)) in records


# ---- eras and versions ---------------------------------------------------------------------------------------


def test_P18_in_a_new_era_nothing_of_the_old_one_stands() -> None:
    run = Bench(Holder("ann", mute=True), liar("eve", mute=True))
    run.goes_on()
    assert run.agreement.reason and run.core.questions.asked
    run.core.write(RolledBack(versions=(0, 3), reason="lost"))
    run.loses(run.people["eve"][0])
    run.goes_on()
    assert not run.agreement.reason and not run.core.questions.asked and not run.banned()


def test_P18_in_a_new_era_a_member_that_had_shown_nothing_in_the_old_one_may_show_the_same_version() -> None:
    run = Bench(*holders("ann", "bob"))
    run.goes_on()
    run.comes(Holder("cyd", value=bytes(32), says={(What.STATE, 3): None}))
    run.goes_on(1.0)
    member, _, guest = run.people["cyd"]
    assert run.agreement.refuted(member, run.word("cyd")) == TRUE
    run.core.write(RolledBack(versions=(0, 3), reason="lost"))
    run.people["cyd"] = (member, Holder("cyd"), guest)
    run.goes_on(1.0)
    assert run.agreement.refuted(member, run.word("cyd")) == b"" and run.is_verified("cyd")


def test_P18_a_dispute_about_a_version_that_is_not_the_newest_any_more_is_over() -> None:
    run = Bench(Holder("ann", mute=True), liar("eve", mute=True))
    run.goes_on()
    assert run.agreement.reason
    run.core.write(fixed(TRUE, run.true_value(3)))
    commit = changed(TRUTH.commit(3), version=4, round_no=4)
    run.core.write(
        CommittedRound(
            commit=commit, used={}, excluded={}, tokens=10, steps=1, loss=1.0, seconds=1.0, tx_bytes=0
        )
    )
    run.goes_on()
    assert not run.agreement.disputed and not run.core.questions.asked


def test_P18_who_shows_a_list_and_nothing_else_is_struck_once_and_out_the_second_time() -> None:
    run = MadeRun()
    digest_agreement, ann = run.drivers[0].agreement, peer_of("ann")
    digest_agreement._void[ann] = "it showed nothing for 20 s"
    digest_agreement._was_silent(ann)
    assert run.core.take_struck() == [ann] and run.core.take_convicted() == []
    digest_agreement._was_silent(ann)
    [(peer, why)] = run.core.take_convicted()
    assert peer == ann and why == "once more it kept everybody waiting: it showed nothing for 20 s"
