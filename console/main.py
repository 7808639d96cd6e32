"""The command line: parses words, calls one function, turns errors into one line and an exit code.

Results go to stdout, everything else to stderr.  Heavy imports (torch) happen inside the commands that need
them, so that `farflung status` and `--help` answer at once.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farflung import __version__
from farflung.console.bench_command import app as bench_app
from farflung.console.checkpoint_commands import app as checkpoint_app
from farflung.console.checkpoint_commands import start_of
from farflung.console.data_commands import app as data_app
from farflung.console.generate_command import app as generate_app
from farflung.console.operator_commands import app as operator_app
from farflung.console.operator_commands import refuse_beside, refuse_without
from farflung.console.phonebook_commands import BOOK_HELP
from farflung.console.phonebook_commands import app as phonebook_app
from farflung.console.publish_command import app as publish_app
from farflung.console.simulate_command import app as simulate_app
from farflung.peer.settings import (
    METRICS_HELP,
    SETTINGS,
    OwnConfig,
    Setting,
    default_path,
    own_config,
    place_of,
)
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.process import exit_codes, log_lines

if TYPE_CHECKING:
    from farflung.console.history.trackers import Chosen
    from farflung.coordinator.hosting import Hosting
    from farflung.peer.line.reachability import RelayHere

app = typer.Typer(
    name="farflung",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench", rich_help_panel="Try")
app.add_typer(checkpoint_app, name="checkpoint", rich_help_panel="Afterwards")
app.add_typer(data_app, name="data", rich_help_panel="Host a run")
app.add_typer(operator_app)
app.add_typer(publish_app)
app.add_typer(generate_app)
app.add_typer(simulate_app)
app.add_typer(phonebook_app)

Given = Mapping[str, object]  # by the names of the settings; None or False where nothing was said
Url = Annotated[
    str, typer.Argument(help="The join URL that `farflung coordinate` printed (put it in quotes).")
]
STATUS_TIMEOUT_S = 5.0
STARTS = "the coordinator of {} starts; the join URL comes when peers can use it"
RANKS_MOST = 64  # of one machine
OF_TRAINERS = ("data", "start")  # settings that mean nothing to who only helps
PLAIN_HELP = "Plain log lines instead of the dashboard; the default without a terminal."
VERBOSE_HELP = "Tell what happens in every round, too."
LOG_JSON_HELP = "Each line of the log as one JSON object."
GATEWAYS_HELP = "Processes that hold members' connections: for runs of thousands of peers."
STORE_HELP = (
    "etcd://H1,H2,H3\\[/PREFIX] keeps the records; a second coordinator there stands by \\[the data folder]."
)
WEB_HELP = "HOST:PORT, or a port of this machine alone: a page of the run for everybody."
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="In place of run.toml's, such as round.sync_every=50."),
]
Public = Annotated[
    list[str] | None,
    typer.Option(help="HOST or HOST:PORT that peers dial; up to four times, IPv6 in \\[brackets]."),
]
Announced = Annotated[list[str] | None, typer.Option("--announce", help=BOOK_HELP)]
Board = Annotated[
    Path | None, typer.Option("--tensorboard", help="Write a TensorBoard log into this folder.")
]
Wandb = Annotated[str | None, typer.Option("--wandb", help="Log to this project of Weights & Biases.")]
Mlflow = Annotated[
    str | None,
    typer.Option("--mlflow", help="Log to MLflow: a folder, or the address of a server or database."),
]


def with_settings(command: Callable[..., None], but: Sequence[str] = ()) -> Callable[..., None]:
    """An option for each of the volunteer's settings (peer/settings.py) takes the place of the parameter `given`.
    `but`: without these."""
    options = {
        setting.name: _option(setting)
        for setting in SETTINGS.values()
        if setting.help and setting.name not in but
    }

    @wraps(command)
    def with_options(**words: Any) -> None:
        command(given={name: words.pop(name) for name in options}, **words)

    found: list[inspect.Parameter] = []
    for name, one in inspect.signature(command, eval_str=True).parameters.items():
        found += options.values() if name == "given" else [one]
    # The parser looks at both.
    with_options.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in found}
    return with_options


def _option(setting: Setting) -> inspect.Parameter:
    is_flag = setting.kind is bool  # without its opposite, --no-...
    kind: Any = setting.kind if setting.kind in (bool, Path | None) else str | None
    names = ["--" + setting.name.replace("_", "-")] if is_flag else []
    # A bracket would be taken for markup.
    annotation = Annotated[kind, typer.Option(*names, help=setting.help.replace("[", r"\["))]
    how, default = inspect.Parameter.POSITIONAL_OR_KEYWORD, False if is_flag else None
    return inspect.Parameter(setting.name, how, default=default, annotation=annotation)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"farflung {__version__} (protocol {PROTOCOL_VERSION})")
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Many people, each with one GPU box and an ordinary internet link, train one model together."""


