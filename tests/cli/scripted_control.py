"""A control server of a few lines: scripted answers over a real unix socket, and the real command beside it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Answer = tuple[int, Any]
"""HTTP status and a JSON value; a list becomes an NDJSON stream."""
Script = Callable[[str, str, Any], Answer]

NOW = 1_000_000.0


def a_shard(name: str = "embed", **changes: Any) -> dict[str, Any]:
    """A ready shard as it stands in the status, with changes."""
    shard = {
        "name": name,
        "shard": name.partition("/")[0],
        "replica": 0,
        "model": "bge-m3",
        "engine": "vllm",
        "state": "ready",
        "since": NOW - 74,
        "conditions": [],
        "progress": None,
        "reason": None,
        "detail": "",
        "pid": 4711,
        "pgid": 4711,
        "adopted": False,
        "generation": 1,
        "launched_at": NOW - 90,
        "restarts": 0,
        "failures": 0,
        "attempt_limit": 5,
        "next_attempt": None,
        "endpoint": "http://127.0.0.1:8104",
        "gpus": ["7"],
        "activity": {"running": 0, "waiting": 0, "tokens_per_second": None, "kv_usage": None},
        "routable": True,
        "intent": {"wish": "start", "by": "file", "at": NOW - 1000, "operator": False},
        "config_hash": "abc",
        "load_seconds": 16.0,
        "log": {"lines": 10, "skipped": 0, "last": ""},
    }
    return {**shard, **changes}


def a_status(*shards: dict[str, Any], **changes: Any) -> dict[str, Any]:
    status = {
        "api": 1,
        "llmgw": "0.1.0",
        "pid": 812,
        "node": "gpu-01",
        "started": NOW - 277_200,
        "now": NOW,
        "revision": 7,
        "config": {"path": "/etc/llmgw/llmgw.toml", "error": None},
        "hardware": "8x h100-80g",
        "stopping": None,
        "warnings": [],
        "shards": list(shards),
    }
    return {**status, **changes}


class ControlServer:
    """Answers each request by `script(method, path, body)`; keeps what was asked."""

    def __init__(self, path: Path, script: Script) -> None:
        self.path = str(path)
        self.asked: list[tuple[str, str, Any]] = []
        self._script = script
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._answer, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                more = connection.recv(65536)
                if not more:
                    return
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            method, path, _ = lines[0].split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            length = int(headers.get("content-length", 0))
            while len(body) < length:
                body += connection.recv(65536)
            given = json.loads(body) if body else None
            self.asked.append((method, path, given))
            status, answer = self._script(method, path, given)
            if isinstance(answer, list):
                content = "".join(json.dumps(line) + "\n" for line in answer).encode()
                fields = "Content-Type: application/x-ndjson\r\n"
            else:
                content = json.dumps(answer).encode()
                fields = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            try:
                connection.sendall(f"HTTP/1.1 {status} X\r\n{fields}\r\n".encode() + content)
            except OSError:
                pass


def environment(**changes: str) -> dict[str, str]:
    """A plain environment: no colours, no socket or file of the person who runs the tests."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    return {**kept, "PYTHONUTF8": "1", "PYTHONWARNINGS": "error", **changes}


def llmgw(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """The real command, to its end, with pipes."""
    return subprocess.run(
        [sys.executable, "-m", "llmgw", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=env or environment(),
        cwd=cwd,
        timeout=timeout,
        check=False,
    )
