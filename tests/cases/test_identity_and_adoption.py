"""The reported failures of identity, adoption and of two supervisors, as behaviour of a whole llmgw."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.node import Node, fake, is_alive
from tests.scripted import scripted

QUICK = '[defaults]\nrestart_delay = "200ms"\nrestart_delay_max = "300ms"\nprobe_interval = "200ms"\n'
SERVE = "server.serve_forever()\n"


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user that leads a session and a group of its own."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def llamacpp(name: str = "a", *, knobs: str = "", more: str = "") -> str:
    command = fake("llamacpp", *knobs.split())
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\nengine = "llamacpp"\ncommand = {command}\n{more}\n'


def record_file(node: Node, name: str = "a") -> Path:
    return node.state / "shards" / f"{name}.0.json"


def change_record(node: Node, **fields: Any) -> None:
    path = record_file(node)
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])


# -- F20: pid files: renamed processes, reused pids


def test_a_record_of_another_boot_is_deleted_and_whoever_has_its_pid_is_left_alone(
    node: Node, stranger: subprocess.Popen[bytes]
) -> None:
    node.write(llamacpp())
    node.start()
    first = node.wait_state("a", "ready")["pid"]
    node.kill()
    os.kill(first, signal.SIGKILL)
    # Everything else is right about it: number, group, session, start time, marker.
    change_record(
        node,
        boot_id="00000000-0000-4000-8000-000000000000",
        pid=stranger.pid,
        pgid=stranger.pid,
        sid=stranger.pid,
        start_ticks=start_ticks(stranger.pid),
    )
    node.start()
    shard = node.wait_state("a", "ready")
    assert not shard["adopted"] and shard["pid"] not in (first, stranger.pid)
    assert "another boot" in node.log()
    assert node.end() == 0
    assert stranger.poll() is None


def test_a_number_that_a_stranger_has_now_is_neither_adopted_nor_signalled(
    node: Node, stranger: subprocess.Popen[bytes]
) -> None:
    node.write(llamacpp())
    node.start()
    first = node.wait_state("a", "ready")["pid"]
    node.kill()
    os.kill(first, signal.SIGKILL)
    change_record(node, pid=stranger.pid, pgid=stranger.pid, sid=stranger.pid, alive_at=0)
    node.start()
    shard = node.wait_state("a", "ready")
    assert not shard["adopted"]
    assert "another process now" in node.log()
    os.kill(shard["pid"], signal.SIGKILL)
    node.until(lambda: node.shard("a")["pid"] not in (None, shard["pid"]), "it starts anew")
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert stranger.poll() is None


def test_an_engine_that_renames_itself_is_known_again(node: Node) -> None:
    body = (
        "ctypes.CDLL(None).prctl(15, b'init', 0, 0, 0)\n"
        # Command line and environment in one go, as setproctitle overwrites them.
        "start = int(open('/proc/self/stat').read().rsplit(')', 1)[1].split()[45])\n"
        "end = int(open('/proc/self/stat').read().rsplit(')', 1)[1].split()[48])\n"
        "ctypes.memset(start, 0, end - start)\n"
    )
    node.write(scripted(node, body + SERVE))
    node.start()
    first = node.wait_state("a", "ready")["pid"]
    assert psutil.Process(first).name() == "init" and "".join(psutil.Process(first).cmdline()) == ""
    node.kill()
    node.start()
    again = node.wait_state("a", "ready")
    assert (again["pid"], again["adopted"], again["generation"]) == (first, True, 1)
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert not is_alive(first)


BAD_RECORDS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "no JSON": lambda path: path.write_bytes(b"\x00\xff" * 500),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "a huge number": lambda path: path.write_bytes(path.read_bytes().replace(b'"pid": ', b'"pid": ' + b"9" * 5000)),
    "a pid beyond the kernel's": lambda path: path.write_bytes(
        path.read_bytes().replace(b'"pid": ', b'"pid": 99999999999')
    ),
    "pid 1": lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "pid": 1, "pgid": 1})),
    "an engine of later": lambda path: path.write_text(
        json.dumps({**json.loads(path.read_text()), "engine": "tensorrt"})
    ),
    "a huge file": lambda path: path.write_bytes(path.read_bytes() + b" " * (4 << 20)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link elsewhere": lambda path: (path.rename(f"{path}.moved"), path.symlink_to(f"{path}.moved")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("how", list(BAD_RECORDS))
def test_a_record_that_is_none_is_told_and_stops_nobody(node: Node, how: str) -> None:
    node.write(QUICK + llamacpp() + llamacpp("b"))
    node.start()
    pids = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")}
    node.kill()
    # Also for a shard that the file no longer has.
    node.write(QUICK + llamacpp("b") + llamacpp("c"))
    BAD_RECORDS[how](record_file(node))
    try:
        node.start()
        assert node.wait_state("b", "ready")["pid"] == pids["b"]
        node.wait_state("c", "ready")
        if how != "an engine of later":
            assert "cannot read the process record" in node.log() or "of no use" in node.log()
        assert node.cli("status").returncode == 0
        assert node.end() == 0
    finally:
        if is_alive(pids["a"]):
            psutil.Process(pids["a"]).kill()


@pytest.mark.parametrize(
    "fields",
    [
        {"generation": 10**30},
        {"launched_at": 10**400},
        {"ready_at": float("nan")},
        {"model": "m" * 100_000},
        {"tmp_dir": "/tmp\0/x"},
        {"log_path": "/\ud800"},
        {"shm": [["x\0y", 5]]},
        {"pgid": 1 << 40},
        {"memory_before": {"GPU-7": 10**30}},
        {"endpoint": {"host": "127.0.0.1", "port": 10**6}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_field_that_nobody_can_have_written_makes_it_no_record(node: Node, fields: dict[str, Any]) -> None:
    """It is moved aside and told; the engine behind it may be a stranger, so it is left alone."""
    node.write(QUICK + llamacpp())
    node.start()
    first = node.wait_state("a", "ready")["pid"]
    node.kill()
    change_record(node, **fields)
    (node.state / "load-times.json").write_text(json.dumps({"a/0": [10**400, float("nan")]}))
    (node.state / "wishes.json").write_text('{"boot_id": 5, "wishes": [{"at": 1e999}]}')
    try:
        node.start()
        assert not node.wait_state("a", "ready")["adopted"]
        assert "cannot read the process record" in node.log()
        assert record_file(node).with_suffix(".json.bad").exists()
        assert is_alive(first)
    finally:
        psutil.Process(first).kill()


def test_fields_that_only_look_odd_lead_nowhere(node: Node) -> None:
    """Whatever stands in a record, only what is proven the shard's own is removed with it."""
    precious = node.folder / "precious"
    precious.mkdir()
    node.write(QUICK + llamacpp())
    node.start()
    first = node.wait_state("a", "ready")["pid"]
    node.kill()
    change_record(
        node,
        tmp_dir=str(precious),
        cgroup="/sys/fs/cgroup/unified",
        shm=[["../../etc/passwd", 5], ["x" * 10_000, 10**30]],
        gpus=["7" * 1000],
        log_path=str(precious / "log"),
    )
    node.start()
    assert node.wait_state("a", "ready")["pid"] == first
    assert node.cli("status").returncode == 0
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert not is_alive(first)
    assert precious.is_dir() and os.path.exists("/etc/passwd")


