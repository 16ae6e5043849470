"""The reported failures of stopping, and of what engines leave behind, as behaviour of a whole llmgw."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fake_gpus import FakeGpus
from tests.node import Node, fake, is_alive
from tests.scripted import Stream, scripted

QUICK = '[defaults]\nrestart_delay = "200ms"\nrestart_delay_max = "300ms"\nprobe_interval = "200ms"\n'
PROFILES = {"vllm": ["vllm", "serve"], "sglang": ["sglang", "serve"], "llamacpp": ["llamacpp"]}


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def engine(kind: str, name: str = "a", *, knobs: str = "", more: str = "", gpus: str = "0") -> str:
    command = fake(*PROFILES[kind], *knobs.split())
    place = f"gpus = {gpus}\n" if kind != "llamacpp" else ""
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\nengine = "{kind}"\n{place}command = {command}\n{more}\n'


def family(pid: int) -> list[psutil.Process]:
    """The leader's descendants, as they are now."""
    return psutil.Process(pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def in_background(node: Node, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "llmgw", "-s", str(node.socket), "-c", str(node.config), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=node.env,
    )


# -- F14: workers outlive a dead leader


@pytest.mark.proof
@pytest.mark.parametrize("adopted", [False, True])
def test_the_gpus_of_a_killed_leader_are_free_only_when_its_last_worker_is_gone(node: Node, adopted: bool) -> None:
    gpus = FakeGpus(node)
    node.write(
        QUICK + engine("vllm", gpus="[0]", knobs="--fake-worker-ignores-term --fake-detached setsid-ignore-term")
    )
    node.start()
    first = node.wait_state("a", "ready")
    if adopted:
        node.kill()
        node.start()
        node.wait_state("a", "ready")
    workers = family(first["pid"])
    assert gpus.used(0) == 70000 and len(workers) > 1
    os.kill(first["pid"], signal.SIGKILL)
    seen: list[bool] = []

    def is_launched_again() -> bool:
        shard = node.shard("a")
        seen.append(shard["state"] in ("failed", "pending") and bool(alive(workers)))
        return bool(shard["generation"] == 2)

    node.until(is_launched_again, "it is launched again")
    # Neither over nor launched again as long as anything lived, though it took SIGKILL.
    assert not any(seen) and not alive(workers)
    second = node.wait_state("a", "ready")
    assert (second["restarts"], gpus.used(0)) == (1, 70000)
    if not adopted:
        ends = [event["text"] for event in node.events() if event["after"] == "failed"]
        assert any("signal 9" in text or "SIGKILL" in text for text in ends), ends


@pytest.mark.parametrize("kind", ["sglang", "llamacpp"])
def test_a_leader_that_is_killed_while_it_loads_leaves_nobody(node: Node, kind: str) -> None:
    # Without shared memory: what a leader alone had mapped before Ready is known to nobody after its SIGKILL.
    knobs = "--fake-never-ready --fake-worker-ignores-term --fake-no-shm"
    node.write('[defaults]\nrestart = "no"\n' + engine(kind, knobs=knobs))
    node.start()
    pid = node.wait_state("a", "loading")["pid"]
    os.kill(pid, signal.SIGKILL)
    failed = node.wait_state("a", "failed")
    assert failed["reason"]["cause"]
    assert node.engine_processes() == []
    assert node.leftovers() == []


# -- F15: workers that left the process group

ESCAPES = """\
def ignore(): signal.signal(signal.SIGTERM, signal.SIG_IGN); sleep()
def with_session(): os.setsid(); ignore()
def with_group(): os.setpgid(0, 0); ignore()
def nameless():
    # What setproctitle does: neither command line nor environment tell anything any more.
    os.setsid()
    os.execve(sys.executable, ["x", "-S", "-c", "import signal\\nwhile True: signal.pause()"], {})
def deep():
    os.setsid()
    child(lambda: (os.setsid(), child(nameless), ignore()))
    ignore()
def daemon():
    os.setsid()
    if os.fork() == 0:
        ignore()
for main in (ignore, with_session, with_group, nameless, deep, daemon):
    child(main)
server.serve_forever()
"""


@pytest.mark.proof
@pytest.mark.parametrize("adopted", [False, True])
def test_a_stop_ends_all_that_a_shard_started_wherever_it_went(node: Node, adopted: bool) -> None:
    node.write(scripted(node, ESCAPES, more='stop_timeout = "1s"'))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    node.until(lambda: len(family(pid)) >= 7, "all of them are there")
    everybody = [*node.engine_processes(), *family(pid)]
    assert len({process.pid for process in everybody}) >= 9
    # A stranger with the same command line in every detail, and of the same user.
    twin = subprocess.Popen([*psutil.Process(pid).cmdline()[:-1], "0"], stdout=subprocess.DEVNULL)
    try:
        if adopted:
            node.kill()
            node.start()
            node.wait_state("a", "ready")
        result = node.cli("stop", "a", "--wait")
        assert result.returncode == 0, result.stderr
        assert alive(everybody) == []
        assert "SIGKILL" in node.shard("a")["detail"]
        assert twin.poll() is None
    finally:
        # Its own escapes have left its family: only their command line still tells whose they are.
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] == twin.args and process.pid != twin.pid:
                process.kill()
        twin.kill()
        twin.wait()


