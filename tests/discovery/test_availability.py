"""May a GPU be handed out? Rule by rule, and for all inventories: what is not known is never free."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.availability import NOT_ALLOWED, UNHEALTHY, allowed_uuids, availability, unhealthy
from llmgw.domain.hardware import (
    Gpu,
    GpuFlag,
    GpuHolder,
    GpuProcess,
    Hindrance,
    Inventory,
    InventoryError,
    InventoryStatus,
    MigInstance,
    Stale,
)

UUID = "GPU-0"


def card(index: int = 0, **changes: Any) -> Gpu:
    gpu = Gpu(
        index=index,
        uuid=f"GPU-{index}",
        bus_id=f"00000000:0{index}:00.0",
        name="NVIDIA H100 80GB HBM3",
        memory_total=81559,
        memory_used=4,
        memory_free=81000,
        compute_capability=(9, 0),
        gpu_class="h100-80g",
        persistence_mode=True,
    )
    return evolve(gpu, **changes)


def node(*gpus: Gpu, **changes: Any) -> Inventory:
    return evolve(Inventory(InventoryStatus.OK, gpus or (card(),), driver_version="570.1"), **changes)


def held_by(*processes: tuple[int, int | None], used: int | None = 4) -> Inventory:
    return node(card(memory_used=used, processes=tuple(GpuProcess(*row) for row in processes)))


OURS = {7: GpuHolder(7, None, "llmgw", "VLLM::EngineCor", "llama")}


def test_a_card_that_nobody_uses_may_be_had_with_all_that_is_free() -> None:
    found = availability(node(), {})[UUID]
    assert (found.assignable, found.why_not, found.free, found.hindrance) == (True, None, 81000, None)


@pytest.mark.parametrize("flag", UNHEALTHY)
def test_an_unhealthy_card_is_given_to_nobody_and_its_sign_is_named(flag: GpuFlag) -> None:
    found = availability(node(card(flags=(flag,))), {})[UUID]
    assert (found.why_not, found.hindrance) == (UNHEALTHY[flag], Hindrance.UNHEALTHY)


def test_what_the_driver_wants_done_is_named_beside_the_sign() -> None:
    gpu = card(flags=(GpuFlag.REQUIRES_RESET,), recovery_action="Drain and Reset")
    assert unhealthy(gpu) == "needs a reset (Drain and Reset)"


def test_an_error_count_that_is_not_told_is_no_error() -> None:
    assert availability(node(card(uncorrected_ecc=None, ecc_enabled=None)), {})[UUID].assignable


@pytest.mark.parametrize(
    ("memory", "why_not"),
    [(1024, None), (1025, "held by pid 41 (not visible)"), (None, "held by pid 41 (not visible)")],
)
def test_a_stranger_holds_a_card_with_more_than_a_little_or_an_unknown_amount(
    memory: int | None, why_not: str | None
) -> None:
    found = availability(held_by((41, memory), used=memory), {})[UUID]
    assert found.why_not == why_not
    assert found.hindrance is (Hindrance.HELD if why_not else None)


def test_the_holder_is_named_by_its_program_and_the_largest_comes_first() -> None:
    known = {42: GpuHolder(42, None, "ann", "python"), 41: GpuHolder(41, None, "bob", "java")}
    found = availability(held_by((41, 2000), (42, 60000), (43, 10)), known)[UUID]
    assert found.why_not == "held by pid 42 python and 1 more"
    assert found.holders[1] == GpuHolder(42, 60000, "ann", "python")
    assert found.holders[2] == GpuHolder(43, 10)


def test_engines_of_ours_hold_nothing_against_others_but_what_they_use_is_not_free() -> None:
    inventory = node(card(memory_used=70000, memory_free=11000, processes=(GpuProcess(7, 69000),)))
    found = availability(inventory, OURS)[UUID]
    assert (found.assignable, found.free, found.holders[0].shard) == (True, 11000, "llama")


def test_a_stranger_beside_an_engine_of_ours_holds_the_card() -> None:
    found = availability(held_by((7, 30000), (8, 20000), used=50000), OURS)[UUID]
    assert found.why_not == "held by pid 8 (not visible)"


def test_a_process_of_which_nobody_knows_whose_it_is_holds_the_card() -> None:
    known = {8: GpuHolder(8, None, "ann", "python", is_unknown=True)}
    assert not availability(held_by((8, 20000), used=20000), known)[UUID].assignable


@pytest.mark.parametrize("known", [True, False])
def test_memory_without_a_process_is_somebodys_who_is_not_shown(known: bool) -> None:
    inventory = evolve(held_by(used=1029), processes_known=known)
    found = availability(inventory, {})[UUID]
    assert found.why_not == "held by a process that nvidia-smi does not show (1029 MiB)"
    assert availability(evolve(held_by(used=1024), processes_known=known), {})[UUID].assignable


def test_where_no_process_is_listed_a_living_engine_accounts_for_the_memory_of_its_cards() -> None:
    engines = {UUID: (OURS[7],)}
    found = availability(evolve(held_by(used=70000), processes_known=False), {}, engines=engines)[UUID]
    assert found.assignable and found.holders == (OURS[7],)
    # Told once, by its row, where there is one.
    listed = availability(held_by((7, 69000), used=70000), OURS, engines=engines)[UUID]
    assert listed.holders == (evolve(OURS[7], memory=69000),)
    # A stranger beside it is still one.
    assert not availability(held_by((8, 9000), used=70000), {}, engines=engines)[UUID].assignable


def test_memory_that_the_driver_does_not_tell_is_not_free() -> None:
    found = availability(node(card(memory_used=None, memory_free=None)), {})[UUID]
    assert (found.assignable, found.free, found.hindrance) == (False, None, Hindrance.UNKNOWN)


def test_shared_memory_is_free_while_no_stranger_is_listed() -> None:
    shared = card(memory_total=None, memory_used=None, memory_free=90000, unified_memory=True)
    assert availability(node(shared), {})[UUID].free == 90000
    assert not availability(node(shared, processes_known=False), {})[UUID].assignable
    assert not availability(node(evolve(shared, processes=(GpuProcess(8, None),))), {})[UUID].assignable


def test_older_facts_place_nothing() -> None:
    stale = node(stale=Stale(InventoryError.TIMEOUT, None, 1.0))
    found = availability(stale, {})[UUID]
    assert (found.assignable, found.hindrance) == (False, Hindrance.UNKNOWN)


def test_a_quarantined_card_is_not_assignable_until_it_is_let_out() -> None:
    found = availability(node(), {}, quarantined={UUID: "not released after llama ended"})[UUID]
    assert (found.why_not, found.hindrance) == ("not released after llama ended", Hindrance.QUARANTINED)


def test_what_an_operator_accepted_holds_no_card() -> None:
    assert availability(held_by((8, 9000), used=9000), {}, accepted={UUID: {8}})[UUID].assignable
    assert not availability(held_by((8, 9000), (9, 9000), used=18000), {}, accepted={UUID: {8}})[UUID].assignable


def test_a_card_in_mig_mode_is_not_assignable_and_its_slices_are() -> None:
    parent = card(mig_enabled=True, flags=(GpuFlag.MIG_ENABLED,), memory_used=60000)
    instance = MigInstance(0, 0, "MIG-a", "3g.40gb", "h100-mig-3g.40gb", 40448)
    found = availability(node(parent, mig_instances=(instance,)), {}, engines={"MIG-a": (OURS[7],)})
    assert found[UUID].hindrance is Hindrance.MIG_MODE
    assert found["MIG-a"].assignable and found["MIG-a"].free is None
    assert found["MIG-a"].holders == (OURS[7],)


@pytest.mark.parametrize("mode", [True, None])
def test_a_slice_of_a_sick_or_missing_card_and_a_card_of_unknown_mode_are_not_assignable(mode: bool | None) -> None:
    instance = MigInstance(0, 0, "MIG-a", "3g.40gb", "h100-mig-3g.40gb", 40448)
    sick = card(mig_enabled=mode, flags=(GpuFlag.UNCORRECTED_ECC,))
    assert not availability(node(sick, mig_instances=(instance,)), {})["MIG-a"].assignable
    assert not availability(node(card(1), mig_instances=(instance,)), {})["MIG-a"].assignable
    assert not availability(node(card(mig_enabled=mode)), {})[UUID].assignable


@pytest.mark.parametrize("entry", [0, "GPU-0", "00000000:00:00.0"])
def test_cards_that_the_node_leaves_to_others_are_not_assignable(entry: int | str) -> None:
    inventory = node(card(0), card(1))
    assert allowed_uuids(inventory, (entry,)) == {"GPU-0"}
    found = availability(inventory, {}, allowed=(entry,))
    assert found["GPU-0"].assignable
    assert (found["GPU-1"].why_not, found["GPU-1"].hindrance) == (NOT_ALLOWED, Hindrance.NOT_ALLOWED)


# -- all inventories ---------------------------------------------------------------------------------------

sizes = st.none() | st.integers(0, 90000)
rows = st.lists(st.builds(GpuProcess, st.integers(1, 6), sizes), max_size=4).map(tuple)
cards = st.builds(
    card,
    st.just(0),
    memory_used=sizes,
    memory_free=sizes,
    memory_total=sizes,
    unified_memory=st.booleans(),
    mig_enabled=st.none() | st.booleans(),
    processes=rows,
    flags=st.sets(st.sampled_from(GpuFlag)).map(lambda flags: tuple(flag for flag in GpuFlag if flag in flags)),
)
nodes = st.builds(
    node,
    cards,
    processes_known=st.booleans(),
    stale=st.none() | st.just(Stale(InventoryError.TIMEOUT, None, 1.0)),
)
holders = st.dictionaries(
    st.integers(1, 6),
    st.builds(GpuHolder, st.just(0), st.none(), shard=st.none() | st.just("llama"), is_unknown=st.booleans()),
)


@given(nodes, holders)
def test_what_is_not_known_is_never_free(inventory: Inventory, known: dict[int, GpuHolder]) -> None:
    gpu = inventory.gpus[0]
    found = availability(inventory, known)[gpu.uuid]
    assert (found.why_not is None) == (found.hindrance is None)
    assert found.free is None or found.free >= 0
    if not found.assignable:
        return
    strangers = [row for row in gpu.processes if row.pid not in known or known[row.pid].shard is None]
    assert inventory.stale is None
    assert gpu.mig_enabled is False
    assert not set(gpu.flags) & set(UNHEALTHY)
    assert all(row.memory is not None and row.memory <= 1024 for row in strangers)
    assert gpu.memory_used is not None or (gpu.unified_memory and inventory.processes_known)


@given(nodes)
def test_one_more_stranger_makes_no_card_free(inventory: Inventory) -> None:
    gpu = inventory.gpus[0]
    more = evolve(inventory, gpus=(evolve(gpu, processes=(*gpu.processes, GpuProcess(9, None))),))
    assert not availability(more, {})[gpu.uuid].assignable
