"""The language of systemd: notifications, watchdog, descriptors, jobs and the journal.

The daemon uses it, and works the same where there is no systemd: every function then does nothing or says "none".
Nothing here raises for a manager or a journal that is missing, slow or gone, since telling it something is never
more important than the engines. The two observers at the end read the board and write nothing to it.

Sources: the manual pages sd_notify(3), sd_listen_fds(3), systemd.service(5), systemctl(1), and the description of
the journal's native protocol; behaviour was tried with systemd 252.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

import trio
from attrs import frozen

from llmgw.board import Board
from llmgw.domain.shard import ShardId
from llmgw.domain.status import ConditionKind, Instance, ShardState, Snapshot, Transition, Wish

FIRST_FD = 3
"""Where the descriptors that systemd passes begin (SD_LISTEN_FDS_START)."""

JOURNAL_SOCKET = "/run/systemd/journal/socket"

STATUS_MAX = 240
"""Characters of the status line: `systemctl status` shows it as one line."""

STATUS_PAUSE = 0.5
"""Seconds between two status lines: each costs the manager a message on the bus, and a bar moves often."""

EXTENSION = 15.0
"""Seconds by which a stop that still works asks for more time; renewed every third of it."""

JOURNAL_MAX = 48 * 1024
"""Bytes of one journal entry: larger ones need a memfd, and no line of ours has a reason to be larger."""

JOB_TIMEOUT = 5.0
"""Seconds that the manager has to list its jobs. At power-off it may not answer at all."""

Job = Literal["stop", "restart", "none", "unreadable"]


# -- environment ---------------------------------------------------------------------------------------------


def watchdog_interval(env: Mapping[str, str]) -> float | None:
    """The seconds within which the manager wants to hear something, or None when it does not watch this process."""
    owner = env.get("WATCHDOG_PID")
    if owner and owner != str(os.getpid()):
        return None
    try:
        interval = int(env.get("WATCHDOG_USEC", "")) / 1e6
    except ValueError:
        return None
    return interval if interval > 0 else None


def listen_fds(env: Mapping[str, str]) -> dict[str, int]:
    """Descriptors passed by a socket unit or the descriptor store, by name (`FileDescriptorName=`).

    Of several with one name the first keeps it, the others become `name#2`, `name#3`. They are made close-on-exec,
    so that no engine inherits them.
    """
    if env.get("LISTEN_PID") != str(os.getpid()):
        return {}
    try:
        count = int(env.get("LISTEN_FDS", ""))
    except ValueError:
        return {}
    names = env.get("LISTEN_FDNAMES", "").split(":")
    passed: dict[str, int] = {}
    for index in range(max(0, count)):
        fd = FIRST_FD + index
        try:
            os.set_inheritable(fd, False)
        except OSError:
            continue
        name = names[index] if index < len(names) and names[index] else "unknown"
        number, key = 2, name
        while key in passed:
            key, number = f"{name}#{number}", number + 1
        passed[key] = fd
    return passed


# -- notifications -------------------------------------------------------------------------------------------


class Notifier:
    """Messages to the manager that started this process; without one (no NOTIFY_SOCKET) nothing is sent.

    Each method says whether the message went out. They never block for longer than `patience` seconds: a manager
    that does not read is worse off than we are.
    """

    patience = 0.2

    def __init__(self, env: Mapping[str, str]) -> None:
        address = env.get("NOTIFY_SOCKET", "")
        self._address: str | None = None
        if address.startswith("/"):
            self._address = address
        elif address.startswith("@"):  # the abstract namespace, written readably
            self._address = "\0" + address[1:]

    def __bool__(self) -> bool:
        """Is there anybody to tell?"""
        return self._address is not None

    def ready(self, status: str) -> bool:
        """The configuration is applied and the control socket bound; also the end of a reload."""
        return self._send("READY=1", f"STATUS={_one_line(status)}")

    def status(self, text: str) -> bool:
        return self._send(f"STATUS={_one_line(text)}")

    def reloading(self) -> bool:
        """A reload began; `ready` ends it, whether it was accepted or not."""
        # Microseconds of CLOCK_MONOTONIC, which Type=notify-reload (systemd 253) insists on and others ignore.
        return self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str = "stopping") -> bool:
        return self._send("STOPPING=1", f"STATUS={_one_line(status)}")

    def watchdog(self) -> bool:
        return self._send("WATCHDOG=1")

    def extend(self, seconds: float) -> bool:
        """Ask that a start or a stop may take at least `seconds` more from now."""
        return self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def store(self, name: str, fd: int) -> bool:
        """Have a descriptor kept for the next start, also after a crash (sd_pid_notify_with_fds(3)); the unit needs
        FileDescriptorStoreMax=. One that is kept already is not kept twice.
        """
        return self._send("FDSTORE=1", f"FDNAME={name}", fds=(fd,))

    def forget(self, name: str) -> bool:
        """The descriptors of this name are not to be kept any more."""
        return self._send("FDSTOREREMOVE=1", f"FDNAME={name}")

    def _send(self, *assignments: str, fds: Sequence[int] = ()) -> bool:
        return self._address is not None and _send_datagram(
            self._address, "\n".join(assignments).encode("utf-8", "replace"), self.patience, fds
        )


def _send_datagram(address: str, data: bytes, patience: float, fds: Sequence[int] = ()) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(patience)
            # Not socket.send_fds, which ignores its address in Python 3.11.
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            sock.sendmsg([data], rights, 0, address)
    except OSError:  # nobody there, not allowed, or the queue stays full
        return False
    return True


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= STATUS_MAX else flat[: STATUS_MAX - 1] + "…"


# -- journal -------------------------------------------------------------------------------------------------

_FIELD_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}\Z")

MESSAGE_IDS: Mapping[str, str] = {
    "state": "0d66e23eca744bf3b0bb2e281acb41e0",
    "condition": "e0911f1b5ca2479b8c952c656ec269eb",
    "wish": "fdef4db22b0c480082552741e06c7df1",
    "llmgw": "248f8f1be1b7488e8fb0fc2fc657d303",
}
"""MESSAGE_ID= by the kind of a line of the history: `journalctl MESSAGE_ID=…` finds all of one kind."""


def journal(message: str, priority: int = 6, *, address: str = JOURNAL_SOCKET, **fields: str) -> bool:
    """Write one structured entry; says whether it went out. Priorities as in syslog: 3 error, 4 warning, 6 info.

    Fields are upper-case names (`LLMGW_SHARD`); others are a mistake of the caller and left out rather than losing
    the entry, which the journal would refuse as a whole.
    """
    return _send_datagram(address, encode_entry(message, priority, fields), 0.0)


def encode_entry(message: str, priority: int, fields: Mapping[str, str]) -> bytes:
    """The bytes of an entry in the journal's native protocol, at most JOURNAL_MAX of them."""
    entry = bytearray()
    everything = {"PRIORITY": str(priority), "SYSLOG_IDENTIFIER": "llmgw", **fields}
    for name, value in everything.items():
        if _FIELD_NAME.match(name):
            entry += _encode_field(name, value, 1024)
    return bytes(entry + _encode_field("MESSAGE", message, JOURNAL_MAX - len(entry) - 64))


