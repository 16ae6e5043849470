"""Running a small tool (nvidia-smi, systemctl) beside the reaper, with a limit on time and on output.

Exit is read from the pidfd and never from EOF, which a grandchild can hold back; whatever a tool leaves in its
group is killed with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

import trio
from attrs import frozen

from llmgw.supervisor.children import Children
from llmgw.supervisor.pidfd import has_exited, wait_exited

DRAIN = 0.5
"""Seconds for output that is in the pipe when the tool has ended."""

DIE = 1.0
"""Seconds that a killed tool may take to die before its end is left to the reaper."""

OUTPUT_MAX = 4 << 20
"""Bytes of each stream that are kept: everything that nvidia-smi knows of 16 cards in MIG mode comes to about 1 MiB."""


@frozen
class ToolResult:
    """`code`: as a shell shows it for what could not be started (126, 127), None after a timeout."""

    code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False


async def run_tool(
    children: Children,
    argv: Sequence[str],
    *,
    timeout: float,
    max_output: int = OUTPUT_MAX,
    env: Mapping[str, str] | None = None,
    on_survivor: Callable[[int], None] | None = None,
) -> ToolResult:
    """Run `argv` for at most `timeout` seconds and keep `max_output` bytes of each stream; never raises for it.

    `on_survivor` gets the pidfd, to keep and close, of a tool that was killed and is not dead yet.
    """
    out_read, out_write = os.pipe2(os.O_CLOEXEC)
    err_read, err_write = os.pipe2(os.O_CLOEXEC)
    try:
        pid = children.start(argv, stdin=subprocess.DEVNULL, stdout=out_write, stderr=err_write, env=env)
    except (OSError, ValueError) as error:
        os.close(out_read)
        os.close(err_read)
        return ToolResult(127 if isinstance(error, FileNotFoundError) else 126, b"", f"{argv[0]}: {error}".encode())
    finally:
        os.close(out_write)
        os.close(err_write)

    stdout, stderr = bytearray(), bytearray()
    code: int | None = None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        _kill_group(pid)
        children.forget(pid)
        os.close(out_read)
        os.close(err_read)
        return ToolResult(126, b"", f"{argv[0]}: {error}".encode())
    try:
        async with (
            trio.lowlevel.FdStream(out_read) as out_stream,
            trio.lowlevel.FdStream(err_read) as err_stream,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_collect, out_stream, stdout, max_output)
            nursery.start_soon(_collect, err_stream, stderr, max_output)
            with trio.move_on_after(timeout) as limit:
                await wait_exited(pidfd)
            _kill_group(pid)
            with trio.move_on_after(DIE):
                await wait_exited(pidfd)
            nursery.cancel_scope.deadline = trio.current_time() + DRAIN
    finally:
        # Still unreaped here, so the group's number is the tool's.
        _kill_group(pid)
        code = children.reap(pid, pidfd)
        children.forget(pid)
        if on_survivor is not None and code is None and not has_exited(pidfd):
            on_survivor(pidfd)
        else:
            os.close(pidfd)
    return ToolResult(None if limit.cancelled_caught else code, bytes(stdout), bytes(stderr), limit.cancelled_caught)


class SoleTool:
    """Runs one tool for callers that take turns, and starts none beside an instance that could not be killed.

    nvidia-smi hangs in the kernel when a card or its driver does (state D): each further one would hang there too.
    """

    def __init__(self, children: Children) -> None:
        self._children = children
        self._survivor: int | None = None

    async def run(self, argv: Sequence[str], *, timeout: float) -> ToolResult:
        """As `run_tool`; while an earlier instance is not dead, the answer is a timeout."""
        if self._survivor is not None:
            # One that was killed when its caller was cancelled is about to die.
            with trio.move_on_after(min(DIE, timeout)):
                await wait_exited(self._survivor)
            if not has_exited(self._survivor):
                return ToolResult(None, b"", b"", timed_out=True)
            os.close(self._survivor)
            self._survivor = None
        return await run_tool(self._children, argv, timeout=timeout, on_survivor=self._keep)

    def _keep(self, pidfd: int) -> None:
        self._survivor = pidfd


async def _collect(stream: trio.lowlevel.FdStream, into: bytearray, limit: int) -> None:
    # Read to the end also beyond the limit: a tool must not hang on a full pipe.
    async for chunk in stream:
        into.extend(chunk[: limit - len(into)])


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
