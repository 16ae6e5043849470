"""Who is next: tenants take turns inside a band, and each tenant's requests go in the order in which they came.

A tenant whose lane runs dry leaves the rotation and comes back at its end. One that may have nothing more at the moment
is parked, so that nobody steps over it again and again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from llmgw.gateway.admission.messages import Offer


class Waiter:
    """A request in a queue."""

    __slots__ = ("deadline", "entered", "is_loading", "level", "offer")

    def __init__(self, offer: Offer, level: int, entered: float) -> None:
        self.offer = offer
        self.level = level
        """The band in which it stands: its own, or a higher one to which it was promoted. 0 is the highest."""
        self.entered = entered
        """When it came to that band."""
        self.deadline: float | None = None
        self.is_loading = False
        """It waits for an engine, not for a slot."""


class Lane:
    """The requests of one tenant in one band, oldest first."""

    __slots__ = ("credit", "tenant", "waiters")

    def __init__(self, tenant: str, credit: int) -> None:
        self.tenant = tenant
        self.credit = credit
        """Requests that it may still send in this turn."""
        self.waiters: OrderedDict[int, Waiter] = OrderedDict()

    @property
    def head(self) -> Waiter:
        return next(iter(self.waiters.values()))


Weight = Callable[[str], int]


class Lanes:
    """One band of one model. Adding, taking and removing cost the same however many wait."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._rotation: OrderedDict[str, Lane] = OrderedDict()
        self._parked: dict[str, Lane] = {}
        self.size = 0

    def __iter__(self) -> Iterator[Waiter]:
        for lanes in (self._rotation, self._parked):
            for lane in lanes.values():
                yield from lane.waiters.values()

    @property
    def tenants(self) -> Iterator[str]:
        """Whose turn it may be, the next one first; parked ones are left out."""
        return iter(self._rotation)

    def add(self, waiter: Waiter) -> None:
        tenant = waiter.offer.tenant
        lane = self._rotation.get(tenant) or self._parked.get(tenant)
        if lane is None:
            lane = self._rotation[tenant] = Lane(tenant, self._weight(tenant))
        lane.waiters[waiter.offer.ticket] = waiter
        self.size += 1

    def head(self, tenant: str) -> Waiter:
        return self._rotation[tenant].head

    def take(self, tenant: str) -> Waiter:
        """The oldest request of a tenant, whose turn ends when its weight is used up."""
        lane = self._rotation[tenant]
        _, waiter = lane.waiters.popitem(last=False)
        self.size -= 1
        lane.credit -= 1
        if not lane.waiters:
            del self._rotation[tenant]
        elif lane.credit <= 0:
            lane.credit = self._weight(tenant)
            self._rotation.move_to_end(tenant)
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """It has left, was promoted, or may wait no longer."""
        tenant = waiter.offer.tenant
        for lanes in (self._rotation, self._parked):
            lane = lanes.get(tenant)
            if lane is not None and lane.waiters.pop(waiter.offer.ticket, None) is not None:
                self.size -= 1
                if not lane.waiters:
                    del lanes[tenant]
                return

    def park(self, tenant: str) -> None:
        """It runs as much as it may: out of the rotation until `unpark`."""
        self._parked[tenant] = self._rotation.pop(tenant)

    def unpark(self, tenant: str) -> None:
        lane = self._parked.pop(tenant, None)
        if lane is not None:
            self._rotation[tenant] = lane

    def unpark_all(self) -> None:
        self._rotation.update(self._parked)
        self._parked.clear()
