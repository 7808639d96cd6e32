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

BY_BATCHES = ("tests/coordinator/batches/test_batches.py", "tests/whole/test_evaluated_batches.py")

EVALUATION = (
    # ---- a text ----
    Mutant(
        "who says nothing counts against a text",
        COORDINATOR,
        "agreed_text(known, len(now.writers))",
        "agreed_text(known, len(known))",
        ASKING,
    ),
    Mutant(
        "a text is what more than half say",
        JUDGE,
        "        if 2 * count <= asked:\n",
        "        if 2 * count < asked:\n",
        JUDGING,
    ),
    Mutant(
        "whoever differed before is not asked how a text goes on",
        JUDGE,
        "        said = [each for each in said if each[: len(found)] == found]\n",
        "        pass\n",
        JUDGING,
    ),
    Mutant(
        "only those who were asked write a text",
        COORDINATOR,
        "        if peer in self.writers and said.text:\n",
        "        if said.text:\n",
        ASKING,
    ),
    Mutant(
        "whose loss is left out is not heard of a text",
        COORDINATOR,
        "            if peer not in found.outvoted and max(each)",
        "            if max(each)",
        ASKING,
    ),
    Mutant(
        "going back forgets a later text",
        COORDINATOR,
        "                    self.written = None\n",
        "                    pass\n",
        ASKING,
    ),
    Mutant(
        "a text takes two seconds at most",
        TEXT,
        "            if time.monotonic() >= until:\n",
        "            if time.monotonic() < until:\n",
        READING,
    ),
    # ---- several ranks ----
    Mutant(
        "P7 ranks of which one alone has a loss compute none",
        "peer/trainer/inner_loop.py",
        "        if held_out is None or not everywhere:\n",
        "        if held_out is None:\n",
        ("tests/peer/island/test_scripts_of_ranks.py",),
    ),
    Mutant(
        "where one rank can't read the text none computes",
        TEXT,
        'next(filter(None, self._gather(why_not.encode())), b""):',
        "why_not.encode():",
        READING,
    ),
    # ---- held-out batches ----
    Mutant(
        "P11 the sums of a held-out batch are never asked for",
        "coordinator/batches/batches.py",
        "        freeze = self.complete and not batch.held_out and self",
        "        freeze = self.complete and self",
        BY_BATCHES,
    ),
    Mutant(
        "P11 no round opens for a held-out batch",
        "coordinator/batches/batches.py",
        "        if batch.held_out or not self.complete:\n",
        "        if not self.complete:\n",
        BY_BATCHES,
    ),
    Mutant(
        "P11 a held-out batch takes its seats with it",
        "coordinator/batches/batch_book.py",
        """taken for the batch that is learned from the same version.\"\"\"
        self._clear_seats()
""",
        """taken for the batch that is learned from the same version.\"\"\"
        pass
""",
        BY_BATCHES,
    ),
    Mutant(
        "P7 windows that nobody can read cost no samples",
        "coordinator/batches/batch_book.py",
        "        if batch.held_out:\n            return\n",
        "        if False:\n            return\n",
        BY_BATCHES,
    ),
    Mutant(
        "P11 a held-out batch is never committed",
        "coordinator/batches/batch_book.py",
        "if self.batch is None or self.batch.held_out:",
        "if self.batch is None:",
        BY_BATCHES,
    ),
    Mutant(
        "a complete run has the loss of its last version computed",
        "coordinator/batches/batches.py",
        "        is_next = not desk.finished or self.house.is_evaluated_next\n",
        "        is_next = not desk.finished\n",
        BY_BATCHES,
    ),
    Mutant(
        "of a model in stages the loss is there when the last one has it",
        "coordinator/batches/batches.py",
        "if batch.held_out and seat.stage == self.stages - 1:",
        "if batch.held_out and seat.stage == 0:",
        BY_BATCHES,
    ),
    Mutant(
        "P11 a stage takes no step of its own on what is held out",
        "peer/pipeline/machines/stage_machine.py",
        "if self._local is None or hand.held_out:",
        "if self._local is None:",
        ("tests/peer/pipeline/test_stage_machine.py",),
    ),
    Mutant(
        "losses end with the sums that they are of",
        "peer/batches/batch_work.py",
        "self._losses, self._frozen_at = {}, 0",
        "self._frozen_at = 0",
        ("tests/peer/batches/test_batch_work.py",),
    ),
    Mutant(
        "what is held out is computed in eval mode, and moves no buffer",
        "peer/pipeline/samples.py",
        "            with as_it_was(stage):\n",
        "            with torch.no_grad():\n",
        ("tests/peer/pipeline/test_batch_loop.py",),
    ),
    Mutant(
        "a text that two can't read others read",
        "coordinator/batches/batches.py",
        "tries = math.inf if batch.held_out else 2",
        "tries = 2",
        BY_BATCHES,
    ),
    Mutant(
        "a held-out batch is no part of the round before it",
        "coordinator/batches/batches.py",
        "        elif version is not None and (held_out or self._is_held_out):\n",
        "        elif False:\n",
        ("tests/coordinator/batches/test_batch_times.py",),
    ),
    Mutant(
        "P7 a model's own error on what is held out ends no training",
        "peer/pipeline/samples.py",
        "        except (NonFiniteTensor, UserError, *THEIR_ERRORS) as error:",
        "        except (NonFiniteTensor, UserError) as error:",
        ("tests/peer/pipeline/test_batch_loop.py",),
    ),
    Mutant(
        "one row that can't be computed costs no other",
        "peer/pipeline/samples.py",
        "if self._rows is None or isinstance(error, OSError | StoreError):",
        "if True:",
        ("tests/peer/pipeline/test_batch_loop.py",),
    ),
    Mutant(
        "a seat ends with a held-out batch, though no other begins",
        "peer/batches/batch_work.py",
        "            if not self.is_held_out:\n",
        "            if True:\n",
        ("tests/peer/batches/test_batch_work.py",),
    ),
    Mutant(
        "where batches are computed nobody is asked for a loss by itself",
        COORDINATOR,
        "if not self._core.manifest.eval.source or self._by_batches:",
        "if not self._core.manifest.eval.source:",
        ASKING,
    ),
    Mutant(
        "a version of which no loss can be computed is not tried again",
        COORDINATOR,
        "        self._over = now.era, now.version\n",
        "        pass\n",
        ASKING,
    ),
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
        "protocol/mode_words.py",
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
