"""What is known of one tenant over all models: its limits from the file, and what it has here now."""

from __future__ import annotations

from typing import Protocol

from llmgw.config.model import TenantConfig
from llmgw.gateway.admission.rates import Bucket


class Parking(Protocol):
    """Where the lane of a tenant stands aside, see `rotation`."""

    def unpark(self, tenant: str) -> None: ...


class Tenant:
    """One tenant, with or without a row in the file."""

    __slots__ = (
        "_requests",
        "_tokens",
        "granted",
        "has_rates",
        "is_configured",
        "limit",
        "name",
        "parked_in",
        "queue_limit",
        "refused",
        "running",
        "turns",
        "waiting",
        "weight",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_configured = False
        self.weight = 1
        self.turns = 1
        """Requests that it may send one after another when its turn has come: its weight, divided by what all weights
        have in common."""
        self.limit: int | None = None
        """Running requests at once; None: no limit, also below."""
        self.queue_limit: int | None = None
        """Waiting requests in one band of one model."""
        self.running = 0
        self.waiting = 0
        self.granted = 0
        """Since the gateway began, like `refused`."""
        self.refused = 0
        self.has_rates = False
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.parked_in: set[Parking] = set()
        """Where its lane stands aside because it runs as much as it may, or stood before it ran dry."""

    def adopt(self, config: TenantConfig | None, common: int, now: float) -> None:
        """Its row in the file, None where it has none. `common` divides all weights."""
        self.is_configured = config is not None
        self.weight = config.weight if config is not None else 1
        self.turns = max(1, self.weight // common)
        self.limit = config.max_inflight if config is not None else None
        self.queue_limit = config.queue_limit if config is not None else None
        self._requests = _bucket(self._requests, config.requests_per_minute if config is not None else None, now)
        self._tokens = _bucket(self._tokens, config.tokens_per_minute if config is not None else None, now)
        self.has_rates = self._requests is not None or self._tokens is not None

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.running >= self.limit

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.waiting)

    def unpark(self) -> None:
        """Into the rotations again wherever it stood aside."""
        for parking in self.parked_in:
            parking.unpark(self.name)
        self.parked_in.clear()

    # -- rates -------------------------------------------------------------------------------------------

    def exhausted(self, now: float) -> tuple[float, str] | None:
        """Seconds until its rates let one more in, and the key of the rate; None: now."""
        requests = self._requests.pause(now) if self._requests is not None else 0.0
        tokens = self._tokens.pause(now) if self._tokens is not None else 0.0
        if requests <= 0 and tokens <= 0:
            return None
        return (requests, "requests_per_minute") if requests >= tokens else (tokens, "tokens_per_minute")

    def spend(self, requests: int, tokens: int, now: float) -> None:
        """Negative numbers give back."""
        if self._requests is not None and requests:
            self._requests.take(requests, now)
        if self._tokens is not None and tokens:
            self._tokens.take(tokens, now)


def _bucket(known: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if known is None:
        return Bucket(per_minute, now)
    known.change(per_minute, now)
    return known
