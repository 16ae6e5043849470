"""`llmgw plan` while llmgw is gone and its engines still run: what the next start does with them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_gpus import FakeGpus
from tests.node import Node, fake

QUICK = '[defaults]\nprobe_interval = "200ms"\n'


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def vllm(name: str, more: str = "") -> str:
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\ngpus = 1\ncommand = {fake("vllm", "serve")}\n{more}\n'


def plan(node: Node, *words: str) -> subprocess.CompletedProcess[str]:
    """Without a socket that is named: then a dead llmgw would be the answer."""
    return subprocess.run(
        [sys.executable, "-m", "llmgw", "-c", str(node.config), "plan", *words],
        capture_output=True,
        text=True,
        env={**node.env, "XDG_RUNTIME_DIR": str(node.folder)},
        timeout=60,
        check=False,
    )


def told(node: Node) -> tuple[dict[str, str], dict[str, list[str]], dict[str, str]]:
    answer: dict[str, Any] = json.loads(plan(node, "--json").stdout)
    return (
        {action["name"]: action["action"] for action in answer["actions"]},
        {card["name"]: card["slots"][0]["gpus"] for card in answer["gpus"]},
        {card["name"]: card["why"] for card in answer["gpus"]},
    )


def test_engines_that_were_left_are_taken_over_on_their_cards_and_others_get_the_rest(node: Node) -> None:
    FakeGpus(node, gpus=3)
    node.write(QUICK + vllm("a") + vllm("b"))
    node.start()
    had = {name: node.wait_state(name, "ready")["gpus"] for name in ("a", "b")}
    node.kill()

    assert told(node)[:2] == ({"a": "take_over", "b": "take_over"}, had)
    unchanged = plan(node, "--exit-code")
    assert unchanged.returncode == 0 and "a start finds 2 engines" in unchanged.stdout

    node.write(QUICK + vllm("b", "max_model_len = 4096") + vllm("c"))
    actions, cards, why = told(node)
    assert actions == {"a": "stop", "b": "replace", "c": "start"}
    assert cards["b"] == had["b"] and cards["c"] != had["b"]
    assert why["b"] == "it had these before"

    node.write(QUICK + vllm("b") + vllm("c"))
    (free,) = told(node)[1]["c"]
    shown = plan(node, "c")
    assert f"CUDA_VISIBLE_DEVICES={free}" in shown.stdout, shown.stdout
