"""Real fakes, real sockets: start them, wait on conditions, leave nothing behind."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WAIT = 20.0
"""Seconds after which a condition that has not come is a failure; generous, the machine may be busy."""

FAKE_SIZE = 16384
"""Bytes of a fake's name in /dev/shm, unless --fake-shm-bytes says otherwise."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until the condition is true and return its value."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"waited {WAIT} s for: {what}")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Engine:
    """One running fake."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.pid = process.pid
        self._log = log
        self.streams: list[Stream] = []

    def stdout(self) -> str:
        return self._log.with_suffix(".out").read_bytes().decode(errors="replace")

    def stderr(self) -> str:
        return self._log.with_suffix(".err").read_bytes().decode(errors="replace")

    def ask(
        self, path: str, body: object = None, headers: dict[str, str] | None = None, seconds: float = WAIT
    ) -> tuple[int, bytes]:
        """Status and body; raises OSError while nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, payload, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def status(self, path: str) -> int:
        """The status, or 0 when refused or cut."""
        try:
            return self.ask(path)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def wait_ready(self) -> "Engine":
        until(lambda: self.status("/health") == 200, "health 200")
        return self

    def wait_exit(self) -> int:
        return self.process.wait(WAIT)

    def stream(self, tokens: int = 2000) -> "Stream":
        self.streams.append(Stream(self.port, tokens))
        return self.streams[-1]

    def members(self) -> dict[int, str]:
        """Living processes of the engine's group with their comm."""
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    stat = Path(f"/proc/{entry}/stat").read_text()
                except OSError:
                    continue
                comm = stat[stat.index("(") + 1 : stat.rindex(")")]
                fields = stat[stat.rindex(")") + 2 :].split()
                if int(fields[2]) == self.pid and fields[0] != "Z":
                    found[int(entry)] = comm
        return found

    def member(self, comm: str) -> int:
        """The pid of the member whose comm starts so."""

        def find() -> int:
            return next((pid for pid, name in self.members().items() if name.startswith(comm)), 0)

        return int(until(find, f"a process {comm}"))


class Stream:
    """An open streamed completion, read as raw bytes."""

    def __init__(self, port: int, tokens: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=WAIT)
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": "one two"}],
                "stream": True,
                "max_tokens": tokens,
                "ignore_eos": True,
            }
        ).encode()
        self._sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.received = b""

    def read_until(self, text: bytes) -> "Stream":
        while text not in self.received:
            data = self._sock.recv(65536)
            assert data, f"the stream ended before {text!r}: {self.received[-300:]!r}"
            self.received += data
        return self

    def read_to_end(self) -> bytes:
        """Everything up to the last chunk or the end of the connection."""
        while not self.received.endswith(b"0\r\n\r\n"):
            try:
                data = self._sock.recv(65536)
            except ConnectionResetError:
                break
            if not data:
                break
            self.received += data
        return self.received

    def is_silent_for(self, seconds: float) -> bool:
        """Whether neither a byte nor an end comes, after what was under way has been read."""
        self._sock.settimeout(seconds)
        try:
            for _ in range(1000):
                data = self._sock.recv(65536)
                if not data:
                    return False
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        self._sock.close()


Start = Callable[..., Engine]


@pytest.fixture
def engines_tmp() -> Iterator[Path]:
    """The TMPDIR of fakes. Short: they bind unix sockets in it, and tmp_path grows with the name of the test."""
    with tempfile.TemporaryDirectory(prefix="fake-") as folder:
        yield Path(folder)


@pytest.fixture
def start(tmp_path: Path, engines_tmp: Path) -> Iterator[Start]:
    """Start a fake: `start("vllm", "serve", "/m", fake flags..., env={...})`; `--port` is added."""
    started: list[Engine] = []

    def begin(*argv: str, env: dict[str, str] | None = None, port: int | None = None, with_port: bool = True) -> Engine:
        port = port or free_port()
        log = tmp_path / f"log{len(started)}"
        environment = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(engines_tmp),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "MARKER": "here",
            **(env or {}),
        }
        command = [sys.executable, "-m", "llmgw.fake.engine", *argv]
        if with_port:
            command += ["--port", str(port)]
        with log.with_suffix(".out").open("ab") as out, log.with_suffix(".err").open("ab") as err:
            process = subprocess.Popen(
                command, start_new_session=True, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        engine = Engine(process, port, log)
        started.append(engine)
        return engine

    before = set(os.listdir("/dev/shm"))
    yield begin
    for engine in started:
        for stream in engine.streams:
            stream.close()
        try:
            os.killpg(engine.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        engine.process.wait(WAIT)
        until(lambda engine=engine: not engine.members(), "the group to be gone")
    ours = [name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("psm_", "sem.mp-", "sglang_"))]
    for name in ours:
        # A fake's own have this size; a real engine's semaphores are in use though nobody seems to map them.
        if _size(name) == FAKE_SIZE and not any(f"/dev/shm/{name}" in maps for maps in _all_maps()):
            Path("/dev/shm", name).unlink(missing_ok=True)


def _size(name: str) -> int:
    try:
        return os.stat(f"/dev/shm/{name}").st_size
    except FileNotFoundError:
        return 0


def _all_maps() -> Iterator[str]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                yield Path(f"/proc/{entry}/maps").read_text()
            except OSError:
                continue


@pytest.fixture(name="until")
def until_fixture() -> Callable[[Callable[[], Any], str], Any]:
    """`until(condition, what)`: poll until the condition is true."""
    return until
