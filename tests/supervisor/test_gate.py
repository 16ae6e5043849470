"""The spawn gate: what a child inherits, and that nothing becomes an engine before it may."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from llmgw.board import Cell
from llmgw.domain.shard import Command
from llmgw.supervisor.children import Children
from llmgw.supervisor.gate import SpawnFailed, spawn_engine
from llmgw.supervisor.pidfd import has_exited
from llmgw.supervisor.procfs import environment_value, read_stat

REPORT = """
import json, os, resource, signal
status = dict(line.split(':\\t', 1) for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)
print(json.dumps({
    'fds': {str(fd): os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)},
    'others': [t for n in os.listdir('/proc/self/fd') if int(n) > 2
               and (t := os.path.exists(f'/proc/self/fd/{n}') and os.readlink(f'/proc/self/fd/{n}'))],
    'blocked': status['SigBlk'], 'ignored': int(status['SigIgn'], 16),
    'pgid': os.getpgid(0), 'sid': os.getsid(0), 'pid': os.getpid(), 'cwd': os.getcwd(),
    'memlock': resource.getrlimit(resource.RLIMIT_MEMLOCK),
    'oom': int(open('/proc/self/oom_score_adj').read()),
    'umask': status['Umask'].strip(),
    'secret': os.environ.get('SECRET'),
}), flush=True)
import time; time.sleep(600)
"""


async def stop(engine: Any) -> None:
    with trio.fail_after(30):
        await engine.stop(term_to=None, stop_timeout=1.0, hurry=Cell(False))


async def test_a_child_inherits_nothing_of_llmgw(launcher: Any) -> None:
    leak = os.open("/dev/zero", os.O_RDONLY)
    os.set_inheritable(leak, True)
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, limits[1]))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        engine = await launcher.start_until(launcher.command(REPORT), "secret")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGHUP, before)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
        os.close(leak)
    seen = json.loads(launcher.output().splitlines()[0])
    assert seen["fds"] == {"0": "/dev/null", "1": str(launcher.log), "2": str(launcher.log)}
    assert "/dev/zero" not in seen["others"]
    assert not [target for target in seen["others"] if str(target).startswith("pipe:")]
    assert int(seen["blocked"], 16) == 0
    assert not seen["ignored"] & (1 << (signal.SIGHUP - 1))
    assert seen["pgid"] == seen["sid"] == seen["pid"] == engine.leader.pid == engine.pgid == engine.sid
    assert seen["cwd"] == str(launcher.folder)
    assert seen["memlock"] == [limits[1], limits[1]]
    assert seen["oom"] == 0
    assert int(seen["umask"], 8) & 0o002
    await stop(engine)


async def test_output_is_appended_to_a_file_that_others_cannot_read(launcher: Any) -> None:
    launcher.log.write_text("an earlier life\n")
    launcher.log.chmod(0o640)
    engine = await launcher.start_until(launcher.command("print('hello', flush=True)"), "hello")
    with trio.fail_after(10):
        assert (await engine.wait_exit()).code == 0
    assert launcher.output() == "an earlier life\nhello\n"
    assert stat.S_IMODE(launcher.log.stat().st_mode) & 0o007 == 0
    await stop(engine)


async def test_nothing_runs_before_the_gate_opens_and_secrets_stay_out_of_the_command_line(launcher: Any) -> None:
    command = launcher.command("import os; print('ran as', os.getpid(), flush=True)")
    command = Command(argv=command.argv, env={**command.env, "SECRET": "hunter2"}, cwd=command.cwd)
    child = spawn_engine(launcher.children, command, log_path=str(launcher.log), cgroup=None)
    launcher.engines.append(child.engine)
    pid = child.engine.leader.pid
    # Neither can be read in the first moment after the exec.
    await launcher.wait_until(lambda: environment_value(pid, "SECRET") == "hunter2")
    assert b"llmgw-gate" in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"hunter2" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert pid in launcher.children
    assert child.engine.is_leader_alive()
    assert launcher.output() == ""
    child.open_gate()
    with trio.fail_after(10):
        await child.engine.wait_exit()
    assert launcher.output() == f"ran as {pid}\n"
    await stop(child.engine)


async def test_an_abandoned_child_ends_without_having_run(launcher: Any) -> None:
    command = launcher.command("print('ran', flush=True)")
    child = spawn_engine(launcher.children, command, log_path=str(launcher.log), cgroup=None)
    pid = child.engine.leader.pid
    child.abandon()
    await launcher.wait_until(lambda: read_stat(pid) is None)
    assert pid not in launcher.children
    assert launcher.output() == ""


async def test_a_child_that_was_killed_at_the_gate_shows_as_an_exit(launcher: Any) -> None:
    command = launcher.command("print('ran', flush=True)")
    child = spawn_engine(launcher.children, command, log_path=str(launcher.log), cgroup=None)
    launcher.engines.append(child.engine)
    os.kill(child.engine.leader.pid, signal.SIGKILL)
    with trio.fail_after(10):
        await child.engine.wait_exit()
    child.open_gate()
    assert (await child.engine.wait_exit()).code == -signal.SIGKILL
    await stop(child.engine)


async def test_a_command_that_does_not_exist_says_so_in_the_log(launcher: Any) -> None:
    engine = await launcher.start_until(launcher.command_of("no-such-engine", "serve"), "not found")
    with trio.fail_after(10):
        assert (await engine.wait_exit()).code == 127
    assert "no-such-engine" in launcher.output()
    await stop(engine)


def test_a_missing_working_folder_is_told_in_words(tmp_path: Path) -> None:
    command = Command(argv=("true",), env={}, cwd="/nonexistent/folder")
    with pytest.raises(SpawnFailed, match="cannot start true in /nonexistent/folder: No such file"):
        spawn_engine(Children(), command, log_path=str(tmp_path / "log"), cgroup=None)


def test_a_log_file_that_cannot_be_opened_is_told_in_words() -> None:
    command = Command(argv=("true",), env={}, cwd="/")
    with pytest.raises(SpawnFailed, match="cannot open the output file"):
        spawn_engine(Children(), command, log_path="/nonexistent/x.log", cgroup=None)


async def test_starting_and_stopping_leaks_no_descriptor(launcher: Any) -> None:
    async def once() -> None:
        engine = launcher.start(launcher.command_of("sleep", "600"))
        await stop(engine)
        engine.close()

    await once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await once()
    assert len(os.listdir("/proc/self/fd")) == before


SUPERVISOR = """
import os, sys
from llmgw.domain.shard import Command
from llmgw.supervisor.children import Children
from llmgw.supervisor.gate import spawn_engine
from llmgw.supervisor.children import Children
folder = sys.argv[1]
command = Command(argv=('touch', folder + '/the-engine-ran'), env={'PATH': os.environ['PATH']}, cwd=folder)
child = spawn_engine(Children(), command, log_path=folder + '/log', cgroup=None)
print(child.engine.leader.pid, flush=True)
import time; time.sleep(600)
"""


def test_a_child_ends_when_the_supervisor_is_killed_before_the_record_is_written(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        pidfd = os.pidfd_open(pid)
        try:
            supervisor.kill()
            supervisor.wait()
            assert has_exited(pidfd, within=20.0)
        finally:
            os.close(pidfd)
    assert not (tmp_path / "the-engine-ran").exists()
