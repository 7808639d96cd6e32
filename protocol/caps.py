"""Caps for upload and download: what people write, and which cap holds at which hour.

Owns: the forms of a cap, the schedule of a day, and how much a peer gives at most of what has no cap of its own.
Called by the configuration (parsing), by the agent (which cap holds now) and by the data plane.
Must not know: sockets, clocks, time zones; the local time comes in as seconds since midnight.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from farflung.protocol.errors import UserError

DAY_S = 24 * 3600
CONNECTIONS_MOST = 16  # to one peer
RELAY_MONTH_BYTES = 10**12  # what a relay passes in a month, unless somebody says otherwise
RESULTS_BYTES = 2 << 30  # of the results of past rounds, unless the volunteer says otherwise
KEPT_BYTES = 100 * 10**9  # of the newest version of every run, on a peer's own disk; the same holds
CROSSINGS_BYTES = 2 << 30  # of microbatches of a batch that is not committed, in memory; the same holds
SHARDS_BYTES = 2 << 30  # of token shards that were fetched, for all trainers of a machine; the same holds
LEAST_BITS_PER_S = 8000.0  # below this even a small model takes weeks; it is a slip of the pen

FORMS = '"20 Mbit/s", "2.5 MB/s", "500 kbit/s", "none", or with hours of the day "20 Mbit/s, 5 Mbit/s 08:00-18:00"'
_UNITS = {  # in bit/s; "mbit/s" can only mean Mbit/s, but "Mb/s" may mean either
    **{f"{prefix}bit/s": factor for prefix, factor in (("", 1), ("k", 1e3), ("m", 1e6), ("g", 1e9))},
    **{f"{prefix}B/s": 8 * factor for prefix, factor in (("", 1), ("k", 1e3), ("m", 1e6), ("g", 1e9))},
}
_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?) *(?P<unit>[A-Za-z/]*)", re.ASCII)
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?([MGT])B")
_MONTH = re.compile(r"(.+) a month")
_PORT = re.compile(r"port (\d{1,5})", re.ASCII)
_HOURS = re.compile(r"(?P<rate>.*\S) +(\d\d?):(\d\d) *- *(\d\d?):(\d\d)", re.ASCII)


@dataclass(frozen=True)
class Hours:
    """From `start_s` until before `end_s` since midnight, over midnight if it ends before it starts."""

    start_s: int
    end_s: int
    bytes_per_s: float | None

    def hold(self, second_of_day: float) -> bool:
        if self.start_s < self.end_s:
            return self.start_s <= second_of_day < self.end_s
        return second_of_day >= self.start_s or second_of_day < self.end_s


@dataclass(frozen=True)
class Cap:
    """A cap over the day.  None: uncapped."""

    bytes_per_s: float | None = None
    hours: tuple[Hours, ...] = ()  # they do not overlap

    def at(self, second_of_day: float) -> float | None:
        """Bytes per second that may pass at this local time."""
        for each in self.hours:
            if each.hold(second_of_day % DAY_S):
                return each.bytes_per_s
        return self.bytes_per_s


def strictest(own: float | None, run: float | None) -> float | None:
    """Of the volunteer's own cap and the run's, the one that lets less pass; None: uncapped."""
    if own is None or run is None:
        return run if own is None else own
    return min(own, run)


# ---- reading ---------------------------------------------------------------------------------------------


def parse_cap(text: object) -> Cap:
    """UserError if this is not a cap.  Hours that no range covers have the entry without hours, or no cap."""
    if not isinstance(text, str):  # a configuration file may hold a bare number
        raise _wrong(str(text), "it is no text with a unit")
    always: list[float | None] = []
    hours: list[Hours] = []
    for part in text.split(","):
        match = _HOURS.fullmatch(part.strip())
        if match is None:
            always.append(_rate(part.strip(), text))
        else:
            start_s, end_s = _clock(match[2], match[3], text), _clock(match[4], match[5], text)
            if start_s % DAY_S == end_s % DAY_S:
                raise _wrong(text, "a range of hours must not end when it starts")
            hours.append(Hours(start_s % DAY_S, end_s, _rate(match["rate"], text)))
    if len(always) > 1:
        raise _wrong(text, "only one entry may stand without hours")
    _refuse_overlap(hours, text)
    return Cap(always[0] if always else None, tuple(hours))


def _rate(text: str, whole: str) -> float | None:
    if text.lower() == "none":
        return None
    match = _RATE.fullmatch(text)
    if match is None:
        raise _wrong(whole, f'"{text}" is not a rate')
    number, unit = float(match["number"]), match["unit"]
    if not unit:
        raise _wrong(whole, f"{text} has no unit")
    known = unit.lower() if "bit" in unit.lower() else unit[:-3].lower() + unit[-3:]
    if known not in _UNITS:
        raise _wrong(whole, f'"{unit}" is not a known unit')
    bits_per_s = number * _UNITS[known]
    if not math.isfinite(bits_per_s) or bits_per_s < LEAST_BITS_PER_S:
        raise _wrong(whole, f'"{text}" is not between 8 kbit/s and what a number can hold')
    return bits_per_s / 8


def _clock(hour: str, minute: str, whole: str) -> int:
    second = int(hour) * 3600 + int(minute) * 60
    if int(minute) > 59 or second > DAY_S:
        raise _wrong(whole, f"{hour}:{minute} is no time of day")
    return second


def _refuse_overlap(hours: list[Hours], whole: str) -> None:
    """Two ranges overlap exactly if one starts within the other."""
    for at, each in enumerate(hours):
        for other in hours[:at]:
            if each.hold(other.start_s) or other.hold(each.start_s):
                raise _wrong(whole, "two ranges of hours overlap")


def _wrong(text: str, why: str) -> UserError:
    return UserError(f'the cap "{text}" cannot be used: {why}; write for example {FORMS}')


class RelayLimits(NamedTuple):
    """What a relay passes at most, and where it listens."""

    bytes_per_s: float
    month_bytes: int = RELAY_MONTH_BYTES
    port: int = 0  # any free one


def parse_relay(text: str) -> RelayLimits | None:
    """Such as `20 Mbit/s` or `20 Mbit/s, 2 TB a month, port 29803`; None for `off`.  It has one rate all day, and never
    none."""
    if text.strip().lower() == "off":
        return None
    rate, *more = (part.strip() for part in text.split(","))
    cap = parse_cap(rate)
    if cap.bytes_per_s is None or cap.hours:
        raise _wrong(text, 'a relay has one rate for all hours, or is "off"')
    found: dict[str, int] = {}
    for part in more:
        month, port = _MONTH.fullmatch(part), _PORT.fullmatch(part)
        key, value = (
            ("month_bytes", parse_bytes(month[1])) if month else ("port", int(port[1]) if port else -1)
        )
        if key in found or value < 0 or (port and not 0 < value < 65536):
            raise UserError(
                f'the relay "{text}" cannot be used: after its rate write "1 TB a month", "port 29803", or both, found '
                f'"{part}"'
            )
        found[key] = value
    return RelayLimits(cap.bytes_per_s, **found)


def _hosts_relay(text: str) -> None:
    limits = parse_relay(text)
    if limits is not None and limits.port:
        raise UserError("the coordinator's relay has the last port of --listen; leave it out here")


class ResultsLimit(NamedTuple):
    """Of past rounds: how much, and whether in memory or on disk."""

    limit_bytes: int = RESULTS_BYTES
    on_disk: bool = False


def parse_results(text: str) -> ResultsLimit:
    """Such as `500 MB` or `20 GB on disk`; empty: as usual."""
    size, on_disk, more = text.strip().partition(" on disk")
    if more:
        raise UserError(f'expected a size such as "2 GB" or "20 GB on disk", found {text!r}')
    return ResultsLimit(parse_bytes(size), bool(on_disk)) if text else ResultsLimit()


def parse_bytes(text: str) -> int:
    """Such as 500 MB, 2 GB or 1 TB."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UserError(f'expected a size such as "500 MB", "2 GB" or "1 TB", found {text!r}')
    return round(float(found[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[found[2]])


def wrong_caps(net: Mapping[str, object]) -> list[str]:
    """What is wrong with the caps of a manifest's [net], by its keys."""
    checks: dict[str, Callable[[str], object]] = {
        "upload_limit": parse_cap,
        "download_limit": parse_cap,
        "relay": _hosts_relay,
    }
    found = []
    for key, check in checks.items():
        try:
            check(str(net[key]))
        except UserError as error:
            found.append(f"{key}: {error}")
    return found


# ---- units -------------------------------------------------------------------------------------------------
# Numbers and times as people read them: few characters, one unit.


def si(value: float, unit: str = "") -> str:
    """At most four characters and a letter, then the unit: 999, 1.2k, 12.3M, 123G."""
    for letter in ("", "k", "M", "G", "T", "P", "E"):
        digits = 0 if abs(value) >= 99.95 or (not letter and value == round(value, 6) // 1) else 1
        # Decided on the rounded number: 999.9 is 1.0k, not 1000.
        if abs(round(value, digits)) < 1000:
            return f"{value:.{digits}f}{letter}{unit}"
        value /= 1000
    return f"?{unit}"


def duration(seconds: float) -> str:
    if seconds < 119.5:
        return f"{seconds:.{int(seconds < 9.95)}f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{si(minutes / 60)} h" if minutes < 48 * 60 else f"{si(minutes / 1440)} days"


SHOWN_CHARS = 60


def shown(value: Any) -> str:
    """The value as one short line, with control characters escaped."""
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a value too long to show"
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def shown_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", key) else shown(key)
