"""Draws the pictures of these pages, so that they never lag behind the program.

    python docs/make_pictures.py                     dashboard.svg, from sample_status.json
    python docs/make_pictures.py page [FOLDER]       screens/page.png: the page of a run that is made up
    python docs/make_pictures.py session [FOLDER]    screens/: a real run of four peers in tmux, one killed with -9

The second needs Chromium; into FOLDER, where one is named, go its looks: light, dark, on a phone, of a pipeline, empty.
The third takes about a minute and needs tmux.  What is seen there is the program's own screen, as it was in the
terminal; all of it goes into FOLDER, where one is named, and what the pages show into docs/screens/.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from farflung.console.screen.live import save_svg
from farflung.console.screen.status_client import StatusClient
from farflung.console.web.page_process import Press, assets
from farflung.console.web.server import PageServer
from farflung.protocol.join_url import JoinUrl

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
from rig.browser import Browser
from rig.public_run import empty_status, public_status

WIDTH, HEIGHT = 100, 30
SMALL, LARGE = (80, 24), (200, 50)
TMUX = ["tmux", "-L", f"farflung-pictures-{os.getpid()}"]
WINDOWS = {"watch": "status --watch", "join1": "join", "coordinate": "coordinate"}
SHOWN = frozenset(
    ("watch_lost_80x24", "watch_lost_200x50", "join_lost_80x24", "coordinate_well_80x24", "watch_well_80x24")
)
PATIENCE_S = 120.0
RUN_TOML = """
[run]
name = "four-friends"
min_peers = 2
rounds = 400
[inner]
lr = 3e-3
[round]
sync_every = 30
chunk_kb = 64
codec = "int8"
gather_codec = "int8"
"""


def draw(sample: Path, picture: Path) -> None:
    """The status in `sample` as it would look in a terminal."""
    save_svg(json.loads(sample.read_text(encoding="utf-8")), picture, (WIDTH, HEIGHT))


class Session:
    """A tmux server of its own, with a window for each process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run([*TMUX, "kill-server"], check=False)

    def open(self, name: str, words: list[str]) -> None:
        command = [sys.executable, "-m", "farflung", *words]
        size = ["-x", str(SMALL[0]), "-y", str(SMALL[1])]
        # A window that stays when its process ends shows its last words.
        given = ["env", "OMP_NUM_THREADS=1", "TERM=xterm-256color", "COLORTERM=truecolor", *command]
        subprocess.run([*TMUX, "new-session", "-d", "-s", name, *size, *given], cwd=self.folder, check=True)
        subprocess.run([*TMUX, "set-option", "-t", name, "remain-on-exit", "on"], check=True)

    def resize(self, name: str, size: tuple[int, int]) -> None:
        subprocess.run(
            [*TMUX, "resize-window", "-t", name, "-x", str(size[0]), "-y", str(size[1])], check=True
        )

    def screen(self, name: str) -> str:
        """What stands there now, with its colours."""
        shown = subprocess.run(
            [*TMUX, "capture-pane", "-e", "-p", "-t", name], capture_output=True, text=True
        )
        return shown.stdout

    def kill(self, name: str) -> None:
        """The power fails: everything in this window is gone at once."""
        shown = subprocess.run(
            [*TMUX, "list-panes", "-t", name, "-F", "#{pane_pid}"], capture_output=True, text=True, check=True
        )
        family = [int(shown.stdout)]
        for pid in family:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
            family += [int(child) for child in children]
        for pid in family:
            os.kill(pid, signal.SIGKILL)


def as_svg(screen: str, path: Path, size: tuple[int, int], title: str) -> None:
    console = Console(width=size[0], height=size[1], record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen.rstrip("\n")), crop=False, no_wrap=True, end="")
    path.write_text(console.export_svg(title=title), encoding="utf-8")


LOOKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "page": (public_status(), {"width": 1080, "height": 880}),
    "page_light": (public_status(), {}),
    "page_dark": (public_status(), {"dark": True}),
    "page_phone": (public_status(), {"width": 390, "height": 844}),
    "page_pipeline": (public_status(stages=4), {}),
    "page_pipeline_phone": (public_status(stages=4), {"width": 390, "height": 844, "dark": True}),
    "page_empty": (empty_status(), {}),
}


