"""Headless Chromium for tests: pages that are looked at, clicked and typed into.

Owns the process and the little of Chromium's DevTools protocol that tests need. It is spoken over a pair of pipes
(`--remote-debugging-pipe`: JSON, each message ended by a NUL), so there is no port and no WebSocket. Everything that a
page complains of (exceptions, errors on its console, what its policy blocked) is collected in `Page.complaints`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAIT_S = 60.0

_RUN_WITH_PIPES = "import os, sys; os.dup2({read}, 3); os.dup2({write}, 4); os.execv(sys.argv[1], sys.argv[1:])"
"""The protocol's pipes have to be 3 and 4, which may be anything in this process."""


def chromium() -> str | None:
    """Where it is installed, if it is."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Page:
    """One tab of a browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._next = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """A command of the protocol; what it answers."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._next:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _message(self) -> Any:
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], WAIT_S)[0], "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        head, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(head)
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.complaints.append(str(params["args"]))
            case _:
                pass
        return message

    # --- what tests do ---

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show an address in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true; its value."""
        end = time.monotonic() + WAIT_S
        while not (found := self.value(expression)):
            assert time.monotonic() < end, f"never came true: {expression}; complaints: {self.complaints}"
            time.sleep(0.03)
        return found

    def text(self, selector: str) -> str:
        """The text of the first element that a selector finds."""
        return str(self.value(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        """Press the mouse on an element, where a person would see it."""
        found = json.dumps(selector)
        self.value(f"document.querySelector({found}).scrollIntoView({{block: 'center'}})")
        box = f"(() => {{ const b = document.querySelector({found}).getBoundingClientRect(); \
return [b.x + b.width / 2, b.y + b.height / 2, b.width]; }})()"
        x, y, width = self.value(box)
        assert width > 0, f"{selector} is not shown"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def fill(self, selector: str, text: str) -> None:
        """Type over what a field holds."""
        self.click(selector)
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int = 0, *, modifiers: int = 0) -> None:
        """A key on the keyboard, where the focus is."""
        about: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        text = {"Enter": "\r"}.get(key)
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select."""
        found = json.dumps(selector)
        self.value(
            f"(() => {{ const s = document.querySelector({found}); s.value = {json.dumps(value)}; "
            "s.dispatchEvent(new Event('change')); })()"
        )

    def screenshot(self, path: Path) -> None:
        """The window as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """A page of a new browser, whose profile is in `folder`."""
    path = chromium()
    assert path is not None
    to_child, from_child = os.pipe(), os.pipe()
    # High numbers, so that making 3 and 4 of them overwrites neither.
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 16) for end in (to_child[0], from_child[1]))
    flags = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
        "--disable-background-networking", "--disable-extensions", "--disable-component-update",
        "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}",
    )  # fmt: skip
    command = [sys.executable, "-c", _RUN_WITH_PIPES.format(read=read, write=write), path, *flags, "about:blank"]
    opened = [read, write, to_child[1], from_child[0]]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, pass_fds=(read, write), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        for end in (to_child[0], from_child[1]):
            os.close(end)
        for end in (read, write):
            os.close(end)
            opened.remove(end)
        page = Page(to_child[1], from_child[0])
        yield page
        page._session = None
        page.call("Browser.close")
    finally:
        for end in opened:
            os.close(end)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
