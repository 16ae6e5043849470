from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from llmgw.control.server import bind, point_clients, take_over
from llmgw.domain.problem import LlmgwError


def test_the_mode_is_right_whatever_the_umask(tmp_path: Path) -> None:
    for umask in (0o000, 0o077):
        before = os.umask(umask)
        try:
            control = bind(str(tmp_path / "control.sock"), mode=0o660)
        finally:
            os.umask(before)
        assert stat.S_IMODE(os.stat(tmp_path / "control.sock").st_mode) == 0o660
        assert os.listdir(tmp_path) == ["control.sock"]
        control.close()
        assert os.listdir(tmp_path) == []


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "control.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    control = bind(path)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
    control.close()


def test_while_it_is_replaced_there_is_always_one_that_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "control.sock")
    controls = [bind(path)]
    failures: list[OSError] = []
    done = threading.Event()

    def connect() -> None:
        while not done.is_set():
            with socket.socket(socket.AF_UNIX) as peer:
                peer.setblocking(False)
                try:
                    peer.connect(path)
                except OSError as error:
                    failures.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    for _ in range(50):
        controls.append(bind(path))
    done.set()
    thread.join(20)
    # A full queue of one that is never accepted from is no gap.
    assert [error for error in failures if not isinstance(error, BlockingIOError)] == []
    for control in controls:
        control.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    path.write_text("precious")
    with pytest.raises(LlmgwError, match="no socket stands there"):
        bind(str(path))
    assert path.read_text() == "precious"


def test_a_path_may_have_107_bytes_and_not_108(tmp_path: Path) -> None:
    room = 107 - len(os.fsencode(tmp_path)) - 1
    longest = tmp_path / ("s" * room)
    control = bind(str(longest))
    assert longest.exists()
    control.close()
    with pytest.raises(LlmgwError, match="108 bytes, a socket's may have 107"):
        bind(str(longest) + "s")


def test_a_name_of_one_letter_binds(tmp_path: Path) -> None:
    control = bind(str(tmp_path / "s"))
    assert os.listdir(tmp_path) == ["s"]
    control.close()


@pytest.mark.parametrize(("group", "part"), [("no-such-group-here", "there is no such group")])
def test_an_unknown_group_is_named_and_nothing_is_left(tmp_path: Path, group: str, part: str) -> None:
    with pytest.raises(LlmgwError, match=part):
        bind(str(tmp_path / "control.sock"), group=group)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_the_group_may_use_it(tmp_path: Path) -> None:
    control = bind(str(tmp_path / "control.sock"), group="adm")
    assert os.stat(tmp_path / "control.sock").st_gid == 4
    control.close()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(LlmgwError, match=r"control socket .*: No such file"):
        bind(str(tmp_path / "none/control.sock"))


def test_a_socket_that_somebody_else_put_there_is_not_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "control.sock")
    first, second = bind(path), bind(path)
    first.close()
    assert os.path.exists(path)
    second.close()
    assert not os.path.exists(path)


def test_a_socket_from_systemd_keeps_its_file(tmp_path: Path) -> None:
    path = str(tmp_path / "control.sock")
    control = bind(path)
    passed = take_over(os.dup(control.fileno()), None)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
    assert not os.get_inheritable(passed.fileno())
    passed.close()
    assert os.path.exists(path)
    control.close()


def test_what_is_no_listening_socket_is_not_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as idle, pytest.raises(LlmgwError, match="no listening unix socket"):
        take_over(idle.fileno(), None)


def test_clients_are_told_of_a_socket_that_lies_elsewhere(tmp_path: Path) -> None:
    point_clients(str(tmp_path), "/srv/llmgw.sock")
    assert (tmp_path / "socket").read_text() == "/srv/llmgw.sock\n"
    point_clients(str(tmp_path), str(tmp_path / "control.sock"))
    assert os.listdir(tmp_path) == []
