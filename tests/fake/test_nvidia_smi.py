"""GPU memory held by the fakes, and the fake nvidia-smi that reports it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmgw.fake import gpu, nvidia_smi

CORE = (
    "index,uuid,name,pci.bus_id,memory.total,memory.reserved,memory.used,memory.free,compute_cap,driver_version,"
    "mig.mode.current,ecc.mode.current,ecc.errors.uncorrected.volatile.total,remapped_rows.pending,"
    "remapped_rows.failure,persistence_mode,temperature.gpu,power.draw,power.limit"
)
PLAIN = "--format=csv,noheader,nounits"


@pytest.fixture
def machine(tmp_path):
    """A directory that stands for the GPUs; returned is `smi(*arguments)` and `describe(...)`."""
    directory = tmp_path / "gpus"
    directory.mkdir()
    return Machine(directory)


class Machine:
    def __init__(self, directory):
        self.directory = directory
        self.env = {**os.environ, "FAKE_GPU_DIR": str(directory), "PYTHONPATH": str(Path(__file__).parents[2])}

    def command(self, *arguments):
        return [sys.executable, "-m", "llmgw.fake.nvidia_smi", *arguments]

    def smi(self, *arguments):
        return subprocess.run(self.command(*arguments), env=self.env, capture_output=True, text=True, errors="replace")

    def describe(self, **description):
        (self.directory / "gpus.json").write_text(json.dumps(description))

    def used(self, index=0):
        return int(self.smi("--query-gpu=memory.used", PLAIN, "-i", str(index)).stdout)

    def apps(self):
        text = self.smi("--query-compute-apps=pid,gpu_uuid,used_memory", PLAIN).stdout
        return [tuple(line.split(", ")) for line in text.splitlines()]


def test_the_core_query_has_a_row_per_gpu_and_a_cell_per_field(machine):
    machine.describe(gpus=2)
    done = machine.smi(f"--query-gpu={CORE}", PLAIN)
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert [len(row) for row in rows] == [19, 19]
    assert rows[0][:8] == [
        "0", "GPU-fa4e0000-0000-4000-8000-000000000000", "NVIDIA H100 80GB HBM3", "00000000:1A:00.0",
        "81559", "479", "0", "81080",
    ]  # fmt: skip


def test_units_and_headers_come_unless_switched_off(machine):
    machine.describe(gpus=1)
    done = machine.smi("--query-gpu=memory.total,name", "--format=csv")
    assert done.stdout == "memory.total [MiB], name\n81559 MiB, NVIDIA H100 80GB HBM3\n"


def test_an_unknown_field_fails_the_whole_query(machine):
    machine.describe(gpus=1, unknown_fields=["compute_cap"])
    done = machine.smi("--query-gpu=index,compute_cap", PLAIN)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith('Field "compute_cap" is not a valid field to query.')


def test_a_described_gpu_differs_only_where_it_says_so(machine):
    machine.describe(gpus=[{"name": "NVIDIA L4", "memory.total": 23034, "compute_cap": "8.9"}])
    assert machine.smi("--query-gpu=name,memory.total,compute_cap,uuid", PLAIN).stdout.startswith(
        "NVIDIA L4, 23034, 8.9, GPU-"
    )
    assert machine.smi("-L").stdout.startswith("GPU 0: NVIDIA L4 (UUID: GPU-")
    assert "GPU0" in machine.smi("topo", "-m").stdout
    assert "<product_name>NVIDIA L4</product_name>" in machine.smi("-q", "-x").stdout


@pytest.mark.parametrize("name", sorted(nvidia_smi.FAILURES))
def test_failures_speak_on_stdout_with_the_real_code(machine, name):
    machine.describe(behaviour={"fail": name})
    done = machine.smi("-L")
    assert (done.stdout, done.returncode) == nvidia_smi.FAILURES[name]
    assert done.stderr == ""


def test_it_can_hang_deaf_to_sigterm_after_part_of_the_answer(machine):
    machine.describe(behaviour={"hang": 60, "partial": 10})
    process = subprocess.Popen(machine.command("-L"), env=machine.env, stdout=subprocess.PIPE)
    assert process.stdout.read(10) == b"GPU 0: NVI"
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()


def test_it_can_write_garbage_and_lose_a_card(machine):
    machine.describe(behaviour={"garbage": True})
    assert "NVIDIA" not in machine.smi("-L").stdout
    machine.describe(gpus=2, behaviour={"lost": [1], "lost_code": 15})
    done = machine.smi("--query-gpu=index", PLAIN)
    assert done.returncode == 15
    assert done.stdout.startswith("Unable to determine the device handle for GPU1: 0000:2B:00.0: Unknown Error")
    assert done.stdout.endswith("\n0\n")


def test_a_card_in_mig_mode_lists_its_slices_and_their_memory(machine):
    machine.describe(gpus=[{}, {"mig": ["3g.40gb", {"profile": "1g.10gb", "uuid": "MIG-a", "memory": None}]}])
    assert machine.smi("-L").stdout.splitlines()[2:] == [
        "  MIG 3g.40gb     Device  0: (UUID: MIG-fa4e0000-0000-4000-9000-000001000000)",
        "  MIG 1g.10gb     Device  1: (UUID: MIG-a)",
    ]
    assert machine.smi("--query-gpu=mig.mode.current,remapped_rows.pending", PLAIN).stdout.splitlines() == [
        "Disabled, No",
        "Enabled, [N/A]",
    ]
    xml = machine.smi("-q", "-x").stdout
    assert "<total>40448 MiB</total>" in xml and "<total>N/A</total>" in xml


def test_an_engine_on_a_slice_holds_the_slices_memory(machine, start):
    machine.describe(gpus=[{"mig": ["1g.10gb", "1g.10gb"]}])
    env = {"FAKE_GPU_DIR": str(machine.directory), "CUDA_VISIBLE_DEVICES": "MIG-fa4e0000-0000-4000-9000-000000000001"}
    engine = start("llamacpp", "-m", "/m", "--fake-gpu-mib", "9000", env=env).wait_ready()
    assert [(uuid, mib) for _, uuid, mib in machine.apps()] == [("GPU-fa4e0000-0000-4000-8000-000000000000", "9000")]
    assert "<used>9000 MiB</used>" in machine.smi("-q", "-x").stdout and machine.used() == 9000
    engine.process.kill()
    engine.wait_exit()


def test_nvlink_groups_numa_nodes_and_adapters_make_the_topology(machine):
    machine.describe(gpus=4, nvlink=[[0, 1]], numa=[0, 0, 0, 1], nics={"mlx5_4": 0})
    lines = machine.smi("topo", "-m").stdout.splitlines()
    assert lines[0].startswith("\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU")
    assert [line.split("\t")[:6] for line in lines[1:5]] == [
        ["GPU0", " X ", "NV18", "NODE", "SYS", "PIX"],
        ["GPU1", "NV18", " X ", "NODE", "SYS", "NODE"],
        ["GPU2", "NODE", "NODE", " X ", "SYS", "NODE"],
        ["GPU3", "SYS", "SYS", "SYS", " X ", "SYS"],
    ]
    assert lines[-1] == "  NIC0: mlx5_4"


def test_it_can_misbehave_for_some_calls_only(machine):
    machine.describe(gpus=1, behaviour={"fail": "unknown_error", "only": ["topology", "recovery"]})
    failed = [
        machine.smi(*call).returncode != 0
        for call in (
            ("topo", "-m"),
            ("--query-gpu=uuid,gpu_recovery_action", PLAIN),
            ("--query-gpu=uuid", PLAIN),
            ("-L",),
            ("-q", "-x"),
        )
    ]
    assert failed == [True, True, False, False, False]


def test_a_card_can_be_lost_in_its_row_or_need_a_reset_or_be_a_share(machine):
    machine.describe(gpus=[{"state": "lost"}, {"state": "requires_reset"}, {"vgpu": "A40-48Q"}])
    rows = machine.smi("--query-gpu=index,name,memory.used,ecc.mode.current", PLAIN).stdout.splitlines()
    assert rows == [
        "0, [GPU is lost], [GPU is lost], [GPU is lost]",
        "1, NVIDIA H100 80GB HBM3, [GPU requires reset], Enabled",
        "2, NVIDIA A40-48Q, 0, [N/A]",
    ]


def test_a_flood_is_as_long_as_it_was_ordered(machine):
    machine.describe(behaviour={"flood": 2})
    assert len(machine.smi("-L").stdout) == 2 << 20


def test_workers_hold_the_memory_of_their_gpus_and_not_the_leader(machine, start):
    env = {"FAKE_GPU_DIR": str(machine.directory), "CUDA_VISIBLE_DEVICES": "2,3"}
    engine = start("vllm", "serve", "/m", "-tp", "2", "--fake-load-seconds", "0.3", "--fake-gpu-mib", "5000", env=env)
    engine.wait_ready()
    workers = {str(pid) for pid, comm in engine.members().items() if comm.startswith("VLLM::Worker")}
    assert {pid for pid, _, mib in machine.apps() if mib == "5000"} == workers
    assert [machine.used(index) for index in (0, 2, 3)] == [0, 5000, 5000]
    os.killpg(engine.pid, signal.SIGKILL)
    engine.wait_exit()


def test_memory_comes_back_late_or_never(machine, start, until):
    env = {"FAKE_GPU_DIR": str(machine.directory), "CUDA_VISIBLE_DEVICES": "0"}
    late = start("llamacpp", "-m", "/m", "--fake-gpu-release", "1", env=env).wait_ready()
    late.process.kill()
    late.wait_exit()
    began = time.monotonic()
    assert machine.used() == 70000
    until(lambda: machine.used() == 0, "the memory to come back")
    assert time.monotonic() - began >= 1.0
    never = start("llamacpp", "-m", "/m", "--fake-gpu-release", "never", env=env).wait_ready()
    never.process.kill()
    never.wait_exit()
    assert machine.used() == machine.used() == 70000


def test_readers_at_the_same_moment_all_see_the_memory_of_a_dead_holder(machine):
    held = machine.directory / "held"
    held.mkdir()
    dead = {"gpu": "0", "mib": 100, "pid": 4190001, "release": 3600}
    readers = 4
    together = threading.Barrier(readers)

    def read(_number):
        together.wait()
        return [holder.mib for holder in gpu.current_holders(machine.directory)]

    with ThreadPoolExecutor(readers) as pool:
        for _ in range(100):
            (held / "0-4190001.json").write_text(json.dumps(dead))
            assert list(pool.map(read, range(readers))) == [[100]] * readers


def test_a_gpu_that_is_not_free_fails_the_start_as_the_engine_would(machine, start):
    env = {"FAKE_GPU_DIR": str(machine.directory), "CUDA_VISIBLE_DEVICES": "0"}
    assert machine.smi("--fake-hold", "0", "41000", "4190001").returncode == 0
    assert machine.apps() == [("4190001", "GPU-fa4e0000-0000-4000-8000-000000000000", "41000")]
    engine = start("vllm", "serve", "/m", "--fake-load-seconds", "0.3", env=env)
    assert engine.wait_exit() == 1
    assert "Free memory on device" in engine.stdout() and "is less than desired" in engine.stdout()
    machine.smi("--fake-drop", "0")
    assert machine.used() == 0


def test_it_installs_itself_under_the_real_name(machine, tmp_path):
    assert machine.smi("--fake-install", str(tmp_path / "bin")).returncode == 0
    done = subprocess.run(["nvidia-smi", "-L"], env={"PATH": f"{tmp_path / 'bin'}:/bin:/usr/bin"}, capture_output=True)
    assert done.stdout.count(b"H100") == 8
