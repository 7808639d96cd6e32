"""The command line of whoever runs a coordinator: invite, invites, revoke, kick, ban, unban, bans, amend, pause,
resume, drain, go-back, rewind.

Each command asks the coordinator that runs on this machine, over the socket in its data folder.  Must not know what the
coordinator makes of it: the words come from there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from farflung.coordinator.operator_socket import ask
from farflung.protocol.errors import UserError
from farflung.protocol.orders import (
    Amend,
    Ban,
    Bans,
    Drain,
    GoBack,
    Invite,
    Invites,
    Kick,
    Order,
    Pause,
    Reply,
    Resume,
    Revoke,
    Rewind,
    Unban,
)

app = typer.Typer(no_args_is_help=True)

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Place = Annotated[
    Path, typer.Argument(help="The run.toml that the coordinator was started with, or its data folder.")
]
Who = Annotated[str, typer.Argument(help="A peer's name, its id, or the beginning of its id.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")]


@app.command(rich_help_panel="Steer a run")
def invite(
    place: Place,
    uses: Annotated[int, typer.Option(min=1, max=10_000, help="So many peers may come in with it.")] = 1,
    expires: Annotated[str, typer.Option(help="After so long: 90m, 24h, 7d.")] = "24h",
    note: Annotated[str, typer.Option(help="For whom; kept in the journal.")] = "",
    json_output: Json = False,
) -> None:
    """Make an invitation, and print its join URL."""
    reply = _asked(place, Invite(uses=uses, lasts_s=seconds(expires), note=note))
    if json_output:
        typer.echo(json.dumps(reply.found))
        return
    typer.echo(f"{reply.text}:", err=True)
    typer.echo(reply.found["url"])


@app.command(rich_help_panel="Steer a run")
def invites(place: Place, json_output: Json = False) -> None:
    """List the invitations and their guests."""
    reply = _asked(place, Invites())
    typer.echo(json.dumps(reply.found) if json_output else reply.text)


@app.command(rich_help_panel="Steer a run")
def revoke(
    place: Place,
    which: Annotated[
        str,
        typer.Argument(help="Its id, the beginning of it, its note, or the join URL that has it."),
    ],
    reason: Annotated[
        str, typer.Option(help="Told to whoever comes with it, and kept in the journal.")
    ] = "no reason given",
    guests: Annotated[bool, typer.Option(help="Send away who came in by it, too.")] = False,
) -> None:
    """Withdraw an invitation."""
    typer.echo(_asked(place, Revoke(which=which, reason=reason, guests=guests)).text)


@app.command(rich_help_panel="Steer a run")
def kick(
    place: Place,
    who: Who,
    reason: Annotated[
        str, typer.Option(help="Told to the peer and kept in the journal.")
    ] = "no reason given",
) -> None:
    """Disconnect a peer. It may come again."""
    typer.echo(_asked(place, Kick(who=who, reason=reason)).text)


@app.command(rich_help_panel="Steer a run")
def ban(
    place: Place,
    who: Who,
    reason: Annotated[
        str, typer.Option(help="Told to the peer and kept in the journal.")
    ] = "no reason given",
    lasts: Annotated[str, typer.Option("--for", help="90m, 24h, 7d.")] = "365d",
    network: Annotated[bool, typer.Option(help="Everybody else from its network, too.")] = False,
) -> None:
    """Disconnect a peer, and keep it out."""
    order = Ban(who=who, reason=reason, lasts_s=seconds(lasts), network=network)
    typer.echo(_asked(place, order).text)


@app.command(rich_help_panel="Steer a run")
def unban(place: Place, who: Who) -> None:
    """Lift a ban, and clear the peer's strikes."""
    typer.echo(_asked(place, Unban(who=who)).text)


@app.command(rich_help_panel="Steer a run")
def bans(place: Place, json_output: Json = False) -> None:
    """List bans and strikes, with their reasons."""
    reply = _asked(place, Bans())
    typer.echo(json.dumps(reply.found) if json_output else reply.text)


