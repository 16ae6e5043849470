"""The node's facts while llmgw runs: read at the start, every `[node] inventory_interval`, and before each launch.

One writer, one cell. A question that fails or hangs leaves the last good facts, marked stale, and never delays
anybody but who asked for new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import trio

from llmgw.board import Cell
from llmgw.config.model import Config
from llmgw.discovery.availability import unhealthy
from llmgw.discovery.survey import RunTool
from llmgw.domain.hardware import InventoryError
from llmgw.supervisor.node_look import NodeFacts, NodeSettings, Sources, look_at_node
from llmgw.supervisor.quarantine import Quarantine
from llmgw.supervisor.records import ShardRecord

log = logging.getLogger(__name__)

FREE_STEP_MIB = 1024
"""Free memory that changes by less wakes nobody."""


class NodeWatch:
    """`facts` is the last look, None before the first; `news` counts the changes that may let somebody start."""

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
        self._looking = trio.Lock()
        self._begun = 0
        self._told = ""

    @property
    def is_needed(self) -> bool:
        """Whether any shard of the configuration in force asks for a GPU."""
        return any(spec.gpus not in (0, ()) for spec in self._config.value.shards)

    async def refresh(self) -> NodeFacts:
        """Facts of a look that began after this was called; one at a time, shared by all who wait."""
        asked = self._begun
        async with self._looking:
            known = self.facts.value
            if self._begun > asked and known is not None:
                return known
            self._begun += 1
            found = await self._look()
            self._publish(found)
        await self._quarantine.save()
        return found

    async def run(self) -> None:
        """Look again and again, as long as any shard wants GPUs."""
        while True:
            if self.is_needed:
                await self.refresh()
            await trio.sleep(self._config.value.node.inventory_interval)

    def wake(self) -> None:
        """Something else changed that may let somebody start: an engine has ended, an operator released a GPU."""
        self.news.set(self.news.value + 1)

    async def _look(self) -> NodeFacts:
        node = self._config.value.node
        return await look_at_node(
            self._run_tool,
            self._sources(),
            NodeSettings(node.name, node.fabric, node.island, node.address),
            timeout=node.discovery_timeout,
            now=self._now,
            records=self._records,
            quarantined=self._quarantine.recheck,
            accepted=self._quarantine.accepted,
            last_good=self.facts.value,
        )

    def _publish(self, found: NodeFacts) -> None:
        before = self.facts.value
        self.facts.set(found)
        self._tell(found)
        if before is None or _decisive(before) != _decisive(found):
            self.wake()

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
    """What decides whether a shard may start; other changes wake nobody."""
    inventory = facts.inventory
    cards = [
        (
            gpu.index,
            gpu.uuid,
            gpu.mig_enabled,
            unhealthy(gpu),
            None if gpu.memory_free is None else _step(gpu.memory_free),
        )
        for gpu in inventory.gpus
    ]
    may = sorted((uuid, known.assignable) for uuid, known in facts.availability.items())
    return inventory.error, inventory.stale is None, cards, may, inventory.mig_instances


def _step(mebibytes: int) -> int:
    return mebibytes // FREE_STEP_MIB
