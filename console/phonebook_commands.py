"""`farflung phonebook`: a node of a phone book, or a run looked up in one.

Called by the command line.  Both are processes of their own: neither a peer nor a coordinator ever loads what a book
needs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import threading
import time
from typing import Annotated

import typer

from farflung.console.operator_commands import refuse_beside, refuse_without
from farflung.protocol.errors import Unreachable, UserError
from farflung.protocol.join_url import Address, JoinUrl

app = typer.Typer()
BOOK_HELP = "A phone book: /ip4/.../p2p/..., as `farflung phonebook` prints it; may be said several times."
Books = Annotated[list[str] | None, typer.Option("--book", envvar="FARFLUNG_BOOK", help=BOOK_HELP)]


@app.command(rich_help_panel="Host a run")
def phonebook(
    context: typer.Context,
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = "0.0.0.0:29810",
    node: Annotated[
        list[str] | None,
        typer.Option(
            help="Another node of the same book, to begin at: /ip4/.../p2p/...; none for the first one."
        ),
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Look a run up instead, and print the join URL that leads to it now: by its name, its key (k= in its "
            "join URL), or a join URL that leads nowhere now.",
        ),
    ] = None,
    book: Books = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="With --find: one JSON object, for scripts.")
    ] = False,
) -> None:
    """Run a node of a phone book, or look a run up.

    For runs that their hosts announce. Ctrl-C ends it.
    """
    if find is None:
        refuse_without(context, "--find", "book", "json_output")
        _run_node(listen, node or [])
    else:
        refuse_beside(context, "--find", "book", "json_output")
        _find(find, book or [], json_output)


def _run_node(listen: str, nodes: list[str]) -> None:
    from farflung.console.phonebook.book import place_of
    from farflung.console.phonebook.hivemind_book import HivemindBook

    begin = tuple(map(place_of, nodes))
    ends = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.set())
    with contextlib.closing(HivemindBook(begin, Address.parse(listen, "--listen", 0))) as book:
        for place in book.places:
            typer.echo(place)
        typer.echo("this node is up; announce a run with:  farflung coordinate --announce PLACE", err=True)
        while not ends.wait(3600.0):
            pass


def _find(what: str, books: list[str], json_output: bool) -> None:
    from farflung.console.phonebook.book import place_of, wanted
    from farflung.console.phonebook.books import look_up

    if not books:
        raise UserError(
            "name a phone book with --book, or in FARFLUNG_BOOK; whoever hosts the run knows which"
        )
    asked = wanted(what)
    found = look_up(asked, [place_of(each) for each in books], time.time)
    for problem in found.problems:
        typer.echo(f"phone book {problem}", err=True)
    urls: list[JoinUrl] = [each.url(asked.token) for each in found.runs]
    if json_output:
        records = [base64.b64encode(each.raw).decode() for each in found.runs]
        told = {"runs": [str(url) for url in urls], "records": records, "problems": found.problems}
        typer.echo(json.dumps(told))
    elif not urls:
        raise Unreachable(f"no phone book has a record of {what.partition('?')[0]} that holds now")
    else:
        for url in urls:
            typer.echo(str(url))
        if asked.name and not asked.key and len(urls) > 1:
            typer.echo("several runs have that name: which is the one you mean shows k= alone", err=True)
