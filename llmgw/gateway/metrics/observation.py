"""Everything that sees requests in one object: the data path's observer, the page of metrics, facts for the status."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from llmgw.board import Board, Cell
from llmgw.config.model import Config
from llmgw.gateway.metrics.access_log import AccessLog
from llmgw.gateway.metrics.counting import Counters, ModelSeries
from llmgw.gateway.metrics.engines import EngineSeries
from llmgw.gateway.metrics.series import GatewaySeries, Running
from llmgw.gateway.record import RequestRecord
from llmgw.metrics.exposition import Exposition
from llmgw.metrics.node import Node, NodeSeries


class Observation:
    """Outlives the gateway, which a reload may take away and bring back: counters go on. It is `answering.Observer`.

    `node` gives the facts of the node, `gateway` the one that serves, None while there is none.
    """

    def __init__(
        self,
        board: Board,
        config: Cell[Config],
        *,
        node: Callable[[], Node],
        gateway: Callable[[], Running | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._gateway = gateway
        self._counters = Counters()
        self._access_log = AccessLog(self._mode, clock=time.time, now=now)
        self._node_series = NodeSeries(board, node)
        gateway_series = GatewaySeries(self._counters, board, config, gateway)
        engine_series = EngineSeries(board, config)
        sources = (self._node_series.parts, gateway_series.parts, engine_series.parts)
        self._exposition = Exposition(lambda: sources)

    # -- the data path's observer

    def series(self, model: str, band: str) -> ModelSeries:
        return self._counters.series(model, band)

    def ended(self, record: RequestRecord) -> None:
        self._counters.ended(record)
        self._access_log.ended(record)

    # -- what is told

    async def run(self) -> None:
        """Count what only the board tells, until cancelled."""
        await self._node_series.run()

    async def render(self) -> bytes:
        """The page of metrics, as gateway and control socket serve it."""
        return await self._exposition.render()

    def as_json(self) -> dict[str, Any] | None:
        """`gateway` of the status; None without a gateway."""
        gateway = self._gateway()
        if gateway is None:
            return None
        return {
            **gateway.admission().as_json(),
            "ejections": dict(gateway.ejected),
            "counted": self._counters.as_json(),
        }

    def _mode(self) -> str:
        gateway = self._config.value.gateway
        return gateway.access_log if gateway is not None else "off"
