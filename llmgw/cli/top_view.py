"""What `llmgw top` shows, out of two or more answers of the status: rates, times and the rows of its tables. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from llmgw.cli import status_view
from llmgw.cli.inventory_view import GPU_COLUMNS, gpu_rows
from llmgw.cli.words import duration
from llmgw.domain.display import neutralise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Answer = Mapping[str, Any]

WINDOW = 10.0
"""Seconds over which rates and times are taken: long enough for requests that take seconds, short enough to be now."""

QUEUE_COLUMNS = ("MODEL", "BAND", "WAITING", "OLDEST", "RUNNING", "REQ/S", "FIRST TOKEN", "P95")
QUEUE_SPARE = ("P95", "OLDEST", "REQ/S")
TENANT_COLUMNS = ("TENANT", "WAITING", "RUNNING", "REQ/S", "REFUSED/S", "TOKENS/S")
TENANT_SPARE = ("REFUSED/S", "REQ/S")
GPU_SPARE = ("CC", "NOTE", "CLASS")

FAILURES_SHOWN = 5
ROWS_SHOWN = 12
"""Rows of a table but the shards': the busiest ones."""


class Table:
    """One table: as it stands for pipes, and what a narrow terminal does without. `state` is the column of a state."""

    __slots__ = ("columns", "left_out", "rows", "spare", "state")

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        spare: Sequence[str] = (),
        *,
        state: str | None = None,
        left_out: int = 0,
    ) -> None:
        self.columns = columns
        self.rows = rows
        self.spare = spare
        self.state = state
        self.left_out = left_out


class Rates:
    """What happened between two looks, per second of the time between them; None: nobody knows yet."""

    __slots__ = ("bounds", "requests", "seconds", "tenants", "tokens", "ttft")

    def __init__(self, first: Answer, last: Answer) -> None:
        self.seconds: float = last["now"] - first["now"]
        before, after = _counted(first), _counted(last)
        self.bounds: Sequence[float] = after.get("ttft_bounds", ())
        self.requests: dict[tuple[str, str], float] = {}
        """By model and band."""
        self.ttft: dict[tuple[str, str], list[int]] = {}
        """Counts of first tokens by bucket, by model and band."""
        self.tokens: dict[str, float] = {}
        """Completion tokens, by tenant."""
        self.tenants: dict[str, tuple[float, float]] = {}
        """Granted and refused, by tenant."""
        if self.seconds <= 0:
            return
        old_bands = {(row["model"], row["band"]): row for row in before.get("bands", ())}
        for row in after.get("bands", ()):
            key = (row["model"], row["band"])
            old = old_bands.get(key, {})
            self.requests[key] = self._rate(row["requests"], old.get("requests", 0))
            zeros = [0] * len(row["ttft"])
            counts = zip(row["ttft"], old.get("ttft", zeros), strict=True)
            self.ttft[key] = [max(0, new - past) for new, past in counts]
        self._count_tenants(first, last, before, after)

    def _count_tenants(self, first: Answer, last: Answer, before: Answer, after: Answer) -> None:
        old_tokens = _by_tenant(before)
        for tenant, count in _by_tenant(after).items():
            self.tokens[tenant] = self._rate(count, old_tokens.get(tenant, 0))
        old_tenants = {row["name"]: row for row in _gateway(first).get("tenants", ())}
        for row in _gateway(last).get("tenants", ()):
            old = old_tenants.get(row["name"], {"granted": 0, "refused": 0})
            self.tenants[row["name"]] = (
                self._rate(row["granted"], old["granted"]),
                self._rate(row["refused"], old["refused"]),
            )

    def _rate(self, new: float, old: float) -> float:
        # A reload may have taken a series away and brought it back.
        return max(0.0, new - old) / self.seconds

    @property
    def all_ttft(self) -> list[int]:
        """Of all models and bands together."""
        return [sum(column) for column in zip(*self.ttft.values(), strict=True)]


def _gateway(answer: Answer) -> Answer:
    return answer.get("gateway") or {}


