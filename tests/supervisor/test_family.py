"""Stopping, with real processes: whoever belongs to a shard is found and ended, and nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import trio

from llmgw.board import Cell
from llmgw.supervisor.family import EngineProcesses, StopOutcome
from llmgw.supervisor.procfs import read_stat

SLEEPER = "import time; print('up'); time.sleep(600)"

FORKING = """
import os, signal, sys, time
def child(setup):
    if os.fork() == 0:
        setup()
        print('worker', os.getpid(), flush=True)
        while True:
            time.sleep(600)
def ignore():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


async def stop(engine: EngineProcesses, **overrides: Any) -> StopOutcome:
    options: dict[str, Any] = {"term_to": "group", "stop_timeout": 10.0, "hurry": Cell(False), **overrides}
    with trio.fail_after(30):
        return await engine.stop(**options)


def is_running(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state != "Z"


def workers(launcher: Any) -> list[int]:
    return [int(line.split()[1]) for line in launcher.output().splitlines() if line.startswith("worker")]


async def test_an_engine_that_obeys_is_gone_after_sigterm(launcher: Any) -> None:
    engine = await launcher.start_until(launcher.command(SLEEPER), "up")
    steps: list[str] = []
    outcome = await stop(engine, on_step=steps.append)
    assert outcome.kind == "gone-term"
    assert steps == ["SIGTERM to the group"]
    assert (await engine.wait_exit()).code == -signal.SIGTERM
    assert read_stat(engine.leader.pid) is None


async def test_the_leader_alone_hears_sigterm_when_it_drains_its_workers_itself(launcher: Any) -> None:
    program = (
        FORKING
        + """
def loud():
    signal.signal(signal.SIGTERM, lambda *_: print('worker was told', flush=True))
child(loud)
def leave(*_):
    print('leader was told', flush=True)
    time.sleep(0.3)
    os.killpg(0, signal.SIGKILL)
signal.signal(signal.SIGTERM, leave)
print('up', flush=True)
while True:
    time.sleep(600)
"""
    )
    engine = await launcher.start_until(launcher.command(program), "up")
    await launcher.wait_output("worker ")
    outcome = await stop(engine, term_to="leader")
    assert outcome.kind == "gone-term"
    assert "leader was told" in launcher.output()
    assert "worker was told" not in launcher.output()


async def test_a_worker_that_ignores_sigterm_is_killed(launcher: Any) -> None:
    engine = await launcher.start_until(launcher.command(FORKING + "child(ignore)\ntime.sleep(600)"), "worker")
    (worker,) = workers(launcher)
    outcome = await stop(engine, stop_timeout=0.3, last_words=0.2)
    assert outcome.kind == "gone-kill"
    assert not is_running(worker)


@pytest.mark.parametrize("leave", ["os.setsid()", "os.setpgrp()"])
async def test_a_worker_that_left_the_group_is_ended_too(launcher: Any, leave: str) -> None:
    program = FORKING + f"def leave():\n    {leave}\n    ignore()\nchild(leave)\ntime.sleep(600)"
    engine = await launcher.start_until(launcher.command(program), "worker")
    (worker,) = workers(launcher)
    outcome = await stop(engine, stop_timeout=0.3, last_words=0.2)
    assert outcome.kind == "gone-kill"
    assert not is_running(worker)


async def test_a_double_forked_daemon_is_found_by_its_marker(launcher: Any) -> None:
    program = (
        FORKING
        + """
if os.fork() == 0:
    os.setsid()
    child(ignore)
    os._exit(0)
os.wait()
time.sleep(600)
"""
    )
    engine = await launcher.start_until(launcher.command(program), "worker")
    (worker,) = workers(launcher)
    await launcher.wait_until(lambda: (stat := read_stat(worker)) is not None and stat.ppid == os.getpid())
    assert worker in [member.pid for member in engine.members()]
    await stop(engine, stop_timeout=0.3, last_words=0.2)
    assert not is_running(worker)


async def test_workers_of_a_killed_leader_are_ended_and_the_exit_is_seen_in_spite_of_the_open_pipe(
    launcher: Any,
) -> None:
    engine = await launcher.start_until(launcher.command(FORKING + "child(ignore)\ntime.sleep(600)"), "worker")
    (worker,) = workers(launcher)
    os.kill(engine.leader.pid, signal.SIGKILL)
    with trio.fail_after(10):
        assert (await engine.wait_exit()).code == -signal.SIGKILL
    assert is_running(worker)
    steps: list[str] = []
    outcome = await stop(engine, stop_timeout=600.0, last_words=0.2, on_step=steps.append)
    assert steps == ["SIGTERM to the rest", "SIGKILL"]
    assert outcome.kind == "gone-kill"
    assert not is_running(worker)


async def test_a_leader_is_reaped_last(launcher: Any) -> None:
    engine = await launcher.start_until(launcher.command(FORKING + "child(ignore)\ntime.sleep(600)"), "worker")
    os.kill(engine.leader.pid, signal.SIGKILL)
    await engine.wait_exit()
    # The reaper of strangers is at work, but the number of a registered child stays taken.
    subprocess.run(["true"], check=True)
    await trio.testing.wait_all_tasks_blocked(0.05)
    stat = read_stat(engine.leader.pid)
    assert stat is not None and stat.state == "Z"
    await stop(engine, last_words=0.1)
    assert read_stat(engine.leader.pid) is None


async def test_a_group_of_zombies_only_counts_as_gone(launcher: Any) -> None:
    program = "import os\nif os.fork() == 0:\n    os._exit(0)\nprint('up', flush=True)\nimport time; time.sleep(600)"
    engine = await launcher.start_until(launcher.command(program), "up")
    os.kill(engine.leader.pid, signal.SIGKILL)
    await engine.wait_exit()
    assert engine.members() == ()
    outcome = await stop(engine, stop_timeout=600.0)
    assert outcome.kind == "gone"


async def test_a_zombie_leader_with_a_living_thread_is_not_dead(launcher: Any) -> None:
    program = """
import ctypes, threading, time
threading.Thread(target=lambda: time.sleep(600)).start()
print('up', flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit of the main thread alone
"""
    engine = await launcher.start_until(launcher.command(program), "up")
    await launcher.wait_until(lambda: (stat := read_stat(engine.leader.pid)) is not None and stat.state == "Z")
    assert engine.is_leader_alive()
    assert [(member.pid, member.state) for member in engine.members()] == [(engine.leader.pid, "Z")]
    outcome = await stop(engine, stop_timeout=0.3, last_words=0.2)
    assert outcome.kind in ("gone-term", "gone-kill")
    assert engine.members() == ()


async def test_a_wrapper_that_leaves_without_telling_its_engine_does_not_save_it(launcher: Any) -> None:
    wrapper = """
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, '-u', '-c', sys.argv[1]], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
signal.pause()
"""
    inner = "import time, os; print('worker', os.getpid()); time.sleep(600)"
    engine = await launcher.start_until(launcher.command(wrapper, inner), "worker")
    (worker,) = workers(launcher)
    outcome = await stop(engine, term_to="leader")
    assert outcome.kind == "gone-term"
    assert not is_running(worker)


async def test_an_engine_behind_a_shell_that_does_not_exec_is_reached(launcher: Any) -> None:
    inner = [sys.executable, "-u", "-c", "import time, os; print('worker', os.getpid()); time.sleep(600)"]
    command = launcher.command_of("bash", "-c", '"$@"; true', "x", *inner)
    engine = await launcher.start_until(command, "worker")
    (worker,) = workers(launcher)
    assert worker != engine.leader.pid
    assert (await stop(engine)).kind == "gone-term"
    assert not is_running(worker)


async def test_a_wrapper_that_execs_late_keeps_its_identity(launcher: Any) -> None:
    script = (
        f"import os, sys, time; time.sleep(0.5); os.execv(sys.executable, [sys.executable, '-u', '-c', {SLEEPER!r}])"
    )
    engine = await launcher.start_until(launcher.command(script), "up")
    stat = read_stat(engine.leader.pid)
    assert stat is not None and stat.start == engine.leader.start_ticks
    assert (await stop(engine)).kind == "gone-term"


async def test_a_decoy_with_the_same_command_line_survives(launcher: Any) -> None:
    command = launcher.command(SLEEPER)
    engine = await launcher.start_until(command, "up")
    decoy = subprocess.Popen(command.argv, stdout=subprocess.DEVNULL, start_new_session=True)
    launcher.children.register(decoy.pid)
    try:
        assert decoy.pid not in [member.pid for member in engine.members()]
        await stop(engine, term_to=None)
        assert decoy.poll() is None
    finally:
        decoy.kill()
        decoy.wait()


async def test_hurry_shortens_the_wait_to_sigkill(launcher: Any) -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
    engine = await launcher.start_until(launcher.command(program), "up")
    hurry = Cell(False)
    steps: list[str] = []

    def on_step(step: str) -> None:
        steps.append(step)
        hurry.set(True)

    outcome = await stop(engine, stop_timeout=600.0, hurry=hurry, on_step=on_step)
    assert steps == ["SIGTERM to the group", "SIGKILL"]
    assert outcome.kind == "gone-kill"
    assert outcome.seconds < 25


async def test_a_second_stop_joins_the_first(launcher: Any) -> None:
    program = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))
