"""Does it fit? The engine's own arithmetic, before it spends minutes on finding out.

Only lower bounds are counted, so that nothing is refused which an engine would run: what is not known is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import frozen

from llmgw.domain.hardware import Gpu
from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ShardSpec
from llmgw.preflight import model, model_config
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
    if config is None or folder is None or folder.weight_bytes is None:
        return None
    if any(option(spec, name) is not None for name in ELSEWHERE):
        return None
    layout = spec.layout
    ranks, sizes = layout.tensor * layout.pipeline, f"{layout.tensor} x {layout.pipeline}"
    if layout.data > 1 and model_config.is_mixture(config):
        # Copies divide the experts among themselves, with and without expert parallelism (documented by vLLM). How
        # much of the weights the experts are is not told: the least is that they are all.
        ranks, sizes = ranks * layout.data, f"{sizes} x {layout.data}"
    weights = int(folder.weight_bytes * _shrink(spec, config) * model_config.loaded_part(config)) // ranks
    context = _context(spec, config)
    per_token = 0
    if context:
        per_token = model_config.cache_bytes_per_token(config, layout.tensor, _cache_bytes(spec, config), context) or 0
    cache = int(per_token * context / (layout.pipeline * _context_ranks(spec)))
    return Demand(weights, cache, context, f"weights {gibibytes(folder.weight_bytes)} / ({sizes})")


ELSEWHERE = ("cpu-offload-gb", "offload-backend", "offload-group-size", "dit-cpu-offload")
"""Options under which not all weights lie on the cards."""


def _context(spec: ShardSpec, config: Mapping[str, object]) -> int:
    """Tokens whose cache the engine insists on; 0 where it does not, or where nobody knows.

    vLLM refuses to start when one request of the longest length does not fit, also of the model's own length when
    nobody wrote one; only with `auto` or -1 it looks for the length that fits. SGLang takes what there is.
    """
    if spec.engine is not EngineKind.VLLM:
        return 0
    if spec.max_model_len is None and option(spec, *model.CONTEXT_OPTIONS) is None:
        return model_config.own_context(config) or 0
    return model.written_context(spec) or 0


def _context_ranks(spec: ShardSpec) -> float:
    """Ranks that divide one request's cache by its tokens."""
    decode = number(spec, "decode-context-parallel-size", "dcp") or 1
    return max(1.0, decode) * max(1.0, number(spec, "prefill-context-parallel-size", "pcp") or 1)


def _shrink(spec: ShardSpec, config: Mapping[str, object]) -> float:
    """By how much weights become smaller when they are loaded: those of 32 bit (also where the file does not say) are
    read as 16 bit, and some engines quantize on the way. Then nothing is known, and the smallest that could be is
    counted."""
    if model_config.is_quantized(config):
        return 1.0
    wide = not model_config.is_16_bit(config)
    if model.quantization_of(spec):
        return 0.125 if wide else 0.25
    return 0.5 if wide and option(spec, "dtype") not in ("float", "float32") else 1.0


def _cache_bytes(spec: ShardSpec, config: Mapping[str, object]) -> float:
    """Bytes of one number in the key-value cache, the least that the option may mean."""
    kind = option(spec, "kv-cache-dtype")
    if kind in ("float16", "bfloat16", "bf16", "half"):
        return 2.0
    if kind in (None, "auto"):
        return 0.5 if model_config.cache_is_quantized(config) else 2.0
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
    if spec.engine is EngineKind.SGLANG:
        # What weights and cache may have of the memory that is free at the start. Unwritten it is worked out.
        share = number(spec, "mem-fraction-static")
        share = share if share is not None and 0 < share < 1 else None
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
    option_name = "gpu-memory-utilization" if spec.engine is EngineKind.VLLM else "mem-fraction-static"
    more = f" or raise {option_name}"
    return f"use more or larger GPUs, a quantized or a smaller model{more}"
