"""Follows the engines' output files into their tails. Called by `launch`; it never writes into an engine's line.

One inotify watch on the log directory tells which file has grown; a look at every file each second is the fallback
for what a watch cannot see (an unlinked file, a network file system, no inotify instance left).

What an engine has just written is in the page cache, so it is read in the event loop: a read of 32 KiB takes some
microseconds, a hop into a thread takes a hundred. Only one file is read per turn of the loop, one slice at a time,
which bounds both the delay for everybody else and the share of an engine that floods. What may be cold or large (the
end of an adopted engine's file, the copy at a rotation) is done in a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence

import trio

from llmgw.supervisor.logtail import MARKER, LogLine, LogTail

log = logging.getLogger(__name__)

SLICE = 32 * 1024
"""Bytes read line by line in one turn of the loop: about 2 ms."""
SCAN_SLICE = 512 * 1024
"""Bytes scanned for error words in one turn: about 2 ms."""
BEHIND = 512 * 1024
"""Unread bytes above which a file is not read line by line any more."""
KEEP = 256 * 1024
"""Bytes at the end that are read line by line all the same: about 2000 lines, a whole tail."""
PACE = 0.02
"""Seconds between two looks at a file that keeps growing, so that each is worth its wake-up."""
PACE_BUSY = 0.1
PACE_BEHIND = 0.25
BUSY = 128 * 1024
"""Bytes in one look above which the next one waits longer."""
POLL = 1.0
DRAIN_MAX = 1.0
"""Seconds for reading what is left when the last process is gone. All of it is there at once, since a write to a file
is done when it returns; the limit is for somebody else who has the file open and goes on writing."""
READ_BACK = 1024 * 1024
"""Bytes before the end in which the start of the present launch is looked for."""

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE, _IN_Q_OVERFLOW, _IN_IGNORED = 0x2, 0x80, 0x100, 0x4000, 0x8000
_EVENT = struct.Struct("iIII")


def append_marker(path: str, text: str) -> int:
    """Append `-- llmgw: TEXT --` on a line of its own; return where that line begins. Raises OSError.

    A line marks a start, since an offset would not survive that somebody truncates the file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        size = os.fstat(fd).st_size
        gap = b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""
        line = f"{MARKER} {' '.join(text.split())} --\n".encode("utf-8", "backslashreplace")
        os.write(fd, gap + line)
        return os.fstat(fd).st_size - len(line)
    finally:
        os.close(fd)


class FollowedTail(LogTail):
    """A tail that can be waited for. One per shard instance, over all its launches."""

    _changed: trio.Event | None = None

    def announce(self) -> None:
        """There is something new: wake who waits."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def wait_newer(self, after: int) -> None:
        """Return when there is a line above number `after`."""
        await trio.lowlevel.checkpoint()
        while self.sequence <= after:
            if self._changed is None:
                self._changed = trio.Event()
            await self._changed.wait()


OnLines = Callable[[Sequence[LogLine]], None]


class _File:
    """One output file and how far it has been read. The descriptor stays with the file that the engine writes to,
    also when somebody renames it or puts another one in its place."""

    def __init__(self, path: str, rotate_above: int) -> None:
        self.path = path
        self.fd = -1
        self.position = 0
        self.rotate_above = rotate_above
        self.settled = True
        self.reading = trio.Lock()
        """Held while it is read to the end, or rotated: at a rotation the position changes its meaning."""
        self.read_at = 0.0
        """When something was last read, by trio's clock."""
        self.news = trio.Event()
        self._ended = False

    def open(self) -> bool:
        if self.fd < 0 and not self._ended:
            with contextlib.suppress(OSError):
                self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self.fd >= 0

    def has_ended(self) -> bool:
        """Drained: nothing comes any more, and the descriptor is closed."""
        return self._ended

    def end(self) -> None:
        self._ended = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.news.set()

    def size(self) -> int:
        """Bytes in the file; starts over when it was truncated."""
        if not self.open():
            return 0
        size = os.fstat(self.fd).st_size
        if size < self.position:
            self.position = 0
        return size

    def needs_a_look(self) -> bool:
        return not self.settled or self.size() != self.position

    def take(self, limit: int) -> bytes:
        """The next bytes, at most `limit`; none at the end and where the disk fails."""
        try:
            data = os.pread(self.fd, limit, self.position)
        except OSError as error:
            log.warning("cannot read %s: %s", self.path, error.strerror)
            return b""
        self.position += len(data)
        if data:
            self.settled = False
            self.read_at = trio.current_time()
        return data


