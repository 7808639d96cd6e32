"""What the host may say of older states: both by rewind, what it is told before, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from farflung.console import operator_commands
from farflung.coordinator.ledger.ledger import SAVED_KEPT
from farflung.coordinator.ledger.records import Genesis, RolledBack, Vouched
from farflung.coordinator.recovery.recovery import Rollback, RollbackOrders
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import CheckpointSection, Manifest, RoundSection, RunSection
from farflung.protocol.messages import GoBack, Reply, Rewind
from farflung.protocol.mode_words import ShelfBeat, Shelved
from rig.made_run import MadeRun, digest_of, holding, peer_of


class Hosted(MadeRun):
    """A run at version 8, saved every other version, made by ann and bob."""

    def __init__(self, versions: int = 8, fragments: int = 1) -> None:
        super().__init__(
            Manifest(
                run=RunSection(rounds=20),
                round=RoundSection(fragments=fragments),
                checkpoint=CheckpointSection(every_rounds=2, keep=2),
            )
        )
        digests = [digest_of(0, fragment) for fragment in range(fragments)]
        self.core.write(Genesis(digest=digests[0], peer=peer_of("ann"), others=tuple(digests[1:])))
        for name in ("ann", "bob"):
            self.core.ledger.peers.names[peer_of(name)] = name
        for fragment in range(fragments):
            for name in ("ann", "bob"):
                self.core.write(Vouched(peer=peer_of(name), fragment=fragment))
            for _ in range(versions):
                self.commits({peer_of("ann"): (), peer_of("bob"): ()}, fragment)
        self.rollback = Rollback(self.core, self.drivers)
        self.by_order = RollbackOrders(self.core, self.drivers, self.rollback)
        self.effects()

    def holds(self, name: str, *versions: int, saved: tuple[int, ...] = ()) -> None:
        member = self.core.members.members.get(peer_of(name)) or self.enters(name)
        shelf = tuple(
            Shelved.of(version, 0, [digest_of(version, each) for each in range(len(self.drivers))])
            for version in saved
        )
        era, sections = self.core.ledger.eras.number, (ShelfBeat(shelf),)
        beat = self.says(member, fragments=holding(*versions), sections=sections, era=era)
        self.rollback.shelves.hear(member.peer, beat)
        self.effects()

    def says_so(self, order: GoBack | Rewind) -> Reply:
        return self.by_order.obey(order)

    def refuses(self, order: GoBack | Rewind, why: str) -> None:
        with pytest.raises(UserError, match=why):
            self.says_so(order)
        assert self.records() == []

    @property
    def versions(self) -> list[int]:
        return [book.version for book in self.core.ledger.books]


# ---- going back -----------------------------------------------------------------------------------------------


def test_the_host_goes_back_to_the_newest_that_is_here_without_those_who_are_away() -> None:
    run = Hosted()
    run.holds("zoe", 5)
    told = run.says_so(GoBack())
    assert run.records() == [] and run.versions == [8], "first it is told what is lost"
    assert told.text == (
        "nobody online has version 8. Going back to version 5 discards 3 rounds for good; their samples are trained "
        "again. ann and bob may hold them and did not say good-bye. Whoever comes back with them drops them, and takes "
        "the run's state"
    )
    assert told.found == {"from": [8], "to": [5], "done": False}
    assert run.says_so(GoBack(sure=True, reason="bob's disk died")).text == "the run is at version 5, era 1"
    [record] = run.records()
    assert record == RolledBack(
        versions=(5,), reason="the host said so (bob's disk died); what was learned after it is void"
    )


def test_a_checkpoint_of_somebody_who_is_here_is_as_good_as_the_state() -> None:
    run = Hosted()
    run.holds("zoe", 5, saved=(6,))
    run.says_so(GoBack(sure=True))
    assert run.versions == [6]


def test_of_several_fragments_each_goes_back_to_what_is_here_of_it() -> None:
    run = Hosted(fragments=2)
    run.holds("zoe", 8, -1, saved=(4,))
    run.says_so(GoBack(sure=True))
    assert run.versions == [8, 4]


def test_what_somebody_here_holds_is_not_gone_back_from() -> None:
    run = Hosted()
    run.holds("ann", 8)
    run.refuses(GoBack(), "somebody here holds version 8, the run's newest: there is nothing to go back from")


def test_a_version_can_be_named_that_is_what_is_here_and_no_other() -> None:
    run = Hosted()
    run.holds("zoe", 5)
    run.refuses(
        GoBack(to=4), "the newest that is here is version 5: .* farflung rewind run.toml 4 undoes more rounds"
    )
    run.refuses(GoBack(to=7), "the newest that is here is version 5")
    assert run.says_so(GoBack(to=5)).ok


def test_a_run_is_founded_anew_only_by_the_hosts_word_and_only_when_nothing_is_left() -> None:
    run = Hosted()
    run.refuses(
        GoBack(),
        "nobody online has any version of the run, .*ann and bob may have one in memory or on disk: wait",
    )
    run.holds("zoe", 5)
    run.refuses(GoBack(to=0), "version 5 is here: farflung rewind run.toml goes to that")
    run.holds("zoe", -1)
    told = run.says_so(GoBack(to=0)).text
    assert (
        "discards all that was learned: 8 rounds, 80 tokens, up to version 8. ann and bob may still" in told
    )
    assert run.says_so(GoBack(to=0, sure=True)).ok
    assert run.versions == [0] and not run.core.ledger.learned


def test_a_run_is_founded_anew_as_well_when_nothing_is_left_of_one_fragment() -> None:
    run = Hosted(fragments=3)
    run.holds("zoe", 8, -1, 5)
    run.refuses(GoBack(), "nobody online has any version of fragment 1.*ann and bob may have one")
    told = run.says_so(GoBack(to=0)).text
    assert told.startswith("nobody online has any version of fragment 1, and a model without it is none.")
    assert "discards all that was learned: 24 rounds" in told
    assert run.says_so(GoBack(to=0, sure=True)).ok
    assert run.versions == [0, 0, 0] and not run.core.ledger.learned


def test_a_checkpoint_of_the_lost_fragment_is_enough_not_to_found_anew() -> None:
    run = Hosted(fragments=2)
    run.holds("zoe", 8, -1, saved=(4,))
    run.refuses(GoBack(to=0), "version 8, 4 is here: farflung rewind run.toml goes to that")


def test_before_anything_was_learned_there_is_nothing_to_go_back_from() -> None:
    run = Hosted(versions=0)
    run.refuses(GoBack(to=0), "the run has not learned anything yet")


# ---- undoing rounds --------------------------------------------------------------------------------------------


def test_rounds_are_undone_for_good_though_everybody_holds_them() -> None:
    run = Hosted()
    run.holds("ann", 8, saved=(4, 6))
    told = run.says_so(Rewind(to=6))
    assert told.text.startswith("Rewinding to version 6 undoes 2 rounds for good: every peer drops them")
    run.says_so(Rewind(to=6, sure=True, reason="zoe cheated"))
    [record] = run.records()
    assert isinstance(record, RolledBack) and record.undone and "(zoe cheated)" in record.reason
    assert run.versions == [6] and run.core.ledger.eras.furthest == 0, "nothing was lost"


def test_a_version_that_nobody_has_is_refused_with_what_is_there() -> None:
    run = Hosted()
    run.holds("ann", 8, saved=(2, 4, 6))
    run.refuses(Rewind(to=5), "nobody online has version 5, or a checkpoint of it; rewind can go to 2, 4, 6")
    run.refuses(Rewind(to=8), "the run is at version 8: there is nothing to undo after 8")
    bare = Hosted()
    bare.holds("ann", 8)
    bare.refuses(Rewind(to=6), "no older version is online, or in a checkpoint of a peer that is")


def test_a_checkpoint_of_a_version_whose_digest_is_forgotten_is_not_there() -> None:
    """Nobody could tell whether what it holds is the run's: the run would go on from whatever the file says."""
    run = Hosted(versions=SAVED_KEPT * 2 + 4)
    newest = run.versions[0]
    run.holds("ann", newest, saved=(2, 6))
    assert 2 not in run.core.ledger.books[0].digests and 6 in run.core.ledger.books[0].digests
    run.refuses(Rewind(to=2), "nobody online has version 2, or a checkpoint of it; rewind can go to 6")
    assert run.says_so(Rewind(to=6, sure=True)).ok


