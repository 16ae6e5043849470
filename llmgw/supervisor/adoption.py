"""From a record to living processes: taken over when proven ours, never touched when not."""

from __future__ import annotations

import os

from llmgw.supervisor.cgroup import Cgroup
from llmgw.supervisor.children import Children
from llmgw.supervisor.family import EngineProcesses
from llmgw.supervisor.members import Kinship
from llmgw.supervisor.pidfd import has_exited, open_verified
from llmgw.supervisor.procfs import boot_id, read_stat
from llmgw.supervisor.records import ShardRecord


def why_not_believed(record: ShardRecord) -> str | None:
    """None when the recorded leader is there (alive or a zombie), else the reason in words, for the log."""
    if record.leader.boot_id != boot_id():
        return "the record is of another boot"
    stat = read_stat(record.leader.pid)
    if stat is None:
        return f"pid {record.leader.pid} is gone"
    if stat.start != record.leader.start_ticks:
        return f"pid {record.leader.pid} is another process now ({stat.comm})"
    return None


def adopt(children: Children, record: ShardRecord) -> EngineProcesses | None:
    """Take over the engine of a record; None when its leader is dead or not proven.

    A leader that is our own child (this process executed itself anew) is registered, so that its exit code is read,
    even when it died during the exec: adopt everything before `Children.serve` starts to reap strangers.
    Raises OSError when descriptors have run out.
    """
    if record.leader.boot_id != boot_id():
        return None
    pidfd = open_verified(record.leader.pid, record.leader.start_ticks)
    if pidfd is None:
        return None
    stat = read_stat(record.leader.pid)
    is_child = stat is not None and stat.start == record.leader.start_ticks and stat.ppid == os.getpid()
    if has_exited(pidfd) and not is_child:
        os.close(pidfd)
        return None
    if is_child:
        children.register(record.leader.pid)
    return EngineProcesses(
        children,
        record.leader,
        pidfd=pidfd,
        is_child=is_child,
        kinship=Kinship({record.leader.pid: record.leader.start_ticks}, {record.sid: record.alive_at}, record.run_id),
        cgroup=Cgroup.at(record.cgroup),
        adopted=True,
        pgid=record.pgid,
        sid=record.sid,
    )


def leftovers_of(children: Children, record: ShardRecord) -> EngineProcesses | None:
    """What a dead leader left running, to be ended with `stop`; None when there is nothing.

    Ours is what stands in the recorded cgroup, carries the run's marker, or is in the recorded session and older
    than the record: another session can have got this number only after everything of ours had gone.
    """
    if record.leader.boot_id != boot_id():
        return None
    left = EngineProcesses(
        children,
        record.leader,
        pidfd=None,
        is_child=False,
        kinship=Kinship({record.leader.pid: record.leader.start_ticks}, {record.sid: record.alive_at}, record.run_id),
        cgroup=Cgroup.at(record.cgroup),
        adopted=True,
        pgid=record.pgid,
        sid=record.sid,
    )
    return left if left.members() else None
