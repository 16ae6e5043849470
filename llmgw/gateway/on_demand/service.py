"""Carries out what `decide` says: looks at the board, asks it, and waits until something may have changed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import trio

from llmgw.board import Board, Cell
from llmgw.config.model import Config
from llmgw.domain.status import GATEWAY, Want
from llmgw.gateway.on_demand.decide import Fits, Traffic, decide

log = logging.getLogger(__name__)

IDLE_LOOK = 1.0
"""Seconds between two looks while no request waits: a start by hand may need room, and nothing else is in a hurry."""


class OnDemand:
    """Loads what requests wait for and unloads what is idle, until llmgw leaves. `fits` tells whether a shard would get
    its GPUs once others have given up theirs."""

    def __init__(self, board: Board, config: Cell[Config], fits: Fits) -> None:
        self._board = board
        self._config = config
        self._fits = fits

    async def run(self) -> None:
        board = self._board
        while board.leaving.value is None:
            # From here to the waiting nothing is awaited: what is decided fits the board that is asked.
            snapshot, config, wanted = board.snapshot, self._config.value, board.wanted.value
            traffic = Traffic(wanted, board.last_used.value, board.gateway_load.value)
            decision = decide(snapshot, config, traffic, board.now(), self._fits)
            for wished in decision.wishes:
                log.info("%s: %s, %s", snapshot.shards[wished.id].status.name, wished.wish.value, wished.why)
                board.ask(wished.id, wished.wish, f"{GATEWAY}, {wished.why}")
            again_in = float("inf") if decision.again_in is None else decision.again_in
            # While nobody waits it is time that counts, and a board of many shards has news all the time.
            revision = snapshot.revision if wanted or decision.wishes else None
            with trio.move_on_after(again_in if revision is not None else min(again_in, IDLE_LOOK)):
                await self._wait_news(revision, config, wanted)

    async def _wait_news(self, revision: int | None, config: Config, wanted: Mapping[str, Want]) -> None:
        board = self._board
        async with trio.open_nursery() as nursery:

            async def until(wait: Callable[[], Awaitable[object]]) -> None:
                await wait()
                nursery.cancel_scope.cancel(reason="there is news")

            if revision is not None:
                nursery.start_soon(until, partial(board.wait_newer, revision))
            nursery.start_soon(until, partial(self._config.wait_change, config))
            nursery.start_soon(until, partial(board.wanted.wait_change, wanted))
            nursery.start_soon(until, partial(board.leaving.wait_value, lambda leaving: leaving is not None))
