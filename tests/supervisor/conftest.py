"""Small real programs, started the way engines are."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from llmgw.board import Cell
from llmgw.domain.shard import Command
from llmgw.supervisor.cgroup import Cgroup
from llmgw.supervisor.processes import Children, EngineProcesses, spawn_engine
from llmgw.supervisor.procfs import all_pids, environment_value

T = TypeVar("T")


FREEZER = "/sys/fs/cgroup/freezer"


class Freezer:
    """A version 1 freezer: what is frozen in it does not even die of SIGKILL, as if stuck in a driver."""

    def __init__(self, path: str) -> None:
        self.path = path

    def freeze(self, pid: int) -> None:
        self._write("cgroup.procs", str(pid))
        self._write("freezer.state", "FROZEN")

    def thaw(self) -> None:
        self._write("freezer.state", "THAWED")

    def _write(self, name: str, text: str) -> None:
        with open(f"{self.path}/{name}", "w") as file:
            file.write(text)


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    path = f"{FREEZER}/llmgw-test-{os.getpid()}"
    try:
        os.mkdir(path)
    except OSError:
        pytest.skip("no cgroup v1 freezer may be made here")
    if not os.path.exists(f"{path}/freezer.state"):
        os.rmdir(path)
        pytest.skip("no cgroup v1 freezer here")
    frozen = Freezer(path)
    yield frozen
    frozen.thaw()
    for _ in range(200):
        try:
            os.rmdir(path)
            break
        except OSError:
            time.sleep(0.05)


class Launcher:
    """Starts Python programs through the gate. `run_id` marks them all, so that nothing of a test outlives it."""

    def __init__(self, children: Children, folder: Path) -> None:
        self.children = children
        self.folder = folder
        self.log = folder / "output.log"
        self.run_id = f"test-{os.getpid()}-{folder.name}"
        self.engines: list[EngineProcesses] = []
        self.hurry: Cell[bool] = Cell(False)

    def command(self, program: str, *arguments: str) -> Command:
        path = self.folder / f"program{len(list(self.folder.glob('program*')))}.py"
        path.write_text(program)
        return self.command_of(sys.executable, "-u", str(path), *arguments)

    def command_of(self, *argv: str, env: dict[str, str] | None = None) -> Command:
        marked = {"PATH": os.environ["PATH"], "LLMGW_RUN_ID": self.run_id, **(env or {})}
        return Command(argv=argv, env=marked, cwd=str(self.folder))

    def start(self, command: Command, *, cgroup: Cgroup | None = None) -> EngineProcesses:
        child = spawn_engine(self.children, command, log_path=str(self.log), cgroup=cgroup)
        self.engines.append(child.engine)
        child.open_gate()
        return child.engine

    async def start_until(self, command: Command, word: str, *, cgroup: Cgroup | None = None) -> EngineProcesses:
        engine = self.start(command, cgroup=cgroup)
        await self.wait_output(word)
        return engine

    async def wait_output(self, word: str) -> str:
        return await self.wait_until(lambda: text if word in (text := self.output()) else None)

    async def wait_until(self, condition: Callable[[], T | None]) -> T:
        """The first truthy answer; looks every 10 ms for at most 20 s."""
        with trio.fail_after(20):
            while True:
                answer = condition()
                if answer:
                    return answer
                await trio.sleep(0.01)

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
async def launcher(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Launcher]:
    children = Children()
    await nursery.start(children.serve)
    made = Launcher(children, tmp_path)
    yield made
    for engine in made.engines:
        engine.close()
    kill_marked(made.run_id)


def kill_marked(run_id: str) -> None:
    for pid in all_pids():
        if environment_value(pid, "LLMGW_RUN_ID") == run_id:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
