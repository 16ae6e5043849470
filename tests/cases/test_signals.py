"""Signals to a whole llmgw, with and without a terminal; the ends that nobody planned; exit codes for scripts."""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import os
import pty
import resource
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.node import Node, fake, is_alive
from tests.scripted import Stream, scripted

QUICK = '[defaults]\nrestart_delay = "200ms"\nrestart_delay_max = "300ms"\nprobe_interval = "200ms"\n'
UNIT = Path(__file__).parents[2] / "contrib" / "systemd" / "llmgw.service"


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def llamacpp(name: str = "a", *, knobs: str = "", more: str = "") -> str:
    command = fake("llamacpp", *knobs.split())
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\nengine = "llamacpp"\ncommand = {command}\n{more}\n'


def vllm(name: str = "b", *, knobs: str = "", more: str = "") -> str:
    command = fake("vllm", "serve", *knobs.split())
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\ngpus = 0\ncommand = {command}\n{more}\n'


def reports(node: Node) -> list[str]:
    """What llmgw's own log says of states: "a: stopped: ..." """
    return [line.split(" ", 3)[-1] for line in node.log().splitlines()]


# -- F39: SIGTERM on the daemon


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_llmgw_in_order_and_streams_are_finished(node: Node, number: signal.Signals) -> None:
    node.write(llamacpp(knobs="--fake-token-interval 0.05") + vllm())
    node.start()
    stream = Stream(node.wait_state("a", "ready"), 50)
    node.wait_state("b", "ready")
    assert node.end(number) == 0
    assert stream.ended() is True
    said = reports(node)
    assert any(line.startswith("a: stopped") for line in said) and any(line.startswith("b: stopped") for line in said)
    assert not any(": failed" in line for line in said)
    assert node.engine_processes() == [] and node.leftovers() == []
    assert not node.socket.exists()


@pytest.mark.parametrize("first", ["llmgw", "engines"])
def test_a_signal_to_everybody_at_once_is_a_stop_and_no_crash(node: Node, first: str) -> None:
    """What the default KillMode of systemd does, and a shell that ends a whole group."""
    node.write(QUICK + llamacpp() + vllm() + scripted(node, "server.serve_forever()\n", name="c"))
    own = node.start()
    engines = [process.pid for name in "abc" if (process := psutil.Process(node.wait_state(name, "ready")["pid"]))]
    engines += [child.pid for pid in engines for child in psutil.Process(pid).children(recursive=True)]
    for pid in [own, *engines] if first == "llmgw" else [*engines, own]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert node.process is not None and node.process.wait(30) == 0
    said = reports(node)
    assert not any(": failed" in line or "generation 2" in line for line in said), said
    assert sum(": stopped" in line for line in said) == 3
    assert node.engine_processes() == [] and node.leftovers() == []


def test_a_second_signal_during_a_drain_stops_at_once(node: Node) -> None:
    node.write(llamacpp(knobs="--fake-token-interval 0.1", more='drain_timeout = "10m"\nstop_timeout = "10m"') + vllm())
    node.start()
    stream = Stream(node.wait_state("a", "ready"), 1000)
    node.wait_state("b", "ready")
    assert node.process is not None
    node.process.send_signal(signal.SIGINT)
    node.until(lambda: node.status()["stopping"], "it is on its way out")
    assert node.cli("status").returncode in (0, 3)
    assert node.end(signal.SIGTERM, timeout=20) == 0
    assert stream.ended() is False
    assert node.engine_processes() == [] and node.leftovers() == []


@pytest.mark.parametrize("state", ["starting", "failed"])
def test_a_signal_ends_llmgw_in_whatever_state_a_shard_is(node: Node, state: str) -> None:
    knobs = "--fake-fail exit-7" if state == "failed" else "--fake-never-ready"
    node.write(llamacpp(knobs=knobs) + vllm(knobs=knobs) + vllm("off", more="autostart = false"))
    node.start()
    node.until(lambda: node.state_of("b") in (state, "loading"), "it is there")
    assert node.end(timeout=20) == 0
    assert node.engine_processes() == [] and node.leftovers() == []


def test_a_signal_right_at_the_start_leaves_nothing(node: Node) -> None:
    node.write(llamacpp() + vllm())
    for delay in (0.15, 0.3, 0.45, 0.6):
        node.start(wait=False)
        assert node.process is not None
        time.sleep(delay)
        node.process.send_signal(signal.SIGTERM)
        # Before its handlers are in place it is ended by the signal itself, and has started nothing then.
        assert node.process.wait(30) in (0, -signal.SIGTERM), node.log()
        assert node.engine_processes() == []
        assert node.leftovers() == []


def test_the_shipped_unit_says_what_an_orderly_stop_needs() -> None:
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    service = parser["Service"]
    assert service["KillMode"] == "process"
    assert service["OOMPolicy"] == "continue"
    assert service["LimitMEMLOCK"] == "infinity" and "LimitNOFILE" in service
    assert service["Restart"] == "on-failure" and "RuntimeDirectory" in service
    assert service["RestartPreventExitStatus"].split()
    assert "sweep --if-stopping" in service["ExecStopPost"]


# -- SIGHUP


def test_sighup_without_a_terminal_reads_the_file_again(node: Node) -> None:
    node.write(llamacpp())
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    node.write(llamacpp() + vllm())
    assert node.process is not None
    node.process.send_signal(signal.SIGHUP)
    node.until(lambda: len(node.status()["shards"]) == 2, "the new shard is there")
    node.config.write_text("nonsense = ")
    node.process.send_signal(signal.SIGHUP)
    node.until(lambda: node.status()["config"]["error"], "the refusal is shown")
    assert node.wait_state("a", "ready")["pid"] == pid
    assert node.wait_state("b", "ready")


