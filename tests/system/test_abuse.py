"""What a hostile field does to a whole llmgw: closed and stuffed streams, signals at the worst moment, nonsense."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.node import FAKE, Node


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def one_engine(node: Node) -> None:
    weights = node.folder / "m.gguf"
    weights.write_bytes(b"GGUF")
    node.write(
        '[[shard]]\nname = "a"\nmodel = "m"\nengine = "llamacpp"\n'
        f'weights = "{weights}"\ncommand = {json.dumps([*FAKE, "llamacpp"])}\n'
    )


def run_through_a_shell(node: Node, redirections: str, **env: str) -> None:
    with node.output.open("ab") as output:
        node.process = subprocess.Popen(
            ["/bin/sh", "-c", f'exec "$0" -m llmgw run "$1" {redirections}', sys.executable, str(node.config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**node.env, **env},
            start_new_session=True,
        )


@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full 2>&1"])
def test_closed_and_full_streams_change_nothing(node: Node, redirections: str) -> None:
    one_engine(node)
    run_through_a_shell(node, redirections)
    node.until(node.answers, "the control socket answers")
    node.wait_state("a", "ready")
    assert node.end() == 0
    assert node.engine_processes() == []
    assert (node.state / "lock").read_text().strip().isdecimal(), "something was written into another file's number"


def test_a_verb_whose_output_is_closed_keeps_its_exit_code(node: Node) -> None:
    one_engine(node)
    line = f'"{sys.executable}" -m llmgw check "{node.config}" >&- 2>&-'
    assert subprocess.run(["/bin/sh", "-c", line], env=node.env, check=False).returncode == 0
    node.config.write_text("no = = toml")
    assert subprocess.run(["/bin/sh", "-c", line], env=node.env, check=False).returncode == 78


@pytest.mark.parametrize("words", ["version", "explain", "explain shard.port"])
def test_output_that_does_not_fit_on_the_disk_is_told_in_one_line(node: Node, words: str) -> None:
    line = ["/bin/sh", "-c", f'"{sys.executable}" -m llmgw {words} >/dev/full']
    result = subprocess.run(line, env=node.env, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "error: cannot write the output: No space left on device\n")


def test_a_log_that_nobody_reads_stops_nothing(node: Node) -> None:
    one_engine(node)
    reader, writer = os.pipe()
    node.process = subprocess.Popen(
        [sys.executable, "-m", "llmgw", "run", str(node.config)],
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        env=node.env,
        start_new_session=True,
    )
    try:
        node.until(node.answers, "the control socket answers")
        node.wait_state("a", "ready")
        # A description of its own, so that only this writer does not wait.
        stuffing = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)
        for size in (4096, 1):
            try:
                while os.write(stuffing, b"x" * size):
                    pass
            except BlockingIOError:
                continue
        os.close(stuffing)
        for _ in range(3):
            assert node.cli("restart", "a", "--wait").returncode == 0
        node.wait_state("a", "ready")
        assert node.end() == 0
    finally:
        os.close(reader)
        os.close(writer)
    assert node.engine_processes() == []


def test_a_level_of_the_log_that_does_not_exist_is_told_and_changes_nothing(node: Node) -> None:
    one_engine(node)
    run_through_a_shell(node, "", LLMGW_LOG_LEVEL="loud")
    node.until(node.answers, "the control socket answers")
    assert "LLMGW_LOG_LEVEL is 'LOUD', which is no level" in node.log()


def test_a_descriptor_that_is_no_socket_is_refused_in_words(node: Node) -> None:
    one_engine(node)
    run_through_a_shell(node, "", LLMGW_SOCKET_FD="0:/nowhere")
    assert node.process is not None
    assert node.process.wait(30) == 1
    assert node.log().startswith("error: cannot take over descriptor 0 as control socket: ")


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.15, 0.3])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_no_signal_during_an_upgrade_is_lost_or_deadly(node: Node, number: signal.Signals, pause: float) -> None:
    one_engine(node)
    node.start()
    assert node.process is not None
    engine = node.wait_state("a", "ready")["pid"]
    upgrade = subprocess.Popen(
        [sys.executable, "-m", "llmgw", "-s", str(node.socket), "upgrade"], env=node.env, stdout=subprocess.DEVNULL
    )
    started = node.status()["started"]
    node.until(lambda: is_leaving(node, started), "the old code leaves")
    time.sleep(pause)
    node.process.send_signal(number)
    if number == signal.SIGHUP:
        assert upgrade.wait(60) == 0
        assert node.wait_state("a", "ready")["pid"] == engine
    else:
        assert node.process.wait(60) == 0
        assert not psutil.pid_exists(engine)
        upgrade.kill()
        upgrade.wait()
        assert node.leftovers() == []


def is_leaving(node: Node, started: float) -> bool:
    """The old code has said so, or does not answer any more, or the new one does."""
    try:
        status = node.ask("GET", "/v1/status", timeout=1)
    except Exception:  # noqa: BLE001  (whatever it is, the old code is busy with leaving)
        return True
    return bool(status["stopping"] == "upgrade" or status["started"] != started)


@pytest.mark.parametrize("ending", ["upgrade", "stop"])
def test_reloads_that_are_under_way_when_llmgw_leaves_break_nothing(node: Node, ending: str) -> None:
    one_engine(node)
    node.start()
    assert node.process is not None
    engine = node.wait_state("a", "ready")["pid"]
    both = node.config.read_text()
    both += both[both.index("[[shard]]") :].replace('"a"', '"b"')
    storm = [
        "import os, signal, sys, time",
        "for _ in range(300):",
        "    os.kill(int(sys.argv[1]), signal.SIGHUP)",
        "    time.sleep(0.01)",
    ]
    node.config.write_text(both)
    with subprocess.Popen(
        [sys.executable, "-c", "\n".join(storm), str(node.process.pid)], stderr=subprocess.DEVNULL
    ) as p:
        if ending == "upgrade":
            assert node.cli("upgrade", timeout=90).returncode == 0
            assert node.wait_state("a", "ready")["pid"] == engine
            assert node.wait_state("b", "ready")
            p.kill()
        assert node.end() == 0
        p.kill()
    assert "Traceback" not in node.log()
    assert node.engine_processes() == []
    assert node.leftovers() == []


def test_what_a_killed_llmgw_left_before_a_record_is_removed_at_the_next_start(node: Node) -> None:
    one_engine(node)
    node.start()
    node.wait_state("a", "ready")
    kept = node.records()[0]["tmp_dir"]
    lost = node.state / "tmp" / "0a1b2c3d"
    node.kill()
    lost.mkdir()
    node.start()
    node.wait_state("a", "ready")
    assert not lost.exists()
    assert os.path.isdir(kept)


def test_a_launch_that_cannot_write_its_log_leaves_no_folder(node: Node) -> None:
    one_engine(node)
    (node.folder / "l" / "a.0.log").mkdir(parents=True)
    node.start()
    failed = node.wait_state("a", "failed")
    assert "cannot prepare its folders" in failed["reason"]["cause"]
    assert node.leftovers() == []


def test_a_lost_folder_of_logs_is_made_again(node: Node) -> None:
    one_engine(node)
    node.start()
    node.wait_state("a", "ready")
    shutil.rmtree(node.folder / "l")
    assert node.cli("restart", "a", "--wait").returncode == 0
    node.wait_state("a", "ready")
    node.until(lambda: "loading model" in node.cli("logs", "a").stdout, "the new file is followed")


def test_engines_leave_llmgw_the_descriptors_it_needs_to_say_what_is_wrong(node: Node) -> None:
    program = json.dumps(["sleep", "1000"])
    shard = '[[shard]]\nname = "s{}"\nmodel = "m"\nengine = "command"\ncommand = {}\nready_path = "/health"\n'
    node.write("".join(shard.format(number, program) for number in range(30)))
    with node.output.open("ab") as output:
        node.process = subprocess.Popen(
            ["/bin/sh", "-c", 'ulimit -n 80; exec "$0" -m llmgw run "$1"', sys.executable, str(node.config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=node.env,
            start_new_session=True,
        )
    node.until(node.answers, "the control socket answers")

    def all_tried() -> bool:
        shards = node.status()["shards"]
        return all(shard["state"] in ("starting", "failed") for shard in shards)

    node.until(all_tried, "each was launched or refused")
    shards = node.status()["shards"]
    refused = [shard["reason"] for shard in shards if shard["state"] == "failed"]
    assert 0 < len(refused) < 30
    assert {reason["cause"] for reason in refused} == {
        "llmgw may have 80 files open, which is too few for one more engine"
    }
    assert "LimitNOFILE" in node.cli("status").stdout
    assert node.end() == 0
    assert node.leftovers() == []


def test_reload_signals_while_it_starts_are_not_deadly(node: Node) -> None:
    one_engine(node)
    node.start(wait=False)
    assert node.process is not None
    ignored = 1 << (signal.SIGHUP - 1)

    def protected() -> bool:
        with open(f"/proc/{node.process.pid}/status", encoding="ascii") as file:  # type: ignore[union-attr]
            masks = dict(line.split(":", 1) for line in file)
        return bool((int(masks["SigIgn"], 16) | int(masks["SigCgt"], 16)) & ignored)

    node.until(protected, "the interpreter runs llmgw's own code")
    deadline = time.monotonic() + 30
    while not node.socket.exists() and time.monotonic() < deadline:
        node.process.send_signal(signal.SIGHUP)
        time.sleep(0.005)
    node.until(node.answers, "the control socket answers")
    node.wait_state("a", "ready")
