"""The page has the tables of states as the code has them: python docs/make_states.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "make_states.py"


def test_the_tables_of_states_in_the_page_are_those_of_the_code() -> None:
    checked = subprocess.run([sys.executable, str(SCRIPT), "--check"], check=False)
    assert checked.returncode == 0, "python docs/make_states.py"
