"""What goes into the queue and what comes out of it."""

from __future__ import annotations

from attrs import frozen

from llmgw.gateway.routing.policies import NO_HINT, Hint
from llmgw.gateway.routing.table import Key


@frozen
class Offer:
    """A request that wants an engine. Times are seconds of a monotonic clock."""

    ticket: int
    model: str
    tenant: str
    band: str
    estimate: int = 1
    """Tokens of the prompt, roughly."""
    hint: Hint = NO_HINT
    arrived: float = 0.0
    wait: float | None = None
    """How long it may wait for an engine to come up; None: for a slot, as its band says."""


@frozen
class Granted:
    """It may go, to this endpoint. `finish` gives the slot back."""

    ticket: int
    key: Key


@frozen
class Refused:
    """It is not let in. `retry_after` in seconds; None: nobody knows."""

    reason: str
    """`queue-full`, `rate`, `queue-timeout`, `load-timeout`, `load-failed`, `no-engine`, `draining`."""
    retry_after: float | None
    text: str


Outcome = Granted | Refused
