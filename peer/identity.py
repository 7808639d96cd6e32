"""Owns the peer's ed25519 key: makes it once, keeps it private on disk, signs with it.

Called by the CLI and the agent.  Must not know the network; what others may derive from the public
half (id, name, checking a signature) is in protocol/signing.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from farflung.peer.settings import default_path
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process import own_files
from farflung.protocol.process.log_lines import LineWriter
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


# ---- in use ------------------------------------------------------------------------------------------------
# Two processes of one identity on one machine: the second one is told so at once, with the first one's pid.
#
# Taken before anything slow is loaded, by whoever speaks with a run's coordinator: `farflung join`, `farflung
# assist`, the agent of a script. A lock of the kernel's (flock) on a file beside the key, one for each run:
# it ends with its process, however that ends. In the file stands whose it is. One that is about to leave is
# waited for, so that a peer that was interrupted can join again at once.
#
# A folder that can't be written has no lock, and a second process is seen by the coordinator alone
# (`already-here`).

# A process that was interrupted a moment ago says so within it, and one whose parent was killed has noticed.
MOMENT_S = 0.2
LEAVING_S = 90.0  # more than any peer stays for the sums of a batch, and its trainer to save a model
_LOOK_S = 0.02
_WORDS_BYTES = 512
_LEAVING = "leaving"
# The disk says no to a file of ours; whoever keeps keys so knows why.
_NO_PLACE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSPC})


class LockHolder(NamedTuple):
    pid: int  # the process to stop: of a script's agent the script
    host: str
    leaving: bool

    @classmethod
    def parse(cls, text: str) -> LockHolder:
        """Nothing is known of one that has not written it yet."""
        pid, host, leaving, *_ = (*text.split(), "", "", "")
        return cls(int(pid) if pid.isdecimal() else 0, host, leaving == _LEAVING)


def patience_s(holder: LockHolder, host: str, lives: Callable[[int], bool]) -> float:
    """How long it is worth waiting for this one.  Pure but for `lives(pid)`, asked of this machine's alone."""
    dying = holder.pid > 0 and holder.host == host and not lives(holder.pid)
    return LEAVING_S if holder.leaving or dying else MOMENT_S


def refusal(holder: LockHolder, host: str) -> str:
    """In one line, with what to do."""
    who = "another process on this machine"
    if holder.pid:
        who += f" (pid {holder.pid})" if holder.host == host else ""
        who = who if holder.host == host else f"a process on {holder.host} (pid {holder.pid})"
    return f"{who} already uses this identity in this run; stop it or pass --identity other.pem"


def path_of(identity: Path | None, url: JoinUrl) -> Path:
    """Beside the key itself, wherever links lead to it; of one run."""
    key = (identity or default_path()).resolve()
    run = hash_bytes(b"farflung/in-use/1\0" + url.key + url.run.encode()).hex()[:16]
    return key.with_name(f".{key.name}.{run}.lock")


class InUse:
    """Held from `take` until the process ends, or `free` is called."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._whose = ""

    @classmethod
    def take(cls, path: Path, pid: int, say: LineWriter) -> InUse:
        """`pid`: the process that a person would stop.  UserError while another one holds it and does not leave."""
        descriptor = _opened(path)
        if descriptor is None:
            return cls(None)
        try:
            held = cls(descriptor) if _wait_for(descriptor, say) else cls(None)
        except UserError:
            os.close(descriptor)
            raise
        held._write(f"{pid} {socket.gethostname()}")
        return held

    def leave(self) -> None:
        """Whoever wants it next is to wait.  From a signal handler, too."""
        self._write(f"{self._whose} {_LEAVING}")

    def free(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _write(self, text: str) -> None:
        if self._descriptor is None:
            return
        self._whose = self._whose or text
        raw = f"{text}\n".encode()
        os.pwrite(self._descriptor, raw, 0)
        os.ftruncate(self._descriptor, len(raw))


def _opened(path: Path) -> int | None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno in _NO_PLACE:
            return None
        raise UserError(f"{path}: cannot use this file: {error.strerror}; is --identity right?") from error


def _wait_for(descriptor: int, say: LineWriter) -> bool:
    """False: this disk has no locks."""
    host, since, told = socket.gethostname(), time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in _NO_PLACE:
                return False
            raise
        holder = LockHolder.parse(os.pread(descriptor, _WORDS_BYTES, 0).decode("utf-8", "replace"))
        waited_s, worth_s = time.monotonic() - since, patience_s(holder, host, _lives)
        if waited_s >= worth_s:
            raise UserError(refusal(holder, host))
        if worth_s > MOMENT_S and waited_s > MOMENT_S and not told:
            told = True
            say(f"waiting for this peer's former process (pid {holder.pid}), which is leaving the run")
        time.sleep(_LOOK_S)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"
