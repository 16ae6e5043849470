"""What a tenant may have in a minute."""

from __future__ import annotations

MINUTE = 60.0


class Bucket:
    """Fills evenly up to a minute's worth. It may be overdrawn, since a cost is often known only afterwards; then
    nothing is let in until it has filled again.
    """

    __slots__ = ("_level", "_per_minute", "_updated")

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._updated = now

    def pause(self, now: float) -> float:
        """Seconds until one more is let in; 0: now."""
        self._fill(now)
        missing = min(1.0, self._per_minute) - self._level
        return max(0.0, missing * MINUTE / self._per_minute)

    def take(self, amount: float, now: float) -> None:
        """Negative gives back."""
        self._fill(now)
        self._level = min(self._level - amount, float(self._per_minute))

    def change(self, per_minute: int, now: float) -> None:
        """Another limit; what was used stays used."""
        self._fill(now)
        self._level += per_minute - self._per_minute
        self._per_minute = per_minute

    def _fill(self, now: float) -> None:
        gained = (now - self._updated) * self._per_minute / MINUTE
        self._level = min(self._level + gained, float(self._per_minute))
        self._updated = now