class LogFollower:
    """Follows all output files of one directory. `serve` runs as long as anything is followed.

    A file larger than `file_max` bytes is copied to `.1` (`.1` to `.2` and so on, `files` of them) and truncated; of
    one that grows faster than it is copied only the end is kept, so that no engine can fill the disk.
    What an engine writes between the end of the copy and the truncation is lost: some microseconds, and only there.
    """

    def __init__(
        self, log_dir: str, *, file_max: int = 64 << 20, files: int = 3, now: Callable[[], float] = time.time
    ) -> None:
        self.log_dir = log_dir
        self._file_max = file_max
        self._files = files
        self._now = now
        self._followed: dict[str, _File] = {}
        self._turn = trio.Lock()
        """Held for one slice: trio hands it on in order and one turn of the loop later, so nobody starves."""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wake the followers of files that have grown, until cancelled."""
        os.makedirs(self.log_dir, mode=0o700, exist_ok=True)
        async with trio.open_nursery() as nursery:
            watch = _watch(self.log_dir)
            if watch is not None:
                nursery.start_soon(self._read_events, watch)
            task_status.started()
            while True:
                await trio.sleep(POLL)
                for file in self._followed.values():
                    if file.needs_a_look():
                        file.news.set()

    def write_marker(self, path: str, text: str) -> None:
        """Put a line of llmgw's own into the file, where a launch begins, and follow from there. Makes the file.

        Raises OSError.
        """
        position = append_marker(path, text)
        self._begin(path).position = position

    async def read_back(self, path: str, tail: FollowedTail) -> None:
        """Fill the tail of an adopted engine with the end of its file, and follow from there.

        Begins at the start of the launch where that is in reach.
        """
        file = self._begin(path)
        start, data = await trio.to_thread.run_sync(_read_end, path, abandon_on_cancel=True)
        file.position = start + len(data)
        file.settled = False
        await self._feed_all(tail, data[_start_of_launch(data, whole=start == 0) :])

    async def follow(self, path: str, tail: FollowedTail, on_lines: OnLines) -> None:
        """Bring the file into the tail until cancelled; `on_lines` gets each batch of new lines.

        Goes on from the marker, from what was read back, or from the beginning.
        """
        file = self._followed.get(path) or self._begin(path)
        while not file.has_ended():
            moved = await self._read_all(file, tail, on_lines)
            if file.position > file.rotate_above:
                async with file.reading:
                    await self._rotate(file, tail, on_lines)
            await trio.sleep(PACE_BEHIND if moved > BEHIND else PACE_BUSY if moved > BUSY else PACE)
            while not file.has_ended() and file.size() == file.position:
                await self._wait_news(file, tail, on_lines)
        await trio.sleep_forever()

    async def catch_up(self, path: str, tail: FollowedTail) -> None:
        """Bring what is in the file by now into the tail; following goes on."""
        file = self._followed.get(path)
        if file is not None:
            await self._read_all(file, tail, None)

    async def drain(self, path: str, tail: FollowedTail) -> None:
        """The engine is gone: bring all it wrote into the tail, the unterminated rest included, and stop following."""
        file = self._followed.get(path)
        if file is None:
            return
        with trio.move_on_after(DRAIN_MAX):
            while await self._read_all(file, tail, None):
                pass
        tail.flush(self._now())
        tail.announce()
        self._end(file)

    # -- one file ----------------------------------------------------------------------------------------

    def _begin(self, path: str) -> _File:
        known = self._followed.get(path)
        if known is not None:
            self._end(known)
        file = self._followed[path] = _File(path, self._file_max)
        return file

    def _end(self, file: _File) -> None:
        file.end()
        if self._followed.get(file.path) is file:
            del self._followed[file.path]

    async def _wait_news(self, file: _File, tail: FollowedTail, on_lines: OnLines) -> None:
        file.news = trio.Event()
        await file.news.wait()
        quiet = trio.current_time() - file.read_at > POLL / 2
        if quiet and file.size() == file.position and not file.settled:
            file.settled = True
            _tell(tail, tail.settle(self._now()), on_lines)

    async def _read_all(self, file: _File, tail: FollowedTail, on_lines: OnLines | None) -> int:
        """Read to the end as it is now, in slices, skipping what is too much; the number of bytes that were there."""
        async with file.reading:
            size = file.size()
            backlog = max(0, size - file.position)
            keep_from = size - KEEP if backlog > BEHIND else 0
            while file.position < size:
                async with self._turn:
                    if file.has_ended():
                        break
                    behind = keep_from - file.position
                    data = file.take(min(SCAN_SLICE, behind) if behind > 0 else SLICE)
                    if behind > 0:
                        tail.scan(data, self._now())
                        tail.announce()
                    else:
                        _tell(tail, tail.feed(data, self._now()), on_lines)
                if not data or file.size() < size:
                    # It was truncated, or cannot be read: the next look starts over.
                    break
            return backlog

    async def _feed_all(self, tail: FollowedTail, data: bytes, on_lines: OnLines | None = None) -> None:
        """Feed what was read in one piece, by the same rule as `_read_all`."""
        keep_from = len(data) - KEEP if len(data) > BEHIND else 0
        position = 0
        while position < len(data):
            async with self._turn:
                behind = keep_from - position
                piece = data[position : position + (min(SCAN_SLICE, behind) if behind > 0 else SLICE)]
                if behind > 0:
                    tail.scan(piece, self._now())
                    tail.announce()
                else:
                    _tell(tail, tail.feed(piece, self._now()), on_lines)
            position += len(piece)

    # -- rotation ----------------------------------------------------------------------------------------

    async def _rotate(self, file: _File, tail: FollowedTail, on_lines: OnLines) -> None:
        """Copy and truncate. A full or broken disk raises nothing: the file goes on growing, or starts over."""
        if file.has_ended():
            return
        # A descriptor of its own: this one may be closed meanwhile, and its number given to another file.
        source = os.dup(file.fd)
        try:
            # A write in a thread is never abandoned, it would go on behind our back: this waits for the disk.
            copy, start, end = await trio.to_thread.run_sync(
                _copy_and_truncate, source, file.path, self._files, self._file_max
            )
        except OSError as error:
            log.warning("cannot rotate %s: %s; trying again when it has grown", file.path, error.strerror)
            file.rotate_above = file.position + self._file_max
            return
        finally:
            os.close(source)
        unread, file.position = max(0, file.position - start), 0
        if copy is None:
            return
        if start:
            log.warning("%s grew faster than it could be rotated: its first %d bytes are dropped", file.path, start)
        try:
            # What came while it was copied stands in the copy alone.
            data = await trio.to_thread.run_sync(_read_range, copy, unread, end)
        finally:
            os.close(copy)
        await self._feed_all(tail, data, on_lines)

    # -- which file --------------------------------------------------------------------------------------

    async def _read_events(self, watch: int) -> None:
        try:
            while True:
                await trio.lowlevel.wait_readable(watch)
                try:
                    data = os.read(watch, 64 * 1024)
                except BlockingIOError:
                    continue
                if not self._wake_for(data):
                    log.warning("%s is not watched any more; its files are looked at each second", self.log_dir)
                    return
                # Events of one file in a row are merged in the kernel while they wait (inotify(7)).
                await trio.sleep(PACE / 2)
        finally:
            os.close(watch)

    def _wake_for(self, data: bytes) -> bool:
        """Wake whom the events name; False when the watch is gone."""
        for mask, name in _events(data):
            if mask & _IN_IGNORED:
                return False
            if mask & _IN_Q_OVERFLOW:
                for file in self._followed.values():
                    file.news.set()
            elif file_named := self._followed.get(os.path.join(self.log_dir, name)):
                file_named.news.set()
        return True


def _watch(folder: str) -> int | None:
    """An inotify descriptor that watches the folder, or None where the system gives none."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd >= 0 and libc.inotify_add_watch(fd, os.fsencode(folder), _IN_MODIFY | _IN_CREATE | _IN_MOVED_TO) >= 0:
        return int(fd)
    why = os.strerror(ctypes.get_errno())
    if fd >= 0:
        os.close(fd)
    log.warning("cannot watch %s: %s; its files are looked at each second", folder, why)
    return None


