"""Endpoints that fail get a pause, by what their requests saw alone: nothing is asked for it.

The supervisor knows within milliseconds that an engine has ended and asks it for its health every few seconds; this is
for what lies between, an engine that lives and does not answer. After its pause an endpoint gets one request at a time
until one goes well. The last endpoint of a model is never taken out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from llmgw.gateway.routing.table import Key

FAILURES = 3
"""Failures in a row that take an endpoint out: one may be a restart's last breath, two a coincidence."""

PAUSE = 5.0
"""Seconds out for the first time; each time that it comes back and fails it is twice as long."""

PAUSE_MAX = 60.0
"""Seconds, at the most."""


class _Trouble:
    """What is known about an endpoint that has failed since it last went well."""

    __slots__ = ("failures", "pauses", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.pauses = 0
        self.until: float | None = None
        """The end of its pause; after that it is on probation."""


class Ejections:
    """All endpoints that are in trouble. `now` is a monotonic clock in seconds."""

    def __init__(self) -> None:
        self._troubles: dict[Key, _Trouble] = {}

    def failed(self, key: Key, among: Collection[Key], now: float) -> bool:
        """A request met an error of the endpoint itself: no connection, an end without an answer, a broken answer.

        `among` are all endpoints of its model. True when it has been taken out by this.
        """
        trouble = self._troubles.get(key)
        if trouble is None:
            trouble = self._troubles[key] = _Trouble()
        if trouble.until is not None and now < trouble.until:
            # Begun before it was taken out: says nothing new.
            return False
        trouble.failures += 1
        if trouble.until is None and trouble.failures < FAILURES:
            return False
        if not any(other != key and not self.is_out(other, now) for other in among):
            # The last one. It stays on the brink, so that it goes as soon as another one can take its place.
            return False
        trouble.until = now + min(PAUSE * 2.0**trouble.pauses, PAUSE_MAX)
        trouble.pauses = min(trouble.pauses + 1, 16)
        return True

    def succeeded(self, key: Key, now: float) -> bool:
        """A request went well, or at least began to be answered. True when that ended a probation."""
        trouble = self._troubles.get(key)
        if trouble is None or (trouble.until is not None and now < trouble.until):
            # In its pause it is an older request that ends well; new ones may still fail.
            return False
        del self._troubles[key]
        return trouble.until is not None

    def is_out(self, key: Key, now: float) -> bool:
        """In its pause."""
        trouble = self._troubles.get(key)
        return trouble is not None and trouble.until is not None and now < trouble.until

    def allowed(self, slots: Mapping[Key, int], now: float) -> dict[Key, int]:
        """Of one model's endpoints and their slots those that may get requests: one slot while on probation.

        Empty only for no endpoints: when all are out, the one that went last has all of its slots.
        """
        found = {}
        for key, count in slots.items():
            trouble = self._troubles.get(key)
            if trouble is None or trouble.until is None:
                found[key] = count
            elif now >= trouble.until:
                found[key] = 1
        if not found and slots:
            last = max(slots, key=lambda key: self._troubles[key].until or 0.0)
            found[last] = slots[last]
        return found

    def next_return(self, now: float) -> float | None:
        """When the next pause ends, so that `allowed` is asked again."""
        return min((t.until for t in self._troubles.values() if t.until is not None and t.until > now), default=None)

    def keep(self, keys: Collection[Key]) -> None:
        """Forget every endpoint but these."""
        self._troubles = {key: trouble for key, trouble in self._troubles.items() if key in keys}
