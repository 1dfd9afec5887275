"""Chromium without a window, asked by its own protocol over two pipes: nothing beside the browser is needed.

The protocol: https://chromedevtools.github.io/devtools-protocol/; over pipes a message is JSON with a zero byte behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Browser", "Tab", "browsing"]

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # which containers have little of
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
    "--password-store=basic",
    "--use-mock-keychain",
)
_FIRST_FREE = 10  # descriptors below this one may be those that the browser wants
_BECOME = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"
_SECONDS = 30.0


class Browser:
    """A running browser."""

    def __init__(self, program: str, profile: Path) -> None:
        """Starts it.

        Args:
            program: Its path.
            profile: An empty folder for what it keeps.
        """
        asked, self._out = _pipe()
        self._in, told = _pipe()
        own = [*_OPTIONS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        command = [sys.executable, "-c", _BECOME, str(asked), str(told), program, *own, "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(asked, told), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(asked)
        os.close(told)
        self._number, self._held = 0, b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and waits for its result; events that come before are kept in `events`."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(asked).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        until = time.monotonic() + _SECONDS
        while True:
            message = self._next(until)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self.events.append(message)

    def close(self) -> None:
        """Ends it."""
        with suppress(OSError, AssertionError):
            self.call("Browser.close")
        try:
            self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            readable, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert readable, "the browser does not answer"
            data = os.read(self._in, 1 << 16)
            assert data, "the browser is gone"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        return dict(json.loads(message))


class Tab:
    """A page in a browser."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol for this page."""
        return self._browser.call(method, self._session, **params)

    def open(self, url: str) -> None:
        """Goes to an address."""
        result = self.call("Page.navigate", url=url)
        assert "errorText" not in result, result

    def close(self) -> None:
        """Closes it, as who leaves does."""
        self._browser.call("Target.closeTarget", targetId=self._target)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = _SECONDS) -> Any:
        """Waits until an expression is true, and gives it."""
        until = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < until, f"never true: {expression}; complaints: {self.complaints()[:3]}"
            time.sleep(0.02)
        return value

    def click(self, selector: str) -> None:
        """Clicks into the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.value(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Puts text where the cursor is, as a keyboard or an input method does."""
        self.call("Input.insertText", text=text)

    def enter(self, shift: bool = False) -> None:
        """Presses the key Enter."""
        key: dict[str, Any] = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and dialogs that opened, so far."""
        self.value("0")  # what happened before has been told by now
        found = []
        for event in self._browser.events:
            params = event.get("params", {})
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(str(params["entry"]))
            elif event["method"] == "Page.javascriptDialogOpening":
                found.append(str(params))
        return found


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser; the test is skipped where there is none."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(_NAMES)} is installed")
    browser = Browser(program, profile)
    try:
        yield browser
    finally:
        browser.close()


def _pipe() -> tuple[int, int]:
    """A pipe whose ends have large numbers."""
    ends = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for end in ends)
    for end in ends:
        os.close(end)
    return read, write
