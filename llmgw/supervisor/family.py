"""The processes of one launch, spawned or adopted alike: their exit, who they are, and the one way they are stopped."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable
from typing import Literal

import trio
from attrs import evolve, frozen

from llmgw.board import Cell
from llmgw.supervisor.cgroup import Cgroup
from llmgw.supervisor.children import Children, exit_code
from llmgw.supervisor.members import Kinship, Member, find_members
from llmgw.supervisor.pidfd import has_exited, open_verified, send, send_verified, wait_exited, wait_exited_alone
from llmgw.supervisor.procfs import ProcessId, children_of, read_stat
from llmgw.supervisor.table import ProcessTable, read_table

LAST_WORDS = 2.0
"""Seconds between the SIGTERM to what is left and SIGKILL."""

KILL_WAIT = 8.0
"""Seconds for the dead to disappear after SIGKILL: with LAST_WORDS the 10 s that the longest stop counts with."""

FOLLOW_LEADER = 1.0
"""Seconds that workers get to follow a leader which obeyed; engines take up to 0.3 s (measured)."""

TermTo = Literal["leader", "group"]


@frozen
class Exit:
    """How a leader ended. `code`: 0 to 255, negative for a signal, None where it cannot be known (not our child)."""

    code: int | None


@frozen
class StopOutcome:
    """What it took. `leftover` is empty unless something could not be killed."""

    kind: Literal["gone", "gone-term", "gone-kill", "unkillable"]
    seconds: float
    leftover: tuple[Member, ...] = ()


class EngineProcesses:
    """Made by `spawn_engine`, `adopt` and `leftovers_of`. Used from trio's thread alone."""

    def __init__(
        self,
        children: Children,
        leader: ProcessId,
        *,
        pidfd: int | None,
        is_child: bool,
        kinship: Kinship,
        cgroup: Cgroup | None,
        adopted: bool,
        pgid: int | None = None,
        sid: int | None = None,
        before_kill: Callable[[tuple[Member, ...]], None] | None = None,
    ) -> None:
        self.leader = leader
        self.pgid = pgid if pgid is not None else leader.pid
        self.sid = sid if sid is not None else leader.pid
        self.cgroup = cgroup
        self.adopted = adopted
        self.before_kill = before_kill
        """Called with the living members before the first SIGKILL: the last time at which they can be asked."""
        self._children = children
        self._pidfd = pidfd
        self._is_child = is_child
        self._reaped = False
        self._code: int | None = None
        self._kinship = kinship
        self._stopping = trio.Lock()
        self._outcome: StopOutcome | None = None
        self._began: float | None = None
        self._signalled = False
        self._termed: set[tuple[int, int]] = set()

    @property
    def run_id(self) -> str:
        return self._kinship.run_id

    def is_leader_alive(self) -> bool:
        """False once every thread of it has ended. A leader that was dead from the start is dead."""
        return not self._reaped and self._pidfd is not None and not has_exited(self._pidfd)

    async def wait_exit(self) -> Exit:
        """Return when the leader is dead; any number of tasks may wait. It is not reaped here, so its group number
        stays ours until the whole group is gone.
        """
        if self._pidfd is None or self._reaped:
            await trio.lowlevel.checkpoint()
        else:
            await wait_exited(self._pidfd)
        return Exit(self._read_code())

    def members(self) -> tuple[Member, ...]:
        """Every living process of the shard. Reads all of /proc: some milliseconds, not for a fast loop."""
        return self._look(read_table())

    async def scan_members(self) -> tuple[Member, ...]:
        """`members` by a look that is shared with whatever shard asks at the same time."""
        return self._look(await self._children.tables.read())

    def names(self) -> tuple[str, ...]:
        """Names (at most 15 characters, as programs set them) of the leader and its descendants.

        Some 50 microseconds per process: the cheap question for a loop, where `members` would read all of /proc.
        """
        found: list[str] = []
        todo, seen = [self.leader.pid], {self.leader.pid}
        while todo:
            pid = todo.pop()
            if (stat := read_stat(pid)) is None or (pid == self.leader.pid and stat.start != self.leader.start_ticks):
                continue
            found.append(stat.comm)
            children = (children_of(pid) or set()) - seen
            seen |= children
            todo.extend(children)
        return tuple(found)

    def owns(self, pid: int) -> bool:
        """Whether a living process is the shard's."""
        return any(member.pid == pid for member in self.members())

    async def wait_member_exit(self, members: Iterable[Member]) -> Member:
        """Return the first of these that is dead. With no members at all it waits until cancelled."""
        send_channel, receive_channel = trio.open_memory_channel[Member](math.inf)

        async def watch(member: Member) -> None:
            await _wait_gone(member)
            send_channel.send_nowait(member)

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(watch, member)
            first = await receive_channel.receive()
            nursery.cancel_scope.cancel(reason=f"{first} is gone")
        return first

    async def stop(
        self,
        *,
        term_to: TermTo | None,
        stop_timeout: float,
        hurry: Cell[bool],
        on_step: Callable[[str], None] = lambda _: None,
        last_words: float = LAST_WORDS,
    ) -> StopOutcome:
        """End everything and return when it is gone, or when it is clear that it cannot be killed.

        SIGTERM to the leader or to its whole group; up to `stop_timeout` seconds; SIGTERM to the rest; `last_words`
        seconds; SIGKILL to group, cgroup and whatever had left them. `term_to=None` begins with SIGKILL, a leader
        that ended by itself with the SIGTERM to the rest. When `hurry` turns True all waiting ends with SIGKILL.

        A second caller joins the first one's stop and gets its outcome; after a cancelled one it goes on where that
        left off, without a second SIGTERM. The leader is reaped last.
        """
        async with self._stopping:
            if self._outcome is not None and self._outcome.kind != "unkillable":
                return self._outcome
            if self._began is None:
                self._began = trio.current_time()
            # Taken before the first signal: later the dead can no longer lead to what they started.
            members = await self.scan_members()
            kind: Literal["gone", "gone-term", "gone-kill"] = "gone-term" if self._signalled else "gone"
            if members and term_to is not None:
                members = await self._terminate(members, term_to, stop_timeout, last_words, hurry, on_step)
                kind = "gone-term" if self._signalled else "gone"
            if members:
                members = await self._kill(members, on_step)
                kind = "gone-kill"
            seconds = trio.current_time() - self._began
            if members:
                self._outcome = StopOutcome("unkillable", seconds, members)
            else:
                self._reap()
                if self.cgroup is not None:
                    self.cgroup.remove()
                self._outcome = StopOutcome(kind, seconds)
            return self._outcome

    def close(self) -> None:
        """Let go of the descriptors. What still runs goes on running."""
        if self._pidfd is not None:
            self._read_code()
            os.close(self._pidfd)
            self._pidfd = None

    # -- the steps of a stop -----------------------------------------------------------------------------

    async def _terminate(
        self,
        members: tuple[Member, ...],
        term_to: TermTo,
        stop_timeout: float,
        last_words: float,
        hurry: Cell[bool],
        on_step: Callable[[str], None],
    ) -> tuple[Member, ...]:
        deadline = trio.current_time() + stop_timeout
        if self.is_leader_alive() and not hurry.value:
            self._signalled = True
            if term_to == "group":
                on_step("SIGTERM to the group")
                self._term_group(members)
                members = await self._wait_all_gone(members, deadline, hurry)
            else:
                on_step("SIGTERM to the leader")
                self._term(self.leader.pid, self.leader.start_ticks)
                members = await self._wait_leader(members, deadline, hurry)
                if members and not self.is_leader_alive() and _has_time(hurry, deadline):
                    # A wrapper that left without telling its engine: that one has not heard of the stop yet, and
                    # gets what is left of the time. Workers that nobody leads any more end the same way.
                    on_step("the leader is gone, SIGTERM to the rest")
                    for member in members:
                        self._term(member.pid, member.start)
                    members = await self._wait_all_gone(members, deadline, hurry)
        if members and last_words > 0 and _has_time(hurry, math.inf):
            self._signalled = True
            on_step("SIGTERM to the rest")
            # Those that had theirs get a second one here: a handler may have come into place since.
            self._term_group(members, again=True)
            members = await self._wait_all_gone(members, trio.current_time() + last_words, hurry)
        return members

    async def _kill(self, members: tuple[Member, ...], on_step: Callable[[str], None]) -> tuple[Member, ...]:
        self._signalled = True
        on_step("SIGKILL")
        if self.before_kill is not None:
            await trio.to_thread.run_sync(self.before_kill, members)
        deadline = trio.current_time() + KILL_WAIT
        never: Cell[bool] = Cell(False)
        while members:
            if self.cgroup is not None:
                self.cgroup.kill()
            if self._owns_group(members):
                self._killpg(signal.SIGKILL)
            for member in members:
                send_verified(member.pid, member.start, signal.SIGKILL)
            # Short rounds: whatever was forked between the look and the signal is seen in the next one.
            round_end = min(deadline, trio.current_time() + 0.5)
            members = await self._wait_all_gone(members, round_end, never)
            if members and trio.current_time() >= deadline:
                break
        return members

    async def _wait_leader(self, members: tuple[Member, ...], deadline: float, hurry: Cell[bool]) -> tuple[Member, ...]:
        with trio.move_on_at(deadline) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when, hurry, scope)
                await self.wait_exit()
                nursery.cancel_scope.cancel(reason="the leader is gone")
        if self.is_leader_alive():
            return await self.scan_members()
        return await self._wait_all_gone(members, min(deadline, trio.current_time() + FOLLOW_LEADER), hurry)

    async def _wait_all_gone(
        self, members: tuple[Member, ...], deadline: float, hurry: Cell[bool]
    ) -> tuple[Member, ...]:
        """Wait for all of them and for what they have started since; the answer is who is left."""
        with trio.move_on_at(deadline) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when, hurry, scope)
                while members:
                    async with trio.open_nursery() as waits:
                        for member in members:
                            waits.start_soon(_wait_gone, member)
                    members = await self.scan_members()
                nursery.cancel_scope.cancel(reason="all are gone")
        return await self.scan_members() if members else members

    def _term_group(self, members: tuple[Member, ...], *, again: bool = False) -> None:
        if again:
            self._termed.clear()
        fresh = [member for member in members if (member.pid, member.start) not in self._termed]
        if len(fresh) == len(members) and self._owns_group(members):
            self._killpg(signal.SIGTERM)
            # What killpg reached must not hear it again from below.
            for member in fresh:
                if _in_group(member.pid, self.pgid):
                    self._termed.add((member.pid, member.start))
        for member in fresh:
            self._term(member.pid, member.start)

    def _term(self, pid: int, start: int) -> None:
        if (pid, start) not in self._termed:
            self._termed.add((pid, start))
            if pid == self.leader.pid and self._pidfd is not None:
                send(self._pidfd, signal.SIGTERM)
            else:
                send_verified(pid, start, signal.SIGTERM)

    def _owns_group(self, members: tuple[Member, ...]) -> bool:
        """Whether the group's number is certainly ours: an unreaped leader of our own, or a proven member in it."""
        if self._is_child and not self._reaped:
            return True
        return any(_in_group(member.pid, self.pgid) for member in members)

    def _killpg(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pgid, number)
        except (ProcessLookupError, PermissionError):
            # Empty, or zombies only, or a member that changed its user: the others are told one by one.
            pass

    def _look(self, table: ProcessTable) -> tuple[Member, ...]:
        in_cgroup = self.cgroup.pids() if self.cgroup is not None else ()
        members, self._kinship = find_members(self._kinship, table, in_cgroup)
        return members

    def _read_code(self) -> int | None:
        if self._is_child and not self._reaped and self._pidfd is not None and self._code is None:
            try:
                result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                result = None
            if result is not None:
                self._code = exit_code(result)
        return self._code

    def _reap(self) -> None:
        if self._is_child and not self._reaped and self._pidfd is not None:
            self._read_code()
            self._children.reap(self.leader.pid, self._pidfd)
            self._reaped = True
            self._kinship = evolve(self._kinship, seen={}, sessions={})


def _has_time(hurry: Cell[bool], deadline: float) -> bool:
    return not hurry.value and trio.current_time() < deadline


async def _cancel_when(hurry: Cell[bool], scope: trio.CancelScope) -> None:
    await hurry.wait_value(bool)
    scope.cancel(reason="hurry")


async def _wait_gone(member: Member) -> None:
    try:
        fd = open_verified(member.pid, member.start)
    except OSError:
        # Out of descriptors: look again soon instead of waiting for the exit itself.
        await trio.sleep(0.05)
        return
    if fd is None:
        await trio.lowlevel.checkpoint()
        return
    try:
        await wait_exited_alone(fd)
    finally:
        os.close(fd)


def _in_group(pid: int, pgid: int) -> bool:
    try:
        return os.getpgid(pid) == pgid
    except OSError:
        return False
