"""The survey against the shipped fake nvidia-smi, run as a program: slices, links, failures, and what is asked when."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from llmgw.discovery.survey import merge_stale, survey
from llmgw.domain.hardware import (
    GpuFlag,
    GpuProcess,
    Inventory,
    InventoryError,
    InventoryStatus,
    LostGpu,
    OtherGpu,
    Stale,
)
from llmgw.fake.gpu import write_stranger
from llmgw.fake.nvidia_smi import FAILURES, run
from llmgw.supervisor.children import Children
from llmgw.supervisor.tools import SoleTool, ToolResult

SAMPLE = Path(__file__).parent / "data" / "amd" / "rocm-smi-mi100.json"
MEMINFO = "MemTotal: 64349184 kB\nMemAvailable: 51200000 kB\n"


class Bench:
    """A node to look at: `describe` it, `look` at it; `asked` is what the last look asked nvidia-smi."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gpus = folder / "gpus"
        self.gpus.mkdir()
        run(["--fake-install", str(folder / "bin"), "--fake-gpu-dir", str(self.gpus)])
        self.asked: list[str] = []
        self._tool = SoleTool(Children())

    def describe(self, **machine: Any) -> None:
        (self.gpus / "gpus.json").write_text(json.dumps(machine))

    def program(self, name: str, text: str, code: int = 0) -> str:
        """A small program that prints a text."""
        path = self.folder / name
        path.write_text(f"#!{sys.executable}\nimport sys\nsys.stdout.write({text!r})\nsys.exit({code})\n")
        path.chmod(0o755)
        return str(path)

    async def look(self, previous: Inventory | None = None, *, timeout: float = 60.0, **sources: Any) -> Inventory:
        self.asked = []

        async def tool(argv: Sequence[str], *, timeout: float) -> ToolResult:
            self.asked.append(_name(argv))
            return await self._tool.run(argv, timeout=timeout)

        with trio.fail_after(120):
            return await survey(
                tool,
                nvidia_smi=str(self.folder / "bin" / "nvidia-smi"),
                timeout=timeout,
                now=lambda: 1000.0,
                previous=previous,
                **{"meminfo": MEMINFO, "sysfs": None, **sources},
            )


def _name(argv: Sequence[str]) -> str:
    if os.path.basename(argv[0]) != "nvidia-smi":
        return os.path.basename(argv[0])
    words = " ".join(argv[1:])
    if "gpu_recovery_action" in words:
        return "recovery"
    for mark, name in (("--query-gpu", "gpus"), ("compute-apps", "processes"), ("topo", "topology"), ("-x", "xml")):
        if mark in words:
            return name
    return words


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_node_of_eight_is_read_whole(bench: Bench) -> None:
    inventory = await bench.look()
    assert (inventory.status, inventory.driver_version, inventory.detail) == (InventoryStatus.OK, "580.95.05", None)
    assert [gpu.index for gpu in inventory.gpus] == list(range(8)) and inventory.processes_known
    assert inventory.topology is not None and inventory.topology.gpu_gpu == "NV18"
    assert {gpu.recovery_action for gpu in inventory.gpus} == {None}
    assert bench.asked == ["gpus", "processes", "recovery", "topology"]


async def test_slow_questions_are_asked_again_only_when_something_changed(bench: Bench) -> None:
    bench.describe(gpus=4, nvlink=[[0, 1], [2, 3]])
    first = await bench.look()
    assert first.topology is not None and first.topology.nvlink_sets == ((0, 1), (2, 3))
    second = await bench.look(first)
    assert (second, bench.asked) == (first, ["gpus", "processes", "recovery"])
    bench.describe(gpus=[{}, {}, {}, {"mig": []}], nvlink=[[0, 1]])
    third = await bench.look(second)
    assert third.topology is not None and third.topology.nvlink_sets == ((0, 1),)
    assert bench.asked == ["gpus", "processes", "recovery", "-L", "topology"]
    bench.describe(gpus=[{}, {}, {}, {"mig": []}], nvlink=[], driver_version="590.1")
    fourth = await bench.look(third)
    assert fourth.topology is not None and fourth.topology.nvlink_sets == ()