def _counted(answer: Answer) -> Answer:
    return _gateway(answer).get("counted") or {}


def _by_tenant(counted: Answer) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in counted.get("tokens", ()):
        found[row["tenant"]] = found.get(row["tenant"], 0) + row["completion"]
    return found


class History:
    """The answers of the last `WINDOW` seconds, and the failures that were told meanwhile."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque()
        self.failures: deque[Answer] = deque(maxlen=FAILURES_SHOWN)
        self.sequence = 0
        """Of the last event that was read."""

    def add(self, answer: Answer) -> None:
        """One more. An llmgw that began anew counts anew."""
        answers = self._answers
        if answers and (answers[-1]["started"] != answer["started"] or answer["now"] < answers[-1]["now"]):
            answers.clear()
            self.failures.clear()
            self.sequence = 0
        answers.append(answer)
        while len(answers) > 2 and answers[1]["now"] <= answer["now"] - WINDOW:
            answers.popleft()

    def note(self, events: Iterable[Answer]) -> None:
        """Take the failures out of what has happened since."""
        for event in events:
            if "seq" not in event:
                continue
            self.sequence = max(self.sequence, event["seq"])
            if event.get("after") == "failed" and event.get("before") != "failed":
                self.failures.append(event)

    @property
    def rates(self) -> Rates:
        """Over all that is kept. Without two answers everything is unknown."""
        return Rates(self._answers[0], self._answers[-1])

    @property
    def last(self) -> Answer:
        return self._answers[-1]


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of the counted ones lie, as Prometheus estimates it: evenly spread in a bucket.

    None without any; infinity above the last bound.
    """
    total = sum(counts)
    if not total:
        return None
    rank = share * total
    reached = 0
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and reached + count >= rank:
            return lower + (bound - lower) * (rank - reached) / count
        reached += count
        lower = bound
    return math.inf


def head_lines(history: History) -> list[str]:
    """The node, then one line that says how the gateway is doing."""
    answer = history.last
    lines = status_view.head_lines(answer)
    gateway = _gateway(answer)
    if not gateway:
        return lines
    rates = history.rates
    limit = f" of {gateway['max_inflight']}" if gateway.get("max_inflight") else ""
    waiting = sum(row["waiting"] for row in gateway["queues"])
    parts = [f"{gateway['running']}{limit} running", f"{waiting} waiting"]
    if rates.seconds > 0:
        parts.append(f"{number(sum(rates.requests.values()))} req/s")
        parts.append(f"{number(sum(rates.tokens.values()))} tokens/s")
        if rates.ttft:
            half, most = (quantile(rates.bounds, rates.all_ttft, share) for share in (0.5, 0.95))
            if half is not None and most is not None:
                parts.append(f"first token {seconds(half, rates.bounds)}, p95 {seconds(most, rates.bounds)}")
    ejections = sum((gateway.get("ejections") or {}).values())
    if ejections:
        parts.append(f"{ejections} taken out after failures")
    return [*lines, "gateway  " + "  ".join(parts)]


def tables(history: History, *, unicode: bool) -> list[Table]:
    """Everything that has rows, in the order of its weight."""
    answer = history.last
    shards = answer["shards"]
    rows = [status_view.row(shard, answer["now"], unicode=unicode) for shard in shards]
    found = [Table(status_view.COLUMNS, rows, status_view.SPARE_COLUMNS, state="STATE")]
    gateway = _gateway(answer)
    if gateway:
        rates = history.rates
        found.append(_busiest(QUEUE_COLUMNS, _queue_rows(gateway, rates), QUEUE_SPARE))
        found.append(_busiest(TENANT_COLUMNS, _tenant_rows(gateway, rates), TENANT_SPARE))
    inventory = answer.get("inventory")
    if inventory is not None:
        names = {f"{shard['shard']}/{shard['replica']}": shard["name"] for shard in shards}
        gpus = [tuple(map(neutralise, row)) for row in gpu_rows(inventory, names)]
        found.append(Table(GPU_COLUMNS, gpus, GPU_SPARE))
    return [table for table in found if table.rows]


