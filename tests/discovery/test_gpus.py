"""nvidia-smi's texts, the odd ones above all: nothing raises, and unknown is never free."""

from __future__ import annotations

import pytest
from attrs import evolve
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
    parse_recovery,
    unknown_field,
    with_processes,
    with_recovery,
)
from llmgw.domain.hardware import GpuFlag, GpuProcess, InventoryError, InventoryStatus, LostGpu, MigInstance

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


@pytest.mark.parametrize("cut", range(1, 12))
def test_the_last_line_counts_only_when_it_is_whole(cut: int) -> None:
    inventory = parse_gpus(row() + row(index="1", uuid="GPU-2")[:-cut], "", 0)
    assert (inventory.status, len(inventory.gpus)) == (InventoryStatus.PARTIAL, 1)
    found = parse_processes("20037, GPU-98f27fe1, 53812345678\n20038, GPU-98f27fe1, 53812345678\n"[:-cut], "", 0)
    assert not found.complete and found.by_uuid == {"GPU-98f27fe1": (GpuProcess(20037, 53812345678),)}


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


@pytest.mark.parametrize(
    ("name", "expected"), [("Orin (nvgpu)", "orin-61g"), ("NVIDIA Thor", "thor-61g"), ("NVIDIA GB10", "gb10-61g")]
)
@pytest.mark.parametrize("cell", ["[N/A]", "Not Supported", "[Not Supported]"])
def test_modules_with_the_hosts_memory_keep_their_place_without_prefix_and_address(
    name: str, expected: str, cell: str
) -> None:
    cells = {f"memory__{part}": cell for part in ("total", "reserved", "used", "free")}
    text = row(**cells, name=name, uuid="54d0709b-558d-5a59-9c65-0c5fc14a21a4", pci__bus_id="N/A")
    inventory = parse_gpus(text, "", 0, host=HostMemory(62841, 50000))
    (gpu,) = inventory.gpus
    assert (gpu.uuid, gpu.bus_id) == ("GPU-54d0709b-558d-5a59-9c65-0c5fc14a21a4", "")
    assert (gpu.unified_memory, gpu.gpu_class, gpu.memory_used, gpu.memory_free) == (True, expected, None, 50000)
    found = parse_processes("77, 54d0709b-558d-5a59-9c65-0c5fc14a21a4, 3900\n", "", 0)
    assert with_processes(inventory, found).gpus[0].processes == (GpuProcess(77, 3900),)


def test_a_size_that_cannot_be_read_is_not_shared_memory() -> None:
    (gpu,) = parse_gpus(row(memory__total="[Unknown Error]"), "", 0, host=HostMemory(1000, 900)).gpus
    assert (gpu.unified_memory, gpu.memory_total, gpu.memory_free) == (False, None, 45447)


def test_a_driver_older_than_mig_has_no_card_in_that_mode() -> None:
    fields = [name for name in CORE_QUERY if name != "mig.mode.current"]
    (gpu,) = parse_gpus(", ".join(VALUES[name] for name in fields) + "\n", "", 0, fields).gpus
    assert gpu.mig_enabled is False
    (gpu,) = parse_gpus(row(mig__mode__current="[Unknown Error]"), "", 0).gpus
    assert gpu.mig_enabled is None


def test_two_rows_with_one_uuid_are_one_card() -> None:
    inventory = parse_gpus(row() + row(index="1"), "", 0)
    assert (inventory.status, len(inventory.gpus)) == (InventoryStatus.PARTIAL, 1)


def test_a_guests_share_of_a_card_is_virtual() -> None:
    (gpu,) = parse_gpus(row(name="NVIDIA A40-48Q", ecc__mode__current="[N/A]"), "", 0).gpus
    assert (gpu.virtual, gpu.gpu_class, gpu.ecc_enabled) == (True, "a40-vgpu-45g", None)


def test_temperature_power_and_persistence_are_read_and_unknown_else() -> None:
    (gpu,) = parse_gpus(row(), "", 0).gpus
    assert (gpu.temperature, gpu.power, gpu.power_limit, gpu.persistence_mode) == (34, 71.52, 350.0, True)
    cells = {name: "[N/A]" for name in ("temperature__gpu", "power__draw", "power__limit", "persistence_mode")}
    (gpu,) = parse_gpus(row(**cells), "", 0).gpus
    assert (gpu.temperature, gpu.power, gpu.power_limit, gpu.persistence_mode) == (None, None, None, None)


