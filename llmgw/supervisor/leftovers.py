"""What a dead engine leaves in the file system: names in /dev/shm, its socket, its temporary folder.

Shared segments have random names and outlive SIGKILL, 400 MiB per vLLM instance (measured). Whose they are shows
only while their processes live, so the names are noted at Ready and before each SIGKILL. Nothing is ever removed
by its prefix: other instances have the same.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping

from attrs import frozen

from llmgw.domain.shard import UnixEndpoint
from llmgw.supervisor.cgroup import Cgroup
from llmgw.supervisor.procfs import all_pids, boot_id
from llmgw.supervisor.records import ShardRecord, ShmFile

SHM = "/dev/shm"

SHM_WARNING = 0.5
"""Share of the tmpfs: two launches of the same engines at once, which a rollout may bring, still fit below it."""


@frozen
class ShmCleanup:
    """`kept` with the reason why; a file that was gone already is in neither."""

    removed: tuple[ShmFile, ...] = ()
    kept: tuple[tuple[ShmFile, str], ...] = ()


@frozen
class ShmUsage:
    """Bytes that files really take, and the share of the whole tmpfs (0 to 1, None when unknown)."""

    bytes: int
    share: float | None


def note_shm(pids: Iterable[int]) -> frozenset[ShmFile]:
    """The files in /dev/shm that these processes have mapped or open. Blocks for some milliseconds per process."""
    found: set[ShmFile] = set()
    names = _names_by_inode()
    for pid in pids:
        found |= _files_of(pid, names)[0]
    return frozenset(found)


def remove_unused_shm(files: Collection[ShmFile]) -> ShmCleanup:
    """Remove those that no living process maps or has open.

    A process that does not let us look (another user's) counts as a possible user of a file, unless the file's mode
    shuts everybody but its owner out. Root's processes are then taken at their word: else a service user could
    never clean up at all.
    """
    mine = [file for file in files if _is_the_noted_file(file)]
    if not mine:
        return ShmCleanup()
    in_use: set[ShmFile] = set()
    hidden: set[int] = set()
    names = _names_by_inode()
    for pid in all_pids():
        used, complete = _files_of(pid, names)
        in_use |= used
        # A container's first process refuses the look even to root (measured), and serves no engine's memory.
        if not complete and pid != 1 and (uid := _owner(f"/proc/{pid}")) is not None:
            hidden.add(uid)
    removed: list[ShmFile] = []
    kept: list[tuple[ShmFile, str]] = []
    for file in sorted(mine, key=lambda file: file.name):
        reason = "another process uses it" if file in in_use else _why_unknown(file, hidden)
        if reason is None:
            try:
                os.unlink(_path(file))
            except FileNotFoundError:
                continue
            except OSError as error:
                reason = error.strerror or str(error)
        if reason is None:
            removed.append(file)
        else:
            kept.append((file, reason))
    return ShmCleanup(tuple(removed), tuple(kept))


def shm_usage(files: Iterable[ShmFile]) -> ShmUsage:
    """How much of /dev/shm these take. Segments are sparse, so blocks are counted and not lengths."""
    total = 0
    for file in files:
        try:
            status = os.lstat(_path(file))
        except OSError:
            continue
        if status.st_ino == file.inode:
            total += status.st_blocks * 512
    try:
        whole = os.statvfs(SHM)
        size = whole.f_blocks * whole.f_frsize
    except OSError:
        size = 0
    return ShmUsage(total, total / size if size else None)


def shm_warning(usages: Mapping[str, ShmUsage]) -> str | None:
    """What to say when shards (by name) take a large share of /dev/shm: no engine starts once it is full."""
    share = sum(usage.share or 0.0 for usage in usages.values())
    if share < SHM_WARNING:
        return None
    largest = sorted(usages.items(), key=lambda item: item[1].bytes, reverse=True)[:3]
    who = ", ".join(f"{name} {usage.bytes / 2**20:.0f} MiB" for name, usage in largest)
    return f"engines take {share:.0%} of {SHM} ({who}); when it is full none starts: enlarge it"


def remove_socket(path: str) -> str | None:
    """Unlink a dead engine's socket file; vLLM leaves its own after a clean exit too. None, or why it stays."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return f"{path} is no socket"
        os.unlink(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot remove {path}: {error.strerror}"
    return None


def remove_tmp_dir(path: str, state_dir: str) -> str | None:
    """Remove an engine's temporary folder with all in it. None, or why it stays.

    Only one that lies in `tmp` of the state directory: a record that was tampered with must not cost anything else.
    """
    base = os.path.realpath(os.path.join(state_dir, "tmp"))
    if os.path.dirname(os.path.realpath(path)) != base or os.path.islink(path):
        return f"{path} is not in {base}"
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot remove {path}: {error.strerror}"
    return None


def remove_unclaimed_tmp_dirs(state_dir: str, claimed: Collection[str | None]) -> tuple[str, ...]:
    """Remove the folders of launches that never got a record: llmgw was killed in between, and their child ended at
    the gate. The answer is what stays, in sentences. `claimed` are the folders that records name.
    """
    base = os.path.join(state_dir, "tmp")
    keep = {os.path.basename(path) for path in claimed if path is not None}
    try:
        names = sorted(os.listdir(base))
    except OSError:
        return ()
    stays = [remove_tmp_dir(os.path.join(base, name), state_dir) for name in names if name not in keep]
    return tuple(why for why in stays if why is not None)


def clear_traces(record: ShardRecord, state_dir: str) -> tuple[str, ...]:
    """Remove all that a launch left, once nothing of it lives. The answer is what stays, in sentences.

    The record is to name every /dev/shm file noted so far. Blocks: for a thread that is never abandoned.
    """
    stays: list[str | None] = []
    if record.leader.boot_id == boot_id():
        # A reboot has emptied /dev/shm: what stands there now under these names is somebody else's.
        stays += [f"{_path(file)} stays: {why}" for file, why in remove_unused_shm(record.shm).kept]
    if isinstance(record.endpoint, UnixEndpoint):
        stays.append(remove_socket(record.endpoint.path))
    if record.tmp_dir is not None:
        stays.append(remove_tmp_dir(record.tmp_dir, state_dir))
    cgroup = Cgroup.at(record.cgroup)
    if cgroup is not None and not cgroup.remove():
        stays.append(f"cannot remove {cgroup.path}")
    return tuple(why for why in stays if why is not None)


def _names_by_inode() -> dict[int, str]:
    """glibc makes a semaphore under a passing name and links it to its own: whoever made it maps a name that is
    deleted, though the file is there (measured with multiprocessing's `sem.mp-*`). Only the inode tells.
    """
    try:
        with os.scandir(SHM) as entries:
            return {entry.inode(): entry.name for entry in entries}
    except OSError:
        return {}


def _files_of(pid: int, names: Mapping[int, str]) -> tuple[set[ShmFile], bool]:
    """What it uses, and whether all of it could be seen. A process that is gone uses nothing."""
    found: set[ShmFile] = set()
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                if SHM in line:
                    fields = line.rstrip("\n").split(None, 5)
                    if len(fields) == 6 and fields[4].isdecimal():
                        _add(found, fields[5], int(fields[4]), names)
        for name in os.listdir(f"/proc/{pid}/fd"):
            link = f"/proc/{pid}/fd/{name}"
            try:
                target = os.readlink(link)
                if target.startswith(SHM):
                    _add(found, target, os.stat(link).st_ino, names)
            except (FileNotFoundError, ProcessLookupError):
                continue
    except (FileNotFoundError, ProcessLookupError):
        return found, True
    except OSError:
        return found, False
    return found, True


def _add(found: set[ShmFile], path: str, inode: int, names: Mapping[int, str]) -> None:
    if not path.startswith(f"{SHM}/"):
        return
    name: str | None = path.removeprefix(f"{SHM}/")
    if path.endswith(" (deleted)"):
        name = names.get(inode)
    if name is not None:
        found.add(ShmFile(name, inode))


def _path(file: ShmFile) -> str:
    return f"{SHM}/{file.name}"


def _is_the_noted_file(file: ShmFile) -> bool:
    if file.name.startswith("/") or ".." in file.name.split("/"):
        return False
    try:
        status = os.lstat(_path(file))
    except OSError:
        return False
    return status.st_ino == file.inode and stat.S_ISREG(status.st_mode)


def _owner(path: str) -> int | None:
    try:
        return os.stat(path).st_uid
    except OSError:
        return None


def _why_unknown(file: ShmFile, hidden: set[int]) -> str | None:
    """None when no process of these users can have it, else the reason why nobody knows."""
    if not hidden:
        return None
    try:
        status = os.lstat(_path(file))
    except OSError as error:
        return error.strerror or str(error)
    if status.st_uid in hidden or status.st_mode & 0o077:
        return "not every process lets llmgw see what it uses"
    return None
