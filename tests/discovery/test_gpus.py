"""nvidia-smi's texts, the odd ones above all: nothing raises, and unknown is never free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.gpus import (
    CORE_QUERY,
    HostMemory,
    ProcessList,
    host_memory,
    normal_bus_id,
    parse_gpus,
    parse_processes,
    unknown_field,
    with_processes,
)
from llmgw.domain.hardware import GpuFlag, GpuProcess, InventoryError, InventoryStatus, LostGpu

VALUES = {
    "index": "0",
    "uuid": "GPU-98f27fe1",
    "name": "NVIDIA L40S",
    "pci.bus_id": "00000000:01:00.0",
    "memory.total": "46068",
    "memory.reserved": "609",
    "memory.used": "12",
    "memory.free": "45447",
    "compute_cap": "8.9",
    "driver_version": "595.80",
    "mig.mode.current": "[N/A]",
    "ecc.mode.current": "Enabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
    "persistence_mode": "Enabled",
    "temperature.gpu": "34",
    "power.draw": "71.52",
    "power.limit": "350.00",
}


def row(**cells: str) -> str:
    return ", ".join({**VALUES, **{key.replace("__", "."): value for key, value in cells.items()}}.values()) + "\n"


def test_a_row_becomes_a_gpu() -> None:
    inventory = parse_gpus(row(), "", 0)
    (gpu,) = inventory.gpus
    assert inventory.status is InventoryStatus.OK and inventory.driver_version == "595.80"
    assert (gpu.memory_total, gpu.memory_reserved, gpu.memory_used, gpu.memory_free) == (46068, 609, 12, 45447)
    assert (gpu.compute_capability, gpu.gpu_class, gpu.flags) == ((8, 9), "l40s-45g", ())
    assert (gpu.ecc_enabled, gpu.mig_enabled, gpu.uncorrected_ecc) == (True, False, 0)


@pytest.mark.parametrize(
    "cell", ["[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[Insufficient Permissions]", "", "-1", "1e3", "٣"]
)
def test_a_cell_without_a_number_is_unknown_never_zero(cell: str) -> None:
    (gpu,) = parse_gpus(row(memory__used=cell, ecc__errors__uncorrected__volatile__total=cell), "", 0).gpus
    assert gpu.memory_used is None and gpu.uncorrected_ecc is None and gpu.flags == ()


def test_capabilities_are_pairs_of_numbers() -> None:
    (gpu,) = parse_gpus(row(compute_cap="12.0"), "", 0).gpus
    assert gpu.compute_capability is not None and gpu.compute_capability > (8, 9)


def test_a_lost_card_in_its_row_has_no_class_and_makes_the_inventory_partial() -> None:
    lost = "[GPU is lost]"
    cells = {key.replace(".", "__"): lost for key in VALUES if key not in ("index", "pci.bus_id")}
    cells["uuid"] = "GPU-2"
    inventory = parse_gpus(row(index="1") + row(**cells, index="2"), "", 0)
    assert inventory.status is InventoryStatus.PARTIAL
    assert inventory.lost == (LostGpu(2, "00000000:01:00.0"),)
    gone = inventory.gpus[1]
    assert (gone.flags, gone.gpu_class, gone.unified_memory) == ((GpuFlag.LOST,), None, False)


@pytest.mark.parametrize("cell", ["[GPU is lost]", "[Unknown Error]", "[GPU requires reset]"])
def test_a_card_that_does_not_even_tell_its_uuid_is_lost(cell: str) -> None:
    inventory = parse_gpus(row() + row(index="1", uuid=cell, pci__bus_id="00000000:02:00.0"), "", 0)
    assert (inventory.status, len(inventory.gpus)) == (InventoryStatus.PARTIAL, 1)
    assert inventory.lost == (LostGpu(1, "00000000:02:00.0"),)


def test_a_card_with_a_notice_and_a_row_is_lost_once() -> None:
    notice = "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost\n"
    lost = row(index="1", uuid="[GPU is lost]", pci__bus_id="00000000:02:00.0")
    assert len(parse_gpus(row() + lost, notice, 15).lost) == len(parse_gpus(notice + row() + lost, "", 0).lost) == 1


def test_a_card_that_requires_reset_is_marked_and_the_status_stays() -> None:
    inventory = parse_gpus(row(memory__used="[GPU requires reset]"), "", 0)
    assert inventory.status is InventoryStatus.OK and inventory.gpus[0].flags == (GpuFlag.REQUIRES_RESET,)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Unable to determine the device handle for GPU3: 0000:04:00.0: Unknown Error", LostGpu(3, "0000:04:00.0")),
        ("Unable to determine the device handle for GPU 0000:04:00.0: Unknown Error", LostGpu(None, "0000:04:00.0")),
        ("Unable to determine the device handle for GPU0000:04:00.0: GPU is lost.", LostGpu(None, "0000:04:00.0")),
    ],
)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("code", [0, 15])
def test_a_dropped_card_is_found_on_either_stream_whatever_the_code(
    line: str, expected: LostGpu, stream: str, code: int
) -> None:
    texts = (row() + line, "") if stream == "stdout" else (row(), line)
    inventory = parse_gpus(*texts, code)
    assert (inventory.status, inventory.lost, len(inventory.gpus)) == (InventoryStatus.PARTIAL, (expected,), 1)


@pytest.mark.parametrize(
    ("stdout", "code", "kind"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch\n", 255, InventoryError.DRIVER_MISMATCH),
        ("Failed to initialize NVML: Unknown Error\n", 255, InventoryError.NVML_INIT_FAILED),
        ("Mismatch in versions between nvidia-smi and NVML.\n", 255, InventoryError.NVML_INIT_FAILED),
        ("No devices were found\n", 6, InventoryError.NVML_INIT_FAILED),
        ("", 0, InventoryError.NVML_INIT_FAILED),
        ("", 9, InventoryError.DRIVER_NOT_LOADED),
        ("\x00\xff garbage", None, InventoryError.NVML_INIT_FAILED),
    ],
)
def test_failures_are_told_apart_by_text_then_by_code(stdout: str, code: int | None, kind: InventoryError) -> None:
    inventory = parse_gpus(stdout, "", code)
    assert (inventory.status, inventory.error, inventory.gpus) == (InventoryStatus.ERROR, kind, ())
    assert inventory.detail


def test_the_detail_is_the_programs_first_line() -> None:
    assert parse_gpus("\nNo devices were found\nmore\n", "", 6).detail == "No devices were found (exit code 6)"


@pytest.mark.parametrize("rest", ["1, GPU-98f2", "something else", row()])
def test_a_line_that_is_no_row_makes_the_inventory_partial(rest: str) -> None:
    inventory = parse_gpus(row() + rest, "", 0)
    assert inventory.status is InventoryStatus.PARTIAL and len(inventory.gpus) == 1 and inventory.detail


def test_a_name_with_commas_keeps_the_columns_in_place() -> None:
    (gpu,) = parse_gpus(row(name="Card, with, commas"), "", 0).gpus
    assert (gpu.name, gpu.memory_total) == ("Card, with, commas", 46068)


def test_the_unknown_field_is_named() -> None:
    assert unknown_field('Field "compute_cap" is not a valid field to query.\n\n') == "compute_cap"
    assert unknown_field("No devices were found") is None


def test_processes_are_read_from_both_ends() -> None:
    text = "20037, GPU-98f27fe1, 538\n20038, python, -c, GPU-98f27fe1, [N/A]\n"
    found = parse_processes(text, "", 0)
    assert found == ProcessList({"GPU-98f27fe1": (GpuProcess(20037, 538), GpuProcess(20038, None))}, complete=True)


@pytest.mark.parametrize(
    ("text", "code"), [("", 255), ("", None), ("what is this", 0), ("[N/A], GPU-98f27fe1, 12", 0), ("12, 538", 0)]
)
def test_an_unreadable_process_list_is_incomplete_never_idle(text: str, code: int | None) -> None:
    found = parse_processes(text, "", code)
    assert not found.complete and found.detail
    inventory = with_processes(parse_gpus(row(), "", 0), found)
    assert not inventory.processes_known and inventory.detail == found.detail


def test_an_empty_answer_that_succeeded_is_idle() -> None:
    assert parse_processes("", "", 0) == ProcessList({}, complete=True)


@pytest.mark.parametrize(("used", "busy"), [("1024", False), ("1025", True), ("[N/A]", False)])
def test_much_used_memory_is_in_use_also_without_a_process(used: str, busy: bool) -> None:
    inventory = with_processes(parse_gpus(row(memory__used=used), "", 0), ProcessList({}, complete=True))
    assert (GpuFlag.MEMORY_IN_USE in inventory.gpus[0].flags) is busy


def test_addresses_are_compared_in_one_form() -> None:
    assert normal_bus_id("0000:0c:00.0") == normal_bus_id("00000000:0C:00.0") == normal_bus_id("0c:00.0")
    assert normal_bus_id("GPU-0c:00.0") is None


def test_host_memory_is_read_in_mib() -> None:
    text = "MemTotal:       127600748 kB\nMemFree: 1 kB\nMemAvailable:   20480 kB\n"
    assert host_memory(text) == HostMemory(124610, 20)
    assert host_memory("nothing") == HostMemory()


def test_a_card_that_shares_the_hosts_memory_takes_its_class_and_free_memory_from_there() -> None:
    cells = {f"memory__{part}": "[N/A]" for part in ("total", "reserved", "used", "free")}
    (gpu,) = parse_gpus(row(**cells, name="NVIDIA GB10"), "", 0, host=HostMemory(124610, 20)).gpus
    assert (gpu.unified_memory, gpu.memory_total, gpu.memory_free, gpu.gpu_class) == (True, None, 20, "gb10-122g")


CELLS = st.sampled_from([*VALUES.values(), "[N/A]", "[GPU is lost]", "GPU-", "9" * 5000, "", "\x00", "½"]) | st.text()


@given(
    st.lists(st.lists(CELLS, max_size=18).map(", ".join), max_size=6).map("\n".join),
    st.text(),
    st.none() | st.integers(),
)
def test_no_text_of_a_survey_raises_or_turns_into_a_healthy_nothing(stdout: str, stderr: str, code: int | None) -> None:
    inventory = parse_gpus(stdout, stderr, code)
    assert (inventory.status is InventoryStatus.ERROR) == (not inventory.gpus and not inventory.lost)
    assert (inventory.error is not None) == (inventory.status is InventoryStatus.ERROR)
    assert len({gpu.index for gpu in inventory.gpus}) == len(inventory.gpus)
    with_processes(inventory, parse_processes(stdout, stderr, code))


@given(st.permutations(CORE_QUERY[3:]), st.integers(0, 12))
def test_dropped_fields_are_unknown_and_the_others_keep_their_columns(order: list[str], dropped: int) -> None:
    fields = [*CORE_QUERY[:3], *order[dropped:]]
    (gpu,) = parse_gpus(", ".join(VALUES[name] for name in fields), "", 0, fields).gpus
    assert gpu.memory_used == (12 if "memory.used" in fields else None)
    assert gpu.memory_total == (46068 if "memory.total" in fields else None)
    assert not gpu.unified_memory
