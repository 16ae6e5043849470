"""From facts of a node and a shard of the file to what placement sees."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.domain.hardware import (
    Availability,
    Gpu,
    GpuHolder,
    Inventory,
    InventoryError,
    InventoryStatus,
    MigInstance,
    NodeInventory,
    Topology,
)
from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ShardId, ShardSpec
from llmgw.placement.model import NodeView, Request
from llmgw.placement.view import node_view, request_of


def gpu(index: int, **keys: object) -> Gpu:
    return Gpu(
        index,
        f"GPU-{index}",
        f"00000000:{index:02}:00.0",
        "NVIDIA H100 80GB HBM3",
        81559,
        0,
        80000,
        (9, 0),
        **{"memory_reserved": 559, "gpu_class": "h100-80g", **keys},  # type: ignore[arg-type]
    )


INVENTORY = Inventory(
    InventoryStatus.OK,
    tuple(gpu(index) for index in range(4)),
    mig_instances=(MigInstance(3, 0, "MIG-a", "3g.40gb", "h100-mig-3g.40gb", 40000),),
    topology=Topology({(0, 1): "NV18", (0, 2): "SYS", (1, 2): "SYS", (2, 3): "NV12"}),
)
FREE = {uuid: Availability(uuid, None, 80000) for uuid in ("GPU-0", "GPU-1", "GPU-2", "GPU-3", "MIG-a")}


def view(inventory: Inventory = INVENTORY, **keys: object) -> NodeView:
    return node_view(NodeInventory("gpu-01", inventory), FREE, **keys)  # type: ignore[arg-type]


def spec(**keys: object) -> ShardSpec:
    return ShardSpec("big", "m", **{"engine": EngineKind.VLLM, "command": ("vllm",), "config_hash": "h", **keys})  # type: ignore[arg-type]


def asked(**keys: object) -> Request:
    found = request_of(ShardId("big"), spec(**keys), INVENTORY)
    assert isinstance(found, Request), found
    return found


def test_cards_have_class_capability_memory_without_what_is_reserved_and_their_clique() -> None:
    cards = {card.uuid: card for card in view().cards}
    first = cards["GPU-0"]
    assert (first.index, first.gpu_class, first.capability, first.usable_memory) == (0, "h100-80g", (9, 0), 81000)
    assert cards["GPU-0"].clique == cards["GPU-1"].clique is not None
    assert cards["GPU-2"].clique == cards["GPU-3"].clique != cards["GPU-0"].clique


def test_without_a_topology_no_card_has_nvlink() -> None:
    assert {card.clique for card in view(evolve(INVENTORY, topology=None)).cards} == {None}


def test_a_slice_has_its_own_class_and_memory_and_the_capability_of_its_card() -> None:
    (found,) = [card for card in view().cards if card.is_slice]
    assert (found.uuid, found.index, found.gpu_class) == ("MIG-a", None, "h100-mig-3g.40gb")
    assert (found.usable_memory, found.capability) == (40000, (9, 0))


def test_memory_that_is_shared_with_the_host_counts_as_far_as_it_is_free() -> None:
    shared = evolve(INVENTORY, gpus=(evolve(gpu(0), unified_memory=True, memory_total=None, memory_free=70000),))
    assert view(shared).cards[0].usable_memory == 70000


def test_what_our_engines_have_of_unified_memory_is_not_counted_against_them_twice() -> None:
    inventory = Inventory(
        InventoryStatus.OK, (evolve(gpu(0), memory_total=None, memory_free=60000, unified_memory=True),)
    )
    holders = (GpuHolder(10, 50000, shard="a"), GpuHolder(11, None, shard="b"), GpuHolder(12, 500))
    known = {"GPU-0": Availability("GPU-0", None, 60000, holders)}
    assert node_view(NodeInventory("gpu-01", inventory), known).cards[0].usable_memory == 110000


def test_what_small_strangers_have_is_not_for_engines() -> None:
    holders = (GpuHolder(99, 900), GpuHolder(10, 50000, shard="a"))
    known = {**FREE, "GPU-0": Availability("GPU-0", None, 30100, holders)}
    found = node_view(NodeInventory("gpu-01", INVENTORY), known)
    assert [card.usable_memory for card in found.cards[:2]] == [80100, 81000]


def test_a_card_that_nobody_judged_may_not_be_given() -> None:
    more = evolve(INVENTORY, gpus=(*INVENTORY.gpus, gpu(4)))
    assert {card.uuid: card.why_not for card in view(more).cards if card.why_not} == {"GPU-4": "not known"}


def test_what_availability_says_against_a_card_is_why_it_may_not_be_given() -> None:
    held = {**FREE, "GPU-1": Availability("GPU-1", "held by pid 4411 python", 4)}
    found = node_view(NodeInventory("gpu-01", INVENTORY), held)
    assert {card.uuid: card.why_not for card in found.cards if card.why_not} == {"GPU-1": "held by pid 4411 python"}


def test_cards_that_are_left_to_other_programs_may_not_be_given() -> None:
    found = view(allowed=(0, "GPU-1"))
    assert {card.uuid for card in found.cards if card.why_not is None} == {"GPU-0", "GPU-1"}


def test_the_name_of_the_node_is_a_label() -> None:
    assert view(labels={"rack": "7"}).labels == {"rack": "7", "node": "gpu-01"}


@pytest.mark.parametrize(
    ("error", "why_not"),
    [
        (InventoryError.COMMAND_MISSING, None),
        (InventoryError.DRIVER_MISMATCH, "GPUs not known, nvidia-smi failed (driver_mismatch)"),
        (InventoryError.TIMEOUT, "GPUs not known, nvidia-smi failed (timeout)"),
    ],
)
def test_a_node_whose_gpus_could_not_be_asked_is_not_one_without_gpus(
    error: InventoryError, why_not: str | None
) -> None:
    found = view(Inventory(InventoryStatus.ERROR, error=error))
    assert (found.cards, found.why_not) == ((), why_not)


def test_a_number_of_gpus_asks_for_any() -> None:
    found = asked(gpus=2, gpu_class=("h100-80g",), placement_priority=3, where={"rack": ("7",)})
    assert found == Request(
        ShardId("big"), 2, classes=("h100-80g",), priority=3, where={"rack": ("7",)}, one_class=True
    )


def test_a_list_of_gpus_asks_for_exactly_these_by_uuid() -> None:
    found = asked(gpus=(1, "GPU-0", "MIG-a"))
    assert (found.gpus, found.pinned) == (3, ("GPU-1", "GPU-0", "MIG-a"))


@pytest.mark.parametrize(
    ("engine", "one_class"),
    [(EngineKind.VLLM, True), (EngineKind.SGLANG, True), (EngineKind.LLAMACPP, False), (EngineKind.COMMAND, False)],
)
def test_only_engines_that_split_evenly_need_one_class(engine: EngineKind, one_class: bool) -> None:
    assert asked(gpus=2, engine=engine).one_class is one_class


def test_memory_is_rounded_up_to_whole_mebibytes() -> None:
    found = asked(gpus=1, gpu_memory=(20 << 30) + 1, share_gpus=True)
    assert (found.memory, found.share) == (20481, True)


@pytest.mark.parametrize("gpus", [0, ()])
def test_a_shard_without_gpus_asks_for_nothing(gpus: int | tuple[int, ...]) -> None:
    assert request_of(ShardId("big"), spec(gpus=gpus), INVENTORY) is None


def test_a_named_gpu_that_is_none_is_a_problem_with_the_shard_and_the_key() -> None:
    found = request_of(ShardId("big"), spec(gpus=(7,)), INVENTORY)
    assert isinstance(found, Problem)
    assert found.message == 'shard "big" gpus: GPU 7 is not on this node'