async def test_slices_come_with_their_memory_and_change_without_a_change_of_mode(bench: Bench) -> None:
    bench.describe(gpus=[{}, {"mig": ["3g.40gb", {"profile": "1g.10gb", "memory": None}]}])
    first = await bench.look()
    assert [(one.parent_index, one.profile, one.memory_total) for one in first.mig_instances] == [
        (1, "3g.40gb", 40448),
        (1, "1g.10gb", None),
    ]
    assert first.gpus[1].flags == (GpuFlag.MIG_ENABLED,) and first.gpus[0].flags == ()
    assert bench.asked == ["gpus", "processes", "recovery", "-L", "xml", "topology"]
    assert (await bench.look(first), bench.asked) == (first, ["gpus", "processes", "recovery", "-L"])
    bench.describe(gpus=[{}, {"mig": [{"profile": "7g.80gb", "uuid": "MIG-new"}]}])
    other = await bench.look(first)
    assert [(one.uuid, one.memory_total) for one in other.mig_instances] == [("MIG-new", 81280)]
    bench.describe(gpus=[{}, {"mig": []}])
    assert (await bench.look(other)).mig_instances == ()


async def test_a_list_of_slices_that_fails_leaves_those_that_are_known(bench: Bench) -> None:
    node = [{"mig": ["3g.40gb"]}]
    bench.describe(gpus=node)
    first = await bench.look()
    bench.describe(gpus=node, behaviour={"fail": "unknown_error", "only": ["list"]})
    assert (await bench.look(first)).mig_instances == first.mig_instances != ()
    assert (await bench.look()).mig_instances == ()
    bench.describe(gpus=node, behaviour={"fail": "unknown_error", "only": ["xml"]})
    assert [one.memory_total for one in (await bench.look()).mig_instances] == [None]


async def test_processes_on_a_slice_are_those_of_its_card(bench: Bench) -> None:
    bench.describe(gpus=[{"mig": [{"profile": "1g.10gb", "uuid": "MIG-one"}]}])
    write_stranger(bench.gpus, "MIG-one", 5000, 4190001, "x")
    assert (await bench.look()).gpus[0].processes == (GpuProcess(4190001, 5000),)


async def test_a_card_that_needs_a_reset_stays_so_until_the_driver_says_otherwise(bench: Bench) -> None:
    bench.describe(gpus=[{}, {"gpu_recovery_action": "Drain P2P"}])
    first = await bench.look()
    assert [gpu.recovery_action for gpu in first.gpus] == [None, "Drain P2P"]
    assert first.gpus[1].flags == (GpuFlag.REQUIRES_RESET,) and first.status is InventoryStatus.OK
    bench.describe(gpus=2, behaviour={"garbage": True, "only": ["recovery"]})
    assert (await bench.look(first)).gpus[1].flags == (GpuFlag.REQUIRES_RESET,)
    bench.describe(gpus=2)
    assert (await bench.look(first)).gpus[1].flags == ()


async def test_a_driver_without_recovery_actions_says_nothing(bench: Bench) -> None:
    bench.describe(gpus=1, unknown_fields=["gpu_recovery_action", "memory.reserved", "compute_cap"])
    inventory = await bench.look()
    assert (inventory.status, inventory.gpus[0].memory_reserved) == (InventoryStatus.OK, None)
    assert (inventory.gpus[0].compute_capability, inventory.gpus[0].recovery_action) == ((9, 0), None)
    assert bench.asked == ["gpus", "gpus", "gpus", "processes", "recovery", "topology"]


async def test_optional_questions_that_hang_cost_their_own_facts_only(bench: Bench) -> None:
    write_stranger(bench.gpus, "1", 5000, 4190001, "x")
    bench.describe(
        gpus=[{}, {}, {"mig": ["1g.10gb"]}], behaviour={"hang": 600, "only": ["recovery", "topology", "xml"]}
    )
    inventory = await bench.look(timeout=12.0)
    assert (inventory.status, len(inventory.gpus), inventory.processes_known) == (InventoryStatus.OK, 3, True)
    assert inventory.gpus[1].processes == (GpuProcess(4190001, 5000),)
    assert (inventory.topology, inventory.gpus[0].recovery_action) == (None, None)
    # Between two that hang, one that answers is heard.
    assert [one.memory_total for one in inventory.mig_instances] == [None]
    assert bench.asked == ["gpus", "processes", "recovery", "-L", "xml", "topology"]


