"""The access log: one JSON object per request on llmgw's own log. No prompts, no keys, nothing a client could forge.

`on` tells everything. `sampled` tells every error and every slow request, and of the others so many that the log stays
readable; lists, health and the operators' pages not while they go well. Refusals of strangers (no tenant) count among
the others: anybody may cause as many of them as they like.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from llmgw.domain.display import neutralise
from llmgw.gateway.record import RequestRecord
from llmgw.own_log import ACCESS

log = logging.getLogger(ACCESS)

SLOW = 10.0
"""Seconds to the first byte from which a request is told in any case."""

SAMPLES_PER_SECOND = 5.0
"""Lines of `sampled` for requests that went well."""

BURST = 20.0
"""Lines that may come at once after a quiet time."""

TEXT_MAX = 200
"""Characters of each text in a line."""


class AccessLog:
    """`mode` gives `gateway.access_log` as it is in force, `clock` seconds since the epoch, `now` those of a monotonic
    clock."""

    def __init__(self, mode: Callable[[], str], *, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._mode = mode
        self._clock = clock
        self._now = now
        self._left = BURST
        self._filled = now()
        self._omitted = 0

    def ended(self, record: RequestRecord) -> None:
        mode = self._mode()
        if mode == "off" or not log.isEnabledFor(logging.INFO):
            return
        if mode == "sampled":
            if not (record.model or record.reason):
                return
            if not _is_told(record) and not self._may_tell():
                self._omitted += 1
                return
        log.info("%s", line(record, self._clock(), self._omitted))
        self._omitted = 0

    def _may_tell(self) -> bool:
        now = self._now()
        self._left = min(BURST, self._left + (now - self._filled) * SAMPLES_PER_SECOND)
        self._filled = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def _is_told(record: RequestRecord) -> bool:
    """Whether it is worth a line in any case."""
    is_error = record.code >= 400 or (bool(record.reason) and record.code < 400)
    first = record.first_byte if record.first_byte is not None else record.ended
    is_slow = first is not None and first - record.arrived >= SLOW
    return bool(record.tenant) and (is_error or is_slow)


def line(record: RequestRecord, time: float, omitted: int = 0) -> str:
    """One request as JSON. Durations in seconds from the request's head; what did not happen is left out.

    `time` is when it ended, `omitted` how many requests before it have no line.
    """
    arrived = record.arrived
    fields: dict[str, object] = {
        "time": round(time, 3),
        "request_id": _text(record.request_id),
        "peer": _text(record.peer),
        "method": _text(record.method),
        "path": _text(record.path),
        "code": record.code,
        "reason": _text(record.reason),
        "model": _text(record.model),
        "tenant": _text(record.tenant),
        "band": _text(record.band),
        "band_clamped": record.band_clamped,
        "shard": _text(record.shard),
        "stream": record.stream,
        "retried": record.retried,
        "queue_position": record.position,
        "queued_seconds": _since(arrived, record.granted),
        "first_byte_seconds": _since(arrived, record.first_byte),
        "duration_seconds": _since(arrived, record.ended),
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
        "chunks": record.chunks,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "omitted_before": omitted,
    }
    # Numbers stay, also 0 bytes; empty texts, None and False say nothing. ASCII alone, so that no reader is fooled.
    kept = {name: value for name, value in fields.items() if value not in ("", None) and value is not False}
    if not omitted:
        del kept["omitted_before"]
    return json.dumps(kept)


def _since(arrived: float, moment: float | None) -> float | None:
    return None if moment is None else round(max(0.0, moment - arrived), 6)


def _text(text: str) -> str:
    return neutralise(text[:TEXT_MAX])