print('up', flush=True)
end = time.monotonic() + 600
while time.monotonic() < end:
    time.sleep(1)
"""
    engine = await launcher.start_until(launcher.command(program), "up")
    outcomes: list[StopOutcome] = []

    async def ask() -> None:
        outcomes.append(await stop(engine, stop_timeout=0.5, last_words=0))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(ask)
    assert [outcome.kind for outcome in outcomes] == ["gone-kill", "gone-kill"]
    assert launcher.output().count("told") == 1


async def test_a_stop_that_was_cancelled_is_finished_by_the_next_one(launcher: Any) -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
    engine = await launcher.start_until(launcher.command(program), "up")
    with trio.move_on_after(0.3) as scope:
        await stop(engine, stop_timeout=600.0)
    assert scope.cancelled_caught
    assert engine.is_leader_alive()
    assert (await stop(engine, term_to=None)).kind == "gone-kill"


async def test_term_to_none_kills_at_once_and_asks_about_the_living_first(launcher: Any) -> None:
    engine = await launcher.start_until(launcher.command(SLEEPER), "up")
    asked: list[int] = []
    engine.before_kill = lambda members: asked.extend(member.pid for member in members if is_running(member.pid))
    steps: list[str] = []
    outcome = await stop(engine, term_to=None, on_step=steps.append)
    assert outcome.kind == "gone-kill"
    assert steps == ["SIGKILL"]
    assert asked == [engine.leader.pid]


async def test_the_loss_of_a_member_is_noticed(launcher: Any) -> None:
    engine = await launcher.start_until(launcher.command(FORKING + "child(ignore)\ntime.sleep(600)"), "worker")
    (worker,) = workers(launcher)
    members = engine.members()
    assert {member.pid for member in members} == {engine.leader.pid, worker}
    os.kill(worker, signal.SIGKILL)
    with trio.fail_after(10):
        assert (await engine.wait_member_exit(members)).pid == worker
    assert engine.owns(engine.leader.pid)
    assert not engine.owns(worker)


async def test_names_of_descendants_are_read_without_a_walk_through_proc(launcher: Any) -> None:
    program = """
import ctypes, os, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b'VLLM::EngineCore', 0, 0, 0)
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b'VLLM::Worker_TP0', 0, 0, 0)
        print('up', flush=True)
    time.sleep(600)
time.sleep(600)
"""
    engine = await launcher.start_until(launcher.command(program), "up")
    assert set(engine.names()) >= {"VLLM::EngineCor", "VLLM::Worker_TP"}
    await stop(engine, term_to=None)
    assert engine.names() == ()


async def test_what_cannot_be_killed_is_reported_and_a_later_stop_ends_it(
    launcher: Any, freezer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmgw.supervisor.family.KILL_WAIT", 1.0)
    engine = await launcher.start_until(launcher.command(SLEEPER), "up")
    freezer.freeze(engine.leader.pid)
    outcome = await stop(engine, stop_timeout=0.2, last_words=0.1)
    assert outcome.kind == "unkillable"
    assert [member.pid for member in outcome.leftover] == [engine.leader.pid]
    assert engine.leader.pid in launcher.children
    assert engine.is_leader_alive()
    freezer.thaw()
    assert (await stop(engine, term_to=None)).kind in ("gone-kill", "gone-term")
    assert engine.leader.pid not in launcher.children