@app.command(rich_help_panel="Host a run")
def init(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="Where to write the file; `-`: print it.")] = Path("run.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    every_key: Annotated[bool, typer.Option("--all", help="Write every key, with what it is for.")] = False,
    start: Annotated[
        str | None,
        typer.Option(help="The run begins with this: a checkpoint, a folder of them, a .safetensors file."),
    ] = None,
    run: Annotated[str, typer.Option(help="With --start: of the run whose id begins with this.")] = "",
) -> None:
    """Write run.toml, the description of a run."""
    from farflung.console.run_toml import description

    is_printed = str(path) == "-"
    if path.exists() and not force and not is_printed:
        raise UserError(f"{path} exists; choose another name, or add --force to overwrite it")
    if start is None:
        refuse_without(context, "--start", "run")
        text = description(every_key)
    else:
        from farflung.protocol.manifest import Manifest

        text = description(every_key, start_of(start, run))
        Manifest.from_toml(text, str(path))  # a path may have letters that no run.toml takes
    if is_printed:
        typer.echo(text, nl=False)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror}") from error
    typer.echo(f"wrote {path}; next: farflung coordinate {path}")


@app.command(rich_help_panel="Host a run")
def coordinate(
    run_toml: Annotated[Path, typer.Argument(help="The run's description; `farflung init` writes one.")],
    data: Annotated[
        Path | None, typer.Option(help="Where the journal and the key live \\[run.toml's folder].")
    ] = None,
    listen: Annotated[
        str,
        typer.Option(help="HOST:PORT[:MEMBER_PORT] to listen on; a port of 0, or none, takes any free one."),
    ] = "0.0.0.0:29800",
    public: Public = None,
    json_output: Annotated[bool, typer.Option("--json", help='Print {"url": ...} as one JSON line.')] = False,
    exit_when_done: Annotated[
        bool, typer.Option("--exit-when-done", help="End when the run is complete and everybody left.")
    ] = False,
    metrics: Annotated[str | None, typer.Option(help=METRICS_HELP, envvar="FARFLUNG_METRICS")] = None,
    web: Annotated[str | None, typer.Option(help=WEB_HELP)] = None,
    announced: Announced = None,
    tensorboard: Board = None,
    wandb: Wandb = None,
    mlflow: Mlflow = None,
    changes: Changes = None,
    restored: Annotated[
        bool,
        typer.Option(
            "--restored", help="The data folder is a copy, or in the place of one, and no other is in use."
        ),
    ] = False,
    store: Annotated[str | None, typer.Option(help=STORE_HELP, envvar="FARFLUNG_STORE")] = None,
    gateways: Annotated[int, typer.Option(min=0, max=16, help=GATEWAYS_HELP)] = 0,
    plain: Annotated[bool, typer.Option("--plain", help=PLAIN_HELP)] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help=VERBOSE_HELP)] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help=LOG_JSON_HELP)] = False,
) -> None:
    """Host a run: start its coordinator."""
    from farflung.console.screen import embedded

    log_lines.choose(verbose, log_json)
    if embedded.wanted(plain or json_output or log_json):
        raise typer.Exit(embedded.run_with_screen(sys.argv[1:], None))
    _say_first(run_toml, changes or [], json_output)
    from farflung.console.history.trackers import Chosen
    from farflung.coordinator.hosting import Hosting

    log_lines.set_up_logging()

    def tell(url: str) -> None:
        told = f'peers join with:  farflung join "{url}"'
        line = log_lines.json_line(log_lines.COORDINATOR, "info", told) if log_json else told
        if not json_output:
            print(line, file=sys.stderr)
        print(json.dumps({"url": url}) if json_output else url, flush=True)

    folder = data if data is not None else run_toml.parent / f"{run_toml.stem}.data"
    how = (exit_when_done, metrics, restored, tuple(changes or ()), store, gateways)
    hosting = Hosting(run_toml, folder, listen, tuple(public or ()), *how)
    chosen = Chosen(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow)
    _host(hosting, chosen, web, announced or [], tell)


