"""The volunteer's own settings: which source wins, and that of limits the strictest does."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from farflung.peer.line.data_line import checked_listen
from farflung.peer.settings import Caps, OwnConfig, own_config
from farflung.protocol.errors import UserError

NOON = 12 * 3600


def config(file: Path, text: str = "", env: dict[str, str] | None = None, **given: str | None) -> OwnConfig:
    file.write_text(text)
    return own_config(given, env or {}, file)


def test_an_argument_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    text = 'listen = "0.0.0.0:1"\nadvertise = "home.example"\nconnections = 3\n'
    env = {"FARFLUNG_LISTEN": "0.0.0.0:2"}
    assert config(file, text) == OwnConfig(listen="0.0.0.0:1", advertise="home.example", connections=3)
    assert config(file, text, env).listen == "0.0.0.0:2"
    assert config(file, text, env, listen="0.0.0.0:3", advertise=None).listen == "0.0.0.0:3"
    assert own_config({}, {"FARFLUNG_HOME": str(tmp_path / "nowhere")}) == OwnConfig()


def test_the_agent_reads_what_it_is_given() -> None:
    own = OwnConfig(
        Path("me.pem"), "h:1", "h:2", ("1 Mbit/s", "2 Mbit/s"), ("none",), 3, "s3://there/run", 90.0
    )
    parser = argparse.ArgumentParser()
    OwnConfig.add_arguments(parser)
    for config in (own, OwnConfig()):
        assert OwnConfig.from_arguments(parser.parse_args(config.arguments())) == config


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


def test_settings_travel_whole_to_the_agent() -> None:
    assert OwnConfig().arguments() == []
    own = OwnConfig(Path("me.key"), "off", "", ("1 MB/s", "none"), ("2 MB/s",), 4)
    assert own.arguments() == [
        "--identity", "me.key", "--listen", "off", "--upload-limit", "1 MB/s", "--upload-limit", "none",
        "--download-limit", "2 MB/s", "--connections", "4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "given", "complaint"),
    [
        ("uplaod_limit = 1", {}, "no such setting"),
        ("listen = [1]", {}, "expected text"),
        ("= nonsense", {}, "cannot be read"),
        ('upload_limit = "20"', {}, "unit"),
        ("", {"download_limit": "fast"}, "cannot be used"),
        ("", {"connections": "many"}, "connections: expected 0"),
        ("", {"connections": "99"}, "connections: expected 0"),
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
    found = config(file, 'results_limit = "500 MB"\nresults_on_disk = "yes"')
    assert (found.results_limit, found.results_on_disk) == (500_000_000, True)
    assert config(file, results_limit="1.5GB").results_limit == 1_500_000_000
    parser = argparse.ArgumentParser()
    OwnConfig.add_arguments(parser)
    assert OwnConfig.from_arguments(parser.parse_args(found.arguments())) == found
    for text in ('results_limit = "500"', "results_limit = 500", 'results_on_disk = "maybe"'):
        with pytest.raises(UserError, match="expected"):
            config(file, text)
