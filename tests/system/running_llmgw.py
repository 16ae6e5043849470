"""Drives a real `llmgw run` from outside, as its users and its service manager do: files, signals, the control socket.

Nothing of llmgw is imported but the client. What engines leave behind is judged from /proc and /dev/shm alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmgw.control import client
from tests.ports import engine_ports

Shard = dict[str, Any]
POLL = 0.05


class Llmgw:
    """One `llmgw run` on a file in a folder of its own. `close` ends it and whatever is left of its engines."""

    def __init__(self, shards: str, *, supervisor: str = "", patience: float = 60.0, env: dict[str, str] | None = None):
        # Short: engines put sockets of up to 107 bytes below it, and pytest's own folders have long names.
        self.folder = Path(tempfile.mkdtemp(prefix="lg-"))
        self.file = self.folder / "llmgw.toml"
        self.socket = str(self.folder / "run" / "control.sock")
        self.patience = patience
        self.process: subprocess.Popen[bytes] | None = None
        self._env = {**os.environ, "LLMGW_STRICT": "1", **(env or {})}
        self._supervisor = supervisor
        self._ports = engine_ports(10)
        self._sessions: set[int] = set()
        self.write(shards)

    def write(self, shards: str) -> None:
        folders = "".join(
            f'{key} = "{self.folder / name}"\n'
            for key, name in (("state_dir", "state"), ("runtime_dir", "run"), ("log_dir", "logs"))
        )
        first, last = self._ports
        self.file.write_text(
            f'[node]\nengine_ports = "{first}-{last}"\n[supervisor]\n{folders}{self._supervisor}\n{shards}'
        )
        # It may hold keys.
        self.file.chmod(0o600)

    # -- the process -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it and wait until it answers."""
        with open(self.folder / "llmgw.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llmgw", "run", str(self.file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        self.until(self._answers, "an answer on the control socket")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"llmgw run ended with {self.process.returncode}\n{self.log()}"
        try:
            return self.ask("GET", "/v1/status")["pid"] == self.process.pid
        except client.ClientError:
            return False

    def kill(self) -> None:
        """SIGKILL: what it can do nothing about."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end and wait; its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(self.patience)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One verb of the command line against this llmgw."""
        return subprocess.run(
            [sys.executable, "-m", "llmgw", "--socket", self.socket, *words],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=self.patience,
            check=False,
        )

    def close(self) -> None:
        self._remember_sessions()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for session in self._sessions:
            for pid in session_members(session):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- asking ------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str) -> dict[str, Any]:
        code, answer = client.request(self.socket, method, path, timeout=10.0)
        assert code < 400, answer
        return answer

    def shard(self, name: str) -> Shard:
        self._remember_sessions()
        return next(shard for shard in self.ask("GET", "/v1/status")["shards"] if shard["name"] == name)

    def _remember_sessions(self) -> None:
        # From the records: they are there when nobody answers too.
        self._sessions.update(pid for _, pid in client.living_engines(str(self.folder / "state")))

    def events(self, name: str) -> list[dict[str, Any]]:
        """What happened to a shard so far, in order."""
        return [event for event in client.stream(self.socket, "/v1/events?follow=false") if event["shard"] == name]

    def states(self, name: str) -> list[str]:
        """The states that a shard came through so far, each change once."""
        return [event["after"] for event in self.events(name) if event["before"] != event["after"]]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for a condition to hold and return its value; an AssertionError tells what was there instead."""
        deadline = time.monotonic() + self.patience
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {self.patience:g} s for {what}\n{self.log()}")
            time.sleep(POLL)

    def until_shard(self, name: str, condition: Callable[[Shard], Any], what: str) -> Shard:
        seen: list[Shard] = []

        def holds() -> bool:
            seen[:] = [self.shard(name)]
            return bool(condition(seen[0]))

        try:
            self.until(holds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\nlast seen: {json.dumps(seen, indent=1)}") from None
        return seen[0]

    def until_state(self, name: str, *states: str) -> Shard:
        """Wait for one of these states. A failure that was not waited for ends the wait at once."""

        def reached(shard: Shard) -> bool:
            if shard["state"] == "failed" and "failed" not in states:
                raise AssertionError(f"{name} failed: {json.dumps(shard['reason'], indent=1)}\n{self.log()}")
            return shard["state"] in states

        return self.until_shard(name, reached, f"{name} to be {' or '.join(states)}")

    def log(self) -> str:
        """The end of llmgw's own log and of every engine's, for messages of failures."""
        files = [self.folder / "llmgw.log", *sorted((self.folder / "logs").glob("*.log"))]
        texts = [
            f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-40:])
            for file in files
            if file.exists()
        ]
        return "\n".join(texts)

    # -- using an engine ---------------------------------------------------------------------------------

    def post(self, shard: Shard, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        """One request to an engine; the answer's JSON. 200 is asserted."""
        connection = connect(shard["endpoint"], self.patience)
        with contextlib.closing(connection):
            answer = send(connection, path, body, headers)
            data = answer.read()
        assert answer.status == 200, data
        return json.loads(data)

    def stream(self, shard: Shard, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Stream:
        """An open stream, read along in a thread; returns once its first bytes have arrived."""
        connection = connect(shard["endpoint"], self.patience)
        stream = Stream(connection, send(connection, path, {**body, "stream": True}, headers))
        self.until(lambda: stream.text or stream.ended, "the first bytes of a stream")
        return stream


def send(
    connection: http.client.HTTPConnection, path: str, body: dict[str, Any], headers: dict[str, str] | None
) -> http.client.HTTPResponse:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
    return connection.getresponse()


class Stream:
    """What arrived of a streamed answer so far, and how it ended."""

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._answer = answer
        self._parts: list[bytes] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while part := self._answer.read1():
                self._parts.append(part)
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        finally:
            self._connection.close()

    @property
    def text(self) -> str:
        return b"".join(self._parts).decode(errors="replace")

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_whole(self) -> bool:
        """Ended as a stream should: its last word said, and no error before it."""
        return self.ended and self.error is None and "data: [DONE]" in self.text and '"error"' not in self.text


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def connect(endpoint: str, timeout: float) -> http.client.HTTPConnection:
    """A connection to an endpoint as status shows it."""
    if endpoint.startswith("unix:"):
        return _UnixConnection(endpoint.removeprefix("unix:"), timeout)
    host, _, port = endpoint.rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=timeout)


# -- what is left, from /proc and /dev/shm -----------------------------------------------------------------


def session_members(session: int) -> list[int]:
    """Living processes of a session; the dead that nobody has reaped yet do not count."""
    found = []
    for pid, fields in _all_stats():
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(pid)
    return found


def processes_named(session: int, beginning: str) -> list[int]:
    """Members of a session whose kernel name begins so."""
    found = []
    for pid in session_members(session):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith(beginning):
                found.append(pid)
    return found


def _all_stats() -> Iterator[tuple[int, list[str]]]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{name}/stat").read_text()
                # After the last parenthesis: state, ppid, pgrp, session. The name before it may hold anything.
                yield int(name), text[text.rindex(")") + 2 :].split()


def shared_memory_of(session: int) -> set[str]:
    """Names in /dev/shm that members of a session have mapped."""
    found = set()
    for pid in session_members(session):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, mark, name = line.partition("/dev/shm/")
                if mark and not name.endswith("(deleted)"):
                    found.add(name)
    return found


def left_in_shared_memory(names: set[str]) -> set[str]:
    return {name for name in names if os.path.lexists(f"/dev/shm/{name}")}
