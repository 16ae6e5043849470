from __future__ import annotations

from typing import Any

import pytest

from llmgw.domain.shard import UNSET, EngineKind, Secret
from llmgw.engines.adapter import build_command
from llmgw.engines.environment import DROPPED_VARIABLES, is_dropped
from tests.engines.plans import INHERITED, make_plan


def env_of(inherited: dict[str, str], **spec: Any) -> dict[str, str]:
    return dict(build_command(make_plan(EngineKind.VLLM, plan={"inherited_env": inherited}, **spec)).env)


def test_variables_of_a_job_a_service_or_another_engine_do_not_reach_the_engine() -> None:
    env = env_of(INHERITED)
    traps = {"VLLM_PORT", "RANK", "WORLD_SIZE", "MASTER_ADDR", "NCCL_IB_HCA", "NOTIFY_SOCKET", "LLMGW_NODE"}
    assert not traps & set(env)
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["PYTHONPATH"] == "/opt/patches"


@pytest.mark.parametrize("kind", ["STATE", "RUNTIME", "CACHE", "LOGS", "CONFIGURATION"])
def test_none_of_the_directories_that_systemd_gives_llmgw_is_an_engines(kind: str) -> None:
    assert f"{kind}_DIRECTORY" not in env_of({f"{kind}_DIRECTORY": "/x"})


@pytest.mark.parametrize("entry", DROPPED_VARIABLES)
def test_each_entry_of_the_list_drops_what_it_names(entry: str) -> None:
    assert is_dropped(entry.replace("*", "ANYTHING"))
    assert not is_dropped("X" + entry)


def test_a_dropped_variable_that_the_shard_writes_is_passed_on() -> None:
    assert env_of({"NCCL_DEBUG": "WARN"}, env={"NCCL_DEBUG": "INFO"})["NCCL_DEBUG"] == "INFO"


def test_a_variable_that_another_table_uses_as_a_secret_is_dropped_unless_written() -> None:
    plan = {"inherited_env": {"TEAM_KEY": "s3cret"}, "secret_variables": frozenset({"TEAM_KEY"})}
    assert "TEAM_KEY" not in build_command(make_plan(EngineKind.VLLM, plan=plan)).env
    own = build_command(make_plan(EngineKind.VLLM, plan=plan, env={"TEAM_KEY": Secret("s3cret")}))
    assert own.env["TEAM_KEY"] == "s3cret"
    assert own.masked_env()["TEAM_KEY"] == "***"


def test_unset_removes_an_inherited_variable() -> None:
    assert "HOME" not in env_of({"HOME": "/root"}, env={"HOME": UNSET})


def test_the_markers_the_short_temporary_folder_and_the_gpu_order_are_set() -> None:
    env = build_command(make_plan(EngineKind.SGLANG, plan={"devices": ("GPU-aa", "GPU-bb")})).env
    assert (env["LLMGW_SHARD_ID"], env["LLMGW_RUN_ID"], env["SPT_NOENV"]) == ("chat/0", "b1d9c3", "1")
    assert env["TMPDIR"] == "/var/lib/llmgw/tmp/0badcafe"
    assert (env["CUDA_DEVICE_ORDER"], env["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "GPU-aa,GPU-bb")
    assert env["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize(
    ("inherited", "upper", "lower"),
    [
        ({}, "127.0.0.1,::1", "127.0.0.1,::1"),
        ({"NO_PROXY": "corp.example"}, "corp.example,127.0.0.1,::1", "corp.example,127.0.0.1,::1"),
        ({"no_proxy": "a, ::1"}, "a,::1,127.0.0.1", "a,::1,127.0.0.1"),
        ({"NO_PROXY": "a", "no_proxy": "b"}, "a,127.0.0.1,::1", "b,127.0.0.1,::1"),
        ({"NO_PROXY": "*"}, "*", "*"),
    ],
)
def test_no_proxy_gains_loopback_and_loses_nothing(inherited: dict[str, str], upper: str, lower: str) -> None:
    env = env_of(inherited)
    assert (env["NO_PROXY"], env["no_proxy"]) == (upper, lower)


def test_a_written_no_proxy_gains_loopback_too_and_an_unset_one_stays_away() -> None:
    assert env_of({}, env={"NO_PROXY": "corp"})["NO_PROXY"] == "corp,127.0.0.1,::1"
    assert "NO_PROXY" not in env_of({"NO_PROXY": "corp"}, env={"NO_PROXY": UNSET})


def test_origins_tell_inherited_generated_and_written_apart() -> None:
    command = build_command(make_plan(EngineKind.VLLM, env={"HF_HOME": "/hf"}, origins={"env.HF_HOME": "llmgw.toml:9"}))
    found = {name: command.origins[name] for name in ("PATH", "TMPDIR", "HF_HOME")}
    assert found == {"PATH": "inherited", "TMPDIR": "generated", "HF_HOME": "llmgw.toml:9"}
    assert set(command.origins) == set(command.env)


def test_what_looks_like_a_secret_is_masked_although_nobody_declared_it() -> None:
    inherited = {"HF_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "s", "https_proxy": "http://a:b@p:1", "LANG": "C"}
    masked = build_command(make_plan(EngineKind.VLLM, plan={"inherited_env": inherited})).masked_env()
    assert [masked[name] for name in inherited] == ["***", "***", "***", "C"]


def test_vllm_gets_a_ready_limit_of_a_week_so_that_load_timeout_is_the_only_one() -> None:
    assert env_of({"VLLM_ENGINE_READY_TIMEOUT_S": "600"})["VLLM_ENGINE_READY_TIMEOUT_S"] == "604800"


def test_a_crashed_sglang_does_not_hold_its_gpus_for_dumps() -> None:
    env = build_command(make_plan(EngineKind.SGLANG)).env
    assert env["SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS"] == "0"
    assert env["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == env["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] == "false"
