"""Chromium without a window, driven through its debugging pipe: no package is needed for it."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_SECONDS = 120


class Page:
    """A page in the browser.

    Attributes:
        requests: addresses that the latest page asked for.
        messages: what it wrote on the console, and errors of its own.
    """

    def __init__(self, browser: _Pipe) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = browser.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.requests: list[str]
        self.messages: list[str]

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Opens a file, on a screen so many CSS pixels wide, and waits until all of it is there."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._browser.events.clear()
        self.requests, self.messages = [], []
        self._call("Page.navigate", {"url": path.as_uri()})
        self._browser.wait_for("Page.loadEventFired")
        self.evaluate("document.fonts.ready.then(() => 0)")
        for event in self._browser.events:
            if event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            if event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.messages.append(json.dumps(event["params"]))

    def evaluate(self, source: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = self._call("Runtime.evaluate", {"expression": source, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, whole: bool = False) -> bytes:
        """A picture of what is seen, or of the whole page, as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", {"captureBeyondViewport": whole})["data"])

    def _call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.call(method, parameters or {}, self._session)


class _Pipe:
    """Chromium's end of the pipe: JSON, each message closed by a zero byte."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._rest = b""
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        while not any(event["method"] == method for event in self.events):
            self.events.append(self._message())

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            received = os.read(self._read, 2**20) if ready else b""
            assert received, "the browser has gone, or takes too long"
            self._rest += received
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """A browser with its profile in a folder, for as long as the context lasts."""
    assert CHROMIUM is not None
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4.
    shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    command = ["bash", "-c", shell, CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, pass_fds=(to_browser, from_browser), **quiet)
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(_Pipe(read, write))
    finally:
        process.terminate()
        process.wait(30)
        os.close(read)
        os.close(write)
