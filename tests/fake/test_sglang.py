"""The fake SGLang: port bound last, a model list before it is ready, crashes that end by SIGKILL."""

import json
import os
import signal
from pathlib import Path

SERVE = ("sglang", "serve", "--model-path", "/m/x", "--served-model-name", "a")


def test_the_model_list_answers_before_health_does(start, until):
    engine = start(*SERVE, "--fake-load-seconds", "2")
    until(lambda: engine.status("/v1/models") == 200, "the model list")
    assert {engine.status(path) for path in ("/ready", "/ping", "/health")} == {503}
    until(lambda: engine.status("/ready") == 200, "ready")
    assert engine.status("/health") == 200
    assert "The server is fired up and ready to roll!" in engine.stderr()


def test_scheduler_and_detokenizer_carry_their_titles(start):
    engine = start(*SERVE, "--tp-size", "2").wait_ready()
    names = sorted(name for name in engine.members().values() if name.startswith("sglang"))
    assert names == ["sglang::detoken", "sglang::schedul", "sglang::schedul"]
    scheduler = engine.member("sglang::schedul")
    assert b"sglang::scheduler_TP" in Path(f"/proc/{scheduler}/cmdline").read_bytes()


def test_a_used_port_fails_after_the_whole_load_by_sigkill(start):
    first = start(*SERVE).wait_ready()
    second = start(*SERVE, port=first.port)
    assert second.wait_exit() == -9
    assert "[Errno 98] error while attempting to bind on address" in second.stderr()
    assert "Load weight end" in second.stderr()


def test_sigterm_while_loading_ends_the_leader_and_orphans_the_detokenizer(start, until):
    engine = start(*SERVE, "--fake-load-seconds", "2.5", "--fake-progress", "silent")
    until(lambda: len(engine.members()) == 4, "leader, tracker, scheduler, detokenizer")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == -15
    assert engine.member("sglang::detoken")


def test_sigterm_to_the_leader_drains_and_still_takes_requests(start, until):
    engine = start(*SERVE).wait_ready()
    stream = engine.stream(30).read_until(b"word2")
    engine.process.send_signal(signal.SIGTERM)
    until(lambda: engine.status("/ready") == 503, "not ready")
    assert engine.status("/v1/models") == 200
    assert engine.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
    assert stream.read_to_end().count(b'"delta"') == 30
    assert engine.wait_exit() == 0


def test_sigterm_to_the_group_cuts_streams_and_ends_by_sigkill(start):
    engine = start(*SERVE).wait_ready()
    stream = engine.stream().read_until(b"word2")
    os.killpg(engine.pid, signal.SIGTERM)
    assert engine.wait_exit() == -9
    assert b"[DONE]" not in stream.read_to_end()
    assert "Received sigquit from a child process" in engine.stderr()


def test_a_killed_leader_takes_its_children_along(start, until):
    engine = start(*SERVE).wait_ready()
    engine.process.kill()
    engine.wait_exit()
    until(lambda: not any(name.startswith("sglang") for name in engine.members().values()), "no children")


def test_a_killed_scheduler_ends_it_by_sigkill(start):
    engine = start(*SERVE).wait_ready()
    os.kill(engine.member("sglang::schedul"), signal.SIGKILL)
    assert engine.wait_exit() == -9
    assert "before crash diagnostics" in engine.stderr()


def test_a_killed_detokenizer_makes_the_leader_hang_unless_the_waits_are_switched_off(start, until):
    engine = start(*SERVE, env={"SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "30"}).wait_ready()
    os.kill(engine.member("sglang::detoken"), signal.SIGKILL)
    until(lambda: "Waiting 30.0 seconds for CUDA coredumps" in engine.stderr(), "the wait")
    assert engine.process.poll() is None
    off = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false", "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false"}
    quick = start(*SERVE, env=off).wait_ready()
    os.kill(quick.member("sglang::detoken"), signal.SIGKILL)
    assert quick.wait_exit() == -9


def test_a_stopped_scheduler_is_found_by_health_alone(start):
    engine = start(*SERVE).wait_ready()
    scheduler = engine.member("sglang::schedul")
    os.kill(scheduler, signal.SIGSTOP)
    assert engine.status("/ready") == engine.status("/v1/models") == 200
    assert engine.status("/health") == 503
    assert engine.status("/ready") == 503
    os.kill(scheduler, signal.SIGCONT)


def test_metrics_are_404_without_the_flag(start):
    assert start(*SERVE).wait_ready().status("/metrics") == 404
    engine = start(*SERVE, "--enable-metrics").wait_ready()
    text = engine.ask("/metrics")[1].decode()
    assert 'sglang:num_running_reqs{engine_type="unified",model_name="a"' in text
    assert "sglang:realtime_tokens_total" in text


def test_the_key_guards_all_but_health_ready_and_metrics(start):
    engine = start(*SERVE, "--api-key", "k", "--enable-metrics").wait_ready()
    assert {engine.status(path) for path in ("/v1/models", "/ping", "/model_info")} == {401}
    assert {engine.status(path) for path in ("/ready", "/metrics", "/health")} == {200}
    assert engine.ask("/v1/models", headers={"authorization": "Bearer k"})[0] == 200


def test_it_prints_a_line_of_19_kilobytes_and_its_usage_before_an_error(start):
    engine = start(*SERVE).wait_ready()
    assert 15_000 < max(len(line) for line in engine.stderr().splitlines()) < 25_000
    bad = start(*SERVE, "--nothing")
    assert bad.wait_exit() == 2
    lines = bad.stderr().splitlines()
    assert len(lines) > 470 and lines[-1].endswith("error: unrecognized arguments: --nothing")


def test_access_lines_go_to_stdout_unless_the_http_log_level_is_warning(start):
    engine = start(*SERVE).wait_ready()
    assert '"GET /health HTTP/1.1" 200' in engine.stdout()
    quiet = start(*SERVE, "--log-level-http", "warning").wait_ready()
    assert quiet.stdout() == ""


def test_temp_files_and_a_shared_name_stay_after_a_clean_stop(start, engines_tmp):
    engine = start(*SERVE).wait_ready()
    maps = Path(f"/proc/{engine.member('sglang::schedul')}/maps").read_text()
    names = {line.split()[-1] for line in maps.splitlines() if "/dev/shm/sglang_loads_" in line}
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == 0
    assert names and all(os.path.exists(name) for name in names)
    assert len(list(engines_tmp.glob("tmp*"))) == 5


def test_server_info_tells_what_was_asked_for_and_what_there_is_room_for(start):
    engine = start(*SERVE, "--max-running-requests", "7").wait_ready()
    status, body = engine.ask("/server_info")
    info = json.loads(body)
    assert status == 200
    assert info["max_running_requests"] == 7
    assert [state["effective_max_running_requests_per_dp"] for state in info["internal_states"]] == [7]
    own_choice = json.loads(start(*SERVE).wait_ready().ask("/server_info")[1])
    assert own_choice["max_running_requests"] is None
    assert own_choice["internal_states"][0]["effective_max_running_requests_per_dp"] == 256
