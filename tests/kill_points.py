"""Kills llmgw at random moments and looks whether the next one finds exactly one engine per shard and no orphan.

Shared by the test (20 points) and the proof (200 points, `benchmarks/kill_points.py`).
"""

from __future__ import annotations

import random
import time
from collections import Counter

import psutil
from attrs import frozen

from tests.node import Node, fake

SHARDS = ("one", "two", "three")


@frozen
class Point:
    """One kill: `after` seconds since llmgw was started (`busy`: or since it was asked for restarts)."""

    after: float
    busy: bool
    found: dict[str, int]
    """Launches alive per shard when the next llmgw said that all are ready."""
    strays: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        return self.found == dict.fromkeys(SHARDS, 1) and not self.strays


def write_config(node: Node) -> None:
    factor = "--fake-time-factor=0.01"
    node.write(
        '[defaults]\nrestart_delay = "100ms"\nrestart_delay_max = "200ms"\nrestart_limit = 0\nstop_timeout = "2s"\n'
        f'[[shard]]\nname = "one"\nmodel = "one"\nengine = "llamacpp"\ncommand = {fake("llamacpp", factor)}\n'
        f'[[shard]]\nname = "two"\nmodel = "two"\ngpus = 0\ncommand = {fake("vllm", "serve", factor)}\n'
        f'[[shard]]\nname = "three"\nmodel = "three"\nengine = "sglang"\ngpus = 0\n'
        f"command = {fake('sglang', 'serve', factor)}\n"
    )


def run_points(seed: int, count: int) -> list[Point]:
    """Kill `count` times, by a generator of this seed; a busy point comes while everything is being restarted."""
    chance = random.Random(seed)
    points = []
    with Node() as node:
        write_config(node)
        for number in range(count):
            # Most of a launch happens in the first second; later it only probes.
            after = chance.uniform(0.0, 1.6)
            busy = number % 2 == 1
            node.start(wait=busy)
            if busy:
                for name in SHARDS:
                    node.ask("POST", f"/v1/shards/{name}/restart")
                after = chance.uniform(0.0, 0.8)
            # The moment is the input here, not something that is waited for.
            time.sleep(after)
            node.kill()
            node.start()
            for name in SHARDS:
                node.wait_state(name, "ready", timeout=60)
            found, strays = _look(node)
            points.append(Point(after, busy, found, strays))
            node.kill()
        node.start()
        assert node.end() == 0
        left = node.engine_processes()
        if left:
            raise AssertionError(f"left after the stop: {left}")
    return points


def _look(node: Node) -> tuple[dict[str, int], tuple[str, ...]]:
    """Launches per shard by their mark, and gates that still wait."""
    launches: set[tuple[str, str]] = set()
    for process in node.engine_processes():
        try:
            environ = process.environ()
            launches.add((environ["LLMGW_SHARD_ID"].split("/")[0], environ["LLMGW_RUN_ID"]))
        except (psutil.Error, KeyError):
            continue
    strays = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "llmgw-gate" in words and any(str(node.folder) in word for word in words):
            strays.append(f"{process.pid} {' '.join(words)[:100]}")
    return dict(Counter(name for name, _ in launches)), tuple(strays)