def _events(data: bytes) -> Iterator[tuple[int, str]]:
    position = 0
    while position + _EVENT.size <= len(data):
        _, mask, _, length = _EVENT.unpack_from(data, position)
        position += _EVENT.size
        name = data[position : position + length].rstrip(b"\0")
        position += length
        yield mask, os.fsdecode(name)


def _tell(tail: FollowedTail, lines: Sequence[LogLine], on_lines: OnLines | None) -> None:
    if lines:
        tail.announce()
        if on_lines is not None:
            on_lines(lines)


def _start_of_launch(data: bytes, *, whole: bool) -> int:
    """Where the last launch begins in the end of a file, or the newest part where that is not in sight.

    `whole`: `data` is all of the file.
    """
    mark = MARKER.encode()
    found = data.rfind(b"\n" + mark) + 1
    in_sight = found > 0 or data.startswith(mark)
    start = found if in_sight or whole else data.find(b"\n") + 1
    if len(data) - start > KEEP:
        start = data.find(b"\n", len(data) - KEEP) + 1
    return start


def _read_end(path: str) -> tuple[int, bytes]:
    """The last READ_BACK bytes of a file and where they begin; nothing where there is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0, b""
    try:
        size = os.fstat(fd).st_size
        start = max(0, size - READ_BACK)
        return start, _read_range(fd, start, size)
    finally:
        os.close(fd)


def _read_range(fd: int, start: int, end: int) -> bytes:
    """Bytes of the file from `start` to `end`, less where it has become shorter."""
    pieces = []
    while start < end:
        piece = os.pread(fd, min(1 << 20, end - start), start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _copy_and_truncate(fd: int, path: str, files: int, file_max: int) -> tuple[int | None, int, int]:
    """Copy the open file to PATH.1, truncate it, and move older copies up. A copy has at most 3 `file_max` bytes.

    Returns a descriptor of the copy, where in the file it begins, and the number of bytes in it; (None, 0, 0) when
    none is kept or the disk is full.
    Raises OSError when nothing was changed.
    """
    # The file that the engine writes to, whatever stands at its path by now.
    writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if files < 1:
            os.ftruncate(writable, 0)
            return None, 0, 0
        size = os.fstat(writable).st_size
        # What is far too large (it grew while nobody rotated it, or faster than one can copy) leaves its end only.
        start = size - file_max if size > 2 * file_max else 0
        copy = -1
        partial = f"{path}.0"
        try:
            copy = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            end = _copy_all(writable, copy, start, size + file_max)
            os.ftruncate(writable, 0)
        except OSError as error:
            if copy >= 0:
                os.close(copy)
                os.unlink(partial)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The output itself fills the disk: better no copy than a disk that stays full.
            os.ftruncate(writable, 0)
            return None, 0, 0
        for number in range(files - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}.{number}", f"{path}.{number + 1}")
        os.rename(partial, f"{path}.1")
        return copy, start, end
    finally:
        os.close(writable)


def _copy_all(source: int, target: int, start: int, enough: int) -> int:
    """Copy from `start` until the end is caught up with; the last piece is the one that leaves the smallest gap.

    Who writes faster than this copies is never caught up with: behind `enough` the copy ends all the same.
    """
    position = start
    while True:
        piece = os.pread(source, 1 << 20, position) if position < enough else b""
        if not piece:
            return position - start
        written = 0
        while written < len(piece):
            written += os.write(target, piece[written:])
        position += len(piece)
