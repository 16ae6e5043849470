"""Small tools with a limit."""

from __future__ import annotations

import os
import sys
from typing import Any

import trio

from llmgw.supervisor.procfs import read_stat
from llmgw.supervisor.tools import SoleTool, run_tool


async def test_output_and_exit_code_come_back(launcher: Any) -> None:
    result = await run_tool(launcher.children, ["sh", "-c", "echo out; echo err >&2; exit 3"], timeout=20.0)
    assert (result.code, result.stdout, result.stderr, result.timed_out) == (3, b"out\n", b"err\n", False)


async def test_a_tool_that_ignores_sigterm_and_holds_the_pipe_is_given_up(launcher: Any) -> None:
    program = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
print('pid', os.getpid(), flush=True)
time.sleep(600)
"""
    command = launcher.command(program)
    with trio.fail_after(15):
        result = await run_tool(launcher.children, command.argv, timeout=1.5, env=dict(command.env))
    assert result.timed_out
    assert result.code is None
    pid = int(result.stdout.split()[1])
    stat = read_stat(pid)
    assert stat is None or stat.state == "Z"
    assert pid not in launcher.children


async def test_a_grandchild_that_holds_the_pipe_does_not_hold_the_answer(launcher: Any) -> None:
    with trio.fail_after(15):
        result = await run_tool(launcher.children, ["sh", "-c", "sleep 600 & echo done"], timeout=600.0)
    assert (result.code, result.stdout) == (0, b"done\n")


async def test_a_flood_is_read_to_the_end_and_cut(launcher: Any) -> None:
    argv = [sys.executable, "-c", "import sys; sys.stdout.write('x' * 3_000_000)"]
    with trio.fail_after(30):
        result = await run_tool(launcher.children, argv, timeout=25.0, max_output=1000)
    assert result.code == 0
    assert result.stdout == b"x" * 1000


async def test_what_cannot_be_started_answers_as_a_shell_does(launcher: Any) -> None:
    missing = await run_tool(launcher.children, ["/no/such/tool"], timeout=5.0)
    refused = await run_tool(launcher.children, ["/etc/passwd"], timeout=5.0)
    assert missing.code == 127
    assert b"/no/such/tool" in missing.stderr
    assert refused.code == 126


async def test_a_cancelled_tool_is_killed_and_leaks_nothing(launcher: Any) -> None:
    async def cancelled() -> None:
        with trio.move_on_after(0.2):
            await run_tool(launcher.children, ["sleep", "600"], timeout=600.0)

    await cancelled()
    before = len(os.listdir("/proc/self/fd"))
    await cancelled()
    assert len(os.listdir("/proc/self/fd")) == before
    await launcher.wait_until(lambda: not launcher.children.reap_strangers())


async def test_nothing_is_started_beside_a_tool_that_cannot_be_killed(launcher: Any, freezer: Any) -> None:
    tool = SoleTool(launcher.children)
    starts = launcher.folder / "starts"
    program = f"echo x >> {starts}; echo $$ > {freezer.path}/cgroup.procs; echo FROZEN > {freezer.path}/freezer.state"
    with trio.fail_after(60):
        first = await tool.run(["sh", "-c", program], timeout=2.0)
        second = await tool.run(["sh", "-c", program], timeout=2.0)
    assert (first.timed_out, second.timed_out, second.code) == (True, True, None)
    assert starts.read_text() == "x\n"
    freezer.thaw()
    with trio.fail_after(60):
        third = await tool.run(["sh", "-c", f"echo x >> {starts}"], timeout=30.0)
    assert (third.timed_out, third.code) == (False, 0)
    assert starts.read_text() == "x\nx\n"


async def test_a_tool_whose_caller_was_cancelled_does_not_hold_up_the_next(launcher: Any) -> None:
    tool = SoleTool(launcher.children)
    with trio.move_on_after(0.2):
        await tool.run(["sleep", "600"], timeout=600.0)
    with trio.fail_after(60):
        result = await tool.run(["sh", "-c", "exit 3"], timeout=30.0)
    assert (result.code, result.timed_out) == (3, False)
