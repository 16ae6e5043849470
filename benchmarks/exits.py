"""From an engine's death to the state that says so: `python -m benchmarks.exits [SHARDS] [KILLS]`.

The clock starts before the kill and ends with the time that the board stamps on the transition; supervisord's ends with
the line in its log, which it writes in the same step as it changes the state.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from datetime import datetime

from benchmarks.fleet import llmgw, supervisord
from benchmarks.measure import machine, summary, wait_for


def main() -> None:
    shards = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    kills = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    chance = random.Random(1)
    print(f"{machine()}; {shards} shards, {kills} kills")
    latencies = []
    with llmgw(shards) as node:
        for _ in range(kills):
            shard = chance.choice(node.status()["shards"])
            if shard["state"] != "ready":
                time.sleep(0.2)
                continue
            killed = time.time()
            os.kill(shard["pid"], signal.SIGKILL)
            wait_for(
                lambda s=shard: node.shard(s["name"])["generation"] > s["generation"],  # type: ignore[misc]
                "it is started anew",
                10,
            )
            seen = [
                event["time"]
                for event in node.events()
                if event["shard"] == shard["name"] and event["before"] == "ready" and event["time"] >= killed
            ]
            latencies.append(1000 * (seen[0] - killed))
    print(f"llmgw          {summary(latencies)}")
    latencies = []
    with supervisord(shards) as (process, config):
        log = config.parent / "log"
        for _ in range(kills):
            victim = chance.choice([child for child in process.children() if child.status() != "zombie"])
            size = log.stat().st_size
            killed = time.time()
            victim.kill()
            found: list[re.Match[str]] = []

            def logged(size: int = size, found: list[re.Match[str]] = found) -> bool:
                with log.open() as file:
                    file.seek(size)
                    match = re.search(r"^(\S+ \S+?),(\d+) \w+ exited: .*SIGKILL", file.read(), re.M)
                if match:
                    found.append(match)
                return match is not None

            wait_for(logged, "supervisord logs the death", 10)
            at = datetime.strptime(found[0].group(1), "%Y-%m-%d %H:%M:%S").timestamp() + int(found[0].group(2)) / 1000
            latencies.append(1000 * (at - killed))
            time.sleep(0.02)
    print(f"supervisord    {summary(latencies)}   (its log has whole milliseconds)")


if __name__ == "__main__":
    main()
