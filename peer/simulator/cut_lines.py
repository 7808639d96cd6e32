"""Lines to the coordinator that are cut for long, and the host, who says at last that the run shall go back, or changes
its terms while it goes on.

Used by the simulated world.  The peers behind a cut line live on, with all that they hold; seen from the coordinator
they are as good as dead, and a stranger that gets through may be all that it sees.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.run.machine import RunMachine
from farflung.peer.simulator.invariants import Broken, Invariants, all_is_held
from farflung.peer.simulator.peer import VirtualPeer
from farflung.peer.simulator.scenario import Scenario
from farflung.protocol.manifest import Manifest
from farflung.protocol.orders import Amend, GoBack
from farflung.protocol.signing import curve_key_of

HOST_LOOKS_EVERY_S = 2.0
BETWEEN_S = (1.0, 6.0)  # two amendments
NO_NEWS_S = 15.0  # the host waits so long for a newer version, or for somebody who holds the newest


@dataclass
class CutLines:
    scenario: Scenario
    behind: Collection[str] = ()  # peers that are cut off, while it lasts

    def is_cut(self, source: str, target: str, now: float) -> bool:
        """`source` or `target` is the coordinator."""
        begins = self.scenario.cut_off_at_s
        lasts = bool(self.behind) and begins <= now < begins + self.scenario.cut_off_s
        return lasts and (source in self.behind or target in self.behind)

    def is_behind(self, peer: str, now: float) -> bool:
        return self.is_cut(peer, "", now)


@dataclass
class Held:
    """What living peers held of each fragment when the lines were cut: (version, the round that made it)."""

    commits: dict[tuple[int, int], int] = field(default_factory=dict)

    @staticmethod
    def by(peers: Iterable[VirtualPeer], seen: Invariants) -> Held:
        newest: dict[int, int] = {}
        for peer in peers:
            if peer.machine.part is not None and peer.machine.era == len(seen.eras) - 1:
                for number, lane in peer.machine.part.lanes.items():
                    newest[number] = max(newest.get(number, 0), lane.version)
        commits = {
            key: each.round_no for key, each in seen.commits.items() if key[1] <= newest.get(key[0], 0)
        }
        return Held(commits)

    def lost(self, seen: Invariants) -> list[tuple[int, int]]:
        """Versions that are not what they were."""
        now = seen.commits
        return [key for key, made in self.commits.items() if key not in now or now[key].round_no != made]


class Host:
    """Looks at the run now and then, and says go-back when nobody living holds the newest version."""

    def __init__(self, scenario: Scenario) -> None:
        self._from_s = scenario.faults_until_s + scenario.host_after_s if scenario.host_after_s else None
        self._seen: object = None
        self._since = 0.0

    def order(self, machine: RunMachine, peers: Iterable[VirtualPeer], now: float) -> GoBack | None:
        ledger = machine.core.ledger
        seen = (ledger.era, [book.version for book in ledger.books])
        lost = ledger.learned and not machine.core.finished and not all_is_held(ledger, peers)
        if not lost or seen != self._seen:
            self._seen, self._since = seen, now
        if self._from_s is None or now < self._from_s or now - self._since < NO_NEWS_S:
            return None
        self._since = now
        held = machine.going_back.settled_held()
        # Of one fragment nothing is left, nor a checkpoint of them all: only founding anew makes a model of it.
        gone = max(held) <= 0 or (min(held) < 0 and not machine.going_back.saved)
        if ledger.model is not None and ledger.model.stages:  # all of them go to one version
            gone = max(machine.going_back.together(held)) <= 0
        return GoBack(to=0, sure=True) if gone else GoBack(sure=True)


class HostChanges:
    """The host signs what it changes.  Everybody who holds the newest version has followed the same amendments to get
    there: P1 would break otherwise, since the outer step is among what is changed.

    Draws from a seed of its own: what else happens in a world is as it was without it."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._draw = random.Random(f"amendments {seed}")
        self._left, self._rounds = scenario.amends, scenario.rounds
        self._signs = bool(scenario.amends)
        self._rounds_most = scenario.rounds + 3
        self._key = Ed25519PrivateKey.from_private_bytes(self._draw.randbytes(32))
        self._public = self._key.public_key().public_bytes_raw()

    @property
    def pinned(self) -> bytes:
        """As the join URL would have it."""
        return curve_key_of(self._public) if self._signs else b""

    def prepare(self, machine: RunMachine) -> None:
        """A coordinator that starts has the key of the run."""
        if self._signs:
            machine.core.prove = lambda statement: self._public + self._key.sign(statement)

    def rounds(self, machine: RunMachine | None) -> int:
        """That the run has, as far as its host has said."""
        return self._rounds if machine is None else machine.core.terms.newest.run.rounds

    def begin(
        self,
        after: Callable[[float, Callable[[], object]], None],
        machine: Callable[[], RunMachine | None],
        obey: Callable[[RunMachine, Amend], None],
    ) -> None:
        """`after`: so many seconds; `machine`: that lives then."""

        def change() -> None:
            living = machine()
            if living is not None and (order := self._order(living)) is not None:
                obey(living, order)
            self.begin(after, machine, obey)

        if self._left:
            after(self._draw.uniform(*BETWEEN_S), change)

    def _order(self, machine: RunMachine) -> Amend | None:
        """To be obeyed now; None: nothing can be made of what was drawn."""
        self._left -= 1
        core = machine.core
        content = core.terms.newest.model_dump(mode="json")
        for section, key, value in self._drawn(content):
            content[section][key] = value
        try:
            wanted = Manifest.model_validate_json(json.dumps(content))
        except ValueError:
            return None
        later = self._draw.choice((None, None, 1, 2))
        newest = max(book.version for book in core.ledger.books)
        return Amend(manifest=wanted.model_dump_json().encode(), at=None if later is None else newest + later)

    def _drawn(self, content: dict[str, Any]) -> list[tuple[str, str, Any]]:
        draw = self._draw
        rounds = content["run"]["rounds"]
        exact = content["outer"]["step"] in ("adamw", "muon")
        choices: list[tuple[str, str, Any]] = [
            ("round", "sync_every", draw.choice((2, 3, 6, 8))),
            ("round", "codec", draw.choice(("fp32", "int8", "int4", "auto"))),
            ("round", "deadline_s", draw.choice((3.0, 9.0))),
            ("round", "weight_cap", draw.choice((1.0, 2.0))),
            ("run", "rounds", min(self._rounds_most, rounds + draw.choice((-1, 1, 2)))),
            ("outer", "lr", draw.choice((0.02, 0.005) if exact else (0.3, 0.9))),
        ]
        if not exact and content["outer"]["step"] == "nesterov":
            choices.append(("outer", "momentum", draw.choice((0.0, 0.5, 0.8))))
        # The step in any case: who follows it late is seen by that.
        return [choices[5], *draw.sample(choices, draw.randint(1, 3))]

    def check_all_know(self, machine: RunMachine, here: Iterable[VirtualPeer]) -> None:
        """Of those who stayed to the end of the run."""
        terms = machine.core.terms
        for peer in here:
            joined = peer.machine.joined
            if joined is None:
                continue
            mine, versions = joined.amending.terms, [lane.version for lane in joined.lanes]
            due = terms.number_at(max(versions) - 1)
            if mine.count < due or mine.amendments != terms.amendments[: mine.count]:
                raise Broken(
                    f"P1 is broken: {peer.peer} holds versions {versions} and follows {mine.count} amendments of "
                    f"{terms.count}, {due} hold there"
                )
