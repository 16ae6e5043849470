from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from llmgw.supervisor import follow as module
from llmgw.supervisor.follow import FollowedTail, LogFollower, append_marker
from llmgw.supervisor.logtail import LogLine


class Followed:
    """One file that is followed, as a launch does it."""

    def __init__(self, follower: LogFollower, path: str, nursery: trio.Nursery) -> None:
        self.follower, self.path, self.nursery = follower, path, nursery
        self.tail = FollowedTail(1000, 1 << 20, 8192, pin=lambda text: "ERROR" in text)
        self.seen: list[str] = []

    def on_lines(self, lines: Sequence[LogLine]) -> None:
        self.seen.extend(line.text for line in lines)

    def start(self) -> None:
        self.nursery.start_soon(self.follower.follow, self.path, self.tail, self.on_lines)

    def write(self, data: str | bytes) -> None:
        append(self.path, data)

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.tail.read(0)[1] if not line.own]

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(30):
            while not condition():
                await self.tail.wait_newer(self.tail.sequence)

    async def drain(self) -> None:
        with trio.fail_after(30):
            await self.follower.drain(self.path, self.tail)


def append(path: str, data: str | bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, data.encode() if isinstance(data, str) else data)
    os.close(fd)


@asynccontextmanager
async def following(folder: Path, *, files: int = 3, file_max: int = 64 << 20) -> AsyncIterator[Followed]:
    follower = LogFollower(str(folder), file_max=file_max, files=files)
    async with trio.open_nursery() as nursery:
        await nursery.start(follower.serve)
        yield Followed(follower, str(folder / "llama.0.log"), nursery)
        nursery.cancel_scope.cancel()


