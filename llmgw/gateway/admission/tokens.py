"""Fairness by tokens: virtual counters, one for each tenant of a model, and the lowest goes first.

After Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): what a request costs is counted when it is
admitted and corrected when it has ended, and a tenant that comes back is lifted to the lowest of those who were there
all the time, so that nobody saves up a claim by staying away.
"""

from __future__ import annotations

from collections.abc import Iterable

OUTPUT_COST = 2
"""A token that is generated keeps an engine busy for longer than one that is read; the paper's figure."""


def cost(prompt: int, completion: int) -> int:
    return prompt + OUTPUT_COST * completion


class TokenCounters:
    """Tokens that each tenant had, divided by its weight."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._last = 0.0
        """The counter of the tenant that was admitted last: the floor where nobody waits."""

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def enter(self, tenant: str, active: Iterable[str]) -> None:
        """A tenant that has nothing waiting begins to wait, beside those that do."""
        others = [self[other] for other in active if other != tenant]
        floor = min(others) if others else self._last
        self._counters[tenant] = max(self[tenant], floor)

    def charge(self, tenant: str, tokens: float, weight: int) -> None:
        """Also negative, where the estimate was too high."""
        self._counters[tenant] = self[tenant] + tokens / weight

    def admitted(self, tenant: str) -> None:
        self._last = max(self._last, self[tenant])

    def keep(self, tenants: Iterable[str]) -> None:
        """Forget the others: they are not in the file any more."""
        wanted = set(tenants)
        self._counters = {tenant: value for tenant, value in self._counters.items() if tenant in wanted}
