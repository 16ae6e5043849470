"""Asks the running llmgw over its control socket. For verbs that must start at once: standard library only.

Speaks HTTP/1.0, so that an answer ends where the connection does and a stream arrives line by line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping

from llmgw import __version__
from llmgw.domain import directories

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

API = 1
ANSWER_MAX = 64 * 1024 * 1024
"""Bytes of one answer; a status of 500 shards has half a megabyte."""
HEAD_MAX = 64 * 1024
PATH_MAX = 107
"""Bytes of a unix socket's path (unix(7): sun_path is 108 with its final zero). Longer ones go through a descriptor."""

FAILED = 1
NO_SUCH_SHARD = 4
UNREACHABLE = 5
CONFIG = 78

_JOURNAL = "see: journalctl -u llmgw -e"


class ClientError(Exception):
    """No usable answer. `exit_code` is the command's; `message` and `hint` are for people."""

    def __init__(self, exit_code: int, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.message = message
        self.hint = hint


# -- which socket ----------------------------------------------------------------------------------------


def find_socket(option: str | None, env: Mapping[str, str], uid: int) -> str:
    """The socket to ask: `--socket`, `$LLMGW_SOCKET`, the caller's own runtime directory, the system's.

    Never fails: where none exists it is the path to name in the error.
    """
    given = option or env.get("LLMGW_SOCKET")
    if given:
        return given
    folders = directories.socket_folders(env, uid, _home(env, uid))
    for folder in folders:
        path = f"{folder}/{directories.SOCKET_NAME}"
        if _exists(path):
            return path
        pointed = _pointed_at(f"{folder}/{directories.SOCKET_POINTER}")
        if pointed:
            return pointed
    used = next((folder for folder in folders if os.path.isdir(folder)), folders[-1])
    return f"{used}/{directories.SOCKET_NAME}"


def _exists(path: str) -> bool:
    try:
        os.stat(path)
    except PermissionError:
        # It may well be there: connecting tells the caller about the missing right.
        return True
    except OSError:
        return False
    return True


def _pointed_at(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            text = os.fsdecode(file.read(4097)).strip()
    except OSError:
        return None
    return text if text.startswith("/") and len(text) <= 4096 else None


def _home(env: Mapping[str, str], uid: int) -> str:
    if env.get("HOME"):
        return env["HOME"]
    import pwd

    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return "/"


# -- asking ----------------------------------------------------------------------------------------------


def request(
    socket_path: str, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float = 5.0
) -> tuple[int, dict[str, Any]]:
    """Ask once; return HTTP status and JSON body, also for a refusal.

    `path` is percent-encoded already, `timeout` is seconds for the whole exchange. Raises ClientError.
    """
    deadline = time.monotonic() + timeout
    with _connect(socket_path, deadline) as connection:
        _send(connection, method, path, body)
        status, headers, data = _read_head(connection, deadline, socket_path)
        while len(data) <= ANSWER_MAX:
            more = _receive(connection, deadline, socket_path)
            if not more:
                break
            data += more
        else:
            raise ClientError(UNREACHABLE, f"llmgw at {socket_path} answers without end", _JOURNAL)
        return status, _answer(status, headers, bytes(data), socket_path)


def stream(socket_path: str, path: str, *, timeout: float = 5.0) -> Iterator[dict[str, Any]]:
    """The objects of an NDJSON stream, until llmgw ends it. `timeout` is for the head of the answer only.

    Raises ClientError, with the daemon's own words where it refuses.
    """
    deadline = time.monotonic() + timeout
    with _connect(socket_path, deadline) as connection:
        _send(connection, "GET", path, None)
        status, headers, data = _read_head(connection, deadline, socket_path)
        if status >= 400:
            while more := _receive(connection, deadline, socket_path):
                data += more
            raise refusal(status, _answer(status, headers, bytes(data), socket_path))
        _check_version(headers, None)
        while True:
            # Split off whole lines at once: a line by line cut of a long buffer would be quadratic.
            *lines, rest = bytes(data).split(b"\n")
            for line in lines:
                if line:
                    yield _parse(line, socket_path)
            data = bytearray(rest)
            if len(data) > ANSWER_MAX:
                raise ClientError(UNREACHABLE, f"llmgw at {socket_path} sends a line without end", _JOURNAL)
            more = _receive(connection, None, socket_path)
            if not more:
                return
            data += more


def refusal(status: int, answer: Mapping[str, Any]) -> ClientError:
    """The daemon's words for an HTTP status of 400 and above, with the exit code that belongs to them."""
    error = answer.get("error")
    error = error if isinstance(error, dict) else {}
    code = {422: CONFIG, 503: UNREACHABLE}.get(status, FAILED)
    if status == 404 and error.get("code") == "no-such-shard":
        code = NO_SUCH_SHARD
    return ClientError(code, error.get("message") or f"llmgw answered with HTTP status {status}", error.get("hint"))


def _connect(path: str, deadline: float) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(_left(deadline))
            _connect_to(connection, path)
        except BlockingIOError:
            # The queue of connections is full (unix(7), EAGAIN): a busy llmgw, or one that is stopped.
            connection.close()
            if time.monotonic() >= deadline:
                raise _no_answer(None) from None
            time.sleep(0.02)
        except OSError as error:
            connection.close()
            raise _unreachable(path, error) from error
        else:
            return connection


def _connect_to(connection: socket.socket, path: str) -> None:
    if len(os.fsencode(path)) <= PATH_MAX:
        connection.connect(path)
        return
    folder = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)


def _send(connection: socket.socket, method: str, path: str, body: dict[str, Any] | None) -> None:
    head = f"{method} {path} HTTP/1.0\r\nHost: llmgw\r\nUser-Agent: llmgw/{__version__}\r\n"
    data = b""
    if body is not None:
        data = json.dumps(body).encode()
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    elif method == "POST":
        head += "Content-Length: 0\r\n"
    try:
        connection.sendall(head.encode("ascii") + b"\r\n" + data)
    except TimeoutError:
        raise _no_answer(connection) from None
    except OSError:
        # It may have answered before it hung up (413 for instance): reading tells.
        pass


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _receive(connection: socket.socket, deadline: float | None, socket_path: str) -> bytes:
    connection.settimeout(None if deadline is None else _left(deadline))
    try:
        return connection.recv(262144)
    except TimeoutError:
        raise _no_answer(connection) from None
    except ConnectionError:
        return b""
    except OSError as error:
        raise ClientError(UNREACHABLE, f"cannot read from {socket_path}: {error.strerror}", _JOURNAL) from error


def _read_head(connection: socket.socket, deadline: float, socket_path: str) -> tuple[int, dict[str, str], bytearray]:
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        more = _receive(connection, deadline, socket_path)
        if not more:
            raise ClientError(UNREACHABLE, f"llmgw{_pid_of(connection)} hung up without an answer", _JOURNAL)
        data += more
        if len(data) > HEAD_MAX and data.find(b"\r\n\r\n") < 0:
            raise _not_llmgw(socket_path)
    first, *rest = bytes(data[:end]).decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
        raise _not_llmgw(socket_path)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
    return int(words[1]), headers, data[end + 4 :]


def _answer(status: int, headers: Mapping[str, str], data: bytes, socket_path: str) -> dict[str, Any]:
    length = headers.get("content-length", "")
    if length.isdecimal() and len(data) < int(length):
        raise ClientError(UNREACHABLE, f"llmgw at {socket_path} hung up in the middle of its answer", _JOURNAL)
    answer = _parse(data, socket_path)
    if status < 400:
        _check_version(headers, answer.get("api"))
    return answer


def _parse(data: bytes, socket_path: str) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise _not_llmgw(socket_path)
    return answer


def _check_version(headers: Mapping[str, str], api: object) -> None:
    spoken = headers.get("llmgw-api") or (str(api) if api is not None else str(API))
    if spoken != str(API):
        running = headers.get("llmgw-version", "another version")
        raise ClientError(
            UNREACHABLE,
            f"this is llmgw {__version__}, the running one is {running} and speaks api {spoken}",
            "still works: the llmgw command of that version, and curl on the socket. "
            "To run this version: systemctl restart llmgw (engines stay)",
        )


# -- why there is no answer ------------------------------------------------------------------------------

_START = "start one with: llmgw run llmgw.toml   or: systemctl start llmgw"
_AGAIN = "start it again with: llmgw run llmgw.toml   or: systemctl start llmgw   (takes over engines that still run)"
_ELSEWHERE = "one whose file names a runtime_dir is reached by: llmgw -s RUNTIME_DIR/control.sock, or by LLMGW_SOCKET"


def _unreachable(path: str, error: OSError) -> ClientError:
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return ClientError(
                UNREACHABLE,
                f"no llmgw is running here ({path} does not exist)",
                _with_engines(_START, path, otherwise=f"\n{_ELSEWHERE}"),
            )
        case ConnectionRefusedError():
            return ClientError(
                UNREACHABLE,
                f"{path} exists but nobody listens: llmgw died",
                _with_engines(_JOURNAL, path, otherwise=f"\n{_AGAIN}"),
            )
        case PermissionError():
            return ClientError(UNREACHABLE, f"no permission for {path}", _how_to_get_permission(path))
        case TimeoutError():
            return _no_answer(None)
        case _:
            return ClientError(UNREACHABLE, f"cannot connect to {path}: {error.strerror or error}")


def _how_to_get_permission(path: str) -> str:
    import grp

    group = "llmgw"
    try:
        gid = os.stat(path).st_gid
        if gid == 0:
            return "use sudo"
        group = grp.getgrgid(gid).gr_name
    except (OSError, KeyError):
        # The folder above refuses: the usual group is the best guess.
        pass
    return f"join the group {group} (usermod -aG {group} $USER, then log in again), or use sudo"


def _no_answer(connection: socket.socket | None) -> ClientError:
    return ClientError(UNREACHABLE, f"llmgw{_pid_of(connection)} does not answer", _JOURNAL)


def _not_llmgw(path: str) -> ClientError:
    return ClientError(UNREACHABLE, f"what listens at {path} does not answer like llmgw", "is --socket right?")


def _pid_of(connection: socket.socket | None) -> str:
    """` (pid 812)`. Under socket activation the kernel names systemd, which made the socket: no pid then."""
    if connection is None:
        return ""
    try:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError:
        return ""
    pid = int.from_bytes(credentials[:4], sys.byteorder, signed=True)
    return f" (pid {pid})" if pid > 1 else ""


def _with_engines(hint: str, socket_path: str, *, otherwise: str = "") -> str:
    """The hint, with the engines that an llmgw of this socket has left running; `otherwise` where there are none."""
    engines: list[tuple[str, int]] = []
    for folder in _state_directories(socket_path):
        engines = living_engines(folder)
        if engines:
            break
    if not engines:
        return hint + otherwise
    shown = ", ".join(f"{name} pid {pid}" for name, pid in engines[:3]) + (", ..." if len(engines) > 3 else "")
    count = "1 engine still runs" if len(engines) == 1 else f"{len(engines)} engines still run"
    them = "it" if len(engines) == 1 else "them"
    return f"{hint}\n{count} ({shown}): llmgw run takes {them} over, llmgw sweep ends {them}"


def _state_directories(socket_path: str) -> tuple[str, ...]:
    uid = os.getuid()
    usual = directories.state_directory(os.environ, uid, _home(os.environ, uid))
    # A runtime directory inside the state directory tells where that is (see directories.runtime_directory).
    beside = os.path.dirname(os.path.dirname(os.path.abspath(socket_path)))
    return tuple(dict.fromkeys((beside, usual, directories.SYSTEM_STATE)))


def living_engines(state_dir: str) -> list[tuple[str, int]]:
    """Name and pid of every engine that a record in the state directory names and that is alive. Never raises.

    Reads the few keys of `supervisor.records` by itself, whose module would take longer to load than all of this.
    """
    boot_id = _read_text("/proc/sys/kernel/random/boot_id")
    found: list[tuple[str, int, int]] = []
    for path in _record_files(f"{state_dir}/shards"):
        try:
            record = json.loads(_read_text(path) or "")
            shard, replica, pid = str(record["shard"]), int(record["replica"]), int(record["pid"])
            alive = record["boot_id"] == boot_id and _is_alive(pid, int(record["start_ticks"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if alive:
            found.append((shard, replica, pid))
    several = {shard for shard, replica, _ in found if replica}
    return [(f"{shard}/{replica}" if shard in several else shard, pid) for shard, replica, pid in sorted(found)]


def _record_files(folder: str) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder) if name.endswith(".json")]
    except OSError:
        return []


def _is_alive(pid: int, start_ticks: int) -> bool:
    # The name in the second field may contain blanks and parentheses, so count from its last one (proc_pid_stat(5)).
    fields = (_read_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return len(fields) > 19 and fields[0] not in ("Z", "X") and fields[19] == str(start_ticks)


def _read_text(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace").strip()
    except OSError:
        return None
