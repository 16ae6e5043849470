"""llama.cpp: `llama-server`. Checked against runs of build 11434 (CPU)."""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.domain.shard import EngineKind, LaunchPlan, TcpEndpoint
from llmgw.engines.options import address, normal_name
from llmgw.engines.profile import Adapter, EngineProfile, MetricNames, Option

OTHER_SOURCES = frozenset({"hf-repo", "hf", "hfr", "model-url", "mu", "docker-repo", "dr"})
"""Options of llama-server that name the weights in another way than a file."""

PROFILE = EngineProfile(
    kind=EngineKind.LLAMACPP,
    default_command=("llama-server",),
    supported_versions="build 11434 was checked; builds since 2025 know all options used here",
    loading_on_503=True,
    key_variable="LLAMA_API_KEY",
    slots_options=("parallel", "np"),
    slots_path="/props",
    max_model_len_flag="ctx-size",
    max_model_len_aliases=("ctx-size", "c"),
    owned={
        "model": "weights",
        "m": "weights",
        "alias": "model",
        "a": "model",
        "host": "host",
        "port": "port",
        "api-key": "api_key",
        "api-key-file": "api_key",
    },
    metrics=MetricNames(
        running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
        steps=("llamacpp:n_decode_total", "llamacpp:tokens_predicted_total"),
        tokens_per_second="llamacpp:predicted_tokens_seconds",
    ),
)


def options(plan: LaunchPlan) -> tuple[Option, ...]:
    """A file goes by `--model`; `owner/name` or `owner/name:quant` is fetched from the hub."""
    spec = plan.spec
    made: list[Option] = []
    elsewhere = any(normal_name(name) in OTHER_SOURCES for name in spec.args)
    if spec.weights is not None or not elsewhere:
        weights = spec.weights or spec.model
        made.append(Option("hf-repo" if _is_hub_id(weights) else "model", (weights,)))
    made.append(Option("alias", (spec.model,)))
    if isinstance(plan.endpoint, TcpEndpoint):
        made += address(plan.endpoint)
    if spec.max_model_len is not None:
        made.append(Option("ctx-size", (str(spec.max_model_len),)))
    made.append(Option("metrics", soft=True, reason="running and waiting requests are not known"))
    return tuple(made)


def _is_hub_id(weights: str) -> bool:
    return weights.count("/") == 1 and not weights.startswith(("/", ".", "~")) and not weights.endswith(".gguf")


def environment(plan: LaunchPlan) -> Mapping[str, str]:
    """The key goes through the environment, so that the process list does not show it."""
    return {} if plan.spec.api_key is None else {"LLAMA_API_KEY": plan.spec.api_key.reveal()}


ADAPTER = Adapter(PROFILE, options, environment)