def _encode_field(name: str, value: str, limit: int) -> bytes:
    data = value.encode("utf-8", "replace")[: max(0, limit)]
    if b"\n" not in data:
        return name.encode() + b"=" + data + b"\n"
    # A value of several lines is announced by its length, 64 bits little endian.
    return name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"


def describe_line(line: Transition) -> tuple[str, int, dict[str, str]]:
    """Message, priority and fields of the journal entry for one line of the board's history."""
    moved = line.before is not None and line.before != line.after
    arrow = f"{line.before} -> {line.after}: " if moved else ""
    message = f"{line.shard}: {arrow}{line.text}" if line.shard else line.text
    fields = {
        "MESSAGE_ID": MESSAGE_IDS.get(line.kind, MESSAGE_IDS["llmgw"]),
        "LLMGW_EVENT": line.kind,
        "LLMGW_SEQUENCE": str(line.sequence),
        "LLMGW_SHARD": line.shard or None,
        "LLMGW_STATE": line.after,
        "LLMGW_STATE_BEFORE": line.before,
        "LLMGW_BY": line.by,
    }
    return message, _priority(line, moved), {name: value for name, value in fields.items() if value is not None}


_LOUD = (ConditionKind.BUG,)
_WARNING = (
    ConditionKind.STALLED,
    ConditionKind.UNHEALTHY,
    ConditionKind.MEMBER_LOST,
    ConditionKind.GPU_HELD,
    ConditionKind.UNPLACED,
    ConditionKind.HELD,
)


def _priority(line: Transition, moved: bool) -> int:
    if moved and line.after == ShardState.FAILED:
        return 3
    if line.kind == "condition" and not line.text.endswith(": over"):
        if any(line.text.startswith(f"{kind}:") for kind in _LOUD):
            return 3
        if any(line.text.startswith(f"{kind}:") for kind in _WARNING):
            return 4
    return 5 if moved or line.kind == "wish" else 6


# -- which unit, which job -----------------------------------------------------------------------------------


@frozen
class Unit:
    """The service that this process belongs to. `user` means: of a user's own manager."""

    name: str
    user: bool = False

    def __str__(self) -> str:
        return self.name


