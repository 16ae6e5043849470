"""The gateway's families: what was counted, what waits and runs now, how often engines were taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

from llmgw.board import Board, Cell
from llmgw.config.model import Config
from llmgw.domain.shard import ShardId
from llmgw.gateway.admission.snapshot import AdmissionSnapshot, Queued
from llmgw.gateway.metrics.counting import LET_IN_LATER, Counters
from llmgw.gateway.reading.identity import ANONYMOUS
from llmgw.metrics import families as f
from llmgw.metrics.exposition import Group, Labels, Part

_Labels = TypeVar("_Labels", bound=Labels)

Lane = tuple[str, str, str]
"""Model, band and tenant."""


class Running(Protocol):
    """What a gateway that serves tells about itself."""

    def admission(self) -> AdmissionSnapshot: ...
    def waiting(self) -> Mapping[Lane, int]:
        """How many wait, by model, band and tenant; without those of whom none waits."""

    @property
    def ejected(self) -> Mapping[str, int]:
        """How often each shard was taken out, by its name."""


class GatewaySeries:
    """A source of `exposition.Exposition`. `gateway` gives the one that serves, None while there is none."""

    def __init__(
        self, counters: Counters, board: Board, config: Cell[Config], gateway: Callable[[], Running | None]
    ) -> None:
        self._counters = counters
        self._board = board
        self._config = config
        self._gateway = gateway
        self._have_waited: dict[Lane, None] = {}
        """Of these an empty queue is shown too: a gauge that vanishes keeps its last value in a graph for minutes."""
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
            self._have_waited = {
                lane: None
                for lane in self._have_waited
                if lane[0] in models and lane[1] in bands and lane[2] in tenants
            }
        gateway = self._gateway()
        if gateway is None:
            return _counted(self._counters)
        queues = [(model, band) for model in models for band in bands]
        names = {id_: instance.status.name for id_, instance in self._board.snapshot.shards.items()}
        waiting, ejected = gateway.waiting(), gateway.ejected
        self._have_waited.update(dict.fromkeys(waiting))
        return (
            *_counted(self._counters),
            Group(f.EJECTIONS, [((shard,), ejected.get(shard, 0)) for shard in names.values()]),
            Group(f.QUEUE_DEPTH, [(lane, waiting.get(lane, 0)) for lane in self._have_waited]),
            *_queued(gateway.admission(), queues, names),
        )


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
    yield Group(f.BANDS_CLAMPED, [((tenant,), count) for tenant, count in counters.bands_clamped.items()])


def _rows(counts: Mapping[_Labels, int]) -> Iterator[tuple[_Labels, int]]:
    # A page is written in slices, and requests end between them: a list of the keys is made first. Of pairs it would
    # be thousands of new objects at once, and the garbage collector would look through the whole process for them.
    for labels in list(counts):
        count = counts.get(labels)
        if count is not None:
            yield labels, count


def _queued(
    admission: AdmissionSnapshot, queues: Iterable[tuple[str, str]], names: Mapping[ShardId, str]
) -> Iterator[Part]:
    """`queues` are all that there can be: an empty one is 0 and does not vanish."""
    tenants, endpoints = admission.tenants, admission.endpoints
    empty = {(model, band): Queued(model, band, 0, 0.0, 0) for model, band in queues}
    rows = {**empty, **{(row.model, row.band): row for row in admission.queues}}.items()
    yield Group(f.QUEUE_OLDEST, [(key, row.oldest) for key, row in rows])
    yield Group(f.INFLIGHT, [(key, row.running) for key, row in rows])
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