def test_workers_in_sessions_of_their_own_are_ended_when_their_leader_is_killed(node: Node) -> None:
    node.write('[defaults]\nrestart = "no"\n' + scripted(node, ESCAPES))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    node.until(lambda: len(family(pid)) >= 7, "all of them are there")
    everybody = [*node.engine_processes(), *family(pid)]
    os.kill(pid, signal.SIGKILL)
    node.wait_state("a", "failed")
    assert alive(everybody) == []


# -- F16: stop: SIGTERM ignored, too early, twice


def test_an_engine_that_ignores_sigterm_is_killed_after_its_time_and_the_result_says_so(node: Node) -> None:
    node.write(engine("llamacpp", knobs="--fake-ignore-term", more='stop_timeout = "1s"'))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    result = node.cli("stop", "a", "--wait")
    assert result.returncode == 0
    assert "SIGKILL" in result.stdout
    assert not is_alive(pid)


@pytest.mark.parametrize("kind", list(PROFILES))
def test_open_streams_are_finished_before_any_signal(node: Node, kind: str) -> None:
    node.write(engine(kind, knobs="--fake-token-interval 0.04"))
    node.start()
    shard = node.wait_state("a", "ready")
    streams = [Stream(shard, 60) for _ in range(2)]
    stopping = in_background(node, "stop", "a", "--wait")
    node.until(lambda: "stopping" in node.conditions("a"), "it drains")
    assert not node.shard("a")["routable"]
    assert [stream.ended() for stream in streams] == [True, True]
    text, _ = stopping.communicate(timeout=30)
    assert stopping.returncode == 0, text
    # Nothing was left to wait for, so SIGTERM was enough.
    assert "SIGTERM" in node.shard("a")["detail"]
    assert node.engine_processes() == []


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "knobs", "least"),
    [
        ("vllm", "--fake-streams-at-stop hang", 3),
        ("vllm", "--fake-streams-at-stop cut", 1),
        ("sglang", "", 1),
        ("llamacpp", "", 1),
    ],
)
def test_streams_without_end_hold_up_a_stop_for_the_drain_and_stop_time_and_no_longer(
    node: Node, kind: str, knobs: str, least: float
) -> None:
    node.write(
        engine(
            kind,
            knobs=f"--fake-token-interval 0.1 {knobs}",
            more='drain_timeout = "1s"\nstop_timeout = "2s"',
        )
    )
    node.start()
    stream = Stream(node.wait_state("a", "ready"), 1000)
    began = time.monotonic()
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert time.monotonic() - began > least
    assert stream.ended() is False
    assert node.engine_processes() == []
    assert node.leftovers() == []


