"""Does it fit? The engine's own arithmetic, before it spends minutes on finding out.

Only lower bounds are counted, so that nothing is refused which an engine would run: what is not known is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import frozen

from llmgw.domain.hardware import Gpu
from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ShardSpec
from llmgw.preflight import model_config
from llmgw.preflight.needs import weights_path
from llmgw.preflight.situation import PLAIN, Situation, gibibytes, gpus_of, model_of, number, option, problem, warning

MIB = 1 << 20

VLLM_UTILIZATION = 0.92
"""vLLM's default of gpu-memory-utilization (read in 0.32)."""


@frozen
class Demand:
    """What one rank needs at least, in bytes. `context` is the number of tokens that the key-value cache is for."""

    weights: int
    cache: int
    context: int
    sharing: str
    """How the weights are split, in words."""

    @property
    def total(self) -> int:
        return self.weights + self.cache


def memory_free(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    """vLLM takes a fixed share of each card and stops when so much is not free."""
    share = _share(spec)
    if share is None:
        return
    for gpu in gpus_of(spec, situation):
        known = situation.facts.availability.get(gpu.uuid)
        if known is None or not known.assignable:
            # Whoever is in the way is told already, by name.
            continue
        if any(holder.shard is not None and not spec.share_gpus for holder in known.holders):
            # An engine of ours, which would be gone by then.
            continue
        free = known.free
        if gpu.usable_memory is None or gpu.unified_memory or free is None:
            continue
        wanted = share * gpu.usable_memory * MIB
        if wanted > free * MIB:
            most = max(0.0, free / gpu.usable_memory)
            yield problem(
                spec,
                "gpu-memory-free",
                "args.gpu-memory-utilization",
                f"it wants {share:g} x {gibibytes(gpu.usable_memory * MIB)} = {gibibytes(wanted)} of GPU {gpu.index} "
                f"({gpu.gpu_class}), of which {gibibytes(free * MIB)} are free",
                f"free the memory, or write gpu-memory-utilization = {int(most * 100) / 100:g} or less",
                form=PLAIN,
            )
            return


def memory_for_model(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    """Weights and the cache of one longest request against what the engine may use."""
    demand = demand_of(spec, situation)
    if demand is None:
        return
    for gpu in gpus_of(spec, situation):
        if gpu.usable_memory is None:
            if not gpu.unified_memory:
                yield warning(
                    spec,
                    "gpu-memory-unknown",
                    "gpus",
                    f"the driver does not say how much memory GPU {gpu.index} has, so nobody can tell whether the "
                    f"model "
                    "fits",
                    "look at nvidia-smi -q",
                )
            return
        allowed, words = _allowed(spec, gpu)
        if demand.total > allowed:
            yield problem(
                spec,
                "model-memory",
                "weights",
                f"{_arithmetic(demand)} = {gibibytes(demand.total)} on each GPU, but {words} = {gibibytes(allowed)} "
                f"is all that it may use of GPU {gpu.index} ({gpu.gpu_class})",
                _remedy(spec, demand, allowed),
                form=PLAIN,
            )
            return


def demand_of(spec: ShardSpec, situation: Situation) -> Demand | None:
    """The least that one rank needs; None where the folder does not say."""
    config = model_of(spec, situation)
    path = weights_path(spec)
    folder = situation.facts.model_folders.get(path) if path is not None else None
    if config is None or folder is None or folder.weight_bytes is None or option(spec, "cpu-offload-gb") is not None:
        return None
    ranks = spec.layout.tensor * spec.layout.pipeline
    weights = int(folder.weight_bytes * _shrink(spec, config)) // ranks
    length = spec.max_model_len or model_config.context_length(config)
    # Without a written length SGLang and newer vLLM fit the context to the memory themselves.
    context = spec.max_model_len or 0
    cache = 0
    if length is not None and context:
        per_token = model_config.cache_bytes_per_token(config, spec.layout.tensor, _cache_bytes(spec), context)
        cache = (per_token or 0) * context // spec.layout.pipeline
    sizes = f"{spec.layout.tensor} x {spec.layout.pipeline}"
    return Demand(weights, cache, context, f"weights {gibibytes(folder.weight_bytes)} / ({sizes})")


def _shrink(spec: ShardSpec, config: Mapping[str, object]) -> float:
    """By how much weights become smaller when they are loaded: 32-bit ones are read as 16 bit, and some engines
    quantize on the way. Then nothing is known, and the smallest that could be is counted."""
    if spec.quantization is not None and not model_config.is_quantized(config):
        return 0.25 if model_config.is_float32(config) is False else 0.125
    return 0.5 if model_config.is_float32(config) and option(spec, "dtype") not in ("float", "float32") else 1.0


def _cache_bytes(spec: ShardSpec) -> float:
    """Bytes of one number in the key-value cache, the least that the option may mean."""
    kind = option(spec, "kv-cache-dtype")
    if kind in (None, "auto", "float16", "bfloat16", "bf16", "half"):
        return 2.0
    return 0.5 if isinstance(kind, str) and ("fp4" in kind or "int4" in kind or "turbo" in kind) else 1.0


def _share(spec: ShardSpec) -> float | None:
    """The share of each card that vLLM takes at the start; None where it does not work so."""
    if spec.engine is not EngineKind.VLLM or option(spec, "kv-cache-memory-bytes") is not None:
        return None
    share = number(spec, "gpu-memory-utilization", "device-memory-utilization")
    if share is None:
        written = option(spec, "gpu-memory-utilization", "device-memory-utilization")
        return VLLM_UTILIZATION if written is None else None
    return share if 0 < share <= 1 else None


def _allowed(spec: ShardSpec, gpu: Gpu) -> tuple[int, str]:
    """Bytes of a card that the engine may use, and how that comes about."""
    usable = (gpu.usable_memory or 0) * MIB
    share = _share(spec)
    if share is None:
        return usable, "its usable memory"
    return int(share * usable), f"{share:g} x {gibibytes(usable)}"


def _arithmetic(demand: Demand) -> str:
    text = f"{demand.sharing} = {gibibytes(demand.weights)}"
    if demand.cache:
        text += f" + cache of one request of {demand.context} tokens {gibibytes(demand.cache)}"
    return text


def _remedy(spec: ShardSpec, demand: Demand, allowed: int) -> str:
    if demand.weights < allowed and demand.cache:
        fits = int(demand.context * (allowed - demand.weights) / demand.cache)
        return f"write max_model_len = {fits} or less, use more GPUs, or a quantized model"
    more = " or raise gpu-memory-utilization" if spec.engine is EngineKind.VLLM else ""
    return f"use more or larger GPUs, a quantized or a smaller model{more}"
