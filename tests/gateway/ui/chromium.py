"""A real browser, driven over a pipe by its own protocol (DevTools): no port that others could reach, no library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    return next((path for name in PROGRAMS if (path := shutil.which(name)) is not None), None)


class Browser:
    """One browser with one page. Its calls block: use it in a thread."""

    def __init__(self) -> None:
        program = find()
        assert program is not None
        self._profile = tempfile.mkdtemp(prefix="llmgw-ui-")
        read_ours, write_ours = os.pipe(), os.pipe()
        # The browser reads from 3 and writes to 4.
        script = 'exec "$0" "$@" 3<&"$IN" 4>&"$OUT"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            env={**os.environ, "IN": str(write_ours[0]), "OUT": str(read_ours[1])},
            pass_fds=(write_ours[0], read_ours[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(write_ours[0])
        os.close(read_ours[1])
        self._out = os.fdopen(write_ours[1], "wb", buffering=0)
        self._in = os.fdopen(read_ours[0], "rb")
        self._pending = b""
        self._count = 0
        self._is_loaded = False
        self._session: str | None = None
        self.errors: list[str] = []
        """What the page's console and its policy complained about."""
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def send_header(self, name: str, value: str) -> None:
        """With every request from here on."""
        self._call("Network.setExtraHTTPHeaders", headers={name: value})

    def go(self, address: str) -> None:
        self._is_loaded = False
        self._call("Page.navigate", url=address)
        while not self._is_loaded:
            self._note(self._next())

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression in the page is true."""
        look = f"({condition}) ? done(true) : Date.now() > end ? fail(document.body.innerText) : setTimeout(look, 20)"
        start = "const end = Date.now() + 20000; const look = () => { " + look + " }; look();"
        poll = "new Promise((done, fail) => { " + start + " })"
        assert self.run(poll) is True

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, message: dict[str, Any]) -> None:
        match message.get("method"):
            case "Log.entryAdded" if message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            case "Page.loadEventFired":
                self._is_loaded = True

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            data = self._in.raw.read(1 << 16)  # type: ignore[attr-defined]
            assert data, "the browser has ended"
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message
