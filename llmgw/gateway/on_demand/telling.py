"""What the gateway tells the board, so that models are loaded and unloaded by it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from llmgw.domain.shard import ShardId
from llmgw.domain.status import Want
from llmgw.gateway.admission.snapshot import Queued

SAME = 1.0
"""Seconds by which the arrival of the oldest may differ between two looks without being another: the board's readers
are woken by each change."""


def wants_of(
    queues: Iterable[Queued],
    without_endpoint: Collection[str],
    bands: Iterable[str],
    now: float,
    before: Mapping[str, Want],
) -> dict[str, Want]:
    """Who waits for models without an endpoint. `bands` are the names from the highest on, `now` is seconds since the
    epoch, `before` what was told last.
    """
    ranks = {name: rank for rank, name in enumerate(bands)}
    found: dict[str, Want] = {}
    for row in queues:
        if not row.waiting or row.model not in without_endpoint:
            continue
        want = Want(row.model, row.waiting, now - row.oldest, row.band)
        other = found.get(row.model)
        if other is not None:
            highest = min(want.band, other.band, key=lambda name: ranks.get(name, len(ranks)))
            want = Want(row.model, want.waiting + other.waiting, min(want.since, other.since), highest)
        found[row.model] = want
    return {model: _settled(want, before.get(model)) for model, want in found.items()}


def _settled(want: Want, before: Want | None) -> Want:
    if before is None or abs(want.since - before.since) >= SAME:
        return want
    return Want(want.model, want.waiting, before.since, want.band)


def used_by(
    before: Mapping[ShardId, float], used: Collection[ShardId], known: Collection[ShardId], now: float
) -> Mapping[ShardId, float]:
    """When each shard was used last, after a look at which `used` had requests; those that are not `known` any more are
    forgotten. `now` is seconds since the epoch."""
    if not used and before.keys() <= set(known):
        return before
    return {id_: at for id_, at in {**before, **dict.fromkeys(used, now)}.items() if id_ in known}
