"""What a local model's config.json says, as far as rules need it. Pure; a key that is missing, of another type or
absurd is unknown, since these files come from anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NESTED = ("text_config", "llm_config", "language_config")
"""Where multi-modal models keep the numbers of their language model."""

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")


def attention_heads(config: Mapping[str, Any]) -> int | None:
    """Number of attention heads, which the tensor-parallel size must divide."""
    return next(_integers(config, ("num_attention_heads", "n_head")), None)


def kv_heads(config: Mapping[str, Any]) -> int | None:
    """Number of key-value heads, None where the file names none: then there are as many as attention heads."""
    written = next(_integers(config, ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")), None)
    if written is None and any(part.get("multi_query") is True for part in _parts(config)):
        # One for all: GPT BigCode, the first Falcons.
        return 1
    return written


def is_latent(config: Mapping[str, Any]) -> bool:
    """Whether attention keeps one compressed vector per token instead of heads (MLA, as DeepSeek's models)."""
    return next(_integers(config, ("kv_lora_rank",)), None) is not None


def cache_bytes_per_token(config: Mapping[str, Any], tensor: int, number_bytes: float, context: int) -> int | None:
    """The least that the key-value cache of all layers takes on one rank per token of a request of `context` tokens;
    None where the file does not say. Layers with a sliding window or chunks keep those only, layers without attention
    (Mamba, linear attention) nothing; where the file tells in a way of the model's own which layers these are, the
    least is nothing.
    """
    layers = next(_integers(config, ("num_hidden_layers", "n_layer", "num_layers")), None)
    if layers is None or not _keeps_a_cache(config):
        return None
    counted = _full_layers(config, layers, context)
    if is_latent(config):
        rank = next(_integers(config, ("kv_lora_rank",)), 0)
        rope = next(_integers(config, ("qk_rope_head_dim",)), 0)
        # Every rank has the whole vector.
        return int(counted * (rank + rope) * number_bytes)
    heads, size = kv_heads(config) or attention_heads(config), head_size(config)
    if heads is None or size is None:
        return None
    return int(counted * 2 * max(1, heads // tensor) * size * number_bytes)


def _keeps_a_cache(config: Mapping[str, Any]) -> bool:
    """Whether the model writes text token by token; encoders and classifiers keep nothing."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return True
    return any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in names)


def head_size(config: Mapping[str, Any]) -> int | None:
    written = next(_integers(config, ("head_dim",)), None)
    hidden, heads = next(_integers(config, ("hidden_size", "n_embd")), None), attention_heads(config)
    if written is not None or hidden is None or heads is None:
        return written
    return hidden // heads


def _full_layers(config: Mapping[str, Any], layers: int, context: int) -> float:
    """Layers that keep the whole context; one with a window counts as the part of it that the window is."""
    window = next(_integers(config, ("sliding_window", "attention_chunk_size")), None)
    part = min(1.0, window / context) if window is not None and context > 0 else 1.0
    kinds = next((inner["layer_types"] for inner in _parts(config) if isinstance(inner.get("layer_types"), list)), None)
    signs = MIXED_KEYS if kinds is None else MIXED_KEYS - TOLD_BY_TYPES
    if any(inner.get(key) not in (None, 0, False) for inner in _parts(config) for key in signs):
        return 0.0
    if kinds is None:
        used = not any(inner.get("use_sliding_window") is False for inner in _parts(config))
        return layers * (part if window is not None and used else 1.0)
    full = sum(1 for kind in kinds if kind == "full_attention")
    return full + part * sum(1 for kind in kinds if kind in ("sliding_attention", "chunked_attention"))


TOLD_BY_TYPES = frozenset({"full_attention_interval", "linear_num_value_heads", "linear_conv_kernel_dim"})
"""Signs of mixed layers that `layer_types` tells apart where it is written (Qwen's models)."""

MIXED_KEYS = TOLD_BY_TYPES | {
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_layer_period",
    "attn_layer_indices",
    "attn_type_list",
    "mamba_d_state",
    "mamba_d_ssm",
    "mb_per_layer",
    "ssm_cfg",
    "full_attn_idxs",
    "linear_attn_config",
    "block_types",
    "_block_types",
    "block_configs",
    "compress_ratios",
    "num_kv_shared_layers",
    "use_cla",
    "cross_attention_layers",
}
"""Signs of layers without attention, or without a cache of their own, told in a way of the model's own."""


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Whether there are experts, which copies of an engine (data parallel) divide among themselves."""
    return any("expert" in key for part in _parts(config) for key in part)


def loaded_part(config: Mapping[str, Any]) -> float:
    """The part of the files that every engine loads: layers that only predict further tokens may be left out."""
    layers = next(_integers(config, ("num_hidden_layers",)), None)
    further = next(_integers(config, ("num_nextn_predict_layers", "mtp_num_hidden_layers")), 0)
    return layers / (layers + further) if layers is not None else 1.0


def cache_is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint itself asks for a cache of 8 bits or fewer, which `auto` then means."""
    for part in _parts(config):
        found = part.get("quantization_config")
        if isinstance(found, Mapping) and (found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo")):
            return True
    return next(_integers(config, ("index_topk",)), None) is not None


def is_16_bit(config: Mapping[str, Any]) -> bool:
    kinds = ("bfloat16", "float16")
    return any(part.get(key) in kinds for part in _parts(config) for key in ("torch_dtype", "dtype"))


def is_bf16(config: Mapping[str, Any]) -> bool:
    return any(part.get(key) == "bfloat16" for part in _parts(config) for key in ("torch_dtype", "dtype"))


def is_quantized(config: Mapping[str, Any]) -> bool:
    return any(isinstance(part.get("quantization_config"), Mapping) for part in _parts(config))


def has_nvfp4_weights(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint's weights are 4-bit floats in NVIDIA's form. MXFP4 is another and runs on older cards."""
    return any(_is_nvfp4(part["quantization_config"]) for part in _parts(config) if "quantization_config" in part)


def _is_nvfp4(quantization: Any) -> bool:
    if not isinstance(quantization, Mapping):
        return False
    method = str(quantization.get("quant_method", "")).lower()
    if "nvfp4" in method or method == "modelopt_fp4":
        return True
    if method == "modelopt":
        return "NVFP4" in _algorithm(quantization)
    return method == "compressed-tensors" and "nvfp4" in str(quantization.get("format", "")).lower()


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest context in tokens that an engine can derive from the file. An upper bound: engines differ in how
    they read scaled positions, and refusing what one of them accepts would be wrong."""
    lengths = list(_integers(config, LENGTH_KEYS))
    if not lengths:
        return None
    longest = max(lengths)
    return max([longest, *(_scaled(scaling, longest) for scaling in _scalings(config))])


def own_context(config: Mapping[str, Any]) -> int | None:
    """The context that an engine takes when nobody writes one; None where that is open."""
    lengths = set(_integers(config, LENGTH_KEYS))
    return lengths.pop() if len(lengths) == 1 and context_length(config) in lengths else None


UNSCALED = frozenset({"default", "su", "longrope", "llama3", "mrope"})
"""Kinds of scaled positions whose factor is in the written length already (read in vLLM and SGLang)."""


def _scaled(scaling: Mapping[str, Any], longest: int) -> int:
    kind = scaling.get("rope_type", scaling.get("type"))
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    is_factor = isinstance(factor, int | float) and not isinstance(factor, bool) and 1 < factor < 1e6
    if kind in UNSCALED or not is_factor or factor is None:
        return longest
    base = original if kind == "yarn" and type(original) is int and 0 < original <= longest else longest
    return int(base * factor)


def _scalings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for part in _parts(config):
        for key in ("rope_scaling", "rope_parameters"):
            found = part.get(key)
            if isinstance(found, Mapping):
                yield found
                # One for each kind of layer.
                yield from (inner for inner in found.values() if isinstance(inner, Mapping))


def has_fp8_weights(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint's weights are 8-bit floats. A KV cache in fp8 is another thing and does not count."""
    return any(_is_fp8(part["quantization_config"]) for part in _parts(config) if "quantization_config" in part)


def _is_fp8(quantization: Any) -> bool:
    if not isinstance(quantization, Mapping):
        return False
    method = str(quantization.get("quant_method", "")).lower()
    if "fp8" in method:
        return True
    if method == "compressed-tensors":
        groups = quantization.get("config_groups")
        return isinstance(groups, Mapping) and any(_is_float8(group) for group in groups.values())
    if method == "modelopt":
        return _algorithm(quantization).startswith("FP8")
    return False


def _algorithm(quantization: Mapping[str, Any]) -> str:
    """What modelopt did, from its two forms: flat in config.json, one level deeper in a file of its own."""
    inner = quantization.get("quantization")
    found = quantization.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else None)
    return str(found or "").upper()


def _is_float8(group: Any) -> bool:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    return isinstance(weights, Mapping) and weights.get("num_bits") == 8 and weights.get("type") == "float"


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for key in NESTED:
        part = config.get(key)
        if isinstance(part, Mapping):
            yield part


def _integers(config: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[int]:
    for part in _parts(config):
        for key in keys:
            value = part.get(key)
            # Tokenizers write "no limit" as 10**30.
            if type(value) is int and 0 < value < 10**9:
                yield value
