"""From an engine's first good answer to Ready: `python -m benchmarks.ready [STARTS]`.

A client of our own asks each new engine every 2 ms; llmgw asks once per `probe_interval`, or at once when the engine
prints that it is ready.
"""

from __future__ import annotations

import http.client
import sys
import time

from benchmarks.measure import machine, summary, wait_for
from tests.node import Node, fake, free_port


def main() -> None:
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    print(f"{machine()}; {starts} starts")
    port = free_port()
    command = fake("llamacpp", "--fake-time-factor=0.1")
    latencies = []
    with Node(LLMGW_STRICT="") as node:
        node.write(f'[[shard]]\nname = "a"\nmodel = "a"\nengine = "llamacpp"\nport = {port}\ncommand = {command}\n')
        node.start()
        for _ in range(starts):
            generation = node.wait_state("a", "ready")["generation"]
            node.ask("POST", "/v1/shards/a/restart")
            wait_for(lambda g=generation: node.shard("a")["generation"] > g, "it is launched again")
            while not _is_up(port):
                time.sleep(0.002)
            up = time.time()
            node.wait_state("a", "ready")
            latencies.append(max(0.0, 1000 * (node.shard("a")["since"] - up)))
    print(f"llmgw   {summary(latencies)}   (probe_interval is 1000 ms)")


def _is_up(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    main()
