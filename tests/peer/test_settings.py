"""The volunteer's own settings: which source wins, and that of limits the strictest does."""

from __future__ import annotations

import inspect
import time
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import farflung
from farflung.console import main
from farflung.peer.agent import join as joining
from farflung.peer.line.data_line import checked_listen
from farflung.peer.settings import SETTINGS, Caps, OwnConfig, own_config
from farflung.protocol.caps import RESULTS_BYTES, RelayLimits, parse_relay
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl

NOON = 12 * 3600
URL = str(JoinUrl("127.0.0.1", 9, "my-run", bytes(32)))
# How each setting may be written, and what the agent reads then: a new one needs a row here, and nothing else.
WRITTEN: dict[str, tuple[str, object]] = {
    "identity": ("my.pem", Path("my.pem")),
    "listen": ("off", "off"),
    "advertise": ("home.example:9", "home.example:9"),
    "relay": ("20 Mbit/s, 2 TB a month", "20 Mbit/s, 2 TB a month"),
    "upload_limit": ("1 MB/s", ("1 MB/s",)),
    "download_limit": ("2 MB/s", ("2 MB/s",)),
    "checkpoints": ("s3://there/run", "s3://there/run"),
    "stuck_after": ("90", 90.0),
    "keep": ("50 GB", 50_000_000_000),
    "results": ("500 MB on disk", "500 MB on disk"),
    "archive": ("yes", True),
    "metrics": ("9100", "9100"),
    "data": ("s3://there/tokens", "s3://there/tokens"),
    "start": ("s3://there/a.safetensors", "s3://there/a.safetensors"),
    "book": ("/ip4/192.0.2.1/tcp/29810/p2p/QmX", "/ip4/192.0.2.1/tcp/29810/p2p/QmX"),
    "cache_limit": ("40 GB", 40_000_000_000),
}
FLAGS = {"archive"}
ONLY_WRITTEN_DOWN = {
    "stuck_after",
    "cache_limit",
}  # in the file or the environment: no option of `farflung join`


def config(file: Path, text: str = "", env: dict[str, str] | None = None, **given: str | None) -> OwnConfig:
    file.write_text(text)
    return own_config(given, env or {}, file)


def test_an_argument_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    text = 'listen = "0.0.0.0:1"\nadvertise = "home.example"\nstuck_after = 3\n'
    env = {"FARFLUNG_LISTEN": "0.0.0.0:2"}
    assert config(file, text) == OwnConfig(listen="0.0.0.0:1", advertise="home.example", stuck_after=3.0)
    assert config(file, text, env).listen == "0.0.0.0:2"
    assert config(file, text, env, listen="0.0.0.0:3", advertise=None).listen == "0.0.0.0:3"
    assert own_config({}, {"FARFLUNG_HOME": str(tmp_path / "nowhere")}) == OwnConfig()


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_read_from_every_place_and_reaches_the_agent(tmp_path: Path, name: str) -> None:
    text, meant = WRITTEN[name]
    file, field = tmp_path / "config.toml", SETTINGS[name].field
    for found in (
        config(file, f'{name} = "{text}"'),
        config(file, env={"FARFLUNG_" + name.upper(): text}),
        config(file, **{name: text}),
    ):
        assert found == OwnConfig(**{field: meant}) != OwnConfig()  # type: ignore[arg-type]
        assert OwnConfig.from_json(found.as_json()) == found
    assert config(file, **{name: None}) == OwnConfig()


def test_every_field_is_a_setting() -> None:
    assert [setting.field for setting in SETTINGS.values()] == [each.name for each in fields(OwnConfig)]
    assert set(WRITTEN) == set(SETTINGS)


