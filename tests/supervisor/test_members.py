"""Evidence for whose a process is."""

from __future__ import annotations

import os
import signal
from typing import Any

from llmgw.supervisor.members import Kinship, scan
from llmgw.supervisor.procfs import read_stat, ticks_now

PROGRAM = """
import os, sys, time
wiped = [sys.executable, '-u', '-c', 'import os, time; print("worker", os.getpid()); time.sleep(600)']
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, wiped, {})
    time.sleep(600)
time.sleep(600)
"""


async def test_what_was_seen_once_is_ours_after_parents_and_marker_are_gone(launcher: Any) -> None:
    engine = await launcher.start_until(launcher.command(PROGRAM), "worker")
    worker = int(launcher.output().split()[1])
    before = engine.members()
    assert worker in [member.pid for member in before]
    for member in before:
        if member.pid != worker:
            os.kill(member.pid, signal.SIGKILL)
    await launcher.wait_until(lambda: (stat := read_stat(worker)) is not None and stat.ppid == os.getpid())
    await launcher.wait_until(lambda: [member.pid for member in engine.members()] == [worker])
    assert [member.pid for member in await engine.scan_members()] == [worker]


def test_llmgw_itself_and_init_are_nobodys_members() -> None:
    me = read_stat(os.getpid())
    assert me is not None
    everything = Kinship({me.pid: me.start, 1: 0}, {me.session: ticks_now()})
    members, _ = scan(everything, cgroup_pids=(1, os.getpid()))
    assert not {1, os.getpid()} & {member.pid for member in members}


def test_without_evidence_there_are_no_members() -> None:
    members, known = scan(Kinship({}, {999_999_999: ticks_now()}, run_id="nobody"))
    assert members == ()
    assert known.seen == {}
