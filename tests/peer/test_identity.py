"""The identity key: made once, private on disk, refused when it is not; ids and names from the public half."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import x25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from farflung.peer.identity import Identity
from farflung.peer.settings import default_path
from farflung.protocol.errors import UserError
from farflung.protocol.signing import ADJECTIVES, ANIMALS, name_of, peer_id_of, verify


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_made_once_then_the_same(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.pem"
    first, again = Identity.load_or_create(path), Identity.load_or_create(path)
    assert first.public == again.public
    assert len(first.public) == 32
    assert (first.peer_id, first.name) == (peer_id_of(again.public), name_of(again.public))
    assert verify(first.public, b"message", again.sign(b"message"))
    assert os.listdir(path.parent) == ["identity.pem"]


def test_the_key_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.pem"
    before = os.umask(0)  # even for people who share everything
    try:
        Identity.load_or_create(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_key_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "my identity.pem"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(UserError, match=r"run: chmod 600 '.*/my identity\.pem'$"):
        Identity.load_or_create(path)


def test_unusable_files_say_what_to_do(tmp_path: Path) -> None:
    good = Ed25519PrivateKey.generate()
    pkcs8 = (Encoding.PEM, PrivateFormat.PKCS8)
    locked = good.private_bytes(*pkcs8, BestAvailableEncryption(b"secret"))
    other = x25519.X25519PrivateKey.generate().private_bytes(*pkcs8, NoEncryption())
    for data, expected in [
        (b"", "damaged"),
        (b"\xff" * 100_000, "damaged"),
        (good.private_bytes(*pkcs8, NoEncryption())[:-40], "damaged"),
        (locked, "protected by a password"),
        (other, "expected ed25519"),
    ]:
        with pytest.raises(UserError, match=f"{expected}.*; move it away"):
            Identity.load_or_create(write(tmp_path / "identity.pem", data))


def test_folders_and_pipes_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in (".", "pipe"):
        with pytest.raises(UserError, match="not a regular file"):
            Identity.load_or_create(tmp_path / name)


def test_a_place_that_cannot_hold_a_key(tmp_path: Path) -> None:
    write(tmp_path / "file", b"")
    with pytest.raises(UserError, match="cannot use this key file"):
        Identity.load_or_create(tmp_path / "file" / "identity.pem")


def test_a_link_that_leads_nowhere_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "identity.pem").symlink_to(tmp_path / "unmounted" / "identity.pem")
    with pytest.raises(UserError, match="No such file"):
        Identity.load_or_create(tmp_path / "identity.pem")


def test_default_path() -> None:
    assert default_path({"FARFLUNG_HOME": "/keys"}) == Path("/keys/identity.pem")
    assert default_path({"FARFLUNG_HOME": ""}) == Path("~/.config/farflung/identity.pem").expanduser()


def test_ids_and_names() -> None:
    assert len(set(ADJECTIVES)) == len(set(ANIMALS)) == 64
    assert all(word.isascii() and word.isalpha() and word.islower() for word in (*ADJECTIVES, *ANIMALS))
    # Fixed for ever: a change would rename every peer.
    assert (peer_id_of(bytes(32)), name_of(bytes(32))) == ("flnihqmbtjjxfwxb", "jolly-dove")


def test_verify_is_total() -> None:
    me = Identity.generate()
    signature = me.sign(b"message")
    assert not verify(me.public, b"other", signature)
    assert not verify(Identity.generate().public, b"message", signature)
    for public, damaged in [
        (b"", signature),
        (bytes(31), signature),
        (b"\xff" * 32, signature),
        (me.public, b""),
    ]:
        assert not verify(public, b"message", damaged)


def test_the_private_key_is_not_shown(tmp_path: Path) -> None:
    me = Identity.load_or_create(tmp_path / "identity.pem")
    assert repr(me) == f"Identity({me.peer_id}, {me.name})"
