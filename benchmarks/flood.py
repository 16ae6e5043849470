"""An engine that writes as fast as it can: `python -m benchmarks.flood [SECONDS]`.

200,000 lines a second of 100 bytes; meanwhile a client asks for the status and llmgw's memory is looked at.
"""

from __future__ import annotations

import json
import sys
import time

import psutil

from benchmarks.measure import machine, summary
from tests.node import Node, fake

SCRIPT = """
import sys, time
seconds = float(sys.argv[1])
line = b"(EngineCore pid=1) INFO 11-30 10:00:00 [core.py:1] a line of a flood that means nothing at all, %09d\\n"
out, n, began = sys.stdout.buffer, 0, time.monotonic()
time.sleep(1)
began = time.monotonic()
while time.monotonic() - began < seconds:
    out.write(b"".join(line % (n + i) for i in range(2000)))
    out.flush()
    n += 2000
    ahead = n / 200_000 - (time.monotonic() - began)
    if ahead > 0:
        time.sleep(ahead)
print("lines", n, "in", time.monotonic() - began, flush=True)
time.sleep(3600)
"""


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    print(f"{machine()}; {seconds:g} s of 200,000 lines/s")
    with Node(LLMGW_STRICT="") as node:
        (node.folder / "flood.py").write_text(SCRIPT)
        command = json.dumps([sys.executable, str(node.folder / "flood.py"), str(seconds)])
        node.write(
            f'[[shard]]\nname = "quiet"\nmodel = "quiet"\nengine = "llamacpp"\ncommand = {fake("llamacpp")}\n'
            f'[[shard]]\nname = "flood"\nmodel = "flood"\nengine = "command"\nautostart = false\ncommand = {command}\n'
        )
        pid = node.start()
        node.wait_state("quiet", "ready")
        process = psutil.Process(pid)
        before = process.memory_info().rss / 2**20
        print(f"control answers without   {summary(_ask(node, 3.0))}")
        node.ask("POST", "/v1/shards/flood/start")
        time.sleep(1.0)
        cpu = process.cpu_times()
        latencies = _ask(node, seconds)
        spent = process.cpu_times()
        took = spent.user + spent.system - cpu.user - cpu.system
        print(f"control answers with      {summary(latencies)}")
        time.sleep(2.0)
        after = process.memory_info().rss / 2**20
        log = node.shard("flood")["log"]
        share = 100 * took / seconds
        print(f"memory                    {before:.1f} MiB before, {after:.1f} MiB after; CPU {share:.0f} %")
        size = (node.folder / "l" / "flood.0.log").stat().st_size / 2**20
        print(f"lines                     {log['lines']} kept, {log['skipped']} skipped; file {size:.0f} MiB")
        print(f"the quiet one is {node.shard('quiet')['state']}")
        # What it wrote last must be there: it was skipped, not lost behind.
        tail = node.cli("logs", "flood", "-n", "1").stdout
        print(f"last line: {tail.strip()}")


def _ask(node: Node, seconds: float) -> list[float]:
    latencies = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        node.status()
        latencies.append(1000 * (time.perf_counter() - began))
        time.sleep(0.01)
    return latencies


if __name__ == "__main__":
    main()
