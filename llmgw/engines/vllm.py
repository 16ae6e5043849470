"""vLLM: `vllm serve MODEL`. Checked against the source of 0.33 and runs of 0.32 (CPU)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmgw.domain.shard import EngineKind, LaunchPlan, UnixEndpoint
from llmgw.engines.options import address, internal_port, sizes
from llmgw.engines.profile import Adapter, Call, EngineProfile, MetricNames, Option, SleepMode

SHUTDOWN_TIMEOUT = 3600
"""Seconds. vLLM's own default of 0 aborts running requests; one hour leaves the limit to llmgw's `stop_timeout`."""

WEIGHTS_DROPPED = 2
"""The sleep level that keeps no copy of the weights."""

READY_TIMEOUT = 7 * 24 * 3600
"""Seconds. vLLM gives up after 600 s of loading by itself; seven days leave that to `load_timeout`."""

QUIET_PATHS = "/health,/v1/models,/metrics,/ping,/load"
"""Each question of llmgw would otherwise add one line to the engine's log."""


def fall_asleep(level: int) -> tuple[Call, ...]:
    return (Call("POST", f"/sleep?level={level}"),)


def wake(level: int) -> tuple[Call, ...]:
    """After level 2 the weights are gone: their memory comes first, then they are read again, then the cache."""
    if level < WEIGHTS_DROPPED:
        return (Call("POST", "/wake_up"),)
    return (
        Call("POST", "/wake_up?tags=weights"),
        Call("POST", "/collective_rpc", {"method": "reload_weights"}),
        Call("POST", "/wake_up?tags=kv_cache"),
    )


PROFILE = EngineProfile(
    kind=EngineKind.VLLM,
    default_command=("vllm", "serve"),
    distribution="vllm",
    supported_versions="0.32 and 0.33 were checked; older ones start as far as they know the options",
    term_to="leader",
    kill_while_loading=True,
    loading_titles=("VLLM::EngineCor", "VLLM::Worker", "VLLM::DPCoordin"),
    socket_before_ready=True,
    supports_unix=True,
    supports_nodes=True,
    key_variable="VLLM_API_KEY",
    slots_options=("max-num-seqs",),
    max_model_len_flag="max-model-len",
    quantization_flag="quantization",
    max_model_len_aliases=("max-model-len",),
    quantization_aliases=("quantization", "q"),
    owned={
        "model": "weights",
        "model-tag": "weights",
        "served-model-name": "model",
        "host": "host",
        "port": "port",
        "uds": 'port = "unix"',
        "tensor-parallel-size": "tensor_parallel",
        "tp": "tensor_parallel",
        "pipeline-parallel-size": "pipeline_parallel",
        "pp": "pipeline_parallel",
        "data-parallel-size": "data_parallel",
        "dp": "data_parallel",
        "data-parallel-rpc-port": "node.rendezvous_ports",
        "dpp": "node.rendezvous_ports",
        "nnodes": "nodes",
        "n": "nodes",
        "node-rank": "nodes",
        "r": "nodes",
        "master-addr": "nodes",
        "master-port": "nodes",
        "headless": "nodes",
        "api-key": "api_key",
        "shutdown-timeout": "stop_timeout",
        "device-ids": "gpus",
        "enable-sleep-mode": 'idle_action = "sleep"',
    },
    list_style="once",
    negates=True,
    json_tables=True,
    equals_form=True,
    sleep=SleepMode(fall_asleep, wake, "/is_sleeping", WEIGHTS_DROPPED),
    metrics=MetricNames(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        steps=("vllm:iteration_tokens_total_count", "vllm:generation_tokens_total"),
        kv_usage="vllm:kv_cache_usage_perc",
    ),
    probe_lines=re.compile(
        r'^(?:\(\w+[^)]*\) )?INFO: +\S+ - "GET (?:/health|/v1/models|/metrics|/ping|/load) HTTP/1\.[01]" \d{3}'
    ),
)


def options(plan: LaunchPlan) -> tuple[Option, ...]:
    """The model is positional: `--model` beside `serve` ends vLLM with `unrecognized arguments`."""
    spec = plan.spec
    made = [Option("", (spec.weights or spec.model,)), Option("served-model-name", (spec.model,))]
    if isinstance(plan.endpoint, UnixEndpoint):
        made.append(Option("uds", (plan.endpoint.path,)))
    else:
        made += address(plan.endpoint)
    made += sizes(
        spec.layout,
        tensor="tensor-parallel-size",
        pipeline="pipeline-parallel-size",
        data="data-parallel-size",
    )
    if spec.layout.data > 1:
        # Its fixed default of 29550 would be the same for every data-parallel shard on this node.
        made.append(Option("data-parallel-rpc-port", (str(internal_port(plan)),)))
    if spec.max_model_len is not None:
        made.append(Option("max-model-len", (str(spec.max_model_len),)))
    if spec.quantization is not None:
        made.append(Option("quantization", (spec.quantization,)))
    if spec.idle_action == "sleep":
        made.append(Option("enable-sleep-mode"))
    made.append(
        Option(
            "shutdown-timeout",
            (str(SHUTDOWN_TIMEOUT),),
            reason="requests that still run at a stop are aborted instead of finished",
        )
    )
    made.append(
        Option(
            "disable-access-log-for-endpoints",
            (QUIET_PATHS,),
            soft=True,
            reason="its log file gets one line per health check; llmgw hides them in `llmgw logs`",
        )
    )
    return tuple(made)


def environment(plan: LaunchPlan) -> Mapping[str, str]:
    """The constant that leaves every limit to llmgw, the key, which vLLM reads from here, and for sleep mode the pages
    that put it to sleep: vLLM asks nobody for a key there, hence on loopback only."""
    made = {"VLLM_ENGINE_READY_TIMEOUT_S": str(READY_TIMEOUT)}
    if plan.spec.api_key is not None:
        made["VLLM_API_KEY"] = plan.spec.api_key.reveal()
    if plan.spec.idle_action == "sleep":
        made["VLLM_SERVER_DEV_MODE"] = "1"
    return made


ADAPTER = Adapter(PROFILE, options, environment)
