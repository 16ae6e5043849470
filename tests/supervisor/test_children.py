"""The registry and the reaper: exit codes of our own, zombies of strangers."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import trio

from llmgw.supervisor.children import Children
from llmgw.supervisor.procfs import read_stat
from llmgw.supervisor.tools import run_tool

ORPHANS = """
import os, sys
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            os._exit(0)
        os._exit(0)
    os.wait()
"""


async def test_no_exit_code_is_lost_beside_sixty_quick_orphans(launcher: Any) -> None:
    children = launcher.children
    assert children.subreaper
    codes: list[int | None] = []

    async def ask(code: int) -> None:
        result = await run_tool(children, [sys.executable, "-S", "-c", f"raise SystemExit({code})"], timeout=60.0)
        codes.append(result.code)

    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(run_tool, children, [sys.executable, "-c", ORPHANS, "60"], timeout=60.0))
            for code in range(20):
                nursery.start_soon(ask, code)
    assert sorted(code for code in codes if code is not None) == list(range(20))
    await launcher.wait_until(lambda: not zombies(children))


def zombies(children: Children) -> list[int]:
    me = os.getpid()
    stats = [read_stat(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
    return [s.pid for s in stats if s is not None and s.ppid == me and s.state == "Z" and s.pid not in children]


async def test_a_registered_child_is_left_to_its_owner_and_a_forgotten_one_is_reaped(launcher: Any) -> None:
    children = launcher.children
    pid = children.start(
        ["sh", "-c", "exit 7"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    await launcher.wait_until(lambda: (stat := read_stat(pid)) is not None and stat.state == "Z")
    assert children.reap_strangers() == 0
    pidfd = os.pidfd_open(pid)
    try:
        assert children.reap(pid, pidfd) == 7
        assert children.reap(pid, pidfd) is None
    finally:
        os.close(pidfd)
    assert pid not in children
    other = children.start(["true"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children.forget(other)
    await launcher.wait_until(lambda: children.reap_strangers() or read_stat(other) is None)
    assert read_stat(other) is None
