"""cgroup v2: one group per launch where one may be made. Only `cgroup.procs`, `cgroup.kill` and `cgroup.events`
are used, so no controller is ever enabled: live engines below enabled controllers keep a unit from starting again
on systemd 252 (measured).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from attrs import frozen

MOUNTS = "/proc/self/mountinfo"


def find_mount(mountinfo: str) -> str | None:
    """Where cgroup2 is mounted: /sys/fs/cgroup on a pure host, /sys/fs/cgroup/unified on a hybrid one."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if right.split(" ", 1)[0] == "cgroup2" and len(fields) > 4:
            return fields[4].replace("\\040", " ")
    return None


def unit_path(proc_cgroup: str) -> str | None:
    """The cgroup v2 path of the unit we run in, from the text of /proc/self/cgroup.

    Under `DelegateSubgroup=` the process sits one level below its unit, where groups of engines do not belong: the
    path ends with the last component that names a service or scope.
    """
    for line in proc_cgroup.splitlines():
        if line.startswith("0::"):
            path = line[3:]
            parts = path.split("/")
            for i in range(len(parts), 0, -1):
                if parts[i - 1].endswith((".service", ".scope")):
                    return "/".join(parts[:i])
            return path
    return None


def find_own_cgroup() -> str | None:
    """The directory of our unit's cgroup v2, None where there is none or it cannot be read."""
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            mount = find_mount(file.read())
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            path = unit_path(file.read())
    except OSError:
        return None
    if mount is None or path is None or "/.." in path:
        return None
    directory = mount + path.rstrip("/")
    return directory if os.path.isdir(directory) else None


@frozen
class Cgroup:
    """A group of one launch, named `shard-NAME.GENERATION`."""

    path: str

    @classmethod
    def create(cls, name: str, parent: str | None) -> Cgroup | None:
        """Make a new group below `parent`; None where that is not possible.

        A group that exists is never used: another supervisor's engine may be in it, or about to be.
        """
        if parent is None:
            return None
        safe = re.sub(r"[^A-Za-z0-9._-]", "-", name)
        for suffix in ("", *(f"_{i}" for i in range(1, 10))):
            path = f"{parent}/{safe}{suffix}"
            try:
                os.mkdir(path, 0o755)
            except FileExistsError:
                continue
            except OSError:
                return None
            if os.access(f"{path}/cgroup.procs", os.W_OK):
                return cls(path)
            # A plain directory, where no cgroup is mounted.
            cls(path).remove()
            return None
        return None

    @classmethod
    def at(cls, path: str | None) -> Cgroup | None:
        """A group that was made earlier, None when it is gone.

        Only one with a name that is given here: a group of others must not be killed for what a file says.
        """
        if path is None or not os.path.basename(path).startswith("shard-"):
            return None
        return cls(path) if os.path.isfile(f"{path}/cgroup.procs") else None

    def join(self, pid: int) -> bool:
        """Move a process into the group; False where the kernel refuses."""
        return self._write("cgroup.procs", str(pid))

    def kill(self) -> bool:
        """SIGKILL everything in it and below, in one step; False where the kernel cannot (before 5.14)."""
        return self._write("cgroup.kill", "1")

    def populated(self) -> bool | None:
        """Whether a living process is in it or below; None is unknown or gone."""
        text = self._read("cgroup.events")
        if text is None:
            return None
        return any(line.split() == ["populated", "1"] for line in text.splitlines())

    def pids(self) -> tuple[int, ...]:
        """Everything in it and below."""
        found: list[int] = []
        for directory in self._directories():
            try:
                with open(f"{directory}/cgroup.procs", encoding="ascii") as file:
                    found.extend(int(pid) for pid in file.read().split())
            except OSError:
                continue
        # 0 stands for a process outside our pid namespace.
        return tuple(pid for pid in found if pid)

    def remove(self) -> bool:
        """Remove it and what the engine made below; False when something still lives in it."""
        for directory in sorted(self._directories(), key=len, reverse=True):
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                pass
            except OSError:
                return False
        return True

    def _directories(self) -> Iterator[str]:
        for directory, _, _ in os.walk(self.path):
            yield directory

    def _read(self, name: str) -> str | None:
        try:
            with open(f"{self.path}/{name}", encoding="ascii") as file:
                return file.read()
        except OSError:
            return None

    def _write(self, name: str, text: str) -> bool:
        try:
            with open(f"{self.path}/{name}", "w", encoding="ascii") as file:
                file.write(text)
        except OSError:
            return False
        return True
