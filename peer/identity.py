"""Owns the peer's ed25519 key: makes it once, keeps it private on disk, signs with it.

Called by the CLI and the agent.  Must not know the network; what others may derive from the public
half (id, name, checking a signature) is in protocol/signing.py.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from farflung.peer.settings import default_path
from farflung.protocol.errors import UserError
from farflung.protocol.process import own_files
from farflung.protocol.signing import name_of, peer_id_of

_MAX_KEY_FILE_BYTES = 16 * 1024
_REPLACE = "move it away and farflung makes a new key (with a new peer id)"


class Identity:
    """Who this peer is.  The private key never leaves this object except into its own file."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public: bytes = key.public_key().public_bytes_raw()
        self.peer_id: str = peer_id_of(self.public)
        self.name: str = name_of(self.public)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id}, {self.name})"

    def sign(self, message: bytes) -> bytes:
        """The 64-byte ed25519 signature of the message."""
        return self._key.sign(message)

    @classmethod
    def generate(cls) -> Identity:
        """A fresh identity that is kept nowhere."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path | None = None) -> Identity:
        """The identity in the file, which is made on first use; UserError if the file cannot be trusted."""
        path = path or default_path()
        try:
            if not os.path.lexists(path):
                _create(path)
            return cls(_load(path))
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UserError(f"{path}: cannot use this key file: {reason}") from error


def _create(path: Path) -> None:
    own_files.made_folder(path.parent)
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    own_files.begun(path, pem)  # of two starting peers one key wins


def _load(path: Path) -> Ed25519PrivateKey:
    # Non-blocking, because opening a pipe would otherwise wait for a writer for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: not a regular file; {_REPLACE}")
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise UserError(
                f"{path}: others may use this private key (mode {mode:04o}); "
                f"run: chmod 600 {shlex.quote(str(path))}"
            )
        pem = os.read(descriptor, _MAX_KEY_FILE_BYTES)
    finally:
        os.close(descriptor)
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise UserError(f"{path}: protected by a password, which farflung cannot use; {_REPLACE}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise UserError(f"{path}: damaged, or not a private key in PEM form; {_REPLACE}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path}: a key of another kind, expected ed25519; {_REPLACE}")
    return key
