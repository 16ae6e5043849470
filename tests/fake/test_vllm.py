"""The fake vLLM: silent while loading, several processes, and every odd ending."""

import json
import os
import signal
import socket
from pathlib import Path

SERVE = ("vllm", "serve", "/m/x", "--served-model-name", "a", "b")
QUICK = (*SERVE, "--fake-load-seconds", "0.3")
"""For tests that are about what happens once it is ready."""


def listed(engine):
    return [model["id"] for model in json.loads(engine.ask("/v1/models")[1])["data"]]


def leave_group(engine):
    """Stop what a test has left alone, by the group that is still ours."""
    os.killpg(engine.pid, signal.SIGKILL)


def test_it_refuses_connections_during_the_load_and_then_answers_everything(start, until):
    engine = start(*SERVE)
    engine.member("VLLM::EngineCor")
    assert engine.status("/v1/models") == 0
    engine.wait_ready()
    assert listed(engine) == ["a", "b"]
    assert {engine.status(path) for path in ("/ping", "/metrics", "/load", "/version")} == {200}
    assert "Application startup complete" in engine.stderr()
    assert "Starting to load model" in engine.stdout()


def test_children_show_titles_and_have_lost_their_environment(start):
    engine = start(*QUICK, "--tensor-parallel-size", "2").wait_ready()
    names = sorted(engine.members().values())
    assert [name for name in names if name.startswith("VLLM")] == [
        "VLLM::EngineCor",
        "VLLM::Worker_TP",
        "VLLM::Worker_TP",
    ]
    core = engine.member("VLLM::EngineCor")
    assert Path(f"/proc/{core}/cmdline").read_bytes().rstrip(b"\0") == b"VLLM::EngineCore"
    assert Path(f"/proc/{core}/cmdline").read_bytes().endswith(b"\0\0\0")
    environment = Path(f"/proc/{core}/environ").read_bytes()
    assert environment.strip(b"\0") == b"" and len(environment) > 50
    tracker = next(pid for pid in engine.members() if b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes())
    assert b"MARKER=here" in Path(f"/proc/{tracker}/environ").read_bytes()


def test_spt_noenv_keeps_the_environment_and_a_prefix_changes_the_titles(start):
    engine = start(*SERVE, env={"SPT_NOENV": "1", "VLLM_PROCESS_NAME_PREFIX": "llmgw.a"})
    core = engine.member("llmgw.a::Engine")
    assert b"MARKER=here" in Path(f"/proc/{core}/environ").read_bytes()


def test_several_api_servers_and_data_parallel_make_nine_processes(start, until):
    engine = start(*QUICK, "--data-parallel-size", "2").wait_ready()
    names = until(lambda: len(engine.members()) == 9 and sorted(engine.members().values()), "nine processes")
    assert names.count("VLLM::APIServer") == 2
    assert names.count("VLLM::DPCoordin") == 1
    assert b"[DONE]" in engine.stream(2).read_to_end()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == 0


def test_a_core_killed_under_several_api_servers_makes_the_parent_exit_with_1(start):
    engine = start(*QUICK, "--api-server-count", "2").wait_ready()
    os.kill(engine.member("VLLM::EngineCor"), signal.SIGKILL)
    assert engine.wait_exit() == 1


def test_sigterm_before_the_core_exists_kills_it(start, until):
    engine = start(*SERVE, "--fake-load-seconds", "20")
    until(engine.stdout, "the first line")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == -15


def test_sigterm_while_loading_is_swallowed_once_the_core_exists(start):
    engine = start(*SERVE)
    engine.member("VLLM::EngineCor")
    engine.process.send_signal(signal.SIGTERM)
    engine.wait_ready()
    assert engine.process.poll() is None


def test_an_idle_stop_ends_with_0_and_leaves_no_shared_memory(start, until):
    engine = start(*QUICK).wait_ready()
    core = engine.member("VLLM::EngineCor")
    names = shared_names(core)
    assert names
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == 0
    assert not [name for name in names if os.path.exists(name)]
    assert "nanobind: leaked" in engine.stderr()
    assert "EngineDeadError" in engine.stdout()
    until(lambda: not engine.members(), "all processes to be gone")


def shared_names(pid):
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[-1] for line in maps if "/dev/shm/" in line}


def test_a_killed_group_leaves_its_shared_memory_and_temp_files(start, engines_tmp):
    engine = start(*QUICK).wait_ready()
    names = shared_names(engine.member("VLLM::EngineCor"))
    leave_group(engine)
    assert engine.wait_exit() == -9
    assert len(names) == 3
    assert all(os.path.exists(name) for name in names)
    assert list(engines_tmp.glob("vllm_dist_*"))


def test_a_killed_leader_leaves_core_and_workers_alive(start):
    engine = start(*QUICK).wait_ready()
    core, worker = engine.member("VLLM::EngineCor"), engine.member("VLLM::Worker")
    engine.process.kill()
    assert engine.wait_exit() == -9
    assert {core, worker} <= set(engine.members())
    assert engine.status("/health") == 0
    leave_group(engine)


