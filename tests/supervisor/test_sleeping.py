"""Sleep mode in a whole llmgw with fake vLLMs: real processes, sockets and signals."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.node import Node, fake


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def sleeper(name: str, *, level: int = 1, knobs: str = "", more: str = "") -> str:
    command = fake("vllm", "serve", *knobs.split())
    return (
        f'[[shard]]\nname = "{name}"\nmodel = "{name}"\ngpus = 0\ncommand = {command}\n'
        f'idle_action = "sleep"\nsleep_level = {level}\nprobe_interval = "200ms"\n{more}\n'
    )


def ask(node: Node, name: str, method: str, path: str, body: object = None) -> tuple[int, str]:
    host, _, port = node.shard(name)["endpoint"].rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=20)) as connection:
        connection.request(method, path, json.dumps(body) if body is not None else None)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def complete(node: Node, name: str) -> int:
    return ask(node, name, "POST", "/v1/completions", {"model": name, "prompt": "hello", "max_tokens": 2})[0]


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_answers_again_after_it_was_woken(node: Node, level: int) -> None:
    node.write(sleeper("a", level=level))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    done = node.cli("sleep", "a", "--wait")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "a: asleep")
    shard = node.shard("a")
    assert (shard["state"], shard["routable"], shard["loadable"]) == ("ready", False, True)
    assert json.loads(ask(node, "a", "GET", "/is_sleeping")[1]) == {"is_sleeping": True}
    assert complete(node, "a") == 503
    done = node.cli("wake", "a", "--wait")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("a: awake after ")
    assert complete(node, "a") == 200
    shard = node.shard("a")
    assert shard["routable"] and shard["wake_seconds"] is not None and shard["pid"] == pid


def test_requests_end_before_an_engine_falls_asleep(node: Node) -> None:
    node.write(sleeper("a", knobs="--fake-token-interval 0.05"))
    node.start()
    node.wait_state("a", "ready")
    host, _, port = node.shard("a")["endpoint"].rpartition(":")
    body = {"model": "a", "prompt": "hello", "max_tokens": 30, "ignore_eos": True, "stream": True}
    with closing(http.client.HTTPConnection(host, int(port), timeout=20)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        text = answer.read1()
        assert node.cli("sleep", "a", "--no-wait").returncode == 0
        text += answer.read()
    assert b"word30 " in text
    assert text.rstrip().endswith(b"data: [DONE]")
    node.until(lambda: "sleeping" in node.conditions("a"), "it sleeps")


def test_a_sleeping_engine_that_is_taken_over_sleeps_on_until_it_is_woken(node: Node) -> None:
    node.write(sleeper("a", more="warmup = true"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    assert node.cli("sleep", "a", "--wait").returncode == 0
    node.kill()
    node.start()
    shard = node.wait_state("a", "ready")
    assert shard["pid"] == pid and "sleeping" in node.conditions("a")
    assert json.loads(ask(node, "a", "GET", "/is_sleeping")[1]) == {"is_sleeping": True}
    assert node.cli("wake", "a", "--wait").returncode == 0
    assert complete(node, "a") == 200


def test_an_engine_wakes_from_the_sleep_it_was_put_to_whatever_the_file_says_by_now(node: Node) -> None:
    node.write(sleeper("a", level=2))
    node.start()
    node.wait_state("a", "ready")
    assert node.cli("sleep", "a", "--wait").returncode == 0
    node.write(sleeper("a", level=1))
    assert node.cli("reload").returncode == 0
    assert node.cli("wake", "a", "--wait").returncode == 0
    assert complete(node, "a") == 200
    assert node.shard("a")["generation"] == 1


@pytest.mark.parametrize("level", [1, 2])
def test_one_that_was_taken_over_asleep_has_its_weights_when_it_is_woken(node: Node, level: int) -> None:
    node.write(sleeper("a", level=level))
    node.start()
    node.wait_state("a", "ready")
    assert node.cli("sleep", "a", "--wait").returncode == 0
    node.kill()
    node.write(sleeper("a", level=1))
    node.start()
    node.until(lambda: "sleeping" in node.conditions("a"), "it is taken over asleep")
    assert node.cli("wake", "a", "--wait").returncode == 0
    assert complete(node, "a") == 200


def test_an_engine_that_dies_in_its_sleep_is_not_loaded_again_for_nobody(node: Node) -> None:
    node.write('[defaults]\nrestart_delay = "100ms"\n' + sleeper("a"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    assert node.cli("sleep", "a", "--wait").returncode == 0
    os.kill(pid, signal.SIGKILL)
    shard = node.wait_state("a", "stopped")
    assert shard["detail"].startswith("it ended while it slept: ")
    assert shard["generation"] == 1


def test_a_sleeping_engine_stops_and_a_stop_leaves_nothing(node: Node) -> None:
    node.write(sleeper("a"))
    node.start()
    node.wait_state("a", "ready")
    assert node.cli("sleep", "a", "--wait").returncode == 0
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert "sleeping" not in node.conditions("a")
    assert node.end() == 0
    assert node.engine_processes() == []


def test_an_engine_without_sleep_mode_has_no_control_pages(node: Node) -> None:
    command = fake("vllm", "serve")
    node.write(f'[[shard]]\nname = "a"\nmodel = "a"\ngpus = 0\ncommand = {command}\n')
    node.start()
    node.wait_state("a", "ready")
    assert ask(node, "a", "POST", "/sleep?level=1")[0] == 404
    refused = node.cli("sleep", "a")
    assert refused.returncode == 1 and "it has no sleep mode" in refused.stderr


def test_an_engine_that_cannot_be_put_to_sleep_is_unloaded_and_says_why(node: Node) -> None:
    node.write(sleeper("a", more='env = { VLLM_SERVER_DEV_MODE = "0" }'))
    node.start()
    node.wait_state("a", "ready")
    assert node.cli("sleep", "a", "--no-wait").returncode == 0
    shard = node.wait_state("a", "stopped")
    assert shard["detail"].endswith("it could not be put to sleep: /sleep?level=1 answers 404")
    assert node.cli("start", "a", "--wait").returncode == 0


def test_an_engine_that_cannot_be_woken_is_loaded_anew(node: Node) -> None:
    node.write('[defaults]\nrestart_delay = "100ms"\n' + sleeper("a", knobs="--fake-wake-fails"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    assert node.cli("sleep", "a", "--wait").returncode == 0
    assert node.cli("wake", "a", "--no-wait").returncode == 0
    node.until(lambda: node.shard("a")["generation"] == 2 and node.state_of("a") == "ready", "it is loaded anew")
    assert node.shard("a")["pid"] != pid and "sleeping" not in node.conditions("a")
    told = [event["text"] for event in node.events()]
    assert any("it could not be woken: /wake_up answers 500" in text for text in told)
    assert complete(node, "a") == 200
