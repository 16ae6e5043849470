from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.problem import ConfigError
from llmgw.domain.shard import (
    UNSET,
    Command,
    EngineKind,
    LaunchPlan,
    ParallelLayout,
    Secret,
    TcpEndpoint,
    UnixEndpoint,
)
from llmgw.engines.adapter import ADAPTERS, build_command, is_probe_line, owning_key, profile
from tests.engines.plans import INHERITED, make_plan, value_after

GOLDEN = Path(__file__).parent / "golden"

PLANS: dict[str, LaunchPlan] = {
    "vllm-tensor-parallel": make_plan(
        EngineKind.VLLM,
        command=("/opt/vllm/bin/vllm", "serve"),
        weights="meta-llama/Llama-3.1-8B-Instruct",
        model="llama-3.1-8b",
        layout=ParallelLayout(tensor=2, pipeline=2),
        max_model_len=32768,
        quantization="fp8",
        api_key=Secret("sk-engine-key"),
        args={
            "gpu_memory_utilization": 0.92,
            "enable-prefix-caching": False,
            "trust-remote-code": True,
            "speculative-config": {"method": "ngram", "num_speculative_tokens": 4},
            "allowed-origins": ("a", "b"),
        },
        extra_args=("--seed", "${llmgw.replica}"),
        env={"HF_TOKEN": Secret("hf_own"), "HF_HOME": "${llmgw.state_dir}/hf", "PYTHONPATH": UNSET},
        origins={"env.HF_TOKEN": "llmgw.toml:12", "env.HF_HOME": "llmgw.toml:13"},
        plan={
            "inherited_env": INHERITED,
            "devices": ("0", "1", "2", "3"),
            "engine_version": "0.33.0",
            "secret_variables": frozenset({"TEAM_KEY"}),
        },
    ),
    "vllm-unix": make_plan(
        EngineKind.VLLM,
        layout=ParallelLayout(data=1),
        plan={"endpoint": UnixEndpoint("/run/llmgw/engines/chat-0.sock"), "devices": ("5",)},
    ),
    "vllm-old-version": make_plan(EngineKind.VLLM, plan={"engine_version": "0.11.2", "devices": ("0",)}),
    "sglang": make_plan(
        EngineKind.SGLANG,
        weights="/models/qwen",
        layout=ParallelLayout(tensor=2),
        max_model_len=8192,
        api_key=Secret("sk-engine-key"),
        args={"mem_fraction_static": 0.85, "disable-radix-cache": False, "schedule-policy": "lpm"},
        plan={"inherited_env": INHERITED, "devices": ("6", "7"), "engine_version": "0.5.23"},
    ),
    "llamacpp-cpu": make_plan(
        EngineKind.LLAMACPP,
        weights="/models/gemma.gguf",
        max_model_len=4096,
        api_key=Secret("sk-engine-key"),
        args={"threads": 2, "lora": ("/a.gguf", "/b.gguf"), "mlock": True, "device": "none"},
    ),
    "llamacpp-hub": make_plan(EngineKind.LLAMACPP, weights="ggml-org/gemma-3-1b:Q4_K_M", plan={"devices": ("0",)}),
    "command": make_plan(
        EngineKind.COMMAND,
        command=("/opt/tei/bin/router", "--port", "${llmgw.port}", "--price", "5$$"),
        args={"hostname": "${llmgw.host}"},
        env={"MODEL": "${llmgw.model}"},
        plan={"devices": ("1",)},
    ),
}


