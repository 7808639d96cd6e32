"""`farflung watch`: a live run or a replay, on the screen, as one frame, or as a picture.

Called by the command line.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from farflung.coordinator.url import JoinUrl
from farflung.peer import live
from farflung.peer.replay import Replay, read_folder
from farflung.peer.terminal import has_terminal
from farflung.peer.watching import StatusClient


@dataclass(frozen=True)
class WatchOptions:
    url: JoinUrl | None
    replay: Path | None
    speed: float
    at_s: float | None
    once: bool
    svg: Path | None
    size: str | None
    every_s: float


def run_watch(options: WatchOptions) -> None:
    size = live.size_of(options.size)
    still = options.once or options.svg is not None
    if options.replay is not None:
        recording = read_folder(options.replay)
        replay = Replay(recording, options.speed)
        replay.at_s = options.at_s or 0.0
        if has_terminal(sys.stdout) and not still:
            live.interact(replay)
            return
        status = replay.status_at(recording.seconds if options.at_s is None else options.at_s)
    else:
        assert options.url is not None
        if not still:
            live.watch(options.url, options.every_s)
            return
        with StatusClient(options.url) as client:
            status = client.fetch(live.FETCH_S)
    if options.svg is not None:
        live.save_svg(status, options.svg, size, "farflung watch")
        print(f"wrote {options.svg}", file=sys.stderr)
    if options.once or options.svg is None:
        live.print_frame(status, size)