def _say_first(run_toml: Path, changes: list[str], quiet: bool) -> None:
    """UserError for a mistake in the file: that is then all that is said."""
    from farflung.console.run_toml import doubts
    from farflung.coordinator.run_files import read_manifest

    odd = doubts(read_manifest(run_toml, changes))
    for line in () if quiet else (STARTS.format(run_toml), *(f"{run_toml}: {each}" for each in odd)):
        log_lines.Teller.from_environment(log_lines.COORDINATOR)(line)


def _host(
    hosting: Hosting, chosen: Chosen, web: str | None, books: list[str], tell: Callable[[str], None]
) -> None:
    """A coordinator, and what goes on beside it in processes of their own: a page, trackers, phone books."""
    from farflung.console.history.live_tracker import Tracking
    from farflung.console.phonebook.announcer import Announcer
    from farflung.console.web.page_keeper import PageKeeper
    from farflung.coordinator.hosting import OpenedRun, serve

    with contextlib.ExitStack() as stack:
        page = stack.enter_context(PageKeeper(web)) if web is not None else None
        tracking = stack.enter_context(Tracking(chosen, "the run"))
        announcer = stack.enter_context(Announcer(books)) if books else None

        def opened(found: OpenedRun) -> None:
            if announcer is not None:
                announcer.begin(found.url, found.incarnation, found.prove)

        def announce(url: str) -> None:
            tell(url)
            if page is not None:
                page.show(JoinUrl.parse(url), hosting.listens_on)
            tracking.of_run(hosting.data_dir)

        serve(hosting, announce, opened)


@app.command(rich_help_panel="Take part")
@with_settings
def join(
    url: Url,
    given: Given,
    script_arguments: Annotated[list[str] | None, typer.Argument(help="Passed on to --script.")] = None,
    script: Annotated[
        Path | None, typer.Option(help="Your own training script instead of the built-in one.")
    ] = None,
    nproc: Annotated[
        int,
        typer.Option(
            min=1, max=RANKS_MOST, help="With --script: so many processes of it, as torchrun starts them."
        ),
    ] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the final model here (built-in trainer).")] = None,
    tensorboard: Board = None,
    wandb: Wandb = None,
    mlflow: Mlflow = None,
    plain: Annotated[bool, typer.Option("--plain", help=PLAIN_HELP)] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help=VERBOSE_HELP)] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help=LOG_JSON_HELP)] = False,
) -> None:
    """Train in a run until it ends. Ctrl-C leaves.

    Arguments of your own script come last, after --.
    """
    from farflung.console.screen import embedded

    log_lines.choose(verbose, log_json)
    if embedded.wanted(plain or log_json):
        raise typer.Exit(embedded.run_with_screen(sys.argv[1:], JoinUrl.parse(url)))
    parsed, own = JoinUrl.parse(url), own_config(given)
    from farflung.console.history.live_tracker import Tracking
    from farflung.console.history.trackers import Chosen
    from farflung.peer.agent.join import JoinOptions
    from farflung.peer.agent.join import join as take_part
    from farflung.protocol.process.journal import journal_path

    options = JoinOptions(
        parsed, own, script, tuple(script_arguments or ()), out, nproc, relay=partial(_offered_relay, own)
    )
    with Tracking(Chosen(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow), "training") as tracking:
        tracking.of_this_process(journal_path(None, own.identity or default_path())[0])
        code = take_part(options)
    raise typer.Exit(code)


