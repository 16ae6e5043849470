"""Prometheus' text format, in slices: nothing else on the event loop waits long for a page of metrics.

What stands before a number (names, labels, escapes) is prometheus_client's, made once for each series and kept; from
then on only the numbers are written. The library alone needs 8 microseconds for a line, which for 30 models and 50
tenants is some 0.2 seconds at each scrape (docs/decisions/0011).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import trio
from attrs import frozen
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llmgw.metrics.families import Family, Kind
from llmgw.metrics.histogram import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SLICE = 0.002
"""Seconds of writing after which everybody else has a turn."""

Labels = tuple[str, ...]
Value = float | Histogram


@frozen
class Group:
    """The series of one family as they are now. `rows` may be computed while it is read."""

    family: Family
    rows: Iterable[tuple[Labels, Value]]


@frozen
class Text:
    """Lines that are written already, each with its newline; an empty one is a good moment for a pause."""

    lines: Iterable[str]


Part = Group | Text
Source = Callable[[], Awaitable[Iterable[Part]]]
"""Called anew for each page. It may wait for what it needs; what it returns is read with pauses between two rows."""


class _One(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


class Writer:
    """Writes rows of families. Keeps what does not change of each series that was in the last page."""

    def __init__(self) -> None:
        self._known: dict[str, dict[Labels, tuple[str, ...]]] = {}
        self._seen: dict[str, dict[Labels, tuple[str, ...]]] = {}
        self._heads: dict[str, str] = {}

    def begin(self) -> None:
        """A new page: series that are not written into it are forgotten with the next one."""
        self._known, self._seen = self._seen, {}

    def head(self, family: Family) -> str:
        """The lines of help and type."""
        found = self._heads.get(family.name)
        if found is None:
            found = self._heads[family.name] = generate_latest(_One(_metric(family))).decode()
        return found

    def rows(self, group: Group) -> Iterator[str]:
        """The text of one series after the other. Values that are no numbers of ours never come here."""
        family = group.family
        known = self._known.get(family.name, {})
        seen = self._seen.setdefault(family.name, {})
        for labels, value in group.rows:
            starts = seen[labels] = known.get(labels) or _starts(family, labels)
            if isinstance(value, Histogram):
                yield _histogram_lines(starts, value)
            else:
                yield f"{starts[0]}{value!r}\n"


def _metric(family: Family) -> Metric:
    # The library adds `_total` to the names of counters itself.
    return Metric(family.name.removesuffix("_total"), family.help, family.kind.value)


def _starts(family: Family, labels: Labels) -> tuple[str, ...]:
    """Each line of a series up to its number."""
    metric = _metric(family)
    named = dict(zip(family.labels, labels, strict=True))
    if family.kind is Kind.HISTOGRAM:
        for bound in (*map(repr, family.bounds), "+Inf"):
            metric.add_sample(f"{family.name}_bucket", {**named, "le": bound}, 0)
        metric.add_sample(f"{family.name}_count", named, 0)
        metric.add_sample(f"{family.name}_sum", named, 0)
    else:
        metric.add_sample(family.name, named, 0)
    # Not splitlines: a label may hold other characters that end a line elsewhere.
    lines = generate_latest(_One(metric)).decode().split("\n")
    return tuple(line.rpartition(" ")[0] + " " for line in lines if line and not line.startswith("#"))


def _histogram_lines(starts: tuple[str, ...], histogram: Histogram) -> str:
    # All of one series at once: its buckets, count and sum are of one moment.
    out = []
    reached = 0
    for start, count in zip(starts, histogram.counts, strict=False):
        reached += count
        out.append(f"{start}{reached}\n")
    out.append(f"{starts[-2]}{reached}\n")
    out.append(f"{starts[-1]}{histogram.total!r}\n")
    return "".join(out)


class Exposition:
    """Pages of metrics out of what `sources` gives now; one page at a time."""

    def __init__(
        self, sources: Callable[[], Sequence[Source]], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._sources = sources
        self._clock = clock
        self._writer = Writer()
        self._lock = trio.Lock()

    async def render(self) -> bytes:
        """One page. Other tasks run between its slices; what changes meanwhile may be in it or not."""
        async with self._lock:
            self._writer.begin()
            pieces: list[bytes] = []
            for source in self._sources():
                parts = await source()
                out: list[str] = []
                deadline = self._clock() + SLICE
                for text in self._written(parts):
                    out.append(text)
                    if self._clock() >= deadline:
                        pieces.append("".join(out).encode())
                        out.clear()
                        await trio.lowlevel.checkpoint()
                        deadline = self._clock() + SLICE
                pieces.append("".join(out).encode())
            return b"".join(pieces)

    def _written(self, parts: Iterable[Part]) -> Iterator[str]:
        for part in parts:
            if isinstance(part, Text):
                yield from part.lines
                continue
            is_first = True
            for text in self._writer.rows(part):
                if is_first:
                    is_first = False
                    yield self._writer.head(part.family)
                yield text