needs_mount = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("mount") is None, reason="needs root to mount a tmpfs"
)


@pytest.fixture
def small_disk(node: Node) -> Iterator[Path]:
    """A disk of 256 KiB where the state is; skipped where nothing may be mounted."""
    node.state.mkdir(mode=0o750)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0750", "tmpfs", str(node.state)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield node.state
    finally:
        node.__exit__(None, None, None)
        subprocess.run(["umount", "-l", str(node.state)], check=True)
        shutil.rmtree(node.folder, ignore_errors=True)


def fill(folder: Path) -> Path:
    """Take every byte that is left."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return path


@needs_mount
def test_without_room_for_its_record_an_engine_is_not_started_and_later_it_is(node: Node, small_disk: Path) -> None:
    node.write(QUICK + llamacpp())
    filler = fill(small_disk)
    node.start()
    failed = node.wait_state("a", "failed")
    assert failed["reason"]["code"] in ("no-record", "no-folder"), failed["reason"]
    assert "No space left" in failed["reason"]["cause"]
    assert node.engine_processes() == []
    filler.unlink()
    node.wait_state("a", "ready")


@needs_mount
def test_a_disk_that_fills_while_it_runs_ends_no_engine_and_a_stop_still_works(node: Node, small_disk: Path) -> None:
    node.write(QUICK + llamacpp() + llamacpp("b"))
    node.start()
    pids = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")}
    filler = fill(small_disk)
    assert node.cli("drain", "a").returncode == 0
    assert node.cli("start", "a").returncode == 0
    node.kill()
    node.start()
    assert {name: node.wait_state(name, "ready")["pid"] for name in pids} == pids
    # The wish cannot be written, but it is obeyed.
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert not is_alive(pids["a"])
    node.until(lambda: "cannot keep the operators' wishes" in node.log(), "it is told")
    filler.unlink()
    assert node.end() == 0
    assert node.leftovers() == []


# -- F21: a crash of the daemon kills the engines through the log pipe


def test_engines_that_print_for_ever_live_on_and_their_output_is_read_again(node: Node) -> None:
    body = (
        "def talk():\n"
        "    count = 0\n"
        "    while True:\n"
        "        count += 1\n"
        "        print('line', count)\n"
        "        print('error', count, file=sys.stderr)\n"
        "        time.sleep(0.01)\n"
        "threading.Thread(target=talk, daemon=True).start()\n"
    )
    node.write(scripted(node, body + SERVE) + llamacpp("b", knobs="--fake-flood-lines-per-second 20000"))
    node.start()
    pids = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")}
    output = node.folder / "l" / "a.0.log"
    for _ in range(2):
        node.kill()
        size = output.stat().st_size
        node.until(lambda size=size: output.stat().st_size > size + 2000, "it prints on without anybody")  # type: ignore[misc]
        assert all(is_alive(pid) for pid in pids.values())
        # It does not spin on a broken pipe either.
        assert psutil.Process(pids["a"]).cpu_percent(0.3) < 80
        node.start()
        assert {name: node.wait_state(name, "ready")["pid"] for name in pids} == pids
        seen = node.shard("a")["log"]["lines"]
        node.until(lambda seen=seen: node.shard("a")["log"]["lines"] > seen + 20, "the tail moves on")  # type: ignore[misc]
    text = node.cli("logs", "a", "-n", "20").stdout
    assert "line " in text and "error " in text


# -- F22: stale socket, two daemons


def test_what_a_killed_llmgw_left_at_its_socket_is_replaced(node: Node) -> None:
    node.write(llamacpp())
    node.start()
    first = node.wait_state("a", "ready")["pid"]
    node.kill()
    assert node.socket.exists()
    assert node.cli("status").returncode == 5
    node.start()
    assert node.wait_state("a", "ready")["pid"] == first


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_is_no_socket_is_not_replaced_and_the_error_says_so(node: Node, what: str) -> None:
    node.write(llamacpp())
    node.socket.parent.mkdir()
    node.socket.write_text("precious") if what == "file" else node.socket.mkdir()
    result = node.cli("run", str(node.config))
    assert result.returncode == 1 and str(node.socket) in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    assert node.socket.exists()
    assert node.engine_processes() == []


@pytest.mark.parametrize("shared", ["state_dir", "runtime_dir"])
def test_a_second_llmgw_that_shares_one_folder_only_is_refused(node: Node, shared: str) -> None:
    node.write(llamacpp())
    pid = node.start()
    first = node.wait_state("a", "ready")["pid"]
    other = node.folder / "other.toml"
    text = node.config.read_text()
    for key, folder in (("state_dir", node.state), ("runtime_dir", node.folder / "r"), ("log_dir", node.folder / "l")):
        if key != shared:
            text = text.replace(f'{key} = "{folder}"', f'{key} = "{folder}2"')
    other.write_text(text)
    began = time.monotonic()
    result = node.cli("run", str(other))
    assert result.returncode == 2, result.stderr
    assert time.monotonic() - began < 15
    assert f"pid {pid}" in result.stderr
    assert node.wait_state("a", "ready")["pid"] == first
    # Without a symbolic link's help either.
    link = node.folder / "link"
    link.symlink_to(node.state)
    other.write_text(node.config.read_text().replace(f'"{node.state}"', f'"{link}"').replace("/r", "/r3"))
    assert node.cli("run", str(other)).returncode == 2


def test_a_socket_path_that_is_too_long_is_told_by_check_and_by_run(node: Node) -> None:
    deep = node.folder / ("d" * (107 - len(str(node.folder)) - len("/control.sock")))
    node.write(llamacpp())
    node.config.write_text(node.config.read_text().replace(f'"{node.folder}/r"', f'"{deep}"'))
    assert len(str(deep / "control.sock")) == 108
    for verb in (["check", str(node.config)], ["run", str(node.config)]):
        result = node.cli(*verb)
        assert result.returncode == 78, result.stdout + result.stderr
        assert "107" in result.stdout + result.stderr
    # One byte less fits.
    shorter = str(deep)[:-1]
    node.config.write_text(node.config.read_text().replace(str(deep), shorter))
    node.socket = Path(shorter) / "control.sock"
    node.start()
    node.wait_state("a", "ready")


@pytest.mark.parametrize("key", ["state_dir", "runtime_dir", "log_dir"])
def test_a_folder_that_cannot_be_made_is_named_and_nothing_is_started(node: Node, key: str) -> None:
    node.write(llamacpp())
    # A file in the way stops root too, whom permissions do not.
    obstacle = node.folder / "obstacle"
    obstacle.write_text("")
    folder = {"state_dir": node.state, "runtime_dir": node.folder / "r", "log_dir": node.folder / "l"}[key]
    node.config.write_text(node.config.read_text().replace(f'{key} = "{folder}"', f'{key} = "{obstacle}/x"'))
    result = node.cli("run", str(node.config))
    assert result.returncode == 1, result.stderr
    assert str(obstacle) in result.stderr and "Traceback" not in result.stderr
    assert node.engine_processes() == []


@needs_mount
def test_a_state_folder_that_is_read_only_is_named_and_nothing_is_started(node: Node, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    node.write(llamacpp())
    result = node.cli("run", str(node.config))
    assert result.returncode == 78, result.stderr
    assert str(small_disk) in result.stderr and "Traceback" not in result.stderr
    assert node.engine_processes() == []


def test_folders_that_vanish_while_it_runs_end_nothing_and_a_stop_still_works(node: Node) -> None:
    node.write(QUICK + llamacpp() + llamacpp("b"))
    node.start()
    pids = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")}
    for folder in (node.state, node.folder / "l"):
        # Twice: a load time may be written just then.
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    assert node.cli("status").returncode == 0
    # A restart needs its folders, and gets them or says what it lacks; either way llmgw and `b` live on.
    os.kill(pids["a"], signal.SIGKILL)
    node.until(lambda: node.shard("a")["pid"] != pids["a"], "its end is seen")
    node.until(lambda: node.state_of("a") == "ready" or "folder" in json.dumps(node.shard("a")["reason"]), "it goes on")
    assert node.wait_state("b", "ready")["pid"] == pids["b"]
    assert node.cli("stop", "b", "--wait").returncode == 0
    assert not is_alive(pids["b"])
    assert node.end() == 0
    assert node.engine_processes() == []


def test_a_runtime_folder_that_vanishes_leaves_signals_as_the_way_to_end_it(node: Node) -> None:
    node.write(llamacpp())
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    shutil.rmtree(node.folder / "r")
    result = node.cli("status")
    assert result.returncode == 5 and "Traceback" not in result.stderr
    assert node.end() == 0
    assert not is_alive(pid)


def test_a_new_engine_does_not_get_the_port_of_a_taken_over_one_that_does_not_listen_yet(node: Node) -> None:
    def silent(name: str) -> str:
        return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\nengine = "command"\ncommand = ["sleep", "600"]\n'

    node.write(QUICK + silent("old"))
    node.start()
    before = node.wait_state("old", "starting")
    node.kill()
    # One in front of it and one behind: whichever starts first, one of them chooses before it is taken over.
    node.write(QUICK + silent("front") + silent("old") + silent("behind"))
    node.start()
    node.until(lambda: all(shard["pid"] for shard in node.status()["shards"]), "all three run")
    assert node.shard("old")["pid"] == before["pid"]
    assert node.shard("old")["adopted"]
    ports = {node.shard(name)["endpoint"] for name in ("front", "old", "behind")}
    assert len(ports) == 3