def failure_lines(history: History) -> list[str]:
    """The last failures, the newest first, each on one line."""
    now = history.last["now"]
    return [
        neutralise(f"{duration(now - event['time'])} ago  {event['shard']}  {event['text']}")
        for event in reversed(history.failures)
    ]


def _busiest(
    columns: Sequence[str], weighted: Iterable[tuple[tuple[float, ...], tuple[str, ...]]], spare: Sequence[str]
) -> Table:
    ordered = sorted(weighted, key=lambda row: (tuple(-weight for weight in row[0]), row[1]))
    rows = [row for _, row in ordered[:ROWS_SHOWN]]
    return Table(columns, rows, spare, left_out=len(ordered) - len(rows))


def _queue_rows(gateway: Answer, rates: Rates) -> Iterator[tuple[tuple[float, ...], tuple[str, ...]]]:
    now = {(row["model"], row["band"]): row for row in gateway["queues"]}
    for key in dict.fromkeys((*now, *rates.requests)):
        row = now.get(key, {"waiting": 0, "oldest_seconds": 0.0, "running": 0})
        per_second = rates.requests.get(key)
        counts = rates.ttft.get(key, ())
        half, most = (quantile(rates.bounds, counts, share) for share in (0.5, 0.95))
        yield (
            (row["waiting"], row["running"], per_second or 0.0),
            (
                neutralise(key[0]),
                key[1],
                str(row["waiting"]),
                duration(row["oldest_seconds"]) if row["waiting"] else "-",
                str(row["running"]),
                number(per_second),
                seconds(half, rates.bounds),
                seconds(most, rates.bounds),
            ),
        )


def _tenant_rows(gateway: Answer, rates: Rates) -> Iterator[tuple[tuple[float, ...], tuple[str, ...]]]:
    for row in gateway["tenants"]:
        granted, refused = rates.tenants.get(row["name"], (None, None))
        tokens = rates.tokens.get(row["name"], 0.0 if rates.seconds > 0 else None)
        yield (
            (row["waiting"], row["running"], granted or 0.0),
            (
                neutralise(row["name"]),
                str(row["waiting"]),
                str(row["running"]),
                number(granted),
                number(refused),
                number(tokens),
            ),
        )


def number(value: float | None) -> str:
    """A rate: `0`, `0.4`, `12`; `-` while it is not known."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}" if value >= 0.05 else "<0.1"


def seconds(value: float | None, bounds: Sequence[float]) -> str:
    """A time that people feel: `80ms`, `1.2s`, `35s`."""
    if value is None:
        return "-"
    if math.isinf(value):
        return f">{duration(bounds[-1])}"
    if value < 1:
        return f"{value * 1000:.0f}ms"
    return f"{value:.1f}s" if value < 10 else duration(value)


def as_json(history: History) -> dict[str, Any]:
    """What scripts get: the status without the history of counters, with rates beside it."""
    answer, rates = history.last, history.rates
    gateway = _gateway(answer)
    return {
        **{name: value for name, value in answer.items() if name != "gateway"},
        "gateway": {name: value for name, value in gateway.items() if name != "counted"} if gateway else None,
        "window_seconds": rates.seconds,
        "bands": [
            {
                "model": model,
                "band": band,
                "requests_per_second": rate,
                "first_token_p50_seconds": _finite(quantile(rates.bounds, rates.ttft[model, band], 0.5)),
                "first_token_p95_seconds": _finite(quantile(rates.bounds, rates.ttft[model, band], 0.95)),
            }
            for (model, band), rate in rates.requests.items()
        ],
        "tenants": [
            {
                "name": name,
                "granted_per_second": granted,
                "refused_per_second": refused,
                "completion_tokens_per_second": rates.tokens.get(name, 0.0),
            }
            for name, (granted, refused) in rates.tenants.items()
        ],
        "failures": list(history.failures),
    }


def _finite(value: float | None) -> float | None:
    """JSON knows no infinity: above the last bound is told as unknown."""
    return None if value is None or math.isinf(value) else value
