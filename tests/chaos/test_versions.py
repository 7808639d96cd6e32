"""Real processes of two versions of the protocol in one run, and a volunteer that upgrades while it goes on.

FARFLUNG_LAST_CHECKOUT=FOLDER: what speaks the last version is the package `farflung` in that folder, as it was; without
it, it is this one, made to speak the last version and to end at any word that that one would not have understood.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farflung.protocol.limits import LAST_PROTOCOL, PROTOCOL_VERSION
from rig import last_protocol
from rig.arena import LIGHT_TRAINER, Arena, Party, is_kept

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.xdist_group("chaos"),
    pytest.mark.hard,
]

CHECKOUT = os.environ.get("FARFLUNG_LAST_CHECKOUT")


def run_the_last(arena: Arena, party: Party, words: list[str]) -> None:
    environ = dict(os.environ, FARFLUNG_STEP_S=str(arena.step_s))
    program = [str(Path(last_protocol.__file__))]
    if CHECKOUT is not None:
        environ["PYTHONPATH"], program = CHECKOUT, ["-m", "farflung"]
    with party.log.open("a") as log:
        party.process = subprocess.Popen(  # type: ignore[assignment]
            [sys.executable, *program, *words], env=environ, stdout=log, stderr=log
        )


def join_as_the_last(arena: Arena, name: str) -> None:
    key = arena.folder / f"{name}.pem"
    words = ["join", "--identity", str(key), "--checkpoints", str(arena.folder / "checkpoints" / name)]
    run_the_last(
        arena,
        arena._party(name, key.with_suffix(".events.jsonl")),
        [*words, "--script", str(LIGHT_TRAINER), arena.url],
    )


def spoken(arena: Arena) -> dict[str, int]:
    code, told = arena.call("status", "status", arena.url, "--json")
    status: dict[str, Any] = json.loads(told.splitlines()[-1])
    assert code == 0
    return {each["id"]: each["protocol"] for each in status["members"] if each["alive"]}


def test_a_volunteer_of_the_last_version_trains_beside_one_of_this_and_upgrades(
    build: Callable[..., Arena],
) -> None:
    arena = build()
    arena.coordinate()
    arena.join("ann")
    join_as_the_last(arena, "bob")
    arena.takes_part("ann", "bob")
    ann, bob = arena.parties["ann"].id, arena.parties["bob"].id
    assert spoken(arena) == {ann: PROTOCOL_VERSION, bob: LAST_PROTOCOL}

    arena.kill("bob")
    arena.join("bob")
    # What the killed one had sent may be in the next commit, so its work alone does not show that Bob is back.
    both = {ann: PROTOCOL_VERSION, bob: PROTOCOL_VERSION}
    arena.until(lambda: spoken(arena) == both, "bob is back and speaks this version")
    arena.takes_part("ann", "bob", since=time.monotonic())
    is_kept(arena)


@pytest.mark.skipif(CHECKOUT is None, reason="FARFLUNG_LAST_CHECKOUT names no checkout of the last version")
def test_volunteers_upgrade_first_and_their_host_after_them(build: Callable[..., Arena]) -> None:
    """The host's own folder goes on under the new version, and peers speak the new one as soon as they can."""
    arena = build(min_peers=1)
    words = ["coordinate", str(arena.folder / "run.toml"), "--listen", f"{arena.address}:{arena._port}"]
    host = arena._party("coordinator", arena.folder / "run.data" / "events.jsonl")
    run_the_last(arena, host, words)
    arena.until(lambda: "farflung://" in host.told(), "the coordinator tells the URL")
    arena.url = re.findall(r"farflung://[^\s\"]+", host.told())[0]
    arena.join("ann")
    arena.takes_part("ann")
    at = arena.kill("coordinator")
    arena.coordinate()
    arena.takes_part("ann", since=at)
    assert spoken(arena) == {arena.parties["ann"].id: PROTOCOL_VERSION}
    is_kept(arena)
