"""GPUs as people name them, looked up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.pins import Pin, Refused, find_gpu, ordinals_may_differ, resolve_pins
from llmgw.domain.hardware import (
    Gpu,
    GpuFlag,
    Inventory,
    InventoryError,
    InventoryStatus,
    LostGpu,
    MigInstance,
    Stale,
)
from llmgw.domain.shard import EngineKind, ShardSpec


def card(index: int, uuid: str, **facts: object) -> Gpu:
    bus_id = f"00000000:{index + 1:02X}:00.0"
    return Gpu(index, uuid, bus_id, "NVIDIA H100 80GB HBM3", 81559, 0, 81080, (9, 0), **facts)  # type: ignore[arg-type]


CARDS = (card(0, "GPU-aa11"), card(1, "GPU-aa22", mig_enabled=True), card(2, "GPU-bb33", flags=(GpuFlag.LOST,)))
SLICES = tuple(
    MigInstance(1, device, uuid, "1g.10gb", "h100-mig-1g.10gb", 9984)
    for device, uuid in enumerate(("MIG-cc11", "MIG-cc22", "MIG-GPU-aa22/1/1", "MIG-GPU-aa22/1/10"))
)
NODE = Inventory(
    InventoryStatus.PARTIAL,
    CARDS,
    lost=(LostGpu(3, "0000:04:00.0"), LostGpu(None, "0000:05:00.0")),
    mig_instances=SLICES,
)


def shard(*gpus: int | str, **keys: object) -> ShardSpec:
    return ShardSpec("a", "m", EngineKind.COMMAND, ("x",), "h", gpus=gpus, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", [0, "GPU-aa11", "GPU-aa1", "gpu-AA11", "0000:01:00.0", "01:00.0", "00000000:01:00.0"])
def test_a_card_is_found_by_index_uuid_or_address(entry: int | str) -> None:
    assert find_gpu(entry, NODE) is CARDS[0]


@pytest.mark.parametrize(
    ("entry", "device"),
    [
        ("MIG-cc11", 0),
        ("MIG-cc2", 1),
        ("mig-CC22", 1),
        ("MIG-GPU-aa22/1/1", 2),
        ("MIG-GPU-aa22/1/10", 3),
    ],
)
def test_a_slice_is_found_by_its_uuid_also_shortened(entry: str, device: int) -> None:
    assert find_gpu(entry, NODE) is SLICES[device]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (9, "not on this node"),
        (2, "the driver cannot reach it"),
        (3, "dropped off the bus"),
        ("0000:05:00.0", "dropped off the bus"),
        ("GPU-aa", "not unique: GPU-aa11, GPU-aa22"),
        ("GPU-zz", "not on this node"),
        ("MIG-cc", "not unique: MIG-cc11, MIG-cc22"),
        ("MIG-GPU-aa22/1", "not unique"),
        ("MIG-dd", "not on this node"),
        ("0f:00.0", "not on this node"),
        ("first", "is not an index"),
    ],
)
def test_what_names_no_card_is_told_why(entry: int | str, why: str) -> None:
    found = find_gpu(entry, NODE)
    assert isinstance(found, str) and why in found


def test_jetson_modules_are_found_by_the_uuid_that_they_print() -> None:
    uuid = "54d0709b-558d-5a59-9c65-0c5fc14a21a4"
    node = Inventory(InventoryStatus.OK, (card(0, f"GPU-{uuid}"),))
    assert find_gpu(uuid, node) is node.gpus[0]


def test_pins_are_cards_or_slices_and_labelled_by_what_people_see() -> None:
    pins = resolve_pins(shard("GPU-aa11", "MIG-cc11"), NODE)
    assert isinstance(pins, tuple)
    assert pins == (Pin("GPU-aa11", CARDS[0]), Pin("MIG-cc11", instance=SLICES[0]))
    assert [(pin.label, pin.uuid) for pin in pins] == [("0", "GPU-aa11"), ("MIG-cc11", "MIG-cc11")]


@pytest.mark.parametrize("gpus", [(0, "GPU-aa11"), ("MIG-cc1", "MIG-cc11")])
def test_one_card_or_slice_under_two_names_is_refused(gpus: tuple[int | str, ...]) -> None:
    refused = resolve_pins(shard(*gpus), NODE)
    assert isinstance(refused, Refused) and (refused.code, refused.position) == ("gpu-twice", 1)


def test_a_card_that_is_missing_is_refused_with_what_there_is() -> None:
    refused = resolve_pins(shard(0, 9), NODE)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.position) == ("gpu-missing", 1)
    assert "0 (" in (refused.hint or "") and "MIG-cc11 (h100-mig-1g.10gb)" in (refused.hint or "")
    assert resolve_pins(shard(0, 9, allow=frozenset({"gpu-missing"})), NODE) == (Pin(0), Pin(9))


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (InventoryError.COMMAND_MISSING, "gpu-missing", "install"),
        (InventoryError.DRIVER_MISMATCH, "gpu-unknown", "reboot"),
        (InventoryError.DRIVER_NOT_LOADED, "gpu-unknown", "kernel module"),
        (InventoryError.LIBRARY_MISSING, "gpu-unknown", "libnvidia-ml"),
        (InventoryError.TIMEOUT, "gpu-unknown", "NVRM"),
        (InventoryError.NVML_INIT_FAILED, "gpu-unknown", "by hand"),
    ],
)
def test_where_nothing_could_be_read_the_reason_and_the_remedy_are_told(
    error: InventoryError, code: str, word: str
) -> None:
    refused = resolve_pins(shard(0), Inventory(InventoryStatus.ERROR, error=error, detail="it said so"))
    assert isinstance(refused, Refused) and refused.code == code
    assert "it said so" in refused.message and word in (refused.hint or "")


def test_older_facts_prove_nothing() -> None:
    stale = Inventory(InventoryStatus.OK, CARDS, stale=Stale(InventoryError.TIMEOUT, "no answer", 1.0))
    refused = resolve_pins(shard(0), stale)
    assert isinstance(refused, Refused) and (refused.code, "no answer" in refused.message) == ("gpu-unknown", True)


def test_a_number_or_a_node_that_nobody_looked_at_is_taken_as_written() -> None:
    assert resolve_pins(shard(7, "MIG-x"), None) == (Pin(7), Pin("MIG-x"))
    assert resolve_pins(ShardSpec("a", "m", EngineKind.COMMAND, ("x",), "h", gpus=2), NODE) == ()


def test_a_lost_card_or_one_in_mig_mode_may_change_the_count_of_cuda() -> None:
    assert ordinals_may_differ(NODE)
    assert ordinals_may_differ(Inventory(InventoryStatus.OK, CARDS[1:2]))
    assert not ordinals_may_differ(Inventory(InventoryStatus.OK, CARDS[:1]))


@given(st.integers() | st.text() | st.sampled_from(["GPU-", "MIG-", "gpu-a", "MIG-GPU-", ":", "00:00.0"]))
def test_no_name_raises_or_finds_a_lost_card(entry: int | str) -> None:
    found = find_gpu(entry, NODE)
    assert not isinstance(found, Gpu) or GpuFlag.LOST not in found.flags
