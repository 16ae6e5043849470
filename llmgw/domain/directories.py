"""Where a node's state, sockets and logs lie when the file does not say.

Called by the daemon, by `sweep` and by every client, which must agree. Standard library only and free of I/O:
environment, user id and home directory are arguments, since `llmgw status` has to start at once.
"""

from __future__ import annotations

from collections.abc import Mapping

SYSTEM_RUNTIME = "/run/llmgw"
SYSTEM_STATE = "/var/lib/llmgw"
SOCKET_NAME = "control.sock"
SOCKET_POINTER = "socket"
"""A file in the runtime directory with the path of a socket that lies elsewhere."""


def state_directory(env: Mapping[str, str], uid: int, home: str) -> str:
    """Records, wishes, load times: `$STATE_DIRECTORY`, else the system's (root) or the user's own."""
    given = _first_of(env.get("STATE_DIRECTORY"))
    if given:
        return given
    if uid == 0:
        return SYSTEM_STATE
    base = _absolute(env.get("XDG_STATE_HOME")) or f"{home.rstrip('/')}/.local/state"
    return f"{base}/llmgw"


def runtime_directory(env: Mapping[str, str], uid: int, home: str, state_dir: str | None = None) -> str:
    """Control socket and lock. Without `$XDG_RUNTIME_DIR` (cron, su) a user's lies in `state_dir`."""
    given = _first_of(env.get("RUNTIME_DIRECTORY"))
    if given:
        return given
    if uid == 0:
        return SYSTEM_RUNTIME
    base = _absolute(env.get("XDG_RUNTIME_DIR"))
    if base:
        return f"{base}/llmgw"
    return f"{state_dir or state_directory(env, uid, home)}/run"


def log_directory(env: Mapping[str, str], state_dir: str) -> str:
    """The engines' output: `$LOGS_DIRECTORY`, else in `state_dir`."""
    return _first_of(env.get("LOGS_DIRECTORY")) or f"{state_dir}/logs"


def socket_folders(env: Mapping[str, str], uid: int, home: str) -> tuple[str, ...]:
    """Runtime directories where a client looks for a socket, the caller's own first."""
    own = runtime_directory(env, uid, home)
    # A caller without $XDG_RUNTIME_DIR may well talk to a daemon that had one, and the other way round.
    fallback = f"{state_directory(env, uid, home)}/run" if uid else SYSTEM_RUNTIME
    return tuple(dict.fromkeys((own, fallback, SYSTEM_RUNTIME)))


def _absolute(path: str | None) -> str | None:
    # The XDG base directory specification: a relative path is invalid and ignored.
    return path.rstrip("/") if path and path.startswith("/") else None


def _first_of(paths: str | None) -> str | None:
    # systemd joins several directories of one setting with colons (systemd.exec, RuntimeDirectory=).
    return _absolute((paths or "").split(":", 1)[0])
