"""Who is let in, who waits, who is refused: messages and the time in, outcomes out. Pure.

For each model: bands by strict priority, inside a band tenants by turns (or by the fewest tokens), each tenant's
requests in their order. Nobody starves: who has waited for `promote_after` is served like one of the next higher band.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping

from llmgw.config.model import BandConfig, GatewayConfig, TenantConfig
from llmgw.gateway.admission.lanes import Lanes, Waiter
from llmgw.gateway.admission.messages import Granted, Offer, Outcome, Refused
from llmgw.gateway.admission.rates import Bucket
from llmgw.gateway.admission.snapshot import AdmissionSnapshot, EndpointLoad, Queued, TenantUse
from llmgw.gateway.admission.tokens import TokenCounters, cost
from llmgw.gateway.routing.policies import Chooser, Load
from llmgw.gateway.routing.table import Key

__all__ = ["Admission", "Granted", "Offer", "Outcome", "Refused"]

Outcomes = list[tuple[int, Outcome]]
"""By ticket; each ticket comes out exactly once."""

RETRY_MIN, RETRY_MAX = 1.0, 60.0
"""Seconds that a refused client is told to wait, at least and at most."""

RETRY_UNKNOWN = 5.0
"""The same where nothing has ended yet that could be measured."""

SMOOTHING = 0.1
"""Weight of the newest request in the mean time between two ends."""


class _Running:
    """A request that was let in."""

    __slots__ = ("charged", "load", "offer")

    def __init__(self, offer: Offer, load: Load, charged: float) -> None:
        self.offer = offer
        self.load = load
        self.charged = charged
        """Tokens that were counted for it so far."""


class _Tenant:
    """What is known of one tenant, over all models."""

    __slots__ = ("config", "granted", "parked_at", "refused", "requests", "running", "tokens", "waiting", "weight")

    def __init__(self) -> None:
        self.config: TenantConfig | None = None
        self.weight = 1
        self.running = 0
        self.waiting = 0
        self.granted = 0
        self.refused = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.parked_at: set[str] = set()
        """Models in whose queues it is parked."""

    def adopt(self, config: TenantConfig | None, now: float) -> None:
        self.config = config
        self.weight = config.weight if config is not None else 1
        self.requests = _bucket(self.requests, config.requests_per_minute if config is not None else None, now)
        self.tokens = _bucket(self.tokens, config.tokens_per_minute if config is not None else None, now)

    @property
    def is_full(self) -> bool:
        return (
            self.config is not None
            and self.config.max_inflight is not None
            and self.running >= self.config.max_inflight
        )

    def wait(self, now: float) -> float:
        """Seconds until its rates let one more in."""
        return max(
            self.requests.wait(now) if self.requests is not None else 0.0,
            self.tokens.wait(now) if self.tokens is not None else 0.0,
        )


def _bucket(known: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if known is None:
        return Bucket(per_minute, now)
    known.change(per_minute, now)
    return known


class _Model:
    """The queue and the endpoints of one model."""

    __slots__ = ("between_ends", "counters", "lanes", "last_end", "loads", "name", "running", "waiting")

    def __init__(self, name: str, lanes: list[Lanes], bands: int) -> None:
        self.name = name
        self.lanes = lanes
        """One per band, the highest first."""
        self.loads: dict[Key, Load] = {}
        self.running = [0] * bands
        """By the band that was asked for."""
        self.waiting = 0
        self.counters = TokenCounters()
        self.between_ends: float | None = None
        """Mean seconds between the ends of two requests."""
        self.last_end: float | None = None

    @property
    def has_endpoints(self) -> bool:
        return any(load.slots > 0 for load in self.loads.values())

    @property
    def slots(self) -> int:
        return sum(load.slots for load in self.loads.values())

    def free(self) -> list[Load]:
        return [load for load in self.loads.values() if load.inflight < load.slots]

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.loads)


class Admission:
    """The queue. `now` is a monotonic clock's time in seconds and never goes back."""

    def __init__(self, config: GatewayConfig, chooser: Chooser, now: float) -> None:
        self._chooser = chooser
        self._models: OrderedDict[str, _Model] = OrderedDict()
        self._tenants: dict[str, _Tenant] = {}
        self._waiters: dict[int, Waiter] = {}
        self._running: dict[int, _Running] = {}
        self._deadlines: dict[float, deque[tuple[float, int]]] = {}
        """By how long their requests may wait: each queue is in the order of its deadlines by itself."""
        self._promotions: list[deque[tuple[float, int]]] = []
        self._bands: tuple[BandConfig, ...] = ()
        self._levels: dict[str, int] = {}
        self._band_waiting: list[int] = []
        self._band_running: list[int] = []
        self._adopt(config, now)

    # -- configuration -----------------------------------------------------------------------------------

    def adopt(self, config: GatewayConfig, now: float) -> Outcomes:
        """Other bands, tenants and limits. Who waits goes on waiting; a band that is gone becomes the default one."""
        self._adopt(config, now)
        return self._dispatch_all(now)

    def _adopt(self, config: GatewayConfig, now: float) -> None:
        self._config = config
        old = [band.name for band in self._bands]
        self._bands = config.bands
        self._levels = {band.name: level for level, band in enumerate(config.bands)}
        self._default = next((level for level, band in enumerate(config.bands) if band.default), 0)
        known = {row.name: row for row in config.tenants}
        for name, tenant in self._tenants.items():
            tenant.adopt(known.get(name), now)
            tenant.parked_at.clear()
        for name, row in known.items():
            if name not in self._tenants:
                self._tenant(name).adopt(row, now)
        count = len(self._bands)
        if old == [band.name for band in self._bands]:
            for model in self._models.values():
                for lanes in model.lanes:
                    lanes.unpark_all()
            return
        self._promotions = [deque() for _ in range(count)]
        self._band_waiting = [0] * count
        self._band_running = [0] * count
        for model in self._models.values():
            waiting = sorted((w for lanes in model.lanes for w in lanes), key=lambda waiter: waiter.offer.ticket)
            model.lanes = self._new_lanes()
            model.running = [0] * count
            for waiter in waiting:
                waiter.level = self._level(waiter.offer)
                waiter.entered = now
                self._line_up(model, waiter)
                self._band_waiting[self._level(waiter.offer)] += 1
        for running in self._running.values():
            level = self._level(running.offer)
            self._band_running[level] += 1
            self._models[running.offer.model].running[level] += 1

    def _new_lanes(self) -> list[Lanes]:
        return [Lanes(lambda tenant: self._tenant(tenant).weight) for _ in self._bands]

    def _level(self, offer: Offer) -> int:
        return self._levels.get(offer.band, self._default)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant()
        return tenant

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = _Model(name, self._new_lanes(), len(self._bands))
        return model

    # -- requests ----------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now: float) -> Outcomes:
        """One more request. Its own outcome is among the outcomes unless it waits."""
        tenant, model, level = self._tenant(offer.tenant), self._model(offer.model), self._level(offer)
        pause = tenant.wait(now)
        if pause > 0:
            text = f"cannot let in a request of tenant {offer.tenant}: its rate is used up for now; try again later"
            return [(offer.ticket, self._refusal(tenant, "rate", max(pause, RETRY_MIN), text))]
        if not model.waiting and not tenant.is_full and self._has_room(model, level):
            free = model.free()
            if free:
                self._charge_rates(tenant, offer, now)
                self._enter_counters(model, offer.tenant)
                return [(offer.ticket, self._grant(model, offer, level, free))]
        if (full := self._queue_is_full(model, tenant, offer, level)) is not None:
            return [(offer.ticket, full)]
        self._charge_rates(tenant, offer, now)
        self._enter_counters(model, offer.tenant)
        waiter = Waiter(offer, level, now)
        waiter.is_loading = not model.has_endpoints
        self._waiters[offer.ticket] = waiter
        tenant.waiting += 1
        model.waiting += 1
        self._band_waiting[level] += 1
        self._line_up(model, waiter)
        self._set_deadline(waiter, now)
        return self._dispatch(model, now)

    def leave(self, ticket: int, now: float) -> Outcomes:
        """It does not want to wait any more. One that was let in gives its slot back by `finish`."""
        waiter = self._waiters.get(ticket)
        if waiter is not None:
            self._take_out(waiter)
        return []

    def finish(self, ticket: int, prompt: int | None, completion: int | None, now: float) -> Outcomes:
        """It has ended; tokens as the engine counted them, None where nobody knows."""
        running = self._running.pop(ticket, None)
        if running is None:
            return []
        offer, load = running.offer, running.load
        model, tenant, level = self._models[offer.model], self._tenant(offer.tenant), self._level(offer)
        load.inflight -= 1
        model.running[level] -= 1
        self._band_running[level] -= 1
        tenant.running -= 1
        if not load.inflight and not load.slots:
            model.loads.pop(load.key, None)
        used = cost(offer.estimate if prompt is None else prompt, completion or 0)
        model.counters.charge(offer.tenant, used - running.charged, tenant.weight)
        if tenant.tokens is not None:
            tenant.tokens.take((offer.estimate if prompt is None else prompt) + (completion or 0) - offer.estimate, now)
        if model.last_end is not None:
            gap = now - model.last_end
            known = model.between_ends
            model.between_ends = gap if known is None else known + SMOOTHING * (gap - known)
        model.last_end = now
        outcomes: Outcomes = []
        for name in tenant.parked_at:
            for lanes in self._models[name].lanes if name in self._models else ():
                lanes.unpark(offer.tenant)
            if name != offer.model and name in self._models:
                outcomes += self._dispatch(self._models[name], now)
        tenant.parked_at.clear()
        if self._is_bounded(level):
            outcomes += self._dispatch_all(now)
        else:
            outcomes += self._dispatch(model, now)
        if model.is_idle:
            self._models.pop(model.name, None)
        return outcomes

    def retry(self, ticket: int, avoid: Key) -> Outcome:
        """Another endpoint for one that was let in and whose engine cannot have begun."""
        running = self._running[ticket]
        model = self._models[running.offer.model]
        free = [load for load in model.free() if load.key != avoid]
        if not free:
            return Refused("no-engine", RETRY_UNKNOWN, f"cannot ask another engine of {model.name}: none is free")
        load = free[self._chooser.choose(model.name, free, running.offer.hint)]
        running.load.inflight -= 1
        if not running.load.inflight and not running.load.slots:
            model.loads.pop(running.load.key, None)
        load.inflight += 1
        running.load = load
        return Granted(ticket, load.key)

    # -- engines -----------------------------------------------------------------------------------------

    def set_endpoints(self, name: str, slots: Mapping[Key, int], now: float) -> Outcomes:
        """The endpoints that a model has now, with their slots. What runs on others may end there."""
        model = self._model(name)
        had = model.has_endpoints
        for key, load in tuple(model.loads.items()):
            if key not in slots:
                load.slots = 0
                if not load.inflight:
                    del model.loads[key]
        for key, count in slots.items():
            known = model.loads.get(key)
            if known is None:
                model.loads[key] = Load(key, 0, count)
            else:
                known.slots = count
        if had != model.has_endpoints:
            # Waiting for an engine and waiting for a slot have limits of their own; each begins anew.
            for lanes in model.lanes:
                for waiter in lanes:
                    waiter.is_loading = had
                    self._set_deadline(waiter, now)
        outcomes = self._dispatch(model, now)
        if model.is_idle:
            del self._models[name]
        return outcomes

    def refuse_model(self, name: str, refused: Refused) -> Outcomes:
        """Nobody waits for this model any more."""
        model = self._models.get(name)
        if model is None:
            return []
        return self._refuse([waiter for lanes in model.lanes for waiter in lanes], refused)

    def refuse_all(self, refused: Refused) -> Outcomes:
        return self._refuse(list(self._waiters.values()), refused)

    # -- time --------------------------------------------------------------------------------------------

    def tick(self, now: float) -> Outcomes:
        """What time alone changes: who has waited too long is refused, who has waited long is promoted."""
        outcomes: Outcomes = []
        for queue in self._deadlines.values():
            while queue and queue[0][0] <= now:
                deadline, ticket = queue.popleft()
                waiter = self._waiters.get(ticket)
                if waiter is not None and waiter.deadline == deadline:
                    outcomes += self._refuse([waiter], self._too_late(waiter))
        touched: dict[str, _Model] = {}
        for level, queue in enumerate(self._promotions):
            while queue and queue[0][0] <= now:
                _, ticket = queue.popleft()
                waiter = self._waiters.get(ticket)
                if waiter is not None and waiter.level == level:
                    model = self._models[waiter.offer.model]
                    model.lanes[level].remove(waiter)
                    waiter.level, waiter.entered = level - 1, now
                    self._line_up(model, waiter)
                    touched[model.name] = model
        for model in touched.values():
            outcomes += self._dispatch(model, now)
        return outcomes

    def next_event(self) -> float | None:
        """When `tick` has something to do, at the earliest; None: never."""
        queues = (*self._deadlines.values(), *self._promotions)
        for queue in queues:
            while queue and queue[0][1] not in self._waiters:
                queue.popleft()
        return min((queue[0][0] for queue in queues if queue), default=None)

    # -- seeing it ---------------------------------------------------------------------------------------

    def position(self, ticket: int) -> int | None:
        """How many are before it, at the least, plus one; None when it does not wait."""
        waiter = self._waiters.get(ticket)
        if waiter is None:
            return None
        model = self._models[waiter.offer.model]
        higher = sum(lanes.size for lanes in model.lanes[: waiter.level])
        return 1 + higher + sum(other.offer.ticket < ticket for other in model.lanes[waiter.level])

    def snapshot(self, now: float) -> AdmissionSnapshot:
        return AdmissionSnapshot(
            queues=tuple(self._queued(now)),
            tenants=tuple(
                TenantUse(name, tenant.waiting, tenant.running, tenant.granted, tenant.refused)
                for name, tenant in self._tenants.items()
            ),
            endpoints=tuple(
                EndpointLoad(model.name, load.key, load.inflight, load.slots)
                for model in self._models.values()
                for load in model.loads.values()
            ),
            running=len(self._running),
            limit=self._config.max_inflight,
        )

    def _queued(self, now: float) -> Iterator[Queued]:
        for model in self._models.values():
            rows: dict[int, tuple[int, float]] = {level: (0, now) for level in range(len(self._bands))}
            for lanes in model.lanes:
                for waiter in lanes:
                    level = self._level(waiter.offer)
                    count, oldest = rows[level]
                    rows[level] = (count + 1, min(oldest, waiter.offer.arrived))
            for level, (count, oldest) in rows.items():
                if count or model.running[level]:
                    band = self._bands[level].name
                    yield Queued(model.name, band, count, now - oldest if count else 0.0, model.running[level])

    # -- inside: capacity --------------------------------------------------------------------------------

    def _is_bounded(self, level: int) -> bool:
        """Whether an end makes room for other models too."""
        limited = self._config.max_inflight is not None or self._bands[level].max_inflight is not None
        return limited and bool(self._waiters)

    def _has_room(self, model: _Model, level: int) -> bool:
        """Whether the limits of gateway and band let one more of this band run, and what is reserved stays free."""
        band = self._bands[level]
        if band.max_inflight is not None and self._band_running[level] >= band.max_inflight:
            return False
        limit = self._config.max_inflight
        if limit is not None:
            return limit - len(self._running) > self._reserved_for_others(level, self._band_running, limit)
        slots = model.slots
        return slots - sum(model.running) > self._reserved_for_others(level, model.running, slots)

    def _reserved_for_others(self, level: int, running: list[int], limit: int) -> int:
        reserved = sum(
            max(0, band.reserved - running[other])
            for other, band in enumerate(self._bands)
            if other != level and band.reserved
        )
        # One slot is everybody's: a small engine must not belong to one band alone.
        return min(reserved, max(0, limit - 1 - running[level])) if reserved else 0

    # -- inside: queues ----------------------------------------------------------------------------------

    def _queue_is_full(self, model: _Model, tenant: _Tenant, offer: Offer, level: int) -> Refused | None:
        band = self._bands[level]
        own = tenant.config.queue_limit if tenant.config is not None else None
        if self._band_waiting[level] >= band.queue_limit:
            waiting = self._band_waiting[level]
            text = f"cannot queue a request of band {band.name}: {waiting} wait already, which is its limit; try again"
        elif own is not None and tenant.waiting >= own:
            text = f"cannot queue a request of tenant {offer.tenant}: {tenant.waiting} wait already; try again"
        else:
            return None
        return self._refusal(tenant, "queue-full", self._retry_after(model), text)

    def _retry_after(self, model: _Model) -> float:
        """When a place will probably be free: who waits leaves at the pace of the last ends."""
        if model.between_ends is None:
            return RETRY_UNKNOWN
        return min(max(model.waiting * model.between_ends, RETRY_MIN), RETRY_MAX)

    def _refusal(self, tenant: _Tenant, reason: str, retry_after: float, text: str) -> Refused:
        tenant.refused += 1
        return Refused(reason, retry_after, text)

    def _charge_rates(self, tenant: _Tenant, offer: Offer, now: float) -> None:
        if tenant.requests is not None:
            tenant.requests.take(1, now)
        if tenant.tokens is not None:
            tenant.tokens.take(offer.estimate, now)

    def _enter_counters(self, model: _Model, name: str) -> None:
        if self._config.fairness == "tokens" and not any(name in lanes.tenants for lanes in model.lanes):
            model.counters.enter(name, (other for lanes in model.lanes for other in lanes.tenants))

    def _line_up(self, model: _Model, waiter: Waiter) -> None:
        level = waiter.level
        model.lanes[level].add(waiter)
        after = self._bands[level].promote_after
        if level > 0 and after is not None:
            self._promotions[level].append((waiter.entered + after, waiter.offer.ticket))

    def _set_deadline(self, waiter: Waiter, now: float) -> None:
        if waiter.is_loading:
            wait: float | None = waiter.offer.wait if waiter.offer.wait is not None else self._config.load_wait
        else:
            wait = self._bands[self._level(waiter.offer)].queue_timeout
        if wait is None:
            waiter.deadline = None
            return
        waiter.deadline = now + wait
        self._deadlines.setdefault(wait, deque()).append((waiter.deadline, waiter.offer.ticket))

    def _too_late(self, waiter: Waiter) -> Refused:
        model = self._models[waiter.offer.model]
        if waiter.is_loading:
            text = f"cannot serve {model.name} yet: no engine of it came up while this request waited; try again"
            return Refused("load-timeout", RETRY_UNKNOWN, text)
        text = f"cannot serve {model.name} now: no slot became free while this request waited; try again"
        return Refused("queue-timeout", self._retry_after(model), text)

    def _take_out(self, waiter: Waiter) -> None:
        """Out of the queue, whatever comes of it."""
        offer = waiter.offer
        model = self._models[offer.model]
        model.lanes[waiter.level].remove(waiter)
        self._left_queue(model, waiter)
        if model.is_idle:
            del self._models[offer.model]

    def _left_queue(self, model: _Model, waiter: Waiter) -> None:
        offer = waiter.offer
        del self._waiters[offer.ticket]
        model.waiting -= 1
        self._tenant(offer.tenant).waiting -= 1
        self._band_waiting[self._level(offer)] -= 1

    def _refuse(self, waiters: Iterable[Waiter], refused: Refused) -> Outcomes:
        outcomes: Outcomes = []
        for waiter in waiters:
            self._take_out(waiter)
            self._tenant(waiter.offer.tenant).refused += 1
            outcomes.append((waiter.offer.ticket, refused))
        return outcomes

    # -- inside: who is next -----------------------------------------------------------------------------

    def _dispatch_all(self, now: float) -> Outcomes:
        """Every model in turn: the one that comes first now comes last the next time."""
        outcomes: Outcomes = []
        for name in tuple(self._models):
            model = self._models[name]
            if model.waiting:
                granted = self._dispatch(model, now)
                outcomes += granted
                if granted:
                    self._models.move_to_end(name)
        return outcomes

    def _dispatch(self, model: _Model, now: float) -> Outcomes:
        """Let in whoever may go."""
        outcomes: Outcomes = []
        while model.waiting:
            free = model.free()
            if not free:
                break
            waiter = self._next(model)
            if waiter is None:
                break
            offer = waiter.offer
            self._left_queue(model, waiter)
            outcomes.append((offer.ticket, self._grant(model, offer, self._level(offer), free)))
        return outcomes

    def _next(self, model: _Model) -> Waiter | None:
        """Take the one whose turn it is out of the lanes; None when nobody may go."""
        by_tokens = self._config.fairness == "tokens"
        for lanes in model.lanes:
            if not lanes.size:
                continue
            tenants: Iterable[str] = tuple(lanes.tenants)
            if by_tokens:
                tenants = sorted(tenants, key=model.counters.__getitem__)
            for name in tenants:
                tenant = self._tenant(name)
                if tenant.is_full:
                    lanes.park(name)
                    tenant.parked_at.add(model.name)
                elif self._has_room(model, self._level(lanes.head(name).offer)):
                    return lanes.take(name)
        return None

    def _grant(self, model: _Model, offer: Offer, level: int, free: list[Load]) -> Granted:
        load = free[0] if len(free) == 1 else free[self._chooser.choose(model.name, free, offer.hint)]
        tenant = self._tenant(offer.tenant)
        load.inflight += 1
        model.running[level] += 1
        self._band_running[level] += 1
        tenant.running += 1
        tenant.granted += 1
        charged = float(cost(offer.estimate, 0))
        model.counters.charge(offer.tenant, charged, tenant.weight)
        model.counters.admitted(offer.tenant)
        self._running[offer.ticket] = _Running(offer, load, charged)
        return Granted(offer.ticket, load.key)
