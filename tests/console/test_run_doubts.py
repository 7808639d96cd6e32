"""Contradictions in run.toml that are accepted are told to the host, a line each, and what people mean is not."""

from __future__ import annotations

import pytest

from farflung.console.run_toml import TEMPLATE, doubts
from farflung.protocol.manifest import Manifest


def told(text: str) -> list[str]:
    return doubts(Manifest.from_toml(text, "run.toml"))


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("[round]\ncodec = 'topk'", '[outer] step: codec = "topk" leaves most'),
        ("[round]\ncodec = 'int2'", '[outer] step: codec = "int2" leaves most'),
        ("[outer]\nstep = 'sparse'\n[round]\nchunk_kb = 8", "[round] chunk_kb: 8 is no multiple of 16"),
        ("[inner]\nwarmup_steps = 100000", "[inner] warmup_steps: 100000 are no less than the"),
        ("[model]\nkind = ''\n[data]\nsource = 'python-stdlib'", '[data] source: "python-stdlib" is the'),
        (
            "[run]\nrounds = 30\n[round]\nstart_rounds = 30",
            "[round] start_rounds: 30 are all rounds of the run (30)",
        ),
        (
            "[round]\nperiod_s = 60\nsync_every = 50",
            "[round] period_s: a round is due every 60 s; sync_every (50)",
        ),
        ("[round]\nfragments = 64", "[round] fragments: 64, and the built-in model has"),
    ],
)
def test_a_contradiction_is_told_in_one_line(text: str, begins: str) -> None:
    [line] = told(text)
    assert line.startswith(begins) and "\n" not in line and len(line) < 220


@pytest.mark.parametrize(
    "text",
    [
        "",
        TEMPLATE,
        "[outer]\nstep = 'sparse'\n[round]\ncodec = 'topk'",
        "[outer]\nstep = 'sparse'",
        "[outer]\nschedule = 'streaming'\n[round]\nfragments = 2\nchunk_kb = 64",
        "[model]\nkind = ''\n[data]\nsource = ''",
        "[model]\nkind = ''",
        "[round]\nperiod_s = 60",
    ],
)
def test_what_people_mean_is_no_contradiction(text: str) -> None:
    assert told(text) == []
