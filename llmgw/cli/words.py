"""Numbers as people read them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def duration(seconds: float) -> str:
    """At most two units, so that a column of them stays narrow: `9s`, `1m14s`, `1d01h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, second = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{second:02}s" if second else f"{minutes}m"
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minute:02}m" if minute else f"{hours}h"
    days, hour = divmod(hours, 24)
    return f"{days}d{hour:02}h" if hour else f"{days}d"


def rough_duration(seconds: float) -> str:
    """For estimates: steps of 10 s above half a minute, of a minute above 5."""
    if seconds > 300:
        return duration(round(seconds / 60) * 60)
    if seconds > 30:
        return duration(round(seconds / 10) * 10)
    return duration(seconds)


def seconds_of(text: str) -> float:
    """Seconds of `90s`, `10m`, `1h30m`; a bare number counts as seconds, as timeouts of other commands do.

    Raises ValueError with a text for people.
    """
    from llmgw.config.units import parse_duration

    if text.isascii() and text.isdecimal() and len(text) < 10:
        return float(text)
    seconds = parse_duration(text)
    if seconds is None:
        raise ValueError(f"{text!r} is not a duration; write 90s, 10m or 1h30m")
    return seconds


def since_of(seconds: float) -> str:
    """A time before now as the control socket reads it: never in the form 1e+06."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def gpu_ranges(labels: Sequence[str]) -> str:
    """`0-3` for three and more in a row, `4,5` otherwise; other names stay, a UUID in its short form."""
    if not labels:
        return "-"
    if not all(label.isdecimal() for label in labels):
        return ",".join(label[:12] if label.startswith("GPU-") else label for label in labels)
    runs: list[list[int]] = []
    for index in sorted({int(label) for label in labels}):
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    parts = (
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(str(index) for index in run)
        for run in runs
    )  # fmt: skip
    return ",".join(parts)


def bar(fraction: float, *, unicode: bool, cells: int = 10) -> str:
    full = round(min(1.0, max(0.0, fraction)) * cells)
    return ("█" if unicode else "#") * full + ("░" if unicode else "-") * (cells - full)


def counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def listed(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    parts = list(names)
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
