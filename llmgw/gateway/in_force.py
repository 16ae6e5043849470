"""What is in force now: limits and doors from the file, the table from the board, and the connections behind it.

One writer, the gateway's service (`server`); the tasks of the connections read it anew at each step, so that a reload
or an engine's end counts for requests that are under way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from llmgw.board import Board
from llmgw.config.model import Config, GatewayConfig
from llmgw.domain.shard import ShardId
from llmgw.gateway.admission.desk import Desk
from llmgw.gateway.admission.messages import Refused
from llmgw.gateway.client import Limits
from llmgw.gateway.on_demand.outlook import failed_loads
from llmgw.gateway.on_demand.telling import used_by, wants_of
from llmgw.gateway.plane import Plane
from llmgw.gateway.prospect import hopeless
from llmgw.gateway.reading import answers
from llmgw.gateway.reading.answers import Refusal
from llmgw.gateway.reading.identity import Doors
from llmgw.gateway.routing.ejection import Ejections
from llmgw.gateway.routing.policies import Chooser
from llmgw.gateway.routing.table import Endpoint, Key, Model, Table, build_table
from llmgw.gateway.upstream import Pool

log = logging.getLogger(__name__)

TELL_PAUSE = 10.0
"""Seconds between two lines in the log about the same unreachable engine."""


class InForce:
    """`now` is a monotonic clock in seconds."""

    def __init__(
        self,
        board: Board,
        config: Config,
        desk: Desk,
        chooser: Chooser,
        plane: Plane,
        now: Callable[[], float],
        estimate: Callable[[Model], float | None],
    ) -> None:
        self._board = board
        self._chooser = chooser
        self._ejections = Ejections()
        self._estimate = estimate
        self._desk = desk
        self._plane = plane
        self._now = now
        self._places: dict[str, dict[Key, int]] = {}
        """Slots by endpoint of each model, as the desk knows them."""
        self._pools: dict[Key, Pool] = {}
        self._running: dict[Key, int] = {}
        self._told: dict[Key, float] = {}
        """When it was last said that an endpoint cannot be reached."""
        self._used: set[ShardId] = set()
        """Shards that had a request since the board was told last."""
        self._without_endpoint: frozenset[str] = frozenset()
        """Models that requests can only wait for."""
        self.is_draining = False
        """llmgw ends: each answer is the last one on its connection."""
        self.takes_requests = True
        """False: nothing new is let in."""
        self._returning: float | None = None
        """When the next endpoint's pause is over."""
        self.ejected: dict[str, int] = {}
        """How often each shard was taken out, by its name."""
        self.table = Table({}, {}, frozenset(), 0)
        self.adopt(config)

    def adopt(self, config: Config) -> None:
        """Another configuration: what waits and runs goes on under its limits."""
        gateway = config.gateway
        assert gateway is not None
        self.config = config
        self.gateway: GatewayConfig = gateway
        self.doors = Doors(gateway)
        self._desk.adopt(gateway)
        self._chooser.set_policy(gateway.routing)
        self.limits = Limits(
            max_header=gateway.max_header,
            max_body=gateway.max_body,
            max_buffered=gateway.max_buffered,
            head_timeout=gateway.head_timeout,
            body_timeout=gateway.body_timeout,
            write_timeout=gateway.write_timeout,
            keepalive_timeout=gateway.keepalive_timeout,
        )
        self.refresh()

    def refresh(self) -> None:
        """A new table: places for who waits, and no more connections to what is gone."""
        before, table = self.table, build_table(self._board.snapshot, self.config)
        self.table = table
        if before.endpoints.keys() != table.endpoints.keys():
            self._ejections.keep(table.endpoints.keys())
            self._chooser.keep(table.models.keys(), table.endpoints.keys())
        self._without_endpoint = frozenset(model.name for model in table.models.values() if not model.endpoints)
        for name in {model.name for model in (*before.models.values(), *table.models.values())}:
            self._set_places(name)
        for name, why in failed_loads(before, table).items():
            refusal = answers.no_engine(name, why, self._estimate(table.models[name]))
            self._desk.refuse_model(name, Refused("load-failed", refusal.retry_after, refusal.message))
        for key in [key for key in self._pools if key not in table.endpoints and key not in table.draining]:
            self._pools.pop(key).close("endpoint-gone")
            self._told.pop(key, None)
        self.publish_load()

    def _set_places(self, name: str) -> None:
        model = self.table.models.get(name)
        slots = {endpoint.key: endpoint.slots for endpoint in model.endpoints} if model is not None else {}
        slots = self._ejections.allowed(slots, self._now())
        if slots != self._places.get(name):
            self._places[name] = slots
            self._desk.set_endpoints(name, slots)
            if model is None:
                del self._places[name]
        if model is None:
            self._desk.refuse_model(name, Refused("load-failed", None, answers.unknown_model(name).message))
        elif not model.endpoints and (refusal := self.hopeless(model)) is not None:
            # What they wait for will not come: a load that failed for good, an operator's stop.
            self._desk.refuse_model(name, Refused("load-failed", refusal.retry_after, refusal.message))

    def judge(self, endpoint: Endpoint, is_good: bool) -> None:
        """A request to it went well, or met an error of the engine itself."""
        now, key = self._now(), endpoint.key
        if is_good:
            changed = self._ejections.succeeded(key, now)
        else:
            model = self.table.models.get(endpoint.model)
            among = [other.key for other in model.endpoints] if model is not None else []
            changed = self._ejections.failed(key, among, now)
            if changed:
                self.ejected[endpoint.name] = self.ejected.get(endpoint.name, 0) + 1
                log.warning("%s gets no requests for a while: several failed in a row", endpoint.name)
        if changed:
            self._set_places(endpoint.model)

    def sweep(self) -> None:
        """What time alone changes: connections too long idle, endpoints whose pause is over."""
        for pool in self._pools.values():
            pool.sweep()
        if self._returning is not None and self._now() >= self._returning:
            for name in tuple(self._places):
                self._set_places(name)
        self._returning = self._ejections.next_return(self._now())
        self.publish_load()

    def hopeless(self, model: Model) -> Refusal | None:
        """Why a request for a model without an endpoint is refused at once; None when it may wait."""
        return hopeless(model, self.gateway.load_wait, self._estimate(model))

    def pool(self, endpoint: Endpoint) -> Pool:
        pool = self._pools.get(endpoint.key)
        if pool is None:
            pool = self._pools[endpoint.key] = Pool(endpoint.address, self._plane, self._now)
        return pool

    def tell_unreachable(self, endpoint: Endpoint, error: OSError) -> None:
        """In the log, once in a while: hundreds of requests may meet the same closed door."""
        now = self._now()
        if now - self._told.get(endpoint.key, -TELL_PAUSE) >= TELL_PAUSE:
            self._told[endpoint.key] = now
            log.warning("cannot connect to %s at %s: %s", endpoint.name, endpoint.address, error)

    def began(self, key: Key) -> None:
        self._running[key] = self._running.get(key, 0) + 1

    def ended(self, key: Key) -> None:
        self._used.add(key[0])
        left = self._running[key] - 1
        if left:
            self._running[key] = left
        else:
            del self._running[key]

    def publish_load(self) -> None:
        """Tell the board what runs, so that a drain waits for requests that the engine does not count yet, what was
        used, and what is waited for."""
        load: dict[ShardId, int] = {}
        for (id_, _), count in self._running.items():
            load[id_] = load.get(id_, 0) + count
        board = self._board
        if load != board.gateway_load.value:
            board.gateway_load.set(load)
        used = used_by(board.last_used.value, self._used | load.keys(), board.snapshot.shards.keys(), board.now())
        self._used.clear()
        if used is not board.last_used.value:
            board.last_used.set(used)
        if self._without_endpoint or board.wanted.value:
            bands = (band.name for band in self.gateway.bands)
            queues = self._desk.snapshot().queues if self._without_endpoint else ()
            wanted = wants_of(queues, self._without_endpoint, bands, board.now(), board.wanted.value)
            if wanted != board.wanted.value:
                board.wanted.set(wanted)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close("shutdown")
        self._pools.clear()
        # Nobody runs any more, and engines that are being stopped wait to hear that.
        self.publish_load()
        self._board.wanted.set({})
