"""A histogram of plain numbers: counting costs a search in a short tuple and two additions."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """`counts` has one place for each upper bound and a last one for what lies above all of them; not yet summed up."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
