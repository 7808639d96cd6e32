"""Mutants of held-out losses: who computes them, who is believed, what of them counts.  Read by mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

COORDINATOR = "coordinator/evaluation/evaluation.py"
JUDGE = "coordinator/evaluation/held_out_loss.py"
PEER = "peer/evaluation/evaluation.py"
TEXT = "peer/evaluation/windows.py"

JUDGING = ("tests/coordinator/evaluation/test_held_out_loss.py", "tests/whole/test_evaluation.py")
ASKING = ("tests/coordinator/evaluation/test_evaluation.py", "tests/whole/test_evaluation.py")
ANSWERING = ("tests/peer/evaluation/test_evaluation.py", "tests/whole/test_evaluation.py")
READING = ("tests/peer/evaluation/test_windows.py",)

EVALUATION = (
    # ---- who is believed ----
    Mutant(
        "whoever is contradicted by most is left out",
        JUDGE,
        "while peer := _loser(against := contradictions(_without(said, outvoted))):",
        "while (against := contradictions(said)) and (peer := ''):",
        JUDGING,
    ),
    Mutant(
        "one that contradicts a peer is its word against that one's",
        JUDGE,
        "if len(self.others) > 1 else 0.0",
        "if self.others else 0.0",
        JUDGING,
    ),
    Mutant(
        "of two parties of one size neither is left out",
        JUDGE,
        'return "" if is_split else min(losers, default="")',
        'return min(losers, default="")',
        JUDGING,
    ),
    Mutant(
        "where those who are left contradict each other there is no figure",
        JUDGE,
        "agree = agree and not any(each.others for each in against.values())",
        "pass",
        JUDGING,
    ),
    Mutant(
        "a window about which no majority agrees is not in the figure",
        JUDGE,
        "return middle if 2 * near > len(losses) else None",
        "return middle",
        JUDGING,
    ),
    Mutant(
        "differences of arithmetic are no lies",
        JUDGE,
        "> OFF_SHARE * abs(other) + OFF_NATS",
        "> 0.0",
        JUDGING,
    ),
    Mutant(
        "who reads another text is left out",
        JUDGE,
        "if len(texts) > 1 and texts[0][1] > texts[1][1]:",
        "if False:",
        JUDGING,
    ),
    Mutant(
        "of two texts that as many read neither is believed",
        JUDGE,
        "agree = len(texts) == 1 or bool(outvoted)",
        "agree = True",
        JUDGING,
    ),
    # ---- who computes what ----
    Mutant(
        "each window goes to three",
        COORDINATOR,
        "while len(chosen) < min(COPIES, len(peers)):",
        "while len(chosen) < 1:",
        JUDGING,
    ),
    Mutant(
        "a window goes to three others, not to one of them twice",
        COORDINATOR,
        "(deck if peer in chosen else chosen).append(peer)",
        "chosen.append(peer)",
        JUDGING,
    ),
    Mutant(
        "nobody can foresee with whom it shares a window",
        COORDINATOR,
        "deck.extend(dice.shuffled(peers))",
        "deck.extend(peers)",
        JUDGING,
    ),
    Mutant(
        "an answer counts once",
        COORDINATOR,
        "if said.number != self.number or not share or peer in self.answered:",
        "if said.number != self.number or not share:",
        ASKING,
    ),
    Mutant(
        "whoever was not asked is not heard",
        COORDINATOR,
        "share = self.shares.get(peer, 0)\n        if said",
        "share = self.shares.get(peer, _all_of(self.shares.values()))\n        if said",
        ASKING,
    ),
    Mutant(
        "of what comes only finite losses count",
        COORDINATOR,
        "if all(0.0 <= each <= NATS_MOST for each in found) else None",
        "",
        JUDGING,
    ),
    Mutant(
        "a figure of a script is finite",
        COORDINATOR,
        "for name, value in own.figures if math.isfinite(value)}",
        "for name, value in own.figures}",
        ASKING,
    ),
    Mutant(
        "whoever helps, leaves or is in doubt computes nothing",
        COORDINATOR,
        "if not (m.helps or m.leaving or m.quarantined) and m.beat is not None]",
        "if m.beat is not None]",
        ASKING,
    ),
    Mutant(
        "a version whose digest is not settled is not evaluated",
        COORDINATOR,
        "settled = all(book.version in book.digests for book in ledger.books)",
        "settled = True",
        ASKING,
    ),
    Mutant(
        "only those that hold the version are asked",
        COORDINATOR,
        "here = sorted(m.peer for m in able if m.verified)",
        "here = sorted(m.peer for m in able)",
        ASKING,
    ),
    Mutant(
        "the first ones wait for those that are just taking the version",
        COORDINATOR,
        "waits = len(here) < len(able) and core.now",
        "waits = False and core.now",
        ASKING,
    ),
    Mutant(
        "windows of those who cannot compute them go to others once",
        COORDINATOR,
        "and now.draws < DRAWS_MOST and now.missing:",
        "and now.draws < 1 and now.missing:",
        ASKING,
    ),
    Mutant(
        "windows go to others once, and not without end",
        COORDINATOR,
        "DRAWS_MOST = 2  #",
        "DRAWS_MOST = 99  #",
        ASKING,
    ),
    Mutant(
        "the next version ends it after a moment",
        COORDINATOR,
        "now.moved_on_at = min(now.moved_on_at, core.now)",
        "pass",
        ASKING,
    ),
    Mutant(
        "where the run goes back what is under way is void",
        COORDINATOR,
        "if core.ledger.eras.number != now.era:",
        "if False:",
        ASKING,
    ),
    Mutant(
        "where the run goes back the figures of later versions go",
        COORDINATOR,
        "[each for each in self.recent if each.version <= min(versions)]",
        "self.recent",
        ASKING,
    ),
    Mutant(
        "of one version that nobody can evaluate nobody is asked without end",
        COORDINATOR,
        "self._over = now.era, now.version",
        "pass",
        ASKING,
    ),
    Mutant(
        "a complete run waits for the loss of its last version",
        COORDINATOR,
        '"its last version is evaluated" if self._now is not None or (self._due() and self._able()) else ""',
        '""',
        ASKING,
    ),
    # ---- at a peer ----
    Mutant(
        "what was computed counts only if the version was here to the end",
        PEER,
        "if not self._is_here(order.versions):\n            self._answer = ScoreBeat(word.number",
        "if False:\n            self._answer = ScoreBeat(word.number",
        ANSWERING,
    ),
    Mutant(
        "the trainer is asked while the state is whole",
        PEER,
        "and all(each.whole for each in held)",
        "",
        ANSWERING,
    ),
    Mutant(
        "of one version no more is computed than an honest run asks",
        PEER,
        "return not self.open and (order.versions != self.versions or self.count < QUESTIONS_MOST)",
        "return not self.open",
        ANSWERING,
    ),
    Mutant(
        "the trainer computes one thing at a time",
        PEER,
        "return not self.open and (order",
        "return (order",
        ANSWERING,
    ),
    Mutant(
        "as many losses as windows are sent, or none",
        PEER,
        "elif word.why_not or len(word.nats) != 4 * count:",
        "elif word.why_not:",
        ANSWERING,
    ),
    Mutant(
        "a trainer that hangs in an evaluation counts as stuck",
        PEER,
        "self._proxy.away = False\n        return self._ask(now)",
        "pass\n        return self._ask(now)",
        ANSWERING,
    ),
    Mutant(
        "a trainer that evaluates does not count as stuck at once",
        PEER,
        "self._proxy.away = True",
        "pass",
        ANSWERING,
    ),
    Mutant(
        "windows are those of the mask, not of a host that lies about their count",
        TEXT,
        "windows = [each for each in bits(mask) if each < of]",
        "windows = list(bits(mask))",
        READING,
    ),
    Mutant(
        "the text that a loss is of is known again",
        TEXT,
        "for at in range(LOOKED_AT):",
        "for at in range(0):",
        READING,
    ),
    Mutant(
        "a loss that is no number is no answer",
        TEXT,
        "return nats if bool((nats >= 0).all() and (nats <= NATS_MOST).all()) else None",
        "return nats",
        READING,
    ),
)
