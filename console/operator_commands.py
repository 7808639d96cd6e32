"""The command line of whoever runs a coordinator: invite, kick, ban, amend, pause, resume, drain, rewind.

Each command asks the coordinator that runs on this machine, over the socket in its data folder.  Must not know what the
coordinator makes of it: the words come from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from farflung.coordinator.operator_socket import ask
from farflung.protocol.errors import UserError
from farflung.protocol.messages import (
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
WHO_HELP = "A peer's name, its id, or the beginning of its id."
Who = Annotated[str, typer.Argument(help=WHO_HELP)]
NO_REASON = "no reason given"
Json = Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")]


@app.command(rich_help_panel="Steer a run")
def invite(
    context: typer.Context,
    place: Place,
    uses: Annotated[int, typer.Option(min=1, max=10_000, help="So many peers may come in with it.")] = 1,
    expires: Annotated[str, typer.Option(help="After so long: 90m, 24h, 7d.")] = "24h",
    note: Annotated[str, typer.Option(help="For whom; kept in the journal.")] = "",
    lists: Annotated[
        bool, typer.Option("--list", help="The invitations that there are, and guests.")
    ] = False,
    revoke: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH", help="Withdraw one: its id, the beginning of it, its note, or its join URL."
        ),
    ] = None,
    reason: Annotated[
        str, typer.Option(help="With --revoke: told to whoever comes with it, and kept in the journal.")
    ] = NO_REASON,
    guests: Annotated[
        bool, typer.Option("--guests", help="With --revoke: send away who came in by it, too.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Make an invitation, and print its join URL.

    Or list them, or withdraw one.
    """
    if lists:
        refuse_beside(context, "--list", "place", "json_output")
        _tell(_asked(place, Invites()), json_output)
    elif revoke is not None:
        refuse_beside(context, "--revoke", "place", "reason", "guests")
        typer.echo(_asked(place, Revoke(which=revoke, reason=reason, guests=guests)).text)
    else:
        refuse_without(context, "--revoke", "reason", "guests")
        reply = _asked(place, Invite(uses=uses, lasts_s=seconds(expires), note=note))
        if json_output:
            typer.echo(json.dumps(reply.found))
            return
        typer.echo(f"{reply.text}:", err=True)
        typer.echo(reply.found["url"])


@app.command(rich_help_panel="Steer a run")
def kick(
    place: Place,
    who: Who,
    reason: Annotated[str, typer.Option(help="Told to the peer and kept in the journal.")] = NO_REASON,
) -> None:
    """Disconnect a peer. It may come again."""
    typer.echo(_asked(place, Kick(who=who, reason=reason)).text)


@app.command(rich_help_panel="Steer a run")
def ban(
    context: typer.Context,
    place: Place,
    who: Annotated[str | None, typer.Argument(help=WHO_HELP)] = None,
    reason: Annotated[str, typer.Option(help="Told to the peer and kept in the journal.")] = NO_REASON,
    lasts: Annotated[str, typer.Option("--for", help="90m, 24h, 7d.")] = "365d",
    network: Annotated[bool, typer.Option("--network", help="Everybody else from its network, too.")] = False,
    lists: Annotated[bool, typer.Option("--list", help="Bans and strikes, with their reasons.")] = False,
    lift: Annotated[
        str | None, typer.Option(metavar="WHO", help="Let it in again, and forget its strikes.")
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="With --list: one JSON object, for scripts.")
    ] = False,
) -> None:
    """Disconnect a peer, and keep it out.

    Or list the bans, or lift one.
    """
    if lists:
        refuse_beside(context, "--list", "place", "json_output")
        _tell(_asked(place, Bans()), json_output)
    elif lift is not None:
        refuse_beside(context, "--lift", "place")
        typer.echo(_asked(place, Unban(who=lift)).text)
    elif who is None:
        raise UserError("ban: name the peer, or --list, or --lift and a peer")
    else:
        refuse_without(context, "--list", "json_output")
        order = Ban(who=who, reason=reason, lasts_s=seconds(lasts), network=network)
        typer.echo(_asked(place, order).text)


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
    from farflung.coordinator.run_files import read_manifest

    wanted = read_manifest(run_toml, changes or []).model_dump_json().encode()
    _tell(_asked(data if data is not None else run_toml, Amend(manifest=wanted, at=at)), json_output)


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


@app.command(rich_help_panel="Steer a run")
def rewind(
    place: Place,
    version: Annotated[
        int | None,
        typer.Argument(min=0, help="Undo the rounds after it, for instance spoiled ones."),
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Start again, where nothing is left of the run.")
    ] = False,
    reason: Why = "",
    yes: Yes = False,
) -> None:
    """Go on from an older version.

    Without VERSION from the newest that is here: for a run whose newest version is lost, without waiting for peers that
    are away.
    """
    if version is not None and from_scratch:
        raise UserError(f"rewind: --from-scratch has no place beside a version: {version}")
    order = GoBack(to=0 if from_scratch else None, reason=reason)
    _said_twice(place, order if version is None else Rewind(to=version, reason=reason), yes)


def _said_twice(place: Path, order: GoBack | Rewind, yes: bool) -> None:
    """First what is lost by it, then the order."""
    typer.echo(_asked(place, order).text)
    if not yes:
        typer.confirm("Do it?", abort=True)
    typer.echo(_asked(place, msgspec.structs.replace(order, sure=True)).text)


def refuse_beside(context: typer.Context, option: str, *those: str) -> None:
    """UserError where something was said that has no place beside this option.  `those`: parameters that have."""
    _refuse(context, lambda name: name not in those, option, "has no place beside")


def refuse_without(context: typer.Context, option: str, *those: str) -> None:
    """UserError where one of these parameters was said, and the option that they belong to was not."""
    _refuse(context, lambda name: name in those, option, "goes only with")


def _refuse(context: typer.Context, is_wrong: Callable[[str], bool], option: str, why: str) -> None:
    for each in context.command.params:
        name = each.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and option not in each.opts and is_wrong(name):
            what = each.opts[0] if each.opts[0].startswith("-") else context.params[name]
            raise UserError(f"{context.info_name}: {what} {why} {option}")


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


def _tell(reply: Reply, json_output: bool) -> None:
    typer.echo(json.dumps(reply.found) if json_output else reply.text)


def _asked(place: Path, order: Order) -> Reply:
    reply = ask(folder_of(place), order)
    if not reply.ok:
        raise UserError(reply.text)
    return reply