def test_checkpoints_of_peers_that_are_away_or_of_versions_that_were_undone_do_not_count() -> None:
    run = Hosted()
    run.holds("ann", 8, saved=(4, 6))
    run.says_so(Rewind(to=4, sure=True))
    shelves, [driver] = run.rollback.shelves, run.drivers
    assert shelves.brought(driver) == {4}
    run.loses(run.core.members.members[peer_of("ann")])
    assert shelves.brought(driver) == set() and shelves.peers_with(driver) == {peer_of("ann")}


# ---- the command line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "order"),
    [
        ([], GoBack()),
        (["--from-scratch"], GoBack(to=0)),
        (["3"], Rewind(to=3)),
        (["3", "--from-scratch"], None),
    ],
)
def test_one_command_goes_back_undoes_rounds_or_starts_from_scratch(
    words: list[str], order: GoBack | Rewind | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[object]()

    def heard(folder: Path, asked_for: GoBack | Rewind) -> Reply:
        asked.append(asked_for)
        return Reply(ok=True, text="")

    monkeypatch.setattr(operator_commands, "ask", heard)
    shown = CliRunner().invoke(operator_commands.app, ["rewind", "--yes", str(tmp_path), *words])
    if order is None:
        assert not asked and "--from-scratch has no place beside a version: 3" in str(shown.exception)
    else:
        assert asked == [order, replace(order, sure=True)]


@pytest.mark.parametrize(("typed", "done"), [("y", True), ("n", False), ("--yes", True)])
def test_the_command_tells_what_is_lost_and_asks_before_it_is_done(
    typed: str, done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Hosted()
    run.holds("zoe", 5)
    monkeypatch.setattr(operator_commands, "ask", lambda folder, order: run.says_so(order))
    words = ["rewind", str(tmp_path), *([typed] if typed == "--yes" else [])]
    shown = CliRunner().invoke(operator_commands.app, words, input=typed)
    assert "Going back to version 5 discards 3 rounds" in shown.output
    assert ("the run is at version 5, era 1" in shown.output) is done
    assert (run.versions == [5]) is done
