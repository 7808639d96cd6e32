"""What all tests share: helpers, the checkout's benchmarks, and property tests that are the same in every run."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

HERE = Path(__file__).resolve().parent
# The benchmarks are no part of the installed package, and tests are no package: both are shown to Python as folders.
for folder in (HERE / "helpers", HERE.parent / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# No test may fail by chance: the same examples each time, and no example is too slow for a machine that stands still.
settings.register_profile(
    "steady",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")