@pytest.mark.parametrize("call", ["gpus", "processes"])
async def test_a_required_question_that_hangs_ends_the_survey(bench: Bench, call: str) -> None:
    bench.describe(gpus=2, behaviour={"hang": 600, "only": [call]})
    inventory = await bench.look(timeout=4.0)
    assert (inventory.status, inventory.error, inventory.gpus) == (InventoryStatus.ERROR, InventoryError.TIMEOUT, ())
    assert bench.asked[-1] == call


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("no_driver", InventoryError.DRIVER_NOT_LOADED),
        ("library_missing", InventoryError.LIBRARY_MISSING),
        ("driver_mismatch", InventoryError.DRIVER_MISMATCH),
        ("unknown_error", InventoryError.NVML_INIT_FAILED),
        ("no_permission", InventoryError.NVML_INIT_FAILED),
        ("version_mismatch", InventoryError.NVML_INIT_FAILED),
        ("no_devices", InventoryError.NVML_INIT_FAILED),
    ],
)
async def test_each_failure_has_its_kind_and_the_programs_words(bench: Bench, name: str, kind: InventoryError) -> None:
    bench.describe(behaviour={"fail": name})
    inventory = await bench.look()
    assert (inventory.status, inventory.error) == (InventoryStatus.ERROR, kind)
    text, code = FAILURES[name]
    assert inventory.detail == f"{text.splitlines()[0]} (exit code {code})"
    assert (bench.asked, inventory.read_at) == (["gpus"], 1000.0)


@pytest.mark.parametrize("name", sorted(FAILURES))
async def test_a_process_list_that_fails_leaves_the_cards_and_says_unknown(bench: Bench, name: str) -> None:
    bench.describe(gpus=2, behaviour={"fail": name, "only": ["processes"]})
    inventory = await bench.look()
    assert len(inventory.gpus) == 2 and not inventory.processes_known
    assert FAILURES[name][0].splitlines()[0] in (inventory.detail or "")


@pytest.mark.parametrize("behaviour", [{"lost_code": 15}, {"lost_code": 0, "lost_on_stderr": True}])
async def test_a_card_that_dropped_off_leaves_the_others_whole(bench: Bench, behaviour: dict[str, Any]) -> None:
    cards = [{}, {"mig": ["1g.10gb"]}, {"gpu_recovery_action": "Reset"}]
    bench.describe(gpus=cards, behaviour={"lost": [0], **behaviour})
    inventory = await bench.look()
    assert (inventory.status, inventory.lost) == (InventoryStatus.PARTIAL, (LostGpu(0, "0000:1A:00.0"),))
    assert [gpu.index for gpu in inventory.gpus] == [1, 2] and inventory.processes_known
    assert [one.memory_total for one in inventory.mig_instances] == [9984]
    assert inventory.gpus[1].recovery_action == "Reset"
    assert inventory.topology is not None and inventory.topology.link(1, 2) == "NV18"


async def test_a_card_that_is_lost_in_its_row_leaves_the_others_whole(bench: Bench) -> None:
    bench.describe(gpus=[{"state": "lost"}, {"state": "requires_reset"}, {}])
    inventory = await bench.look()
    assert (inventory.status, inventory.driver_version) == (InventoryStatus.PARTIAL, "580.95.05")
    assert [gpu.flags for gpu in inventory.gpus] == [(GpuFlag.LOST,), (GpuFlag.REQUIRES_RESET,), ()]
    assert [gpu.gpu_class for gpu in inventory.gpus] == [None, "h100", "h100-80g"]
    assert inventory.lost == (LostGpu(0, "00000000:1A:00.0"),)


@pytest.mark.parametrize("size", [0, 7, 180, 190, 700, 901])
async def test_of_an_answer_that_was_cut_only_whole_rows_count(bench: Bench, size: int) -> None:
    bench.describe(gpus=6)
    whole = await bench.look()
    bench.describe(gpus=6, behaviour={"partial": size, "only": ["gpus"]})
    inventory = await bench.look()
    assert inventory.status is (InventoryStatus.PARTIAL if inventory.gpus else InventoryStatus.ERROR)
    assert inventory.gpus == whole.gpus[: len(inventory.gpus)] and len(inventory.gpus) == size // 181


@pytest.mark.parametrize("behaviour", [{"garbage": True}, {"flood": 6}])
async def test_noise_is_no_inventory(bench: Bench, behaviour: dict[str, Any]) -> None:
    bench.describe(behaviour=behaviour)
    inventory = await bench.look()
    assert (inventory.status, inventory.gpus) == (InventoryStatus.ERROR, ()) and inventory.detail
    bench.describe(gpus=1, behaviour={**behaviour, "only": ["processes", "recovery", "topology"]})
    inventory = await bench.look()
    assert (len(inventory.gpus), inventory.processes_known, inventory.topology) == (1, False, None)


async def test_a_guests_share_is_judged_by_its_memory(bench: Bench) -> None:
    bench.describe(gpus=[{"vgpu": "A40-48Q", "memory.total": 49152, "memory.used": 9000, "compute_cap": "8.6"}])
    (gpu,) = (await bench.look()).gpus
    assert (gpu.virtual, gpu.gpu_class, gpu.flags) == (True, "a40-vgpu-48g", (GpuFlag.MEMORY_IN_USE,))
    assert (gpu.ecc_enabled, gpu.power, gpu.processes, gpu.mig_enabled) == (None, None, (), False)