@app.command(rich_help_panel="Take part")
@partial(with_settings, but=OF_TRAINERS)
def assist(
    url: Url,
    given: Given,
    plain: Annotated[bool, typer.Option("--plain", help=PLAIN_HELP)] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help=VERBOSE_HELP)] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help=LOG_JSON_HELP)] = False,
) -> None:
    """Help a run without a GPU.

    Sums contributions, serves state to joiners, keeps checkpoints. Ctrl-C leaves.
    """
    from farflung.console.screen import embedded

    log_lines.choose(verbose, log_json)
    parsed = JoinUrl.parse(url)
    if embedded.wanted(plain or log_json):
        raise typer.Exit(embedded.run_with_screen(sys.argv[1:], parsed))
    from farflung.peer.agent.join import JoinOptions
    from farflung.peer.agent.join import join as take_part

    own = own_config(given)
    raise typer.Exit(take_part(JoinOptions(parsed, own, helps=True, relay=partial(_offered_relay, own))))


def _offered_relay(own: OwnConfig, say: log_lines.LineWriter) -> RelayHere | None:
    """What a relay needs takes a second to load."""
    if not own.relay:
        return None
    from farflung.coordinator.modes import registry

    if registry.found("reach") is None:
        raise UserError("--relay: this installation has no reach; go on without --relay")
    from farflung.console.offered_relay import offered_relay

    return offered_relay(own, say)


@app.command(rich_help_panel="Watch")
def status(
    context: typer.Context,
    url: Annotated[str | None, typer.Argument(help="The join URL (put it in quotes).")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="The dashboard, live: `?` shows its keys.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Draw the dashboard into this file, as a picture.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Of a finished run, from the event journals below this folder.")
    ] = None,
    at: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds into the replay \\[its end; with --watch, its beginning]."),
    ] = None,
) -> None:
    """Show the state of a run, once or live.

    Of a finished one: its dashboard at any moment, or played. With --watch in a pipe: a line now and then.
    """
    if (url is None) == (replay is None):
        raise UserError("name the join URL of a run, or --replay with a folder of event journals")
    if replay is None:
        refuse_without(context, "--replay", "at")
    for option, is_said in (("--watch", watch), ("--svg", svg is not None)):
        if is_said:
            refuse_beside(context, option, "url", "replay", "at")
    if watch or svg is not None or replay is not None:
        from farflung.console.inspect_commands import LookOptions, look

        parsed = JoinUrl.parse(url) if url is not None else None
        look(LookOptions(parsed, replay, at, watch, svg, json_output))
        return
    from farflung.console.screen.health import plain_text
    from farflung.console.screen.status_client import StatusClient

    with StatusClient(JoinUrl.parse(url or "")) as client:
        found = client.fetch(STATUS_TIMEOUT_S)
    typer.echo(
        json.dumps(found) if json_output else plain_text(found, shutil.get_terminal_size((100, 24)).columns)
    )


@app.command(rich_help_panel="Afterwards")
def export(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Where event journals lie: run.data/, and those of peers.")],
    tensorboard: Board = None,
    wandb: Wandb = None,
    mlflow: Mlflow = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON object for each round.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with the rounds to come, until the run is complete.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw loss, participation, bytes and a waterfall of rounds: .svg or .png."),
    ] = None,
) -> None:
    """Send a run's figures to a tracker, or draw them.

    A row for each round, live or long after the run; or all of it as one picture.
    """
    from farflung.console.history.trackers import Chosen, ExportOptions
    from farflung.console.history.trackers import export as hand_over

    if plot is not None:
        refuse_beside(context, "--plot", "folder")
        _draw(folder, plot)
        return
    chosen = Chosen(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow)
    options = ExportOptions(folder, chosen, json_output, follow)
    hand_over(options, typer.echo, lambda text: typer.echo(text, err=True))


