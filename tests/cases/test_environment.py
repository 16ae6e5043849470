"""The reported failures of GPUs, nvidia-smi and inherited variables, as behaviour of a whole llmgw."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.fake_gpus import FakeGpus
from tests.node import Node, fake

QUICK = '[defaults]\nrestart_delay = "200ms"\nrestart_delay_max = "300ms"\nprobe_interval = "200ms"\n'


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def vllm(name: str = "a", *, gpus: str = "0", more: str = "") -> str:
    command = fake("vllm", "serve")
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\ngpus = {gpus}\ncommand = {command}\n{more}\n'


def environ(node: Node, name: str) -> dict[str, str]:
    return psutil.Process(node.wait_state(name, "ready")["pid"]).environ()


# -- F24: which card is meant

FIRST, SECOND = "GPU-5a1c0000-aaaa-0000-0000-000000000001", "GPU-5a1c0000-bbbb-0000-0000-000000000002"
TWO = [
    {"name": "NVIDIA L4", "memory.total": "23034", "pci.bus_id": "00000000:17:00.0", "uuid": FIRST},
    {"name": "NVIDIA H100 80GB HBM3", "pci.bus_id": "00000000:65:00.0", "uuid": SECOND},
]


@pytest.mark.parametrize("entry", ["1", f'"{SECOND}"', '"GPU-5a1c0000-bb"', '"00000000:65:00.0"', '"65:00.0"'])
def test_however_a_card_is_written_the_engine_gets_its_index_in_bus_order(node: Node, entry: str) -> None:
    FakeGpus(node, gpus=TWO)
    node.env["CUDA_VISIBLE_DEVICES"] = "7"
    node.write(QUICK + vllm(gpus=f"[{entry}]"))
    node.start()
    seen = environ(node, "a")
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")
    assert node.shard("a")["gpus"] == ["1"]


def test_a_shortened_uuid_that_two_cards_have_is_refused(node: Node) -> None:
    FakeGpus(node, gpus=TWO)
    node.write(vllm(gpus='["GPU-5a1c0000"]'))
    result = node.cli("check")
    assert result.returncode == 78 and "not unique" in result.stdout + result.stderr


def test_beside_a_lost_card_the_engine_gets_full_uuids_with_a_warning(node: Node) -> None:
    FakeGpus(node, gpus=3, behaviour={"lost": [0]})
    node.write(QUICK + vllm(gpus="[2]"))
    node.start()
    assert environ(node, "a")["CUDA_VISIBLE_DEVICES"].startswith("GPU-fa4e0000")
    assert "UUID" in node.log()


# -- F25, F26: nvidia-smi fails, lies, hangs

FAILURES = ["no_driver", "library_missing", "driver_mismatch", "unknown_error", "no_permission", "version_mismatch"]


def test_a_failing_nvidia_smi_is_told_in_its_own_words_and_touches_nothing_that_runs(node: Node) -> None:
    gpus = FakeGpus(node)
    node.write(QUICK + vllm(gpus="[0]") + vllm("later", gpus="[1]", more="autostart = false"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    for behaviour in [{"fail": name} for name in FAILURES] + [{"garbage": True}, {"partial": 17}]:
        gpus.describe(behaviour=behaviour)
        result = node.cli("inventory")
        # The older facts are shown, marked as what they are.
        assert result.returncode == 1, behaviour
        assert result.stdout.splitlines()[1].startswith("stale: nvidia-smi has failed"), behaviour
        assert "h100-80g" in result.stdout and "Traceback" not in result.stderr, behaviour
    gpus.describe(behaviour={"fail": "driver_mismatch"})
    assert "Driver/library version mismatch" in node.cli("inventory").stdout
    assert node.cli("start", "later", "--no-wait").returncode == 0
    failed = node.wait_state("later", "failed")
    assert failed["generation"] == 0 and failed["failures"] == 0
    assert "Driver/library version mismatch" in failed["reason"]["cause"]
    assert (node.state_of("a"), node.shard("a")["pid"]) == ("ready", pid)
    gpus.describe()
    assert node.wait_state("later", "ready")["generation"] == 1
    assert "Traceback" not in node.log()


def test_one_lost_card_leaves_the_others_usable(node: Node) -> None:
    FakeGpus(node, gpus=2, behaviour={"lost": [1]})
    node.write(QUICK + vllm("good", gpus="[0]") + vllm("lost", gpus="[1]"))
    checked = node.cli("check")
    assert checked.returncode == 78 and "lost" in checked.stdout + checked.stderr
    node.write(QUICK + vllm("good", gpus="[0]"))
    node.start()
    node.wait_state("good", "ready")
    inventory = node.cli("inventory")
    assert inventory.returncode == 0 and "lost" in inventory.stdout


def test_cells_without_a_number_are_unknown_and_not_zero(node: Node) -> None:
    odd = {"memory.used": "[Unknown Error]", "ecc.errors.uncorrected.volatile.total": "[N/A]", "compute_cap": "ERR!"}
    FakeGpus(node, gpus=[odd])
    node.write(QUICK + vllm(gpus="[0]", more='gpu_release_timeout = "1s"'))
    node.start()
    node.wait_state("a", "ready")
    (gpu,) = json.loads(node.cli("inventory", "--json").stdout)["gpu"]["gpus"]
    assert gpu["memory_used_mib"] is None and gpu["uncorrected_ecc_volatile"] is None
    assert gpu["health_flags"] == ["memory_in_use"]


def test_a_hanging_nvidia_smi_delays_neither_status_nor_stop_nor_the_end(node: Node) -> None:
    gpus = FakeGpus(node)
    # A hung survey is refused after discovery_timeout; both shards queue behind one instance.
    node.write(f"{QUICK}{vllm(gpus='[0]')}{vllm('b', gpus='[1]')}{vllm('cpu')}")
    gpus.describe(behaviour={"hang": 600})
    node.start()
    node.wait_state("cpu", "ready")
    began = time.monotonic()
    assert node.cli("status").returncode in (1, 3)
    assert node.state_of("a") == "pending"
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert node.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < 15
    assert hung(node) == []


def hung(node: Node) -> list[int]:
    """Instances of this node's nvidia-smi that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FAKE_GPU_DIR") == str(node.folder / "gpus") and "nvidia_smi" in " ".join(
                process.cmdline()
            ):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_driver_that_hangs_later_holds_up_no_stop_longer_than_its_limit(node: Node) -> None:
    gpus = FakeGpus(node)
    node.write(QUICK + vllm(gpus="[0]", more='gpu_release_timeout = "2s"'))
    node.start()
    node.wait_state("a", "ready")
    gpus.describe(behaviour={"hang": 600})
    stopped = node.cli("stop", "a", "--wait")
    assert stopped.returncode == 0 and "not confirmed free" in stopped.stdout
    began = time.monotonic()
    assert node.end() == 0
    assert time.monotonic() - began < 15
    assert hung(node) == []


