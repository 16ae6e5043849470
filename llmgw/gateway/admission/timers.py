"""Many moments that come one after another: setting, cancelling and finding the next one cost the same however many.

Only a few different lengths are ever asked for (they stand in the file), and of those set for the same length the
first is due first. So there is a queue per length, and no heap.
"""

from __future__ import annotations

from collections import OrderedDict


class Timers:
    """Moments by ticket. Times are seconds of a clock that never goes back."""

    __slots__ = ("_queues",)

    def __init__(self) -> None:
        self._queues: dict[float, OrderedDict[int, float]] = {}

    def set(self, ticket: int, length: float, now: float) -> None:
        """Due `length` seconds from now. One ticket has one moment: cancel it before another is set."""
        queue = self._queues.get(length)
        if queue is None:
            queue = self._queues[length] = OrderedDict()
        queue[ticket] = now + length

    def cancel(self, ticket: int, length: float) -> None:
        """The moment that was set with this length; nothing where it has come already."""
        queue = self._queues.get(length)
        if queue is not None and queue.pop(ticket, None) is not None and not queue:
            del self._queues[length]

    @property
    def next(self) -> float | None:
        """When the next one is due; None where there is none."""
        return min((next(iter(queue.values())) for queue in self._queues.values()), default=None)

    def pop_due(self, now: float) -> int | None:
        """A ticket whose moment has come, once; None where there is none."""
        for length, queue in self._queues.items():
            if next(iter(queue.values())) <= now:
                ticket, _ = queue.popitem(last=False)
                if not queue:
                    del self._queues[length]
                return ticket
        return None