def _draw(folder: Path, picture: Path) -> None:
    from farflung.console.history.history import read_folder
    from farflung.console.history.picture import write_picture
    from farflung.console.history.plots import picture_of
    from farflung.console.history.recorded_run import Recording

    write_picture(picture_of(Recording.of(*read_folder(folder).told)), picture)
    typer.echo(f"wrote {picture}")


@app.command(rich_help_panel="Take part")
def doctor(
    url: Annotated[
        str | None, typer.Argument(help="The join URL (put it in quotes); none: this machine only.")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="As for `join`: HOST:PORT, or `off`.")] = None,
    advertise: Annotated[str | None, typer.Option(help="As for `join`.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """Check whether this machine can take part.

    Each result is ok, warn or FAIL, with what to do.
    """
    from farflung.console.inspect_commands import run_doctor

    own = own_config({"listen": listen, "advertise": advertise})
    raise typer.Exit(run_doctor(JoinUrl.parse(url) if url is not None else None, own, json_output))


@app.command(rich_help_panel="Afterwards")
def audit(
    folder: Annotated[
        Path | None, typer.Argument(help="Where event journals lie: run.data/, and those of peers.")
    ] = None,
    evidence: Annotated[
        Path | None, typer.Option(help="A file from run.data/evidence/ that is to convict somebody: does it?")
    ] = None,
    who_sent: Annotated[
        Path | None, typer.Option(help="A file with an encoded chunk: who signed that it sent these bytes?")
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(help="Compute every version anew, from checkpoints and the archive at this place."),
    ] = None,
    provenance: Annotated[
        Path | None, typer.Option(help="A run's provenance.jsonl: who contributed how many tokens?")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="With --replay, --provenance: the join URL; take only what its run has signed."),
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=1, help="With --provenance: to this version \\[the last].")
    ] = None,
    run: Annotated[str, typer.Option(help="With --replay: of the run whose id begins with this.")] = "",
) -> None:
    """Check the promises on a run's event journals.

    One result for each promise; exit code 1 if one is broken.
    """
    from farflung.console.history import audit_evidence
    from farflung.console.history.audit import audit as check_promises
    from farflung.console.history.history import read_folder

    if evidence is not None:
        proven, lines = audit_evidence.judge(evidence)
        typer.echo("\n".join(lines))
        raise typer.Exit(exit_codes.UNEXPECTED if proven else exit_codes.OK)
    key = JoinUrl.parse(url).key if url is not None else b""
    if provenance is not None:
        from farflung.console.history.audit_evidence import lines_of, provenance_in

        told = provenance_in(provenance, key, version)
        typer.echo("\n".join(lines_of(told)))
        raise typer.Exit(exit_codes.UNEXPECTED if told.problems else exit_codes.OK)
    if replay is not None:
        from farflung.console.history.audit_replay import run_replay

        raise typer.Exit(run_replay(place_of(replay), run, key, folder, typer.echo))
    if folder is None:
        raise UserError("name the folder of a run's event journals, or a place with --replay")
    if who_sent is not None:
        typer.echo("\n".join(audit_evidence.who_sent(folder, who_sent)))
        return
    history = read_folder(folder)
    report = check_promises(history)
    report.findings += audit_evidence.findings(folder, history)
    typer.echo("\n".join(report.lines()))
    raise typer.Exit(exit_codes.OK if report.kept else exit_codes.UNEXPECTED)


@app.command(rich_help_panel="Try")
def demo(
    keep: Annotated[Path | None, typer.Option(help="Keep logs and models in this folder.")] = None,
) -> None:
    """A whole run on this machine, with a death.

    A coordinator and three peers; one of them is killed, and a fresh one takes its place.
    """
    from farflung.console.demo import run_demo

    raise typer.Exit(run_demo(keep))


def main() -> int:
    """The entry point: every expected failure is one line on stderr and a documented exit code."""
    return exit_codes.code_of(app, lambda why: log_lines.Teller.from_environment("farflung").failed(why))
