"""What all tests share: the rig, the checkout's benchmarks, and property tests that are the same in every run."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from farflung.coordinator.modes import registry

# Before anything loads torch: two test processes, and the peers that they start, share a few cores. Threads of several
# of them wait for each other after every operation, which made some files take three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).resolve().parent
WHOLE = HERE / "whole"
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


def pytest_configure() -> None:
    """A shell's job in the background ignores Ctrl-C, and hands that on to all that the tests start and interrupt."""
    gc.disable()  # pytest_collection_finish
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: a million objects, through which each full search for garbage
    would go."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the one in which xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    if hasattr(config, "workerinput"):
        _in_pieces(items)
    yield
    # pytest-xdist 3.8 writes an item's group where pytest 9.2 no longer reads: each test would be a piece of its own.
    for item in items:
        if (named := getattr(item, "_nodeid", item.nodeid)) != item.nodeid:
            item._id = type(item._id).parse(named)  # type: ignore[attr-defined]


def _in_pieces(items: list[pytest.Item]) -> None:
    """What test processes hand each other costs milliseconds for each piece: a file is one piece, and comes late.

    What is long goes first, so that all end at about the same time: groups, the largest of them first, then what starts
    processes or takes long, then the runs in virtual time, each of these for itself.
    """
    groups = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("xdist_group"))}
    sizes = Counter(groups.values())
    long = {"slow", "hard"} if os.environ.get("FARFLUNG_LONG") else {"slow"}

    def turn(item: pytest.Item) -> tuple[int, int, str]:
        if item in groups:
            return 0, -sizes[groups[item]], groups[item]
        if any(item.get_closest_marker(name) for name in long):
            return 1, 0, ""
        return (2, 0, "") if WHOLE in item.path.parents else (3, 0, "")

    items.sort(key=turn)
    for item in items:
        if turn(item)[0] == 3:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(HERE))))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws is the same in every run, and whatever ran before it in this process."""
    if item.get_closest_marker("hard") and not os.environ.get("FARFLUNG_LONG"):
        pytest.skip("too long for each time; make hard runs it")
    for mark in item.iter_markers("mode"):
        if registry.found(mark.args[0]) is None:
            pytest.skip(f"{mark.args[0]} was taken out")
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is called: all members take all steps of each period, as fast or slow as they are."""
    if (pace := registry.found("pace")) is not None:
        monkeypatch.setattr(pace.PaceMode, "tell", lambda *_: ())


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
    monkeypatch.setattr(
        "farflung.protocol.process.as_nobody.S3_ENDPOINT", buckets_of_this_process.environ["AWS_ENDPOINT_URL"]
    )
    return buckets_of_this_process
