"""Counts requests and pauses between chunks. Plain numbers in plain dictionaries; `series` shows them as families.

This runs for each request and each chunk: a chunk costs one search in a tuple of twelve numbers and two additions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from llmgw.gateway.record import RequestRecord
from llmgw.metrics import families
from llmgw.metrics.histogram import Histogram

LET_IN_LATER = frozenset(
    {"queue-full", "rate", "queue-timeout", "load-timeout", "load-failed", "no-engine", "loading", "draining"}
)
"""Reasons for which a request is not let in now; all others are somebody's failure."""

HAS_WAITED = frozenset({"queue-timeout", "load-timeout", "load-failed", "draining", "client-gone"})
"""Reasons of those that may have stood in a queue without ever leaving it to an engine."""

_CODES = {code: str(code) for code in range(100, 600)}
_OTHER_CODE = "other"
"""Stands for a status that is none: an engine may answer with any number of three digits."""


class ModelSeries:
    """The histograms of one model and band. `chunk` is `answering.ChunkObserver`."""

    __slots__ = ("chunk", "duration", "inter_chunk", "queue_wait", "ttft")

    def __init__(self) -> None:
        self.duration = Histogram(families.DURATION.bounds)
        self.ttft = Histogram(families.TTFT.bounds)
        self.inter_chunk = Histogram(families.INTER_CHUNK.bounds)
        self.queue_wait = Histogram(families.QUEUE_WAIT.bounds)
        # The method itself: one call less for each chunk.
        self.chunk = self.inter_chunk.observe


class Counters:
    """Everything that was counted since the gateway's beginning."""

    def __init__(self) -> None:
        self.models: dict[tuple[str, str], ModelSeries] = {}
        """By model and band."""
        self.requests: dict[tuple[str, str, str, str], int] = {}
        """By model, tenant, band and code. The keys are the labels as they are shown: a page makes no new ones."""
        self.tokens: dict[tuple[str, str, str], int] = {}
        """By model, tenant and direction."""
        self.rejected: dict[str, int] = {}
        self.failures: dict[str, int] = {}
        self.retries: dict[str, int] = {}
        """By model."""
        self.bands_clamped: dict[str, int] = {}
        """By tenant."""

    def series(self, model: str, band: str) -> ModelSeries:
        found = self.models.get((model, band))
        if found is None:
            found = self.models[model, band] = ModelSeries()
        return found

    def ended(self, record: RequestRecord) -> None:
        """A request is over, whatever it was. Lists, health and the operators' pages are not counted while they go
        well: a load balancer asks for them all the time.
        """
        model, reason = record.model, record.reason
        if record.path.startswith("/upstream/") or not (model or reason):
            return
        key = (model, record.tenant, record.band, _CODES.get(record.code, _OTHER_CODE))
        self.requests[key] = self.requests.get(key, 0) + 1
        if record.band_clamped:
            self.bands_clamped[record.tenant] = self.bands_clamped.get(record.tenant, 0) + 1
        if reason:
            where = self.rejected if reason in LET_IN_LATER else self.failures
            where[reason] = where.get(reason, 0) + 1
        if model:
            self._count_model(record)

    def _count_model(self, record: RequestRecord) -> None:
        model, tenant, arrived, granted = record.model, record.tenant, record.arrived, record.granted
        ended = record.ended if record.ended is not None else arrived
        series = self.series(model, record.band)
        if granted is None:
            if record.reason in HAS_WAITED:
                series.queue_wait.observe(ended - arrived)
            return
        series.queue_wait.observe(granted - arrived)
        series.duration.observe(ended - arrived)
        if record.stream and record.first_byte is not None and record.code == 200:
            series.ttft.observe(record.first_byte - arrived)
        if record.retried:
            self.retries[model] = self.retries.get(model, 0) + 1
        for direction, count in (("prompt", record.prompt_tokens), ("completion", record.completion_tokens)):
            if count:
                key = (model, tenant, direction)
                self.tokens[key] = self.tokens.get(key, 0) + count

    @property
    def size(self) -> int:
        """How many series there are. While it stays, there is no new one."""
        return len(self.models) + len(self.requests) + len(self.tokens) + len(self.retries) + len(self.bands_clamped)

    def as_json(self) -> dict[str, Any]:
        """Totals, from which `llmgw top` makes rates. Counts of buckets are not summed up."""
        requests: dict[tuple[str, str], int] = {}
        for (model, _, band, _), count in self.requests.items():
            requests[model, band] = requests.get((model, band), 0) + count
        tokens: dict[tuple[str, str], dict[str, int]] = {}
        for (model, tenant, direction), count in self.tokens.items():
            tokens.setdefault((model, tenant), {"prompt": 0, "completion": 0})[direction] = count
        return {
            "ttft_bounds": list(families.TTFT.bounds),
            "bands": [
                {
                    "model": model,
                    "band": band,
                    "requests": requests.get((model, band), 0),
                    "chunks": sum(series.inter_chunk.counts),
                    "ttft": list(series.ttft.counts),
                }
                for (model, band), series in self.models.items()
            ],
            "tokens": [{"model": model, "tenant": tenant, **counts} for (model, tenant), counts in tokens.items()],
        }

    def keep(self, models: Collection[str], tenants: Collection[str], bands: Iterable[str]) -> None:
        """Forget what the file no longer has, so that reloads do not let the numbers of series grow for ever.

        Requests without a model, tenant or band (all three empty) stay.
        """
        bands = {*bands, ""}
        models, tenants = {*models, ""}, {*tenants, ""}
        for key in [key for key in self.models if key[0] not in models or key[1] not in bands]:
            del self.models[key]
        for row in [
            row for row in self.requests if row[0] not in models or row[1] not in tenants or row[2] not in bands
        ]:
            del self.requests[row]
        for used in [used for used in self.tokens if used[0] not in models or used[1] not in tenants]:
            del self.tokens[used]
        for model in [model for model in self.retries if model not in models]:
            del self.retries[model]
        for tenant in [tenant for tenant in self.bands_clamped if tenant not in tenants]:
            del self.bands_clamped[tenant]
