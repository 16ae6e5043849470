"""SGLang: `sglang serve --model-path MODEL`. Checked against source and CPU runs of 0.5.23."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmgw.domain.shard import EngineKind, LaunchPlan, TcpEndpoint
from llmgw.engines.options import address, internal_port, sizes
from llmgw.engines.profile import Adapter, EngineProfile, MetricNames, Option

PROFILE = EngineProfile(
    kind=EngineKind.SGLANG,
    default_command=("sglang", "serve"),
    distribution="sglang",
    supported_versions="0.5.23 was checked; older ones may need `python -m sglang.launch_server` as their command, and "
    'those without `/ready` need `ready_path = "/health"` with `probe_timeout = "25s"`',
    ready_path="/ready",
    deep_health_path="/health",
    term_to="leader",
    kill_while_loading=True,
    loading_titles=("sglang::schedul", "sglang::detoken"),
    supports_nodes=True,
    key_in_argv=True,
    slots_options=("max-running-requests",),
    slots_divided_by="enable-dp-attention",
    slots_path="/server_info",
    max_model_len_flag="context-length",
    quantization_flag="quantization",
    max_model_len_aliases=("context-length",),
    quantization_aliases=("quantization",),
    owned={
        "model-path": "weights",
        "model": "weights",
        "served-model-name": "model",
        "host": "host",
        "port": "port",
        "tensor-parallel-size": "tensor_parallel",
        "tp-size": "tensor_parallel",
        "tp": "tensor_parallel",
        "pipeline-parallel-size": "pipeline_parallel",
        "pp-size": "pipeline_parallel",
        "pp": "pipeline_parallel",
        "data-parallel-size": "data_parallel",
        "dp-size": "data_parallel",
        "dp": "data_parallel",
        "nnodes": "nodes",
        "node-rank": "nodes",
        "dist-init-addr": "nodes",
        "nccl-init-addr": "nodes",
        "nccl-port": "node.rendezvous_ports",
        "api-key": "api_key",
        "base-gpu-id": "gpus",
        "gpu-id-step": "gpus",
    },
    list_style="once",
    json_tables=True,
    equals_form=True,
    metrics=MetricNames(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        steps=("sglang:realtime_tokens_total", "sglang:generation_tokens_total"),
        kv_usage="sglang:token_usage",
        tokens_per_second="sglang:gen_throughput",
        only={"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"},
    ),
    probe_lines=re.compile(
        r'^(?:\[[-\d]+ [:\d]+(?: \w+)*\] )?INFO: +\S+ - "GET (?:/ready|/health|/v1/models|/metrics|/ping) '
        r'HTTP/1\.[01]" \d{3}'
    ),
)


def options(plan: LaunchPlan) -> tuple[Option, ...]:
    """Metrics are off by default, access lines on; both are turned round."""
    spec = plan.spec
    made = [Option("model-path", (spec.weights or spec.model,)), Option("served-model-name", (spec.model,))]
    if isinstance(plan.endpoint, TcpEndpoint):
        made += address(plan.endpoint)
    made += sizes(spec.layout, tensor="tp-size", pipeline="pp-size", data="dp-size")
    if spec.layout.data == 1:
        # Left to itself it takes its port plus 100 to 1000 at random, which may be another shard's engine port.
        # With several copies each needs a port of its own, so there it must choose.
        made.append(Option("nccl-port", (str(internal_port(plan)),)))
    if spec.max_model_len is not None:
        made.append(Option("context-length", (str(spec.max_model_len),)))
    if spec.quantization is not None:
        made.append(Option("quantization", (spec.quantization,)))
    if spec.api_key is not None:
        made.append(Option("api-key", (spec.api_key.reveal(),), secret=True))
    made.append(Option("enable-metrics", soft=True, reason="running and waiting requests are not known"))
    made.append(Option("log-level-http", ("warning",), soft=True, reason="its log file gets one line per health check"))
    return tuple(made)


def environment(plan: LaunchPlan) -> Mapping[str, str]:
    """Without these a crashed SGLang holds its GPUs for some 65 s more, waiting for core dumps and py-spy."""
    return {
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
    }


ADAPTER = Adapter(PROFILE, options, environment)