def show(command: Command) -> str:
    env = {name: [value, command.origins[name]] for name, value in sorted(command.masked_env().items())}
    warnings = [f"{problem.code}: {problem.message}" for problem in command.warnings]
    return json.dumps({"argv": command.masked_argv(), "cwd": command.cwd, "env": env, "warnings": warnings}, indent=1)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_gives_exactly_the_recorded_command(name: str) -> None:
    """`LLMGW_WRITE_GOLDEN=1` writes the files anew; the difference is then to be read."""
    file = GOLDEN / f"{name}.json"
    text = show(build_command(PLANS[name])) + "\n"
    if os.environ.get("LLMGW_WRITE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PLANS)
def test_no_secret_is_shown_when_a_command_is_printed(name: str) -> None:
    text = show(build_command(PLANS[name]))
    assert not [
        word for word in ("sk-engine-key", "hf_own", "hf_inherited", "hunter2", "tenant-secret") if word in text
    ]


def test_every_kind_of_engine_has_an_adapter_that_is_of_that_kind() -> None:
    assert {kind: adapter.profile.kind for kind, adapter in ADAPTERS.items()} == {kind: kind for kind in EngineKind}


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.SGLANG, EngineKind.LLAMACPP])
def test_every_option_that_llmgw_must_decide_is_owned(kind: EngineKind) -> None:
    """Settings that people may tune anyway are soft; everything else that llmgw adds it must own."""
    tunable = {*profile(kind).max_model_len_aliases, *profile(kind).quantization_aliases, "hf-repo"}
    for plan in PLANS.values():
        if plan.spec.engine is kind:
            hard = {o.name for o in ADAPTERS[kind].options(plan) if o.name and not o.soft} - tunable
            assert hard <= set(profile(kind).owned)


@pytest.mark.parametrize("option", ["tensor_parallel_size", "-tp", "--tensor-parallel-size=4"])
def test_an_owned_option_is_recognised_however_it_is_written(option: str) -> None:
    assert owning_key(EngineKind.VLLM, option) == "tensor_parallel"


def test_an_option_that_is_not_llmgws_is_free() -> None:
    assert owning_key(EngineKind.VLLM, "gpu-memory-utilization") is None


def test_the_key_of_sglang_stands_in_argv_masked_and_with_a_warning() -> None:
    command = build_command(make_plan(EngineKind.SGLANG, api_key=Secret("k3y")))
    assert value_after(command.argv, "--api-key") == "k3y"
    assert value_after(command.masked_argv(), "--api-key") == "***"
    assert [problem.code for problem in command.warnings] == ["key-in-process-list"]


@pytest.mark.parametrize(
    ("kind", "variable"), [(EngineKind.VLLM, "VLLM_API_KEY"), (EngineKind.LLAMACPP, "LLAMA_API_KEY")]
)
def test_other_engines_get_their_key_by_environment_and_never_in_argv(kind: EngineKind, variable: str) -> None:
    command = build_command(make_plan(kind, api_key=Secret("k3y")))
    assert "k3y" not in " ".join(command.argv)
    assert command.env[variable] == "k3y"
    assert variable in command.secret_env


def test_without_api_key_an_inherited_key_does_not_reach_the_engine() -> None:
    plan = make_plan(EngineKind.VLLM, plan={"inherited_env": {"VLLM_API_KEY": "stray", "LLAMA_API_KEY": "stray"}})
    assert "stray" not in build_command(plan).env.values()


def test_a_key_written_into_env_is_pointed_out_because_probes_do_not_carry_it() -> None:
    command = build_command(make_plan(EngineKind.VLLM, env={"VLLM_API_KEY": Secret("k3y")}))
    assert [problem.code for problem in command.warnings] == ["key-not-probed"]


def test_a_key_with_a_comma_is_refused_for_llama_server() -> None:
    with pytest.raises(ConfigError, match="commas"):
        build_command(make_plan(EngineKind.LLAMACPP, api_key=Secret("a,b")))


def test_two_sglang_shards_on_one_node_get_different_nccl_ports_outside_the_engine_ports() -> None:
    seen = set()
    for port in range(8101, 8500):
        plan = make_plan(EngineKind.SGLANG, plan={"endpoint": TcpEndpoint("127.0.0.1", port)})
        seen.add(int(value_after(build_command(plan).argv, "--nccl-port")))
    assert len(seen) == 399
    assert min(seen) >= 29500
    assert max(seen) <= 29899


def test_the_nccl_port_is_never_the_engines_own_port() -> None:
    for port in range(29500, 29900):
        plan = make_plan(EngineKind.SGLANG, plan={"endpoint": TcpEndpoint("127.0.0.1", port)})
        assert value_after(build_command(plan).argv, "--nccl-port") != str(port)


