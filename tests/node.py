"""A whole llmgw in a folder of its own, driven from outside as its users do: files, signals, sockets, processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from llmgw.control.client import request
from llmgw.supervisor.leftovers import clear_traces
from llmgw.supervisor.records import RecordStore
from tests.ports import engine_ports

PATIENCE = 30.0
"""Seconds that a condition may take to come true. Generous, since the machine may be busy."""

FAKE = [sys.executable, "-m", "llmgw.fake.engine"]


def fake(*words: str) -> str:
    """A TOML array: the command of a fake engine (`fake("vllm", "serve")`), with its own knobs behind it."""
    return json.dumps([*FAKE, *words])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Node:
    """`with Node() as node: node.write(...); node.start()`. Leaving the block ends llmgw and whatever it left."""

    def __init__(self, **env: str) -> None:
        # Short on purpose: the temporary folder of a shard below it may have 60 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="lg"))
        self.config = self.folder / "llmgw.toml"
        self.state = self.folder / "s"
        self.socket = self.folder / "r" / "control.sock"
        self.env = {**os.environ, "LLMGW_STRICT": "1", **env}
        self.ports = engine_ports(40)
        self.process: subprocess.Popen[bytes] | None = None
        self.output = self.folder / "llmgw.out"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.output.exists():
            sys.stderr.write(f"--- output of llmgw\n{self.log()[-6000:]}\n")
        left = self.engine_processes()
        if self.process is not None and self.process.poll() is None:
            for patience in (0.3, 10.0):
                # Two signals at once may become one: the second comes when the first has been read.
                self.process.send_signal(signal.SIGTERM)
                try:
                    self.process.wait(patience)
                    break
                except subprocess.TimeoutExpired:
                    continue
            else:
                self.process.kill()
                self.process.wait()
        for process in {*left, *self.engine_processes()}:
            try:
                process.kill()
            except psutil.Error:
                continue
        # What a killed llmgw's engines leave outside of the folder: cgroups and names in /dev/shm.
        for record in RecordStore(str(self.state)).load_all().records:
            clear_traces(record, str(self.state))
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- llmgw itself --------------------------------------------------------------------------------------

    def write(self, text: str) -> None:
        """The configuration, with the folders of this node in front."""
        top = [line for line in text.splitlines() if line.startswith("include")]
        rest = "\n".join(line for line in text.splitlines() if not line.startswith("include"))
        if "engine_ports" not in rest:
            # Ports of its own: two test runs at once must not meet in each other's load.
            ports = f'[node]\nengine_ports = "{self.ports[0]}-{self.ports[1]}"\n'
            rest = rest.replace("[node]\n", ports, 1) if "[node]\n" in rest else ports + rest
        self.config.write_text(
            "\n".join(top) + f'\n[supervisor]\nstate_dir = "{self.state}"\nruntime_dir = "{self.folder}/r"\n'
            f'log_dir = "{self.folder}/l"\n{rest}\n'
        )

    def start(self, *, wait: bool = True, prefix: Sequence[str] = ()) -> int:
        """`llmgw run`; returns its pid when the control socket answers. `prefix`: a program that becomes it."""
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "llmgw", "run", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.env,
                start_new_session=True,
            )
        if wait:
            self.until(self.answers, "the control socket answers")
        return self.process.pid

    def answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"llmgw ended with {self.process.returncode}:\n{self.log()}")
        try:
            return bool(self.status()["pid"] == self.process.pid)
        except Exception:  # noqa: BLE001  (whatever it is, it does not answer yet)
            return False

    def kill(self) -> None:
        """SIGKILL to llmgw alone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self, number: signal.Signals = signal.SIGTERM, timeout: float = PATIENCE) -> int:
        """Signal llmgw and wait for its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def log(self) -> str:
        return self.output.read_text(errors="replace")

    def cli(self, *words: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """Run a verb against this node."""
        return subprocess.run(
            [sys.executable, "-m", "llmgw", "-s", str(self.socket), "-c", str(self.config), *words],
            capture_output=True,
            text=True,
            env=self.env,
            timeout=timeout,
            check=False,
        )

    # -- what it says --------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = 10) -> dict[str, Any]:
        status, answer = request(str(self.socket), method, path, body, timeout=timeout)
        return {**answer, "http": status}

    def status(self) -> dict[str, Any]:
        return self.ask("GET", "/v1/status")

    def shard(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(shard for shard in self.status()["shards"] if shard["name"] == name)
        return found

    def state_of(self, name: str) -> str:
        return str(self.shard(name)["state"])

    def conditions(self, name: str) -> dict[str, str]:
        return {condition["kind"]: condition["text"] for condition in self.shard(name)["conditions"]}

    def wait_state(self, name: str, *states: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """Wait for one of the states; returns the shard."""
        self.until(lambda: self.state_of(name) in states, f"{name} is {' or '.join(states)}", timeout)
        return self.shard(name)

    def until(self, condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> None:
        """Wait until `condition()` is true; fails with `what` and the last status otherwise."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                try:
                    last = json.dumps(self.status()["shards"], indent=1)
                except Exception as error:  # noqa: BLE001  (only to show it)
                    last = repr(error)
                raise AssertionError(f"not within {timeout:g} s: {what}\n{last}")
            time.sleep(0.02)

    def events(self) -> list[dict[str, Any]]:
        result = self.cli("events", "--json")
        return [json.loads(line) for line in result.stdout.splitlines()]

    # -- what is really there ------------------------------------------------------------------------------

    def engine_processes(self) -> list[psutil.Process]:
        """Every living process that carries the mark of a shard of this node, or has its folder in its command."""
        mark = str(self.folder)
        found = []
        for process in psutil.process_iter():
            if process.pid == os.getpid() or (self.process is not None and process.pid == self.process.pid):
                continue
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                environ = process.environ()
                if environ.get("TMPDIR", "").startswith(mark) and "LLMGW_SHARD_ID" in environ:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.state / "shards").glob("*.json"))]

    def leftovers(self) -> list[str]:
        """Files that a shard leaves only when something went wrong."""
        found = [
            *(self.state / "tmp").glob("*"),
            *(self.state / "shards").glob("*"),
            *(self.folder / "r").glob("*.sock"),
        ]
        return sorted(str(path) for path in found if path != self.socket)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
