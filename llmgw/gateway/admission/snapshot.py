"""The queue as others see it: for status, metrics and `llmgw top`."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from llmgw.gateway.routing.table import Key


@frozen
class Queued:
    """One band of one model."""

    model: str
    band: str
    waiting: int
    oldest: float
    """Seconds that the oldest of them has waited; 0 when none waits."""
    running: int


@frozen
class TenantUse:
    name: str
    waiting: int
    running: int
    granted: int
    """Since the gateway began, like `refused`."""
    refused: int


@frozen
class EndpointLoad:
    model: str
    key: Key
    running: int
    slots: int


@frozen
class AdmissionSnapshot:
    queues: tuple[Queued, ...]
    """Where somebody waits or runs."""
    tenants: tuple[TenantUse, ...]
    endpoints: tuple[EndpointLoad, ...]
    running: int
    limit: int | None
    """Of the whole gateway; None: no limit."""

    def as_json(self) -> dict[str, Any]:
        return {
            "running": self.running,
            "max_inflight": self.limit,
            "queues": [
                {
                    "model": row.model,
                    "band": row.band,
                    "waiting": row.waiting,
                    "oldest_seconds": round(row.oldest, 3),
                    "running": row.running,
                }
                for row in self.queues
            ],
            "tenants": [
                {
                    "name": row.name,
                    "waiting": row.waiting,
                    "running": row.running,
                    "granted": row.granted,
                    "refused": row.refused,
                }
                for row in self.tenants
            ],
            "endpoints": [
                {"model": row.model, "shard": str(row.key[0]), "running": row.running, "slots": row.slots}
                for row in self.endpoints
            ],
        }
