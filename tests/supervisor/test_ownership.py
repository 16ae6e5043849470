"""Whose are the processes on the GPUs? Asked of real processes and real records."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from llmgw.domain.hardware import GpuHolder
from llmgw.domain.shard import ShardId, TcpEndpoint
from llmgw.supervisor.ownership import Records, describe, ownership, records_in
from llmgw.supervisor.procfs import identify, ticks_now
from llmgw.supervisor.records import RecordStore, ShardRecord

NOBODY = 4190001
"""A pid that no process of this machine can have."""

FAMILY = (
    "import os, signal, sys\n"
    "child = os.fork()\n"
    "if child == 0:\n"
    "    os.setsid() if sys.argv[1] == 'own-session' else None\n"
    "    print(os.getpid(), flush=True)\n"
    "signal.pause()\n"
)
"""A leader with one child, as an engine has workers; the child says its pid."""


class Engine:
    """A leader in a session of its own, and the child that would compute."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FAMILY, kind, "--api-key", "sk-secret"],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())
        leader = identify(self.process.pid)
        assert leader is not None
        self.record = ShardRecord(
            id=ShardId("llama"),
            generation=1,
            run_id="no-process-has-this",
            leader=leader,
            pgid=leader.pid,
            sid=leader.pid,
            alive_at=ticks_now(),
            endpoint=TcpEndpoint("127.0.0.1", 8101),
            config_hash="abc",
            engine="vllm",
            model="llama",
            gpu_uuids=("GPU-a", "GPU-b"),
        )

    def end(self) -> None:
        for pid in (self.child, self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(params=["same-session", "own-session"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(request.param)
    yield engine
    engine.end()


def test_what_an_engine_started_is_ours_and_everybody_else_a_stranger(engine: Engine) -> None:
    pids = [engine.process.pid, engine.child, os.getpid(), NOBODY]
    found = ownership(pids, Records((engine.record,))).holders
    assert [found[pid].shard for pid in pids] == ["llama", "llama", None, None]
    assert not any(holder.is_unknown for holder in found.values())


def test_a_replica_is_told_apart(engine: Engine) -> None:
    second = evolve(engine.record, id=ShardId("llama", 1))
    assert ownership([engine.child], Records((second,))).holders[engine.child].shard == "llama/1"


def test_a_living_engine_is_known_by_the_cards_that_it_was_given(engine: Engine) -> None:
    found = ownership([], Records((engine.record,))).engines
    assert set(found) == {"GPU-a", "GPU-b"}
    ((holder,), _) = found.values()
    assert (holder.pid, holder.memory, holder.shard) == (engine.process.pid, None, "llama")


def test_records_of_another_boot_or_of_a_pid_that_was_given_anew_prove_nothing(engine: Engine) -> None:
    leader = engine.record.leader
    for changed in (
        evolve(engine.record, leader=evolve(leader, boot_id="another")),
        evolve(engine.record, leader=evolve(leader, start_ticks=leader.start_ticks - 1), sid=NOBODY, pgid=NOBODY),
    ):
        found = ownership([engine.child], Records((changed,)))
        assert found.holders[engine.child].shard is None
        assert found.engines == {}


def test_an_engine_whose_processes_are_gone_has_no_cards() -> None:
    engine = Engine("same-session")
    engine.end()
    assert ownership([], Records((engine.record,))).engines == {}


def test_where_records_are_missing_nobody_is_called_a_stranger(engine: Engine) -> None:
    found = ownership([engine.child, os.getpid()], Records((engine.record,), complete=False)).holders
    assert (found[engine.child].shard, found[engine.child].is_unknown) == ("llama", False)
    assert (found[os.getpid()].shard, found[os.getpid()].is_unknown) == (None, True)


def test_a_process_is_described_by_its_user_and_program_and_not_by_its_arguments(engine: Engine) -> None:
    found = describe(engine.process.pid)
    assert found.user == pwd.getpwuid(os.geteuid()).pw_name
    assert found.command is not None and found.command.startswith("python")
    assert "secret" not in str(found)


def test_a_name_with_control_characters_is_made_harmless() -> None:
    program = "import signal, sys; open('/proc/self/comm', 'w').write('a\\x1b[2Jb'); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert describe(process.pid).command == "ab"
        process.kill()


def test_a_process_that_cannot_be_seen_has_neither_user_nor_command() -> None:
    assert describe(NOBODY) == GpuHolder(NOBODY, None)


def test_records_that_cannot_be_read_are_missed(tmp_path: Path, engine: Engine) -> None:
    assert records_in(str(tmp_path / "none")) == Records()
    store = RecordStore(str(tmp_path))
    store.save(engine.record)
    assert records_in(str(tmp_path)) == Records((engine.record,))
    (tmp_path / "shards/other.0.json").write_text("{")
    assert records_in(str(tmp_path)) == Records((engine.record,), complete=False)
    (tmp_path / "file").write_text("")
    assert records_in(str(tmp_path / "file")) == Records(complete=False)