# -- F28: slices


def test_a_card_in_mig_mode_is_not_used_as_a_whole(node: Node) -> None:
    FakeGpus(node, gpus=[{"mig.mode.current": "Enabled"}, {}])
    node.write(vllm(gpus="[0]"))
    result = node.cli("check")
    assert result.returncode == 78 and "MIG" in result.stdout + result.stderr


def test_a_slice_is_planned_as_it_is_written(node: Node) -> None:
    FakeGpus(node, gpus=[{"mig.mode.current": "Enabled"}, {}])
    node.write(QUICK + vllm(gpus='["MIG-7d3c0000-1"]', more="autostart = false"))
    node.start()
    result = node.cli("plan", "--json", "a")
    assert "MIG-7d3c0000-1" in result.stdout, result.stderr


# -- F29: what is inherited

TRAPS = {
    "VLLM_PORT": "tcp://10.0.0.1:8000",
    "CUDA_VISIBLE_DEVICES": "7",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "10.9.9.9",
    "MASTER_PORT": "1",
    "NCCL_IB_HCA": "mlx5_9",
    "NCCL_SOCKET_IFNAME": "eth9",
    "VLLM_API_KEY": "k",
    "LLAMA_API_KEY": "k",
    "WATCHDOG_USEC": "1000",
    "CREDENTIALS_DIRECTORY": "/run/x",
    "LLMGW_SHARD_ID": "liar/9",
    "LLMGW_RUN_ID": "0000",
}


@pytest.mark.parametrize("profile", ["vllm serve", "sglang serve", "llamacpp"])
def test_traps_of_the_environment_do_not_reach_the_engine(node: Node, profile: str) -> None:
    node.env.update(TRAPS, PYTHONPATH="/opt/lib", HF_HOME="/models", OTHER_KEY="hidden-value")
    engine = profile.split()[0]
    gpus = "" if engine == "llamacpp" else "gpus = 0\n"
    node.write(
        f'{QUICK}[[shard]]\nname = "a"\nmodel = "a"\nengine = "{engine}"\n{gpus}command = {fake(*profile.split())}\n'
        'env = { NCCL_DEBUG = "WARN", HF_HOME = { unset = true } }\n'
        '[[shard]]\nname = "b"\nmodel = "b"\nengine = "llamacpp"\nautostart = false\n'
        f'command = {fake("llamacpp")}\napi_key = {{ env = "OTHER_KEY" }}\n'
    )
    node.start()
    seen = environ(node, "a")
    same = {name: value for name, value in TRAPS.items() if seen.get(name) == value}
    assert same == {}
    assert (seen["PYTHONPATH"], seen["NCCL_DEBUG"], seen["PYTHONUNBUFFERED"]) == ("/opt/lib", "WARN", "1")
    assert (seen["SPT_NOENV"], seen["LLMGW_SHARD_ID"]) == ("1", "a/0")
    assert "HF_HOME" not in seen and "OTHER_KEY" not in seen
    plan = node.cli("plan", "a").stdout + node.cli("plan", "b").stdout
    assert "NCCL_DEBUG" in plan and "hidden-value" not in plan and "mlx5_9" not in plan
