"""Programs read causes, people read sentences: no module looks into a sentence to find out what happened.

A sentence is what a variable, a field or a key with one of these names holds, and whatever is made of it: `reason`,
`why`, ...  Looking into one is comparing it, searching in it, or matching it with a pattern.  That it is there at
all may be asked (`if reason:`, `reason == ""`).
"""

from __future__ import annotations

import ast
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farflung.console.history.audit import audit
from farflung.console.history.history import History, _with_cause, read_folder
from farflung.console.history.recorded_run import Recording
from farflung.console.history.replay import Replay
from farflung.console.history.trackers import RunRows
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.record_events import CoordinatorStart, RecordEvents
from farflung.coordinator.ledger.records import (
    AbortedRound,
    Admitted,
    Departed,
    Opened,
    Record,
    from_bytes,
)
from farflung.protocol.errors import AbortCause, Counters, DepartureCause, NoteCause
from farflung.protocol.process.journal import read_events
from farflung.protocol.round_words import Plan
from farflung.simulator.world import Scenario, World

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rooms import modules

NAMES = {"reason", "reasons", "why", "because", "gone_because", "left_out"}
SENTENCES = NAMES | {"text"}  # as a field or a key; a variable of that name may be any text
LOOKING = {"startswith", "endswith", "find", "rfind", "index", "count", "split", "partition", "removeprefix"}
LOOKING |= {"rpartition", "rsplit", "splitlines", "removesuffix"}
PATTERNS = {"search", "match", "fullmatch", "findall", "finditer", "sub", "subn"}
# How often each of these may, and why.
MAY = {
    "peer/local/words.py": (1, 'a trainer\'s reason to leave is "finished" or a sentence'),
    "peer/machine/checkpoint_policy.py": (1, "the same sentence is not told twice in a row"),
    "peer/agent/waits.py": (
        2,
        "numbers in a sentence do not make it another wait; a note may be the wait itself",
    ),
    "console/screen/health.py": (1, "numbers in a sentence do not make it another wait"),
}


def is_sentence(node: ast.expr, known: set[str]) -> bool:
    match node:
        case ast.Name(id=name):
            return name in known
        case ast.Attribute(attr=name):
            return name in SENTENCES
        case ast.Subscript(value=value, slice=ast.Constant(value=key)):
            return key in SENTENCES or is_sentence(value, known)
        case ast.Subscript(value=value):
            return is_sentence(value, known)
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=key), *_]) if key in SENTENCES:
            return True
        case ast.Call(func=ast.Attribute(value=value, attr="lower" | "strip" | "get" | "casefold")):
            return is_sentence(value, known)
        case ast.Call(func=ast.Name(id="str"), args=[value]):
            return is_sentence(value, known)
        case ast.BoolOp(values=values):
            return any(is_sentence(value, known) for value in values)
        case ast.IfExp(body=body, orelse=otherwise):
            return is_sentence(body, known) or is_sentence(otherwise, known)
        case ast.NamedExpr(value=value):
            return is_sentence(value, known)
    return False


