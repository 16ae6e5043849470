"""When things happen during a load: measured moments of the real engine, scaled to the length of this load."""

import time

from llmgw.fake.knobs import Knobs


class Timeline:
    """Turns a moment of the real engine's load (seconds) into a delay from now."""

    def __init__(self, knobs: Knobs, real_total: float) -> None:
        self.started = time.monotonic()
        self.total = real_total * knobs.time_factor if knobs.load_seconds is None else knobs.load_seconds
        self._scale = self.total / real_total

    def until(self, real_moment: float) -> float:
        """Seconds from now until that moment of the load; 0 when it has passed."""
        return self.until_elapsed(real_moment * self._scale)

    def until_elapsed(self, seconds: float) -> float:
        """Seconds from now until so many seconds after the start; 0 when that has passed."""
        return max(0.0, self.started + seconds - time.monotonic())
