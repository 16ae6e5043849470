"""Our own children: a registry, and the reaping of everybody else's.

Every child is started by one synchronous function that registers it in the same step. On SIGCHLD each child that is
not registered (an orphan that came to us as subreaper) is reaped by its pid. `waitpid(-1)` would take the exit codes
of registered children, and forks in worker threads lose them the same way (both measured), so neither exists here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import trio

from llmgw.supervisor.procfs import own_children
from llmgw.supervisor.table import TableReader

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>

INHERITABLY_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What shells, nohup and service managers are known to start programs with. Popen itself restores SIGPIPE."""


def exit_code(result: os.waitid_result) -> int:
    """0 to 255 for an exit, the negative number for a signal."""
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


class Children:
    """The registry. One per process; used from the main thread alone."""

    def __init__(self) -> None:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            # Inherited so, the kernel would throw exit codes away before anybody could read them.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._registered: set[int] = set()
        self.tables = TableReader()
        """Looks at all processes, shared by everything that is started here."""
        self.subreaper = False
        """Whether orphans of engines come to us; False where the kernel refused."""

    def __contains__(self, pid: int) -> bool:
        return pid in self._registered

    def start(
        self,
        argv: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        umask: int = -1,
    ) -> int:
        """Start and register a child in a session of its own; returns its pid.

        It gets these three descriptors and no other, default dispositions and an empty signal mask. Raises OSError
        when the executable or `cwd` cannot be used, ValueError for a NUL byte.
        """
        with _clean_signals():
            process = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=env,
                cwd=cwd,
                umask=umask,
                start_new_session=True,
                restore_signals=True,
                close_fds=True,
            )
            self._registered.add(process.pid)
        # Popen must never wait for it: its clean-up of forgotten children would take the exit code.
        process.returncode = 0
        return process.pid

    def register(self, pid: int) -> None:
        """A child that was there before us: this process executed itself anew and kept it."""
        self._registered.add(pid)

    def forget(self, pid: int) -> None:
        """Leave a child to the reaper of strangers."""
        self._registered.discard(pid)

    def reap(self, pid: int, pidfd: int) -> int | None:
        """Take a dead child off the process table; None when it lives or is not ours. Its number is free afterwards."""
        try:
            result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            self.forget(pid)
            return None
        if result is None:
            return None
        self.forget(pid)
        return exit_code(result)

    def reap_strangers(self) -> int:
        """Reap each dead child that is not registered; returns how many."""
        count = 0
        while True:
            reaped = 0
            for pid in own_children() - self._registered:
                try:
                    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None:
                        reaped += 1
                except ChildProcessError:
                    continue
            count += reaped
            if not reaped:
                # The kernel may leave out children while others go, hence a pass that found nothing ends it.
                return count

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be the subreaper and reap strangers until cancelled. Engines to be adopted come before: see `adopt`."""
        self.subreaper = _become_subreaper()
        with trio.open_signal_receiver(signal.SIGCHLD) as deaths:
            self.reap_strangers()
            task_status.started()
            async for _ in deaths:
                self.reap_strangers()


def _become_subreaper() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


@contextmanager
def _clean_signals() -> Iterator[None]:
    """What a child inherits at this moment is clean: nothing blocked, nothing ignored.

    An ignored signal (SIGHUP below nohup, SIGINT in the background of a script) stays ignored over exec, but one
    with a handler goes back to its default: so ours gets a handler that does nothing, for the time of the fork.
    """
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ignored: list[signal.Signals] = []
    try:
        if threading.current_thread() is threading.main_thread():
            for number in INHERITABLY_IGNORED:
                if signal.getsignal(number) is signal.SIG_IGN:
                    signal.signal(number, lambda *_: None)
                    ignored.append(number)
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
