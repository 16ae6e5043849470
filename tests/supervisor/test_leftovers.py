"""What a dead engine leaves in the file system."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.supervisor.leftovers import (
    note_shm,
    remove_socket,
    remove_tmp_dir,
    remove_unclaimed_tmp_dirs,
    remove_unused_shm,
    shm_usage,
)
from llmgw.supervisor.records import ShmFile

HOLDER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
mapped = mmap.mmap(fd, 4096)
os.close(fd)
opened = os.open(sys.argv[2], os.O_RDONLY)
print('up', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def names() -> Iterator[list[str]]:
    made = [f"psm_llmgw_test_{os.getpid()}_{i}" for i in range(3)]
    for name in made:
        fd = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, b"x" * 8192)
        os.close(fd)
    yield made
    for name in made:
        Path(f"/dev/shm/{name}").unlink(missing_ok=True)


def shm_file(name: str) -> ShmFile:
    return ShmFile(name, os.stat(f"/dev/shm/{name}").st_ino)


def test_segments_of_a_killed_engine_are_removed_and_a_foreign_one_stays(names: list[str]) -> None:
    mapped, opened, foreign = names
    argv = [sys.executable, "-c", HOLDER, f"/dev/shm/{mapped}", f"/dev/shm/{opened}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "up\n"
        noted = note_shm([engine.pid, 999_999_999])
        assert noted == {shm_file(mapped), shm_file(opened)}
        # While somebody uses them nothing goes.
        assert {file for file, _ in remove_unused_shm(noted).kept} == noted
        engine.send_signal(signal.SIGKILL)
    usage = shm_usage(noted)
    assert usage.bytes == 2 * 8192
    assert usage.share is not None and 0 < usage.share < 1
    assert set(remove_unused_shm(noted).removed) == noted
    assert not os.path.exists(f"/dev/shm/{mapped}")
    assert os.path.exists(f"/dev/shm/{foreign}")
    assert remove_unused_shm(noted) == remove_unused_shm(())


def test_a_segment_that_another_process_maps_stays(names: list[str]) -> None:
    with open(f"/dev/shm/{names[0]}", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    try:
        assert remove_unused_shm([shm_file(names[0])]).kept == ((shm_file(names[0]), "another process uses it"),)
    finally:
        mapped.close()


def test_a_semaphore_counts_as_used_by_the_process_that_made_it() -> None:
    # Its maker maps it under a passing name that is deleted by now.
    script = "import multiprocessing, sys; lock = multiprocessing.get_context('spawn').Lock()\n"
    script += "print(lock._semlock.name, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as engine:
        assert engine.stdout is not None
        file = shm_file(f"sem.{engine.stdout.readline().strip().removeprefix('/')}")
        assert file in note_shm([engine.pid])
        assert remove_unused_shm([file]).kept == ((file, "another process uses it"),)
        # The tracker of multiprocessing would remove it after the death of its process alone.
        os.killpg(engine.pid, signal.SIGKILL)
    assert remove_unused_shm([file]).removed == (file,)


def test_a_name_that_came_back_as_another_file_stays(names: list[str]) -> None:
    file = shm_file(names[0])
    other = ShmFile(file.name, file.inode + 1_000_000)
    assert remove_unused_shm([other]).removed == ()
    assert os.path.exists(f"/dev/shm/{file.name}")


def test_a_name_that_leads_elsewhere_is_never_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("")
    inode = victim.stat().st_ino
    for name in (str(victim), f"../..{victim}"):
        assert remove_unused_shm([ShmFile(name, inode)]).removed == ()
    assert victim.exists()


def test_only_a_socket_is_removed_as_a_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
    assert remove_socket(path) is None
    assert not os.path.exists(path)
    assert remove_socket(path) is None
    Path(path).write_text("precious")
    assert remove_socket(path) == f"{path} is no socket"
    assert os.path.exists(path)


def test_only_a_folder_in_tmp_of_the_state_directory_is_removed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    inside = state / "tmp" / "0a1b2c3d"
    inside.mkdir(parents=True)
    (inside / "x").write_text("")
    precious = tmp_path / "precious"
    precious.mkdir()
    link = state / "tmp" / "link"
    link.symlink_to(precious)
    for path in (precious, link, state / "tmp" / ".." / ".." / "precious", state / "tmp", state):
        assert "is not in" in str(remove_tmp_dir(str(path), str(state)))
    assert remove_tmp_dir(str(inside), str(state)) is None
    assert remove_tmp_dir(str(inside), str(state)) is None
    assert not inside.exists()
    assert precious.exists() and link.is_symlink()


def test_temporary_folders_that_no_record_names_go_and_others_stay(tmp_path: Path) -> None:
    claimed, lost = tmp_path / "tmp" / "aaaaaaaa", tmp_path / "tmp" / "bbbbbbbb"
    assert remove_unclaimed_tmp_dirs(str(tmp_path), ()) == ()
    for folder in (claimed, lost):
        folder.mkdir(parents=True)
        (folder / "x").write_text("")
    assert remove_unclaimed_tmp_dirs(str(tmp_path), (str(claimed), None)) == ()
    assert os.listdir(tmp_path / "tmp") == ["aaaaaaaa"]
