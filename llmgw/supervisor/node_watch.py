"""The node's facts while llmgw runs: read at the start, every `[node] inventory_interval`, and before each launch.

One writer, one cell. A question that fails or hangs leaves the last good facts, marked stale, and never delays
anybody but who asked for new ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import trio
from attrs import evolve

from llmgw.board import Cell
from llmgw.config.model import Config
from llmgw.discovery.availability import availability, unhealthy
from llmgw.discovery.survey import RunTool, merge_stale
from llmgw.domain.hardware import Inventory, InventoryError, InventoryStatus, NodeInventory
from llmgw.supervisor.node_look import Adapters, NodeFacts, NodeSettings, Sources, look_at_node
from llmgw.supervisor.ownership import Records
from llmgw.supervisor.quarantine import Quarantine
from llmgw.supervisor.records import ShardRecord

log = logging.getLogger(__name__)

FREE_STEP_MIB = 1024
"""Free memory that changes by less wakes nobody."""
SHORTEST_PAUSE = 1.0
"""Seconds between two looks at a GPU that has just come into quarantine."""


class NodeWatch:
    """`facts` is the last look, None before the first; `news` counts the changes that may let somebody start.

    All looks are made by `run`, so that nobody who stops waiting for one cuts it short for the others.
    """

    def __init__(
        self,
        run_tool: RunTool,
        config: Cell[Config],
        records: Callable[[], Iterable[ShardRecord]],
        quarantine: Quarantine,
        *,
        now: Callable[[], float],
        sources: Callable[[], Sources] = Sources.of_this_host,
    ) -> None:
        self._run_tool = run_tool
        self._config = config
        self._records = records
        self._quarantine = quarantine
        self._now = now
        self._sources = sources
        self.facts: Cell[NodeFacts | None] = Cell(None)
        self.news: Cell[int] = Cell(0)
        self._wanted = Cell(0)
        """The number of the look that somebody waits for."""
        self._begun = 0
        self._done = Cell(0)
        self._adapters: Adapters | None = None
        self._free: dict[str, int] = {}
        """MiB free by UUID as they were when somebody was woken for them last."""
        self._told = ""

    @property
    def is_needed(self) -> bool:
        """Whether any shard of the configuration in force asks for a GPU, or one is in quarantine."""
        return any(spec.gpus not in (0, ()) for spec in self._config.value.shards) or bool(self._quarantine.entries)

    async def refresh(self) -> NodeFacts:
        """Facts of a look that began after this was called; one at a time, shared by all who wait."""
        wanted = self._begun + 1
        self._wanted.set(max(wanted, self._wanted.value))
        await self._done.wait_value(lambda done: done >= wanted)
        assert self.facts.value is not None
        return self.facts.value

    async def refresh_within(self, patience: float) -> NodeFacts:
        """As `refresh`; the last facts, marked stale, when new ones take longer than `patience` seconds. Only who
        comes before the first look waits for its end."""
        known = self.facts.value
        with trio.move_on_after(patience):
            return await self.refresh()
        if known is None:
            with trio.move_on_after(self._config.value.node.discovery_timeout):
                return await self.facts.wait_value(lambda facts: facts is not None) or self._unanswered(None)
        return self._unanswered(self.facts.value)

    async def run(self) -> None:
        """Look when somebody asks; as long as any shard wants GPUs, also at least every `inventory_interval`."""
        while True:
            with trio.move_on_after(self._pause()):
                await self._wanted.wait_value(lambda wanted: wanted > self._begun)
            self._begun += 1
            number = self._begun
            self._publish(await self._look())
            self._done.set(number)
            await self._quarantine.save()

    def wake(self) -> None:
        """Something else changed that may let somebody start: an engine has ended, an operator released a GPU."""
        self.news.set(self.news.value + 1)

    def _pause(self) -> float:
        """Seconds until the next look that nobody asks for."""
        if not self.is_needed:
            return math.inf
        if self._begun == 0:
            return 0.0
        interval = self._config.value.node.inventory_interval
        waits = [self._now() - entry.since for entry in self._quarantine.entries]
        # Memory that comes back late comes back soon: asked often at first, then ever less.
        return min(interval, max(SHORTEST_PAUSE, min(waits) / 2)) if waits else interval

    async def _look(self) -> NodeFacts:
        node = self._config.value.node
        known = self._adapters
        fresh = known is not None and 0 <= self._now() - known.read_at < node.inventory_interval
        try:
            found = await look_at_node(
                self._run_tool,
                self._sources(),
                NodeSettings(node.name, node.fabric, node.island, node.address, node.gpus),
                timeout=node.discovery_timeout,
                now=self._now,
                records=lambda: Records(tuple(self._records())),
                quarantined=self._quarantine.recheck,
                accepted=self._quarantine.accepted,
                last_good=self.facts.value,
                adapters=known if fresh else None,
            )
        except Exception:
            # Whatever a driver or a file may say: the engines run on, and nothing new is placed.
            log.exception("an error in llmgw itself while it looked at the hardware")
            return self._stale(self.facts.value, InventoryError.NVML_INIT_FAILED, "an error in llmgw itself")
        self._adapters = found.adapters
        return found

    def _unanswered(self, known: NodeFacts | None) -> NodeFacts:
        return self._stale(known, InventoryError.TIMEOUT, "nvidia-smi has not answered yet")

    def _stale(self, known: NodeFacts | None, error: InventoryError, detail: str) -> NodeFacts:
        """Older facts, by which nothing is placed; without any, the failure itself."""
        failed = Inventory(InventoryStatus.ERROR, error=error, detail=detail, read_at=self._now())
        if known is None:
            return NodeFacts(NodeInventory(self._config.value.node.name, failed))
        inventory = merge_stale(known.inventory if known.inventory.gpus else None, failed)
        unknown = availability(inventory, {})
        told = {uuid: evolve(unknown[uuid], holders=known.availability[uuid].holders) for uuid in unknown}
        return evolve(known, node=evolve(known.node, gpu=inventory), availability=told)

    def _publish(self, found: NodeFacts) -> None:
        before = self.facts.value
        self.facts.set(found)
        self._tell(found)
        moved = self._free_has_moved(found)
        if before is None or moved or _decisive(before) != _decisive(found):
            self.wake()

    def _free_has_moved(self, found: NodeFacts) -> bool:
        """Whether free memory is another than it was, by so much that it may matter. Memory that goes up and down a
        little at whatever level is no news, nor is what our own engines use on their cards."""
        if not found.inventory.is_current:
            return False
        ours = {
            uuid
            for uuid, known in found.availability.items()
            if any(holder.shard is not None for holder in known.holders)
        }
        now = {
            gpu.uuid: gpu.memory_free
            for gpu in found.inventory.gpus
            if gpu.memory_free is not None and gpu.uuid not in ours
        }
        moved = {
            uuid: free
            for uuid, free in now.items()
            if uuid not in self._free or abs(free - self._free[uuid]) >= FREE_STEP_MIB
        }
        self._free = {uuid: free for uuid, free in self._free.items() if uuid in now} | moved
        return bool(moved)

    def _tell(self, found: NodeFacts) -> None:
        """One line of the log for each change in what is wrong with the looking."""
        inventory = found.inventory
        text = ""
        if inventory.stale is not None:
            text = f"nvidia-smi fails ({inventory.stale.detail}); the older facts are kept, nothing new is placed"
        elif inventory.error not in (None, InventoryError.COMMAND_MISSING) and self.is_needed:
            text = f"cannot read the GPUs: {inventory.detail}"
        if text and text != self._told:
            log.warning("%s", text)
        elif self._told and not text:
            log.info("the GPUs can be read again")
        self._told = text


def _decisive(facts: NodeFacts) -> object:
    """What decides, beside free memory, whether a shard may start; other changes wake nobody."""
    inventory = facts.inventory
    cards = [(gpu.index, gpu.uuid, gpu.mig_enabled, unhealthy(gpu)) for gpu in inventory.gpus]
    may = sorted((uuid, known.assignable) for uuid, known in facts.availability.items())
    return inventory.error, inventory.stale is None, cards, may, inventory.mig_instances
