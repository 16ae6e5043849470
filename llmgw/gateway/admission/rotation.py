"""Who is next of the tenants of one band: each tenant has a lane, in which its requests go in the order of coming.

A lane that runs dry leaves the rotation, and its tenant comes back at the end. The lane of a tenant that runs as much
as it may stands aside, so that nobody steps over it again and again; its turn is kept for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from llmgw.gateway.admission.counters import Lowest, TokenCounters
from llmgw.gateway.admission.messages import Offer
from llmgw.gateway.admission.tenants import Tenant


class Waiter:
    """A request in a queue."""

    __slots__ = ("home", "is_loading", "level", "offer", "patience", "promotion", "tenant")

    def __init__(self, offer: Offer, tenant: Tenant, home: int) -> None:
        self.offer = offer
        self.tenant = tenant
        self.home = home
        """The level of its own band, whose limits count for it. 0 is the highest."""
        self.level = home
        """Where it stands: at home, or higher if it was promoted."""
        self.is_loading = False
        """It waits for an engine, not for a slot."""
        self.patience: float | None = None
        """Seconds for which its time-out was set; None: it has none."""
        self.promotion: float | None = None
        """The same for its promotion."""


class Lane:
    """The requests of one tenant, oldest first."""

    __slots__ = ("is_parked", "left", "tenant", "waiters")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.waiters: OrderedDict[int, Waiter] = OrderedDict()
        self.left = tenant.turns
        """Requests that it may still send in this turn."""
        self.is_parked = False


class Rotation:
    """Tenants by turns; in each turn as many requests as the tenant's weight says. Everything costs the same however
    many wait.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._order: OrderedDict[str, Lane] = OrderedDict()
        """Those that do not stand aside, the next one first."""
        self.size = 0

    def add(self, waiter: Waiter) -> None:
        tenant = waiter.tenant
        lane = self._lanes.get(tenant.name)
        if lane is None:
            lane = self._lanes[tenant.name] = Lane(tenant)
            self._join(lane)
        lane.waiters[waiter.offer.ticket] = waiter
        self.size += 1

    def take(self) -> Waiter | None:
        """The one whose turn it is; None where every tenant runs as much as it may."""
        while (lane := self._first()) is not None:
            tenant = lane.tenant
            if tenant.is_full:
                lane.is_parked = True
                self._quit(lane)
                tenant.parked_in.add(self)
                continue
            _, waiter = lane.waiters.popitem(last=False)
            self.size -= 1
            if lane.waiters:
                self._served(lane)
            else:
                self._quit(lane)
                del self._lanes[tenant.name]
            return waiter
        return None

    def remove(self, waiter: Waiter) -> None:
        """It has left, was promoted, or may wait no longer."""
        lane = self._lanes[waiter.tenant.name]
        del lane.waiters[waiter.offer.ticket]
        self.size -= 1
        if not lane.waiters:
            del self._lanes[waiter.tenant.name]
            if not lane.is_parked:
                self._quit(lane)

    def unpark(self, tenant: str) -> None:
        """It may run again."""
        lane = self._lanes.get(tenant)
        if lane is not None and lane.is_parked:
            lane.is_parked = False
            self._rejoin(lane)

    def fell(self, tenant: str) -> None:
        """The tenant has had fewer tokens than was thought. Whoever takes turns does not care."""

    def waiting_of(self, tenant: str) -> int:
        lane = self._lanes.get(tenant)
        return len(lane.waiters) if lane is not None else 0

    def ahead(self, waiter: Waiter) -> int:
        """How many go before it, if nobody comes or leaves and no tenant runs as much as it may."""
        own = self._lanes[waiter.tenant.name]
        index = _index(own, waiter)
        turns, per_turn = own.tenant.turns, index - own.left
        turn = 0 if per_turn < 0 else 1 + per_turn // turns
        before, is_before = index, True
        for lane in (*self._order.values(), *(lane for lane in self._lanes.values() if lane.is_parked)):
            if lane is own:
                is_before = False
                continue
            whole = turn if is_before else turn - 1
            if whole >= 0:
                before += min(len(lane.waiters), lane.left + whole * lane.tenant.turns)
        return before

    # -- the order of the lanes --------------------------------------------------------------------------

    def _first(self) -> Lane | None:
        return next(iter(self._order.values()), None)

    def _join(self, lane: Lane) -> None:
        self._order[lane.tenant.name] = lane

    def _rejoin(self, lane: Lane) -> None:
        """Its turn had come when it stepped aside."""
        self._join(lane)
        self._order.move_to_end(lane.tenant.name, last=False)

    def _served(self, lane: Lane) -> None:
        lane.left -= 1
        if lane.left <= 0:
            lane.left = lane.tenant.turns
            self._order.move_to_end(lane.tenant.name)

    def _quit(self, lane: Lane) -> None:
        del self._order[lane.tenant.name]


class FewestTokens(Rotation):
    """The tenant that had the fewest tokens, by its weight, goes first. Costs the logarithm of the tenants."""

    def __init__(self, counters: TokenCounters) -> None:
        super().__init__()
        self._lowest = Lowest(counters.__getitem__)

    def fell(self, tenant: str) -> None:
        self._lowest.fell(tenant)

    def ahead(self, waiter: Waiter) -> int:
        """As if all requests were of one size: what they will cost nobody knows."""
        index = _index(self._lanes[waiter.tenant.name], waiter)
        others = (lane for lane in self._lanes.values() if lane.tenant is not waiter.tenant)
        return index + sum(min(len(lane.waiters), index) for lane in others)

    def _first(self) -> Lane | None:
        name = self._lowest.lowest()
        return self._lanes[name] if name is not None else None

    def _join(self, lane: Lane) -> None:
        self._lowest.add(lane.tenant.name)

    def _rejoin(self, lane: Lane) -> None:
        self._join(lane)

    def _served(self, lane: Lane) -> None:
        # Behind its equals; what it was given is charged a moment later.
        self._join(lane)

    def _quit(self, lane: Lane) -> None:
        self._lowest.discard(lane.tenant.name)


def _index(lane: Lane, waiter: Waiter) -> int:
    return next(index for index, ticket in enumerate(lane.waiters) if ticket == waiter.offer.ticket)


def rotations(counters: TokenCounters | None) -> Iterator[Rotation]:
    """New ones without end, by tokens where there are counters."""
    while True:
        yield Rotation() if counters is None else FewestTokens(counters)
