"""GPUs that a shard names, and what CUDA is told about them."""

from __future__ import annotations

import attrs
import pytest

from llmgw.domain.hardware import Gpu, GpuFlag, Inventory, InventoryError, InventoryStatus, LostGpu, MigInstance, Stale
from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ShardSpec
from llmgw.placement.assign import Devices, pinned_devices


def gpu(index: int, uuid: str, bus_id: str) -> Gpu:
    return Gpu(index, uuid, bus_id, "NVIDIA H100 80GB HBM3", 81559, 0, 81000, (9, 0), gpu_class="h100-80g")


NODE = Inventory(
    InventoryStatus.OK,
    (
        gpu(0, "GPU-aaaa1111-0000", "00000000:17:00.0"),
        gpu(1, "GPU-aaaa2222-0000", "00000000:65:00.0"),
        gpu(3, "GPU-bbbb3333-0000", "00000000:CA:00.0"),
    ),
)


def shard(*gpus: int | str, **keys: object) -> ShardSpec:
    return ShardSpec("big", "m", EngineKind.VLLM, ("vllm",), "h", gpus=gpus, **keys)  # type: ignore[arg-type]


def devices(spec: ShardSpec, inventory: Inventory | None = NODE) -> Devices:
    found = pinned_devices(spec, inventory)
    assert isinstance(found, Devices), found
    return found


def problem(spec: ShardSpec, inventory: Inventory | None = NODE) -> Problem:
    found = pinned_devices(spec, inventory)
    assert isinstance(found, Problem), found
    return found


@pytest.mark.parametrize(
    ("entry", "index"),
    [(1, "1"), ("GPU-aaaa2222-0000", "1"), ("gpu-AAAA2222", "1"), ("0000:ca:00.0", "3"), ("00000000:CA:00.0", "3")],
)
def test_an_index_a_uuid_and_a_bus_id_all_become_the_index_in_bus_order(entry: int | str, index: str) -> None:
    found = devices(shard(entry))
    (uuid,) = [gpu.uuid for gpu in NODE.gpus if str(gpu.index) == index]
    assert found == Devices((index,), (index,), (uuid,))


def test_the_order_of_the_file_is_kept() -> None:
    assert devices(shard(3, 0)).visible == ("3", "0")


def test_a_shortened_uuid_must_be_unique() -> None:
    assert "not unique" in problem(shard("GPU-aaaa")).message


def test_one_gpu_under_two_names_is_given_twice() -> None:
    refused = problem(shard(0, "GPU-aaaa1111"))
    assert (refused.code, refused.message) == ("gpu-twice", 'shard "big" gpus: GPU 0 is given twice')


def test_a_gpu_that_is_not_there_is_named_beside_those_that_are() -> None:
    refused = problem(shard(7))
    assert refused.code == "gpu-missing"
    assert refused.message == 'shard "big" gpus: GPU 7 is not on this node'
    assert refused.hint == "GPUs of this node: 0 (h100-80g), 1 (h100-80g), 3 (h100-80g)"


@pytest.mark.parametrize("entry", ["nonsense", "GPU-", "0", "", "::", "99:00.0"])
def test_no_text_is_taken_for_a_gpu_by_chance(entry: str) -> None:
    assert problem(shard(entry)).is_error


def test_a_lost_card_makes_llmgw_pass_full_uuids_and_say_so() -> None:
    node = attrs.evolve(NODE, status=InventoryStatus.PARTIAL, lost=(LostGpu(2, "0000:B1:00.0"),))
    found = devices(shard(0, 3), node)
    assert found.visible == ("GPU-aaaa1111-0000", "GPU-bbbb3333-0000")
    assert (found.labels, found.uuids) == (("0", "3"), ("GPU-aaaa1111-0000", "GPU-bbbb3333-0000"))
    assert [warning.code for warning in found.warnings] == ["gpu-order"]


def test_a_lost_card_itself_is_refused_by_index_and_by_address() -> None:
    node = attrs.evolve(NODE, status=InventoryStatus.PARTIAL, lost=(LostGpu(2, "0000:B1:00.0"),))
    assert "dropped off" in problem(shard(2), node).message
    assert "dropped off" in problem(shard("B1:00.0"), node).message


def test_a_card_marked_lost_in_its_row_is_refused() -> None:
    node = attrs.evolve(NODE, gpus=(attrs.evolve(NODE.gpus[0], flags=(GpuFlag.LOST,)),))
    assert "is lost" in problem(shard(0), node).message


SLICES = attrs.evolve(
    NODE,
    gpus=(attrs.evolve(NODE.gpus[0], mig_enabled=True), *NODE.gpus[1:]),
    mig_instances=(
        MigInstance(0, 0, "MIG-1a54e0e4-e181", "3g.40gb", "h100-mig-3g.40gb", 40448),
        MigInstance(0, 1, "MIG-d4a875e2-3e88", "2g.20gb", "h100-mig-2g.20gb", 20096),
    ),
)


def test_a_slice_is_passed_by_its_whole_id_also_when_the_file_shortens_it() -> None:
    whole = "MIG-1a54e0e4-e181"
    assert devices(shard("MIG-1a5"), SLICES) == Devices((whole,), (whole,), (whole,))


def test_a_slice_that_is_not_there_or_not_unique_is_refused() -> None:
    assert "is not on this node" in problem(shard("MIG-9"), SLICES).message
    assert "not unique" in problem(shard("MIG-"), SLICES).message


def test_no_gpus_are_no_devices() -> None:
    assert devices(shard()) == Devices()
    assert devices(attrs.evolve(shard(), gpus=0)) == Devices()


def test_without_an_inventory_indexes_are_taken_as_written() -> None:
    assert devices(shard(0, 1), None).visible == ("0", "1")


def test_a_node_without_nvidia_smi_has_no_gpus_unless_that_is_allowed() -> None:
    node = Inventory(InventoryStatus.ERROR, error=InventoryError.COMMAND_MISSING, detail="nvidia-smi is not on PATH")
    assert problem(shard(0), node).code == "gpu-missing"
    assert devices(shard(0, allow=("gpu-missing",)), node).visible == ("0",)


def test_a_failing_nvidia_smi_places_nothing_and_tells_its_text() -> None:
    node = Inventory(InventoryStatus.ERROR, error=InventoryError.TIMEOUT, detail="nvidia-smi did not end within 20 s")
    refused = problem(shard(0), node)
    assert refused.code == "gpu-unknown" and "did not end within 20 s" in refused.message


def test_older_facts_after_a_failure_place_nothing() -> None:
    stale = attrs.evolve(NODE, stale=Stale(InventoryError.TIMEOUT, "nvidia-smi did not end within 20 s", 1.0))
    refused = problem(shard(0), stale)
    assert refused.code == "gpu-unknown" and "did not end within 20 s" in refused.message
