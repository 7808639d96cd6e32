"""The card of a model that a run has made: who took part, with how many tokens, which commits, which digest.

Owns: which facts stand in a card, where each is taken from, and that they are of one state: the checkpoint's, the
journal's and the provenance's.  Called by `farflung publish`.  Must not know the hub or how a model is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from farflung.checkpoints.checkpoint_manifest import JoinedStages
from farflung.console.history.history import History
from farflung.coordinator.ledger.provenance import Provenance
from farflung.protocol.errors import UserError
from farflung.protocol.model_schema import BOOKS_FRAGMENT

SHOWN_PEERS = 50


@dataclass(frozen=True)
class PublisherWord:
    """What no journal knows: the publisher's word."""

    license: str = ""
    energy_kwh: float | None = None


@dataclass(frozen=True)
class Contributor:
    peer: str
    name: str
    tokens: int
    versions: int


@dataclass(frozen=True)
class CardFacts:
    run: str
    run_id: str
    version: int
    digests: dict[int, str]  # of each fragment, or stage
    contributors: tuple[Contributor, ...]  # most tokens first
    commits: int  # of every fragment, that the state is made of
    void: int  # that the run went back behind
    began: float | None  # by the coordinator's clock
    ended: float | None
    loss: float | None  # of the last version's round, as its peers told it
    held_out: dict[
        str, Any
    ]  # what the journal has of the newest version until then that was evaluated; empty: nothing
    signed: bool  # the checkpoint has the coordinator's signature
    said: PublisherWord

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.contributors)

    @property
    def mark(self) -> dict[str, Any]:
        """For programs, in the head of the card: whose model a repository holds."""
        digests = [self.digests[number] for number in sorted(self.digests)]
        return {"run": self.run, "run_id": self.run_id, "version": self.version, "digests": digests}


def facts_of(found: JoinedStages, history: History, told: Provenance, said: PublisherWord) -> CardFacts:
    """UserError where the three do not tell of the same state, or nobody vouches for it."""
    manifest = found.manifest
    runs = {"the journal": history.coordinators[0].run_id, "the provenance": told.run_id}
    for whose, run_id in runs.items():
        if run_id != manifest.run_id:
            raise UserError(f"{whose} is of run {run_id[:8]}, the checkpoint is of run {manifest.run_id[:8]}")
    if told.problems:
        raise UserError(
            f"the provenance does not hold: {told.problems[0]}; farflung audit --provenance names everything"
        )
    digests = {number: each.hex() for part in found.parts for number, each in part.manifest.digest_of.items()}
    settled = history.era(manifest.era).digests
    for number, digest in digests.items():
        known = settled.get((number, manifest.version))
        if known is not None and known != digest:
            raise UserError(
                f"version {manifest.version} of fragment {number} is {digest[:16]} in the checkpoint, and the run "
                f"settled {known[:16]}: this is no state of the run"
            )
        if known is None and not found.run_key:
            raise UserError(
                f"version {manifest.version} of fragment {number}: the run's signature is not in the checkpoint, and "
                "its digest not in the journal; nobody says that this is a state of the run"
            )
    commits = [
        commit
        for (fragment, version), commit in history.era(manifest.era).commits.items()
        if version <= manifest.version and fragment == BOOKS_FRAGMENT
    ]
    walls = [float(each["wall"]) for each in commits if each.get("wall")]
    starts = [float(each.start["wall"]) for each in history.coordinators if each.start.get("wall")]
    last = next((each for each in commits if each["version"] == manifest.version), {})
    return CardFacts(
        run=manifest.run,
        run_id=manifest.run_id,
        version=manifest.version,
        digests=digests,
        contributors=_contributors(history, told),
        commits=len(told.rows),
        void=told.void,
        began=min(starts + walls, default=None),
        ended=max(walls, default=None),
        loss=last.get("loss"),
        held_out=_held_out(history, manifest.version),
        signed=bool(found.run_key),
        said=said,
    )


def _held_out(history: History, version: int) -> dict[str, Any]:
    """The newest; what the run went back behind is void."""
    found: list[dict[str, Any]] = []
    for event in history.records:
        if event.get("event") == "rolled_back":
            found = [each for each in found if each["version"] <= min(event["versions"])]
        elif (
            event.get("event") == "evaluated"
            and event.get("loss") is not None
            and event["version"] <= version
        ):
            found.append(event)
    return found[-1] if found else {}