def test_a_killed_worker_ends_streams_with_an_error_and_done_and_the_leader_with_0(start, until):
    engine = start(*SERVE, "--fake-time-factor", "0.1", "--fake-load-seconds", "1").wait_ready()
    stream = engine.stream().read_until(b"word2")
    os.kill(engine.member("VLLM::Worker"), signal.SIGKILL)
    until(lambda: engine.status("/health") == 503, "health 503")
    assert engine.status("/v1/models") == 200
    received = stream.read_to_end()
    assert b'{"error"' in received and b"[DONE]" in received
    assert engine.wait_exit() == 0


def test_a_killed_core_exits_with_0_too(start):
    engine = start(*QUICK).wait_ready()
    os.kill(engine.member("VLLM::EngineCor"), signal.SIGKILL)
    assert engine.wait_exit() == 0


def test_keep_alive_on_engine_death_leaves_a_dead_server_standing(start, until):
    engine = start(*QUICK, env={"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}).wait_ready()
    worker = engine.member("VLLM::Worker")
    os.kill(engine.member("VLLM::EngineCor"), signal.SIGKILL)
    until(lambda: engine.status("/health") == 503, "health 503")
    until(lambda: worker not in engine.members(), "the worker to leave by itself")
    assert engine.status("/v1/models") == 200
    assert engine.process.poll() is None


def test_a_stopped_worker_stalls_streams_and_counters_while_health_stays_200(start, until):
    engine = start(*QUICK).wait_ready()
    stream = engine.stream().read_until(b"word2")
    worker = engine.member("VLLM::Worker")
    os.kill(worker, signal.SIGSTOP)
    assert stream.is_silent_for(0.3)
    first = engine.ask("/metrics")[1].decode()
    assert 'vllm:num_requests_running{engine="0",model_name="a"} 1' in first
    assert engine.status("/health") == engine.status("/v1/models") == 200
    counter = next(line for line in first.splitlines() if line.startswith("vllm:generation_tokens_total"))
    assert counter in engine.ask("/metrics")[1].decode()
    os.kill(worker, signal.SIGCONT)
    until(lambda: counter not in engine.ask("/metrics")[1].decode(), "tokens again")
    stream.close()


def test_sigterm_with_streams_can_hang_until_the_clients_close(start, until):
    engine = start(*QUICK).wait_ready()
    stream = engine.stream().read_until(b"word2")
    core = engine.member("VLLM::EngineCor")
    engine.process.send_signal(signal.SIGTERM)
    until(lambda: engine.status("/health") == 0, "refused")
    for number in (signal.SIGTERM, signal.SIGINT):
        engine.process.send_signal(number)
    assert stream.is_silent_for(0.3)
    assert engine.process.poll() is None
    assert ") Z " in Path(f"/proc/{core}/stat").read_text()
    stream.close()
    assert engine.wait_exit() == 0


def test_sigterm_with_streams_can_cut_them_with_abort(start):
    engine = start(*QUICK, "--fake-streams-at-stop", "cut").wait_ready()
    stream = engine.stream().read_until(b"word2")
    engine.process.send_signal(signal.SIGTERM)
    received = stream.read_to_end()
    assert b'"finish_reason": "abort"' in received and b"[DONE]" in received
    assert engine.wait_exit() == 0


def test_a_shutdown_timeout_drains_while_health_stays_200_and_new_work_gets_500(start):
    engine = start(*QUICK, "--shutdown-timeout", "3600").wait_ready()
    stream = engine.stream(60).read_until(b"word2")
    engine.process.send_signal(signal.SIGTERM)
    stream.read_until(b"word6")
    assert engine.status("/health") == engine.status("/v1/models") == 200
    status, body = engine.ask("/v1/completions", {"prompt": "x"})
    assert status == 500 and b"cannot schedule new futures after shutdown" in body
    assert stream.read_to_end().count(b'"delta"') == 60
    assert engine.wait_exit() == 0


def test_sigterm_to_the_group_destroys_the_drain(start):
    engine = start(*QUICK, "--shutdown-timeout", "3600").wait_ready()
    stream = engine.stream().read_until(b"word2")
    os.killpg(engine.pid, signal.SIGTERM)
    received = stream.read_to_end()
    assert b'{"error"' in received and b"[DONE]" in received
    assert engine.wait_exit() == 0


def test_two_that_load_at_once_on_one_port_both_report_success_but_one_listens(start, until):
    first = start(*SERVE)
    second = start(*SERVE, port=first.port)
    for engine in (first, second):
        until(lambda engine=engine: "Application startup complete" in engine.stderr(), "both to be complete")
    assert first.status("/health") == 200
    assert first.process.poll() is None and second.process.poll() is None


def test_a_second_start_against_a_listener_fails_early(start):
    first = start(*SERVE).wait_ready()
    second = start(*SERVE, port=first.port)
    assert second.wait_exit() == 1
    assert "[Errno 98] Address already in use" in second.stderr()


def test_a_unix_socket_file_comes_early_is_left_behind_and_blocks_the_next_start(start, until, tmp_path):
    path = str(tmp_path / "s")
    engine = start(*SERVE, "--uds", path)
    until(lambda: os.path.exists(path), "the socket file")

    def connects():
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(path) == 0

    assert not connects()
    until(connects, "an open socket")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == 0
    assert os.path.exists(path)
    assert start(*SERVE, "--uds", path).wait_exit() == 1


def test_the_key_guards_only_some_paths(start):
    engine = start(*QUICK, env={"VLLM_API_KEY": "secret"}).wait_ready()
    assert engine.status("/v1/models") == 401
    assert engine.status("/health") == engine.status("/metrics") == 200
    assert engine.ask("/v1/models", headers={"authorization": "Bearer secret"})[0] == 200


def test_each_probe_writes_an_access_line_unless_its_path_is_named(start):
    engine = start(*QUICK, "--disable-access-log-for-endpoints", "/health,/metrics").wait_ready()
    engine.ask("/ping")
    engine.ask("/metrics")
    assert '"GET /ping HTTP/1.1" 200' in engine.stdout()
    assert "/metrics" not in engine.stdout() and '"GET /health' not in engine.stdout()


def test_unknown_model_is_404_and_an_unknown_option_exits_with_2(start):
    engine = start(*QUICK).wait_ready()
    assert engine.ask("/v1/completions", {"model": "nope", "prompt": "x"})[0] == 404
    bad = start(*SERVE, "--model", "y")
    assert bad.wait_exit() == 2
    assert "unrecognized arguments: --model y" in bad.stderr()


def test_its_log_has_a_banner_progress_by_carriage_return_bad_bytes_and_a_false_error(start, tmp_path):
    engine = start(*QUICK).wait_ready()
    out, err = (tmp_path / "log0.out").read_bytes(), (tmp_path / "log0.err").read_bytes()
    assert "█".encode() in out and b"\r\n" in out
    assert b"OSError: [Errno 24]" in out
    assert b"25% Completed | 1/4" in err.split(b"\n")[0] and err.count(b"\r") >= 4
    assert b"\xff\xfe" in out
    assert max(len(line) for line in out.splitlines()) > 3000
    assert engine.process.poll() is None


def test_a_follower_has_no_port_and_ends_some_time_after_sigterm(start):
    engine = start(*SERVE, "--nnodes", "2", "--node-rank", "1", "--headless", "--tensor-parallel-size", "2")
    worker = engine.member("VLLM::Worker")
    assert Path(f"/proc/{worker}/cmdline").read_bytes().startswith((b"VLLM::Worker", b"VLLM::Worker_TP1"))
    assert engine.status("/health") == 0
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == 0


def test_its_own_limit_for_loading_ends_a_slow_start(start):
    engine = start(*SERVE, "--fake-never-ready", env={"VLLM_ENGINE_READY_TIMEOUT_S": "1.5"})
    assert engine.wait_exit() == 1
    assert "Timed out waiting for engine core processes to start" in engine.stderr()


SLEEPER = (*QUICK, "--enable-sleep-mode", "--fake-time-factor", "0.01")
DEV = {"VLLM_SERVER_DEV_MODE": "1"}


def asleep(engine):
    return json.loads(engine.ask("/is_sleeping")[1])["is_sleeping"]


def complete(engine):
    return engine.ask("/v1/completions", {"model": "a", "prompt": "hello", "max_tokens": 1})[0]


def test_it_sleeps_and_wakes_and_answers_nothing_in_between(start):
    engine = start(*SLEEPER, env=DEV).wait_ready()
    assert not asleep(engine)
    assert engine.ask("/sleep?level=1", {})[0] == 200
    assert asleep(engine) and complete(engine) == 503 and engine.status("/health") == 200
    assert engine.ask("/wake_up", {})[0] == 200
    assert not asleep(engine) and complete(engine) == 200


def test_after_a_deep_sleep_it_answers_only_when_its_weights_were_read_again(start):
    engine = start(*SLEEPER, env=DEV).wait_ready()
    assert engine.ask("/sleep?level=2", {})[0] == 200
    assert engine.ask("/collective_rpc", {"method": "reload_weights"})[0] == 500
    assert engine.ask("/wake_up?tags=weights", {})[0] == 200
    assert asleep(engine)
    assert engine.ask("/wake_up?tags=kv_cache", {})[0] == 200
    assert complete(engine) == 503
    assert engine.ask("/collective_rpc", {"method": "reload_weights"})[0] == 200
    assert complete(engine) == 200


def test_its_control_pages_are_there_in_development_mode_alone_and_ask_for_no_key(start):
    closed = start(*SLEEPER).wait_ready()
    assert closed.ask("/sleep?level=1", {})[0] == 404
    open_ = start(*SLEEPER, "--api-key", "secret", env=DEV).wait_ready()
    assert open_.ask("/sleep?level=1", {})[0] == 200
    without_mode = start(*QUICK, env=DEV).wait_ready()
    assert without_mode.ask("/sleep?level=1", {})[0] == 500
