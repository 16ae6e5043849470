"""What admission knows of one model: who waits, who runs, and where there is room."""

from __future__ import annotations

from llmgw.gateway.admission.bands import Bands
from llmgw.gateway.admission.counters import TokenCounters
from llmgw.gateway.admission.messages import Offer
from llmgw.gateway.admission.pace import Pace
from llmgw.gateway.admission.places import Places
from llmgw.gateway.admission.queues import Queue
from llmgw.gateway.admission.rotation import rotations
from llmgw.gateway.admission.tenants import Tenant
from llmgw.gateway.routing.policies import Load


class Running:
    """A request that was let in."""

    __slots__ = ("home", "load", "offer", "since", "tenant")

    def __init__(self, offer: Offer, tenant: Tenant, home: int, load: Load, since: float) -> None:
        self.offer = offer
        self.tenant = tenant
        self.home = home
        """The level of its band."""
        self.load = load
        self.since = since


class Model:
    """The queue and the endpoints of one model."""

    __slots__ = ("bands", "counters", "name", "pace", "places", "queue", "running")

    def __init__(self, name: str, bands: Bands, by_tokens: bool) -> None:
        self.name = name
        self.places = Places(name)
        self.pace = Pace()
        self.counters: TokenCounters | None = None
        self.arrange(bands, by_tokens)

    def arrange(self, bands: Bands, by_tokens: bool) -> None:
        """An empty queue for these bands, and nothing running yet."""
        self.bands = bands
        if not by_tokens:
            self.counters = None
        else:
            self.counters = TokenCounters() if self.counters is None else self.counters.without_waiting()
        self.queue = Queue(len(bands.rows), rotations(self.counters))
        self.running = [0] * len(bands.rows)
        """By level."""

    @property
    def is_idle(self) -> bool:
        return not (self.queue.size or self.places.loads)

    def is_open(self, home: int) -> bool:
        """Whether one more of this band may run here, as far as it is not for its tenant to wait."""
        places = self.places
        return places.free > 0 and (self.bands.is_plain or self.bands.let_in(home, places, self.running))

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Count tokens for a tenant; negative where they were fewer than thought. Only where there are counters: most
        gateways have none, and their requests do not pay for the call.
        """
        assert self.counters is not None
        self.counters.charge(tenant.name, tokens / tenant.weight)
        if tokens < 0 and tenant.waiting:
            self.queue.fell(tenant.name)
