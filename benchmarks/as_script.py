"""A benchmark with options as a script: the fields of a dataclass, and a mistake in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import typer

from farflung.console.bench_command import with_options
from farflung.protocol.process import exit_codes


def called(command: Callable[..., None], options: type, words: Sequence[str] | None = None) -> int:
    """The exit code.  `words`: of the command line, without the script's name."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    with_options(command, options)
    app.command()(command)
    given = list(words) if words is not None else None
    return exit_codes.code_of(
        lambda: app(args=given), lambda why: print(f"{command.__name__}: {why}", file=sys.stderr)
    )