def own_unit(cgroup: str) -> Unit | None:
    """The service unit named by the text of /proc/self/cgroup, or None outside a service (terminal, container)."""
    paths = {}
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controllers == "name=systemd":
            paths["unified" if number == "0" else "named"] = path
    # On a hybrid host both exist; a process may have been moved in the unified tree only.
    for path in (paths.get("unified", ""), paths.get("named", "")):
        parts = [part for part in path.split("/") if part]
        units = [part for part in parts if part.endswith((".service", ".scope", ".slice"))]
        # The innermost unit counts: a terminal is a scope somewhere below user@1000.service.
        if units and units[-1].endswith(".service"):
            user = any(part.startswith("user@") for part in units[:-1])
            return Unit(units[-1], user)
        if units:
            return None
    return None


class ToolAnswer(Protocol):
    """What pending_job needs of a finished tool."""

    @property
    def code(self) -> int | None: ...
    @property
    def stdout(self) -> bytes: ...


class RunTool(Protocol):
    """Runs a short-lived program; see supervisor/tools.py."""

    def __call__(self, argv: Sequence[str], *, timeout: float) -> Awaitable[ToolAnswer]: ...


async def pending_job(run_tool: RunTool, unit: Unit | str | None) -> Job:
    """What the manager is about to do with `unit`: this is how a stop differs from a restart.

    Both are SIGTERM to the process; the queued job tells them apart. `none` is a SIGTERM by hand, a crash, or no
    unit at all; `unreadable` is a manager that does not answer (no bus, late at power-off).
    """
    if unit is None:
        return "none"
    scope = ("--user",) if isinstance(unit, Unit) and unit.user else ()
    argv = ("systemctl", *scope, "--no-legend", "--plain", "--no-pager", "list-jobs")
    try:
        answer = await run_tool(argv, timeout=JOB_TIMEOUT)
    except OSError:
        return "unreadable"
    if answer.code != 0:
        return "unreadable"
    return read_jobs(answer.stdout.decode("utf-8", "replace"), str(unit))


def read_jobs(listing: str, unit: str) -> Job:
    """The job of `unit` in the output of `systemctl --no-legend --plain list-jobs`: number, unit, type, state."""
    for line in listing.splitlines():
        columns = line.split()
        if len(columns) >= 3 and columns[1] == unit:
            if columns[2] == "stop":
                return "stop"
            if columns[2] == "restart":
                return "restart"
    return "none"


# -- the status line -----------------------------------------------------------------------------------------

_CONDITION_RANK = {
    ConditionKind.BUG: 1,
    ConditionKind.UNHEALTHY: 2,
    ConditionKind.STALLED: 2,
    ConditionKind.GPU_HELD: 2,
    ConditionKind.MEMBER_LOST: 3,
    ConditionKind.HELD: 3,
    ConditionKind.UNPLACED: 3,
}
_STATE_RANK = {
    ShardState.FAILED: 0,
    ShardState.LOADING: 4,
    ShardState.STARTING: 5,
    ShardState.DRAINING: 6,
    ShardState.PENDING: 7,
}
_DULL = 9


def status_line(snapshot: Snapshot) -> str:
    """One line for `systemctl status`: counts and the shard that most wants attention.

    `2/3 ready; llama-70b loading 45%`. What nobody wants to run is not counted.
    """
    instances = [instance for _, instance in sorted(snapshot.shards.items(), key=_in_order)]
    if not instances:
        return "no shards"
    wanted = [i for i in instances if i.intent.wish is not Wish.STOP]
    ready = sum(i.status.state is ShardState.READY for i in wanted)
    counts = f"{ready}/{len(wanted)} ready" if wanted else f"{len(instances)} stopped"
    telling = sorted((i for i in instances if _rank(i) < _DULL), key=_rank)
    if not telling:
        return counts
    more = f" (and {len(telling) - 1} more)" if len(telling) > 1 else ""
    return _one_line(f"{counts}; {_in_words(telling[0])}{more}")


def leaving_line(snapshot: Snapshot, *, engines_stay: bool) -> str:
    """The status line while llmgw ends."""
    alive = [i for _, i in sorted(snapshot.shards.items(), key=_in_order) if i.status.state.is_live]
    if engines_stay:
        return f"leaving; {len(alive)} engines stay" if len(alive) != 1 else "leaving; 1 engine stays"
    if not alive:
        return "stopping; no engine left"
    return _one_line(f"stopping; {len(alive)} left; {_in_words(alive[0])}")


def _in_order(item: tuple[ShardId, Instance]) -> ShardId:
    return item[0]


def _rank(instance: Instance) -> int:
    status = instance.status
    if instance.intent.wish is Wish.STOP and not status.state.is_live and not status.conditions:
        return _DULL
    conditions = [_CONDITION_RANK.get(condition.kind, _DULL) for condition in status.conditions]
    return min([_STATE_RANK.get(status.state, _DULL), *conditions])


