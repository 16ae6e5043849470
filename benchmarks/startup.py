"""`llmgw status` as a whole process: `python -m benchmarks.startup [RUNS]`. In turns, so that drift hits all alike."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.fleet import llmgw, supervisord
from benchmarks.measure import machine, peers, percentile

SHARDS = 10


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    command = str(Path(sys.executable).with_name("llmgw"))
    print(f"{machine()}; {SHARDS} shards, {runs} runs each, medians")
    with supervisord(SHARDS) as (_, config):
        peer = _time([[str(peers() / "supervisorctl"), "-c", str(config), "status"]], runs)[0]
    with llmgw(SHARDS) as node:
        piped = [command, "-s", str(node.socket), "status"]
        commands = [
            [sys.executable, "-c", "pass"],
            piped,
            [*piped, "--json"],
            ["script", "-qec", " ".join(piped), "/dev/null"],
            ["script", "-qec", f"{sys.executable} -c pass", "/dev/null"],
        ]
        floor, plain, as_json, drawn, drawn_floor = _time(commands, runs)
    print(f"python -c pass                {floor:6.1f} ms")
    print(f"llmgw status, piped           {plain:6.1f} ms   {plain / floor:.1f} x (goal 4)")
    print(f"llmgw status --json           {as_json:6.1f} ms   {as_json / floor:.1f} x (goal 4)")
    extra = drawn_floor - floor
    print(f"llmgw status on a terminal    {drawn - extra:6.1f} ms   {(drawn - extra) / floor:.1f} x (goal 9)")
    print(f"supervisorctl status          {peer:6.1f} ms   {peer / floor:.1f} x")


def _time(commands: list[list[str]], runs: int) -> list[float]:
    """Median milliseconds of each, in turns."""
    times: list[list[float]] = [[] for _ in commands]
    env = {**os.environ, "TERM": "xterm-256color"}
    for turn in range(runs + 1):
        for taken, command in zip(times, commands, strict=True):
            began = time.perf_counter()
            subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, check=False)
            if turn:
                taken.append(1000 * (time.perf_counter() - began))
    return [percentile(taken, 0.5) for taken in times]


if __name__ == "__main__":
    main()
