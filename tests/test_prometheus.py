"""A status as Prometheus reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from farflung.peer.prometheus import as_metrics

SAMPLE = json.loads((Path(__file__).parent.parent / "docs/sample_status.json").read_text(encoding="utf-8"))
LINE = re.compile(r'# (HELP|TYPE) farflung_\w+ .+|farflung_\w+\{(\w+="([^"\\]|\\.)*",?)+\} -?[\d.e+-]+')


def test_every_line_has_the_form_and_the_figures_are_the_status() -> None:
    text = as_metrics(SAMPLE)
    assert all(LINE.fullmatch(line) for line in text.splitlines()), text
    assert 'farflung_version{run="demo"} 12' in text
    assert 'farflung_peers_alive{run="demo"} 3' in text and 'peers_taking_part{run="demo"} 2' in text
    assert 'farflung_peer_takes_part{run="demo",peer="lime-wren",id="w5u3sd7qkx2ylomf"} 0' in text
    assert 'farflung_parity{run="demo"} 1' in text


def test_what_is_not_known_is_not_told_and_names_cannot_break_out() -> None:
    odd = {"run": 'a"b\\c\n', "loss": None, "members": [{"name": 'x"} 1\nfarflung_loss 0', "step": 3}]}
    text = as_metrics(odd)
    assert "farflung_loss{" not in text and "farflung_parity" not in text
    assert all(LINE.fullmatch(line) for line in text.splitlines()), text
