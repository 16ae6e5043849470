"""Rules about the model: how it can be split, how long its context is, which numbers its GPUs can compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ShardSpec
from llmgw.preflight import model_config
from llmgw.preflight.situation import (
    PLAIN,
    SPLITTING,
    Situation,
    dotted,
    gpus_of,
    model_of,
    number,
    option,
    problem,
    warning,
)

FP8_FROM = (8, 9)
"""Compute capability from which fp8 weights run natively. vLLM itself starts at 7.5 and SGLang at 8.0 (read in vLLM
0.33 and SGLang 0.5.23): below 8.9 the one falls back to 16 bit and the other fails on first use. Hence a refusal by
default and `allow` as the way out."""

BF16_FROM = (8, 0)
NVFP4_FROM = (10, 0)
"""Below it vLLM computes such weights in 16 bit, and SGLang does not load them."""
NVFP4_DOUBTFUL = 12
"""Major capability whose kernels are not in every build (vllm#32109)."""

LONGER_CONTEXT = frozenset({"VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"})
"""Variables by which a person tells the engine to accept more than the model's own length."""


def _split_model(spec: ShardSpec, situation: Situation) -> Mapping[str, object] | None:
    """The model whose heads are split over the tensor-parallel ranks. With SGLang's attention data parallelism each
    rank has heads of its own."""
    attends_apart = spec.engine is EngineKind.SGLANG and (
        option(spec, "enable-dp-attention") not in (None, False) or option(spec, "attn-dp-size") is not None
    )
    return None if attends_apart else model_of(spec, situation)


def heads_not_divisible(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    config = _split_model(spec, situation)
    heads = model_config.attention_heads(config) if config is not None else None
    tensor = spec.layout.tensor
    if heads is None or heads % tensor == 0:
        return
    yield problem(
        spec,
        "heads",
        "tensor_parallel",
        f"{tensor} does not divide {heads} attention heads; possible here: {_possible(spec, situation)}",
        "use one of these sizes, and pipeline_parallel for further GPUs",
        form='shard "{name}": tensor_parallel = {text}',
    )


def kv_heads_not_divisible(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    """Both engines divide key-value heads over the ranks or repeat them, and need one of the two to come out even."""
    config = _split_model(spec, situation)
    tensor = spec.layout.tensor
    if config is None or _splits_kv(config, tensor) or not _splits(config, tensor):
        return
    yield problem(
        spec,
        "kv-heads",
        "tensor_parallel",
        f"{tensor} and {model_config.kv_heads(config)} key-value heads do not divide each other; possible here: "
        f"{_possible(spec, situation)}",
        "use one of these sizes, and pipeline_parallel for further GPUs",
        form='shard "{name}": tensor_parallel = {text}',
    )


def _splits(config: Mapping[str, object], size: int) -> bool:
    heads = model_config.attention_heads(config)
    return heads is None or heads % size == 0


def _splits_kv(config: Mapping[str, object], size: int) -> bool:
    heads = model_config.kv_heads(config)
    return heads is None or model_config.is_latent(config) or heads % size == 0 or size % heads == 0


def _possible(spec: ShardSpec, situation: Situation) -> str:
    """Sizes that the model can be split into, as far as this node could use them."""
    config = model_of(spec, situation) or {}
    inventory = situation.facts.inventory
    most = max(8, spec.layout.tensor, len(inventory.gpus) if inventory is not None else 0)
    return ", ".join(str(size) for size in range(1, most + 1) if _splits(config, size) and _splits_kv(config, size))


CONTEXT_OPTIONS = ("max-model-len", "context-length")


def context_too_long(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    config = model_of(spec, situation)
    longest = model_config.context_length(config) if config is not None else None
    wanted = written_context(spec)
    if longest is None or wanted is None or wanted <= longest:
        return
    if LONGER_CONTEXT.isdisjoint({*spec.env, *situation.facts.env}):
        yield problem(
            spec,
            "context-length",
            "max_model_len",
            f"{wanted} is above the model's own {longest} tokens",
            f"write at most {longest}",
        )


def written_context(spec: ShardSpec) -> int | None:
    """The context in tokens that somebody wrote, in llmgw's key or in an engine's option; None where nobody did, or
    where it is for the engine to find (`auto`)."""
    written = number(spec, *CONTEXT_OPTIONS)
    if written is not None:
        return int(written) if 0 < written < 1e9 else None
    return spec.max_model_len if option(spec, *CONTEXT_OPTIONS) is None else None


def sizes_of_sglang(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    """What SGLang asserts about sizes, without a text."""
    if spec.engine is not EngineKind.SGLANG:
        return
    layout, nodes = spec.layout, spec.nodes
    if nodes > 1 and (layout.tensor * layout.pipeline) % nodes:
        yield problem(
            spec,
            "sglang-sizes",
            "nodes",
            f"SGLang needs tensor x pipeline = {layout.tensor * layout.pipeline} to be a multiple of {nodes}",
            "change tensor_parallel or nodes",
        )
    if nodes > 1 and layout.data > 1:
        yield problem(
            spec,
            "sglang-sizes",
            "data_parallel",
            "SGLang does not span nodes with data parallel copies",
            "use replicas, or its own attention data parallelism through args",
        )
    chunk, page = number(spec, "chunked-prefill-size"), number(spec, "page-size")
    if chunk is not None and page is not None and page > 1 and chunk > 0 and chunk % page:
        yield problem(
            spec,
            "sglang-sizes",
            "args",
            f"chunked-prefill-size {chunk:g} is not a multiple of page-size {page:g}",
            "make it one",
        )


def fp8_capability(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    least = FP8_FROM
    if spec.engine not in SPLITTING or not _wants_fp8(spec, situation):
        return
    for gpu in gpus_of(spec, situation):
        # Compared as pairs of integers: as text, 12.0 would be below 8.9.
        if gpu.compute_capability is None:
            yield problem(
                spec,
                "capability-unknown",
                "quantization",
                f"fp8 needs compute capability {dotted(least)}, and that of GPU {gpu.index} ({gpu.gpu_class}) is not "
                "known",
                "look it up in the vendor's list of CUDA GPUs; below it the engine is slow or fails",
                severity="warning",
                form=PLAIN,
            )
            return
        if gpu.compute_capability < least:
            way_out = ', or allow = ["fp8-capability"] to run it in 16 bit' if spec.engine is EngineKind.VLLM else ""
            yield problem(
                spec,
                "fp8-capability",
                "quantization",
                f"fp8 needs compute capability {dotted(least)}, GPU {gpu.index} ({gpu.gpu_class}) has "
                f"{dotted(gpu.compute_capability)}",
                f"use another quantization{way_out}",
                form=PLAIN,
            )
            return


def quantization_of(spec: ShardSpec) -> str:
    """The quantization that somebody wrote, in small letters; empty where nobody did."""
    return str(option(spec, "quantization", "q") or spec.quantization or "").lower()


def _wants_fp8(spec: ShardSpec, situation: Situation) -> bool:
    # kv-cache-dtype is not asked: there fp8 is a storage format, and works on older cards.
    if "fp8" in quantization_of(spec):
        return True
    config = model_of(spec, situation)
    return config is not None and model_config.has_fp8_weights(config)


def bf16_capability(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    """`dtype = "bfloat16"` below 8.0 is refused by the engines; left to them, they compute in float16."""
    if spec.engine not in SPLITTING:
        return
    written = option(spec, "dtype")
    config = model_of(spec, situation)
    asked = written == "bfloat16"
    if not asked and not (written in (None, "auto") and config is not None and model_config.is_bf16(config)):
        return
    for gpu in gpus_of(spec, situation):
        if gpu.compute_capability is None or gpu.compute_capability >= BF16_FROM:
            continue
        if asked:
            yield problem(
                spec,
                "bf16-capability",
                "args.dtype",
                f"bfloat16 needs compute capability 8.0, GPU {gpu.index} ({gpu.gpu_class}) has "
                f"{dotted(gpu.compute_capability)}",
                'write dtype = "half"',
                form=PLAIN,
            )
        else:
            yield warning(
                spec,
                "bf16-fallback",
                "weights",
                f"the model is in bfloat16, which GPU {gpu.index} ({gpu.gpu_class}, capability "
                f"{dotted(gpu.compute_capability)}) does not have: the engine computes in float16",
                'large values may overflow; write args = { dtype = "half" } to say that it is meant',
            )
        return


def nvfp4_capability(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    if spec.engine not in SPLITTING or not _wants_nvfp4(spec, situation):
        return
    for gpu in gpus_of(spec, situation):
        if gpu.compute_capability is None:
            yield warning(
                spec,
                "capability-unknown",
                "quantization",
                f"NVFP4 needs compute capability 10.0, and that of GPU {gpu.index} ({gpu.gpu_class}) is not known",
                "look it up in the vendor's list of CUDA GPUs; below it the engine is slow or fails",
            )
            return
        if gpu.compute_capability < NVFP4_FROM:
            way_out = ', or allow = ["nvfp4-capability"] to run it in 16 bit' if spec.engine is EngineKind.VLLM else ""
            yield problem(
                spec,
                "nvfp4-capability",
                "quantization",
                f"NVFP4 needs compute capability 10.0, GPU {gpu.index} ({gpu.gpu_class}) has "
                f"{dotted(gpu.compute_capability)}",
                f"use another quantization{way_out}",
                form=PLAIN,
            )
            return
        if gpu.compute_capability[0] == NVFP4_DOUBTFUL:
            yield warning(
                spec,
                "nvfp4-kernels",
                "quantization",
                f"GPU {gpu.index} ({gpu.gpu_class}) can do NVFP4, but not every build of the engine has its kernels",
                "if the start fails with a missing kernel, use a build for this card or another quantization",
            )
            return


def _wants_nvfp4(spec: ShardSpec, situation: Situation) -> bool:
    flag = quantization_of(spec)
    if "fp4" in flag and not flag.startswith("mx"):
        return "mxfp4" not in flag
    config = model_of(spec, situation)
    return config is not None and model_config.has_nvfp4_weights(config)
