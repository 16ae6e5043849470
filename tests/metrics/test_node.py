from __future__ import annotations

from collections.abc import Mapping

import trio
import trio.testing
from attrs import evolve
from prometheus_client.parser import text_string_to_metric_families

from llmgw.board import Board, StatusCell
from llmgw.discovery.availability import availability
from llmgw.domain.hardware import (
    Availability,
    Gpu,
    GpuFlag,
    GpuHolder,
    GpuProcess,
    Inventory,
    InventoryError,
    InventoryStatus,
    Stale,
)
from llmgw.domain.problem import Reason
from llmgw.domain.shard import ShardId
from llmgw.domain.status import (
    Activity,
    ActivitySeen,
    ConditionKind,
    ConditionSet,
    Event,
    Failed,
    Intent,
    Launched,
    Progress,
    ProgressSeen,
    ReadyConfirmed,
    Requeued,
    RetryScheduled,
    ShardState,
    ShardStatus,
    Stopped,
    Wish,
)
from llmgw.metrics.exposition import Exposition
from llmgw.metrics.node import Node, NodeSeries

Found = dict[tuple[str, frozenset[tuple[str, str]]], float]


def board() -> Board:
    return Board(now=lambda: 1000.0, strict=True)


def add(board: Board, name: str, *events: Event) -> StatusCell:
    cell = board.add(ShardStatus(ShardId(name), name, f"model of {name}", "vllm", since=900.0), Intent(Wish.START))
    for event in events:
        cell.report(event)
    return cell


def launched(generation: int = 1) -> Launched:
    return Launched(4711, 4711, generation, "127.0.0.1:8101", "hash", ("0",))


def node(inventory: Inventory | None = None, known: Mapping[str, Availability] | None = None) -> Node:
    return Node("0.2.0", 500.0, True, False, inventory, known or {})


async def read(series: NodeSeries) -> Found:
    text = (await Exposition(lambda: [series.parts]).render()).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Found, name: str, /, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


async def test_exactly_one_state_of_a_shard_is_1() -> None:
    it = board()
    add(it, "a", launched(), ReadyConfirmed())
    found = await read(NodeSeries(it, node))
    states = {
        state: value(found, "llmgw_shard_state", shard="a", model="model of a", engine="vllm", state=state)
        for state in ShardState
    }
    assert states == {state: float(state is ShardState.READY) for state in ShardState}
    assert value(found, "llmgw_shard_load_duration_seconds", shard="a") == 0.0
    assert value(found, "llmgw_build_info", version="0.2.0") == 1


async def test_conditions_are_gauges_of_0_and_1() -> None:
    it = board()
    add(it, "a", ConditionSet(ConditionKind.UNPLACED, "no GPU is free"))
    found = await read(NodeSeries(it, node))
    assert value(found, "llmgw_shard_condition", shard="a", condition="unplaced") == 1
    assert value(found, "llmgw_shard_condition", shard="a", condition="gpu-held") == 0


async def test_what_is_not_known_has_no_line() -> None:
    it = board()
    cell = add(it, "a", launched(), ProgressSeen(Progress("weights")))
    assert value(await read(NodeSeries(it, node)), "llmgw_shard_load_progress_ratio", shard="a") is None
    cell.report(ProgressSeen(Progress("weights", 0.25)))
    found = await read(NodeSeries(it, node))
    assert value(found, "llmgw_shard_load_progress_ratio", shard="a") == 0.25
    assert value(found, "llmgw_shard_running_requests", shard="a") is None
    cell.report(ReadyConfirmed())
    cell.report(ActivitySeen(Activity(running=3, kv_usage=0.5)))
    found = await read(NodeSeries(it, node))
    assert value(found, "llmgw_shard_running_requests", shard="a") == 3
    assert value(found, "llmgw_shard_kv_cache_usage_ratio", shard="a") == 0.5
    assert value(found, "llmgw_shard_tokens_per_second", shard="a") is None


