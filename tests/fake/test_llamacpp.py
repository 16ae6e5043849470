"""The fake llama-server: listens at once, freezes its streams at SIGTERM."""

import json
import signal
from pathlib import Path

LOADING = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'


def test_every_path_says_loading_until_the_model_is_loaded(start, until):
    engine = start("llamacpp", "-m", "/m/x.gguf", "--metrics", "--fake-load-seconds", "0.8")
    until(lambda: engine.status("/health"), "an answer")
    for path in ("/health", "/v1/models", "/metrics", "/props", "/slots"):
        assert engine.ask(path) == (503, LOADING)
    engine.wait_ready()
    assert engine.ask("/health") == (200, b'{"status":"ok"}')
    assert engine.stdout() == ""
    assert "model loaded" in engine.stderr()


def test_its_command_line_is_what_was_passed_and_it_has_no_children(start):
    engine = start("llamacpp", "-m", "/m/x.gguf", "--alias", "a").wait_ready()
    words = Path(f"/proc/{engine.pid}/cmdline").read_bytes().split(b"\0")
    assert words[-6:-3] == [b"/m/x.gguf", b"--alias", b"a"]
    assert list(engine.members()) == [engine.pid]


def test_sigterm_while_loading_ends_it_by_the_signal(start, until):
    engine = start("llamacpp", "-m", "/m/x.gguf", "--fake-never-ready")
    until(lambda: engine.status("/health") == 503, "loading")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == -15


def test_sigterm_when_idle_ends_it_with_0(start):
    engine = start("llamacpp", "-m", "/m/x.gguf").wait_ready()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == 0


def test_streams_freeze_at_sigterm_until_the_client_closes(start, until):
    engine = start("llamacpp", "-m", "/m/x.gguf").wait_ready()
    stream = engine.stream().read_until(b"word2")
    engine.process.send_signal(signal.SIGTERM)
    until(lambda: engine.status("/health") == 0, "refused")
    assert stream.is_silent_for(0.3)
    assert engine.process.poll() is None
    stream.close()
    assert engine.wait_exit() == 0


def test_a_second_sigterm_ends_it_with_1(start, until):
    engine = start("llamacpp", "-m", "/m/x.gguf").wait_ready()
    stream = engine.stream().read_until(b"word2")
    engine.process.send_signal(signal.SIGTERM)
    until(lambda: engine.status("/health") == 0, "refused")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == 1
    stream.close()


def test_a_second_one_on_the_same_port_fails_at_once(start):
    first = start("llamacpp", "-m", "/m/x.gguf").wait_ready()
    second = start("llamacpp", "-m", "/m/x.gguf", port=first.port)
    assert second.wait_exit() == 1
    assert "couldn't bind HTTP server socket" in second.stderr()
    assert first.status("/health") == 200


def test_an_unknown_option_ends_it_with_1(start):
    engine = start("llamacpp", "-m", "/m/x.gguf", "--no-such-thing")
    assert engine.wait_exit() == 1
    assert "error: invalid argument: --no-such-thing" in engine.stderr()


def test_a_key_from_a_file_guards_all_but_health(start, tmp_path: Path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    engine = start("llamacpp", "-m", "/m/x.gguf", "--metrics", "--api-key-file", str(key)).wait_ready()
    assert engine.status("/v1/models") == engine.status("/metrics") == engine.status("/slots") == 401
    assert engine.ask("/v1/models", headers={"authorization": "Bearer secret"})[0] == 200
    assert "Invalid API Key" in engine.stderr()


def test_counters_move_only_while_tokens_flow_and_fall_when_the_client_leaves(start, until):
    engine = start("llamacpp", "-m", "/m/x.gguf", "--metrics").wait_ready()
    assert "llamacpp:n_decode_total 0\n" in engine.ask("/metrics")[1].decode()
    stream = engine.stream().read_until(b"word3")
    assert "llamacpp:requests_processing 1\n" in engine.ask("/metrics")[1].decode()
    assert "llamacpp:n_decode_total 0\n" not in engine.ask("/metrics")[1].decode()
    stream.close()
    until(lambda: b"llamacpp:requests_processing 0\n" in engine.ask("/metrics")[1], "the request to be dropped")


def test_an_answer_has_as_many_tokens_as_were_asked_for(start):
    engine = start("llamacpp", "-m", "/m/x.gguf", "--fake-token-interval", "0.001").wait_ready()
    status, body = engine.ask("/v1/completions", {"prompt": "a b c", "max_tokens": 5})
    answer = json.loads(body)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert json.loads(engine.ask("/v1/completions", {"prompt": "a"})[1])["choices"][0]["finish_reason"] == "stop"
    whole = engine.stream(3).read_to_end()
    assert whole.count(b'"delta"') == 3
    assert whole.rstrip().endswith(b"data: [DONE]\n\n\r\n0")


def test_an_absurdly_long_prompt_is_refused(start):
    engine = start("llamacpp", "-m", "/m/x.gguf", "-c", "64").wait_ready()
    assert engine.ask("/v1/completions", {"prompt": "w " * 100})[0] == 400