def test_sglang_with_several_copies_chooses_its_nccl_ports_itself() -> None:
    command = build_command(make_plan(EngineKind.SGLANG, layout=ParallelLayout(data=2)))
    assert "--nccl-port" not in command.argv


def test_data_parallel_vllm_shards_do_not_share_the_fixed_rpc_port() -> None:
    plan = make_plan(EngineKind.VLLM, layout=ParallelLayout(data=2))
    assert value_after(build_command(plan).argv, "--data-parallel-rpc-port") != "29550"


def test_a_data_parallel_vllm_on_a_unix_socket_has_an_rpc_port_of_its_own_too() -> None:
    ports = set()
    for name in ("a", "b"):
        plan = make_plan(
            EngineKind.VLLM, layout=ParallelLayout(data=2), plan={"endpoint": UnixEndpoint(f"/run/{name}.sock")}
        )
        ports.add(int(value_after(build_command(plan).argv, "--data-parallel-rpc-port")))
    assert len(ports) == 2
    assert all(29500 <= port <= 29899 for port in ports)


def test_quantization_reaches_vllm_and_sglang_and_is_pointed_out_where_the_file_decides() -> None:
    for kind in (EngineKind.VLLM, EngineKind.SGLANG):
        assert value_after(build_command(make_plan(kind, quantization="fp8")).argv, "--quantization") == "fp8"
    command = build_command(make_plan(EngineKind.LLAMACPP, quantization="q4"))
    assert "q4" not in command.argv
    assert [problem.code for problem in command.warnings] == ["quantization-unused"]


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(ConfigError, match="the command is empty"):
        build_command(make_plan(EngineKind.COMMAND, command=()))


def test_an_option_in_args_replaces_a_soft_one_of_llmgw() -> None:
    command = build_command(make_plan(EngineKind.SGLANG, args={"log_level_http": "info"}))
    assert command.argv.count("--log-level-http") == 1
    assert value_after(command.argv, "--log-level-http") == "info"


def test_the_order_is_command_own_options_args_extra_args() -> None:
    argv = build_command(make_plan(EngineKind.VLLM, args={"seed": 1}, extra_args=("--last",))).argv
    places = [argv.index(word) for word in ("serve", "llama-8b", "--served-model-name", "--seed", "--last")]
    assert places == sorted(places)
    assert argv[-1] == "--last"


def test_a_unix_socket_is_refused_where_the_engine_has_none() -> None:
    plan = make_plan(EngineKind.SGLANG, plan={"endpoint": UnixEndpoint("/run/x.sock")})
    with pytest.raises(ConfigError, match="cannot listen on a unix socket"):
        build_command(plan)


def test_a_vllm_too_old_for_unix_sockets_is_refused_instead_of_started_on_a_port() -> None:
    plan = make_plan(EngineKind.VLLM, plan={"endpoint": UnixEndpoint("/run/x.sock"), "engine_version": "0.6.1"})
    with pytest.raises(ConfigError, match=r"--uds is known since vllm 0\.10"):
        build_command(plan)


def test_every_bad_value_is_reported_at_once_with_its_place() -> None:
    plan = make_plan(
        EngineKind.COMMAND,
        command=("x", "${llmgw.prot}"),
        args={"a": {"b": 1}},
        env={"X": "${llmgw.nothing}"},
        origins={"env.X": "conf.d/a.toml:7"},
    )
    with pytest.raises(ConfigError) as caught:
        build_command(plan)
    assert [problem.code for problem in caught.value.problems] == ["bad-variable", "bad-argument", "bad-variable"]
    assert str(caught.value.problems[2].where) == "conf.d/a.toml:7"


def test_a_variable_without_value_says_why() -> None:
    plan = make_plan(EngineKind.VLLM, extra_args=("${llmgw.port}",), plan={"endpoint": UnixEndpoint("/run/x.sock")})
    with pytest.raises(ConfigError, match="listens on a unix socket"):
        build_command(plan)