async def test_lines_arrive_while_the_engine_writes(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.start()
        it.write("one\ntwo\n")
        await it.until(lambda: it.texts == ["one", "two"])
        it.write("three\n")
        await it.until(lambda: it.texts == ["one", "two", "three"])
        assert it.seen == ["-- llmgw: launch 1 --", "one", "two", "three"]


async def test_a_launch_is_followed_from_its_own_marker(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        it.write("-- llmgw: launch 1 --\nold life\nlast words without an end")
        it.follower.write_marker(it.path, "launch 2")
        it.start()
        it.write("new life\n")
        await it.until(lambda: it.texts == ["new life"])
        assert it.tail.read(0)[1][0].text == "-- llmgw: launch 2 --"
    assert (tmp_path / "llama.0.log").read_text().splitlines()[2:4] == [
        "last words without an end",
        "-- llmgw: launch 2 --",
    ]


async def test_nothing_is_lost_at_an_exit(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.start()
        it.write("first\n")
        await it.until(lambda: it.texts == ["first"])
        code = "import sys; [print('word', n) for n in range(500)]; sys.stdout.write('the cause'); sys.stdout.flush()"
        with open(it.path, "ab") as output:
            subprocess.run([sys.executable, "-c", code], stdout=output, check=True)
        await it.drain()
        assert it.texts[-1] == "the cause"
        assert len(it.texts) == 502
        assert it.tail.last_text == "the cause"


async def test_an_engine_that_died_before_anybody_looked_is_read(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.write("cannot open shared object")
        await it.drain()
        assert it.texts == ["cannot open shared object"]
        assert it.seen == []


async def test_after_a_drain_nothing_more_is_told(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.start()
        await it.drain()
        it.write("a straggler\n")
        it.follower.write_marker(it.path, "launch 2")
        it.start()
        it.write("second\n")
        await it.until(lambda: it.texts == ["second"])
        assert "a straggler" not in it.seen


async def test_the_end_of_an_adopted_engines_file_fills_the_tail_silently(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        it.write("-- llmgw: launch 7 --\nloading\nready\n")
        await it.follower.read_back(it.path, it.tail)
        assert it.texts == ["loading", "ready"]
        it.start()
        it.write("serving\n")
        await it.until(lambda: "serving" in it.texts)
        assert it.seen == ["serving"]


async def test_a_long_file_of_an_adopted_engine_is_read_back_from_a_line_start(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        it.write("".join(f"line {n:08}\n" for n in range(200_000)))
        await it.follower.read_back(it.path, it.tail)
        assert len(it.texts) == 1000
        assert it.texts[-1] == "line 00199999"
        assert all(len(text) == 13 for text in it.texts)


async def test_no_file_yet_is_no_error(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        await it.follower.read_back(it.path, it.tail)
        it.start()
        await trio.testing.wait_all_tasks_blocked(0.05)
        it.write("late\n")
        await it.until(lambda: it.texts == ["late"])


async def test_a_file_that_was_truncated_from_outside_is_followed_on(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.start()
        it.write("before " * 20 + "\n")
        await it.until(lambda: len(it.texts) == 1)
        os.truncate(it.path, 0)
        it.write("after\n")
        await it.until(lambda: it.texts[-1] == "after")


async def test_a_file_that_was_renamed_is_followed_on(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        it.follower.write_marker(it.path, "launch 1")
        with open(it.path, "ab", buffering=0) as engine:
            it.start()
            engine.write(b"before\n")
            await it.until(lambda: it.texts == ["before"])
            os.rename(it.path, tmp_path / "elsewhere")
            engine.write(b"after\n")
            await it.until(lambda: it.texts == ["before", "after"])
            os.unlink(tmp_path / "elsewhere")
            engine.write(b"unlinked\n")
            await it.until(lambda: it.texts[-1] == "unlinked")


async def test_without_a_watch_a_look_each_second_finds_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_watch", lambda _: None)
    monkeypatch.setattr(module, "POLL", 0.05)
    async with following(tmp_path) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.start()
        await it.until(lambda: it.tail.sequence == 1)
        it.write("polled\n")
        await it.until(lambda: it.texts == ["polled"])


async def test_a_bar_that_waits_for_its_next_step_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL", 0.05)
    async with following(tmp_path) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.start()
        it.write("\rLoading: 45% 13/30")
        await it.until(lambda: it.texts == ["Loading: 45% 13/30"])
        it.write("\rLoading: 48% 14/30\n")
        await it.until(lambda: it.texts == ["Loading: 48% 14/30"])


async def test_a_full_file_is_copied_and_started_over(tmp_path: Path) -> None:
    async with following(tmp_path, file_max=10_000, files=2) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.start()
        with open(it.path, "ab", buffering=0) as engine:
            for number in range(4):
                engine.write(b"%d\n" % number * 6000)
                await wait_for(lambda: os.stat(it.path).st_size == 0)
                engine.write(b"after %d\n" % number)
                await it.until(lambda number=number: it.texts[-1] == f"after {number}")
        names = sorted(os.listdir(tmp_path))
        assert names == ["llama.0.log", "llama.0.log.1", "llama.0.log.2"]
        assert (tmp_path / "llama.0.log.1").read_text() == "after 2\n" + "3\n" * 6000
        assert (tmp_path / "llama.0.log.2").read_text() == "after 1\n" + "2\n" * 6000
        assert os.stat(tmp_path / "llama.0.log.1").st_mode & 0o777 == 0o600


async def wait_for(condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():  # noqa: ASYNC110 - another thread's doing, no event
            await trio.sleep(0.005)


async def test_without_copies_a_full_file_is_started_over(tmp_path: Path) -> None:
    async with following(tmp_path, file_max=1000, files=0) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.start()
        it.write("x\n" * 1000)
        await wait_for(lambda: os.stat(it.path).st_size == 0)
        assert os.listdir(tmp_path) == ["llama.0.log"]


async def test_on_a_full_disk_the_file_is_started_over_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: int, target: int, start: int, enough: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_copy_all", full)
    async with following(tmp_path, file_max=1000) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.start()
        it.write("x\n" * 1000)
        await wait_for(lambda: os.stat(it.path).st_size == 0)
        it.write("on it goes\n")
        await it.until(lambda: it.texts[-1] == "on it goes")
        assert os.listdir(tmp_path) == ["llama.0.log"]


async def test_a_rotation_that_fails_leaves_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: int, target: int, start: int, enough: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "_copy_all", broken)
    async with following(tmp_path, file_max=1000) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.start()
        it.write("x\n" * 1000)
        await it.until(lambda: len(it.texts) > 998)
        it.write("on it goes\n")
        await it.until(lambda: it.texts[-1] == "on it goes")
        assert os.stat(it.path).st_size > 2000


async def test_a_backlog_is_skipped_counted_and_its_errors_pinned(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.write("ERROR the cause\n" + "".join(f"noise {n:06}\n" for n in range(200_000)))
        it.start()
        await it.until(lambda: it.texts[-1:] == ["noise 199999"])
        assert it.tail.skipped > 100_000
        assert it.texts[-1000:] == [f"noise {n:06}" for n in range(199_000, 200_000)]
        assert it.tail.evidence()[0] == "ERROR the cause"
        assert len(it.seen) + it.tail.skipped == 200_002


async def test_a_shard_that_floods_starves_no_other(tmp_path: Path) -> None:
    flood = f"""
import os, sys
line = b"INFO something happened again and again and again and again and again and again\\n" * 500
fd = os.open({str(tmp_path / "flood.0.log")!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
print("on", flush=True)
while True:
    os.write(fd, line)
"""
    async with following(tmp_path, file_max=4 << 20, files=1) as it:
        loud = Followed(it.follower, str(tmp_path / "flood.0.log"), it.nursery)
        it.follower.write_marker(loud.path, "launch 1")
        it.follower.write_marker(it.path, "launch 1")
        loud.start()
        it.start()
        with subprocess.Popen([sys.executable, "-c", flood], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                await trio.to_thread.run_sync(process.stdout.readline)
                await loud.until(lambda: loud.tail.skipped > 50_000)
                for number in range(10):
                    it.write(f"quiet {number}\n")
                    await it.until(lambda number=number: it.texts[-1:] == [f"quiet {number}"])
            finally:
                process.kill()
        assert len(loud.tail.read(0)[1]) <= 1000


async def test_a_file_that_grows_faster_than_it_is_copied_fills_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "llama.0.log")
    pread = os.pread

    def pread_beside_a_flood(fd: int, size: int, position: int) -> bytes:
        if threading.current_thread() is not threading.main_thread() and os.path.exists(f"{path}.0"):
            # For each byte that is copied another one comes.
            append(path, "y" * 1023 + "\n")
            size = 1024
        return pread(fd, size, position)

    async with following(tmp_path, file_max=8192) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.write("".join(f"{n:07}\n" for n in range(8192)))
        monkeypatch.setattr(module.os, "pread", pread_beside_a_flood)
        it.start()
        await wait_for(lambda: os.path.exists(f"{path}.1"))
        await wait_for(lambda: os.stat(path).st_size < 8192)
        it.write("on it goes\n")
        await it.until(lambda: it.texts[-1:] == ["on it goes"])
    copies = [os.stat(tmp_path / name).st_size for name in os.listdir(tmp_path)]
    assert max(copies) <= 3 * 8192 + 1024
    assert b"y" * 1023 in (tmp_path / "llama.0.log.1").read_bytes()


async def test_an_error_in_whoever_gets_the_lines_ends_that_follower_only(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        it.follower.write_marker(it.path, "launch 1")

        def broken(lines: Sequence[LogLine]) -> None:
            raise KeyError("broken on purpose")

        with pytest.raises(KeyError), trio.fail_after(30):
            await it.follower.follow(it.path, it.tail, broken)
        other = Followed(it.follower, str(tmp_path / "other.0.log"), it.nursery)
        it.follower.write_marker(other.path, "launch 1")
        other.start()
        other.write("fine\n")
        await other.until(lambda: other.texts == ["fine"])


async def test_what_comes_while_a_file_is_copied_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_all = module._copy_all

    def copy_slowly(source: int, target: int, start: int, enough: int) -> int:
        append(str(tmp_path / "llama.0.log"), "written meanwhile\n")
        return copy_all(source, target, start, enough)

    monkeypatch.setattr(module, "_copy_all", copy_slowly)
    async with following(tmp_path, file_max=1000) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.start()
        it.write("x\n" * 1000)
        await it.until(lambda: it.texts[-1:] == ["written meanwhile"])
        assert it.texts.count("written meanwhile") == 1
        assert it.seen.count("written meanwhile") == 1


async def test_events_that_the_kernel_dropped_wake_everybody(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        it.follower.write_marker(it.path, "launch 1")
        it.start()
        await it.until(lambda: it.tail.sequence == 1)
        await trio.testing.wait_all_tasks_blocked(0.05)
        file = it.follower._followed[it.path]
        overflow = struct.pack("iIII", -1, 0x4000, 0, 0)
        assert it.follower._wake_for(overflow)
        assert file.news.is_set()
        gone = struct.pack("iIII", 1, 0x8000, 0, 0)
        assert not it.follower._wake_for(gone)


def test_a_folder_that_cannot_be_watched_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert module._watch(str(tmp_path / "none")) is None
    assert "No such file or directory; its files are looked at each second" in caplog.text


def test_a_marker_is_one_line_whatever_its_text(tmp_path: Path) -> None:
    path = str(tmp_path / "a.log")
    assert append_marker(path, "launch 1\nof a\r\tthing \udcff") == 0
    assert append_marker(path, "launch 2") == os.stat(path).st_size - len("-- llmgw: launch 2 --\n")
    assert len(Path(path).read_text().splitlines()) == 2
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_marker_is_not_written_through_a_symbolic_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("")
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        append_marker(str(link), "launch 1")
    assert target.read_text() == ""
