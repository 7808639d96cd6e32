"""`python -m rig.unforeseen ...` is `farflung ...` whose coordinator foresees no round: for benchmarks/wan.py."""

from __future__ import annotations

import sys

from farflung.console import main
from farflung.coordinator.rounds.round import Foresight

if __name__ == "__main__":
    Foresight.is_on = property(lambda self: False)  # type: ignore[assignment, method-assign]
    sys.argv[0] = "farflung"
    sys.exit(main.main())
