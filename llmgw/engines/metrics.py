"""What an engine's /metrics text says about its work: requests that run and wait, steps, cache."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from llmgw.domain.shard import EngineKind
from llmgw.domain.status import Activity
from llmgw.engines.adapter import profile

TEXT_LOOKED_AT = 4 << 20
"""Characters. vLLM's page has some 100 kB; what lies beyond this is not looked at."""

LINE_LOOKED_AT = 4096
"""Characters; a longer line is no series of interest."""

_SERIES = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+([^ \t]+)(?:[ \t]+-?\d+)?[ \t]*")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_activity(kind: EngineKind, text: str) -> Activity:
    """Read a page of metrics; what is missing or no number is None. Never raises.

    Requests and steps are sums over data-parallel engines, `kv_usage` is that of the fullest one (0 to 1),
    `tokens_per_second` the engine's own figure.
    """
    names = profile(kind).metrics
    if names is None:
        return Activity()
    wanted = {names.running, names.waiting, *names.steps, names.kv_usage, names.tokens_per_second} - {None}
    found = _collect(text, frozenset(name for name in wanted if name), names.only)
    steps = next((sum(found[name]) for name in names.steps if name in found), None)
    usage = _maximum(found.get(names.kv_usage or "", ()))
    return Activity(
        running=_count(found.get(names.running)),
        waiting=_count(found.get(names.waiting)),
        steps=steps,
        tokens_per_second=_sum(found.get(names.tokens_per_second or "")),
        kv_usage=None if usage is None else min(1.0, max(0.0, usage)),
    )


def _collect(text: str, wanted: frozenset[str], only: Mapping[str, str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    starts = tuple(wanted)
    for line in text[:TEXT_LOOKED_AT].split("\n"):
        if not line.startswith(starts) or len(line) > LINE_LOOKED_AT:
            continue
        series = _SERIES.fullmatch(line.rstrip("\r"))
        if series is None or series[1] not in wanted:
            continue
        labels = dict(_LABEL.findall(series[2] or ""))
        if any(labels.get(name, value) != value for name, value in only.items()):
            continue
        try:
            value = float(series[3])
        except ValueError:
            continue
        if math.isfinite(value) and abs(value) < 1e18:
            found.setdefault(series[1], []).append(value)
    return found


def _sum(values: Iterable[float] | None) -> float | None:
    return None if values is None else sum(values)


def _count(values: Iterable[float] | None) -> int | None:
    return None if values is None else max(0, round(sum(values)))


def _maximum(values: Iterable[float]) -> float | None:
    return max(values, default=None)
