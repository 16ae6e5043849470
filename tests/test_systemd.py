"""What llmgw says to systemd and the journal, and what it understands of their answers."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from llmgw import systemd
from llmgw.board import Board, Leaving, StatusCell
from llmgw.domain.problem import Reason
from llmgw.domain.shard import ShardId
from llmgw.domain.status import (
    ConditionKind,
    ConditionSet,
    Failed,
    Intent,
    Launched,
    LoadingSeen,
    Progress,
    ProgressSeen,
    ReadyConfirmed,
    RetryScheduled,
    ShardStatus,
    Stopped,
    Transition,
    Wish,
)


class Manager:
    """The receiving end of NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(str(path))
        self.sock.setblocking(False)
        self.env = {"NOTIFY_SOCKET": str(path)}

    def heard(self) -> list[str]:
        messages = []
        while True:
            try:
                messages.append(self.sock.recv(65536).decode())
            except BlockingIOError:
                return messages

    async def listen(self, seconds: int) -> list[str]:
        """Everything that comes within that time; read often, since the kernel queues ten messages."""
        messages = []
        for _ in range(seconds):
            await trio.sleep(1)
            messages += self.heard()
        return messages


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    it = Manager(tmp_path / "notify")
    yield it
    it.sock.close()


def add(board: Board, name: str, wish: Wish = Wish.START) -> StatusCell:
    return board.add(ShardStatus(ShardId(name), name, name, "vllm"), Intent(wish))


def launched(cell: StatusCell, pid: int = 10) -> StatusCell:
    cell.report(Launched(pid, pid, 1, "http://127.0.0.1:8101", "hash"))
    return cell


def ready(cell: StatusCell) -> StatusCell:
    launched(cell).report(LoadingSeen("socket"))
    cell.report(ReadyConfirmed())
    return cell


# -- notifications


def test_without_a_notify_socket_nothing_is_sent() -> None:
    notifier = systemd.Notifier({})
    assert not notifier
    assert not notifier.ready("x")


def test_a_manager_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert not systemd.Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")}).watchdog()


def test_ready_carries_the_status_in_one_line(manager: Manager) -> None:
    assert systemd.Notifier(manager.env).ready("two\nlines")
    assert manager.heard() == ["READY=1\nSTATUS=two lines"]


def test_reloading_carries_the_time_that_notify_reload_wants(manager: Manager) -> None:
    systemd.Notifier(manager.env).reloading()
    (message,) = manager.heard()
    assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", message)


def test_more_time_is_asked_for_in_microseconds(manager: Manager) -> None:
    systemd.Notifier(manager.env).extend(1.5)
    assert manager.heard() == ["EXTEND_TIMEOUT_USEC=1500000"]


def test_a_descriptor_is_given_to_the_manager_under_its_name_and_can_be_taken_back(manager: Manager) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        assert systemd.Notifier(manager.env).store("gateway-1", listener.fileno())
        text, (fd,), _, _ = socket.recv_fds(manager.sock, 1000, 4)
        with socket.socket(fileno=fd) as copy:
            assert copy.getsockname() == listener.getsockname()
    assert text == b"FDSTORE=1\nFDNAME=gateway-1"
    systemd.Notifier(manager.env).forget("gateway-1")
    assert manager.heard() == ["FDSTOREREMOVE=1\nFDNAME=gateway-1"]


def test_an_at_sign_names_the_abstract_namespace() -> None:
    name = f"llmgw-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        systemd.Notifier({"NOTIFY_SOCKET": "@" + name}).watchdog()
        assert sock.recv(100) == b"WATCHDOG=1"


def test_a_manager_that_does_not_read_blocks_nobody(manager: Manager) -> None:
    notifier = systemd.Notifier(manager.env)
    notifier.patience = 0.01
    assert any(not notifier.status("x" * 200) for _ in range(10_000))


# -- environment


