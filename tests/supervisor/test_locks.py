"""One supervisor per state and runtime directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.domain.problem import LlmgwError, OwnedByAnother
from llmgw.supervisor.locks import INHERITED, Locks

HOLDER = """
import sys, time
from llmgw.supervisor.locks import Locks
locks = Locks.take(sys.argv[1:])
print('held', flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", HOLDER, str(tmp_path / "state"), str(tmp_path / "run")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("folders", [("state", "run2"), ("state2", "run")])
def test_a_second_supervisor_is_refused_with_the_pid_of_the_first(
    tmp_path: Path, holder: subprocess.Popen[str], folders: tuple[str, str]
) -> None:
    with pytest.raises(OwnedByAnother, match=rf"another llmgw \(pid {holder.pid}\) owns {tmp_path}") as caught:
        Locks.take([str(tmp_path / folder) for folder in folders])
    assert caught.value.exit_code == 2


def test_a_killed_supervisor_leaves_no_stale_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    Locks.take([str(tmp_path / "state"), str(tmp_path / "run")]).release()


def test_a_refused_supervisor_holds_nothing_itself(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(OwnedByAnother):
        Locks.take([str(tmp_path / "state2"), str(tmp_path / "run")])
    Locks.take([str(tmp_path / "state2")]).release()


def test_one_folder_for_both_is_locked_once(tmp_path: Path) -> None:
    locks = Locks.take([str(tmp_path), str(tmp_path / ".")])
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    assert os.stat(tmp_path / "lock").st_mode & 0o777 == 0o600
    with pytest.raises(OwnedByAnother):
        Locks.take([str(tmp_path)])
    locks.release()
    Locks.take([str(tmp_path)]).release()


def test_a_folder_that_cannot_be_written_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LlmgwError, match="cannot lock"):
        Locks.take([str(tmp_path / "file" / "state")])


def test_the_locks_are_held_without_a_gap_over_an_exec(tmp_path: Path) -> None:
    after = """
import fcntl, os, sys
from llmgw.supervisor.locks import INHERITED, Locks
env = dict(os.environ)
locks = Locks.take(sys.argv[1:], env)
assert INHERITED not in env
print('after', os.getpid(), flush=True)
sys.stdin.read()
"""
    before = f"""
import os, sys
from llmgw.supervisor.locks import Locks
locks = Locks.take(sys.argv[1:])
print('before', os.getpid(), flush=True)
os.execve(sys.executable, [sys.executable, '-c', {after!r}, *sys.argv[1:]], {{**os.environ, **locks.pass_on()}})
"""
    argv = [sys.executable, "-c", before, str(tmp_path / "state"), str(tmp_path / "run")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == f"before {process.pid}\n"
        # Asked all the time while the new program starts: nobody could get it at any of these moments.
        os.set_blocking(process.stdout.fileno(), False)
        line = ""
        while not line:
            with pytest.raises(OwnedByAnother, match=str(process.pid)):
                Locks.take([str(tmp_path / "state")])
            line = process.stdout.readline()
        assert line == f"after {process.pid}\n"
        with pytest.raises(OwnedByAnother, match=str(process.pid)):
            Locks.take([str(tmp_path / "run")])
        process.stdin.close()
    Locks.take([str(tmp_path / "state"), str(tmp_path / "run")]).release()


def test_foreign_descriptor_numbers_in_the_variable_are_not_believed(tmp_path: Path) -> None:
    env = {INHERITED: "0,1,2,999,x"}
    locks = Locks.take([str(tmp_path)], env)
    assert env == {}
    with pytest.raises(OwnedByAnother, match=str(os.getpid())):
        Locks.take([str(tmp_path)])
    locks.release()
