"""Models that are loaded by requests, in a whole llmgw: fake engines on pretended GPUs, asked through the gateway."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from tests.fake_gpus import FakeGpus
from tests.node import Node, fake, free_port

pytestmark = pytest.mark.slow

QUICK = (
    '[node]\ninventory_interval = "1s"\n'
    '[defaults]\nrestart_delay = "200ms"\nrestart_delay_max = "300ms"\nprobe_interval = "100ms"\n'
)


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


class Gateway:
    """Writes the file with a gateway in front, and asks it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.port = free_port()

    def write(self, shards: str, more: str = "") -> None:
        self.node.write(f'{QUICK}[gateway]\nlisten = "127.0.0.1:{self.port}"\n{more}\n{shards}')

    def ask(self, model: str, *, tokens: int = 2, timeout: float = 60.0) -> tuple[int, dict[str, Any], dict[str, str]]:
        body = {"model": model, "prompt": "hello", "max_tokens": tokens, "ignore_eos": True}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as connection:
            head = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), head)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), {key.lower(): value for key, value in answer.getheaders()}

    def touch(self, path: str) -> int:
        """The status of an empty POST."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20.0)) as connection:
            connection.request("POST", path, b"{}")
            return connection.getresponse().status


class Asking(threading.Thread):
    """One request that goes on beside the test."""

    def __init__(self, gateway: Gateway, model: str, tokens: int = 2, *, errors: bool = False) -> None:
        """`errors`: the connection may break."""
        super().__init__()
        self.answer: tuple[int, dict[str, Any], dict[str, str]] | None = None
        self._ask = lambda: gateway.ask(model, tokens=tokens)
        self._expected = (OSError, http.client.HTTPException) if errors else ()
        self.start()

    def run(self) -> None:
        with suppress(*self._expected):
            self.answer = self._ask()

    def status(self) -> int:
        self.join(60.0)
        assert self.answer is not None
        return self.answer[0]


def shard(name: str, *, gpus: str = "[0]", idle: str = "1h", knobs: str = "", more: str = "") -> str:
    command = fake("vllm", "serve", *knobs.split())
    return (
        f'[[shard]]\nname = "{name}"\nmodel = "{name}"\ngpus = {gpus}\ncommand = {command}\n'
        f'autostart = false\nidle_timeout = "{idle}"\n{more}\n'
    )


def test_a_request_loads_its_model_and_another_model_takes_its_turn_on_the_same_card(node: Node) -> None:
    gpus = FakeGpus(node, gpus=1)
    gateway = Gateway(node)
    gateway.write(shard("a", knobs="--fake-gpu-release 1") + shard("b"))
    node.start()
    assert {node.state_of(name) for name in ("a", "b")} == {"pending"}
    assert node.cli("status").returncode == 0
    status, answer, _ = gateway.ask("a")
    assert (status, answer["model"]) == (200, "a")
    assert node.state_of("a") == "ready"
    status, answer, _ = gateway.ask("b")
    assert (status, answer["model"]) == (200, "b")
    shard_a = node.shard("a")
    assert (shard_a["state"], shard_a["loadable"], shard_a["intent"]["operator"]) == ("stopped", True, False)
    # The release of the memory was waited for: the end of one and the start of the other never overlap.
    assert shard_a["unload_seconds"] >= 1.0
    assert gpus.used(0) <= 81559
    states = [(event["shard"], event["after"]) for event in node.events() if event.get("after")]
    assert states.index(("a", "stopped")) < states.index(("b", "starting"))
    assert "failed" not in [state for _, state in states]
    told = [event["text"] for event in node.events() if event["kind"] == "wish"]
    assert any(text.startswith("stop by gateway, for b") for text in told)


def test_models_that_leave_the_choice_of_cards_to_llmgw_take_turns_where_there_are_too_few(node: Node) -> None:
    FakeGpus(node, gpus=2)
    gateway = Gateway(node)
    gateway.write("".join(shard(name, gpus=count) for name, count in (("a", "1"), ("b", "1"), ("wide", "2"))))
    node.start()
    assert [gateway.ask(name)[0] for name in ("a", "b")] == [200, 200]
    assert {node.state_of(name) for name in ("a", "b")} == {"ready"}
    assert gateway.ask("wide")[0] == 200
    assert [node.state_of(name) for name in ("a", "b", "wide")] == ["stopped", "stopped", "ready"]


def test_a_swap_that_llmgw_did_not_survive_leaves_one_engine_on_the_card(node: Node) -> None:
    gpus = FakeGpus(node, gpus=1)
    gateway = Gateway(node)
    gateway.write(shard("a", knobs="--fake-gpu-release 1") + shard("b"))
    node.start()
    assert gateway.ask("a")[0] == 200
    lost = Asking(gateway, "b", errors=True)
    node.until(lambda: node.shard("a")["intent"]["wish"] == "stop", "the swap has begun")
    node.kill()
    lost.join(60.0)
    node.start()
    assert gateway.ask("b")[0] == 200
    assert node.state_of("a") in ("stopped", "pending")
    assert gpus.used(0) <= 81559
    assert "failed" not in [event.get("after") for event in node.events()]


def test_an_idle_model_is_unloaded_and_comes_back_with_the_next_request(node: Node) -> None:
    FakeGpus(node, gpus=1)
    gateway = Gateway(node)
    gateway.write(shard("a", idle="10s"))
    node.start()
    assert gateway.ask("a")[0] == 200
    gateway.write(shard("a", idle="10s", more='restart_stable = "1m"'))
    assert node.cli("reload").returncode == 0
    node.wait_state("a", "stopped")
    assert "idle for 10 s" in node.shard("a")["detail"]
    assert gateway.ask("a")[0] == 200
    assert node.shard("a")["generation"] == 2


def test_a_stop_keeps_requests_from_loading_and_an_unload_does_not_also_over_a_restart(node: Node) -> None:
    FakeGpus(node, gpus=1)
    gateway = Gateway(node)
    gateway.write(shard("a").replace("autostart = false", "autostart = true"))
    node.start()
    node.wait_state("a", "ready")
    assert node.cli("unload", "a", "--wait").returncode == 0
    node.kill()
    node.start()
    node.wait_state("a", "stopped", "pending")
    assert node.shard("a")["loadable"]
    assert gateway.ask("a")[0] == 200
    assert node.cli("stop", "a", "--wait").returncode == 0
    status, answer, head = gateway.ask("a")
    assert status == 503 and head["x-should-retry"] == "false"
    assert "a is stopped" in answer["error"]["message"]
    node.kill()
    node.start()
    node.wait_state("a", "stopped")
    assert gateway.ask("a")[0] == 503
    assert node.cli("load", "a", "--wait").returncode == 0
    assert gateway.ask("a")[0] == 200


def test_what_was_unloaded_comes_back_when_the_file_makes_it_a_shard_that_stays(node: Node) -> None:
    FakeGpus(node, gpus=1)
    gateway = Gateway(node)
    gateway.write(shard("a").replace("autostart = false", "autostart = true"))
    node.start()
    node.wait_state("a", "ready")
    assert node.cli("unload", "a", "--wait").returncode == 0
    gateway.write(shard("a").replace("autostart = false", "").replace('idle_timeout = "1h"', ""))
    assert node.cli("reload").returncode == 0
    node.wait_state("a", "ready")
    assert not node.shard("a")["loadable"]


def test_a_model_that_would_take_longer_than_anybody_may_wait_is_refused_at_once(node: Node) -> None:
    FakeGpus(node, gpus=1)
    gateway = Gateway(node)
    gateway.write(shard("a"), 'load_wait = "5m"')
    node.state.mkdir()
    (node.state / "load-times.json").write_text(json.dumps({"a/0": [900.0, time.time()]}))
    node.start()
    status, answer, head = gateway.ask("a", timeout=5.0)
    assert (status, head["retry-after"]) == (503, "900")
    assert "it loads for another 900 s" in answer["error"]["message"]
    assert node.state_of("a") == "pending"


def test_a_load_that_fails_answers_those_who_wait_with_its_cause(node: Node) -> None:
    FakeGpus(node, gpus=1)
    gateway = Gateway(node)
    gateway.write(shard("a", knobs="--fake-fail d1"))
    node.start()
    status, answer, _ = gateway.ask("a")
    assert status == 503
    assert "a is failed: " in answer["error"]["message"]
    assert "memory" in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_who_comes_while_an_engine_is_started_again_after_a_crash_waits_for_it(node: Node) -> None:
    FakeGpus(node, gpus=1)
    gateway = Gateway(node)
    gateway.write(shard("a", more='restart_delay = "2s"\nrestart_delay_max = "2s"'))
    node.start()
    assert gateway.ask("a")[0] == 200
    os.kill(node.shard("a")["pid"], signal.SIGKILL)
    node.wait_state("a", "failed")
    assert gateway.ask("a")[0] == 200
    assert node.shard("a")["generation"] == 2


def test_models_that_are_asked_for_at_once_are_all_answered_one_after_another(node: Node) -> None:
    gpus = FakeGpus(node, gpus=2)
    gateway = Gateway(node)
    gateway.write(shard("a") + shard("b") + shard("both", gpus="[0, 1]") + shard("side", gpus="[1]"))
    node.start()
    asking = [Asking(gateway, name) for name in ("a", "b", "both", "side") for _ in range(3)]
    assert [one.status() for one in asking] == [200] * 12
    assert {one.answer[1]["model"] for one in asking if one.answer is not None} == {"a", "b", "both", "side"}
    assert max(gpus.used(0), gpus.used(1)) <= 81559
    states = [event["after"] for event in node.events() if event["kind"] == "state"]
    assert "failed" not in states
    assert states.count("ready") == 4


def test_a_busy_model_finishes_its_requests_before_another_takes_its_card(node: Node) -> None:
    FakeGpus(node, gpus=1)
    gateway = Gateway(node)
    gateway.write(shard("a", knobs="--fake-token-interval 0.1") + shard("b"))
    node.start()
    assert gateway.ask("a")[0] == 200
    long = Asking(gateway, "a", tokens=60)
    other = Asking(gateway, "b")
    assert other.status() == 200
    assert long.status() == 200
    assert long.answer is not None and long.answer[1]["usage"]["completion_tokens"] == 60
    assert [event["after"] for event in node.events() if event["shard"] == "b" and event.get("after")][-1] == "ready"


def test_an_idle_vllm_sleeps_and_a_request_wakes_it(node: Node) -> None:
    FakeGpus(node, gpus=1)
    gateway = Gateway(node)
    gateway.write(shard("a", idle="10s", more='idle_action = "sleep"'))
    node.start()
    assert gateway.ask("a")[0] == 200
    pid = node.shard("a")["pid"]
    node.until(lambda: "sleeping" in node.conditions("a"), "it sleeps")
    for path in ("/sleep?level=1", "/wake_up", "/is_sleeping", "/collective_rpc", "/upstream/a/sleep", "/v1/../sleep"):
        assert gateway.touch(path) in (400, 404, 405), path
    assert gateway.ask("a")[0] == 200
    shard_a = node.shard("a")
    assert (shard_a["pid"], shard_a["generation"]) == (pid, 1)
    assert shard_a["wake_seconds"] is not None and "sleeping" not in node.conditions("a")
