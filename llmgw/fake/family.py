"""Child processes of the fakes, made by fork: cheap, and with the parent's output files, as the real ones have."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable

from llmgw.fake.loop import Loop, write_all

DETACHED_KINDS = ("plain", "setpgrp", "setsid", "ignore-term", "setsid-ignore-term", "double-fork")


def fork(parent_loop: Loop | None, main: Callable[[], int], keep: Iterable[int] = ()) -> int:
    """Start a child that runs `main` and exits with what it returns; the parent gets its pid.

    The child keeps stdin, stdout, stderr and the descriptors in `keep`. All others are closed, above all the
    bound HTTP port: workers of the real engines do not hold it either.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        if parent_loop is not None:
            parent_loop.forget()
        close_all_but({0, 1, 2, *keep})
        code = main()
    except KeyboardInterrupt:
        code = 130
    except Exception:  # noqa: BLE001  (a forked child must never return into its parent's code)
        write_all(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def close_all_but(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor not in keep:
            try:
                os.close(descriptor)
            except OSError:
                pass  # the listing's own descriptor


def sleep_for_ever() -> int:
    while True:
        signal.pause()


def detach(parent_loop: Loop | None, kind: str) -> None:
    """Start a child of one of DETACHED_KINDS, which then sleeps until it is killed."""

    def main() -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if kind == "double-fork":
            os.setsid()
            if os.fork():
                return 0
        elif kind == "setpgrp":
            os.setpgid(0, 0)
        elif kind.startswith("setsid"):
            os.setsid()
        if kind.endswith("ignore-term"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return sleep_for_ever()

    fork(parent_loop, main)


def exec_python(code: str, keep: Iterable[int], arguments: Iterable[str] = ()) -> Callable[[], int]:
    """A `main` for `fork` that becomes a new interpreter running `code`: own command line, whole environment."""
    inherited = list(keep)

    def main() -> int:
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)
        os.execve(sys.executable, [sys.executable, "-S", "-c", code, *arguments], dict(os.environ))

    return main


def exit_of(pid: int) -> int | None:
    """Reap one child: its exit code (negative for a signal), or None while it lives or when it is not ours."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done else None
