"""What the gateway answers out of itself: lists of models, health, metrics, the page. No engine is asked."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from attrs import frozen

from llmgw.gateway.in_force import InForce
from llmgw.gateway.reading import answers
from llmgw.gateway.reading.answers import Pair, Refusal
from llmgw.gateway.reading.identity import Caller
from llmgw.gateway.reading.paths import Kind, Route
from llmgw.gateway.routing.names import listing

JSON = b"application/json"


@frozen
class Page:
    """An answer of llmgw's own."""

    status: int
    content_type: bytes
    body: bytes
    headers: tuple[Pair, ...] = ()


RenderMetrics = Callable[[], Awaitable[Page]]


class OwnPages:
    """`metrics` renders the exposition, `status` gives what the page shows, `ui` is the page itself with its headers;
    `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        in_force: InForce,
        *,
        metrics: RenderMetrics,
        status: Callable[[], dict[str, Any]],
        ui: Page,
        clock: Callable[[], float],
    ) -> None:
        self._in_force = in_force
        self._metrics = metrics
        self._status = status
        self._ui = ui
        self._clock = clock

    async def answer(self, route: Route, caller: Caller | None) -> Page | Refusal:
        in_force = self._in_force
        match route.kind:
            case Kind.MODELS:
                assert caller is not None
                return self._models(route.what, caller)
            case Kind.HEALTH:
                return Page(200, JSON, b'{"status":"ok"}')
            case Kind.READINESS:
                return self._readiness()
            case Kind.METRICS if in_force.gateway.metrics:
                return await self._metrics()
            case Kind.UI if in_force.gateway.ui:
                return self._ui
            case Kind.UI_STATUS if in_force.gateway.ui:
                return Page(200, JSON, json.dumps(self._status()).encode(), ((b"cache-control", b"no-store"),))
            case Kind.NO_MODEL:
                return answers.no_model()
            case _:
                return answers.unknown_path()

    def _models(self, wanted: str, caller: Caller) -> Page | Refusal:
        body = listing(self._in_force.table, caller.models, self._clock())
        if not wanted:
            return Page(200, JSON, body)
        for row in json.loads(body)["data"]:
            if wanted == row["id"] or wanted in row["llmgw"]["aliases"]:
                return Page(200, JSON, json.dumps(row, ensure_ascii=False).encode())
        return answers.unknown_model(wanted)

    def _readiness(self) -> Page | Refusal:
        """Whether a load balancer should send requests here."""
        in_force = self._in_force
        if in_force.is_draining:
            return answers.draining()
        table = in_force.table
        if table.endpoints or any(model.is_loadable for model in table.models.values()):
            return Page(200, JSON, b'{"status":"ready"}')
        return answers.not_ready()
