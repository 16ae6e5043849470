"""Does the installed unit give llmgw the time that its longest stop takes? systemd kills what is late."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from llmgw.systemd import read_timespan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from llmgw.domain.problem import Problem
    from llmgw.domain.shard import ShardSpec

UNIT = "llmgw.service"
PATIENCE = 3.0
"""Seconds for systemctl: it waits for ever on a bus that does not answer."""


def stop_timeout_of(text: str) -> float | None:
    """Seconds out of `systemctl show -p LoadState -p TimeoutStopUSec`; None where no unit is loaded, or no limit."""
    fields = dict(line.partition("=")[::2] for line in text.splitlines())
    if fields.get("LoadState") != "loaded":
        return None
    return read_timespan(fields.get("TimeoutStopUSec", ""))


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


def too_short(specs: Sequence[ShardSpec], stop_timeout: float | None, unit: str = UNIT) -> Problem | None:
    """A warning where the unit gives less than the longest stop of any shard."""
    from llmgw.domain.problem import Problem, Where

    slowest = max(specs, key=lambda spec: spec.limits.longest_stop, default=None)
    if slowest is None or stop_timeout is None or stop_timeout > slowest.limits.longest_stop:
        return None
    longest = slowest.limits.longest_stop
    return Problem(
        code="unit-stop-timeout",
        message=(
            f"TimeoutStopSec={stop_timeout:g} is not longer than the longest stop, {longest:g}s of shard "
            f'"{slowest.name}" (drain_timeout + stop_timeout + 10s + gpu_release_timeout)'
        ),
        hint=f"systemd would kill llmgw in the middle of it; set TimeoutStopSec={longest + 30:.0f} in a drop-in "
        f"(systemctl edit {unit})",
        where=Where(f"unit {unit}"),
        severity="warning",
    )
