"""`llmgw inventory` beside a whole llmgw whose engines hold pretended GPU memory: with it, and after its death."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_gpus import STRANGER, FakeGpus
from tests.node import Node, fake, is_alive

QUICK = '[node]\nname = "gpu-01"\ngpus = [0, 1, 2]\ninventory_interval = "1s"\n[defaults]\nprobe_interval = "200ms"\n'


def vllm(name: str, gpus: str = "1", *knobs: str) -> str:
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\ngpus = {gpus}\ncommand = {fake("vllm", "serve", *knobs)}\n'


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def told(node: Node) -> dict[str, Any]:
    done = node.cli("inventory", "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def holders_of(answer: dict[str, Any]) -> dict[int, set[str | None]]:
    return {gpu["index"]: {holder["shard"] for holder in gpu["holders"]} for gpu in answer["gpu"]["gpus"]}


def test_engines_are_named_by_their_shard_with_llmgw_and_after_its_death(node: Node) -> None:
    gpus = FakeGpus(node, gpus=4)
    gpus.hold(2, 9000, STRANGER)
    gpus.hold(1, 500, os.getpid())
    node.write(QUICK + vllm("llama", "[0]") + vllm("qwen", "[1]"))
    node.start()
    engines = [node.wait_state(name, "ready")["pid"] for name in ("llama", "qwen")]

    before = told(node)
    assert (before["source"], before["node"]) == ("daemon", "gpu-01")
    assert holders_of(before) == {0: {"llama"}, 1: {"qwen", None}, 2: {None}, 3: set()}
    node.kill()
    assert all(is_alive(pid) for pid in engines)
    after = told(node)
    assert (after["source"], after["node"]) == ("local", "gpu-01")
    assert holders_of(after) == holders_of(before)

    for answer in (before, after):
        first, second, third, fourth = answer["gpu"]["gpus"]
        # An engine of ours is no reason against a card; what it uses is not free.
        assert first["assignable"] and first["memory_free_mib"] < first["memory_total_mib"] / 2
        assert second["assignable"]
        small = next(holder for holder in second["holders"] if holder["shard"] is None)
        assert (small["pid"], small["memory_mib"], small["ours"]) == (os.getpid(), 500, False)
        assert small["command"] and small["user"]
        assert third["why_not"] == f"held by pid {STRANGER} (not visible)" and third["assignable"] is False
        assert fourth["why_not"] == "not in [node] gpus"
    shown = node.cli("inventory").stdout
    assert "llama" in shown and f"pid {STRANGER} 8.8 GiB, not ours" in shown


def test_an_engine_that_has_just_begun_to_load_is_shown_on_its_card(node: Node) -> None:
    FakeGpus(node, gpus=1)
    node.write(QUICK + vllm("llama", "1", "--fake-never-ready"))
    node.start()
    node.wait_state("llama", "starting", "loading")
    node.until(lambda: holders_of(told(node)) == {0: {"llama"}}, "the card is shown as the shard's")


def test_a_quarantine_is_known_without_llmgw_too(node: Node) -> None:
    FakeGpus(node, gpus=1)
    more = 'gpu_release_timeout = "1s"\nstop_timeout = "1s"\n'
    node.write(QUICK + vllm("llama", "1", "--fake-gpu-release", "never") + more)
    node.start()
    node.wait_state("llama", "ready")
    node.cli("stop", "llama", "--wait")
    node.until(lambda: told(node)["gpu"]["gpus"][0]["hindrance"] == "quarantined", "the card is in quarantine")
    node.until(lambda: (node.state / "quarantine.json").exists(), "it is on disk")
    node.kill()
    (card,) = told(node)["gpu"]["gpus"]
    assert card["hindrance"] == "quarantined"
    assert card["why_not"].startswith("not released after llama ended: ")


def test_what_cannot_be_read_of_the_records_makes_nobody_a_stranger(node: Node) -> None:
    gpus = FakeGpus(node, gpus=1)
    node.write(QUICK + vllm("llama"))
    node.start()
    node.wait_state("llama", "ready")
    node.kill()
    for record in (node.state / "shards").glob("*.json"):
        record.write_text("{")
    done = node.cli("inventory", "--json")
    (card,) = json.loads(done.stdout)["gpu"]["gpus"]
    assert gpus.used(0) > 1024 and {holder["ours"] for holder in card["holders"]} == {None}
    assert card["assignable"] is False
    assert "not all process records" in done.stderr


def test_a_saved_inventory_of_a_busy_node_calls_its_own_engines_no_strangers(node: Node) -> None:
    gpus = FakeGpus(node, gpus=2)
    gpus.hold(1, 9000, STRANGER)
    node.write(QUICK + vllm("llama", "[0]"))
    node.start()
    node.wait_state("llama", "ready")
    saved = node.folder / "saved.json"
    saved.write_text(json.dumps(told(node)))
    ours = json.loads(node.cli("check", "--json", "--inventory", str(saved)).stdout)
    assert "gpu-held" not in {problem["code"] for problem in ours["errors"]}
    node.write(QUICK + vllm("llama", "[1]"))
    others = json.loads(node.cli("check", "--json", "--inventory", str(saved)).stdout)
    assert "gpu-held" in {problem["code"] for problem in others["errors"]}
