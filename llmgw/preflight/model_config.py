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
    return next(_integers(config, ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")), None)


def is_latent(config: Mapping[str, Any]) -> bool:
    """Whether attention keeps one compressed vector per token instead of heads (MLA, as DeepSeek's models)."""
    return next(_integers(config, ("kv_lora_rank",)), None) is not None


def cache_bytes_per_token(config: Mapping[str, Any], tensor: int, number_bytes: float, context: int) -> int | None:
    """The least that the key-value cache of all layers takes on one rank per token of a request of `context` tokens;
    None where the file does not say. Layers with a sliding window keep that window only, layers without attention
    (Mamba, linear attention) nothing.
    """
    layers = next(_integers(config, ("num_hidden_layers", "n_layer", "num_layers")), None)
    if layers is None:
        return None
    if is_latent(config):
        rank = next(_integers(config, ("kv_lora_rank",)), 0)
        rope = next(_integers(config, ("qk_rope_head_dim",)), 0)
        # Every rank has the whole vector.
        return int(layers * (rank + rope) * number_bytes)
    heads, size = kv_heads(config) or attention_heads(config), head_size(config)
    if heads is None or size is None:
        return None
    per_layer = 2 * max(1, heads // tensor) * size * number_bytes
    return int(_full_layers(config, layers, context) * per_layer)


def head_size(config: Mapping[str, Any]) -> int | None:
    written = next(_integers(config, ("head_dim",)), None)
    hidden, heads = next(_integers(config, ("hidden_size", "n_embd")), None), attention_heads(config)
    if written is not None or hidden is None or heads is None:
        return written
    return hidden // heads


def _full_layers(config: Mapping[str, Any], layers: int, context: int) -> float:
    """Layers that keep the whole context; one with a window counts as the part of it that the window is."""
    kinds = next((part["layer_types"] for part in _parts(config) if isinstance(part.get("layer_types"), list)), None)
    window = next(_integers(config, ("sliding_window",)), None)
    part = min(1.0, window / context) if window is not None and context > 0 else 1.0
    if kinds is None:
        if any(key in inner for inner in _parts(config) for key in MIXED_KEYS):
            return 0.0
        used = not any(inner.get("use_sliding_window") is False for inner in _parts(config))
        return layers * (part if window is not None and used else 1.0)
    full = sum(1 for kind in kinds if kind == "full_attention")
    return full + part * sum(1 for kind in kinds if kind == "sliding_attention")


MIXED_KEYS = ("layers_block_type", "hybrid_override_pattern", "attn_layer_period", "mamba_d_state", "full_attn_idxs")
"""Signs of layers without attention, told in a way of the model's own."""


def is_bf16(config: Mapping[str, Any]) -> bool:
    return any(part.get(key) == "bfloat16" for part in _parts(config) for key in ("torch_dtype", "dtype"))


def is_float32(config: Mapping[str, Any]) -> bool:
    return any(part.get(key) == "float32" for part in _parts(config) for key in ("torch_dtype", "dtype"))


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
        return "NVFP4" in str(quantization.get("quant_algo", "")).upper()
    return method == "compressed-tensors" and "nvfp4" in str(quantization.get("format", "")).lower()


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest context in tokens that an engine can derive from the file. An upper bound: engines differ in how
    they read scaled positions, and refusing what one of them accepts would be wrong."""
    lengths = list(_integers(config, LENGTH_KEYS))
    if not lengths:
        return None
    factor = 1.0
    for part in _parts(config):
        for key in ("rope_scaling", "rope_parameters"):
            scaling = part.get(key)
            if isinstance(scaling, Mapping):
                value = scaling.get("factor")
                if isinstance(value, int | float) and not isinstance(value, bool) and 1 < value < 1e6:
                    factor = max(factor, float(value))
    return int(max(lengths) * factor)


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
        return str(quantization.get("quant_algo", "")).upper() == "FP8"
    return False


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
