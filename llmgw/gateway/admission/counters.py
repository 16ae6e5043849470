"""Fairness by tokens: virtual counters, one for each tenant of a model, and the lowest goes first.

After Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): what a request costs is counted when it is
let in and corrected when it has ended, and a tenant that comes back is lifted to the lowest of those who wait, so that
nobody saves up a claim by staying away.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Set

OUTPUT_COST = 2
"""A token that is generated keeps an engine busy for longer than one that is read; the paper's figure."""

STALE = 16
"""So many outdated entries are always borne before they are swept out."""


def cost(prompt: int, completion: int) -> int:
    return prompt + OUTPUT_COST * completion


class Lowest:
    """Which of some names has the lowest number, where numbers mostly grow; among equals, who came first.

    A heap of what the numbers were: an entry whose number has grown is put right when it comes to the top.
    """

    __slots__ = ("_heap", "_marks", "_turn", "_value")

    def __init__(self, value: Callable[[str], float]) -> None:
        self._value = value
        self._heap: list[tuple[float, int, str]] = []
        self._marks: dict[str, int] = {}
        """By name, what its entries carry that are still good."""
        self._turn = 0

    def add(self, name: str) -> None:
        """A new name, or one that goes behind its equals."""
        self._turn += 1
        self._marks[name] = self._turn
        self._push(name)

    def discard(self, name: str) -> None:
        self._marks.pop(name, None)

    def fell(self, name: str) -> None:
        """Its number is lower than it was."""
        if name in self._marks:
            self._push(name)

    def lowest(self) -> str | None:
        heap = self._heap
        while heap:
            value, mark, name = heap[0]
            if self._marks.get(name) != mark:
                heapq.heappop(heap)
            elif (grown := self._value(name)) > value:
                heapq.heapreplace(heap, (grown, mark, name))
            else:
                return name
        return None

    def _push(self, name: str) -> None:
        if len(self._heap) > 2 * len(self._marks) + STALE:
            self._heap = [(self._value(each), mark, each) for each, mark in self._marks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (self._value(name), self._marks[name], name))


class TokenCounters:
    """Tokens that each tenant had of one model, divided by its weight."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._lowest = Lowest(self.__getitem__)
        self._floor = 0.0
        """Where those begin who come while nobody waits: the counter of who was let in last."""

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def without_waiting(self) -> TokenCounters:
        """The same counters, where nobody waits yet."""
        other = TokenCounters()
        other._counters = dict(self._counters)
        other._floor = self._floor
        return other

    def enter(self, tenant: str) -> None:
        """One of its requests begins to wait."""
        waiting = self._waiting.get(tenant, 0)
        if not waiting:
            self._lift(tenant)
            self._lowest.add(tenant)
        self._waiting[tenant] = waiting + 1

    def exit(self, tenant: str) -> None:
        """One of its requests waits no longer, and has not been charged yet."""
        waiting = self._waiting[tenant] - 1
        if waiting:
            self._waiting[tenant] = waiting
            return
        del self._waiting[tenant]
        self._lowest.discard(tenant)
        self._floor = max(self._floor, self[tenant])

    def passed(self, tenant: str) -> None:
        """One of its requests was let in without waiting, and has not been charged yet."""
        if tenant not in self._waiting:
            self._lift(tenant)
            self._floor = max(self._floor, self[tenant])

    def charge(self, tenant: str, tokens: float) -> None:
        """Divided by its weight already; negative where the estimate was too high."""
        self._counters[tenant] = self[tenant] + tokens
        if tokens < 0:
            self._lowest.fell(tenant)

    def keep(self, tenants: Set[str]) -> None:
        """Forget others, unless they wait."""
        wanted = tenants | self._waiting.keys()
        self._counters = {tenant: value for tenant, value in self._counters.items() if tenant in wanted}

    def _lift(self, tenant: str) -> None:
        lowest = self._lowest.lowest()
        floor = self._floor if lowest is None else self[lowest]
        self._counters[tenant] = max(self[tenant], floor)
