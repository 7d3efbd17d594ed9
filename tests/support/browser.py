"""A page in a real headless Chromium, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

PATIENCE_S = 120.0


@dataclass
class Page:
    """A page that has been loaded.

    Attributes:
        errors: what it has written to the console, exceptions and refused loads among it.
        requests: addresses that it has asked for, without the page itself.
    """

    browser: Browser
    session: str
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def evaluate(self, script: str) -> Any:
        """What an expression of JavaScript gives; a promise is awaited."""
        arguments = {"expression": script, "returnByValue": True, "awaitPromise": True}
        result = self.browser.call("Runtime.evaluate", arguments, self)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def scheme(self, name: str) -> None:
        """As if the reader's system were switched to `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.browser.call("Emulation.setEmulatedMedia", {"features": features}, self)

    def heard(self, event: dict[str, Any]) -> None:
        """Note what an event says of this page."""
        method, details = event.get("method"), event.get("params", {})
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(json.dumps(details)[:500])
        elif method == "Network.requestWillBeSent" and details["type"] != "Document":
            self.requests.append(details["request"]["url"])


class Browser:
    """Chromium with a profile of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
        command = [CHROMIUM, *flags, f"--user-data-dir={folder}", "--window-size=1300,1000", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", *command]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(shell, pass_fds=(to_read, to_write), stdout=quiet, stderr=quiet)
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0

    def call(self, method: str, arguments: dict[str, Any] | None = None, page: Page | None = None) -> Any:
        """Call a method of the protocol and wait for its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments or {}}
        if page is not None:
            message["sessionId"] = page.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if page is not None:
                page.heard(answer)

    def open(self, path: Path, scheme: str) -> Page:
        """Load a file, without a network, and wait until it is there."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", None, page)
        page.scheme(scheme)
        self.call("Page.navigate", {"url": path.resolve().as_uri()}, page)
        while True:
            event = self._read()
            page.heard(event)
            if event.get("method") == "Page.loadEventFired":
                return page

    def close(self) -> None:
        """End the browser."""
        try:
            self.call("Browser.close")
            self._process.wait(20)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._in, 1 << 16) if ready else b""
            assert data, "the browser has ended, or does not answer"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser that is ended at the end."""
    made = Browser(folder)
    try:
        yield made
    finally:
        made.close()
