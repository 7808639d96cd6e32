"""The host's list: read again when it changes, from when on the host wants one, and closed to other users."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from farflung.coordinator.admission.allowlist import FILE_NAME as ALLOWLIST
from farflung.coordinator.admission.allowlist import Allowlist
from farflung.coordinator.operator_socket import ask
from farflung.protocol.messages import Amend, Refuse, Welcome
from rig.served import MANIFEST, Running, ScriptedPeer
from rig.waiting import eventually


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    server = Running(tmp_path)
    yield server
    server.stop()


def test_under_the_most_open_of_umasks_it_is_closed_to_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Allowlist(tmp_path).create()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ALLOWLIST).stat().st_mode) == 0o600


def test_amended_to_a_list_the_run_takes_in_whom_the_list_names_and_nobody_else(
    running: Running, context: zmq.Context[zmq.SyncSocket], tmp_path: Path
) -> None:
    listed, stranger = ScriptedPeer(context, running.url), ScriptedPeer(context, running.url)
    (tmp_path / ALLOWLIST).write_text(f"{listed.identity.peer_id}\n", encoding="utf-8")
    admission = MANIFEST.admission.model_copy(update={"mode": "allowlist"})
    wanted = MANIFEST.model_copy(update={"admission": admission})
    assert ask(tmp_path, Amend(manifest=wanted.model_dump_json().encode(), at=None)).ok
    assert isinstance(listed.greet(), Welcome)
    refusal = stranger.greet()
    assert isinstance(refusal, Refuse) and refusal.code == "not-listed"
    (tmp_path / ALLOWLIST).write_text(f"{stranger.identity.peer_id}  # and now this one\n", encoding="utf-8")
    eventually(lambda: isinstance(stranger.greet(), Welcome), "the list is read again")
