"""Headless Chromium, controlled over pipes by the Chrome DevTools Protocol."""

import base64
import json
import os
import subprocess
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

SECONDS = 60.0
"""Maximum seconds to wait for anything."""
_FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--remote-debugging-pipe",
    ),
)


class Browser:
    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def take_pipes() -> None:
            """Move the pipes to descriptors 3 and 4, which the browser reads and writes."""
            high_in, high_out = os.dup2(theirs_in, 100), os.dup2(theirs_out, 101)
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        command = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        with open(os.devnull, "wb") as nothing:
            self._process = subprocess.Popen(
                command, stdout=nothing, stderr=nothing, close_fds=False, preexec_fn=take_pipes
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._ids = count(1)
        self._buffer = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        """Console messages and uncaught exceptions of the page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Return the result of one command."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            response = self._read()
            if response.get("id") == number:
                assert "error" not in response, (method, response["error"])
                return response["result"]

    def _read(self) -> Any:
        while b"\0" not in self._buffer:
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        body, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(body)
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(str(message["params"]["entry"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(message["params"]["args"]))
        return message

    def look(self, wide: int, high: int, scheme: str) -> None:
        """Set the screen's size in CSS pixels and its colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=wide,
            height=high,
            deviceScaleFactor=1,
            mobile=wide < 500,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def open(self, url: str, headers: dict[str, str] | None = None) -> None:
        """Open a page and wait until it is loaded."""
        self.call("Network.setExtraHTTPHeaders", headers=headers or {})
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script: str, holds: Callable[[Any], bool] = bool) -> Any:
        """Wait until the value of an expression in the page holds; returns the value."""
        end = time.monotonic() + SECONDS
        while not holds(value := self.run(script)):
            assert time.monotonic() < end, (script, value)
            time.sleep(0.05)
        return value

    def write(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        code = {"Enter": 13, "Tab": 9}[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call(
            "Input.dispatchKeyEvent",
            type="keyDown",
            **common,
            **({"text": "\r"} if key == "Enter" else {}),
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, file: Path) -> None:
        """Save a screenshot as a PNG file."""
        file.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(SECONDS)
        os.close(self._in)
        os.close(self._out)
