"""The engines' own series for one page: every engine that is ready is asked at once, and none is waited for long."""

from __future__ import annotations

from collections.abc import Iterable

import httpx
import trio
from attrs import frozen

from llmgw.board import Board, Cell
from llmgw.config.model import Config
from llmgw.domain.shard import Secret, UnixEndpoint
from llmgw.domain.status import ShardStatus
from llmgw.gateway.metrics.rewriting import PAGE_MAX, merged_lines
from llmgw.gateway.routing.table import read_address
from llmgw.metrics.exposition import Group, Part, Text
from llmgw.metrics.families import ENGINE_METRICS_UP

TIMEOUT = 2.0
"""Seconds in which an engine has to answer."""

PATIENCE = 4.0
"""Seconds for all of them, however many hang: Prometheus gives the page 10, and another one may be under way."""

AT_ONCE = 16
"""Engines asked at a time."""

PAGES_MAX = 32 << 20
"""Characters of all engines' pages together; what comes later is left out."""

_PROCESS = "process_"
"""Begins the names of what llmgw tells of its own process."""


@frozen
class _Page:
    shard: str
    model: str
    text: str


class EngineSeries:
    """A source of `exposition.Exposition`, silent unless `engine_metrics` is on."""

    def __init__(self, board: Board, config: Cell[Config]) -> None:
        self._board = board
        self._config = config

    async def parts(self) -> Iterable[Part]:
        gateway = self._config.value.gateway
        if gateway is None or not gateway.engine_metrics:
            return ()
        statuses = [
            instance.status
            for _, instance in sorted(self._board.snapshot.shards.items())
            if instance.status.routable and instance.status.endpoint is not None
        ]
        found: dict[str, _Page | None] = {status.name: None for status in statuses}
        limiter = trio.CapacityLimiter(AT_ONCE)
        size = 0

        async def ask(status: ShardStatus) -> None:
            nonlocal size
            async with limiter:
                text = await ask_metrics(status.endpoint or "", status.api_key)
            if text is not None and size + len(text) <= PAGES_MAX:
                size += len(text)
                found[status.name] = _Page(status.name, status.model, text)

        with trio.move_on_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                for status in statuses:
                    nursery.start_soon(ask, status)
        pages = [(page.shard, page.model, page.text) for page in found.values() if page is not None]
        return (
            Group(ENGINE_METRICS_UP, [((name,), int(page is not None)) for name, page in found.items()]),
            Text(merged_lines(pages, is_reserved)),
        )


def is_reserved(name: str) -> bool:
    """Whether llmgw's own part of the page has, or may one day have, a family of this name."""
    return name.startswith(("llmgw_", _PROCESS))


async def ask_metrics(address: str, key: Secret | None) -> str | None:
    """An engine's page; None when there is none to be had within TIMEOUT."""
    endpoint = read_address(address)
    headers = {"User-Agent": "llmgw-metrics", "Accept": "text/plain", "Accept-Encoding": "identity"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key.reveal()}"
    transport = httpx.AsyncHTTPTransport(
        verify=False, trust_env=False, uds=endpoint.path if isinstance(endpoint, UnixEndpoint) else None
    )
    with trio.move_on_after(TIMEOUT):
        async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=None, headers=headers) as client:
            try:
                return await _read(client, f"{endpoint.base_url}/metrics")
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError):
                return None
    return None


async def _read(client: httpx.AsyncClient, url: str) -> str | None:
    async with client.stream("GET", url) as response:
        if response.status_code != 200:
            return None
        read = bytearray()
        is_too_large = False
        # Raw bytes: a small compressed page must not unfold into a large one.
        async for chunk in response.aiter_raw():
            read += chunk
            if len(read) > PAGE_MAX:
                is_too_large = True
                # Not a return: httpx's generators would be left in the middle, and Python complains of that.
                await response.aclose()
        return None if is_too_large else read.decode("utf-8", "replace")
