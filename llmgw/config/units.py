"""Durations and sizes as people write them. The same forms are read from files and printed by every command."""

from __future__ import annotations

import re

SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
"""Units of a duration, large to small, in seconds."""

BYTES = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
"""Units of a size in bytes."""

_PAIR = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(ms|s|m|h|d)")
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([KMGT]i?B|B)")
LONGEST = 100 * 365 * 86400.0
"""Seconds. A duration beyond a century is a typing mistake, and deadlines must stay well inside a float."""


def parse_duration(text: str) -> float | None:
    """Seconds of `90s`, `1h30m`, `250ms` or `1.5h`; None when the text is no duration.

    One or more pairs of number and unit, no blanks, each unit once and smaller than the one before.
    """
    total, position, last = 0.0, 0, -1
    order = list(SECONDS)
    while position < len(text):
        match = _PAIR.match(text, position)
        if match is None:
            return None
        rank = order.index(match[2])
        if rank <= last:
            return None
        last, position = rank, match.end()
        total += float(match[1]) * SECONDS[match[2]]
    return None if last < 0 or total > LONGEST else round(total, 6)


def format_duration(seconds: float) -> str:
    """`1h30m`, `45s`, `250ms`; rounded to milliseconds, `0s` for nothing. `parse_duration` reads it back."""
    left = round(abs(seconds) * 1000)
    if left == 0:
        return "0s"
    parts = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return ("-" if seconds < 0 else "") + "".join(parts)


def parse_size(text: str) -> int | None:
    """Bytes of `512MiB`, `1.5TiB` or `80 GB`; None when the text is no size."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    unit = BYTES[match[2]]
    return round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def format_size(size: int) -> str:
    """The exact value in the largest binary unit that divides it, else in bytes: `64MiB`, `1000B`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % BYTES[unit] == 0:
            return f"{size // BYTES[unit]}{unit}"
    return f"{size}B"
