"""How long it takes until a request has its turn: for Retry-After, which must be neither a lie nor an hour."""

from __future__ import annotations

RETRY_MIN, RETRY_MAX = 1.0, 60.0
"""Seconds that a refused client is told to wait, at least and at most. OpenAI's SDKs obey up to 60."""

RETRY_UNKNOWN = 5.0
"""The same where nothing has ended yet that could be measured, and for engines that are not there."""

SMOOTHING = 0.1
"""Weight of the newest request in the mean."""


class Pace:
    """How long the requests of one model run, in the mean."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: float | None = None
        """None: none has ended yet."""

    def ended(self, seconds: float) -> None:
        """One more has ended, after so long."""
        known = self.seconds
        self.seconds = seconds if known is None else known + SMOOTHING * (seconds - known)

    def retry_after(self, before: int, slots: int) -> float:
        """Seconds until one is served that has so many before it, where so many run at once: as many end in that time
        as there are slots for each mean running time.
        """
        if self.seconds is None or slots <= 0:
            return RETRY_UNKNOWN
        return min(max((before + 1) * self.seconds / slots, RETRY_MIN), RETRY_MAX)