def pages(into: Path, names: list[str]) -> None:
    """The page as a browser shows it; "page" as far as its window goes, the others down to their end."""
    with Browser() as browser:
        for name in names:
            status, how = LOOKS[name]
            with socket.create_server(("127.0.0.1", 0)) as listener:
                files, version = assets()
                server = PageServer(listener, files)
                url = f"farflung://train.example.org:29800/{status['run']}?k={'Ab3' * 14}A"
                server.publish(Press(url, version).edition(status))
                thread = threading.Thread(target=server.serve)
                thread.start()
                browser.open(f"http://127.0.0.1:{listener.getsockname()[1]}/", still=True, **how)
                browser.wait_until("document.getElementById('live').classList.contains('on')")
                browser.picture(into / f"{name}.png", whole=name != "page")
                server.stop()
                thread.join()


def wait_for(what: str, url: str, so_far: Any) -> dict[str, Any]:
    """The first status that `so_far` is content with."""
    end = time.monotonic() + PATIENCE_S
    with StatusClient(JoinUrl.parse(url)) as client:
        while time.monotonic() < end:
            status = client.fetch(5.0)
            if so_far(status):
                return status
            time.sleep(0.2)
    raise SystemExit(f"gave up waiting for {what}")


def taking_part(status: dict[str, Any]) -> int:
    return sum(member["alive"] and not member["why"] for member in status["members"])


def session(into: Path, wanted: frozenset[str] | None) -> None:
    """Four peers; one is killed; the screens of three commands before and after, in two sizes."""
    with tempfile.TemporaryDirectory(prefix="farflung-pictures-") as name, Session(Path(name)) as tmux:
        (tmux.folder / "run.toml").write_text(RUN_TOML, encoding="utf-8")
        tmux.open("coordinate", ["coordinate", "--listen", "127.0.0.1:0", "run.toml"])
        url = url_of(tmux)
        for number in (1, 2, 3, 4):
            tmux.open(f"join{number}", ["join", "--identity", f"{number}.pem", url])
        tmux.open("watch", ["status", "--watch", url])
        wait_for("four peers", url, lambda s: taking_part(s) == 4 and s["version"] >= 12)
        look(tmux, into, "well", wanted)
        tmux.kill("join4")
        wait_for("the loss to be noticed", url, lambda s: any(m["state"] == "lost" for m in s["members"]))
        look(tmux, into, "lost", wanted)


def url_of(tmux: Session) -> str:
    """From the screen of the host, as a person copies it."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        shown = Text.from_ansi(tmux.screen("coordinate")).plain.replace("\n", "")
        if (found := re.search(r'"(farflung://[^" ]+)"', shown)) is not None:
            return found[1]
        time.sleep(0.2)
    raise SystemExit("the coordinator shows no URL")


def look(tmux: Session, into: Path, when: str, wanted: frozenset[str] | None) -> None:
    for size in (LARGE, SMALL):
        for name in WINDOWS:
            tmux.resize(name, size)
        time.sleep(2.5)  # until the programs have seen their new size, asked again, and drawn
        for name, command in WINDOWS.items():
            stem = f"{name.removesuffix('1')}_{when}_{size[0]}x{size[1]}"
            if wanted is None or stem in wanted:
                screen = tmux.screen(name)
                as_svg(screen, into / f"{stem}.svg", size, f"farflung {command}")
                if wanted is None:
                    (into / f"{stem}.txt").write_text(Text.from_ansi(screen).plain, encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            draw(HERE / "sample_status.json", HERE / "dashboard.svg")
        case ["page"]:
            pages(HERE / "screens", ["page"])
        case ["page", folder]:
            pages(Path(folder), list(LOOKS))
        case ["session"]:
            session(HERE / "screens", SHOWN)
        case ["session", folder]:
            session(Path(folder), None)
        case _:
            raise SystemExit(__doc__)
