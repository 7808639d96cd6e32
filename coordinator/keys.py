"""Owns the coordinator's CURVE key pair and the file that keeps it, `coordinator.key`.

Called by the server.  The public half stands in every join URL, so losing the file makes every URL that was
handed out useless.  Must not know messages or runs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from zmq.utils import z85

from farflung.collectives.digests import hash_bytes
from farflung.collectives.errors import UserError

FILE_NAME = "coordinator.key"
_TEXT_BYTES = 40  # a 32-byte key in ZeroMQ's own base 85
_REPLACE = "put back a copy of it, or move it away for a new key (and with it a new join URL)"


@dataclass(frozen=True)
class CoordinatorKeys:
    """Both halves as ZeroMQ wants them; `public_raw` is what a join URL carries."""

    public: bytes
    secret: bytes = field(repr=False)

    @property
    def signer(self) -> Ed25519PrivateKey:
        """A signing key that follows from the secret one: no second file to lose."""
        return Ed25519PrivateKey.from_private_bytes(
            hash_bytes(b"farflung/coordinator/sign/1\0", raw_of(self.secret))
        )

    @property
    def public_raw(self) -> bytes:
        return raw_of(self.public)


def raw_of(text: bytes) -> bytes:
    """The 32 bytes of a key in base 85."""
    return bytes(z85.decode(text))


def text_of(raw: bytes) -> bytes:
    return bytes(z85.encode(raw))


def load_or_create(folder: Path) -> CoordinatorKeys:
    """The key in the folder, made on first use; UserError if its file cannot be trusted."""
    path = folder / FILE_NAME
    try:
        if not os.path.lexists(path):
            _create(path)
        return _load(path)
    except OSError as error:
        raise UserError(f"{path}: cannot use this key file: {error.strerror}") from error


def _create(path: Path) -> None:
    """Written aside, then linked: a crash in between leaves no half key behind."""
    _, secret = zmq.curve_keypair()
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink()


def _load(path: Path) -> CoordinatorKeys:
    # Non-blocking, because opening a pipe would otherwise wait for a writer for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise UserError(f"{path}: not a regular file; {_REPLACE}")
        if mode & 0o077:
            raise UserError(
                f"{path}: others may read this private key (mode {stat.S_IMODE(mode):04o}); "
                f"run: chmod 600 {shlex.quote(str(path))}"
            )
        secret = os.read(descriptor, 1024).strip()
    finally:
        os.close(descriptor)
    try:
        if len(secret) != _TEXT_BYTES:
            raise ValueError
        return CoordinatorKeys(zmq.curve_public(secret), secret)
    except (ValueError, zmq.ZMQError):
        raise UserError(
            f"{path}: damaged, expected one line of {_TEXT_BYTES} characters; {_REPLACE}"
        ) from None
