"""Does the installed unit give llmgw the time that its longest stop takes? systemd kills what is late."""

from __future__ import annotations

import re
import subprocess

UNIT = "llmgw.service"
PATIENCE = 3.0
"""Seconds for systemctl: it waits for ever on a bus that does not answer."""


_SPAN = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|min|h|d|w|month|y)(?: |$)")
_SECONDS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "month": 2629800.0,
    "y": 31557600.0,
}  # fmt: skip
"""How systemd writes a span (systemd.time(7)): `2min 30s`."""


def timespan(text: str) -> float | None:
    """Seconds of a span as systemctl prints it; None for `infinity` and what is not one."""
    parts = _SPAN.findall(text)
    if not parts or _SPAN.sub("", text).strip():
        return None
    return float(sum(float(number) * _SECONDS[unit] for number, unit in parts))


def stop_timeout_of(text: str) -> float | None:
    """Seconds out of `systemctl show -p LoadState -p TimeoutStopUSec`; None where no unit is loaded, or no limit."""
    fields = dict(line.partition("=")[::2] for line in text.splitlines())
    if fields.get("LoadState") != "loaded":
        return None
    return timespan(fields.get("TimeoutStopUSec", ""))


def ask_systemd(unit: str = UNIT) -> float | None:
    """The unit's TimeoutStopSec in seconds, None where it cannot be told."""
    argv = ["systemctl", "show", unit, "-p", "LoadState", "-p", "TimeoutStopUSec"]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return stop_timeout_of(done.stdout) if done.returncode == 0 else None
