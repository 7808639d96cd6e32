"""What all tests share: the rig, the checkout's benchmarks, and property tests that are the same in every run."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).resolve().parent
# The benchmarks are no part of the installed package, and tests are no package: both are shown to Python as folders.
# What they share is rig/, imported as `rig.arena` and the like.
for folder in (HERE, HERE.parent / "benchmarks"):
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


def pytest_runtest_setup() -> None:
    """What a test draws is the same in every run, and whatever ran before it in this process."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def say(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """A command that ends at once, in this process: its exit code, and what it said on stdout and on stderr."""
    from farflung.console import main

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["farflung", *map(str, words)])
        code = main.main()
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts peers in no time: tests/rig/nursery.py."""
    from rig.nursery import Nursery  # here, because its folder was not known above

    with Nursery(tmp_path_factory.mktemp("n")) as made:
        yield made


@pytest.fixture(scope="session")
def buckets_of_this_process() -> Iterator[Any]:
    from rig.buckets import Buckets  # here: to import moto takes a second, and few tests need it

    with Buckets() as made:
        yield made


@pytest.fixture
def buckets(buckets_of_this_process: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """S3 on this machine: tests/rig/buckets.py."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in buckets_of_this_process.environ.items():
        monkeypatch.setenv(name, value)
    return buckets_of_this_process
