"""The gateway's doors: all or none, kept over reloads, taken over from an earlier life."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from llmgw.config.kinds import Listen
from llmgw.domain.problem import LlmgwError
from llmgw.gateway.listeners import Listeners, name_of


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert isinstance(port, int)
        return port


def opened(*doors: Listen, passed: dict[str, int] | None = None) -> Listeners:
    listeners = Listeners(passed)
    listeners.adopt(doors, listeners.bind(doors))
    return listeners


def can_connect(door: Listen) -> bool:
    try:
        if door.path is not None:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(door.path)
        else:
            socket.create_connection((door.host, door.port)).close()
    except OSError:
        return False
    return True


def test_several_addresses_are_open_and_closed_again(tmp_path):
    doors = (Listen(host="127.0.0.1", port=free_port()), Listen(path=str(tmp_path / "g.sock")))
    listeners = opened(*doors)
    assert all(map(can_connect, doors))
    listeners.close()
    assert not any(map(can_connect, doors))
    assert not os.path.exists(tmp_path / "g.sock")


def test_a_unix_socket_is_for_its_user_and_group_alone(tmp_path):
    listeners = opened(Listen(path=str(tmp_path / "g.sock")))
    assert stat.S_IMODE(os.stat(tmp_path / "g.sock").st_mode) == 0o660
    listeners.close()


def test_when_one_address_is_taken_none_is_opened_and_the_message_names_it(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bad = Listen(host="127.0.0.1", port=taken.getsockname()[1])
        good = Listen(path=str(tmp_path / "g.sock"))
        listeners = Listeners()
        with pytest.raises(LlmgwError, match=f"cannot listen on {bad}") as found:
            listeners.bind((good, bad))
        assert found.value.hint is not None and "gateway.listen" in found.value.hint
        assert not can_connect(good)


def test_an_address_that_is_not_of_this_machine_is_an_error_in_words():
    with pytest.raises(LlmgwError, match=r"cannot listen on 192\.0\.2\.1:8080"):
        Listeners().bind((Listen(host="192.0.2.1", port=8080),))


def test_what_a_reload_still_names_stays_open_and_is_not_bound_again():
    first, second = Listen(host="127.0.0.1", port=free_port()), Listen(host="127.0.0.1", port=free_port())
    listeners = opened(first)
    (before,) = listeners.sockets.value
    made = listeners.bind((first, second))
    assert list(made) == [second]
    listeners.adopt((first, second), made)
    assert before in listeners.sockets.value and can_connect(first) and can_connect(second)
    listeners.adopt((second,), listeners.bind((second,)))
    assert not can_connect(first) and can_connect(second)
    listeners.close()


def test_what_was_opened_for_a_refused_reload_is_given_up():
    door = Listen(host="127.0.0.1", port=free_port())
    listeners = Listeners()
    listeners.give_up(listeners.bind((door,)))
    assert not can_connect(door) and listeners.sockets.value == ()


def test_the_next_life_takes_its_sockets_over_by_name_with_the_connections_that_wait(tmp_path):
    doors = (Listen(host="127.0.0.1", port=free_port()), Listen(path=str(tmp_path / "g.sock")))
    old = opened(*doors)
    kept = {name: os.dup(fd) for name, fd in old.descriptors().items()}
    assert set(kept) == {name_of(door) for door in doors}
    waiting = socket.create_connection((doors[0].host, doors[0].port))
    for sock in old.sockets.value:
        sock.close()
    new = opened(*doors, passed=kept)
    new.sockets.value[0].setblocking(True)
    new.sockets.value[0].settimeout(5)
    accepted, _ = new.sockets.value[0].accept()
    accepted.close()
    waiting.close()
    assert all(map(can_connect, doors))
    new.close()
    assert not os.path.exists(tmp_path / "g.sock")


def test_a_socket_units_socket_is_known_by_its_address_and_its_file_left_alone(tmp_path):
    path = str(tmp_path / "g.sock")
    with socket.socket(socket.AF_UNIX) as given:
        given.bind(path)
        given.listen()
        listeners = opened(Listen(path=path), passed={"gateway": os.dup(given.fileno())})
        assert can_connect(Listen(path=path))
        listeners.close()
        assert os.path.exists(path)


def test_a_passed_socket_that_the_file_does_not_name_is_closed_and_told(caplog):
    with socket.socket() as given:
        given.bind(("127.0.0.1", 0))
        given.listen()
        door = Listen(host="127.0.0.1", port=given.getsockname()[1])
        listeners = Listeners({"gateway": os.dup(given.fileno())})
        listeners.adopt((), {})
    assert "which [gateway] listen does not name" in caplog.text
    assert not can_connect(door)


def test_a_passed_descriptor_that_is_no_listening_socket_is_closed_and_told(caplog, tmp_path):
    with open(tmp_path / "file", "w") as file, socket.socket() as connected:
        opened(passed={"gateway": os.dup(file.fileno()), "gateway#2": os.dup(connected.fileno())})
    assert caplog.text.count("cannot take over descriptor") == 2