@pytest.mark.parametrize(
    ("env", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_read_for_this_process_only(env: dict[str, str], seconds: float | None) -> None:
    assert systemd.watchdog_interval(env) == seconds


def test_passed_descriptors_have_names_and_are_kept_from_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    first = os.dup(0)
    second = os.dup(0)
    if second != first + 1:
        os.dup2(second, first + 1)
        second = first + 1
    os.set_inheritable(first, True)
    monkeypatch.setattr(systemd, "FIRST_FD", first)
    try:
        env = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "control:control"}
        assert systemd.listen_fds(env) == {"control": first, "control#2": second}
        assert not os.get_inheritable(first)
    finally:
        os.close(first)
        os.close(second)


def test_descriptors_of_another_process_are_not_ours() -> None:
    assert systemd.listen_fds({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == {}
    assert systemd.listen_fds({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"}) == {}


# -- journal


def decode(entry: bytes) -> dict[str, str]:
    """The journal's own reading of an entry."""
    fields = {}
    while entry:
        line, _, rest = entry.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            (length,) = struct.unpack("<Q", rest[:8])
            value, rest = rest[8 : 8 + length], rest[9 + length :]
        fields[name.decode()] = value.decode("utf-8", "replace")
        entry = rest
    return fields


def test_an_entry_has_message_priority_and_fields() -> None:
    entry = systemd.encode_entry("a: failed", 3, {"LLMGW_SHARD": "a"})
    assert decode(entry) == {
        "PRIORITY": "3",
        "SYSLOG_IDENTIFIER": "llmgw",
        "LLMGW_SHARD": "a",
        "MESSAGE": "a: failed",
    }


def test_a_field_that_the_journal_would_refuse_does_not_cost_the_entry() -> None:
    assert "MESSAGE" in decode(systemd.encode_entry("x", 6, {"lower": "y", "_TRUSTED": "z"}))
    assert b"lower" not in systemd.encode_entry("x", 6, {"lower": "y"})


@given(st.text(max_size=500), st.text(max_size=2000))
def test_no_text_can_forge_a_field(message: str, value: str) -> None:
    decoded = decode(systemd.encode_entry(message, 6, {"LLMGW_SHARD": value}))
    assert set(decoded) == {"PRIORITY", "SYSLOG_IDENTIFIER", "LLMGW_SHARD", "MESSAGE"}
    assert decoded["MESSAGE"] == message.encode("utf-8", "replace").decode()


def test_a_huge_message_is_cut() -> None:
    assert len(systemd.encode_entry("x" * 10**6, 6, {"LLMGW_SHARD": "y" * 10**6})) <= systemd.JOURNAL_MAX


def test_a_journal_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert systemd.journal("x", address=str(tmp_path / "none")) is False


@pytest.mark.parametrize(
    ("line", "priority"),
    [
        (Transition(1, 0, "a", "state", "out of memory", "loading", "failed"), 3),
        (Transition(1, 0, "a", "state", "ready", "loading", "ready"), 5),
        (Transition(1, 0, "a", "condition", "bug: illegal transition", "ready", "ready"), 3),
        (Transition(1, 0, "a", "condition", "unhealthy: 503", "ready", "ready"), 4),
        (Transition(1, 0, "a", "condition", "unhealthy: over", "ready", "ready"), 6),
        (Transition(1, 0, "a", "wish", "stop by uid 0", None, None, "uid 0"), 5),
        (Transition(1, 0, "", "llmgw", "reloaded"), 6),
    ],
)
def test_priorities_follow_what_a_person_must_look_at(line: Transition, priority: int) -> None:
    assert systemd.describe_line(line)[1] == priority


def test_fields_say_shard_state_and_asker() -> None:
    line = Transition(7, 0, "a", "state", "crashed", "ready", "failed", "uid 0")
    message, _, fields = systemd.describe_line(line)
    assert message == "a: ready -> failed: crashed"
    assert fields["LLMGW_SHARD"] == "a"
    assert (fields["LLMGW_STATE_BEFORE"], fields["LLMGW_STATE"], fields["LLMGW_BY"]) == ("ready", "failed", "uid 0")
    assert fields["MESSAGE_ID"] == systemd.MESSAGE_IDS["state"]


def test_message_ids_differ_and_have_the_form_of_one() -> None:
    ids = list(systemd.MESSAGE_IDS.values())
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", id_) for id_ in ids)


# -- which unit, which job


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/llmgw.service\n", systemd.Unit("llmgw.service")),
        ("0::/system.slice/llmgw.service/.control\n", systemd.Unit("llmgw.service")),
        ("0::/system.slice/llmgw.service/supervisor\n", systemd.Unit("llmgw.service")),
        ("12:cpu:/x\n1:name=systemd:/system.slice/llmgw.service\n0::/\n", systemd.Unit("llmgw.service")),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/llmgw.service\n",
            systemd.Unit("llmgw.service", user=True),
        ),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", None),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/terminal-7.scope\n", None),
        ("0::/\n", None),
        ("", None),
        ("nonsense", None),
    ],
)
def test_the_own_unit_is_the_innermost_service(cgroup: str, unit: systemd.Unit | None) -> None:
    assert systemd.own_unit(cgroup) == unit


JOBS = """\
 812 llmgw.service          stop    running
 813 xllmgw.service         restart waiting
 814 llmgw.service.d        restart waiting
 815 shutdown.target        start   waiting
"""


def test_the_job_is_that_of_exactly_this_unit() -> None:
    assert systemd.read_jobs(JOBS, "llmgw.service") == "stop"
    assert systemd.read_jobs(JOBS, "xllmgw.service") == "restart"
    assert systemd.read_jobs(JOBS, "shutdown.target") == "none"
    assert systemd.read_jobs("", "llmgw.service") == "none"


@frozen
class Answer:
    code: int | None
    stdout: bytes = b""


@pytest.mark.parametrize(
    ("answer", "job"),
    [
        (Answer(0, b"1 llmgw.service restart running\n"), "restart"),
        (Answer(0), "none"),
        (Answer(1), "unreadable"),
        (Answer(None), "unreadable"),
    ],
)
async def test_a_manager_that_cannot_be_asked_is_not_a_no(answer: Answer, job: str) -> None:
    asked: list[Sequence[str]] = []

    async def run_tool(argv: Sequence[str], *, timeout: float) -> Answer:
        await trio.lowlevel.checkpoint()
        asked.append(argv)
        return answer

    assert await systemd.pending_job(run_tool, systemd.Unit("llmgw.service", user=True)) == job
    assert "--user" in asked[0]


async def test_without_systemctl_the_job_is_unreadable() -> None:
    async def run_tool(argv: Sequence[str], *, timeout: float) -> Answer:
        await trio.lowlevel.checkpoint()
        raise FileNotFoundError(argv[0])

    assert await systemd.pending_job(run_tool, "llmgw.service") == "unreadable"
    assert await systemd.pending_job(run_tool, None) == "none"


# -- the status line


def test_the_status_line_shows_the_load() -> None:
    board = Board(strict=True)
    ready(add(board, "a"))
    ready(add(board, "b"))
    launched(add(board, "llama-70b")).report(ProgressSeen(Progress("weights", 0.45)))
    assert systemd.status_line(board.snapshot) == "2/3 ready; llama-70b loading 45%"


def test_a_failure_is_told_before_a_load() -> None:
    board = Board(strict=True)
    launched(add(board, "a"))
    failing = launched(add(board, "z"))
    failing.report(Failed(Reason("D4", "CUDA out of memory")))
    failing.report(RetryScheduled(9.0, 3, 5))
    assert systemd.status_line(board.snapshot) == "0/2 ready; z failed: CUDA out of memory, retry 3/5 (and 1 more)"


def test_a_condition_of_a_ready_shard_is_told() -> None:
    board = Board(strict=True)
    ready(add(board, "a")).report(ConditionSet(ConditionKind.STALLED, "no step for 60 s"))
    assert systemd.status_line(board.snapshot) == "1/1 ready; a ready, stalled: no step for 60 s"


def test_what_nobody_wants_is_not_counted() -> None:
    board = Board(strict=True)
    ready(add(board, "a"))
    add(board, "b", Wish.STOP).report(Stopped("never started"))
    assert systemd.status_line(board.snapshot) == "1/1 ready"
    assert systemd.status_line(Board().snapshot) == "no shards"


def test_a_long_cause_is_cut_to_one_line() -> None:
    board = Board(strict=True)
    launched(add(board, "a")).report(Failed(Reason("x", "why\n" * 1000)))
    line = systemd.status_line(board.snapshot)
    assert len(line) <= systemd.STATUS_MAX
    assert "\n" not in line


# -- observers


async def test_the_manager_hears_ready_first_and_then_every_change(manager: Manager, autojump_clock: object) -> None:
    board = Board(strict=True)
    cell = add(board, "a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(systemd.serve_notify, board, systemd.Notifier(manager.env))
        await trio.sleep(1)
        assert manager.heard() == ["READY=1\nSTATUS=0/1 ready; a pending"]
        ready(cell)
        await trio.sleep(1)
        assert manager.heard() == ["STATUS=1/1 ready"]
        nursery.cancel_scope.cancel()


async def test_the_watchdog_hears_twice_per_interval(manager: Manager, autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: systemd.serve_notify(Board(), systemd.Notifier(manager.env), watchdog=2.0))
        await trio.sleep(0.5)
        manager.heard()
        heard = await manager.listen(10)
        nursery.cancel_scope.cancel()
    assert heard.count("WATCHDOG=1") == 10


async def test_many_changes_cost_few_messages(manager: Manager, autojump_clock: object) -> None:
    board = Board(strict=True)
    cell = launched(add(board, "a"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(systemd.serve_notify, board, systemd.Notifier(manager.env))
        for step in range(100):
            cell.report(ProgressSeen(Progress("weights", step / 100)))
            await trio.sleep(0.01)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    heard = manager.heard()
    assert len(heard) <= 5
    assert heard[-1] == "STATUS=0/1 ready; a loading 99%"


async def test_a_stop_asks_for_more_time_but_not_for_ever(manager: Manager, autojump_clock: object) -> None:
    board = Board(strict=True)
    ready(add(board, "a"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: systemd.serve_notify(board, systemd.Notifier(manager.env), longest_stop=lambda: 60.0)
        )
        await trio.sleep(1)
        manager.heard()
        board.leaving.set(Leaving("SIGTERM", engines_stay=False))
        heard = await manager.listen(600)
        nursery.cancel_scope.cancel()
    assert heard[0] == "STOPPING=1\nSTATUS=stopping; 1 left; a ready"
    assert 10 <= sum(message.startswith("EXTEND_TIMEOUT_USEC=") for message in heard) <= 13


async def test_leaving_says_that_engines_stay(manager: Manager, autojump_clock: object) -> None:
    board = Board(strict=True)
    ready(add(board, "a"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(systemd.serve_notify, board, systemd.Notifier(manager.env))
        await trio.sleep(1)
        board.leaving.set(Leaving("restart", engines_stay=True))
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert "STOPPING=1\nSTATUS=leaving; 1 engine stays" in manager.heard()


async def test_an_upgrade_in_place_is_a_reload_and_no_stop(manager: Manager, autojump_clock: object) -> None:
    board = Board(strict=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(systemd.serve_notify, board, systemd.Notifier(manager.env))
        await trio.sleep(1)
        board.leaving.set(Leaving("upgrade", engines_stay=True, all_stay=True))
        heard = await manager.listen(20)
        nursery.cancel_scope.cancel()
    assert any(message.startswith("RELOADING=1") for message in heard)
    assert not any("STOPPING" in message for message in heard)


async def test_every_event_reaches_the_journal_once_and_the_last_ones_at_the_end() -> None:
    board = Board(strict=True)
    cell = add(board, "a")
    written: list[str] = []

    def write(message: str, priority: int, **fields: str) -> bool:
        written.append(message)
        return True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(systemd.serve_journal, board, write)
        ready(cell)
        await trio.testing.wait_all_tasks_blocked()
        cell.report(Stopped("SIGTERM, 4.2 s"))
        nursery.cancel_scope.cancel()
    assert [line.split(":")[1] for line in written] == [
        " pending -> starting",
        " starting -> loading",
        " loading -> ready",
        " ready -> stopped",
    ]


async def test_a_journal_that_was_too_slow_says_how_much_it_missed() -> None:
    board = Board(strict=True)
    written: list[str] = []

    def write(message: str, priority: int, **fields: str) -> bool:
        written.append(message)
        return True

    for _ in range(1500):
        board.note("x")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(systemd.serve_journal, board, write)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert written[0] == "500 events were too many to be written"
    assert len(written) == 1001