def test_every_setting_is_an_option_of_join_and_the_api_s_are_settings() -> None:
    command = typer.main.get_command(main.app).commands["join"]  # type: ignore[attr-defined]
    options = {each.name: each for each in command.params if each.name in SETTINGS}
    assert set(options) == set(SETTINGS) - ONLY_WRITTEN_DOWN
    for name, option in options.items():
        assert option.opts == ["--" + name.replace("_", "-")] and not option.secondary_opts
        assert option.help == SETTINGS[name].help.replace("[", r"\[")
        assert option.is_flag == (name in FLAGS)
    keywords = [
        each
        for each in inspect.signature(farflung.join).parameters.values()
        if each.kind == each.KEYWORD_ONLY
    ]
    names = [each.name for each in keywords]
    assert names == ["identity", "listen", "upload_limit", "download_limit", "data_rank"]
    assert all(
        each.name in SETTINGS and (each.annotation, each.default) == ("str | None", None)
        for each in keywords[:-1]  # which part of a batch is this process's is the script's to say
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["join"], '["2 GB"]'),
        (["coordinate"], "[run.toml's folder]"),
        (["status"], "[its end; with --watch, its beginning]"),
        (["checkpoint", "export"], "[the newest that is whole]"),
    ],
)
def test_a_default_in_brackets_is_shown(words: list[str], told: str) -> None:
    """And not taken for the markup of the library that draws the help."""
    shown = CliRunner().invoke(main.app, [*words, "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert told in shown.output


@pytest.mark.parametrize("name", sorted(set(SETTINGS) - ONLY_WRITTEN_DOWN))
def test_what_is_typed_after_join_is_what_the_agent_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FARFLUNG_HOME", str(tmp_path))
    taken: list[joining.JoinOptions] = []
    monkeypatch.setattr(joining, "join", lambda options: taken.append(options) or 0)
    text, meant = WRITTEN[name]
    words = ["--" + name.replace("_", "-")] + ([] if name in FLAGS else [text])
    for typed, own in ((words, OwnConfig(**{SETTINGS[name].field: meant})), ([], OwnConfig())):  # type: ignore[arg-type]
        done = CliRunner().invoke(main.app, ["join", "--plain", *typed, URL, "more"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        options = taken.pop()
        assert options.own == own and options.script_arguments == ("more",)


def test_the_agent_reads_what_it_is_given() -> None:
    own = OwnConfig(Path("me.pem"), "h:1", "h:2", ("1 Mbit/s", "2 Mbit/s"), ("none",), "s3://there/run", 90.0)
    odd = OwnConfig(Path('k\udcff"y.pem'), checkpoints="/a folder/\u00e4")
    for config in (own, odd, OwnConfig()):
        assert OwnConfig.from_json(config.as_json()) == config


def test_P10_of_limits_the_strictest_counts_wherever_it_stands(tmp_path: Path) -> None:
    found = config(
        tmp_path / "c",
        'upload_limit = "8 Mbit/s"',
        {"FARFLUNG_UPLOAD_LIMIT": "none"},
        upload_limit="16 Mbit/s",
    )
    assert Caps.of(*found.upload_limits).at(NOON) == 1e6
    by_hours = Caps.of("none, 4 Mbit/s 08:00-18:00", "8 Mbit/s")
    assert (by_hours.at(NOON), by_hours.at(20 * 3600)) == (0.5e6, 1e6)
    assert Caps.of().at(0) is None and Caps.of("none").at(0) is None


def test_a_mistake_that_something_else_overrules_does_no_harm(tmp_path: Path) -> None:
    found = config(tmp_path / "c", 'keep = "much"', {"FARFLUNG_KEEP": "9 GB"}, keep="4 GB")
    assert found.keep == 4_000_000_000
    with pytest.raises(UserError, match="upload_limit: "):
        config(tmp_path / "c", 'upload_limit = "fast"', upload_limit="1 MB/s")


def test_which_limit_holds_now_is_told_by_the_clock_on_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    caps = Caps.of("none, 4 Mbit/s 08:00-18:00", "8 Mbit/s")
    for hour, bytes_per_s in ((8, 0.5e6), (17, 0.5e6), (18, 1e6)):
        told = time.strptime(f"{hour}:00:30", "%H:%M:%S")
        monkeypatch.setattr("farflung.peer.settings.time.localtime", lambda told=told: told)
        assert caps.now() == bytes_per_s


@pytest.mark.parametrize(
    ("text", "given", "complaint"),
    [
        ("uplaod_limit = 1", {}, "no such setting"),
        ("listen = [1]", {}, "expected text"),
        ("= nonsense", {}, "cannot be read"),
        ('upload_limit = "20"', {}, "unit"),
        ("", {"download_limit": "fast"}, "cannot be used"),
        ("", {"results": "2 GB on tape"}, 'results: expected a size such as "500 MB"'),
        (
            "",
            {"results": "2 GB on disk, please"},
            'results: expected a size such as "2 GB" or "20 GB on disk"',
        ),
        (
            "",
            {"relay": "20 Mbit/s, port 70000"},
            'write "1 TB a month", "port 29803", or both, found "port 70000"',
        ),
        ("", {"relay": "20 Mbit/s, port 1, port 2"}, 'or both, found "port 2"'),
        ("", {"relay": "20 Mbit/s, 1 TB a year"}, 'or both, found "1 TB a year"'),
        ("", {"relay": "1 TB a month"}, "relay: the cap"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    tmp_path: Path, text: str, given: dict[str, str | None], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        config(tmp_path / "config.toml", text, **given)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:70000"])
def test_an_address_to_listen_on_has_a_host_and_a_port(text: str) -> None:
    with pytest.raises(UserError, match="--listen"):
        checked_listen(text)


def test_how_much_of_past_rounds_is_kept_and_where(tmp_path: Path) -> None:
    file = tmp_path / "c"
    assert config(file, keep="off").keep == 0
    found = config(file, 'results = "500 MB on disk"')
    assert found.kept_results == (500_000_000, True) and config(file).kept_results == (RESULTS_BYTES, False)
    assert config(file, results="1.5GB").kept_results == (1_500_000_000, False)
    assert OwnConfig.from_json(found.as_json()) == found
    for text in ('results = "500"', "results = 500", 'results = "on disk"'):
        with pytest.raises(UserError, match="expected"):
            config(file, text)


def test_what_a_relay_passes_and_where_it_listens() -> None:
    assert parse_relay("20 Mbit/s") == RelayLimits(2.5e6) == (2.5e6, 10**12, 0)
    assert parse_relay("20 Mbit/s, port 29803, 300 GB a month") == (2.5e6, 300 * 10**9, 29803)
    assert parse_relay("off") is None


def test_a_mistake_in_the_file_names_the_file_and_what_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    for text, told in (
        ('uplod_limit = "1 MB/s"', "uplod_limit: no such setting; did you mean upload_limit?"),
        ("zzz = 1", "zzz: no such setting; there are identity, "),
        ('upload_limit = "20"', "upload_limit: "),
        ("keep = 70000", "keep: expected a size"),
        ("listen = 1.5", "listen: expected text or a whole number, found 1.5"),
    ):
        file.write_text(text)
        with pytest.raises(UserError) as caught:
            own_config({}, {}, file)
        assert str(caught.value).startswith(f"{file}: {told}")
    file.write_text("")
    with pytest.raises(UserError, match=r"^FARFLUNG_KEEP: expected a size"):
        own_config({}, {"FARFLUNG_KEEP": "x"}, file)
    with pytest.raises(UserError, match=r"^keep: expected a size"):
        own_config({"keep": "x"}, {}, file)


def test_true_and_false_of_toml_are_yes_and_no(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    for said in (True, False):
        file.write_text(f"archive = {str(said).lower()}\n")
        assert own_config({}, {}, file).archive is said
    file.write_text("stuck_after = true\n")
    with pytest.raises(UserError, match="stuck_after: expected seconds, found 'yes'"):
        own_config({}, {}, file)
