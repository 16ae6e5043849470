"""Launch plans that the tests of engines share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from llmgw.domain.shard import EngineKind, LaunchPlan, ShardId, ShardSpec, TcpEndpoint
from llmgw.engines.adapter import profile

INHERITED = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/home/ada",
    "VLLM_PORT": "tcp://10.0.0.1:8000",
    "CUDA_VISIBLE_DEVICES": "7",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.9",
    "NCCL_IB_HCA": "mlx5_9",
    "PYTHONPATH": "/opt/patches",
    "NOTIFY_SOCKET": "/run/systemd/notify",
    "LLMGW_NODE": "gpu-01",
    "TEAM_KEY": "tenant-secret",
    "https_proxy": "http://ada:hunter2@proxy:3128",
    "no_proxy": "corp.example,::1",
    "HF_TOKEN": "hf_inherited",
}


def make_plan(kind: EngineKind, *, plan: Mapping[str, Any] | None = None, **spec: Any) -> LaunchPlan:
    spec.setdefault("command", profile(kind).default_command)
    made = ShardSpec(
        name=spec.pop("name", "chat"), model=spec.pop("model", "llama-8b"), engine=kind, config_hash="0", **spec
    )
    base = LaunchPlan(
        id=ShardId(made.name),
        spec=made,
        endpoint=TcpEndpoint("127.0.0.1", 8101),
        generation=3,
        run_id="b1d9c3",
        node="gpu-01",
        state_dir="/var/lib/llmgw",
        tmp_dir="/var/lib/llmgw/tmp/0badcafe",
        work_dir="/var/lib/llmgw/work/chat/0",
        inherited_env={"PATH": "/usr/bin"},
    )
    return evolve(base, **(plan or {}))


def value_after(argv: tuple[str, ...], flag: str) -> str:
    """The word after `flag`; fails when it is not there."""
    return argv[argv.index(flag) + 1]
