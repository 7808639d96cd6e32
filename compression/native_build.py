"""Turns kernels.c, or another file of C, into a shared library, once, in a folder that only its user can write to.

Owns: the choice of compiler, the flags, the cache folder and its checks.  Every way to fail has a reason in words.
Called by: native.py, and by the lab of the benchmarks for its router.  Must not know: tensors, codecs, whether the
library is used.

The library's name is a hash of all that its bytes depend on: source, flags, compiler and processor, because code for
one processor may not run on another, and a home folder may be shared by both.  It is written beside its place and
renamed, so any number of processes may build at the same time: each finds a whole library or none.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

SWITCH = "FARFLUNG_NATIVE"  # set to 0, nothing compiled is used
SOURCE = Path(__file__).with_name("kernels.c")
# The second line keeps every bit: no fused operations and no other order.  The third only allows that errno and the
# processor's exception flags are not kept, which nobody reads.
FLAGS = (
    *("-std=c11", "-O3", "-march=native", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-fast-math"),
    *("-fno-math-errno", "-fno-trapping-math"),
)
COMPILE_LIMIT_S, VERSION_LIMIT_S = 60.0, 10.0
_CPUINFO = Path("/proc/cpuinfo")
_CPU_FIELDS = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features", "isa")


class NoLibrary(Exception):
    """There is no compiled library, and this is why."""


def library(environ: Mapping[str, str], source: Path | None = None) -> Path:
    """The library for this machine, compiled now if no earlier run has done it.  Raises NoLibrary."""
    source = source or SOURCE
    compiler = _compiler(environ)
    folder = cache_folder(environ)
    identity = [_text(source), *FLAGS, *compiler, _version(compiler), _processor()]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:24]
    place = folder / f"{source.stem}-{key}.so"
    if not place.exists():
        _compile(compiler, source, place)
    refuse_unless_ours(place)
    return place


def _text(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except OSError as error:
        raise NoLibrary(f"cannot read {source}: {error.strerror}") from error


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Made if it is not there.  A user who can write to it, or put another in its place, could run code as this one."""
    if not hasattr(os, "getuid"):
        raise NoLibrary("compiled codecs are for POSIX systems only")
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", ""), ".cache")
    if not os.path.isabs(home):
        raise NoLibrary("neither XDG_CACHE_HOME nor HOME names an absolute folder for the compiled codecs")
    folder = Path(home) / "farflung" / "kernels"
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NoLibrary(f"cannot make the folder {folder}: {error.strerror}") from error
    refuse_unless_ours(folder)
    for parent in folder.resolve().parents:
        _refuse_open_parent(parent)
    return folder


def refuse_unless_ours(path: Path) -> None:
    """Raises NoLibrary unless `path` is this user's own and nobody else can write to it."""
    try:
        found = path.lstat()
    except OSError as error:
        raise NoLibrary(f"cannot look at {path}: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode):
        raise NoLibrary(f"{path} is a link; remove it")
    if found.st_uid != os.getuid():
        raise NoLibrary(f"{path} belongs to another user (uid {found.st_uid}); remove it")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NoLibrary(f"others may write to {path}; remove it, or run: chmod go-w {shlex.quote(str(path))}")


def _refuse_open_parent(parent: Path) -> None:
    found = parent.stat()
    if found.st_uid not in (0, os.getuid()):
        raise NoLibrary(f"{parent} belongs to another user (uid {found.st_uid}), who could replace the cache")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise NoLibrary(f"everybody may write to {parent} and could replace the cache")


def _compiler(environ: Mapping[str, str]) -> list[str]:
    try:
        wished = shlex.split(environ.get("CC", ""))
    except ValueError as error:
        raise NoLibrary(f"CC={environ['CC']} is not a command: {error}") from error
    for words in (wished, ["cc"], ["gcc"], ["clang"]):
        found = shutil.which(words[0], path=environ.get("PATH")) if words else None
        if found:
            return [found, *words[1:]]
    raise NoLibrary("no C compiler found (CC, cc, gcc, clang); install gcc or clang for faster codecs")


def _version(compiler: list[str]) -> str:
    return _output([*compiler, "--version"], VERSION_LIMIT_S)


def _compile(compiler: list[str], source: Path, place: Path) -> None:
    try:
        handle, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=place.parent)
    except OSError as error:
        raise NoLibrary(f"cannot write to {place.parent}: {error.strerror}") from error
    os.close(handle)
    unfinished = Path(name)
    try:
        _output([*compiler, *FLAGS, "-o", name, str(source), "-lm"], COMPILE_LIMIT_S)
        unfinished.chmod(0o700)  # a compiler makes it as the umask says
        unfinished.replace(place)
    except OSError as error:
        raise NoLibrary(f"cannot write {place}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _output(command: list[str], limit_s: float) -> str:
    """What a compiler says on stdout.  Raises NoLibrary where it fails or takes longer than it may."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except OSError as error:
        raise NoLibrary(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise NoLibrary(f"{command[0]} took longer than {limit_s:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoLibrary(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[0])}")
    return done.stdout


def _processor() -> str:
    """Its model and what it can do; where the system does not tell, the machine's name stands in for both."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "\n".join((platform.machine(), platform.processor(), platform.node()))
    first_core = text.partition("\n\n")[0].splitlines()
    told = [line for line in first_core if line.partition(":")[0].strip() in _CPU_FIELDS]
    return "\n".join((platform.machine(), *told))
