"""Knobs that hold for every profile: failures, wrong answers, floods, wrappers, and the plain program."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmgw.fake import failures, knobs

LLAMA = ("llamacpp", "-m", "/m/x.gguf", "--alias", "a")


NAMES = sorted(failures.TABLE)


@pytest.mark.parametrize("names", [NAMES[first : first + 8] for first in range(0, len(NAMES), 8)], ids=", ".join)
def test_every_failure_prints_its_cause_and_ends_with_the_engines_code(start, names):
    """Eight at a time: each is mostly waiting."""
    engines = {name: start("vllm", "serve", "/m", "--fake-fail", name, "--fake-load-seconds", "0.15") for name in names}
    for name, engine in engines.items():
        failure = failures.find(name)
        assert (name, engine.wait_exit()) == (name, failure.exit_code("vllm", failure.place))
        assert all(line in engine.stdout() + engine.stderr() for line in failure.lines("vllm"))


@pytest.mark.parametrize(("name", "code"), [("d5", -9), ("d7", 1), ("d34", 2)])
def test_sglang_fails_with_sigkill_when_a_child_is_to_blame(start, name, code):
    engine = start("sglang", "serve", "--model-path", "/m", "--fake-fail", name)
    assert engine.wait_exit() == code
    assert failures.find(name).lines("sglang")[-1].partition("error: ")[2] in engine.stderr()


def test_llamacpp_fails_to_load_with_1(start):
    engine = start(*LLAMA, "--fake-fail", "llama-load")
    assert engine.wait_exit() == 1
    assert "failed to load model" in engine.stderr()


def test_the_cause_lies_deep_in_the_log_of_a_failed_vllm(start):
    engine = start("vllm", "serve", "/m", "--fake-fail", "d4", "--fake-load-seconds", "0.15")
    assert engine.wait_exit() == 1
    lines = engine.stdout().splitlines()
    position = next(number for number, line in enumerate(lines) if "KV cache is needed" in line)
    assert position > 50
    assert len(engine.stderr().splitlines()) > 130
    assert "See root cause above" in engine.stderr()


def test_it_works_on_a_later_attempt_only(start, tmp_path):
    argv = (*LLAMA, "--fake-attempts-file", str(tmp_path / "n"), "--fake-succeed-on-attempt", "3")
    assert [start(*argv).wait_exit() for _ in range(2)] == [1, 1]
    assert start(*argv).wait_ready().status("/health") == 200


@pytest.mark.parametrize(("arguments", "code"), [(("--fake-exit-code", "0"), 0), (("--fake-exit-signal", "11"), -11)])
def test_it_exits_some_time_after_ready_as_told(start, arguments, code):
    assert start(*LLAMA, "--fake-exit-after", "0.1", *arguments).wait_exit() == code


def test_health_can_be_slow_and_can_say_no_for_a_while(start, until):
    engine = start(*LLAMA, "--fake-health-503-after", "0.3", "--fake-health-503-for", "0.5").wait_ready()
    until(lambda: engine.status("/health") == 503, "no")
    assert engine.status("/v1/models") == 200
    until(lambda: engine.status("/health") == 200, "yes again")
    slow = start(*LLAMA, "--fake-health-delay", "0.4").wait_ready()
    began = time.monotonic()
    assert slow.status("/health") == 200
    assert time.monotonic() - began >= 0.4


def read_raw(engine, path, limit, seconds):
    """What comes within so many seconds: a drip never ends, silence neither."""
    with socket.create_connection(("127.0.0.1", engine.port), timeout=seconds) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        received = bytearray()
        deadline = time.monotonic() + seconds
        try:
            while len(received) < limit and time.monotonic() < deadline and (data := sock.recv(1 << 20)):
                received += data
        except (TimeoutError, ConnectionResetError):
            pass
        return bytes(received)


@pytest.mark.parametrize("kind", [kind for kind in knobs.GARBAGE if kind != "none"])
def test_wrong_answers_to_the_model_list(start, kind):
    engine = start(*LLAMA, "--fake-models-garbage", kind).wait_ready()
    answer = read_raw(engine, "/v1/models", 5_000_000, 0.5 if kind in ("drip", "silent") else 15)
    body = answer.partition(b"\r\n\r\n")[2]
    if kind == "not-http":
        assert answer and not answer.startswith(b"HTTP/")
    elif kind in ("silent", "close"):
        assert answer == b""
    elif kind in ("huge", "endless"):
        assert len(answer) >= 5_000_000
    elif kind == "drip":
        assert b"200 OK" in answer and 0 < len(body) < 20
    elif kind == "html-404":
        assert b" 404 " in answer
    elif kind == "other-json":
        assert "id" not in json.loads(body)
    else:
        with pytest.raises((ValueError, RecursionError)):
            json.loads(body)
    assert engine.status("/health") == 200


def test_the_model_list_can_name_another_model(start):
    engine = start(*LLAMA, "--fake-wrong-model-name").wait_ready()
    assert json.loads(engine.ask("/v1/models")[1])["data"][0]["id"] == "some-other-model"


def test_a_flood_writes_about_as_many_lines_as_asked(start, until):
    engine = start(*LLAMA, "--fake-flood-lines-per-second", "50000", "--fake-flood-seconds", "0.2")
    until(lambda: engine.stderr().count("flood line") >= 10000, "ten thousand lines")
    assert engine.wait_ready().stderr().count("flood line") == 10000


@pytest.mark.parametrize(("mode", "found"), [("one-write", b"\r"), ("split", b"\r"), ("bar", b"\r")])
def test_progress_comes_in_the_asked_shape(start, tmp_path, mode, found):
    extra = () if mode == "bar" else ("--fake-progress-writes", mode)
    start("vllm", "serve", "/m", "--fake-load-seconds", "0.3", *extra).wait_ready()
    assert (tmp_path / "log0.err").read_bytes().count(b"Completed | 4/4 [00:04<00:00, 1.0s/it]" + found) == 1


def test_a_load_can_go_on_for_ever_with_or_without_progress(start, until):
    engine = start("vllm", "serve", "/m", "--fake-never-ready")
    until(lambda: engine.stderr().count("Completed | ") >= 3, "progress")
    silent = start("vllm", "serve", "/m", "--fake-never-ready", "--fake-progress", "silent")
    silent.member("VLLM::Worker")
    assert "Completed" not in silent.stderr()
    assert engine.status("/health") == silent.status("/health") == 0


@pytest.mark.parametrize("kind", ["exec", "stay"])
def test_a_wrapper_execs_or_stays(start, kind):
    engine = start(*LLAMA, "--fake-wrapper", kind).wait_ready()
    leader = Path(f"/proc/{engine.pid}/cmdline").read_bytes()
    assert leader.startswith(b"/bin/sh") == (kind == "stay")


def test_a_deserting_wrapper_leaves_the_engine_behind(start):
    engine = start(*LLAMA, "--fake-wrapper", "deserter").wait_ready()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == 0
    assert engine.status("/health") == 200


def test_plain_prints_exits_and_ignores_as_told(start, until):
    assert start("plain", "--fake-exit-after", "0", "--fake-exit-code", "3", with_port=False).wait_exit() == 3
    deaf = start("plain", "--fake-ready-line", "hello", "--fake-ignore-term", with_port=False)
    until(lambda: "hello\n" in deaf.stdout(), "its line")
    deaf.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        deaf.process.wait(0.2)
    served = start("plain", "--fake-serve").wait_ready()
    assert served.status("/v1/models") == 200


def test_plain_children_leave_group_and_session(start, until):
    name = f"children-of-{os.getpid()}"
    mark = f"MARK={name}".encode()
    kinds = "plain,setpgrp,setsid,ignore-term,setsid-ignore-term,double-fork"
    engine = start("plain", "--fake-children", kinds, "--fake-ready-line", "up", env={"MARK": name}, with_port=False)
    until(lambda: "up\n" in engine.stdout(), "start")

    def marked():
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    if mark in Path(f"/proc/{entry}/environ").read_bytes():
                        found[int(entry)] = os.getsid(int(entry)), os.getpgid(int(entry))
                except OSError:
                    continue
        return found

    def outsiders():
        found = marked()
        sessions = [session for session, _ in found.values() if session != engine.pid]
        groups = [group for _, group in found.values() if group != engine.pid]
        return len(found), len(sessions), len(groups)

    try:
        # The program and six children: three outside the session, these and a fourth outside the group.
        until(lambda: outsiders() == (7, 3, 4), "six children in their places")
    finally:
        engine.process.kill()

        def killed():
            """Whether none is left; one caught between its two forks may have left a child."""
            for pid in marked():
                os.kill(pid, signal.SIGKILL)
            return not marked()

        until(killed, "no child to be left")


def test_the_knob_table_and_the_defaults_name_the_same_knobs():
    named = {name.replace("-", "_") for name in knobs.TABLE}
    assert named == set(knobs.Knobs.__annotations__)
    assert all(f"--fake-{name}" in knobs.help_text() for name in knobs.TABLE)


def test_knobs_come_from_the_environment_and_the_command_line_wins():
    environment = {"FAKE_ENGINE_FLAGS": "--fake-tokens 5 --fake-never-ready", "FAKE_ENGINE_GPU_MIB": "7"}
    found, rest = knobs.parse(["serve", "--fake-tokens=9", "--fake-no-noise"], environment)
    assert (found.tokens, found.never_ready, found.gpu_mib, found.noise, rest) == (9, True, 7, False, ["serve"])
    with pytest.raises(knobs.KnobError, match="no such knob"):
        knobs.parse(["--fake-nothing"], {})


def test_the_fakes_import_no_other_part_of_llmgw():
    code = (
        "import sys; from llmgw.fake.profiles import llamacpp, vllm, sglang, plain;"
        "from llmgw.fake import nvidia_smi, engine;"
        "print([n for n in sys.modules if n.startswith('llmgw.') and not n.startswith('llmgw.fake')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("vllm", "serve", "/m", "--max-num-seqs", "many"), 2),
        (("sglang", "serve", "--model-path", "/m", "--max-queued-requests", "many"), 2),
        (("llamacpp", "-c", "many"), 1),
        (("plain", "--fake-serve", "-c", "many"), 2),
        (("llamacpp", "--fake-fail", "d99"), 2),
    ],
)
def test_a_value_that_does_not_fit_is_said_without_a_traceback(start, argv, code):
    engine = start(*argv)
    assert engine.wait_exit() == code
    assert "Traceback" not in engine.stderr()
    assert "many" in engine.stderr() or "d99" in engine.stderr()


def test_help_is_an_answer_and_no_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmgw.fake.engine", "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: llmgw-fake-engine")
