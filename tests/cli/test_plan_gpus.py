"""`llmgw plan` on GPUs and networks: which cards a shard gets, on which nodes, why, and what NCCL is told there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmgw.discovery.classes import gpu_class
from llmgw.discovery.inventory_json import node_json
from llmgw.domain.fabric import Fabric, FabricInventory, FabricPort, PortKind
from llmgw.domain.hardware import Gpu, Inventory, InventoryStatus, NodeInventory, Topology

CLUSTER = '[cluster]\nname = "prod"\netcd = ["http://10.0.0.9:2379"]\n'


def saved(folder: Path, name: str, *, hca: str = "mlx5_0", prefix: str = "fec0:0000:0000:0001") -> str:
    cards = tuple(
        Gpu(
            index,
            f"GPU-{name}-{index}",
            f"00000000:{index:02}:00.0",
            "NVIDIA H100 80GB HBM3",
            81559,
            0,
            81080,
            (9, 0),
            memory_reserved=479,
            gpu_class=gpu_class("NVIDIA H100 80GB HBM3", 81559),
        )
        for index in range(8)
    )
    links = {(a, b): "NV18" for a in range(8) for b in range(a + 1, 8)}
    port = FabricPort(hca, 1, PortKind.INFINIBAND, "ACTIVE", 400.0, True, subnet_prefix=prefix, sm_lid=1)
    fabric = Fabric(
        PortKind.INFINIBAND, (f"{hca}:1",), "mlx5_core", 400.0, subnet_prefix=prefix, sm_lid=1, pkeys=("0xffff",)
    )
    node = NodeInventory(
        name,
        Inventory(InventoryStatus.OK, cards, driver_version="580.1", read_at=1.0, topology=Topology(links)),
        FabricInventory((port,), (fabric,)),
        address=f"10.0.0.{len(name)}",
        interface="bond0",
    )
    path = folder / f"{name}.json"
    path.write_text(json.dumps(node_json(node, source="local")))
    return str(path)


def shard(name: str, gpus: str, more: str = "") -> str:
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\ngpus = {gpus}\ncommand = ["/opt/vllm"]\n{more}\n'


def plan(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "llmgw.toml").write_text(text)
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "HOME": str(folder), "PATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "llmgw", "-c", str(folder / "llmgw.toml"), "plan", *words],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return {card["name"]: card for card in json.loads(done.stdout)["gpus"]}


def test_shards_are_placed_on_saved_nodes_with_the_reason_for_each_choice(tmp_path: Path) -> None:
    text = shard("pair", "2") + shard("named", "[0]") + shard("none", "2", 'gpu_class = "a100-80g"') + shard("cpu", "0")
    cards = told(plan(tmp_path, text, "--json", "--inventory", saved(tmp_path, "n1")))
    assert cards["named"]["slots"][0]["gpus"] == ["0"] and cards["named"]["why"] == "named in the file"
    assert "0" not in cards["pair"]["slots"][0]["gpus"] and "NVLink group" in cards["pair"]["why"]
    assert cards["none"]["slots"] == [] and "of class h100-80g" in cards["none"]["why"]
    assert "cpu" not in cards
    shown = plan(tmp_path, text, "--inventory", saved(tmp_path, "n1")).stdout
    assert "+ named  n1 0  h100-80g  (named in the file)" in shown
    assert "- none   none: needs 2 GPUs of class a100-80g" in shown


def test_an_instance_over_two_nodes_is_told_its_network_on_each(tmp_path: Path) -> None:
    text = CLUSTER + shard("big", "16", "nodes = 2")
    files = [saved(tmp_path, "a1"), saved(tmp_path, "b12", hca="mlx5_7")]
    big = told(plan(tmp_path, text, "--json", "--inventory", *files))["big"]
    assert [slot["node"] for slot in big["slots"]] == ["a1", "b12"]
    variables = {node: {v[0]: v[1] for v in env["variables"]} for node, env in big["network"].items()}
    # Device names differ between nodes, so each has a list of its own.
    assert variables["a1"]["NCCL_IB_HCA"] == "=mlx5_0:1"
    assert variables["b12"]["NCCL_IB_HCA"] == "=mlx5_7:1"
    assert variables["a1"]["NCCL_SOCKET_IFNAME"] == "=bond0"
    shown = plan(tmp_path, text, "--inventory", *files).stdout
    assert "a1: NCCL_IB_HCA==mlx5_0:1" in shown


def test_nodes_on_different_fabrics_do_not_make_one_instance(tmp_path: Path) -> None:
    text = CLUSTER + shard("big", "16", "nodes = 2")
    files = [saved(tmp_path, "a1"), saved(tmp_path, "b12", prefix="fec0:0000:0000:0002")]
    big = told(plan(tmp_path, text, "--json", "--inventory", *files))["big"]
    assert big["slots"] == [] and "too few nodes" in big["why"]


@pytest.mark.parametrize("text", ["", "{}", '{"api": 1}'])
def test_a_file_that_is_no_inventory_is_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    done = plan(tmp_path, shard("a", "1"), "--inventory", str(tmp_path / "bad.json"))
    assert done.returncode == 1
    assert "cannot use" in done.stderr and "llmgw inventory --json" in done.stderr
