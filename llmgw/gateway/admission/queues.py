"""The queue of one model: bands by strict priority, and inside a band tenants by turns.

Who was promoted does not stand among the natives of a higher band but beside them, by band of origin. Otherwise a flood
of old batch requests would bury the band above, a promoted request would wait behind all that its own tenant has there,
and one whose own band runs as much as it may would stand in others' way.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from llmgw.gateway.admission.rotation import Rotation, Waiter

IN_A_ROW = 3
"""Natives of a band go, at most, while somebody waits who was promoted into it. So interactive traffic that needs up to
three quarters of the engines feels no flood below it, and a promoted request is the fourth at the latest."""

IsOpen = Callable[[int], bool]
"""Whether one more of a home level may run."""


class Level:
    """One band as it is served."""

    def __init__(self, level: int, bands: int, new: Iterator[Rotation]) -> None:
        self._native = next(new)
        self._level = level
        self._rotations = {level: self._native}
        self._promoted: deque[tuple[int, Rotation]] = deque()
        """By home level, the next one first."""
        for home in range(level + 1, bands):
            self._rotations[home] = next(new)
            self._promoted.append((home, self._rotations[home]))
        self._in_a_row = 0
        self.size = 0

    def __getitem__(self, home: int) -> Rotation:
        return self._rotations[home]

    def add(self, waiter: Waiter) -> None:
        self._rotations[waiter.home].add(waiter)
        self.size += 1

    def remove(self, waiter: Waiter) -> None:
        self._rotations[waiter.home].remove(waiter)
        self.size -= 1

    def take(self, is_open: IsOpen) -> Waiter | None:
        """The one whose turn it is; None when nobody may go."""
        native = self._native
        if self.size == native.size:
            waiter = native.take() if is_open(self._level) else None
            self._in_a_row = 0
        elif self._in_a_row < IN_A_ROW:
            waiter = self._take_native(is_open) or self._take_promoted(is_open)
        else:
            waiter = self._take_promoted(is_open) or self._take_native(is_open)
        if waiter is not None:
            self.size -= 1
        return waiter

    def _take_native(self, is_open: IsOpen) -> Waiter | None:
        waiter = self._native.take() if self._native.size and is_open(self._level) else None
        if waiter is not None:
            self._in_a_row += 1
        return waiter

    def _take_promoted(self, is_open: IsOpen) -> Waiter | None:
        for _ in range(len(self._promoted)):
            home, rotation = self._promoted[0]
            self._promoted.rotate(-1)
            if rotation.size and is_open(home) and (waiter := rotation.take()) is not None:
                self._in_a_row = 0
                return waiter
        return None

    def fell(self, tenant: str) -> None:
        for rotation in self._rotations.values():
            rotation.fell(tenant)

    def ahead(self, waiter: Waiter) -> int:
        """How many of this band go before it, about."""
        before = self._rotations[waiter.home].ahead(waiter)
        promoted = self.size - self._native.size
        if waiter.home == self._level:
            return before + min(promoted, before // IN_A_ROW)
        others = sum(min(each.size, before) for home, each in self._promoted if home != waiter.home)
        return before + others + min(self._native.size, IN_A_ROW * (before + others + 1))


class Queue:
    """Everyone who waits for one model."""

    def __init__(self, bands: int, new: Iterator[Rotation]) -> None:
        self.levels = [Level(level, bands, new) for level in range(bands)]
        self._homes: list[OrderedDict[int, Waiter]] = [OrderedDict() for _ in range(bands)]
        self.size = 0

    def __iter__(self) -> Iterator[Waiter]:
        for home in self._homes:
            yield from home.values()

    def add(self, waiter: Waiter) -> None:
        self.levels[waiter.level].add(waiter)
        self._homes[waiter.home][waiter.offer.ticket] = waiter
        self.size += 1

    def remove(self, waiter: Waiter) -> None:
        self.levels[waiter.level].remove(waiter)
        self._forget(waiter)

    def promote(self, waiter: Waiter) -> None:
        """Into the next higher band."""
        self.levels[waiter.level].remove(waiter)
        waiter.level -= 1
        self.levels[waiter.level].add(waiter)

    def take(self, is_open: IsOpen) -> Waiter | None:
        """The one whose turn it is, the highest band first; None when nobody may go."""
        for level in range(len(self.levels)):
            waiter = self.take_at(level, is_open)
            if waiter is not None:
                return waiter
        return None

    def take_at(self, level: int, is_open: IsOpen) -> Waiter | None:
        """The one whose turn it is in one band."""
        served = self.levels[level]
        waiter = served.take(is_open) if served.size else None
        if waiter is not None:
            self._forget(waiter)
        return waiter

    def fell(self, tenant: str) -> None:
        """The tenant has had fewer tokens than was thought."""
        for level in self.levels:
            level.fell(tenant)

    def _forget(self, waiter: Waiter) -> None:
        del self._homes[waiter.home][waiter.offer.ticket]
        self.size -= 1

    # -- seeing it ---------------------------------------------------------------------------------------

    def waiting(self, home: int) -> int:
        """How many of a band wait, promoted or not."""
        return len(self._homes[home])

    def waiting_of(self, tenant: str, home: int) -> int:
        return sum(level[home].waiting_of(tenant) for level in self.levels[: home + 1])

    def oldest(self, home: int) -> Waiter | None:
        return next(iter(self._homes[home].values()), None)

    def before(self, level: int) -> int:
        """How many go before a newcomer of this band, at the most."""
        return sum(each.size for each in self.levels[: level + 1])

    def position(self, waiter: Waiter) -> int:
        """Its place as things stand, from 1."""
        return 1 + sum(level.size for level in self.levels[: waiter.level]) + self.levels[waiter.level].ahead(waiter)
