"""`llmgw sweep`, from records alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from attrs import evolve

from llmgw.domain.problem import OwnedByAnother
from llmgw.domain.shard import ShardId, TcpEndpoint, UnixEndpoint
from llmgw.supervisor.locks import Locks
from llmgw.supervisor.procfs import ProcessId, boot_id, read_stat, ticks_now
from llmgw.supervisor.records import OnStop, RecordStore, ShardRecord
from llmgw.supervisor.sweep import Job, SweepReport, ends, sweep

ENGINE = """
import os, signal, sys, time
if sys.argv[1] == 'stubborn':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
time.sleep(600)
"""


class Node:
    """A state directory with engines whose supervisor is gone."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.store = RecordStore(str(state))
        self.processes: list[subprocess.Popen[str]] = []
        self.lines: list[str] = []

    def engine(self, name: str, *, on_stop: OnStop = "auto", mood: str = "gentle") -> ShardRecord:
        process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, mood], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        stat = read_stat(process.pid)
        assert stat is not None
        record = ShardRecord(
            id=ShardId(name),
            generation=1,
            run_id="unmarked",
            leader=ProcessId(boot_id(), process.pid, stat.start),
            pgid=process.pid,
            sid=process.pid,
            alive_at=ticks_now(),
            endpoint=TcpEndpoint("127.0.0.1", 8000),
            config_hash="x",
            engine="command",
            model="m",
            on_stop=on_stop,
        )
        self.store.save(record)
        return record

    def sweep(self, *, if_stopping: bool = False, job: Job = "none") -> SweepReport:
        async def bounded() -> SweepReport:
            with trio.fail_after(60):
                return await sweep(str(self.state), if_stopping=if_stopping, job=job, on_line=self.lines.append)

        return trio.run(bounded)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "state")
    yield made
    made.close()


def is_running(record: ShardRecord) -> bool:
    stat = read_stat(record.leader.pid)
    return stat is not None and stat.state != "Z"


@pytest.mark.parametrize(
    ("on_stop", "by_hand", "stop", "restart", "none", "unreadable"),
    [
        ("auto", True, True, False, False, False),
        ("stop", True, True, True, True, True),
        ("leave", False, False, False, False, False),
    ],
)
def test_who_is_ended_depends_on_the_job_and_on_stop(
    on_stop: OnStop, by_hand: bool, stop: bool, restart: bool, none: bool, unreadable: bool
) -> None:
    assert ends(on_stop, if_stopping=False, job="none") is by_hand
    jobs: dict[Job, bool] = {"stop": stop, "restart": restart, "none": none, "unreadable": unreadable}
    assert {job: ends(on_stop, if_stopping=True, job=job) for job in jobs} == jobs


def test_engines_are_ended_with_all_that_belongs_to_them_and_others_stay(node: Node, tmp_path: Path) -> None:
    gone, kept = node.engine("a"), node.engine("b", on_stop="leave")
    tmp = node.state / "tmp" / "0a1b2c3d"
    tmp.mkdir(parents=True)
    path = str(tmp_path / "engine.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
    node.store.save(evolve(gone, tmp_dir=str(tmp), endpoint=UnixEndpoint(path)))
    report = node.sweep()
    assert report == SweepReport(ended=("a",), stayed=("b",))
    assert not is_running(gone) and is_running(kept)
    assert [record.id.name for record in node.store.load_all().records] == ["b"]
    assert not tmp.exists() and not os.path.exists(path)
    assert any(line.startswith(f"a: pid {gone.leader.pid} ended after SIGTERM") for line in node.lines)


def test_a_stubborn_engine_is_killed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.supervisor.sweep.STOP_TIMEOUT", 0.5)
    record = node.engine("a", mood="stubborn")
    assert node.sweep(if_stopping=True, job="stop").ended == ("a",)
    assert not is_running(record)
    assert "ended by SIGKILL" in node.lines[0]


def test_a_crash_of_the_supervisor_leaves_its_engines_to_the_next_one(node: Node) -> None:
    record, ending = node.engine("a"), node.engine("b", on_stop="stop")
    assert node.sweep(if_stopping=True, job="none") == SweepReport(ended=("b",), stayed=("a",))
    assert is_running(record) and not is_running(ending)
    assert node.store.load_all().records == (record,)


def test_it_refuses_while_a_supervisor_holds_the_lock(node: Node) -> None:
    record = node.engine("a")
    locks = Locks.take([str(node.state)])
    try:
        with pytest.raises(OwnedByAnother):
            node.sweep()
    finally:
        locks.release()
    assert is_running(record)


def test_records_that_prove_nothing_are_removed_without_a_signal(node: Node) -> None:
    record = node.engine("a")
    node.store.save(evolve(record, leader=evolve(record.leader, boot_id="another")))
    reused = evolve(record, id=ShardId("b"), leader=evolve(record.leader, start_ticks=1), alive_at=1)
    node.store.save(reused)
    (Path(node.store.folder) / "c.0.json").write_text("rubbish")
    report = node.sweep()
    assert (report.ended, report.failed) == ((), ())
    assert [Path(path).name for path in report.bad] == ["c.0.json"]
    assert is_running(record)
    assert node.store.load_all().records == ()
    assert "a: nothing to end, the record is of another boot" in node.lines


def test_a_dead_engine_is_only_tidied_up(node: Node) -> None:
    record = node.engine("a")
    os.kill(record.leader.pid, signal.SIGKILL)
    node.processes[0].wait()
    assert node.sweep() == SweepReport()
    assert node.lines == [f"a: nothing to end, pid {record.leader.pid} is gone"]
    assert node.store.load_all().records == ()


def test_a_state_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    assert trio.run(lambda: sweep(str(tmp_path / "none"), if_stopping=True, job="stop")) == SweepReport()
    assert not (tmp_path / "none").exists()