def is_empty(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in ("", None)


def known_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that hold a sentence: by what they are called, or by what was assigned to them."""
    known = set(NAMES)
    for node in nodes:  # of a function
        if isinstance(node, ast.Assign | ast.NamedExpr) and is_sentence(node.value, known):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known |= {target.id for target in targets if isinstance(target, ast.Name)}
    return known


def looks(node: ast.AST, known: set[str]) -> bool:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            texts = any(is_sentence(each, known) for each in (left, *others))
            empty = any(is_empty(each) for each in (left, *others))
            return texts and not empty and not all(isinstance(op, ast.Is | ast.IsNot) for op in ops)
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=arguments):
            inside = name in LOOKING and is_sentence(value, known)
            return inside or (name in PATTERNS and any(is_sentence(each, known) for each in arguments))
        case ast.MatchClass(kwd_attrs=names, kwd_patterns=patterns):
            pairs = zip(names, patterns, strict=True)
            return any(name in SENTENCES and isinstance(each, ast.MatchValue) for name, each in pairs)
        case ast.MatchMapping(keys=keys, patterns=patterns):
            pairs = zip(keys, patterns, strict=True)
            return any(
                isinstance(key, ast.Constant) and key.value in SENTENCES and isinstance(each, ast.MatchValue)
                for key, each in pairs
            )
        case ast.Match(subject=subject):
            return is_sentence(subject, known)
    return False


def looks_into_sentences(tree: ast.Module) -> Iterator[int]:
    """Lines."""
    nodes = list(ast.walk(tree))
    inside: dict[int, set[str]] = {}
    for function in nodes:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            below = list(ast.walk(function))
            inside |= dict.fromkeys(map(id, below), known_in(below))
    for node in nodes:
        if looks(node, inside.get(id(node), NAMES)):
            yield getattr(node, "lineno", 0)


@pytest.mark.xdist_group("house: sources")  # which has them parsed
def test_no_module_looks_into_a_sentence() -> None:
    for module in modules():
        lines = list(looks_into_sentences(module.tree))
        may, why = MAY.get(module.label, (0, "nothing there may"))
        told = "reads a sentence; give what it asks for a cause (protocol/errors.py)"
        assert len(lines) == may, f"{module.label}, lines {lines}: {told}: {why}"


@pytest.mark.parametrize(
    "body",
    [
        'return "closed" in event["reason"]',
        'return any(word in each["reason"] for word in WORDS)',
        'return record.reason == "finished"',
        "return record.reason in WORDS",
        'return why.startswith("nothing heard")',
        'said = str(event.get("reason") or "")\n    return "closed" in said',
        'return re.search("I am", event.get("text"))',
        'return PATTERN.match(str(event["text"]))',
        'match record:\n        case Departed(reason="finished"):\n            return True',
        'match event:\n        case {"reason": "finished"}:\n            return True',
        'match record.reason:\n        case "finished":\n            return True',
        'return out["excluded"][0]["reason"].lower().find("late")',
        'return decision.reasons[peer] == "late"',
    ],
)
def test_each_way_of_looking_is_seen(body: str) -> None:
    assert list(looks_into_sentences(ast.parse(f"def f(event, record, each, why, out):\n    {body}\n")))


@pytest.mark.parametrize(
    "body",
    [
        'return f"left: {reason}"',
        'return reason == ""',
        "return why is None",
        'return event["cause"] in LOST',
    ],
)
def test_what_may_be_done_with_a_sentence(body: str) -> None:
    assert not list(looks_into_sentences(ast.parse(f"def f(event, reason, why):\n    {body}\n")))


# ---- a kept run, told in other words -------------------------------------------------------------------------

# What it says is wrong everywhere, and every program must not mind.
NONSENSE = "round 9 opened from: it restarted, nothing heard, its connection closed, finished"
PEERS = ("a" * 16, "b" * 16, "c" * 16)
SAID_BY_ABORTS = {
    AbortCause.RESTARTED: "the coordinator restarted",
    AbortCause.FOUNDED_ANEW: "version 0 is founded anew",
    AbortCause.WENT_BACK: "the run goes back to an older state",
    AbortCause.COMPLETE: "the run is complete",
    AbortCause.TIMED_OUT: "not finished after 60 s: late: bob; lost: nobody",
    AbortCause.NO_OWNER: "no living member can be dialled, so nobody can own a chunk",
    AbortCause.TOO_FEW: "1 whole contributions, at least 2 are needed; bob is out: its hash list is not signed by it",
    AbortCause.MEMBER_RESTARTED: "1 whole contributions, at least 2 are needed; "
    "bob is out: it restarted during the round",
    AbortCause.GUARD: "the merged update has norm 9.1, over 2 times the usual 1.0 for so much work",
    AbortCause.DISPUTED: "members claim different states of version 3; the coordinator checks one chunk of it",
    AbortCause.UNKNOWN: "words of another farflung",
}
SAID_BY_THE_GONE = {
    DepartureCause.CLOSED: "its connection closed",
    DepartureCause.SILENT: "nothing heard for 3 s",
    DepartureCause.LEFT: "stopped by its user",
    DepartureCause.FINISHED: "finished",
    DepartureCause.MISFIT: "data set has 3 samples here, 4 in the run; use the same data",
    DepartureCause.BANNED: "3 strikes, the last one: it lies",
    DepartureCause.UNKNOWN: "words of another farflung",
}


def records_of(first_round: int) -> Iterator[Record]:
    """A round for each way to fail, with one member gone; then each way to go."""
    for number, (cause, reason) in enumerate(SAID_BY_ABORTS.items(), first_round):
        plan = Plan(number, 1, 0, PEERS, (0, 1, 2), ("fp32",) * 3)
        yield Admitted(peer=PEERS[0], name="ann", session=b"")
        yield Opened(plan=plan)
        yield Departed(peer=PEERS[0], cause=DepartureCause.CLOSED, reason="its connection closed")
        yield AbortedRound(round_no=number, cause=cause, reason=reason)
    for departure, reason in SAID_BY_THE_GONE.items():
        for peer in PEERS[: 2 if departure.good_bye else 3]:  # the third one never says good-bye
            yield Admitted(peer=peer, name=peer[0], session=b"")
            yield Departed(peer=peer, cause=departure, reason=reason)


def a_kept_run(folder: Path) -> Path:
    """The coordinator's journal of a simulated run with a member that spoils its bytes, with more of our own; and two
    agents that say that they left, of which the coordinator heard one."""
    scenario = Scenario.of(21)
    spoiled = replace(scenario, peers=max(4, scenario.peers), hostile=0.5, hostile_until_s=scenario.end_s)
    world = World(21, spoiled)
    world.run()
    records = [from_bytes(raw) for raw in world.journal]
    events = RecordEvents(folder / "events.jsonl")
    books = Ledger(LedgerRules(8, 3, world.manifest.round.fragments))
    events.write_start(CoordinatorStart(world.manifest, bytes(16), books, records))
    events.on_records(list(records_of(900)))
    for cause, text in (
        (NoteCause.OPENED, "round 900 opened from version 0 with 3 peers"),
        (NoteCause.COMMITTED, "version 1 committed by round 900 with 3 peers"),
        (NoteCause.NEWS, "bob joined"),
    ):
        events.on_note(text, cause)
    events.close("a test", {"arrived": 0, "counters": Counters().as_dict()})
    # So little time between two events that no round takes too long for it.
    path, halves = folder / "events.jsonl", itertools.count()
    rewritten(path, lambda event: event.update(dict.fromkeys(("at", "wall"), next(halves) / 2)))
    run = {"at": 0.0, "wall": 0.0, "pid": 1, "run": world.manifest.run.name}
    for peer in (PEERS[0], PEERS[2]):
        [*_, last] = [each for each in read_events(path) if each.get("peer") == peer]
        start = run | {"event": "start", "role": "peer", "peer": peer}
        end = run | {
            "event": "end",
            "at": last["at"] - 0.25,
            "code": "left",
            "reason": "stopped by its user",
        }
        lines = "".join(json.dumps(each) + "\n" for each in (start, end))
        (folder / f"{peer[0]}.events.jsonl").write_text(lines, encoding="utf-8")
    return folder


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for event in events:
        change(event)
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")


def told_otherwise(event: dict[str, Any]) -> None:
    event |= {key: NONSENSE for key in ("reason", "text", "merged") if key in event}
    event |= {key: dict.fromkeys(event[key], NONSENSE) for key in ("reasons", "excluded") if key in event}


def what_programs_find(folder: Path) -> dict[str, Any]:
    """Of the audit, the replay and the export, without the sentences that they quote."""
    history = read_folder(folder)
    report, recording = audit(history), Recording.of(*history.told)
    replay = Replay(recording, 1.0)
    statuses = [replay.status_at(moment.at_s) for moment in recording.moments]
    rows = [(row.number, row.values) for row in RunRows().take(History(folder).new_events())]
    return {
        "findings": [
            (finding.promise, finding.checked, [told.partition(": ")[0] for told in finding.broken])
            for finding in report.findings
        ],
        "members": [[(m["id"], m["state"], m["alive"], m["missed"]) for m in s["members"]] for s in statuses],
        "notes": [[each["at_s"] for each in status["events"]] for status in statuses],
        "rows": rows,
    }


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_kept_run(tmp_path_factory.mktemp("kept"))


def copied(kept: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(kept, to, dirs_exist_ok=True)
    for path in to.iterdir():
        rewritten(path, change)
    return to


def test_what_happened_is_found_whatever_the_sentences_say(kept: Path, tmp_path: Path) -> None:
    found = what_programs_find(kept)
    copied(kept, tmp_path, told_otherwise)
    assert NONSENSE in (tmp_path / "events.jsonl").read_text(encoding="utf-8")
    assert what_programs_find(tmp_path) == found
    broken = {promise: told for promise, _, told in found["findings"]}
    faults = [number for number, cause in enumerate(SAID_BY_ABORTS, 900) if cause.of_the_round]
    assert broken["P3"] == [f"round {number} did not survive one death" for number in faults]
    assert len(faults) == 5 and broken["P10"] == [f"{PEERS[2]} left without a word"]
    assert found["rows"] and len(found["notes"][-1]) == 1, "what the list of rounds says is no news"
    assert {"lost", "left"} <= {state for members in found["members"] for _, state, _, _ in members}


def test_a_cause_that_is_not_known_here_is_none() -> None:
    newer = {"event": "departed", "cause": "abducted", "reason": "its connection closed"}
    assert _with_cause(newer)["cause"] is DepartureCause.UNKNOWN
