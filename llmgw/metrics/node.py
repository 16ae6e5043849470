"""What the board and the hardware tell, as families: shards, their states and loads, GPUs and who uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from attrs import frozen
from prometheus_client import ProcessCollector, generate_latest

from llmgw.board import Board
from llmgw.discovery.availability import unhealthy, unseen_memory
from llmgw.domain.hardware import Availability, Gpu, Inventory
from llmgw.domain.shard import ShardId
from llmgw.domain.status import ConditionKind, ShardState, ShardStatus, Snapshot, Wish
from llmgw.metrics import families as f
from llmgw.metrics.exposition import Group, Labels, Part, Text
from llmgw.metrics.families import Family

WISHED = "wished"
"""The reason of a restart that no failure preceded."""

_MIB = 1 << 20

_process = ProcessCollector(registry=None)


@frozen
class Node:
    """What of llmgw itself and of its hardware is shown. Times are seconds since the epoch."""

    version: str
    started: float
    config_in_force: bool
    stopping: bool
    inventory: Inventory | None
    availability: Mapping[str, Availability]
    """By UUID."""


class NodeSeries:
    """A source of `exposition.Exposition`. `run` counts restarts for as long as it runs."""

    def __init__(self, board: Board, node: Callable[[], Node]) -> None:
        self._board = board
        self._node = node
        self._restarts = Restarts()

    async def run(self) -> None:
        """Watch the board until cancelled."""
        snapshot = self._board.snapshot
        while True:
            self._restarts.look(snapshot)
            snapshot = await self._board.wait_newer(snapshot.revision)

    async def parts(self) -> Iterable[Part]:
        node = self._node()
        statuses = [instance.status for _, instance in sorted(self._board.snapshot.shards.items())]
        wished = {id_: instance.intent.wish for id_, instance in self._board.snapshot.shards.items()}
        return (
            *_of_llmgw(node),
            Text((generate_latest(_process).decode(),)),
            *_of_shards(statuses, wished),
            Group(f.SHARD_RESTARTS, list(self._restarts.rows(statuses))),
            *_of_gpus(node.inventory, node.availability),
        )


class Restarts:
    """Counts launches after the first, by what went before them. Snapshots in, counts out."""

    def __init__(self) -> None:
        self._generations: dict[ShardId, int] = {}
        self._failures: dict[ShardId, str] = {}
        """The code of the failure that the next launch follows."""
        self._counts: dict[ShardId, dict[str, int]] = {}

    def look(self, snapshot: Snapshot) -> None:
        """Take note of the newest snapshot. One that was missed costs a reason at most, never a restart."""
        for id_ in self._generations.keys() - snapshot.shards.keys():
            for known in (self._generations, self._failures, self._counts):
                known.pop(id_, None)
        for id_, instance in snapshot.shards.items():
            status = instance.status
            before = self._generations.get(id_)
            if before is not None and status.generation > before:
                reason = self._failures.pop(id_, WISHED)
                counts = self._counts.setdefault(id_, {})
                counts[reason] = counts.get(reason, 0) + status.generation - before
            if status.pid is not None or before is not None:
                self._generations[id_] = status.generation
            if status.state is ShardState.FAILED and status.reason is not None:
                self._failures[id_] = status.reason.code
            elif status.state in (ShardState.READY, ShardState.STOPPED):
                self._failures.pop(id_, None)

    def rows(self, statuses: Iterable[ShardStatus]) -> Iterator[tuple[Labels, int]]:
        """A shard that never restarted has a zero, so that the first restart is seen as one."""
        for status in statuses:
            yield (status.name, WISHED), self._counts.get(status.id, {}).get(WISHED, 0)
            for reason, count in self._counts.get(status.id, {}).items():
                if reason != WISHED:
                    yield (status.name, reason), count


def _of_llmgw(node: Node) -> Iterator[Group]:
    yield Group(f.BUILD_INFO, (((node.version,), 1),))
    yield Group(f.START_TIME, (((), node.started),))
    yield Group(f.CONFIG_IN_FORCE, (((), int(node.config_in_force)),))
    yield Group(f.STOPPING, (((), int(node.stopping)),))


def _of_shards(statuses: list[ShardStatus], wished: Mapping[ShardId, Wish]) -> Iterator[Group]:
    def known(family: Family, value: Callable[[ShardStatus], float | None]) -> Group:
        rows = ((status, value(status)) for status in statuses)
        return Group(family, [((status.name,), number) for status, number in rows if number is not None])

    yield Group(
        f.SHARD_STATE,
        (
            ((status.name, status.model, status.engine, state.value), int(status.state is state))
            for status in statuses
            for state in ShardState
        ),
    )
    yield Group(
        f.SHARD_CONDITION,
        (
            ((status.name, kind.value), int(status.condition(kind) is not None))
            for status in statuses
            for kind in ConditionKind
        ),
    )
    yield known(f.SHARD_WANTED, lambda status: int(wished[status.id] is Wish.START))
    yield known(f.SHARD_STATE_SINCE, lambda status: status.since)
    yield known(f.SHARD_LOAD_PROGRESS, lambda status: status.progress.fraction if status.progress else None)
    yield known(f.SHARD_LOAD_DURATION, lambda status: status.load_seconds)
    yield known(f.SHARD_FAILURES, lambda status: status.failures)
    yield known(f.SHARD_RUNNING, lambda status: status.activity.running if status.activity else None)
    yield known(f.SHARD_WAITING, lambda status: status.activity.waiting if status.activity else None)
    yield known(f.SHARD_TOKENS, lambda status: status.activity.tokens_per_second if status.activity else None)
    yield known(f.SHARD_KV, lambda status: status.activity.kv_usage if status.activity else None)
    yield known(f.SHARD_SLOTS, lambda status: status.slots)


def _of_gpus(inventory: Inventory | None, availability: Mapping[str, Availability]) -> Iterator[Group]:
    if inventory is None:
        return
    gpus = inventory.gpus

    def known(family: Family, value: Callable[[Gpu], float | None]) -> Group:
        rows = ((gpu, value(gpu)) for gpu in gpus)
        return Group(family, [((str(gpu.index),), number) for gpu, number in rows if number is not None])

    yield Group(f.GPU_INFO, [((str(gpu.index), gpu.uuid, gpu.name, gpu.gpu_class or ""), 1) for gpu in gpus])
    yield known(f.GPU_MEMORY_TOTAL, lambda gpu: _bytes(gpu.memory_total))
    yield known(f.GPU_MEMORY_USED, lambda gpu: _bytes(gpu.memory_used))
    yield known(f.GPU_FOREIGN_MEMORY, lambda gpu: _bytes(_foreign(gpu, availability.get(gpu.uuid))))
    yield Group(f.SHARD_GPU_MEMORY, list(_by_shard(gpus, availability)))
    yield known(f.GPU_ASSIGNABLE, lambda gpu: _assignable(availability.get(gpu.uuid)))
    yield known(f.GPU_UNHEALTHY, lambda gpu: int(unhealthy(gpu) is not None))
    yield known(f.GPU_TEMPERATURE, lambda gpu: gpu.temperature)
    yield known(f.GPU_POWER, lambda gpu: gpu.power)
    if inventory.read_at is not None:
        yield Group(f.GPU_READ_TIME, (((), inventory.read_at),))
    yield Group(f.GPU_STALE, (((), int(not inventory.is_current)),))


def _bytes(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes * _MIB


def _assignable(known: Availability | None) -> int | None:
    return None if known is None else int(known.assignable)


def _foreign(gpu: Gpu, known: Availability | None) -> int | None:
    """MiB of processes that are not ours, and of those that nvidia-smi does not show; None is unknown."""
    unseen = unseen_memory(gpu)
    if known is None or unseen is None:
        return None
    strangers = [holder.memory for holder in known.holders if holder.shard is None]
    sizes = [size for size in strangers if size is not None]
    if len(sizes) < len(strangers):
        return None
    ours = [holder for holder in known.holders if holder.shard is not None]
    if any(holder.memory is None for holder in ours):
        # In many containers nvidia-smi lists no process: what nobody is seen to use may be our own engine's.
        return sum(sizes)
    return sum(sizes) + max(0, unseen)


def _by_shard(gpus: Iterable[Gpu], availability: Mapping[str, Availability]) -> Iterator[tuple[Labels, int]]:
    for gpu in gpus:
        known = availability.get(gpu.uuid)
        used: dict[str, int] = {}
        for holder in known.holders if known is not None else ():
            if holder.shard is not None and holder.memory is not None:
                used[holder.shard] = used.get(holder.shard, 0) + holder.memory * _MIB
        for shard, size in used.items():
            yield (shard, str(gpu.index)), size
