"""cgroup v2: parsing anywhere, the real thing where one may be made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from llmgw.board import Cell
from llmgw.supervisor.cgroup import Cgroup, find_mount, find_own_cgroup, unit_path
from llmgw.supervisor.procfs import read_stat


@pytest.mark.parametrize(
    ("line", "mount"),
    [
        ("30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate", "/sys/fs/cgroup"),
        ("33 29 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw", "/sys/fs/cgroup/unified"),
        ("34 29 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory", None),
        ("", None),
    ],
)
def test_the_mount_is_found_on_pure_and_hybrid_hosts(line: str, mount: str | None) -> None:
    assert find_mount(f"1 1 0:1 / / rw - ext4 /dev/sda rw\n{line}\n") == mount


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/system.slice/llmgw.service\n", "/system.slice/llmgw.service"),
        ("0::/system.slice/llmgw.service/supervisor\n", "/system.slice/llmgw.service"),
        ("12:memory:/x\n0::/\n", "/"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "/user.slice/user-1000.slice/session-3.scope"),
        ("4:memory:/x\n", None),
    ],
)
def test_the_unit_is_found_without_its_subgroup(text: str, path: str | None) -> None:
    assert unit_path(text) == path


def test_a_plain_folder_is_no_cgroup(tmp_path: Path) -> None:
    assert Cgroup.create("shard-a.1", str(tmp_path)) is None
    assert Cgroup.create("shard-a.1", None) is None
    assert Cgroup.create("shard-a.1", "/nonexistent") is None
    assert Cgroup.at(str(tmp_path)) is None
    assert os.listdir(tmp_path) == []


@pytest.fixture
def parent() -> Iterator[str]:
    own = find_own_cgroup()
    made = Cgroup.create(f"llmgw-test.{os.getpid()}", own)
    if made is None:
        pytest.skip("no cgroup v2 may be made here")
    yield made.path
    made.kill()
    made.remove()


async def test_a_worker_in_another_session_without_a_marker_dies_with_its_cgroup(launcher: Any, parent: str) -> None:
    cgroup = Cgroup.create("shard-a/0.1", parent)
    assert cgroup is not None
    assert cgroup.path == f"{parent}/shard-a-0.1"
    program = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    inner = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'
    os.execve(sys.executable, [sys.executable, '-c', inner], {})
os.wait()
time.sleep(600)
"""
    engine = launcher.start(launcher.command(program), cgroup=cgroup)
    assert engine.cgroup == cgroup
    await launcher.wait_until(lambda: launcher.output().endswith("\n"))
    worker = int(launcher.output())
    assert cgroup.populated() is True
    assert set(cgroup.pids()) >= {engine.leader.pid, worker}
    assert worker in [member.pid for member in engine.members()]
    with trio.fail_after(30):
        outcome = await engine.stop(term_to=None, stop_timeout=1.0, hurry=Cell(False))
    assert outcome.kind == "gone-kill"
    stat = read_stat(worker)
    assert stat is None or stat.state == "Z"
    assert not os.path.exists(cgroup.path)


def test_a_group_that_exists_is_never_shared(parent: str) -> None:
    first = Cgroup.create("shard-a.1", parent)
    second = Cgroup.create("shard-a.1", parent)
    assert first is not None and second is not None
    assert first != second
    assert first.populated() is False
    os.mkdir(f"{first.path}/made-by-the-engine")
    assert first.remove()
    assert second.remove()
