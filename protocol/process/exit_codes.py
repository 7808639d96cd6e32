"""The exit codes of every farflung process, so that scripts and supervisors can tell what to do next.

Called by the command line, the agent and the built-in trainer.  Must not know how an error came about.
"""

from __future__ import annotations

from collections.abc import Callable

from farflung.protocol.errors import Deposed, FarflungError, Refused, StoreError, Unreachable, UserError

OK = 0
UNEXPECTED = 1  # a bug, or a process of farflung's own that died
USAGE = 2  # a mistake in a command, a file or a script
BLOCKED = 10  # farflung doctor found what would keep this machine out of the run
REFUSED = 20  # the coordinator said no
MISMATCH = 21  # this peer does not fit the run: another model, manifest or protocol
UNREACHABLE = 30
DEPOSED = 40  # a coordinator that may not lead any more; started again it stands by
TEMPORARY = 75  # the same command may work later
INTERRUPTED = 130  # Ctrl-C, as shells count it


def for_refusal(code: str) -> int:
    if code in ("finished", "left"):
        return OK
    if code in ("agent", "failed", "rank"):  # another process of this peer's is gone
        return UNEXPECTED
    if code == "address":
        return USAGE
    if code == "unreachable":
        return UNREACHABLE
    return MISMATCH if code in ("model", "misfit", "manifest", "protocol", "start") else REFUSED


def code_of(command: Callable[[], object], failed: Callable[[str], None]) -> int:
    """Of a command line that is carried out: `failed` is given what went wrong, in one line, for people."""
    try:
        command()
    except SystemExit as end:  # how the parser ends, also after a success
        return end.code if isinstance(end.code, int) else UNEXPECTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except FarflungError as error:
        failed(str(error))
        return code_for(error)
    return OK


def code_for(error: BaseException) -> int:
    if isinstance(error, Refused):
        return TEMPORARY if error.retry_after_s > 0 else for_refusal(error.code)
    if isinstance(error, Unreachable):
        return UNREACHABLE
    if isinstance(error, Deposed):
        return DEPOSED
    if isinstance(error, StoreError):
        return TEMPORARY
    return USAGE if isinstance(error, UserError) else UNEXPECTED
