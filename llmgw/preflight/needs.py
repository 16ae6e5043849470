"""Which facts about the host the rules will ask for, so that a shell can gather these and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from llmgw.domain.shard import EngineKind, ShardSpec


@frozen
class Needs:
    """Keys of the mappings in `HostFacts`. `inventory`: some shard names GPUs, so nvidia-smi must be asked."""

    paths: frozenset[str]
    programs: frozenset[str]
    ports: frozenset[int]
    model_configs: frozenset[str]
    """Folders whose config.json is read when there is one."""
    inventory: bool


def weights_path(spec: ShardSpec) -> str | None:
    """The local path of a shard's weights, None for a hub name and for commands, which may not use them."""
    if spec.engine is EngineKind.COMMAND or spec.weights is None or not spec.weights.startswith("/"):
        return None
    return spec.weights


def needs(specs: Sequence[ShardSpec]) -> Needs:
    """Everything that `preflight(specs, facts)` looks up in `facts`."""
    weights = {path for spec in specs if (path := weights_path(spec))}
    return Needs(
        paths=frozenset(weights | {spec.workdir for spec in specs if spec.workdir}),
        programs=frozenset(spec.command[0] for spec in specs if spec.command),
        ports=frozenset(spec.port for spec in specs if isinstance(spec.port, int)),
        model_configs=frozenset(weights),
        inventory=any(spec.gpus not in (0, ()) for spec in specs),
    )
