"""What goes into the queue and what comes out of it.

Structs of msgspec and not of attrs: these are made for each request, and a frozen class of attrs with eight fields
takes ten times as long to make (1.6 against 0.17 microseconds).
"""

from __future__ import annotations

import msgspec

from llmgw.gateway.routing.policies import NO_HINT, Hint
from llmgw.gateway.routing.table import Key


class Offer(msgspec.Struct, frozen=True):
    """A request that wants an engine. Times are seconds of a monotonic clock."""

    ticket: int
    """Its number; none comes twice."""
    model: str
    tenant: str
    band: str
    """A name that is none of the file's bands is the default one."""
    estimate: int = 1
    """Tokens of the prompt, roughly."""
    hint: Hint = NO_HINT
    arrived: float = 0.0
    wait: float | None = None
    """How long it may wait for an engine to come up; None: as long as `gateway.load_wait` says."""


class Granted(msgspec.Struct, frozen=True):
    """It may go, to this endpoint. `finish` gives the slot back."""

    ticket: int
    key: Key


class Refused(msgspec.Struct, frozen=True):
    """It is not let in."""

    reason: str
    """`queue-full`, `rate`, `queue-timeout`, `load-timeout`, `load-failed`, `no-engine`, `draining`."""
    retry_after: float | None
    """Seconds; None: nobody knows."""
    text: str


Outcome = Granted | Refused
