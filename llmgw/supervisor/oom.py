"""The proof of an out-of-memory kill: a counter that rose. An exit by SIGKILL alone proves nothing."""

from __future__ import annotations


def parse_oom_kills(text: str) -> int | None:
    """The `oom_kill` line of `memory.events` or `/proc/vmstat`, None when there is none."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return None


def oom_kills(unit_cgroup: str | None) -> int | None:
    """Kills so far: in our unit's cgroup where it has the memory controller, else on the whole host. None: unknown.

    Groups of single engines have no controllers and so no `memory.events` (measured).
    """
    paths = ([f"{unit_cgroup}/memory.events"] if unit_cgroup is not None else []) + ["/proc/vmstat"]
    for path in paths:
        try:
            with open(path, encoding="ascii") as file:
                count = parse_oom_kills(file.read())
        except OSError:
            continue
        if count is not None:
            return count
    return None
