"""The card of a published model: what it says is of one state, and nobody's name is a part of the page."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
from torch import nn

from farflung.checkpoints.checkpoint_manifest import JoinedStages
from farflung.console.history.audit_evidence import provenance_in
from farflung.console.history.history import read_folder
from farflung.console.model_card import SHOWN_PEERS, CardFacts, Contributor, PublisherWord, card_of, facts_of
from farflung.protocol.errors import UserError
from rig.made_model import RUN_ID, MadeRun


def facts(run: MadeRun, found: JoinedStages, said: PublisherWord = PublisherWord()) -> CardFacts:  # noqa: B008
    told = provenance_in(run.data / "provenance.jsonl", found.run_key, found.manifest.version)
    return facts_of(found, read_folder(run.data), told, said)


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path)


def test_a_card_tells_who_took_part_of_which_state(run: MadeRun) -> None:
    run.commits(1, bytes(32))
    found = JoinedStages((run.saves(nn.Linear(3, 2), 2),))
    run.commits(3, bytes(32))
    told = facts(run, found, PublisherWord("mit", 2.5))
    assert told.tokens == 8000 and told.commits == 2 and told.loss == 2.0 and told.signed, "not of version 3"
    assert told.mark == {
        "run": "little-llama", "run_id": RUN_ID.hex(), "version": 2, "digests": [found.manifest.digests[0].hex()],
    }  # fmt: skip
    card = card_of(told, "transformers")
    assert card.startswith('---\nlibrary_name: "transformers"\ntags: ["farflung"]\nfarflung: {"run": ')
    assert 'license: "mit"' in card and "2.5 kWh" in card and "| tokens | 8,000 |" in card
    assert "not known" not in card and "not known" in card_of(facts(run, found), "transformers")


def test_nobody_vouches_for_a_state_that_neither_the_run_signed_nor_its_journal_has(run: MadeRun) -> None:
    saved = run.saves(nn.Linear(3, 2), 1)
    fragment = saved.manifest.fragments[0]
    unproven = (msgspec.structs.replace(fragment, proof=""),)
    bare = dataclasses.replace(saved, manifest=msgspec.structs.replace(saved.manifest, fragments=unproven))
    assert not facts(run, JoinedStages((bare,))).signed, "the journal has its digest"
    journal = run.data / "events.jsonl"
    journal.write_text(journal.read_text().replace('"event": "digest"', '"event": "other"'))
    assert facts(run, JoinedStages((saved,))).signed
    with pytest.raises(UserError, match="nobody says that this is a state of the run"):
        facts(run, JoinedStages((bare,)))


def test_names_are_text_and_there_is_an_end_to_them(run: MadeRun) -> None:
    told = facts(run, JoinedStages((run.saves(nn.Linear(3, 2), 1),)))
    many = tuple(Contributor(f"peer{n}", "a|b](x)<img>\n# c", 10, 1) for n in range(SHOWN_PEERS + 7))
    card = card_of(dataclasses.replace(told, contributors=many, run="x`<b>\n---"), "transformers")
    assert "<" not in card.partition("---\n\n")[2] and "a?b??x??img??? c" in card
    assert "| and 7 more | 70 | 12.3 % | |" in card and card.count("a?b") == SHOWN_PEERS
    assert card.count("\n---\n") == 1, "the head ends where it ends"
