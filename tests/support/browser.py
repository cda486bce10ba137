"""Headless Chromium, controlled through pipes by its debugging protocol."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
TIMEOUT = 60.0  # seconds for one answer; most take milliseconds

_CODES = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40, "PageDown": 34}


class Browser:
    """A browser process; `page(url)` opens a tab. Every message of the protocol ends with a zero byte."""

    def __init__(self, profile: Path) -> None:
        # The browser reads commands from descriptor 3 and writes to 4. High numbers here, so that neither is in use.
        ours, theirs = zip(*(self._pipe(), self._pipe()[::-1]), strict=True)

        def numbers() -> None:
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._process = subprocess.Popen(
            [str(CHROMIUM), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=numbers, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for descriptor in theirs:
            os.close(descriptor)
        self._write, self._read = ours
        self._buffer, self._count = b"", 0
        self.events: list[dict[str, Any]] = []

    @staticmethod
    def _pipe() -> tuple[int, int]:
        """Open a pipe with high descriptor numbers, and return (write, read)."""
        high = []
        for descriptor in reversed(os.pipe()):
            high.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100))
            os.close(descriptor)
        return high[0], high[1]

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result. Events are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def receive(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(end - time.monotonic(), 0))
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, "chromium: expected an answer, got none; see what it prints with these flags: " + " ".join(
                FLAGS
            )
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    @contextlib.contextmanager
    def page(self, url: str, *, size: tuple[int, int] = (1400, 900), scheme: str = "light") -> Iterator[Page]:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        try:
            for domain in ("Page", "Runtime", "Network", "Log"):
                page.call(f"{domain}.enable")
            page.call("Page.setLifecycleEventsEnabled", enabled=True)
            page.call(
                "Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False
            )
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            page.open(url)
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target)


class Page:
    """A tab. `evaluate` runs an expression in it. Keys and clicks are real input events."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        return [
            event["params"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] in methods
        ]

    def open(self, url: str = "") -> None:
        """Open or reload a page, and wait until it is loaded and drawn."""
        before = self._loads()
        if url:
            # The empty page before it may still report its own load.
            loader = self.call("Page.navigate", url=url)["loaderId"]
            while loader not in self._loads():
                self._browser.receive()
        else:
            self.call("Page.reload")
            while len(self._loads()) == len(before):
                self._browser.receive()
        self.frame()  # lists draw what is in sight once the page has its size

    def _loads(self) -> list[str]:
        """Return the finished page loads."""
        return [event["loaderId"] for event in self.events("Page.lifecycleEvent") if event["name"] == "load"]

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def texts(self, selector: str) -> list[str]:
        return self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText)")

    def press(self, *keys: str) -> None:
        for key in keys:
            code = _CODES.get(key, ord(key[0]))
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
        self.frame()

    def click(self, selector: str, *, across: float = 0.5, down: float = 0.5) -> None:
        """Click an element at a fraction of its width and height."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'nearest'}})")
        box = self.evaluate(
            f"(({{left, top, width, height}}) => [left + width * {across}, top + height * {down}])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        at = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)
        self.frame()

    def frame(self) -> None:
        """Wait for the next frame."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def go(self, fragment: str) -> None:
        """Change the part of the address after "#", as a link would."""
        self.evaluate(f"new Promise((done) => {{ addEventListener('hashchange', () => done(0), {{once: true}}); "
                      f"location.hash = {json.dumps(fragment)}; }})")  # fmt: skip
        self.frame()

    @property
    def errors(self) -> list[Any]:
        """Return exceptions, console errors and policy violations."""
        return self.events("Runtime.exceptionThrown", "Log.entryAdded")

    @property
    def requests(self) -> list[str]:
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]
