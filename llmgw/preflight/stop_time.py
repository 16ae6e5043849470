"""Is the service manager's patience longer than the longest stop?"""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.domain.problem import Problem, Where
from llmgw.domain.shard import ShardSpec

CODE = "stop-timeout"
TEXT = (
    "The unit's `TimeoutStopSec` is not longer than the longest stop of a shard (`drain_timeout` + `stop_timeout` + "
    "10 s + `gpu_release_timeout`): systemd would kill engines in the middle of it."
)


def longest_stop(specs: Sequence[ShardSpec]) -> tuple[float, str] | None:
    """Seconds of the worst-case stop and the shard it belongs to; shards stop side by side. None without shards."""
    longest = max(specs, key=lambda spec: spec.limits.longest_stop, default=None)
    return (longest.limits.longest_stop, longest.name) if longest is not None else None


def stop_timeout_problem(unit: str, timeout: float | None, specs: Sequence[ShardSpec]) -> Problem | None:
    """The warning that systemd would kill engines in the middle of their stop. `timeout` is TimeoutStopSec of `unit`
    in seconds; None is infinity."""
    longest = longest_stop(specs)
    if timeout is None or longest is None or timeout > longest[0]:
        return None
    seconds, name = longest
    return Problem(
        CODE,
        f'TimeoutStopSec={timeout:g} is not longer than the longest stop, {seconds:g}s of shard "{name}" '
        "(drain_timeout + stop_timeout + 10s + gpu_release_timeout)",
        f"set TimeoutStopSec={seconds + 30:g} with systemctl edit {unit}, or shorten those of the shard",
        where=Where(f"unit {unit}"),
        severity="warning",
    )
