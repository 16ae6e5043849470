"""llmgw's gateway alone, over a board with one engine: `python -m benchmarks.gateway.bare PORT ENGINE_PORT bare|full`.

*bare*: anonymous, nothing counted. *full*: a key, three bands, limits, rates, and everything counted.
"""

from __future__ import annotations

import hashlib
import random
import sys

import trio

from llmgw.board import Board, Cell
from llmgw.config.document import SourceFile
from llmgw.config.kinds import Listen
from llmgw.config.model import Config
from llmgw.config.parse import parse
from llmgw.domain.host import HostFacts
from llmgw.domain.shard import ShardId
from llmgw.domain.status import Intent, Launched, LoadingSeen, ReadyConfirmed, ShardStatus, Wish
from llmgw.gateway.answering import Observer, Silent
from llmgw.gateway.assembly import make_gateway
from llmgw.gateway.listeners import Listeners
from llmgw.gateway.metrics.counting import Counters
from llmgw.gateway.own_pages import Page

KEY = "sk-benchmark-0123456789"

SHARD = """
[[shard]]
name = "a"
model = "m"
engine = "command"
command = ["true"]
max_inflight = 20000
"""
BARE = 'metrics = false\naccess_log = "off"\n'
FULL = f"""
access_log = "off"
max_inflight = 100000
[[gateway.tenant]]
name = "t"
keys = [{{ sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}" }}]
bands = ["normal", "interactive", "batch"]
max_inflight = 50000
[gateway.tenant.rate]
requests_per_minute = 100000000
tokens_per_minute = 100000000000
"""


def configuration(is_full: bool) -> Config:
    text = f"{SHARD}[gateway]\n{FULL if is_full else BARE}"
    source = SourceFile("llmgw.toml", text.encode(), "/etc", "/etc/llmgw.toml")
    parsed = parse([source], HostFacts(hostname="bench", home="/root", env={}, groups=frozenset({"root"})))
    assert parsed.config is not None, parsed.problems
    return parsed.config


async def no_metrics() -> Page:
    return Page(200, b"text/plain", b"")


async def serve(port: int, engine_port: int, is_full: bool) -> None:
    board, config = Board(), Cell(configuration(is_full))
    cell = board.add(ShardStatus(ShardId("a"), "a", "m", "command"), Intent(Wish.START))
    cell.report(Launched(1, 1, 1, f"127.0.0.1:{engine_port}", "hash"))
    cell.report(LoadingSeen("a sign"))
    cell.report(ReadyConfirmed())
    listeners, doors = Listeners(), (Listen(host="127.0.0.1", port=port),)
    listeners.adopt(doors, listeners.bind(doors))
    observer: Observer = Counters() if is_full else Silent()
    gateway = make_gateway(
        board,
        config,
        listeners.sockets,
        observer=observer,
        metrics=no_metrics,
        status=dict,
        ui=Page(200, b"text/html", b""),
        estimate=lambda model: None,
        chance=random.random,
    )
    await gateway.run()


if __name__ == "__main__":
    trio.run(serve, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "full")
