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
