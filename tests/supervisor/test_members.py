"""Evidence for whose a process is."""

from __future__ import annotations

import os
import signal
from typing import Any

import trio

from llmgw.supervisor.members import Kinship, find_members
from llmgw.supervisor.procfs import Stat, read_stat, ticks_now
from llmgw.supervisor.table import ProcessTable, TableReader, read_table

PROGRAM = """
import os, sys, time
wiped = [sys.executable, '-u', '-c', 'import os, time; print("worker", os.getpid()); time.sleep(600)']
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, wiped, {})
    time.sleep(600)
time.sleep(600)
"""


async def test_what_was_seen_once_is_ours_after_parents_and_marker_are_gone(launcher: Any) -> None:
    engine = await launcher.start_until(launcher.command(PROGRAM), "worker")
    worker = int(launcher.output().split()[1])
    before = engine.members()
    assert worker in [member.pid for member in before]
    for member in before:
        if member.pid != worker:
            os.kill(member.pid, signal.SIGKILL)
    await launcher.wait_until(lambda: (stat := read_stat(worker)) is not None and stat.ppid == os.getpid())
    await launcher.wait_until(lambda: [member.pid for member in engine.members()] == [worker])
    assert [member.pid for member in await engine.scan_members()] == [worker]


def test_llmgw_itself_and_init_are_nobodys_members() -> None:
    me = read_stat(os.getpid())
    assert me is not None
    everything = Kinship({me.pid: me.start, 1: 0}, {me.session: ticks_now()})
    members, _ = find_members(everything, read_table(), cgroup_pids=(1, os.getpid()))
    assert not {1, os.getpid()} & {member.pid for member in members}


def test_without_evidence_there_are_no_members() -> None:
    members, known = find_members(Kinship({}, {999_999_999: ticks_now()}, run_id="nobody"), read_table())
    assert members == ()
    assert known.seen == {}


def table(*stats: Stat, dead: tuple[int, ...] = (), run_ids: dict[int, str] | None = None) -> ProcessTable:
    return ProcessTable(1000, {stat.pid: stat for stat in stats}, run_ids or {}, frozenset(dead))


def process(pid: int, *, parent: int = 2000, session: int = 0, start: int = 500, state: str = "S") -> Stat:
    return Stat(pid, "x", state, parent, session or pid, session or pid, start)


def pids(kinship: Kinship, look: ProcessTable) -> list[int]:
    return [member.pid for member in find_members(kinship, look)[0]]


LEADER = process(100)
KNOWN = Kinship({100: 500}, {100: 600}, "run")


def test_children_sessions_and_their_children_follow_from_the_leader() -> None:
    look = table(
        LEADER,
        process(101, parent=100, session=100),
        process(102, parent=1, session=100, start=700),
        process(103, parent=101, start=700),
        process(104, parent=1, session=103, start=800),
        process(105, parent=104, session=105, start=800),
        process(200),
    )
    assert pids(KNOWN, look) == [100, 101, 102, 103, 104, 105]


def test_a_number_that_came_back_proves_nothing() -> None:
    reused_leader = process(100, start=900)
    grandchild = process(101, parent=100, session=100, start=901)
    assert pids(KNOWN, table(reused_leader, grandchild)) == []
    # A process cannot be older than its parent: that number was another's when it was born.
    assert pids(KNOWN, table(LEADER, process(101, parent=100, start=400))) == [100]


def test_a_session_whose_leader_is_gone_is_ours_as_far_as_it_is_older_than_our_last_look() -> None:
    old, young = process(101, parent=1, session=100, start=600), process(102, parent=1, session=100, start=601)
    assert pids(KNOWN, table(young)) == []
    # The older one proves that the number was never free in between, so the younger one is ours as well.
    assert pids(KNOWN, table(old, young)) == [101, 102]


def test_a_zombie_leader_is_no_member_but_holds_its_session() -> None:
    zombie = process(100, state="Z")
    look = table(zombie, process(102, parent=1, session=100, start=999), dead=(100,))
    assert pids(KNOWN, look) == [102]
    assert find_members(KNOWN, look)[1].sessions == {100: 1000}


def test_a_marker_proves_and_another_runs_marker_does_not() -> None:
    look = table(process(300), process(301), process(302, parent=300), run_ids={300: "run", 301: "other"})
    assert pids(KNOWN, look) == [300, 302]
    assert pids(Kinship({}, {}, ""), table(process(300), run_ids={300: ""})) == []


async def test_a_hundred_who_ask_at_once_share_a_look_that_began_after_they_asked() -> None:
    reader = TableReader()
    first = await reader.read()
    looks: list[ProcessTable] = []

    async def ask() -> None:
        looks.append(await reader.read())

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(ask)
    assert len({id(look) for look in looks}) <= 2
    assert all(look is not first for look in looks)


async def test_a_look_that_was_given_up_is_not_handed_to_anybody() -> None:
    reader = TableReader()
    with trio.CancelScope() as scope:
        scope.cancel()
        await reader.read()
    assert (await reader.read()).stats.keys() >= {os.getpid()}