def _in_words(instance: Instance) -> str:
    status = instance.status
    words = f"{status.name} {status.state}"
    telling = [c for c in status.conditions if c.kind in _CONDITION_RANK]
    if status.state is ShardState.FAILED:
        backoff = status.condition(ConditionKind.BACKOFF)
        cause = status.reason.cause if status.reason else status.detail
        return words + (f": {cause}" if cause else "") + (f", {backoff.text}" if backoff else "")
    if telling:
        worst = min(telling, key=lambda c: _CONDITION_RANK[c.kind])
        return f"{words}, {worst.kind}: {worst.text}"
    progress = status.progress
    if progress is not None and progress.fraction is not None:
        return f"{words} {progress.fraction:.0%}"
    if progress is not None:
        return f"{words} ({progress.phase})"
    return f"{words} ({status.detail})" if status.detail else words


# -- observers of the board ----------------------------------------------------------------------------------


async def serve_notify(
    board: Board,
    notifier: Notifier,
    *,
    watchdog: float | None = None,
    longest_stop: Callable[[], float] = lambda: 300.0,
) -> None:
    """Tell the manager READY, then the status whenever it changes, until cancelled.

    To be started when the configuration is applied and the control socket is bound: that is what READY=1 says, not
    that models are loaded. `watchdog` is the interval of `watchdog_interval()`: half of it passes between two
    signs of life, and they come from this event loop, so that a loop that is blocked misses them.

    Once `board.leaving` is set, the manager hears STOPPING=1 and is asked for more time while engines are stopped,
    for at most `longest_stop()` seconds: a stop that hangs for ever must end in the manager's SIGKILL.
    """
    if not notifier:
        await trio.sleep_forever()
    async with trio.open_nursery() as nursery:
        # First of all, since the first sign of life is due from READY on.
        notifier.ready(status_line(board.snapshot))
        if watchdog is not None:
            nursery.start_soon(_ping, notifier, watchdog / 2)
        nursery.start_soon(_ask_for_time, board, notifier, longest_stop)
        nursery.start_soon(_tell_status, board, notifier)


async def _ping(notifier: Notifier, pause: float) -> None:
    while True:
        notifier.watchdog()
        await trio.sleep(pause)


async def _tell_status(board: Board, notifier: Notifier) -> None:
    told = status_line(board.snapshot)
    revision = board.snapshot.revision
    while True:
        leaving = board.leaving.value
        line = (
            status_line(board.snapshot)
            if leaving is None
            else leaving_line(board.snapshot, engines_stay=leaving.engines_stay)
        )
        if line != told and notifier.status(line):
            told = line
        await trio.sleep(STATUS_PAUSE)
        await _wait_news(board, revision)
        revision = board.snapshot.revision


async def _wait_news(board: Board, revision: int) -> None:
    """Until the board is newer than `revision` or llmgw leaves; later no more than the board counts."""
    if board.leaving.value is not None:
        await board.wait_newer(revision)
        return
    async with trio.open_nursery() as nursery:

        async def then_end(wait: Callable[[], Awaitable[object]]) -> None:
            await wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(then_end, lambda: board.wait_newer(revision))
        nursery.start_soon(then_end, lambda: board.leaving.wait_change(None))


async def _ask_for_time(board: Board, notifier: Notifier, longest_stop: Callable[[], float]) -> None:
    leaving = await board.leaving.wait_value(lambda value: value is not None)
    assert leaving is not None
    if leaving.all_stay:
        # An upgrade in place. STOPPING=1 would be taken at its word: the unit would be ended though the process goes
        # on (measured). For systemd it is a reload, which the new code's READY ends.
        notifier.reloading()
        return
    notifier.stopping(leaving_line(board.snapshot, engines_stay=leaving.engines_stay))
    with trio.move_on_after(longest_stop()):
        while True:
            notifier.extend(EXTENSION)
            await trio.sleep(EXTENSION / 3)


async def serve_journal(board: Board, write: Callable[..., bool] = journal) -> None:
    """Write every line of the board's history into the journal, with fields, until cancelled.

    A journal that does not take an entry loses it; nothing here waits for it. The rest is written when cancelled,
    so that the last words of a stop are there.
    """
    told = 0

    def tell() -> None:
        nonlocal told
        dropped, lines = board.history(told)
        if dropped:
            write(f"{dropped} events were too many to be written", 4)
        for line in lines:
            message, priority, fields = describe_line(line)
            write(message, priority, **fields)
            told = line.sequence

    try:
        while True:
            revision = board.snapshot.revision
            tell()
            await board.wait_newer(revision)
    finally:
        tell()