def test_llama_server_gets_no_model_option_when_args_name_another_source() -> None:
    argv = build_command(make_plan(EngineKind.LLAMACPP, args={"hf_repo": "ggml-org/x"})).argv
    assert "--model" not in argv
    assert value_after(argv, "--hf-repo") == "ggml-org/x"


def test_a_nul_character_is_refused_before_the_kernel_cuts_the_value_off() -> None:
    for plan in (
        make_plan(EngineKind.VLLM, args={"a": "x\0y"}),
        make_plan(EngineKind.VLLM, env={"A": Secret("x\0y")}),
    ):
        with pytest.raises(ConfigError, match="NUL character"):
            build_command(plan)


VALUES = st.recursive(
    st.one_of(st.text(max_size=20), st.booleans(), st.integers(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    kind=st.sampled_from(EngineKind),
    args=st.dictionaries(st.text("abc-_.", min_size=1, max_size=8), VALUES, max_size=4),
    extra=st.lists(st.text(max_size=20) | st.just("${llmgw.port}"), max_size=3),
    version=st.none() | st.text(max_size=12),
    unix=st.booleans(),
)
def test_every_plan_gives_a_command_of_texts_or_problems_in_words(
    kind: EngineKind, args: dict[str, Any], extra: list[str], version: str | None, unix: bool
) -> None:
    more = {"endpoint": UnixEndpoint("/run/x.sock")} if unix else {}
    plan = make_plan(
        kind, command=("engine",), args=args, extra_args=tuple(extra), plan={"engine_version": version, **more}
    )
    refused: ConfigError | None = None
    try:
        command = build_command(plan)
    except ConfigError as error:
        refused = error
    if refused is not None:
        assert refused.problems
        assert all(problem.message for problem in refused.problems)
    else:
        assert command.argv[0] == "engine"
        assert all(type(word) is str and "\0" not in word for word in command.argv)
        assert set(command.env) == set(command.origins)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (EngineKind.VLLM, '(APIServer pid=71) INFO:     127.0.0.1:40122 - "GET /health HTTP/1.1" 200 OK'),
        (EngineKind.VLLM, 'INFO:     127.0.0.1:40122 - "GET /v1/models HTTP/1.1" 401 Unauthorized'),
        (
            EngineKind.SGLANG,
            '[2026-11-30 10:00:00] INFO:     127.0.0.1:5 - "GET /ready HTTP/1.1" 503 Busy',
        ),
        (EngineKind.SGLANG, 'INFO:     127.0.0.1:5 - "GET /metrics HTTP/1.1" 200 OK'),
    ],
)
def test_access_lines_of_own_probes_are_recognised(kind: EngineKind, line: str) -> None:
    assert is_probe_line(kind, line)


@pytest.mark.parametrize(
    "line",
    [
        '(APIServer pid=71) INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK',
        '(APIServer pid=71) INFO:     127.0.0.1:1 - "GET /health/other HTTP/1.1" 404 Not Found',
        "(APIServer pid=71) ERROR 11-30 10:00:00 [x.py:1] GET /health HTTP/1.1",
        "",
    ],
)
def test_other_lines_are_kept(line: str) -> None:
    assert not is_probe_line(EngineKind.VLLM, line)


def test_sleep_mode_opens_its_pages_only_where_it_is_asked_for() -> None:
    awake, sleeper = make_plan(EngineKind.VLLM), make_plan(EngineKind.VLLM, idle_action="sleep")
    assert "--enable-sleep-mode" in build_command(sleeper).argv
    assert build_command(sleeper).env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "--enable-sleep-mode" not in build_command(awake).argv
    assert "VLLM_SERVER_DEV_MODE" not in build_command(awake).env


def test_after_a_sleep_that_dropped_them_weights_get_memory_are_read_and_then_the_cache_comes() -> None:
    mode = profile(EngineKind.VLLM).sleep
    assert mode is not None
    assert [call.path for call in mode.fall_asleep(2)] == ["/sleep?level=2"]
    assert [call.path for call in mode.wake(1)] == ["/wake_up"]
    woken = mode.wake(2)
    assert [call.path for call in woken] == ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]
    assert woken[1].body == {"method": "reload_weights"}
