"""The trainer's end of the local channel belongs to one process: a forked copy of it would hear nothing for ever."""

from __future__ import annotations

import os

import pytest

from farflung.peer.local.channel import LocalClient, LocalServer
from farflung.peer.local.folder import make_folder, remove_folder
from farflung.peer.local.words import Bye
from farflung.protocol.errors import UserError
from rig.waiting import eventually


def test_another_process_than_the_one_that_joined_may_neither_say_nor_hear_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_folder()
    server, client = LocalServer(folder), LocalClient(folder)
    try:
        eventually(server.recv_nowait, "the trainer knocks")
        own = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
        for act in (lambda: client.recv(60.0), lambda: client.send(Bye(reason="finished"))):
            with pytest.raises(UserError, match="num_workers=0"):
                act()
        monkeypatch.setattr(os, "getpid", lambda: own)
        client.send(Bye(reason="it is mine"))
        heard = eventually(server.recv_nowait, "the trainer says good-bye")
        assert heard is not None and heard[1] == Bye(reason="it is mine")
    finally:
        client.close()
        server.close()
        remove_folder(folder)
