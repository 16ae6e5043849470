"""Who is let in, who waits, who is refused: messages and the time in, outcomes out. Pure.

For each model: bands by strict priority, inside a band tenants by turns (or by the fewest tokens), each tenant's
requests in their order. Nobody starves: who has waited for `promote_after` is served like one of the next higher band.

What holds between any two messages: nobody waits who could run. So a request that meets no limit may go at once,
whoever waits (they wait for something else), and only what makes room has to look at the queue.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from llmgw.config.model import GatewayConfig
from llmgw.gateway.admission.bands import Bands
from llmgw.gateway.admission.counters import cost
from llmgw.gateway.admission.messages import Granted, Offer, Outcome, Refused
from llmgw.gateway.admission.models import Model, Running
from llmgw.gateway.admission.pace import RETRY_MIN, RETRY_UNKNOWN
from llmgw.gateway.admission.rotation import Waiter
from llmgw.gateway.admission.snapshot import AdmissionSnapshot, EndpointLoad, Queued, TenantUse
from llmgw.gateway.admission.tenants import Tenant
from llmgw.gateway.admission.timers import Timers
from llmgw.gateway.routing.policies import Chooser
from llmgw.gateway.routing.table import Key

__all__ = ["Admission", "Granted", "Offer", "Outcome", "Outcomes", "Refused"]

Outcomes = list[tuple[int, Outcome]]
"""By ticket; each ticket that waits comes out exactly once, unless it leaves."""


class Admission:
    """The queue. `now` is a monotonic clock's time in seconds and never goes back."""

    def __init__(self, config: GatewayConfig, chooser: Chooser, now: float) -> None:
        self._chooser = chooser
        self._models: OrderedDict[str, Model] = OrderedDict()
        self._tenants: dict[str, Tenant] = {}
        self._waiters: dict[int, Waiter] = {}
        self._running: dict[int, Running] = {}
        self._timeouts = Timers()
        self._promotions = Timers()
        self._closed: Refused | None = None
        """What those hear who cannot go at once, when nobody is to wait any more."""
        self._config = config
        self._bands = Bands(config)
        self._adopt_tenants(now)

    # -- configuration -----------------------------------------------------------------------------------

    def adopt(self, config: GatewayConfig, now: float) -> Outcomes:
        """Other bands, tenants and limits. Who waits goes on waiting, at most as long as before; what is in a band that
        is gone is in the default one now.
        """
        before, self._config = self._config, config
        self._adopt_tenants(now)
        if (config.bands, config.max_inflight, config.fairness) != (before.bands, before.max_inflight, before.fairness):
            self._rearrange(now)
        return self._dispatch_everywhere(now)

    def _adopt_tenants(self, now: float) -> None:
        rows = {row.name: row for row in self._config.tenants}
        # Whoever has no row weighs 1.
        self._common = 1 if self._config.allow_anonymous else math.gcd(*(row.weight for row in rows.values())) or 1
        for name in [name for name, tenant in self._tenants.items() if tenant.is_idle and name not in rows]:
            del self._tenants[name]
        for name in rows:
            if name not in self._tenants:
                self._tenants[name] = Tenant(name)
        for name, tenant in self._tenants.items():
            tenant.adopt(rows.get(name), self._common, now)
            tenant.unpark()
        for model in self._models.values():
            if model.counters is not None:
                model.counters.keep(self._tenants.keys())

    def _rearrange(self, now: float) -> None:
        """Queues for other bands. Everyone stands in its own band again, in the order of coming."""
        self._bands = Bands(self._config)
        self._promotions = Timers()
        for model in self._models.values():
            model.arrange(self._bands, self._config.fairness == "tokens")
        for waiter in self._waiters.values():
            waiter.level = waiter.home = self._bands.level(waiter.offer.band)
            waiter.promotion = None
            model = self._models[waiter.offer.model]
            if model.counters is not None:
                model.counters.enter(waiter.tenant.name)
            model.queue.add(waiter)
            self._set_promotion(waiter, now)
        for running in self._running.values():
            running.home = self._bands.level(running.offer.band)
            self._bands.count(running.home, 1)
            self._models[running.offer.model].running[running.home] += 1

    def _new_tenant(self, name: str, now: float) -> Tenant:
        tenant = self._tenants[name] = Tenant(name)
        tenant.adopt(None, self._common, now)
        return tenant

    def _new_model(self, name: str) -> Model:
        model = self._models[name] = Model(name, self._bands, self._config.fairness == "tokens")
        return model

    def _forget_if_idle(self, model: Model) -> None:
        if model.is_idle:
            self._models.pop(model.name, None)

    # -- requests ----------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now: float) -> Outcome | None:
        """One more request. None: it waits. Nobody else is concerned."""
        tenant = self._tenants.get(offer.tenant) or self._new_tenant(offer.tenant, now)
        if tenant.has_rates and (exhausted := tenant.exhausted(now)) is not None:
            return self._out_of_rate(tenant, *exhausted)
        model = self._models.get(offer.model) or self._new_model(offer.model)
        home = self._bands.level(offer.band)
        if not tenant.is_full and model.is_open(home):
            if tenant.has_rates:
                tenant.spend(1, offer.estimate, now)
            if model.counters is not None:
                model.counters.passed(offer.tenant)
            return self._grant(model, tenant, offer, home, now)
        refused = self._closed or self._queue_is_full(model, tenant, home)
        if refused is not None:
            tenant.refused += 1
            self._forget_if_idle(model)
            return refused
        if tenant.has_rates:
            tenant.spend(1, offer.estimate, now)
        self._line_up(model, Waiter(offer, tenant, home), now)
        return None

    def leave(self, ticket: int, now: float) -> None:
        """It does not want to wait any more; nothing if it does not wait. Who waits holds nothing that others need."""
        waiter = self._waiters.get(ticket)
        if waiter is not None:
            self._take_out(waiter, now)

    def finish(self, ticket: int, prompt: int | None, completion: int | None, now: float) -> Outcomes:
        """It has ended; tokens as the engine counted them, None where nobody knows. Nothing if it does not run."""
        running = self._running.pop(ticket, None)
        if running is None:
            return []
        offer, tenant, model = running.offer, running.tenant, self._models[running.offer.model]
        model.pace.ended(now - running.since)
        prompt = offer.estimate if prompt is None else prompt
        completion = completion or 0
        if model.counters is not None:
            model.charge(tenant, cost(prompt, completion) - cost(offer.estimate, 0))
        if tenant.has_rates:
            tenant.spend(0, prompt + completion - offer.estimate, now)
        return self._ended(model, running, now)

    def give_back(self, ticket: int, now: float) -> Outcomes:
        """It was let in and does not want to go any more: as if it had never been there."""
        running = self._running.pop(ticket, None)
        if running is None:
            return []
        offer, tenant, model = running.offer, running.tenant, self._models[running.offer.model]
        tenant.granted -= 1
        if model.counters is not None:
            model.charge(tenant, -cost(offer.estimate, 0))
        if tenant.has_rates:
            tenant.spend(-1, -offer.estimate, now)
        return self._ended(model, running, now)

    def retry(self, ticket: int, avoid: Key) -> Outcome:
        """Another endpoint for one that was let in and whose engine cannot have begun. Where none is free it keeps the
        one that it has. Raises KeyError for a ticket that does not run.
        """
        running = self._running[ticket]
        model = self._models[running.offer.model]
        load = model.places.take_another(self._chooser, running.offer.hint, avoid)
        if load is None:
            text = f"cannot ask another engine of {model.name}: none is free; try again"
            return Refused("no-engine", RETRY_UNKNOWN, text)
        model.places.give_back(running.load)
        running.load = load
        return Granted(ticket, load.key)

    # -- engines -----------------------------------------------------------------------------------------

    def set_endpoints(self, name: str, slots: Mapping[Key, int], now: float) -> Outcomes:
        """The endpoints that a model has now, with their slots. What runs on others may end there."""
        model = self._models.get(name) or self._new_model(name)
        was_open = model.places.is_open
        model.places.set(slots)
        if was_open != model.places.is_open:
            # Waiting for an engine and waiting for a slot have limits of their own; each begins anew.
            for waiter in model.queue:
                self._stop_timers(waiter)
                waiter.is_loading = was_open
                self._start_timers(waiter, now)
        outcomes = self._dispatch(model, now)
        self._forget_if_idle(model)
        return outcomes

    def refuse_model(self, name: str, refused: Refused, now: float) -> Outcomes:
        """Nobody waits for this model any more."""
        model = self._models.get(name)
        return self._refuse(tuple(model.queue), refused, now) if model is not None else []

    def refuse_all(self, refused: Refused, now: float) -> Outcomes:
        """Nobody waits any more, from now on: who cannot go at once is refused like those who wait now."""
        self._closed = refused
        return self._refuse(tuple(self._waiters.values()), refused, now)

    # -- time --------------------------------------------------------------------------------------------

    def tick(self, now: float) -> Outcomes:
        """What time alone changes: who has waited too long is refused, who has waited long is promoted."""
        outcomes: Outcomes = []
        while (ticket := self._timeouts.pop_due(now)) is not None:
            waiter = self._waiters[ticket]
            outcomes += self._refuse((waiter,), self._too_late(waiter), now)
        while (ticket := self._promotions.pop_due(now)) is not None:
            waiter = self._waiters[ticket]
            self._models[waiter.offer.model].queue.promote(waiter)
            self._set_promotion(waiter, now)
        return outcomes

    def next_event(self) -> float | None:
        """When `tick` has something to do; None: never, as things stand."""
        return min((due for due in (self._timeouts.next, self._promotions.next) if due is not None), default=None)

    # -- seeing it ---------------------------------------------------------------------------------------

    def position(self, ticket: int) -> int | None:
        """Its place in the queue of its model as things stand, from 1; None when it does not wait."""
        waiter = self._waiters.get(ticket)
        return self._models[waiter.offer.model].queue.position(waiter) if waiter is not None else None

    def snapshot(self, now: float) -> AdmissionSnapshot:
        return AdmissionSnapshot(
            queues=tuple(
                _queued(model, level, band.name, now)
                for model in self._models.values()
                for level, band in enumerate(self._bands.rows)
                if model.running[level] or model.queue.waiting(level)
            ),
            tenants=tuple(
                TenantUse(name, tenant.waiting, tenant.running, tenant.granted, tenant.refused)
                for name, tenant in self._tenants.items()
            ),
            endpoints=tuple(
                EndpointLoad(model.name, load.key, load.inflight, load.slots)
                for model in self._models.values()
                for load in model.places.loads
            ),
            running=len(self._running),
            limit=self._config.max_inflight,
        )

    def waiting(self) -> dict[tuple[str, str, str], int]:
        """How many wait, by model, own band and tenant. It counts them one by one: for pages of metrics."""
        found: dict[tuple[str, str, str], int] = {}
        for waiter in self._waiters.values():
            key = (waiter.offer.model, self._bands.rows[waiter.home].name, waiter.tenant.name)
            found[key] = found.get(key, 0) + 1
        return found

    # -- inside: in and out ------------------------------------------------------------------------------

    def _line_up(self, model: Model, waiter: Waiter, now: float) -> None:
        waiter.is_loading = not model.places.is_open
        self._waiters[waiter.offer.ticket] = waiter
        waiter.tenant.waiting += 1
        if model.counters is not None:
            model.counters.enter(waiter.tenant.name)
        model.queue.add(waiter)
        self._start_timers(waiter, now)

    def _take_out(self, waiter: Waiter, now: float) -> None:
        """Out of the queue without having been let in."""
        model = self._models[waiter.offer.model]
        model.queue.remove(waiter)
        self._left_queue(model, waiter)
        if waiter.tenant.has_rates:
            waiter.tenant.spend(-1, -waiter.offer.estimate, now)
        self._forget_if_idle(model)

    def _left_queue(self, model: Model, waiter: Waiter) -> None:
        del self._waiters[waiter.offer.ticket]
        waiter.tenant.waiting -= 1
        if model.counters is not None:
            model.counters.exit(waiter.tenant.name)
        self._stop_timers(waiter)

    def _grant(self, model: Model, tenant: Tenant, offer: Offer, home: int, now: float) -> Granted:
        load = model.places.take(self._chooser, offer.hint)
        model.running[home] += 1
        self._bands.count(home, 1)
        tenant.running += 1
        tenant.granted += 1
        if model.counters is not None:
            model.charge(tenant, cost(offer.estimate, 0))
        self._running[offer.ticket] = Running(offer, tenant, home, load, now)
        return Granted(offer.ticket, load.key)

    def _ended(self, model: Model, running: Running, now: float) -> Outcomes:
        """Give back all that it held, and let in who can go now."""
        home, tenant = running.home, running.tenant
        model.places.give_back(running.load)
        model.running[home] -= 1
        self._bands.count(home, -1)
        tenant.running -= 1
        if tenant.parked_in:
            tenant.unpark()
        outcomes: Outcomes = []
        if self._waiters:
            # Below its limit again, a tenant may run elsewhere too.
            if (tenant.limit is not None and tenant.waiting) or self._bands.frees_others(home):
                outcomes = self._dispatch_everywhere(now)
            else:
                outcomes = self._dispatch(model, now)
        if not model.places.slots:
            self._forget_if_idle(model)
        return outcomes

    # -- inside: time ------------------------------------------------------------------------------------

    def _start_timers(self, waiter: Waiter, now: float) -> None:
        """One who waits for an engine is not promoted: the others do not keep it from anything."""
        offer = waiter.offer
        if waiter.is_loading:
            waiter.patience = offer.wait if offer.wait is not None else self._config.load_wait
        else:
            waiter.patience = self._bands.rows[waiter.home].queue_timeout
            self._set_promotion(waiter, now)
        if waiter.patience is not None:
            self._timeouts.set(offer.ticket, waiter.patience, now)

    def _set_promotion(self, waiter: Waiter, now: float) -> None:
        after = self._bands.rows[waiter.level].promote_after
        waiter.promotion = None
        if waiter.level > 0 and after is not None and not waiter.is_loading:
            waiter.promotion = after
            self._promotions.set(waiter.offer.ticket, after, now)

    def _stop_timers(self, waiter: Waiter) -> None:
        if waiter.patience is not None:
            self._timeouts.cancel(waiter.offer.ticket, waiter.patience)
            waiter.patience = None
        if waiter.promotion is not None:
            self._promotions.cancel(waiter.offer.ticket, waiter.promotion)
            waiter.promotion = None

    # -- inside: refusals --------------------------------------------------------------------------------

    def _queue_is_full(self, model: Model, tenant: Tenant, home: int) -> Refused | None:
        """Why a request may not wait; None where it may."""
        band = self._bands.rows[home]
        waiting = model.queue.waiting(home)
        if waiting >= band.queue_limit:
            if not waiting and not model.places.is_open:
                text = f"cannot serve {model.name} now: no engine of it is ready, and band {band.name} has no queue"
                return Refused("no-engine", RETRY_UNKNOWN, f"{text}; try again")
            text = f"cannot queue one more request of band {band.name} for {model.name}: {waiting} wait, its limit"
            return Refused("queue-full", self._retry_after(model, home), f"{text}; try again")
        most = tenant.queue_limit
        if most is not None and (waiting := model.queue.waiting_of(tenant.name, home)) >= most:
            text = f"cannot queue one more request of tenant {tenant.name} for {model.name}: {waiting} wait, its limit"
            slots = model.places.slots if tenant.limit is None else min(tenant.limit, model.places.slots)
            return Refused(
                "queue-full", model.pace.retry_after(waiting, slots), f"{text}, which is its limit; try again"
            )
        return None

    def _out_of_rate(self, tenant: Tenant, pause: float, key: str) -> Refused:
        tenant.refused += 1
        text = f"cannot let in another request of tenant {tenant.name}: its {key} are used up; try again later"
        return Refused("rate", max(pause, RETRY_MIN), text)

    def _too_late(self, waiter: Waiter) -> Refused:
        model = self._models[waiter.offer.model]
        if waiter.is_loading:
            text = f"cannot serve {model.name} yet: no engine of it came up while this request waited; try again"
            return Refused("load-timeout", RETRY_UNKNOWN, text)
        text = f"cannot serve {model.name} now: no slot became free while this request waited; try again"
        return Refused("queue-timeout", self._retry_after(model, waiter.level), text)

    def _retry_after(self, model: Model, level: int) -> float:
        return model.pace.retry_after(model.queue.before(level), model.places.slots)

    def _refuse(self, waiters: Iterable[Waiter], refused: Refused, now: float) -> Outcomes:
        outcomes: Outcomes = []
        for waiter in waiters:
            self._take_out(waiter, now)
            waiter.tenant.refused += 1
            outcomes.append((waiter.offer.ticket, refused))
        return outcomes

    # -- inside: who is next -----------------------------------------------------------------------------

    def _dispatch(self, model: Model, now: float) -> Outcomes:
        """Let in whoever may go at one model."""
        outcomes: Outcomes = []
        while model.queue.size and model.places.free > 0:
            waiter = model.queue.take(model.is_open)
            if waiter is None:
                break
            outcomes.append(self._let_in(model, waiter, now))
        return outcomes

    def _dispatch_everywhere(self, now: float) -> Outcomes:
        """The same over all models, where they share a limit: the highest band first, and models by turns."""
        outcomes: Outcomes = []
        while (granted := self._let_in_one(now)) is not None:
            outcomes.append(granted)
        return outcomes

    def _let_in_one(self, now: float) -> tuple[int, Outcome] | None:
        waiting = [model for model in self._models.values() if model.queue.size and model.places.free > 0]
        for level in range(len(self._bands.rows)):
            for model in waiting:
                waiter = model.queue.take_at(level, model.is_open)
                if waiter is not None:
                    self._models.move_to_end(model.name)
                    return self._let_in(model, waiter, now)
        return None

    def _let_in(self, model: Model, waiter: Waiter, now: float) -> tuple[int, Outcome]:
        self._left_queue(model, waiter)
        return waiter.offer.ticket, self._grant(model, waiter.tenant, waiter.offer, waiter.home, now)


def _queued(model: Model, level: int, band: str, now: float) -> Queued:
    oldest = model.queue.oldest(level)
    waited = now - oldest.offer.arrived if oldest is not None else 0.0
    return Queued(model.name, band, model.queue.waiting(level), waited, model.running[level])