async def test_a_restart_counts_under_what_went_before_it(nursery: trio.Nursery) -> None:
    it = board()
    series = NodeSeries(it, node)
    nursery.start_soon(series.run)

    async def report(cell: StatusCell, *events: Event) -> None:
        for event in events:
            cell.report(event)
            await trio.testing.wait_all_tasks_blocked()

    cell = add(it, "a")
    await report(cell, launched(7), ReadyConfirmed())
    found = await read(series)
    assert value(found, "llmgw_shard_restarts_total", shard="a", reason="wished") == 0
    again = (Failed(Reason("oom", "out of memory")), RetryScheduled(1.0, 1, 5))
    await report(cell, *again, launched(8), *again, launched(9), ReadyConfirmed())
    await report(cell, Stopped("SIGTERM"), Requeued(), launched(10))
    found = await read(series)
    assert value(found, "llmgw_shard_restarts_total", shard="a", reason="oom") == 2
    assert value(found, "llmgw_shard_restarts_total", shard="a", reason="wished") == 1


async def test_a_shard_that_the_file_no_longer_has_leaves_nothing_behind(nursery: trio.Nursery) -> None:
    it = board()
    series = NodeSeries(it, node)
    nursery.start_soon(series.run)
    add(it, "a", launched(1))
    await trio.testing.wait_all_tasks_blocked()
    it.remove(ShardId("a"))
    await trio.testing.wait_all_tasks_blocked()
    found = await read(series)
    assert [key for key in found if ("shard", "a") in key[1]] == []


def gpu(index: int = 0, *, used: int | None = 1000, processes: tuple[GpuProcess, ...] = ()) -> Gpu:
    return Gpu(
        index,
        f"GPU-{index}",
        f"00000000:0{index}:00.0",
        "NVIDIA H100",
        81559,
        used,
        None if used is None else 81559 - used,
        (9, 0),
        processes,
        gpu_class="h100-80g",
    )


async def hardware(inventory: Inventory, holders: Mapping[int, GpuHolder] | None = None) -> Found:
    known = availability(inventory, holders or {})
    return await read(NodeSeries(board(), lambda: node(inventory, known)))


MIB = 1 << 20


async def test_memory_of_strangers_is_told_apart_from_that_of_our_engines() -> None:
    card = gpu(used=1000, processes=(GpuProcess(1, 600), GpuProcess(2, 300)))
    holders = {1: GpuHolder(1, 600, shard="a"), 2: GpuHolder(2, 300, "ada", "python")}
    found = await hardware(Inventory(InventoryStatus.OK, (card,), read_at=77.0), holders)
    assert value(found, "llmgw_shard_gpu_memory_used_bytes", shard="a", gpu="0") == 600 * MIB
    # What no process has is nobody's of ours either.
    assert value(found, "llmgw_gpu_foreign_memory_bytes", gpu="0") == 400 * MIB
    assert value(found, "llmgw_gpu_memory_used_bytes", gpu="0") == 1000 * MIB
    assert value(found, "llmgw_gpu_read_time_seconds") == 77.0
    assert value(found, "llmgw_gpu_info", gpu="0", uuid="GPU-0", name="NVIDIA H100", **{"class": "h100-80g"}) == 1


async def test_memory_of_strangers_is_unknown_where_the_driver_does_not_tell() -> None:
    found = await hardware(Inventory(InventoryStatus.OK, (gpu(used=None),)))
    assert value(found, "llmgw_gpu_foreign_memory_bytes", gpu="0") is None
    card = gpu(processes=(GpuProcess(2, None),))
    found = await hardware(Inventory(InventoryStatus.OK, (card,)), {2: GpuHolder(2, None)})
    assert value(found, "llmgw_gpu_foreign_memory_bytes", gpu="0") is None


async def test_a_fault_of_a_gpu_and_older_facts_are_shown() -> None:
    ill = evolve(gpu(), flags=(GpuFlag.LOST,))
    stale = Stale(InventoryError.TIMEOUT, None, 5.0)
    found = await hardware(Inventory(InventoryStatus.OK, (ill,), read_at=1.0, stale=stale))
    assert value(found, "llmgw_gpu_unhealthy", gpu="0") == 1
    assert value(found, "llmgw_gpu_assignable", gpu="0") == 0
    assert value(found, "llmgw_gpu_facts_stale") == 1


async def test_a_node_without_gpus_has_no_gpu_series() -> None:
    found = await read(NodeSeries(board(), node))
    assert [name for name, _ in found if name.startswith("llmgw_gpu")] == []
    assert value(found, "process_resident_memory_bytes") is not None
