"""Taking over from records: what is proven ours, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from llmgw.board import Cell
from llmgw.domain.shard import ShardId, TcpEndpoint
from llmgw.supervisor.adoption import adopt, leftovers_of, why_not_believed
from llmgw.supervisor.children import Children
from llmgw.supervisor.family import EngineProcesses
from llmgw.supervisor.procfs import ProcessId, boot_id, read_stat, ticks_now
from llmgw.supervisor.records import ShardRecord


def record_of(pid: int, *, run_id: str = "nobody-has-this") -> ShardRecord:
    stat = read_stat(pid)
    assert stat is not None
    return ShardRecord(
        id=ShardId("a", 0),
        generation=1,
        run_id=run_id,
        leader=ProcessId(boot_id(), pid, stat.start),
        pgid=stat.pgrp,
        sid=stat.session,
        alive_at=ticks_now(),
        endpoint=TcpEndpoint("127.0.0.1", 8000),
        config_hash="x",
        engine="command",
        model="m",
    )


class Stranger:
    """An engine that an earlier supervisor started: not our child, with one worker in its session."""

    PROGRAM = """
import os, signal, sys, time
if os.fork():
    os._exit(0)
os.setsid()
worker = os.fork()
if worker == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.close(1)
    time.sleep(600)
print(os.getpid(), worker, flush=True)
os.close(1)
time.sleep(600)
"""

    def __init__(self) -> None:
        # A process in between ends at once: the engine goes to whoever takes orphans.
        ran = subprocess.run(
            [sys.executable, "-c", self.PROGRAM], stdout=subprocess.PIPE, text=True, check=True, timeout=30
        )
        self.leader, self.worker = (int(word) for word in ran.stdout.split())

    def end(self) -> None:
        for pid in (self.leader, self.worker):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    made = Stranger()
    yield made
    made.end()


async def end(engine: EngineProcesses) -> str:
    with trio.fail_after(30):
        outcome = await engine.stop(term_to="group", stop_timeout=0.3, hurry=Cell(False), last_words=0.1)
    engine.close()
    return outcome.kind


async def test_an_engine_that_is_still_the_same_is_adopted_and_stopped_like_a_spawned_one(stranger: Stranger) -> None:
    record = record_of(stranger.leader)
    assert why_not_believed(record) is None
    engine = adopt(Children(), record)
    assert engine is not None
    assert engine.adopted
    assert {member.pid for member in engine.members()} == {stranger.leader, stranger.worker}
    assert await end(engine) == "gone-kill"
    stat = read_stat(stranger.worker)
    assert stat is None or stat.state == "Z"


async def test_the_exit_of_an_adopted_engine_is_seen_even_if_nobody_reaps_it_and_its_code_is_unknown() -> None:
    # Child of a program that never reaps: as under the PID 1 of most containers.
    keeper = (
        "import subprocess, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", keeper], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            engine = adopt(Children(), record_of(pid))
            assert engine is not None
            os.kill(pid, signal.SIGKILL)
            with trio.fail_after(10):
                assert (await engine.wait_exit()).code is None
            stat = read_stat(pid)
            assert stat is not None and stat.state == "Z"
            assert not engine.is_leader_alive()
            assert adopt(Children(), record_of(pid)) is None
            engine.close()
        finally:
            process.kill()


def test_a_reused_pid_is_neither_adopted_nor_signalled(stranger: Stranger) -> None:
    record = record_of(stranger.leader)
    other = evolve(record, leader=evolve(record.leader, start_ticks=record.leader.start_ticks - 1), alive_at=0)
    assert "is another process now (python" in str(why_not_believed(other))
    assert adopt(Children(), other) is None
    assert leftovers_of(Children(), other) is None


def test_a_record_of_another_boot_says_nothing(stranger: Stranger) -> None:
    record = record_of(stranger.leader)
    other = evolve(record, leader=evolve(record.leader, boot_id="another"))
    assert why_not_believed(other) == "the record is of another boot"
    assert adopt(Children(), other) is None
    assert leftovers_of(Children(), other) is None


async def test_workers_of_a_leader_that_died_meanwhile_are_found_by_the_age_of_the_record(stranger: Stranger) -> None:
    record = record_of(stranger.leader)
    engine = adopt(Children(), record)
    assert engine is not None
    os.kill(stranger.leader, signal.SIGKILL)
    with trio.fail_after(10):
        await engine.wait_exit()
    engine.close()
    assert why_not_believed(record) is None or "gone" in str(why_not_believed(record))
    left = leftovers_of(Children(), record)
    assert left is not None
    assert [member.pid for member in left.members()] == [stranger.worker]
    assert (await left.wait_exit()).code is None
    assert await end(left) == "gone-kill"
    assert leftovers_of(Children(), record) is None


def test_a_session_that_is_younger_than_the_record_is_a_strangers(stranger: Stranger) -> None:
    # As if our leader with this number had died and the number had come back.
    record = record_of(stranger.leader)
    old = evolve(
        record,
        leader=evolve(record.leader, start_ticks=record.leader.start_ticks - 100),
        alive_at=record.leader.start_ticks - 50,
    )
    assert leftovers_of(Children(), old) is None


def test_a_child_that_died_during_an_upgrade_still_tells_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "supervisor.py"
    script.write_text(
        """
import os, subprocess, sys, trio
from llmgw.board import Cell
from llmgw.domain.shard import Command, ShardId, TcpEndpoint
from llmgw.supervisor.processes import Children, adopt, spawn_engine, ticks_now
from llmgw.supervisor.records import RecordStore, ShardRecord

folder = sys.argv[1]
store = RecordStore(folder)

def first():
    command = Command(argv=('sh', '-c', 'exit 9'), env={'PATH': os.environ['PATH']}, cwd=folder)
    child = spawn_engine(Children(), command, log_path=folder + '/log', cgroup=None)
    engine = child.engine
    store.save(ShardRecord(id=ShardId('a'), generation=1, run_id='r', leader=engine.leader, pgid=engine.pgid,
        sid=engine.sid, alive_at=ticks_now(), endpoint=TcpEndpoint('127.0.0.1', 1),
        config_hash='', engine='', model=''))
    child.open_gate()
    os.waitid(os.P_PID, engine.leader.pid, os.WEXITED | os.WNOWAIT)
    os.execv(sys.executable, [sys.executable, __file__, folder, 'again'])

async def second():
    children = Children()
    (record,) = store.load_all().records
    engine = adopt(children, record)
    async with trio.open_nursery() as nursery:
        await nursery.start(children.serve)
        print('code', (await engine.wait_exit()).code)
        outcome = await engine.stop(term_to='group', stop_timeout=5, hurry=Cell(False))
        print(outcome.kind, os.path.exists(f'/proc/{record.leader.pid}'))
        nursery.cancel_scope.cancel()

if len(sys.argv) == 2:
    first()
else:
    trio.run(second)
"""
    )
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.stdout == "code 9\ngone False\n"


async def test_a_wrapper_that_execs_stays_adoptable(launcher: Any) -> None:
    engine = launcher.start(launcher.command_of("sh", "-c", "sleep 0.3; exec sleep 600"))
    record = record_of(engine.leader.pid)
    await launcher.wait_until(lambda: (stat := read_stat(engine.leader.pid)) is not None and stat.comm == "sleep")
    assert why_not_believed(record) is None
    await end(engine)
