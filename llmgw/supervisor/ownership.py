"""Whose are the processes on the GPUs? Ours are found by the process records and the process tree, others are described
as far as /proc shows them. Shell: reads /proc.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection, Iterable, Mapping

from llmgw.domain.display import neutralise
from llmgw.domain.hardware import GpuHolder
from llmgw.supervisor.cgroup import Cgroup
from llmgw.supervisor.members import Kinship, find_members
from llmgw.supervisor.procfs import boot_id, read_stat
from llmgw.supervisor.records import ShardRecord
from llmgw.supervisor.table import read_table

COMMAND_MAX = 64
"""Characters of a command that are shown."""


def holders(pids: Collection[int], records: Iterable[ShardRecord]) -> Mapping[int, GpuHolder]:
    """What is known about each of these pids: the shard that it belongs to, its user, its program. Blocks for some
    milliseconds when there are pids at all.

    A pid that nobody can see (of the host, told to a container) has neither user nor command.
    """
    if not pids:
        return {}
    ours = members_of(records)
    return {pid: describe(pid, ours.get(pid)) for pid in pids}


def members_of(records: Iterable[ShardRecord]) -> Mapping[int, str]:
    """Every living process of the recorded engines, with the name of its shard."""
    try:
        boot = boot_id()
    except OSError:
        return {}
    found: dict[int, str] = {}
    table = None
    for record in records:
        if record.leader.boot_id != boot:
            continue
        table = table or read_table()
        kinship = Kinship({record.leader.pid: record.leader.start_ticks}, {record.sid: record.alive_at}, record.run_id)
        cgroup = Cgroup.at(record.cgroup)
        members, _ = find_members(kinship, table, cgroup.pids() if cgroup is not None else ())
        found |= {member.pid: _shown(record) for member in members}
    return found


def describe(pid: int, shard: str | None = None) -> GpuHolder:
    """A process as /proc shows it. The program's name alone: arguments may hold secrets."""
    stat = read_stat(pid)
    if stat is None:
        return GpuHolder(pid, None, shard=shard)
    try:
        user: str | None = _user(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        user = None
    return GpuHolder(pid, None, user, neutralise(stat.comm)[:COMMAND_MAX], shard)


def _user(uid: int) -> str:
    try:
        return neutralise(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return f"uid {uid}"


def _shown(record: ShardRecord) -> str:
    # How many replicas the shard has stands in the file alone; the first one has the shard's name in most files.
    return record.id.name if record.id.replica == 0 else str(record.id)
