"""A headless Chromium for tests of pages, driven over the DevTools protocol.

With --remote-debugging-pipe, Chromium reads commands from its file descriptor 3 and writes answers
to 4, each a JSON object and a zero byte. So the standard library is enough, and no port is open.

    with Browser() as browser:
        page = browser.open("http://127.0.0.1:8000/")
        page.wait_for("document.title === 'nanoserve'")
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from queue import Queue
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
PATIENCE = 20.0  # seconds for what takes milliseconds
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
)
# In the child: let 3 and 4 be the pipes, then become Chromium.
START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 16) for fd in sys.argv[1:3])
os.dup2(read, 3); os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One Chromium process with a profile of its own; it ends with the `with` block."""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        its_input, self._input = os.pipe()
        self._output, its_output = os.pipe()
        flags = [*FLAGS, f"--user-data-dir={self._profile.name}"]
        if hasattr(os, "getuid") and os.getuid() == 0:
            flags.append("--no-sandbox")  # Chromium does not start as root otherwise
        command = [sys.executable, "-c", START, str(its_input), str(its_output), CHROMIUM, *flags]
        self._process = subprocess.Popen(
            command,
            pass_fds=(its_input, its_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(its_input)
        os.close(its_output)
        self._answers: dict[int, Queue[Any]] = {}
        self.pages: dict[str, Page] = {}
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(PATIENCE)
        except Exception:
            self._process.kill()
            self._process.wait(PATIENCE)
        finally:
            os.close(self._input)
            self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """The result of one command. Raises RuntimeError if Chromium refuses it."""
        number = len(self._answers) + 1
        queue = self._answers[number] = Queue()
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._input, json.dumps(message).encode() + b"\0")
        answer = queue.get(timeout=2 * PATIENCE)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self) -> None:
        with os.fdopen(self._output, "rb") as output:
            rest = b""
            while data := os.read(output.fileno(), 1 << 16):
                *messages, rest = (rest + data).split(b"\0")
                for text in messages:
                    message = json.loads(text)
                    if "id" in message:
                        self._answers[message["id"]].put(message)
                    elif (page := self.pages.get(message.get("sessionId"))) is not None:
                        page.note(message["method"], message["params"])
        for queue in self._answers.values():
            queue.put({"error": {"message": "Chromium has ended"}})

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A new tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, target, attached["sessionId"])
        self.pages[page.session] = page
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.set_dark(dark)
        page.call("Page.navigate", url=url)
        page.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")
        return page


class Page:
    """One tab. `problems`: errors of its script, and what the browser has blocked."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser, self.target, self.session = browser, target, session
        self.problems: list[str] = []

    def note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def call(self, method: str, **params: Any) -> Any:
        return self.browser.call(method, self.session, **params)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; of a promise, what it brings."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Return when a JavaScript expression is true. Raises AssertionError after PATIENCE."""
        is_true = self.evaluate(
            f"""new Promise(done => {{
              const end = performance.now() + {1000 * PATIENCE};
              const look = () => {{
                let found = false;
                try {{ found = Boolean({condition}); }} catch {{ }}
                if (found || performance.now() > end) done(found); else setTimeout(look, 10);
              }};
              look();
            }})"""
        )
        assert is_true, f"waited in vain for {condition}; the page had {self.problems}"

    def click(self, selector: str) -> None:
        """A click with the mouse in the middle of an element."""
        x, y = self.middle_of(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def middle_of(self, selector: str) -> tuple[float, float]:
        """Where an element is in the window; it is scrolled into sight."""
        x, y = self.evaluate(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.scrollIntoView({{block: "center", behavior: "instant"}});
              const box = element.getBoundingClientRect();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        return x, y

    def type(self, selector: str, text: str) -> None:
        """Put the focus on an element and type."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            fields = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **fields,
            )

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def set_dark(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, file: str | Path, whole: bool = False) -> None:
        """A picture of the window, or of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        Path(file).write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.browser.pages.pop(self.session, None)
        self.browser.call("Target.closeTarget", targetId=self.target)
