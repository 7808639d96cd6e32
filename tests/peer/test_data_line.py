"""A peer's line to the others, over a link within this process: its address, its limits, what it tells of itself."""

from __future__ import annotations

import pytest

from farflung.peer.line.data_line import DataLine, Expected
from farflung.peer.settings import OwnConfig
from farflung.protocol.errors import UserError
from farflung.protocol.frames import Header, Kind, with_payload
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest import NetSection
from farflung.protocol.round_words import Contact
from rig.memory_link import MemoryLink, Wire

URL = JoinUrl("127.0.0.1", 9, "run", bytes(32))
RUN = b"run-tag!"


def line_of(own: OwnConfig, net: NetSection | None = None) -> tuple[DataLine, MemoryLink, str]:
    link = MemoryLink(Wire(), b"\1" * 32)
    line = DataLine((b"", b""), own, link)
    line.link.expect("ann", RUN, 1 << 20)
    return line, link, line.open(URL, net or NetSection())


@pytest.mark.parametrize(
    ("listen", "advertise", "address"),
    [
        ("", "", "127.0.0.1:1"),
        ("off", "", ""),
        ("0.0.0.0:7100", "", "127.0.0.1:7100"),
        ("127.0.0.2:7100", "", "127.0.0.2:7100"),
        ("", "ann.example", "ann.example:1"),
        ("127.0.0.1:7100", "ann.example:80", "ann.example:80"),
    ],
)
def test_the_address_that_others_dial(listen: str, advertise: str, address: str) -> None:
    assert line_of(OwnConfig(listen=listen, advertise=advertise))[2] == address


def test_an_address_that_is_none_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(UserError, match="--listen nowhere"):
        DataLine((b"", b""), OwnConfig(listen="nowhere"), MemoryLink(Wire(), bytes(32)))


def test_P10_the_stricter_of_the_owners_limit_and_the_runs_is_kept_and_told() -> None:
    own = OwnConfig(upload_limits=("8 Mbit/s",), download_limits=("80 Mbit/s",))
    line, link, _ = line_of(own, NetSection(upload_limit="16 Mbit/s", download_limit="40 Mbit/s"))
    assert (link.upload.bytes_per_s, link.download.bytes_per_s) == (1e6, 5e6)
    assert line.rates == (1_000_000, 5_000_000, True)


def test_the_links_bytes_are_what_the_line_is_measured_by() -> None:
    """Another peer takes a megabyte each half second, and more always waits for it."""
    line, link, _ = line_of(OwnConfig())
    link.set_contacts([Contact("bob", "bob", b"\2" * 32, "nowhere:1")])
    link.send("bob", with_payload(Header(Kind.CONTRIBUTION, RUN, round_no=1), b"it waits"))
    for half_s in range(12):
        line.on_tick(half_s / 2, Expected(others=1, owing=1, to_come=True))
        link.counts.sent_bytes += 1_000_000
        link.counts.arrived_bytes += 500_000
        assert half_s or line.known_up == 0.0, "nothing has filled it"
    line.on_tick(6.0, Expected())
    assert line.rates == (2_000_000, 1_000_000, False) and line.known_up == 2_000_000


def test_what_a_line_once_carried_at_least_is_no_word_of_what_it_can_carry() -> None:
    """Small rounds never fill a fast line: joiners had a fiftieth of next to nothing."""
    line, link, _ = line_of(OwnConfig())
    limited = line_of(OwnConfig(upload_limits=("8 Mbit/s",)))[0]
    for tenth in range(30):
        link.counts.sent_bytes += 20_000
        line.on_tick(tenth / 10, Expected(others=1))
    assert 0 < line.rates[0] <= 400_000 and line.known_up == 0.0
    assert limited.known_up == 1_000_000, "what its owner allows is known"
