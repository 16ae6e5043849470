"""The bands and the limits of the whole gateway: who of which band may run beside what runs already."""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.config.model import BandConfig, GatewayConfig
from llmgw.gateway.admission.places import Places


class Bands:
    """Levels are positions in the file: 0 is the highest band. Counts what runs, over all models."""

    def __init__(self, config: GatewayConfig) -> None:
        self.rows: tuple[BandConfig, ...] = config.bands
        self.limit = config.max_inflight
        """Running requests of the gateway; None: no limit."""
        self._levels = {band.name: level for level, band in enumerate(self.rows)}
        self._default = next((level for level, band in enumerate(self.rows) if band.default), 0)
        self._reserves = any(band.reserved for band in self.rows)
        self.is_plain = (
            self.limit is None and not self._reserves and all(band.max_inflight is None for band in self.rows)
        )
        """No limit but the endpoints' slots and the tenants' own."""
        self.total = 0
        self.running = [0] * len(self.rows)

    def level(self, name: str) -> int:
        """The level of a band; the default one's where there is none of this name."""
        return self._levels.get(name, self._default)

    def count(self, level: int, change: int) -> None:
        self.total += change
        self.running[level] += change

    def frees_others(self, level: int) -> bool:
        """Whether the end of a request of this band makes room for other models too."""
        return self.limit is not None or self.rows[level].max_inflight is not None

    def let_in(self, level: int, places: Places, running: Sequence[int]) -> bool:
        """Whether one more of this band may run at a model that has a free slot and runs so many of each band. What is
        reserved is kept of the gateway's own limit where it has one, else of each model's slots.
        """
        most = self.rows[level].max_inflight
        if most is not None and self.running[level] >= most:
            return False
        if self.limit is None:
            return not self._reserves or places.free > self._kept(level, places.slots, running)
        free = self.limit - self.total
        return free > 0 and (not self._reserves or free > self._kept(level, self.limit, self.running))

    def _kept(self, level: int, slots: int, running: Sequence[int]) -> int:
        """Slots that stay free for the other bands."""
        kept = 0
        # One slot is everybody's: a small engine must not belong to the bands with a reserve alone.
        left = slots - 1
        for other, band in enumerate(self.rows):
            reserved = min(band.reserved, left)
            left -= reserved
            if other != level and reserved > running[other]:
                kept += reserved - running[other]
        return kept
