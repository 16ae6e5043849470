"""The gateway's families: what was counted, what waits and runs now, how often engines were taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from llmgw.board import Board, Cell
from llmgw.config.model import Config
from llmgw.gateway.admission.snapshot import AdmissionSnapshot, Queued
from llmgw.gateway.metrics.counting import LET_IN_LATER, Counters
from llmgw.gateway.reading.identity import ANONYMOUS
from llmgw.metrics import families as f
from llmgw.metrics.exposition import Group, Labels, Part

_Labels = TypeVar("_Labels", bound=Labels)


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
        self._kept: Config | None = None
        self._size = 0
        """Configuration and number of series when what the file has not was last forgotten."""

    async def parts(self) -> Iterable[Part]:
        config = self._config.value
        if config.gateway is None:
            return ()
        tenants = [ANONYMOUS, *(tenant.name for tenant in config.gateway.tenants)]
        bands = [band.name for band in config.gateway.bands]
        models = {shard.model: None for shard in config.shards}
        if config is not self._kept or self._counters.size != self._size:
            # Requests that a reload met under way may end under names that are gone.
            self._counters.keep(models, tenants, bands)
            self._kept, self._size = config, self._counters.size
        admission = self._admission()
        queues = [(model, band) for model in models for band in bands]
        names, ejected = self._names(), self._ejected()
        return (
            *_counted(self._counters),
            Group(f.EJECTIONS, [((shard,), ejected.get(shard, 0)) for shard in names.values()]),
            *(_queued(admission, queues, names) if admission is not None else ()),
        )

    def _names(self) -> Mapping[object, str]:
        """What each instance is called where people see it."""
        return {id_: instance.status.name for id_, instance in self._board.snapshot.shards.items()}


def _counted(counters: Counters) -> Iterator[Part]:
    requests, tokens = _rows(counters.requests), _rows(counters.tokens)
    yield Group(f.REQUESTS, requests)
    yield Group(f.TOKENS, tokens)
    models = tuple(counters.models.items())
    yield Group(f.DURATION, ((key, series.duration) for key, series in models))
    yield Group(f.TTFT, ((key, series.ttft) for key, series in models))
    yield Group(f.INTER_CHUNK, ((key, series.inter_chunk) for key, series in models))
    yield Group(f.QUEUE_WAIT, ((key, series.queue_wait) for key, series in models))
    # With their zeros: `increase` sees no first time of a series that was not there before.
    yield Group(f.REJECTED, [((reason,), counters.rejected.get(reason, 0)) for reason in sorted(LET_IN_LATER)])
    yield Group(f.FAILURES, [((reason,), count) for reason, count in counters.failures.items()])
    yield Group(f.RETRIES, [((model,), count) for model, count in counters.retries.items()])


def _rows(counts: Mapping[_Labels, int]) -> Iterator[tuple[_Labels, int]]:
    # A page is written in slices, and requests end between them: a list of the keys is made first. Of pairs it would
    # be thousands of new objects at once, and the garbage collector would look through the whole process for them.
    for labels in list(counts):
        count = counts.get(labels)
        if count is not None:
            yield labels, count


def _queued(
    admission: AdmissionSnapshot, queues: Iterable[tuple[str, str]], names: Mapping[object, str]
) -> Iterator[Part]:
    """`queues` are all that there can be: an empty one is 0 and does not vanish."""
    tenants, endpoints = admission.tenants, admission.endpoints
    empty = {(model, band): Queued(model, band, 0, 0.0, 0) for model, band in queues}
    rows = {**empty, **{(row.model, row.band): row for row in admission.queues}}.items()
    yield Group(f.QUEUE_DEPTH, [(key, row.waiting) for key, row in rows])
    yield Group(f.QUEUE_OLDEST, [(key, row.oldest) for key, row in rows])
    yield Group(f.INFLIGHT, [(key, row.running) for key, row in rows])
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
