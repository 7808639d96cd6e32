"""Does the run go well?  One word and one sentence, from a status.  Pure.

Called by everything that shows a run to people.  Must not know screens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from farflung.console.screen.stages import batch_words, cost_words, narrow_words, stages_table
from farflung.console.screen.text import Record, clean, count, held_out_words, known, loss_of, number, records
from farflung.protocol.caps import duration, si
from farflung.protocol.states import ARRIVING, PeerState, RunPhase

RECENTLY_S = 60.0  # a loss is news for so long; then the run is simply smaller
# Joining and catching up are part of a healthy run.
_SAID_AT_MOST = 60
_STARTING_SHOWN = 400
_STAGES_MOST = 65  # lines: a run has at most 64 stages


class Health(NamedTuple):
    mark: str  # tells apart what the colour repeats
    word: str
    style: str
    text: str


def place_in_period(status: Record, member: Record) -> tuple[float, float]:
    """(steps of this period that a member has taken, steps that the period has); that of another version for a moment,
    and for whoever joined while periods were short."""
    every = max(number(status, "period_steps"), 1.0)
    return (number(member, "step") - number(status, "steps_before")) % every, every


def takes_part(member: Record) -> bool:
    """Alive, with the run's state, and in the rounds; a coordinator that says no `why` says `participating`."""
    if member.get("alive") is not True or member.get("out"):
        return False
    return not member.get("why") if "why" in member else member.get("participating") is True


def why_not(member: Record) -> str:
    """The reason in full, with when it was lost; empty for one that takes part."""
    if takes_part(member):
        return ""
    if member.get("out") and member.get("alive") is True:
        return f"not in this round: {clean(member.get('out'))}"
    why = clean(member.get("why") or member.get("left_out"))
    if member.get("alive") is True:
        return why or "no reason was given"
    heard_s = known(member, "heard_s")
    return (why or "gone") + (f" ({duration(heard_s)} ago)" if heard_s is not None else "")


def health(status: Record) -> Health:
    members = records(status, "members")
    alive = [member for member in members if member.get("alive") is True]
    if status.get("phase") == RunPhase.FINISHED:
        return Health("✔", "DONE", "bold green", "the run is complete")
    if status.get("unasked") is True:
        return Health("…", "CONNECTING", "bold yellow", "the coordinator has not answered yet")
    silent_s = known(status, "unanswered_s")
    if silent_s is not None:
        old = f"no word from the coordinator for {duration(silent_s)}; training goes on"
        return Health("▲", "NO ANSWER", "bold yellow", old)
    if status.get("parity") is False:
        bad = "peers at one version hold different models; do not trust newer checkpoints"
        return Health("✖", "BROKEN", "bold white on red", bad)
    if not alive:
        nobody = "nobody is here; the first peer to join starts the run"
        if number(status, "version"):
            at = count(status, "version")
            nobody = f"nobody is here; the run is at version {at} and goes on when a peer that has it is back"
        # The coordinator does not know of those that still start; whoever has started them does (demo.py).
        return Health("…", "WAITING", "bold yellow", clean(status.get("starting"), _STARTING_SHOWN) or nobody)
    batch = status.get("batch")
    if isinstance(batch, Mapping) and number(batch, "passed_over"):
        lost = f"{count(batch, 'passed_over')} batches in a row gave no finite gradient, in no microbatch"
        return Health(
            "▲", "LOOK", "bold yellow", f"{lost}: has the model diverged, or is the loss no number?"
        )
    if status.get("phase") == RunPhase.WAITING:
        return Health("…", "WAITING", "bold yellow", clean(status.get("reason")) or "for peers")
    found = _with_members(members, alive)
    unjudged = clean(status.get("unjudged")).partition(";")[0] if len(alive) > 1 else ""
    return (
        found._replace(text=f"{found.text}; {unjudged}") if unjudged and found.word == "GOING WELL" else found
    )


def _with_members(members: list[Record], alive: list[Record]) -> Health:
    part = [member for member in alive if takes_part(member) and member.get("helps") is not True]
    helping = sum(member.get("helps") is True and takes_part(member) for member in alive)
    trouble = [m for m in alive if not takes_part(m) and m.get("state") not in ARRIVING]
    lost = [m for m in members if m.get("state") == PeerState.LOST and number(m, "heard_s") < RECENTLY_S]
    lost = [m for m in lost if m.get("alive") is not True and known(m, "heard_s") is not None]
    arriving = [m for m in alive if not takes_part(m) and m.get("state") in ARRIVING]
    if trouble or lost:
        first = (trouble + lost)[0]
        more = len(trouble) + len(lost) - 1
        told = f"{clean(first.get('name'), 40)}: {why_not(first)}" + (f"; and {more} more" if more else "")
        counted = f"{len(part) + helping} of {len(alive) + len(lost)} take part"
        return Health("▲", "LOOK", "bold yellow", f"{counted}. {told}")
    if arriving:
        names = ", ".join(clean(member.get("name"), 40) for member in arriving)[:_SAID_AT_MOST]
        return Health("●", "GOING WELL", "bold green", f"{len(part)} take part, on the way in: {names}")
    all_of = {1: "1 peer takes part", 2: "both peers take part"}.get(
        len(part), f"all {len(part)} peers take part"
    )
    if helping:
        all_of += f", {helping} without a trainer {'helps' if helping == 1 else 'help'}"
    return Health("●", "GOING WELL", "bold green", all_of)


