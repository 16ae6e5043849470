"""Whose are the processes on the GPUs? Ours are found by the process records and the process tree, others are described
as far as /proc shows them. Shell: reads /proc and, for who only looks, the records. Works without being root; what
cannot be read is unknown.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection, Mapping

from attrs import evolve, field, frozen

from llmgw.domain.display import neutralise
from llmgw.domain.hardware import GpuHolder
from llmgw.domain.shard import ShardId
from llmgw.supervisor.cgroup import Cgroup
from llmgw.supervisor.members import Kinship, Member, find_members
from llmgw.supervisor.procfs import boot_id, read_stat
from llmgw.supervisor.records import RecordStore, ShardRecord
from llmgw.supervisor.table import ProcessTable, read_table

COMMAND_MAX = 64
"""Characters of a command that are shown."""
STATUS_MAX = 1 << 12
"""Bytes of /proc/PID/status that are read; its users stand in the first lines."""


@frozen
class Records:
    """The process records that could be read. Not `complete`: there are more, so that a process of none of these may
    be ours all the same."""

    found: tuple[ShardRecord, ...] = ()
    complete: bool = True


@frozen
class Ownership:
    """`holders`: what is known about each pid that was asked for. `engines`: those of ours that live, by the UUIDs of
    the GPUs that they were given, each with one of its processes and without a size."""

    holders: Mapping[int, GpuHolder] = field(factory=dict)
    engines: Mapping[str, tuple[GpuHolder, ...]] = field(factory=dict)


def records_in(state_dir: str) -> Records:
    """The records in a state directory, for who only looks."""
    store = RecordStore(state_dir)
    try:
        found = store.read_all()
        names = [name for name in os.listdir(store.folder) if name.endswith(".json")]
    except FileNotFoundError:
        return Records()
    except OSError:
        return Records(complete=False)
    return Records(found, complete=len(found) >= len(names) and not store.any_set_aside())


def ownership(pids: Collection[int], records: Records) -> Ownership:
    """Blocks for some milliseconds when there are records of engines.

    A pid that nobody can see (of the host, told to a container) has neither user nor command.
    """
    living = _living(records)
    ours = {member.pid: shown(record.id) for record, members in living for member in members}
    engines: dict[str, tuple[GpuHolder, ...]] = {}
    for record, members in living:
        first = next((member for member in members if member.pid == record.leader.pid), members[0])
        for uuid in record.gpu_uuids:
            engines[uuid] = (*engines.get(uuid, ()), describe(first.pid, shown(record.id)))
    found = {pid: describe(pid, ours.get(pid)) for pid in pids}
    if not records.complete:
        found = {pid: evolve(holder, is_unknown=holder.shard is None) for pid, holder in found.items()}
    return Ownership(found, engines)


def _living(records: Records) -> list[tuple[ShardRecord, tuple[Member, ...]]]:
    """The recorded engines of which a process lives."""
    try:
        boot = boot_id()
    except OSError:
        return []
    current = [record for record in records.found if record.leader.boot_id == boot]
    table = read_table() if current else None
    found = [(record, _members(record, table)) for record in current if table is not None]
    return [(record, members) for record, members in found if members]


def _members(record: ShardRecord, table: ProcessTable) -> tuple[Member, ...]:
    kinship = Kinship({record.leader.pid: record.leader.start_ticks}, {record.sid: record.alive_at}, record.run_id)
    cgroup = Cgroup.at(record.cgroup)
    members, _ = find_members(kinship, table, cgroup.pids() if cgroup is not None else ())
    return members


def describe(pid: int, shard: str | None = None) -> GpuHolder:
    """A process as /proc shows it. The program's name alone: arguments may hold secrets."""
    stat = read_stat(pid)
    if stat is None:
        return GpuHolder(pid, None, shard=shard)
    return GpuHolder(pid, None, _user(pid), neutralise(stat.comm)[:COMMAND_MAX], shard)


def _user(pid: int) -> str | None:
    """The name of the user that a process runs as, its number where it has none here."""
    try:
        # Not the owner of the folder: that is root for each process that may not be dumped.
        with open(f"/proc/{pid}/status", "rb") as file:
            text = file.read(STATUS_MAX).decode("ascii", "replace")
    except OSError:
        return None
    fields = next((line.split() for line in text.splitlines() if line.startswith("Uid:")), [])
    if len(fields) < 3 or not fields[2].isdecimal():
        return None
    uid = int(fields[2])
    try:
        return neutralise(pwd.getpwuid(uid).pw_name)
    except (KeyError, OverflowError):
        return f"uid {uid}"


def shown(id_: ShardId) -> str:
    """The name by which an engine is told where only its record is known: how many replicas its shard has stands in the
    file alone, and the first one has the shard's name in most files."""
    return id_.name if id_.replica == 0 else str(id_)
