"""Owns the coordinator's keys and the file that keeps their one secret, `coordinator.key`.

Called by the server.  The public half of its CURVE key stands in every join URL, so losing the file makes every URL
that was handed out useless.  The CURVE key follows from an ed25519 key (protocol/signing.py), which signs states of
the run.  Must not know messages or runs.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.protocol.errors import UserError
from farflung.protocol.process import own_files
from farflung.protocol.process.sockets import curve_raw, curve_text

FILE_NAME = "coordinator.key"
_TEXT_BYTES = 40  # a 32-byte key in ZeroMQ's own base 85
_SEED = b"ed25519:"  # what follows is the secret of both keys
_REPLACE = "put back a copy of it, or move it away for a new key (and with it a new join URL)"


@dataclass(frozen=True)
class CurveKeys:
    """Both halves as ZeroMQ wants them; `public_raw` is what a join URL carries."""

    public: bytes
    secret: bytes = field(repr=False)

    @property
    def public_raw(self) -> bytes:
        return curve_raw(self.public)


@dataclass(frozen=True)
class CoordinatorKeys(CurveKeys):
    signing: Ed25519PrivateKey = field(repr=False, compare=False)

    def prove(self, statement: bytes) -> bytes:
        """The ed25519 key and its signature."""
        return self.signing.public_key().public_bytes_raw() + self.signing.sign(statement)


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
    secret = _SEED + curve_text(os.urandom(32))
    own_files.begun(path, secret + b"\n")


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
        text = os.read(descriptor, 1024).strip()
    finally:
        os.close(descriptor)
    try:
        if not text.startswith(_SEED) or len(text) != len(_SEED) + _TEXT_BYTES:
            raise ValueError
        seed = curve_raw(text.removeprefix(_SEED))
        secret = curve_text(_scalar_of(seed))
        return CoordinatorKeys(zmq.curve_public(secret), secret, Ed25519PrivateKey.from_private_bytes(seed))
    except (ValueError, KeyError, zmq.ZMQError):
        raise UserError(
            f"{path}: damaged, expected one line of {len(_SEED) + _TEXT_BYTES} characters; {_REPLACE}"
        ) from None


def _scalar_of(seed: bytes) -> bytes:
    """The secret number of an ed25519 key, which is that of the CURVE key too (RFC 8032, 5.1.5)."""
    raw = bytearray(hashlib.sha512(seed).digest()[:32])
    raw[0] &= 248
    raw[31] = raw[31] & 127 | 64
    return bytes(raw)
