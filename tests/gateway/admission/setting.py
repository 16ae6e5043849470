"""A gateway's rules in a few words, and engines for them, for the tests of admission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from llmgw.config.model import BandConfig, GatewayConfig, TenantConfig
from llmgw.domain.shard import ShardId
from llmgw.gateway.admission.core import Admission
from llmgw.gateway.admission.messages import Granted, Offer, Outcome
from llmgw.gateway.routing.policies import Chooser
from llmgw.gateway.routing.table import Key


def band(name: str, **keys: Any) -> BandConfig:
    """As the file's defaults make one."""
    row = {"default": False, "max_inflight": None, "reserved": 0, "queue_limit": 1000, "queue_timeout": 60.0}
    return BandConfig(**{"name": name, **row, "promote_after": 15.0, **keys})


DEFAULT_BANDS = (band("interactive"), band("normal", default=True), band("batch"))


def tenant(name: str, **keys: Any) -> TenantConfig:
    row: dict[str, Any] = {"keys": (), "bands": ("normal",), "weight": 1, "max_inflight": None, "queue_limit": None}
    rates = {"models": None, "requests_per_minute": None, "tokens_per_minute": None}
    return TenantConfig(**{"name": name, **row, **rates, **keys})


def rules(
    *tenants: TenantConfig, bands: Sequence[BandConfig] = DEFAULT_BANDS, fairness: str = "requests", **keys: Any
) -> GatewayConfig:
    """A [gateway] of which admission reads only what it is about."""
    others = dict.fromkeys(field.name for field in attrs.fields(GatewayConfig))
    own = {"tenants": tenants, "bands": tuple(bands), "fairness": fairness, "load_wait": 600.0}
    return GatewayConfig(**{**others, "allow_anonymous": True, **own, **keys})


def key(name: str, replica: int = 0, generation: int = 1) -> Key:
    return (ShardId(name, replica), generation)


def first_of_equals() -> float:
    return 0.0


def admission(config: GatewayConfig, slots: Mapping[str, int] | None = None) -> Admission:
    """A queue at time 0, with one endpoint for each model that is named, and so many slots."""
    subject = Admission(config, Chooser("least_load", first_of_equals), 0.0)
    for model, count in (slots or {}).items():
        subject.set_endpoints(model, {key(model): count}, 0.0)
    return subject


class Tickets:
    """Offers to one queue, with a number for each."""

    def __init__(self, subject: Admission) -> None:
        self.subject = subject
        self.last = 0
        self.offers: dict[int, Offer] = {}
        self.keys: dict[int, Key] = {}
        """Where those run that could go at once."""

    def offer(
        self, tenant: str = "a", band: str = "normal", *, model: str = "qwen", now: float = 0.0, **keys: Any
    ) -> int:
        """The ticket of one more that is let in or waits."""
        ticket, outcome = self.ask(tenant, band, model=model, now=now, **keys)
        assert outcome is None or isinstance(outcome, Granted)
        return ticket

    def ask(
        self, tenant: str = "a", band: str = "normal", *, model: str = "qwen", now: float = 0.0, **keys: Any
    ) -> tuple[int, Outcome | None]:
        self.last += 1
        offer = self.offers[self.last] = Offer(self.last, model, tenant, band, arrived=now, **keys)
        outcome = self.subject.offer(offer, now)
        if isinstance(outcome, Granted):
            self.keys[self.last] = outcome.key
        return self.last, outcome

    def finish(
        self, ticket: int, prompt: int | None = None, completion: int | None = None, now: float = 0.0
    ) -> list[int]:
        """Who is let in because it has ended."""
        outcomes = self.subject.finish(ticket, prompt, completion, now)
        assert all(isinstance(outcome, Granted) for _, outcome in outcomes)
        return [other for other, _ in outcomes]

    def served(self, ticket: int, count: int, now: float = 0.0) -> list[int]:
        """Whose turn comes, one after another, where one runs at a time and `ticket` runs now."""
        order: list[int] = []
        while len(order) < count and (granted := self.finish(ticket, now=now)):
            (ticket,) = granted
            order.append(ticket)
        return order
