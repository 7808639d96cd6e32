"""A real browser without a screen: Debian's Chromium, spoken to over a pipe, so that no other package is needed.

with Browser() as browser:             # BrowserMissing where there is no Chromium
    browser.open("http://127.0.0.1:...", width=390, dark=True)
    browser.value("document.title")    # what a script says
    browser.picture(Path("page.png"))
    browser.complaints                 # what the browser wrote to its console: scripts refused, errors
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from select import select
from typing import Any

ANSWERS_WITHIN_S = 60.0
_SILENT = ("background-networking", "component-update", "sync", "extensions", "quic", "gpu")
_WORDS = (
    *("--headless=new", "--no-sandbox", "--no-first-run", "--mute-audio", "--lang=en", "--hide-scrollbars"),
    *(f"--disable-{each}" for each in _SILENT),
    *("--force-device-scale-factor=1", "--remote-debugging-pipe"),
)


class BrowserMissing(Exception):
    pass


class Browser:
    def __init__(self) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        if program is None:
            raise BrowserMissing("needs Chromium: apt install chromium")
        self._program = program
        self._number = 0
        self._rest = b""
        self._events: list[dict[str, Any]] = []
        self._session = ""
        self.complaints: list[str] = []
        self.asked: list[str] = []  # every URL that the page fetched

    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(prefix="farflung-browser-")
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()

        def at_3_and_4() -> None:
            held_in, held_out = os.dup(theirs_in), os.dup(theirs_out)  # neither may be 3 or 4 itself
            os.dup2(held_in, 3)
            os.dup2(held_out, 4)

        self._process = subprocess.Popen(
            [self._program, *_WORDS, f"--user-data-dir={self._folder.name}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=at_3_and_4,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        shutil.rmtree(self._folder.name, ignore_errors=True)
        self._folder.cleanup()

    def open(
        self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False, script: bool = True,
        still: bool = False,
    ) -> float:  # fmt: skip
        """Seconds until it was loaded.  `still`: the reader wants no motion."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        wishes = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        wishes.append({"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"})
        self.call("Emulation.setEmulatedMedia", media="", features=wishes)
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.complaints, self._events, self.asked = [], [], []
        begun = time.monotonic()
        self.call("Page.navigate", url=url)
        self._wait_for("Page.loadEventFired")
        return time.monotonic() - begun

    def value(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_until(self, script: str) -> None:
        until = time.monotonic() + ANSWERS_WITHIN_S
        while not self.value(script):
            assert time.monotonic() < until, f"never came true: {script}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=9)

    def picture(self, path: Path, whole: bool = True) -> None:
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))

    def tree(self) -> list[tuple[str, str]]:
        """(role, name) of each element as a screen reader has them."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        shown = [node for node in nodes if not node.get("ignored")]
        return [
            (node["role"]["value"], str(node.get("name", {}).get("value", "")))
            for node in shown
            if "role" in node
        ]

    # ---- the pipe ------------------------------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        words: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            words["sessionId"] = self._session
        os.write(self._to, json.dumps(words).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, (method, told["error"])
                return dict(told["result"])

    def _wait_for(self, event: str) -> None:
        while not any(each.get("method") == event for each in self._events):
            self._next()

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + ANSWERS_WITHIN_S
        while b"\0" not in self._rest:
            ready, _, _ = select([self._from], [], [], max(0.0, until - time.monotonic()))
            came = os.read(self._from, 1 << 20) if ready else b""
            assert came, "the browser does not answer"
            self._rest += came
        raw, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(raw)
        self._note(told)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        params = told.get("params", {})
        match told.get("method"):
            case "Log.entryAdded":
                self.complaints.append(str(params["entry"]["text"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Network.requestWillBeSent":
                self.asked.append(str(params["request"]["url"]))
        if "method" in told:
            self._events.append(told)