@pytest.mark.parametrize("kind", list(PROFILES))
@pytest.mark.parametrize("state", ["starting", "loading"])
def test_a_stop_before_ready_ends_it_soon_and_leaves_nothing(node: Node, kind: str, state: str) -> None:
    knobs = "--fake-never-ready" if state == "loading" else "--fake-time-factor 1 --fake-load-seconds 600"
    node.write(engine(kind, knobs=knobs, more='stop_timeout = "20s"'))
    node.start()
    pid = node.wait_state("a", *(("loading",) if state == "loading" else ("starting", "loading")))["pid"]
    workers = family(pid)
    result = node.cli("stop", "a", "--wait", "--timeout", "15s")
    assert result.returncode == 0, result.stdout + result.stderr
    assert not is_alive(pid) and alive(workers) == []
    assert node.state_of("a") == "stopped"
    assert node.engine_processes() == [] and node.leftovers() == []
    if kind != "llamacpp":
        # A signal in the middle of a load is swallowed there, or orphans workers: SIGKILL at once.
        assert "SIGKILL" in node.shard("a")["detail"]


def test_a_stop_during_the_warm_up_does_not_wait_for_the_token(node: Node) -> None:
    node.write(engine("vllm", knobs="--fake-first-token-delay 600", more="warmup = true"))
    node.start()
    node.until(lambda: "warming up" in node.shard("a")["detail"], "it is warmed up")
    assert node.cli("stop", "a", "--wait", "--timeout", "15s").returncode == 0
    assert node.state_of("a") == "stopped"
    assert node.engine_processes() == []


def test_two_stops_at_once_are_one_stop(node: Node) -> None:
    count = node.folder / "terms"
    body = (
        f"signal.signal(signal.SIGTERM, lambda *_: open({str(count)!r}, 'a').write('x'))\n"
        "threading.Timer(600, lambda: None)\nserver.serve_forever()\n"
    )
    node.write(scripted(node, body, more='stop_timeout = "2s"'))
    node.start()
    node.wait_state("a", "ready")
    stops = [in_background(node, "stop", "a", "--wait") for _ in range(3)]
    texts = [stop.communicate(timeout=30)[0] for stop in stops]
    assert [stop.returncode for stop in stops] == [0, 0, 0], texts
    # One at the beginning and one to what was left, whoever asked how often.
    assert count.read_text() == "xx"
    ends = [event for event in node.events() if event["after"] == "stopped"]
    assert len(ends) == 1