@contextlib.contextmanager
def on_a_terminal(node: Node) -> Iterator[Callable[[], None]]:
    """llmgw in the foreground of a terminal of its own; yields what hangs up."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    # The output goes to the terminal as well: after the hang-up each line of the log fails to be written.
    node.process = subprocess.Popen(
        [sys.executable, "-m", "llmgw", "run", str(node.config)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=node.env,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    hung_up: list[bool] = []

    def hang_up() -> None:
        hung_up.append(True)
        os.close(ours)

    try:
        node.until(node.answers, "the control socket answers")
        os.set_blocking(ours, False)
        yield hang_up
    finally:
        if not hung_up:
            hang_up()


def test_a_lost_terminal_ends_llmgw_and_its_engines(node: Node) -> None:
    node.write(llamacpp() + vllm())
    with on_a_terminal(node) as hang_up:
        pids = [node.wait_state(name, "ready")["pid"] for name in ("a", "b")]
        hang_up()
        assert node.process is not None and node.process.wait(30) == 0
    assert not any(is_alive(pid) for pid in pids)
    assert node.engine_processes() == [] and node.leftovers() == []


def test_sighup_from_somebody_with_the_terminal_still_there_is_a_reload(node: Node) -> None:
    node.write(llamacpp())
    with on_a_terminal(node):
        pid = node.wait_state("a", "ready")["pid"]
        node.write(llamacpp() + vllm())
        assert node.process is not None
        node.process.send_signal(signal.SIGHUP)
        node.until(lambda: len(node.status()["shards"]) == 2, "the new shard is there")
        assert node.wait_state("a", "ready")["pid"] == pid


# -- F40: locked memory


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to have a higher hard limit")
def test_an_engine_may_lock_as_much_memory_as_the_hard_limit_allows(node: Node) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    node.write(llamacpp())
    pid = node.start(wait=False)
    resource.prlimit(pid, resource.RLIMIT_MEMLOCK, (8 << 20, hard))
    node.until(node.answers, "the control socket answers")
    engine = node.wait_state("a", "ready")["pid"]
    assert resource.prlimit(pid, resource.RLIMIT_MEMLOCK) == (8 << 20, hard)
    assert resource.prlimit(engine, resource.RLIMIT_MEMLOCK) == (hard, hard)


# -- an end that nobody planned, and `llmgw sweep`


@pytest.mark.proof
@pytest.mark.parametrize(
    ("on_stop", "words", "stays"),
    [
        ("auto", [], False),
        ("stop", [], False),
        ("leave", [], True),
        ("auto", ["--if-stopping"], True),
        ("stop", ["--if-stopping"], False),
        ("leave", ["--if-stopping"], True),
    ],
)
def test_a_sweep_after_a_crash_ends_what_is_not_to_stay(
    node: Node, on_stop: str, words: list[str], stays: bool
) -> None:
    node.write(llamacpp() + vllm(knobs="--fake-detached setsid"))
    node.config.write_text(node.config.read_text().replace("[supervisor]", f'[supervisor]\non_stop = "{on_stop}"'))
    node.start()
    pids = [node.wait_state(name, "ready")["pid"] for name in ("a", "b")]
    sweep = ["sweep", "--state-dir", str(node.state), *words]
    busy = node.cli(*sweep)
    assert busy.returncode == 2 and f"pid {node.status()['pid']}" in busy.stderr
    node.kill()
    # It works from the records alone, whatever has become of the file.
    good = node.config.read_text()
    node.config.write_text("nonsense = ")
    result = node.cli(*sweep)
    node.config.write_text(good)
    assert result.returncode == 0, result.stdout + result.stderr
    assert str(node.state) in result.stdout
    assert [is_alive(pid) for pid in pids] == [stays, stays], result.stdout
    assert bool(node.engine_processes()) == stays
    if stays:
        node.start()
        assert [node.wait_state(name, "ready")["pid"] for name in ("a", "b")] == pids
    else:
        assert node.leftovers() == []


# -- exit codes


def test_exit_codes_of_status_and_wait(node: Node) -> None:
    node.write(
        '[defaults]\nrestart = "no"\n'
        + llamacpp()
        + vllm("slow", knobs="--fake-never-ready")
        + vllm("off", more="autostart = false")
    )
    assert node.cli("status").returncode == 5
    assert node.cli("wait", "a", "--timeout", "1s").returncode == 5
    node.start()
    assert node.cli("wait", "a", "--timeout", "20s").returncode == 0
    assert node.cli("status", "a").returncode == 0
    assert node.cli("status", "a", "off").returncode == 0, "what nobody wants is not missing"
    assert node.cli("status").returncode == 3
    assert node.cli("status", "nobody").returncode == 4
    assert node.cli("wait", "nobody").returncode == 4
    assert node.cli("wait", "slow", "--timeout", "300ms").returncode == 6
    assert node.cli("wait", "off", "--for", "stopped").returncode == 0
    os.kill(node.shard("a")["pid"], signal.SIGKILL)
    assert node.cli("wait", "a", "--timeout", "20s").returncode == 1
    assert node.cli("status").returncode == 1
    assert node.cli("wait", "a", "--for", "stopped", "--timeout", "20s").returncode == 0
    assert node.cli("status", "--no-such-option").returncode == 2