@app.command(rich_help_panel="Steer a run")
def amend(
    run_toml: Annotated[Path, typer.Argument(help="The run.toml of the run, with what is to be otherwise.")],
    data: Annotated[
        Path | None, typer.Option(help="The coordinator's data folder, if it is elsewhere.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="SECTION.KEY=VALUE in place of what the file says.")
    ] = None,
    at: Annotated[
        int | None, typer.Option(min=0, help="In rounds from this version on \\[from the next one].")
    ] = None,
    json_output: Json = False,
) -> None:
    """Change settings while the run goes on.

    Rounds, deadlines, limits, the codec, periods, rates, admission.
    """
    from farflung.protocol.process.run_file import read_manifest

    wanted = read_manifest(run_toml, changes or []).model_dump_json().encode()
    reply = _asked(data if data is not None else run_toml, Amend(manifest=wanted, at=at))
    typer.echo(json.dumps(reply.found) if json_output else reply.text)


@app.command(rich_help_panel="Steer a run")
def pause(place: Place, reason: Annotated[str, typer.Option(help="Told to the peers.")] = "") -> None:
    """Open no more rounds until `farflung resume`.

    Peers go on training alone, and lose nothing.
    """
    typer.echo(_asked(place, Pause(reason=reason)).text)


@app.command(rich_help_panel="Steer a run")
def resume(place: Place) -> None:
    """Resume a paused run."""
    typer.echo(_asked(place, Resume()).text)


@app.command(rich_help_panel="Steer a run")
def drain(place: Place) -> None:
    """End the coordinator between rounds.

    For an upgrade: peers go on training, and reconnect.
    """
    typer.echo(_asked(place, Drain()).text)


Why = Annotated[str, typer.Option("--reason", help="Told to the peers and kept in the journal.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask again: for scripts.")]


@app.command("go-back", rich_help_panel="Steer a run")
def go_back(
    place: Place,
    to: Annotated[
        int | None,
        typer.Option(min=0, help="0: restart from scratch, where nothing is left of the run."),
    ] = None,
    reason: Why = "",
    yes: Yes = False,
) -> None:
    """Go on from the newest version that is here.

    For a run whose newest version is lost, without waiting for peers that are away.
    """
    _said_twice(place, GoBack(to=to, reason=reason), yes)


@app.command(rich_help_panel="Steer a run")
def rewind(
    place: Place,
    version: Annotated[int, typer.Argument(min=0, help="The rounds after it are undone for good.")],
    reason: Why = "",
    yes: Yes = False,
) -> None:
    """Undo rounds, for instance spoiled ones.

    The run goes on from an older version that is here.
    """
    _said_twice(place, Rewind(to=version, reason=reason), yes)


def _said_twice(place: Path, order: GoBack | Rewind, yes: bool) -> None:
    """First what is lost by it, then the order."""
    typer.echo(_asked(place, order).text)
    if not yes:
        typer.confirm("Do it?", abort=True)
    typer.echo(_asked(place, msgspec.structs.replace(order, sure=True)).text)


def seconds(text: str) -> float:
    """Of 90m, 24h, 7d."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhd])", text.strip())
    if found is None or float(found[1]) <= 0:
        raise UserError(f"{text!r} is no time: write a number and s, m, h or d, such as 24h or 7d")
    return float(found[1]) * _UNITS_S[found[2]]


def folder_of(place: Path) -> Path:
    """Where `farflung coordinate` keeps what belongs to this run."""
    folder = place if place.is_dir() else place.parent / f"{place.stem}.data"
    if not folder.is_dir():
        raise UserError(
            f"{place}: there is no data folder {folder}; name the one of farflung coordinate --data"
        )
    return folder


def _asked(place: Path, order: Order) -> Reply:
    reply = ask(folder_of(place), order)
    if not reply.ok:
        raise UserError(reply.text)
    return reply
