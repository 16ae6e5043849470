"""Which processes are a shard's: everything its leader started, whatever group or session it moved to.

Five kinds of evidence, each enough: it is in the shard's cgroup; it was proven before (pid and start time); it
carries the run's marker in its environment; its parent is proven; it is in a session that one of ours leads. Names
and command lines are no evidence, since engines rewrite them and strangers may have the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from attrs import evolve, field, frozen

from llmgw.supervisor.procfs import Stat
from llmgw.supervisor.table import ProcessTable


@frozen
class Member:
    """A living process of a shard. State Z is possible: the main thread has ended and another one runs on."""

    pid: int
    start: int
    comm: str
    state: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.comm})"


@frozen
class Kinship:
    """What is known about a shard's processes. `seen`: proven ones, pid to start time.

    `sessions`: number of a session that one of ours leads, to the latest time (clock ticks since boot) at which it
    was certainly still ours. A number stays taken while any process uses it, so a process in that session which is
    older than that time is ours as well, even after all other evidence is gone.
    """

    seen: Mapping[int, int] = field(factory=dict)
    sessions: Mapping[int, int] = field(factory=dict)
    run_id: str = ""


def find_members(
    kinship: Kinship, table: ProcessTable, cgroup_pids: Iterable[int] = ()
) -> tuple[tuple[Member, ...], Kinship]:
    """The living members, by pid, and what is known now."""
    in_cgroup = set(cgroup_pids)
    stats = dict(table.stats)
    # llmgw itself is nobody's member, though it may sit in a cgroup or carry the marker of an outer llmgw.
    for stranger in (os.getpid(), 1):
        stats.pop(stranger, None)
    proven = {
        stat.pid: stat
        for stat in stats.values()
        if stat.pid in in_cgroup
        or kinship.seen.get(stat.pid) == stat.start
        or (kinship.run_id and table.run_ids.get(stat.pid) == kinship.run_id)
    }
    sessions = dict(kinship.sessions)
    _close(stats, proven, sessions)
    held = {stat.session for stat in proven.values()}
    members = tuple(
        Member(stat.pid, stat.start, stat.comm, stat.state)
        for stat in sorted(proven.values(), key=lambda stat: stat.pid)
        if stat.pid not in table.dead
    )
    known = evolve(
        kinship,
        # Zombies stay in `seen`: an unreaped leader keeps its session's number ours.
        seen={stat.pid: stat.start for stat in proven.values()},
        sessions={sid: table.taken_at if sid in held else tick for sid, tick in sessions.items()},
    )
    return members, known


def _close(stats: Mapping[int, Stat], proven: dict[int, Stat], sessions: dict[int, int]) -> None:
    """Add whatever follows from what is proven, until nothing more does."""
    grew = True
    while grew:
        for stat in proven.values():
            if stat.pid == stat.session:
                sessions.setdefault(stat.session, 0)
        held = {stat.session for stat in proven.values()} & sessions.keys()
        more = {
            stat.pid: stat
            for stat in stats.values()
            if stat.pid not in proven
            and (
                (stat.session in held)
                or stat.start <= sessions.get(stat.session, -1)
                # A child is never older than its parent: a parent's number that was reused proves nothing.
                or ((parent := proven.get(stat.ppid)) is not None and parent.start <= stat.start)
            )
        }
        proven.update(more)
        grew = bool(more)
