"""When a version is evaluated and by whom, what members hear of it, and what is written and shown."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from farflung.coordinator.evaluation.evaluation import TEXT_EVERY_S, Evaluated, Evaluation, made
from farflung.coordinator.ledger.records import RolledBack
from farflung.coordinator.modes.registry import ModeTools
from farflung.coordinator.run_metrics import run_metrics
from farflung.protocol.digests import mask_from_bytes
from farflung.protocol.errors import Counters, ScoreCause
from farflung.protocol.manifest import Manifest
from farflung.protocol.mode_words import FiguresBeat, ScoreBeat, ScoreTick, text_lengths
from rig.made_run import BARE_BEAT, MadeRun

WINDOWS = 16
MANIFEST = Manifest.model_validate(
    {
        "run": {"rounds": 5},
        "round": {"sync_every": 100},
        "eval": {"source": "python-stdlib", "windows": WINDOWS, "every_rounds": 2},
    }
)


class Host(MadeRun):
    def __init__(self, *names: str, manifest: Manifest = MANIFEST) -> None:
        super().__init__(manifest)
        tools = ModeTools(
            lambda count: bytes(count), lambda *_: None, lambda: None, lambda _: None, lambda _: True
        )
        found = made(self.core, self.drivers, tools)
        assert isinstance(found, Evaluation)
        self.mode = found
        self.here = {name: self.enters(name) for name in names}
        for member in self.here.values():
            self.says(member)

    def after_rounds(self, count: int) -> Host:
        for _ in range(count):
            self.commits()
        return self

    def order(self, name: str) -> ScoreTick | None:
        told = self.mode.tell(self.here[name].peer, BARE_BEAT)
        assert len(told) <= 1
        return next((each for each in told if isinstance(each, ScoreTick)), None)

    def hears(self, name: str, nats: float = 2.0, **changes: object) -> None:
        order = self.order(name)
        assert order is not None
        count = mask_from_bytes(order.windows).bit_count()
        said = ScoreBeat(order.number, struct.pack(f"<{count}f", *[nats] * count), b"text")
        self.says_score(name, replace(said, **changes))

    def says_score(self, name: str, said: ScoreBeat) -> None:
        self.mode.hear(self.here[name].peer, replace(BARE_BEAT, sections=(said,)))

    def says_why_not(self, name: str, why_not: str) -> None:
        """Of the version that is due, without what its owner was told before."""
        self.mode.on_timer()
        self.effects()
        self.hears(name, nats=0.0, why_not=why_not)
        self.mode.on_timer()

    def evaluated(self) -> list[Evaluated]:
        self.mode.on_timer()
        return [each for each in self.records() if isinstance(each, Evaluated)]

    @property
    def shown(self) -> Mapping[str, object]:
        told = self.mode.status()["held_out"]
        assert isinstance(told, dict)
        return told


def test_a_run_without_eval_evaluates_nothing() -> None:
    host = Host("ann", manifest=Manifest()).after_rounds(1)
    assert not host.mode.on_timer() and host.mode.status() == {} and not host.mode.busy_with(0)
    assert host.order("ann") is None


def test_figures_of_a_members_script_are_shown_beside_it_while_it_is_here() -> None:
    host = Host("ann", "bob", manifest=Manifest())
    peer = host.here["ann"].peer
    figures = FiguresBeat((("accuracy", 0.5), ("odd", math.nan)))
    host.mode.hear(peer, replace(BARE_BEAT, sections=(figures,)))
    assert host.mode.status_of(peer) == {"figures": {"accuracy": 0.5}}
    assert host.mode.status_of(host.here["bob"].peer) == {}
    host.mode.hear(peer, BARE_BEAT)
    assert host.mode.status_of(peer) == {}, "its script was started again"
    host.mode.hear(peer, replace(BARE_BEAT, sections=(figures,)))
    host.loses(host.here["ann"])
    host.mode.on_timer()
    assert host.mode.status_of(peer) == {}


def test_every_second_version_and_the_last_are_due() -> None:
    host, found = Host("ann"), []
    for version in range(1, 6):
        host.after_rounds(1)
        host.mode.on_timer()
        if host.order("ann") is not None:
            host.hears("ann")
        found += [each.version for each in host.evaluated()]
        assert host.core.ledger.version == version
    assert found == [2, 4, 5]
    assert host.shown["version"] == 5 and host.shown["next"] == 5


BY_BATCHES = Manifest.model_validate(
    {
        "run": {"rounds": 5},
        "merge": {"policy": "mean"},
        "pipeline": {"batch": 400, "micro": 8},
        "eval": {"source": "python-stdlib", "windows": WINDOWS, "every_rounds": 2},
    }
)


def test_where_members_compute_batches_they_compute_the_loss_together_and_nobody_is_asked() -> None:
    host, found = Host("ann", manifest=BY_BATCHES), []
    for version in range(1, 6):
        host.after_rounds(1)
        assert not host.mode.on_timer() and host.order("ann") is None
        due = host.mode.is_evaluated_next()
        assert bool(host.mode.busy_with(0)) == due, "whoever is finished stays for it"
        if due:
            halves = {"x": dict.fromkeys(range(8), 2.0), "y": dict.fromkeys(range(8, WINDOWS), 3.0)}
            host.mode.on_losses(halves)
            assert not host.mode.is_evaluated_next()
            found += [(version, record.loss, record.windows, record.peers) for record in host.evaluated()]
    assert found == [(version, 2.5, WINDOWS, ("x", "y")) for version in (2, 4, 5)]
    assert not Host("ann").after_rounds(2).mode.is_evaluated_next(), "these compute no batches"


def test_where_a_held_out_batch_gives_no_loss_people_hear_so_once_and_it_is_not_tried_again() -> None:
    host, tried = Host("ann", manifest=BY_BATCHES), []
    for version in range(1, 5):
        host.after_rounds(1)
        if host.mode.is_evaluated_next():
            tried.append(version)
            host.mode.on_losses({})
            assert not host.mode.is_evaluated_next()
    told = [text for _, text in host.core.events if "evaluated" in text]
    assert tried == [2, 4] and told == [
        "version 2 is not evaluated: no peer could compute a loss; the logs of peers have the reason"
    ]


def test_version_0_is_not_evaluated_nor_one_whose_digest_is_not_settled() -> None:
    host = Host("ann")
    assert not host.mode.on_timer()
    host.after_rounds(2)
    del host.core.ledger.books[0].digests[2]
    assert not host.mode.on_timer() and host.order("ann") is None


def test_it_waits_a_moment_for_those_that_are_just_taking_the_version() -> None:
    host = Host("ann", "bob").after_rounds(2)
    host.here["bob"].standings[0].verified = False
    assert not host.mode.on_timer()
    host.core.now += 2 * host.manifest.net.heartbeat_s
    assert host.mode.on_timer()
    assert host.order("ann") is not None and host.order("bob") is None


@pytest.mark.parametrize("why", ["helps", "leaving", "quarantined"])
def test_who_has_no_trainer_leaves_or_is_in_doubt_is_not_asked(why: str) -> None:
    host = Host("ann", "bob")
    bob = host.here["bob"]
    if why == "helps":
        bob.helps = True
    elif why == "leaving":
        host.says(bob, leaving=True)
    else:
        bob.standings[0].quarantined = True
    host.after_rounds(2)
    assert host.mode.on_timer()
    assert host.order("ann") is not None and host.order("bob") is None


def test_the_order_is_told_until_it_is_answered_and_an_answer_counts_once() -> None:
    host = Host("ann", "bob").after_rounds(2)
    assert host.mode.on_timer()
    assert host.order("ann") == host.order("ann")
    order = host.order("ann")
    host.hears("ann", 2.0)
    assert host.order("ann") is None and order is not None
    host.says_score("ann", ScoreBeat(1, b"", why_not="other"))  # of another draw
    host.says_score("ann", ScoreBeat(order.number, struct.pack("<16f", *[9.0] * 16), b"text"))  # again
    assert not host.evaluated(), "bob is waited for"
    host.hears("bob", 2.0)
    [record] = host.evaluated()
    assert record.loss == 2.0 and record.windows == WINDOWS and len(record.peers) == 2
    assert record.perplexity == 7.38906 and record.bits_per_byte == 2.88539, (
        "bytes are the tokens of this text"
    )
    assert not host.evaluated() and not host.mode.on_timer(), "once"


def test_who_was_not_asked_is_not_heard() -> None:
    host = Host("ann", "bob").after_rounds(2)
    host.here["bob"].helps = True
    host.mode.on_timer()
    order = host.order("ann")
    assert order is not None
    host.says_score("bob", ScoreBeat(order.number, struct.pack("<16f", *[9.0] * 16), b"text"))
    host.hears("ann", 2.0)
    [record] = host.evaluated()
    assert record.loss == 2.0 and record.peers == (host.here["ann"].peer,)
    assert host.shown["text"] == "held-out loss 2.0000 nats a token (ann's word)"


def test_windows_of_those_who_can_not_read_the_text_go_to_others() -> None:
    host = Host(*"abcd").after_rounds(2)
    host.mode.on_timer()
    for name in "abc":
        host.hears(name, nats=0.0, why_not="unreadable")
    host.hears("d")
    assert host.mode.on_timer(), "some windows were those of the three alone"
    assert [name for name in "abcd" if host.order(name) is not None] == ["d"]
    host.hears("d")
    [record] = host.evaluated()
    assert record.windows == WINDOWS and record.peers == (host.here["d"].peer,)


def test_windows_of_who_goes_are_given_to_others_once() -> None:
    host = Host("ann", "bob").after_rounds(2)
    host.mode.on_timer()
    host.here["cyd"] = host.enters("cyd")
    host.says(host.here["cyd"])
    host.loses(host.here["ann"])
    host.loses(host.here["bob"])
    assert host.mode.on_timer() and host.order("cyd") is not None
    host.here["dan"] = host.enters("dan")
    host.says(host.here["dan"])
    host.loses(host.here["cyd"])
    assert not host.evaluated() and host.order("dan") is None
    assert not host.mode.on_timer(), "not again for this version"


def test_nobody_can_compute_it_and_people_hear_why() -> None:
    host = Host("ann").after_rounds(2)
    host.says_why_not("ann", "no_script")
    told = "version 2 is not evaluated: 1 peer: the script computes none"
    assert host.notes() == [told]
    assert not host.mode.on_timer(), "not again for this version"
    host.after_rounds(2)
    host.says_why_not("ann", "no_script")
    assert not host.notes(), "that is no news"


def test_what_a_member_says_is_in_nobodys_log() -> None:
    host = Host("ann").after_rounds(2)
    host.says_why_not("ann", "\x1b]0;owned\x07\nfake log line")
    assert host.notes() == [f"version 2 is not evaluated: 1 peer: {ScoreCause.FAILED.told}"]


def test_the_next_version_ends_it_after_a_moment_with_what_is_there() -> None:
    host = Host(*"abc").after_rounds(2)
    host.mode.on_timer()
    host.hears("a")
    host.after_rounds(1)
    assert not host.evaluated(), "an answer may be on its way"
    host.core.now += 2 * host.manifest.net.heartbeat_s
    [record] = host.evaluated()
    assert record.version == 2 and record.peers == (host.here["a"].peer,)


def test_where_the_run_goes_back_it_is_void_and_so_is_what_came_later() -> None:
    host = Host("ann").after_rounds(2)
    host.mode.on_timer()
    host.hears("ann")
    host.evaluated()
    host.after_rounds(2)
    host.mode.on_timer()
    host.hears("ann", 1.5)
    [record] = host.evaluated()
    assert record.version == 4 and host.shown["curve"] == [[2, 2.0], [4, 1.5]]
    host.core.write(RolledBack(versions=(3,), reason="lost"))
    assert host.shown["version"] == 2 and host.shown["curve"] == [[2, 2.0]], "what is before it stands"
    host.after_rounds(1)
    assert host.mode.on_timer(), "the new version 4 is another one"
    order = host.order("ann")
    assert order is not None and order.versions == (4,)
    host.core.write(RolledBack(versions=(3,), reason="lost again"))
    assert not host.mode.on_timer() and host.order("ann") is None and not host.evaluated()


def test_a_complete_run_waits_for_the_loss_of_its_last_version_and_for_no_other() -> None:
    host = Host("ann")
    assert not host.mode.busy_with(0)
    host.after_rounds(4)
    host.mode.on_timer()
    host.hears("ann")
    host.evaluated()
    assert not host.mode.busy_with(0)
    host.after_rounds(1)
    assert host.mode.busy_with(0), "also before it is asked for"
    host.mode.on_timer()
    assert host.mode.busy_with(0)
    host.hears("ann")
    host.evaluated()
    assert not host.mode.busy_with(0)


def test_a_coordinator_that_starts_again_knows_the_figures_and_asks_for_what_is_missing() -> None:
    host = Host("ann").after_rounds(2)
    host.mode.on_timer()
    host.hears("ann")
    host.evaluated()
    kept = host.replayed().parts["evaluation"]
    assert kept.version == 2 and kept.curve.told() == [[2, 2.0]]


def test_who_is_left_out_is_news() -> None:
    host = Host(*"abc").after_rounds(2)
    host.mode.on_timer()
    host.effects()
    host.hears("a")
    host.hears("b")
    host.hears("c", 3.0)
    host.mode.on_timer()
    [note] = host.notes()
    why = "most of those who computed the same windows contradict it"
    assert note == f"what c says of version 2's held-out loss is left out: {why}"
    assert host.shown["outvoted"] == {"c": why}


# ---- a text ------------------------------------------------------------------------------------------------------

GIVEN, _ = text_lengths(MANIFEST.model.context, MANIFEST.row_tokens)
TEXT = (*range(GIVEN), 200, 201)


def test_a_text_is_due_at_first_then_after_a_while_and_at_the_last_version() -> None:
    host, due = Host("ann"), []
    for version, at_s in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)):
        host.core.now = at_s
        host.after_rounds(1)
        if host.mode.on_timer() and (order := host.order("ann")) is not None:
            due.append((version, order.text))
            host.hears("ann")
            host.evaluated()
    assert due == [(2, True), (4, False), (5, True)]
    host = Host("ann")
    for at_s, text in ((1.0, True), (TEXT_EVERY_S, False), (TEXT_EVERY_S + 1.5, True)):
        host.after_rounds(2)
        host.core.now = at_s
        if host.core.finished:
            break
        host.mode.on_timer()
        order = host.order("ann")
        assert order is not None and order.text is text, at_s
        host.hears("ann")
        host.evaluated()


def test_of_a_scripts_model_no_text_is_wanted() -> None:
    script = MANIFEST.model_copy(update={"model": MANIFEST.model.model_copy(update={"kind": ""})})
    host = Host("ann", manifest=script).after_rounds(2)
    host.mode.on_timer()
    order = host.order("ann")
    assert order is not None and not order.text


def test_those_who_compute_the_first_window_write_the_text_and_nobody_else() -> None:
    host = Host(*"abcdef").after_rounds(2)
    host.mode.on_timer()
    orders = {name: order for name in "abcdef" if (order := host.order(name)) is not None}
    writers = [name for name, order in orders.items() if order.text]
    assert len(writers) == 3 < len(orders)
    assert all(orders[name].text == bool(mask_from_bytes(orders[name].windows) & 1) for name in orders)
    for name in sorted(orders, key=lambda name: name in writers):
        host.hears(name, text=TEXT if name in writers else (7, 7, 7))
    [record] = host.evaluated()
    assert (record.text, record.text_by) == (TEXT, 3)
    assert host.shown["sample"] == {"version": 2, "ids": list(TEXT), "given": GIVEN, "peers": 3}


def test_a_second_draw_wants_no_text() -> None:
    host = Host("ann", "bob").after_rounds(2)
    host.mode.on_timer()
    host.here["cyd"] = host.enters("cyd")
    host.says(host.here["cyd"])
    for name in ("ann", "bob"):
        host.loses(host.here[name])
    assert host.mode.on_timer()
    order = host.order("cyd")
    assert order is not None and not order.text
    host.hears("cyd", text=TEXT)
    [record] = host.evaluated()
    assert record.text == () and "sample" not in host.shown


@pytest.mark.parametrize(
    ("of_liar", "nats"),
    [((*TEXT[:GIVEN], 256), 2.0), ((*TEXT[:GIVEN], 9, 9), 3.0)],
    ids=["no token", "outvoted"],
)
def test_texts_that_count_are_of_tokens_and_of_those_whose_loss_counts(
    of_liar: tuple[int, ...], nats: float
) -> None:
    host = Host(*"abc").after_rounds(2)
    host.mode.on_timer()
    host.hears("a", text=TEXT)
    host.hears("b", text=TEXT)
    host.hears("c", nats, text=of_liar)
    [record] = host.evaluated()
    assert (record.text, record.text_by) == (TEXT, 2)


def test_who_writes_nothing_counts_against_a_text_and_what_was_given_alone_is_none() -> None:
    host = Host(*"abc").after_rounds(2)
    host.mode.on_timer()
    host.hears("a", text=TEXT)
    host.hears("b")
    host.hears("c")
    [record] = host.evaluated()
    assert record.text == () and record.loss == 2.0 and "sample" not in host.shown
    host = Host(*"abc").after_rounds(2)
    host.mode.on_timer()
    host.hears("a", text=TEXT)
    host.hears("b")
    host.hears("c", 3.0, text=TEXT)
    assert host.evaluated()[0].text == (), "a liar's voice is none"
    host = Host("ann").after_rounds(2)
    host.mode.on_timer()
    host.hears("ann", text=TEXT[:GIVEN])
    assert host.evaluated()[0].text == TEXT[:GIVEN] and "sample" not in host.shown


def test_the_newest_text_is_shown_until_there_is_another_and_going_back_forgets_it() -> None:
    host = Host("ann").after_rounds(2)
    host.mode.on_timer()
    host.hears("ann", text=TEXT)
    host.evaluated()
    host.after_rounds(2)
    host.mode.on_timer()
    host.hears("ann")
    assert host.evaluated()[0].text == ()
    assert host.shown["version"] == 4
    sample = host.shown["sample"]
    assert isinstance(sample, dict) and sample["version"] == 2
    assert host.replayed().parts["evaluation"].written.text == TEXT
    host.core.write(RolledBack(versions=(3,), reason="lost"))
    assert "sample" in host.shown
    host.core.write(RolledBack(versions=(1,), reason="lost again"))
    assert "held_out" not in host.mode.status() or "sample" not in host.shown


def test_its_metrics() -> None:
    def told(host: Host) -> list[str]:
        host.core.modes = (host.mode,)
        counts = {"arrived": 0, "undelivered": 0, "counters": Counters().as_dict()}
        text = run_metrics(host.core, host.drivers, counts, 0.0).decode()
        return [line for line in text.splitlines() if line.startswith("farflung_held_out")]

    host = Host("ann").after_rounds(2)
    assert not told(host), "nothing is known yet"
    host.mode.on_timer()
    host.hears("ann")
    host.evaluated()
    assert [line.removeprefix("farflung_held_out_") for line in told(host)] == [
        "version 2", "loss 2.0", "bits_per_byte 2.88539", "outvoted 0",
    ]  # fmt: skip
