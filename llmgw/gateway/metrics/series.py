"""The gateway's families: what was counted, what waits and runs now, how often engines were taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from llmgw.board import Board, Cell
from llmgw.config.model import Config
from llmgw.gateway.admission.snapshot import AdmissionSnapshot
from llmgw.gateway.metrics.counting import OTHER_CODE, Counters
from llmgw.gateway.reading.identity import ANONYMOUS
from llmgw.metrics import families as f
from llmgw.metrics.exposition import Group, Labels, Part


class GatewaySeries:
    """A source of `exposition.Exposition`. `admission` is the queue as it is now, None while there is no gateway;
    `ejected` how often each shard was taken out, by name.
    """

    def __init__(
        self,
        counters: Counters,
        board: Board,
        config: Cell[Config],
        *,
        admission: Callable[[], AdmissionSnapshot | None],
        ejected: Callable[[], Mapping[str, int]],
    ) -> None:
        self._counters = counters
        self._board = board
        self._config = config
        self._admission = admission
        self._ejected = ejected

    async def parts(self) -> Iterable[Part]:
        config = self._config.value
        if config.gateway is None:
            return ()
        tenants = [ANONYMOUS, *(tenant.name for tenant in config.gateway.tenants)]
        bands = [band.name for band in config.gateway.bands]
        self._counters.keep({shard.model for shard in config.shards}, tenants, bands)
        admission = self._admission()
        return (
            *_counted(self._counters),
            Group(f.EJECTIONS, [((shard,), count) for shard, count in self._ejected().items()]),
            *(_queued(admission, self._names()) if admission is not None else ()),
        )

    def _names(self) -> Mapping[object, str]:
        """What each instance is called where people see it."""
        return {id_: instance.status.name for id_, instance in self._board.snapshot.shards.items()}


def _counted(counters: Counters) -> Iterator[Part]:
    # Copies: a page is written in slices, and requests end between them.
    yield Group(
        f.REQUESTS,
        (
            ((model, tenant, band, str(code) if code != OTHER_CODE else "other"), count)
            for (model, tenant, band, code), count in tuple(counters.requests.items())
        ),
    )
    yield Group(f.TOKENS, tuple(counters.tokens.items()))
    models = tuple(counters.models.items())
    yield Group(f.DURATION, ((key, series.duration) for key, series in models))
    yield Group(f.TTFT, ((key, series.ttft) for key, series in models))
    yield Group(f.INTER_CHUNK, ((key, series.inter_chunk) for key, series in models))
    yield Group(f.QUEUE_WAIT, ((key, series.queue_wait) for key, series in models))
    yield Group(f.REJECTED, [((reason,), count) for reason, count in counters.rejected.items()])
    yield Group(f.FAILURES, [((reason,), count) for reason, count in counters.failures.items()])
    yield Group(f.RETRIES, [((model,), count) for model, count in counters.retries.items()])


def _queued(admission: AdmissionSnapshot, names: Mapping[object, str]) -> Iterator[Part]:
    queues, tenants, endpoints = admission.queues, admission.tenants, admission.endpoints
    yield Group(f.QUEUE_DEPTH, [((row.model, row.band), row.waiting) for row in queues])
    yield Group(f.QUEUE_OLDEST, [((row.model, row.band), row.oldest) for row in queues])
    yield Group(f.INFLIGHT, [((row.model, row.band), row.running) for row in queues])
    yield Group(f.TENANT_QUEUE_DEPTH, [((row.name,), row.waiting) for row in tenants])
    yield Group(f.TENANT_INFLIGHT, [((row.name,), row.running) for row in tenants])
    # An engine that drains while its successor is ready has the same name.
    running: dict[Labels, float] = {}
    slots: dict[Labels, float] = {}
    for row in endpoints:
        key = (row.model, names.get(row.key[0], str(row.key[0])))
        running[key] = running.get(key, 0) + row.running
        slots[key] = slots.get(key, 0) + row.slots
    yield Group(f.ENDPOINT_INFLIGHT, running.items())
    yield Group(f.ENDPOINT_SLOTS, slots.items())
