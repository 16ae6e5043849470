"""llmgw with a real llama-server and a real small model, both from the demo extra."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomli_w
from running_llmgw import Llmgw, connect, send, session_members

from llmgw.cli.demo import Engine, real_engine
from llmgw.cli.errors import CommandError

pytestmark = [pytest.mark.real_llama, pytest.mark.slow]

QUESTION = {"model": "gemma", "prompt": "The capital of France is", "max_tokens": 8}
LONG = {"model": "gemma", "prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Engine:
    try:
        return real_engine(quiet=True)
    except CommandError as error:
        pytest.skip(f"{error.message} ({error.hint})")


@pytest.fixture
def llmgw(engine: Engine) -> Iterator[Callable[..., Llmgw]]:
    made: list[Llmgw] = []

    def make(**keys: object) -> Llmgw:
        made.append(Llmgw(shard(engine, **keys)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def shard(engine: Engine, **keys: object) -> str:
    table = {
        "name": "gemma",
        "model": "gemma",
        "engine": "llamacpp",
        "weights": engine.weights,
        "command": engine.command,
        "max_model_len": 4096,
        "probe_interval": "100ms",
        "drain_timeout": "0s",
        "stop_timeout": "2s",
        "extra_args": engine.extra_args,
        "env": engine.env,
        **keys,
    }
    return tomli_w.dumps({"shard": [table]})


def test_it_loads_answers_outlives_a_crash_of_llmgw_and_stops_in_the_middle_of_a_stream(
    llmgw: Callable[..., Llmgw],
) -> None:
    gateway = llmgw()
    gateway.start()
    ready = gateway.until_state("gemma", "ready")
    assert ready["load_seconds"] > 0
    assert ready["endpoint"].startswith("127.0.0.1:")
    assert gateway.states("gemma") == ["starting", "loading", "ready"]
    assert gateway.post(ready, "/v1/completions", QUESTION)["choices"][0]["text"]
    assert "ready" in gateway.run("status").stdout

    gateway.kill()
    assert session_members(ready["pid"]) == [ready["pid"]]
    gateway.start()
    adopted = gateway.until_state("gemma", "ready")
    assert (adopted["pid"], adopted["adopted"], adopted["generation"]) == (ready["pid"], True, ready["generation"])

    stream = gateway.stream(adopted, "/v1/completions", LONG)
    assert not stream.ended
    # It would wait for its client for ever: stop_timeout is what ends it.
    assert gateway.stop() == 0
    gateway.until(lambda: stream.ended, "the end of the stream")
    assert not stream.is_whole
    assert session_members(ready["pid"]) == []
    assert os.listdir(gateway.folder / "state" / "tmp") == []
    assert os.listdir(gateway.folder / "state" / "shards") == []


def test_behind_the_gateway_it_asks_for_its_own_key_and_tells_its_slots(engine: Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        listen = f"127.0.0.1:{door.getsockname()[1]}"
    gateway = Llmgw(f'[gateway]\nlisten = "{listen}"\n' + shard(engine))
    with contextlib.closing(gateway):
        gateway.start()
        ready = gateway.until_state("gemma", "ready")
        assert ready["slots"] >= 1
        assert ready["slots_from"] == "props"
        record = json.loads((gateway.folder / "state" / "shards" / "gemma.0.json").read_text())
        key = record["api_key"]
        assert key not in Path(f"/proc/{ready['pid']}/cmdline").read_text()
        with contextlib.closing(connect(ready["endpoint"], 30.0)) as without:
            assert send(without, "/v1/completions", QUESTION, None).status == 401
        answer = gateway.post(ready, "/v1/completions", QUESTION, {"Authorization": f"Bearer {key}"})
        assert answer["choices"][0]["text"]
        # Its counters are behind the key too, and a drain reads them.
        assert gateway.run("stop", "--wait", "gemma").returncode == 0
        assert key not in gateway.log()


def test_a_stop_waits_for_a_running_stream(llmgw: Callable[..., Llmgw]) -> None:
    gateway = llmgw(drain_timeout="60s")
    gateway.start()
    ready = gateway.until_state("gemma", "ready")
    stream = gateway.stream(ready, "/v1/completions", {**LONG, "max_tokens": 60})
    assert gateway.run("stop", "--wait", "gemma").returncode == 0
    gateway.until(lambda: stream.ended, "the end of the stream")
    assert stream.is_whole
    assert gateway.shard("gemma")["state"] == "stopped"
    assert session_members(ready["pid"]) == []


def test_a_killed_server_is_a_failure_and_comes_back(llmgw: Callable[..., Llmgw]) -> None:
    gateway = llmgw(restart_delay="100ms")
    gateway.start()
    first = gateway.until_state("gemma", "ready")
    os.kill(first["pid"], signal.SIGKILL)
    again = gateway.until_shard(
        "gemma", lambda seen: seen["state"] == "ready" and seen["pid"] != first["pid"], "the next launch"
    )
    assert again["generation"] == first["generation"] + 1
    assert "failed" in gateway.states("gemma")


def test_an_option_that_it_does_not_know_is_told_and_not_retried(llmgw: Callable[..., Llmgw]) -> None:
    gateway = llmgw(extra_args=["--no-such-option"])
    gateway.start()
    failed = gateway.until_state("gemma", "failed")
    assert "--no-such-option" in failed["reason"]["cause"]
    assert failed["reason"]["remedy"]
    assert failed["reason"]["retry"] is False
    assert failed["next_attempt"] is None


def test_weights_that_are_no_model_are_told(llmgw: Callable[..., Llmgw], tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(1000))
    gateway = llmgw(weights=str(broken))
    gateway.start()
    failed = gateway.until_state("gemma", "failed")
    assert "model" in failed["reason"]["cause"]
    assert failed["reason"]["evidence"]


def test_a_file_of_another_kind_is_refused_before_the_launch(llmgw: Callable[..., Llmgw]) -> None:
    gateway = llmgw(weights=os.__file__)
    gateway.start()
    refused = gateway.until_state("gemma", "failed")
    assert (refused["reason"]["code"], refused["generation"]) == ("gguf-broken", 0)


def test_a_file_that_vanished_is_told_before_the_launch(
    llmgw: Callable[..., Llmgw], engine: Engine, tmp_path: os.PathLike[str]
) -> None:
    weights = os.path.join(tmp_path, "model.gguf")
    os.symlink(engine.weights, weights)
    gateway = llmgw(weights=weights, autostart=False)
    gateway.start()
    os.unlink(weights)
    gateway.run("start", "--no-wait", "gemma")
    failed = gateway.until_state("gemma", "failed")
    assert weights in failed["reason"]["cause"]
    assert failed["generation"] == 0


def test_the_holder_of_its_port_is_named(llmgw: Callable[..., Llmgw]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        gateway = llmgw(port=port, allow=[])
        gateway.start()
        failed = gateway.until_state("gemma", "failed")
        assert str(port) in failed["reason"]["cause"]
        assert str(os.getpid()) in failed["reason"]["cause"]