@pytest.mark.parametrize("text", [row() * 5000, row() + "x\n" * (1 << 20)])
def test_more_text_than_any_node_has_is_partial_and_not_read_to_its_end(text: str) -> None:
    inventory = parse_gpus(text, "", 0)
    assert (inventory.status, len(inventory.gpus)) == (InventoryStatus.PARTIAL, 1)
    assert not parse_processes(text, "", 0).complete


def test_a_list_of_processes_that_failed_for_a_lost_card_only_is_complete() -> None:
    notice = "Unable to determine the device handle for GPU3: 0000:04:00.0: Unknown Error\n"
    assert parse_processes("20037, GPU-98f27fe1, 538\n" + notice, "", 15).complete
    assert parse_processes("", notice, 15).complete
    assert not parse_processes(notice, "", None).complete
    assert not parse_processes(notice + "20037, GPU-98f2", "", 15).complete


def test_processes_on_a_slice_count_for_its_card() -> None:
    inventory = parse_gpus(row(mig__mode__current="Enabled"), "", 0)
    slices = (MigInstance(0, 0, "MIG-1", "1g.10gb", "h100-mig-1g.10gb", None),)
    found = parse_processes("7, MIG-1, 538\n8, MIG-GPU-98f27fe1/3/0, 12\n", "", 0)
    known = with_processes(evolve(inventory, mig_instances=slices), found)
    assert known.processes_known and known.gpus[0].processes == (GpuProcess(7, 538), GpuProcess(8, 12))


def test_processes_on_a_slice_of_no_known_card_leave_the_list_unknown() -> None:
    known = with_processes(parse_gpus(row(), "", 0), parse_processes("7, MIG-1, 538\n", "", 0))
    assert not known.processes_known and "no known GPU" in (known.detail or "")


@pytest.mark.parametrize("action", ["Reset", "Reboot", "Drain P2P", "Drain and Reset"])
def test_what_a_card_needs_is_kept_and_makes_it_unfit(action: str) -> None:
    inventory = with_recovery(parse_gpus(row(), "", 0), parse_recovery(f"GPU-98f27fe1, {action}\n"))
    assert (inventory.gpus[0].recovery_action, inventory.gpus[0].flags) == (action, (GpuFlag.REQUIRES_RESET,))
    assert inventory.status is InventoryStatus.OK


def test_a_card_that_needs_nothing_is_told_apart_from_one_that_does_not_say() -> None:
    text = 'GPU-1, None\nGPU-2, [N/A]\nGPU-3, [Unknown Error]\nGPU-4\nField "x" is not a valid field to query.\n'
    assert parse_recovery(text) == {"GPU-1": None}


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
    (gpu,) = parse_gpus(", ".join(VALUES[name] for name in fields) + "\n", "", 0, fields).gpus
    assert gpu.memory_used == (12 if "memory.used" in fields else None)
    assert gpu.memory_total == (46068 if "memory.total" in fields else None)
    assert not gpu.unified_memory


ONE_CELL = CELLS.filter(lambda cell: cell.splitlines() in ([], [cell]) and "," not in cell and len(cell) < 1000)


@given(st.sampled_from(CORE_QUERY), ONE_CELL)
def test_one_bad_cell_is_unknown_and_spoils_no_other(name: str, cell: str) -> None:
    good = parse_gpus(row(), "", 0).gpus[0]
    inventory = parse_gpus(row(**{name.replace(".", "__"): cell}), "", 0)
    if name in ("index", "uuid") or "lost" in cell:
        return
    (gpu,) = inventory.gpus
    is_number = cell.strip().isascii() and cell.strip().removesuffix(" MiB").isdigit()
    if name.startswith("memory.") and not is_number:
        assert getattr(gpu, "memory_" + name.partition(".")[2]) is None or gpu.unified_memory
        assert name == "memory.total" or (gpu.memory_total, gpu.unified_memory) == (good.memory_total, False)
    if name == "ecc.errors.uncorrected.volatile.total" and not is_number:
        assert gpu.uncorrected_ecc is None
    if name == "mig.mode.current" and cell.strip() not in ("Disabled", "[N/A]", "N/A"):
        assert gpu.mig_enabled is not False
    if not name.startswith("memory."):
        assert (gpu.memory_used, gpu.memory_free) == (good.memory_used, good.memory_free)


@given(st.lists(CELLS, max_size=6).map(", ".join) | st.text(), st.none() | st.integers(-9, 255))
def test_no_text_of_processes_or_actions_raises_or_hides_that_it_was_not_read(text: str, code: int | None) -> None:
    found = parse_processes(text, "", code)
    assert found.complete or found.detail
    if code != 0:
        assert not found.complete or "device handle" in text
    rows = sum(map(len, found.by_uuid.values()))
    assert rows <= len(text.splitlines())
    parse_recovery(text)