def _contributors(history: History, told: Provenance) -> tuple[Contributor, ...]:
    names = {str(each["peer"]): str(each.get("name") or "") for each in history.records if _is_entry(each)}
    tokens, versions = told.tokens(), told.versions()
    found = [
        Contributor(peer, names.get(peer, ""), tokens[peer], count)
        for peer, count in sorted(versions.items())
    ]
    return tuple(sorted(found, key=lambda each: -each.tokens))


def _is_entry(event: dict[str, Any]) -> bool:
    return event.get("event") == "admitted"


def card_of(facts: CardFacts, library: str, base: str = "") -> str:
    """README.md of a model's repository.  `base`: the model that an adapter is for."""
    head = {"library_name": library, "tags": ["farflung"], "farflung": facts.mark}
    head |= {"license": facts.said.license} if facts.said.license else {}
    head |= {"base_model": base} if base else {}
    # JSON is YAML, and needs no rules about what has to be quoted.
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", ""]
    count = len(facts.contributors)
    peers = f"{count} peer{'' if count == 1 else 's'}"
    lines += [
        f"# {_plain(facts.run)}",
        "",
        f"{peers}, far apart, trained this model together with farflung. It is version {facts.version} of the run "
        f"`{_plain(facts.run)}` (`{facts.run_id}`): every peer held these weights, bit for bit, after "
        f"{facts.version} rounds.",
        "",
        "| what | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in _table(facts)),
        "",
        "## Who contributed",
        "",
        "| peer | tokens | share | versions |",
        "|---|---:|---:|---:|",
        *_rows(facts),
        "",
        "Tokens are what each peer signed, within what it was leased. `provenance.jsonl` has a row for every commit, "
        "signed by the run's coordinator, and each names the hash of the one before it:",
        "",
        "```",
        f"farflung audit --provenance provenance.jsonl --version {facts.version}",
        "```",
    ]
    return "\n".join(lines) + "\n"


def _table(facts: CardFacts) -> list[tuple[str, str]]:
    energy = facts.said.energy_kwh
    void = f"; {facts.void} more are void, the run went back behind them" if facts.void else ""
    found = [
        ("tokens", f"{facts.tokens:,}"),
        ("commits", f"{facts.commits:,}{void}"),
        ("trained", f"{_day(facts.began)} to {_day(facts.ended)} (UTC, by the coordinator's clock)"),
        ("loss", "not known" if facts.loss is None else f"{facts.loss:.4f}, mean of the last round's peers"),
        *_evaluation(facts),
        ("energy", "not known" if energy is None else f"{energy:g} kWh, by the word of who published it"),
        ("signed", "by the run's coordinator" if facts.signed else "no; its journal has the same digest"),
    ]
    name = "digest" if len(facts.digests) == 1 else "digest of part {}"
    return found + [(name.format(number), f"`{each}`") for number, each in sorted(facts.digests.items())]


def _evaluation(facts: CardFacts) -> list[tuple[str, str]]:
    told = facts.held_out
    if not told:
        return []
    bits = told.get("bits_per_byte")
    more = f", {bits:.4f} bits a byte" if bits is not None else ""
    peers = len(told["peers"])
    by = "one peer's word" if peers == 1 else f"by {peers} peers"
    return [("held-out loss", f"{told['loss']:.4f} nats a token{more} at version {told['version']}, {by}")]


def _rows(facts: CardFacts) -> list[str]:
    total = max(1, facts.tokens)
    rows = [
        f"| {_plain(each.name or each.peer)} | {each.tokens:,} | {_share(each.tokens, total)} | {each.versions:,} |"
        for each in facts.contributors[:SHOWN_PEERS]
    ]
    rest = facts.contributors[SHOWN_PEERS:]
    if rest:
        tokens = sum(each.tokens for each in rest)
        rows.append(f"| and {len(rest)} more | {tokens:,} | {_share(tokens, total)} | |")
    return rows


def _share(tokens: int, total: int) -> str:
    return f"{100 * tokens / total:.1f} %"


def _plain(text: str) -> str:
    """What somebody chose, as text and not as a part of the page."""
    return "".join(letter if letter.isalnum() or letter in "-_. " else "?" for letter in text)


def _day(wall: float | None) -> str:
    return "?" if wall is None else datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M")
