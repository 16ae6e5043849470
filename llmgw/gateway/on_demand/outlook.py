"""When a model will answer, and whether its load has just failed: read from the table alone. Pure."""

from __future__ import annotations

from llmgw.domain.status import ConditionKind, ShardState, has_given_up
from llmgw.gateway.routing.table import Model, Standing, Table


def estimate(model: Model, now: float) -> float | None:
    """Seconds until the first of its instances can answer, by what their last loads took; None where nobody knows.

    `now` is seconds since the epoch. What a swap adds, the end of another model, is not known in advance; loads take
    minutes, ends seconds.
    """
    if model.endpoints:
        return 0.0
    known = [left for standing in model.standings if (left := _left(standing, now)) is not None]
    return min(known, default=None)


def _left(standing: Standing, now: float) -> float | None:
    status, load = standing.status, standing.status.load_seconds
    if not (standing.loadable or standing.is_coming):
        return None
    if standing.is_sleeping:
        return status.wake_seconds
    if status.state in (ShardState.STARTING, ShardState.LOADING):
        eta = status.progress.eta if status.progress is not None else None
        if load is None or status.launched_at is None:
            return eta
        # A bar ends before the load does: graphs are captured, caches laid out.
        return max(eta or 0.0, load - (now - status.launched_at), 1.0)
    if status.state is ShardState.FAILED and status.next_attempt is not None:
        return max(0.0, status.next_attempt - now) + (load or 0.0)
    if load is None:
        return None
    return load if status.state in (ShardState.PENDING, ShardState.STOPPED, ShardState.DRAINING) else None


def failed_loads(before: Table, after: Table) -> dict[str, str]:
    """Models that lost their last hope between two tables, and why, in one line each: an attempt has failed, and
    nothing else of the model serves, loads or sleeps. Those who wait are to be told; who comes later waits for the next
    attempt.
    """
    return {
        model.name: words
        for model in dict.fromkeys(after.models.values())
        if not model.endpoints and (words := _failure(before.models.get(model.name), model)) is not None
    }


def _failure(before: Model | None, model: Model) -> str | None:
    earlier = {standing.id: standing for standing in before.standings} if before is not None else {}
    failed = [standing for standing in model.standings if _has_failed_since(earlier.get(standing.id), standing)]
    if not failed or any(_may_still_come(standing) for standing in model.standings if standing not in failed):
        return None
    return f"{failed[0].name} is {failed[0].words}"


def _has_failed_since(before: Standing | None, now: Standing) -> bool:
    """A load has failed and it was decided what follows, or the next is under way already: observers skip.

    Who waits for an engine that died while it served waits on: it is started again.
    """
    if before is None:
        return False
    if now.state is ShardState.FAILED:
        if _decided(now) is None or _decided(now) == _decided(before):
            return False
        # One attempt after another that came to nothing before anything was launched.
        return _decided(before) is not None or not now.status.was_ready
    if before.status.was_ready:
        return False
    if before.state is ShardState.FAILED:
        return _decided(before) is None and now.state.is_live
    return now.status.failures > before.status.failures


def _decided(standing: Standing) -> tuple[float | None, str] | None:
    """What follows a failure: the next attempt, or why there is none. None while that is open."""
    status = standing.status
    if status.state is not ShardState.FAILED or (status.next_attempt is None and not has_given_up(status)):
        return None
    return status.next_attempt, status.detail


def _may_still_come(standing: Standing) -> bool:
    if standing.state is ShardState.FAILED or standing.status.condition(ConditionKind.UNPLACED) is not None:
        return False
    return standing.is_coming or standing.is_sleeping