def plain_line(status: Record) -> str:
    """A run in one line, for logs and for output that is no terminal."""
    members = records(status, "members")
    alive = sum(member.get("alive") is True for member in members)
    part = sum(takes_part(member) for member in members)
    verdict = health(status)
    return (
        f"version {progress(status)}  loss {loss_of(status)}{held_out_words(status)}  "
        f"{alive} alive {part} participating  tokens {si(number(status, 'tokens'))}  {parity(status)[0]}  "
        f"{verdict.word}: {verdict.text}"
        f"{_data(status) or (f'  {told}' if (told := batch_words(status)) else '')}"
    )


def plain_text(status: Record, width: int) -> str:
    """The line, and below it a row for each stage of a model in several."""
    told = [plain_line(status)]
    if records(status, "stages"):
        told += [line.plain.rstrip() for line in stages_table(status, width, _STAGES_MOST)]
    return "\n".join([*told, *(words for words in (narrow_words(status), cost_words(status)) if words)])


def _data(status: Record) -> str:
    """The accounts of the samples, where the status has them: what was leased is committed, held or returned."""
    leases = status.get("leases")
    if not isinstance(leases, Mapping) or "held" not in leases or not number(leases, "leased"):
        return ""
    counts = {name: count(leases, name) for name in ("leased", "committed", "held", "returned")}
    told = "{leased} samples leased = {committed} committed + {held} held + {returned} returned"
    return "  " + told.format(**counts)


def progress(status: Record) -> str:
    phase = clean(status.get("phase") or RunPhase.WAITING, 20)
    return f"{count(status, 'version')}/{count(status, 'target')} {phase}"


def parity(status: Record) -> tuple[str, str]:
    """Words and their style: nobody should need colour to see that a run is broken."""
    if status.get("parity") is True:
        return f"parity ok {clean(status.get('digest'))[:4]}".rstrip(), "green"
    if status.get("parity") is False:
        return "PARITY BROKEN", "bold white on red"
    return "parity unknown", "dim"


# ---- wait reasons ------------------------------------------------------------------------------------------
# Why does the peer of this screen wait, since when, and what ends it? One sentence, from second 0. Pure.
#
# Called by embedded.py, which reads what the peer itself says (peer/agent/waits.py) and what the
# coordinator's status says. The peer knows best what comes before it is in, the coordinator what holds up a
# round; nothing is guessed from the row of a member with the same id, which may be another process. The words
# are those of the log.

# Causes of a peer that was let in.
INSIDE = ("", "round", "data", "told", "fetching", "behind", "reading", "founding")
TEXT_MOST = 400
_ENDS = {
    "loading": "then it asks to be let in",
    "trainer": "then it asks to be let in",
    "refused": "it asks again by itself",
    "founding": "then the first round begins",
    "fetching": "then it trains",
    "behind": "then it trains",
}
_STARTING = "starting Python"
_NUMBERS = re.compile(r"[0-9.]+")


class Waited(NamedTuple):
    text: str  # empty: it trains
    ends: str = ""  # what ends it, where the text does not say so

    @property
    def key(self) -> str:
        """Other numbers in it are the same wait."""
        return _NUMBERS.sub("", self.text)


def own_member(status: Record, own: Record) -> Record:
    """This peer, as the coordinator sees it: not before it was let in, or it might be another process."""
    if own.get("wait") not in INSIDE:
        return {}
    return next((each for each in records(status, "members") if each.get("id") == own.get("me")), {})


def waited(status: Record, own: Record) -> Waited:
    """`own`: what the peer said last, with `wait`, its cause, and `why`, the sentence."""
    cause = own.get("wait")
    if not isinstance(cause, str):
        return Waited(_STARTING)
    if cause and cause != "round":
        return Waited(clean(own.get("why"), TEXT_MOST), _ENDS.get(cause, ""))
    if known(status, "unanswered_s") is not None:
        return Waited("")  # the status is old, and the line below says so
    member = own_member(status, own)
    if not member:
        return Waited("")
    least, here = number(status, "least_peers"), sum(map(_counts, records(status, "members")))
    if status.get("phase") == RunPhase.WAITING and here < least:
        return Waited(
            f"waiting for min_peers ({here} of {least:.0f} here)", "another peer that joins ends it"
        )
    if member.get("alive") is True and not takes_part(member):
        return Waited(f"not in the rounds: {why_not(member)}")
    if member.get("state") == PeerState.READY:
        reason = clean(status.get("reason"), TEXT_MOST) or "the others are not ready"
        return Waited(f"step {count(member, 'step')}, waiting for the next round: {reason}")
    return Waited("")


def _counts(member: Record) -> bool:
    return takes_part(member) and member.get("helps") is not True


def why_waiting(status: Record, own: Record, now: float) -> str:
    """The line; empty while it trains.  `now`: on the clock of `since`, which stands in `own` with the sentence."""
    found = waited(status, own)
    if not found.text:
        return ""
    since = known(own, "since")
    seconds = f", for {duration(max(0.0, now - since))}" if since is not None else ""
    return f"{found.text}{seconds}" + (f"; {found.ends}" if found.ends else "")
