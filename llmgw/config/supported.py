"""What the schema knows and this version cannot serve yet: `run` refuses it in words, so that nothing is ignored."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.config.model import Config
from llmgw.domain.problem import Problem, Where
from llmgw.domain.shard import ShardSpec

CODE = "not-yet"


def not_served_yet(config: Config) -> tuple[Problem, ...]:
    """One error for each use of something that comes later."""
    return tuple(_all(config))


def _all(config: Config) -> Iterator[Problem]:
    if config.cluster is not None:
        where = _first(config, "cluster") or (Where(config.files[0]) if config.files else None)
        hint = "remove it; one file with `where` can serve several machines"
        yield Problem(CODE, "[cluster] is not served by this version yet", hint, where, context="[cluster]")
    for spec in config.shards:
        yield from _shard(spec)


def _first(config: Config, name: str) -> Where | None:
    """Where the first written key of a table stands."""
    return next((Where.parse(at) for key, at in config.origins.items() if key.startswith(f"{name}.")), None)


def _shard(spec: ShardSpec) -> Iterator[Problem]:
    if spec.nodes > 1:
        message = f"nodes = {spec.nodes} is not served by this version yet"
        context = f'[shard "{spec.name}"]'
        yield Problem(CODE, message, "run it on one node", spec.written_at("nodes"), context=context)