async def test_shared_memory_comes_from_meminfo(bench: Bench) -> None:
    cells = {f"memory.{part}": "[N/A]" for part in ("total", "reserved", "used", "free")}
    bench.describe(gpus=[{**cells, "name": "NVIDIA Thor", "compute_cap": "11.0"}])
    (gpu,) = (await bench.look()).gpus
    assert (gpu.unified_memory, gpu.gpu_class, gpu.memory_total, gpu.memory_free) == (True, "thor-61g", None, 50000)


async def test_where_topo_says_nothing_pci_paths_do(bench: Bench, tmp_path: Path) -> None:
    devices = tmp_path / "sys" / "bus" / "pci" / "devices"
    devices.mkdir(parents=True)
    for address in ("0000:1a:00.0", "0000:2b:00.0"):
        place = tmp_path / "sys" / "devices" / "pci0000:00" / address
        place.mkdir(parents=True)
        (devices / address).symlink_to(place)
    bench.describe(gpus=2, behaviour={"fail": "unknown_error", "only": ["topology"]})
    topology = (await bench.look(sysfs=str(tmp_path / "sys"))).topology
    assert topology is not None and (topology.source, topology.link(0, 1)) == ("sysfs", "PHB")
    bench.describe(gpus=2)
    topology = (await bench.look(sysfs=str(tmp_path / "sys"))).topology
    assert topology is not None and (topology.source, topology.link(0, 1)) == ("nvidia-smi", "NV18")


async def test_cards_of_amd_stand_beside_and_need_no_nvidia_smi(bench: Bench) -> None:
    rocm = bench.program("rocm-smi", SAMPLE.read_text())
    first = await bench.look(rocm_smi=rocm)
    assert [gpu.name for gpu in first.other_gpus] == ["Arcturus GL-XL [Instinct MI100]"] * 4
    assert len(first.gpus) == 8 and bench.asked[-1] == "rocm-smi"
    without = await survey(
        SoleTool(Children()).run, nvidia_smi=None, timeout=60, now=lambda: 1.0, meminfo="", rocm_smi=rocm
    )
    assert (without.error, len(without.other_gpus)) == (InventoryError.COMMAND_MISSING, 4)
    broken = bench.program("rocm-broken", "ERROR: driver not initialized\n", 2)
    assert (await bench.look(first, rocm_smi=broken)).other_gpus == first.other_gpus


@pytest.mark.parametrize("text", ["", "ERROR: amdgpu not found\n", '{"card0": '])
async def test_a_failing_rocm_smi_is_silent(bench: Bench, text: str) -> None:
    inventory = await bench.look(rocm_smi=bench.program("rocm-smi", text, 1))
    assert (inventory.status, inventory.detail, inventory.other_gpus) == (InventoryStatus.OK, None, ())
    gone = await bench.look(rocm_smi=str(bench.folder / "nothing"))
    assert (gone.status, gone.detail, gone.other_gpus) == (InventoryStatus.OK, None, ())
    assert (await bench.look(gone, rocm_smi="/nowhere")).other_gpus == () and "nowhere" not in bench.asked


# -- stale facts ----------------------------------------------------------------------------------------------

GOOD = Inventory(InventoryStatus.OK, read_at=10.0, other_gpus=(OtherGpu("amd", 0, "MI100", ""),))
FAILED = Inventory(InventoryStatus.ERROR, error=InventoryError.TIMEOUT, detail="no answer", read_at=40.0)


def test_a_failure_keeps_the_last_good_facts_and_their_age() -> None:
    stale = merge_stale(GOOD, FAILED)
    assert (stale.stale, stale.read_at, stale.is_current) == (
        Stale(InventoryError.TIMEOUT, "no answer", 40.0),
        10.0,
        False,
    )
    assert stale.other_gpus == GOOD.other_gpus


def test_further_failures_keep_the_time_of_the_first_and_tell_the_last_reason() -> None:
    later = Inventory(InventoryStatus.ERROR, error=InventoryError.DRIVER_MISMATCH, detail="updated", read_at=70.0)
    stale = merge_stale(merge_stale(GOOD, FAILED), later)
    assert stale.stale == Stale(InventoryError.DRIVER_MISMATCH, "updated", 40.0)


def test_facts_that_are_good_or_have_none_before_them_stay_as_they_are() -> None:
    partial = Inventory(InventoryStatus.PARTIAL, read_at=50.0)
    assert merge_stale(GOOD, partial) is partial
    assert merge_stale(merge_stale(GOOD, FAILED), GOOD) is GOOD
    assert merge_stale(None, FAILED) is FAILED
