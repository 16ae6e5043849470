import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import trio
import trio.testing

from llmgw.supervisor.pidfd import has_exited, wait_exited


@contextmanager
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        fd = os.pidfd_open(process.pid)
        try:
            yield process, fd
        finally:
            os.close(fd)
            process.kill()


async def wait_briefly(fd: int) -> int:
    """Wait for the process until the wait is under way, then give up; the number that the wait had."""
    with trio.fail_after(10):
        number = os.dup(fd)
        os.close(number)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_exited, fd)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    return number


async def test_the_death_of_one_process_does_not_end_the_wait_for_another() -> None:
    with sleeper() as (one, one_fd), sleeper() as (other, other_fd):
        number = await wait_briefly(one_fd)
        ended: list[str] = []

        async def watch() -> None:
            await wait_exited(other_fd)
            ended.append("other")

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                await trio.testing.wait_all_tasks_blocked()
                assert os.path.exists(f"/proc/self/fd/{number}"), "the wait was to get the number of the first one"
                one.kill()
                # Reaped with its descriptor still open: only now the kernel wakes the number of the first wait.
                one.wait()
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert not ended
                assert not has_exited(other_fd)
                other.send_signal(signal.SIGKILL)
        assert ended == ["other"]


async def test_any_number_of_tasks_wait_for_one_process() -> None:
    with sleeper() as (process, fd):
        ended: list[int] = []

        async def watch(number: int) -> None:
            await wait_exited(fd)
            ended.append(number)

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(watch, number)
                await trio.testing.wait_all_tasks_blocked()
                assert not ended
                process.kill()
        assert sorted(ended) == [0, 1, 2]