def test_a_stop_of_a_shard_whose_leader_has_just_died_is_a_stop(node: Node) -> None:
    node.write(engine("vllm", knobs="--fake-worker-ignores-term"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    workers = family(pid)
    os.kill(pid, signal.SIGKILL)
    node.until(lambda: not is_alive(pid), "it is dead")
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert alive(workers) == []
    node.until(lambda: node.state_of("a") in ("stopped", "failed"), "it is over")
    time.sleep(0.5)
    shard = node.shard("a")
    assert (shard["generation"], shard["next_attempt"], shard["state"]) == (1, None, "stopped")


def test_a_stop_during_the_pause_before_the_next_attempt_ends_the_attempts(node: Node) -> None:
    node.write(
        '[defaults]\nrestart_delay = "10m"\nrestart_delay_max = "10m"\n' + engine("vllm", knobs="--fake-fail d1")
    )
    node.start()
    node.until(lambda: node.shard("a")["next_attempt"], "the next attempt has a time")
    assert node.cli("stop", "a", "--wait", "--timeout", "10s").returncode == 0
    shard = node.shard("a")
    assert (shard["state"], shard["next_attempt"], shard["generation"]) == ("stopped", None, 1)
    assert "backoff" not in node.conditions("a")
    assert node.cli("status").returncode == 0


def test_a_restart_that_is_wished_during_a_stop_begins_when_the_stop_is_through(node: Node) -> None:
    node.write(engine("llamacpp", knobs="--fake-ignore-term", more='stop_timeout = "2s"'))
    node.start()
    first = node.wait_state("a", "ready")["pid"]
    assert node.cli("stop", "a", "--no-wait").returncode == 0
    node.until(lambda: "stopping" in node.conditions("a"), "it is being stopped")
    result = node.cli("restart", "a", "--wait")
    assert result.returncode == 0, result.stdout + result.stderr
    shard = node.wait_state("a", "ready")
    assert shard["pid"] != first and shard["generation"] == 2
    assert not is_alive(first)
    assert len(node.records()) == 1


def test_a_drained_shard_is_stopped_and_a_stop_hurries_no_stream_of_the_drain(node: Node) -> None:
    node.write(engine("llamacpp", knobs="--fake-token-interval 0.05"))
    node.start()
    stream = Stream(node.wait_state("a", "ready"), 60)
    assert node.cli("drain", "a", "--no-wait").returncode == 0
    node.wait_state("a", "draining")
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert stream.ended() is True
    assert node.state_of("a") == "stopped"


def test_a_stop_goes_on_after_a_crash_of_llmgw(node: Node) -> None:
    node.write(engine("llamacpp", knobs="--fake-ignore-term", more='stop_timeout = "3s"') + engine("llamacpp", "b"))
    node.start()
    pids = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")}
    assert node.cli("stop", "a", "--no-wait").returncode == 0
    node.until(lambda: "SIGTERM" in node.conditions("a").get("stopping", ""), "it is being stopped")
    node.kill()
    assert is_alive(pids["a"])
    node.start()
    shard = node.wait_state("a", "stopped")
    assert (shard["generation"], shard["intent"]["wish"]) == (1, "stop")
    assert not is_alive(pids["a"])
    assert node.wait_state("b", "ready")["pid"] == pids["b"]


def test_an_upgrade_during_a_stop_loses_neither(node: Node) -> None:
    node.write(engine("llamacpp", knobs="--fake-ignore-term", more='stop_timeout = "3s"') + engine("llamacpp", "b"))
    own = node.start()
    pids = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")}
    assert node.cli("stop", "a", "--no-wait").returncode == 0
    node.until(lambda: "SIGTERM" in node.conditions("a").get("stopping", ""), "it is being stopped")
    started = node.status()["started"]
    in_background(node, "upgrade").communicate(timeout=60)
    node.until(lambda: node.answers() and node.status()["started"] > started, "the new code is there")
    assert node.wait_state("a", "stopped")["intent"]["wish"] == "stop"
    assert not is_alive(pids["a"])
    assert node.status()["pid"] == own and node.wait_state("b", "ready")["pid"] == pids["b"]


# -- F17: wrappers

WRAPPERS = {
    "shell that stays": ["bash", "-c", '"$@"; true', "x"],
    "deserter": [
        sys.executable,
        "-c",
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "subprocess.Popen(sys.argv[1:]).wait()",
    ],
    "late exec": ["bash", "-c", 'sleep 0.5; exec "$@"', "x"],
}


def wrapped(wrapper: str, kind: str, more: str = "") -> str:
    words = [*WRAPPERS[wrapper], *json.loads(fake(*PROFILES[kind]))]
    return (
        f'[[shard]]\nname = "a"\nmodel = "a"\nengine = "{kind}"\n{"gpus = 0" if kind != "llamacpp" else ""}\n'
        f"command = {json.dumps(words)}\n{more}\n"
    )


@pytest.mark.proof
@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_a_stop_reaches_the_engine_behind_a_wrapper(node: Node, wrapper: str, adopted: bool) -> None:
    node.write(wrapped(wrapper, "vllm"))
    node.start()
    before = node.wait_state("a", "ready")
    everybody = [psutil.Process(before["pid"]), *family(before["pid"])]
    if adopted:
        node.kill()
        node.start()
        after = node.wait_state("a", "ready")
        assert (after["pid"], after["adopted"]) == (before["pid"], True)
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert alive(everybody) == []
    assert node.engine_processes() == [] and node.leftovers() == []


def test_a_wrapper_that_goes_does_not_make_its_shard_stopped_while_the_engine_drains(node: Node) -> None:
    """Its engine needs its time for the streams; until it is gone the shard is neither over nor free to start."""
    node.write(wrapped("deserter", "llamacpp", 'drain_timeout = "0s"\nstop_timeout = "20s"'))
    node.start()
    shard = node.wait_state("a", "ready")
    real = [process for process in family(shard["pid"]) if "llmgw.fake.engine" in " ".join(process.cmdline())]
    stopping = in_background(node, "stop", "a", "--wait")
    node.until(lambda: not is_alive(shard["pid"]), "the wrapper is gone")
    while alive(real):
        assert node.state_of("a") == "draining"
        time.sleep(0.01)
    stopping.communicate(timeout=30)
    assert (stopping.returncode, node.state_of("a")) == (0, "stopped")


# -- F18: zombies: dead, half dead, and not dead at all


def test_the_death_of_an_adopted_engine_that_nobody_reaps_is_noticed(node: Node) -> None:
    node.write(QUICK + engine("llamacpp") + engine("vllm", "b"))
    node.start()
    pids = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")}
    node.kill()
    node.start()
    for name in pids:
        assert node.wait_state(name, "ready")["adopted"]
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    for name, pid in pids.items():
        node.until(lambda name=name, pid=pid: node.shard(name)["pid"] not in (None, pid), "it starts anew", timeout=15)  # type: ignore[misc]
        node.wait_state(name, "ready")


def test_children_that_nobody_reaps_hold_up_no_stop(node: Node) -> None:
    body = "for _ in range(20): child(lambda: None)\nserver.serve_forever()\n"
    node.write(scripted(node, body, more='stop_timeout = "20s"'))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    node.kill()
    node.start()
    node.wait_state("a", "ready")
    assert sum(process.status() == psutil.STATUS_ZOMBIE for process in family(pid)) == 20
    assert node.cli("stop", "a", "--wait", "--timeout", "10s").returncode == 0
    assert "SIGTERM" in node.shard("a")["detail"]


def test_a_leader_whose_main_thread_has_ended_lives_and_is_adopted_and_stopped(node: Node) -> None:
    body = (
        "threading.Thread(target=server.serve_forever).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)  # the end of this thread alone\n"
    )
    node.write(scripted(node, body, more='stop_timeout = "1s"'))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    node.kill()
    node.start()
    again = node.wait_state("a", "ready")
    assert (again["pid"], again["adopted"], again["generation"]) == (pid, True, 1)
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert not os.path.exists(f"/proc/{pid}/task/{pid}") or not os.listdir(f"/proc/{pid}/fd")


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.mark.proof
@pytest.mark.skipif(not os.access(FREEZER, os.W_OK), reason="needs the freezer of cgroup v1 to make a process immortal")
def test_what_does_not_die_fails_its_shard_keeps_its_gpu_and_holds_up_nobody(node: Node) -> None:
    FakeGpus(node)
    more = 'stop_timeout = "1s"\nrestart = "no"'
    node.write(QUICK + engine("vllm", gpus="[0]", more=more) + engine("vllm", "b", gpus="[1]", more=more))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    node.wait_state("b", "ready")
    stuck = family(pid)[-1]
    ice = FREEZER / f"llmgw-test-{os.getpid()}"
    ice.mkdir()
    try:
        (ice / "cgroup.procs").write_text(str(stuck.pid))
        (ice / "freezer.state").write_text("FROZEN")
        stopping = in_background(node, "stop", "a", "--wait")
        assert node.cli("stop", "b", "--wait", "--timeout", "15s").returncode == 0
        failed = node.wait_state("a", "failed", timeout=40)
        text, _ = stopping.communicate(timeout=30)
        assert stopping.returncode == 1, text
        assert "does not die" in text
        assert node.cli("status", "a").returncode == 1
        assert f"pid {stuck.pid}" in failed["reason"]["cause"] and "does not die" in failed["reason"]["cause"]
        assert "gpu-held" in node.conditions("a")
        assert len(node.records()) == 1, "its record stays for whoever comes next"
        # Nothing is launched beside it; when it can die at last, a second stop clears everything away.
        assert node.cli("start", "a", "--wait", "--timeout", "20s").returncode == 1
        assert (node.state_of("a"), node.shard("a")["generation"]) == ("failed", 1)
        (ice / "freezer.state").write_text("THAWED")
        assert node.cli("stop", "a", "--wait").returncode == 0
        assert node.state_of("a") == "stopped"
        assert not is_alive(stuck.pid) and node.leftovers() == []
    finally:
        (ice / "freezer.state").write_text("THAWED")
        psutil.wait_procs([stuck], timeout=10)
        deadline = time.monotonic() + 10
        while (ice / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        ice.rmdir()


# -- F19: leftovers in /dev/shm
@pytest.mark.proof
def test_crashes_leave_nothing_in_dev_shm_and_a_foreign_segment_stays(node: Node) -> None:
    tag = secrets.token_hex(4)
    shm = Path("/dev/shm")
    body = (
        "def segment(name):\n"
        "    fd = os.open('/dev/shm/' + name, os.O_RDWR | os.O_CREAT, 0o600)\n"
        "    os.ftruncate(fd, 65536)\n"
        "    memory = mmap.mmap(fd, 65536)\n"
        "    memory[:4] = b'full'\n"
        "    os.close(fd)\n"
        "    return memory\n"
        f"one = segment('psm_{tag}%d' % os.getpid())\n"
        f"two = segment('vllm_offload_{tag}%d.mmap' % os.getpid())\n"
        "def later():\n"
        # Made after Ready: only a look before the SIGKILL can tell whose it is.
        f"    time.sleep(0.2); three = segment('late_{tag}%d' % os.getpid())\n"
        "    signal.signal(15, signal.SIG_IGN); sleep()\n"
        "child(later)\n"
        "server.serve_forever()\n"
    )
    foreign = shm / f"psm_{tag}"
    foreign.write_bytes(b"somebody else's")
    try:
        node.write(QUICK + scripted(node, body, more='stop_timeout = "1s"'))
        node.start()
        for generation in (1, 2, 3):
            shard = node.wait_state("a", "ready")
            node.until(lambda: len(list(shm.glob(f"*{tag}?*"))) == 3, "its segments are there, and no others")
            assert shard["generation"] == generation
            os.kill(shard["pid"], signal.SIGKILL)
            node.until(lambda g=generation: node.shard("a")["generation"] == g + 1, "it starts anew")  # type: ignore[misc]
        node.wait_state("a", "ready")
        assert node.end() == 0
        assert [path.name for path in shm.glob(f"*{tag}*")] == [foreign.name]
    finally:
        for path in shm.glob(f"*{tag}*"):
            path.unlink()


def shm_engine(tag: str, mib: int) -> str:
    return (
        f"fd = os.open('/dev/shm/psm_{tag}', os.O_RDWR | os.O_CREAT, 0o600)\n"
        # Sparse: only what was written takes memory.
        f"os.ftruncate(fd, {4 * mib} << 20)\n"
        f"os.pwrite(fd, bytes({mib} << 20), 0)\n"
        f"memory = mmap.mmap(fd, {4 * mib} << 20)\n"
        "server.serve_forever()\n"
    )


def test_what_a_shard_takes_of_dev_shm_is_in_its_status(node: Node) -> None:
    tag = secrets.token_hex(4)
    node.write(scripted(node, shm_engine(tag, 2)) + scripted(node, "server.serve_forever()\n", name="b"))
    try:
        node.start()
        node.wait_state("a", "ready")
        node.wait_state("b", "ready")
        node.until(lambda: node.shard("a")["shm_bytes"] == 2 << 20, "what is really taken is counted")
        assert node.shard("b")["shm_bytes"] == 0
        assert node.status()["warnings"] == []
        # Adopted, it is known from the record.
        node.kill()
        node.start()
        node.wait_state("a", "ready")
        assert node.shard("a")["shm_bytes"] == 2 << 20
        assert node.cli("stop", "a", "--wait").returncode == 0
        assert node.shard("a")["shm_bytes"] is None
    finally:
        Path(f"/dev/shm/psm_{tag}").unlink(missing_ok=True)


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root for a /dev/shm of its own")
def test_a_dev_shm_that_is_half_taken_is_warned_about(node: Node) -> None:
    script = node.folder / "run.sh"
    script.write_text('mount -t tmpfs -o size=16m tmpfs /dev/shm || exit 77; exec "$@"\n')
    if subprocess.run(["unshare", "-m", "sh", str(script), "true"], check=False).returncode != 0:
        pytest.skip("no mount can be made here")
    node.write(scripted(node, shm_engine("a", 9)))
    node.start(prefix=["unshare", "-m", "sh", str(script)])
    node.wait_state("a", "ready")
    node.until(lambda: node.status()["warnings"], "it is warned")
    said = "engines take 56% of /dev/shm (a/0 9 MiB); when it is full none starts: enlarge it"
    assert node.status()["warnings"] == [said]
    assert said in node.cli("status").stdout
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert node.status()["warnings"] == []
