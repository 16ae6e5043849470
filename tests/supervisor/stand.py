"""A supervisor in the test's own process, with real engines: for what only another service writes on the board."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from llmgw.board import Board, Cell, Leaving
from llmgw.config.load import load
from llmgw.config.model import Config
from llmgw.domain.problem import Problem
from llmgw.domain.shard import Endpoint, ShardId, ShardSpec
from llmgw.domain.status import Instance, ShardStatus, Wish
from llmgw.supervisor.assigner import Assigner
from llmgw.supervisor.follow import LogFollower
from llmgw.supervisor.launch import Host
from llmgw.supervisor.node_watch import NodeWatch
from llmgw.supervisor.processes import Children
from llmgw.supervisor.quarantine import Quarantine
from llmgw.supervisor.records import LoadTimes, RecordStore, WishStore
from llmgw.supervisor.supervisor import Supervisor
from llmgw.supervisor.tools import SoleTool
from tests.ports import engine_ports

PATIENCE = 30.0


class Stand:
    """The board, and what the test does on it."""

    def __init__(self, board: Board, config: Cell[Config], records: RecordStore) -> None:
        self.board = board
        self.config = config
        self.records = records

    def status(self, name: str) -> ShardStatus:
        return self.board.snapshot.shards[ShardId(name)].status

    def wish(self, name: str, wish: Wish) -> Instance:
        self.board.ask(ShardId(name), wish, "ada", operator=True)
        return self.board.snapshot.shards[ShardId(name)]

    def load(self, **counts: int) -> None:
        """What the gateway says that it has under way, by shard."""
        self.board.gateway_load.set({ShardId(name): count for name, count in counts.items()})

    async def until(self, name: str, holds: Callable[[ShardStatus], object]) -> ShardStatus:
        """The first status that is as wanted; fails with the last one."""
        with trio.move_on_after(PATIENCE):
            await self.board.wait_shards(lambda snapshot: bool(holds(snapshot.shards[ShardId(name)].status)))
        status = self.status(name)
        assert holds(status), f"not within {PATIENCE:g} s: {status}"
        return status


async def _no_findings(spec: ShardSpec, endpoint: Endpoint) -> list[Problem]:
    return []


@asynccontextmanager
async def standing(text: str) -> AsyncIterator[Stand]:
    """Run the shards of a configuration; leaving the block ends them all."""
    # Short: the temporary folder of a shard lies below it.
    folder = Path(tempfile.mkdtemp(prefix="lg"))
    first, last = engine_ports(40)
    (folder / "llmgw.toml").write_text(
        f'[node]\nengine_ports = "{first}-{last}"\n[supervisor]\nstate_dir = "{folder}/s"\n'
        f'runtime_dir = "{folder}/r"\nlog_dir = "{folder}/l"\n{text}\n'
    )
    parsed = load(str(folder / "llmgw.toml"))
    assert parsed.config is not None, parsed.problems
    settings = parsed.config.supervisor
    board, config, children = Board(strict=True), Cell(parsed.config), Children()
    records = RecordStore(settings.state_dir)
    quarantine = Quarantine(settings.state_dir, now=time.time)
    node = NodeWatch(SoleTool(children).run, config, records.read_all, quarantine, now=time.time)
    host = Host(
        board=board,
        children=children,
        config=config,
        records=records,
        load_times=LoadTimes(settings.state_dir),
        follower=LogFollower(settings.log_dir),
        env=dict(os.environ),
        node=node,
        quarantine=quarantine,
        assigner=Assigner(config, node),
        check=_no_findings,
        chance=random.random,
        new_run_id=lambda: secrets.token_hex(8),
    )
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(Supervisor(host, WishStore(settings.state_dir)).run)
            try:
                yield Stand(board, config, records)
            finally:
                board.leaving.set(Leaving("the test is over", engines_stay=False))
                board.hurry.set(True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
