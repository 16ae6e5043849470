"""The spawn gate: a child waits for one byte before it becomes the engine.

The caller writes the engine's record in between, so that no engine exists without one: when llmgw dies there, the
child reads EOF and ends. Costs some 6 ms per start and keeps pid and start time over the exec (measured).
"""

from __future__ import annotations

import errno
import os
import resource
import signal

from llmgw.domain.problem import LlmgwError
from llmgw.domain.shard import Command
from llmgw.supervisor.cgroup import Cgroup
from llmgw.supervisor.children import Children
from llmgw.supervisor.family import EngineProcesses
from llmgw.supervisor.members import Kinship
from llmgw.supervisor.pidfd import has_exited, send
from llmgw.supervisor.procfs import identify, ticks_now
from llmgw.supervisor.table import MARKER

GATE = 'read -r go && exec "$@" </dev/null'
"""The pipe is standard input, since a small shell can name no descriptor above 9. The engine gets /dev/null instead."""

GATE_NAME = "llmgw-gate"


class SpawnFailed(LlmgwError):
    """The child could not even be started: no log file, no folder, no memory. Nothing is left of it."""

    code = "spawn-failed"


class GatedChild:
    """A registered child that waits. Exactly one of `open_gate` and `abandon` ends the waiting."""

    def __init__(self, engine: EngineProcesses, pidfd: int, gate: int, children: Children) -> None:
        self.engine = engine
        self._pidfd = pidfd
        self._gate: int | None = gate
        self._children = children

    def open_gate(self) -> None:
        """Let it become the engine. A child that died while it waited shows as an exit, not as an error here."""
        gate = self._take_gate()
        try:
            os.write(gate, b"\n")
        except BrokenPipeError:
            pass
        finally:
            os.close(gate)

    def abandon(self) -> None:
        """End it before it becomes anything."""
        os.close(self._take_gate())
        send(self._pidfd, signal.SIGKILL)
        has_exited(self._pidfd, within=0.2)
        # Should it take longer, the reaper of strangers gets it.
        self._children.forget(self.engine.leader.pid)
        self._children.reap(self.engine.leader.pid, self._pidfd)
        if self.engine.cgroup is not None:
            self.engine.cgroup.remove()
        self.engine.close()

    def _take_gate(self) -> int:
        gate, self._gate = self._gate, None
        if gate is None:
            raise RuntimeError("the gate is open or abandoned already")
        return gate


def spawn_engine(children: Children, command: Command, *, log_path: str, cgroup: Cgroup | None) -> GatedChild:
    """Start the waiting child of `command`. Synchronous, so that no cancellation can come between start and registry.

    Its output is appended to `log_path` (mode 0640). Raises SpawnFailed.
    """
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise SpawnFailed(
            f"cannot open the output file {log_path}: {error.strerror}", "make log_dir writable for llmgw"
        ) from error
    gate_read = gate_write = -1
    try:
        gate_read, gate_write = os.pipe2(os.O_CLOEXEC)
        pid = children.start(
            ["/bin/sh", "-c", GATE, GATE_NAME, *command.argv],
            stdin=gate_read,
            stdout=log,
            stderr=log,
            env=dict(command.env),
            cwd=command.cwd,
            umask=_own_umask() | 0o002,
        )
    except (OSError, ValueError) as error:
        if gate_write >= 0:
            os.close(gate_write)
        raise _failure(command, error) from error
    finally:
        os.close(log)
        if gate_read >= 0:
            os.close(gate_read)
    leader = identify(pid)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        # EOF at the gate ends it, the reaper of strangers takes it away.
        os.close(gate_write)
        children.forget(pid)
        raise _failure(command, error) from error
    if leader is None:
        os.close(gate_write)
        os.close(pidfd)
        children.forget(pid)
        raise SpawnFailed(f"cannot start {command.argv[0]}: /proc does not show it", "mount /proc")
    _prepare(pid)
    joined = cgroup if cgroup is not None and cgroup.join(pid) else None
    if cgroup is not None and joined is None:
        cgroup.remove()
    engine = EngineProcesses(
        children,
        leader,
        pidfd=pidfd,
        is_child=True,
        kinship=Kinship({pid: leader.start_ticks}, {pid: ticks_now()}, command.env.get(MARKER, "")),
        cgroup=joined,
        adopted=False,
    )
    return GatedChild(engine, pidfd, gate_write, children)


def _failure(command: Command, error: OSError | ValueError) -> SpawnFailed:
    program = command.argv[0]
    if isinstance(error, OSError) and error.filename == command.cwd:
        return SpawnFailed(f"cannot start {program} in {command.cwd}: {error.strerror}", "create the folder")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return SpawnFailed(f"cannot start {program}: {error.strerror}", "raise LimitNOFILE= of the service")
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return SpawnFailed(f"cannot start {program}: {why}")


def _prepare(pid: int) -> None:
    """What an engine has otherwise than llmgw. From outside, while it waits: a shell has no portable words for it."""
    try:
        _, hard = resource.prlimit(pid, resource.RLIMIT_MEMLOCK)
        resource.prlimit(pid, resource.RLIMIT_MEMLOCK, (hard, hard))
    except OSError:
        # RDMA then pins less memory; an engine that needs more says so.
        pass
    try:
        # The kernel is to prefer an engine over its supervisor, whose own value may be negative.
        with open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:
            file.write("0")
    except OSError:
        pass


def _own_umask() -> int:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except (OSError, ValueError, IndexError):
        pass
    return 0o022
