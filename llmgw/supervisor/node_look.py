"""One look at the whole node: GPUs, fabrics, the host, whose the processes on the GPUs are, and what may be handed out.

The daemon looks again and again with this, and `llmgw inventory` once. Where each part is read from is an argument, so
that recorded nodes go the same way as this one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Literal

import trio
from attrs import field, frozen

from llmgw.discovery.addresses import Reach, reach
from llmgw.discovery.availability import availability, without_engines
from llmgw.discovery.fabric import chosen_fabrics
from llmgw.discovery.fabric_sysfs import host_addresses, host_routes, read_fabric
from llmgw.discovery.host_hardware import SHM, UVM, read_host
from llmgw.discovery.survey import RunTool, merge_stale, survey
from llmgw.domain.fabric import FabricInventory
from llmgw.domain.hardware import Availability, GpuHolder, HostHardware, Inventory, NodeInventory
from llmgw.supervisor.ownership import Ownership, Records, ownership


@frozen
class Sources:
    """Where the facts come from. None for a program or a folder: there is none, and nothing of this host stands in."""

    nvidia_smi: str | None
    rocm_smi: str | None = None
    sysfs: str | None = "/sys"
    addresses: Mapping[str, Sequence[str]] | None = None
    """None: those of this host."""
    meminfo: str | None = None
    """The text; None: that of /proc/meminfo."""
    is_this_host: bool = True
    """Whether /dev, limits, routes and processes of this host belong to what is looked at."""

    @classmethod
    def of_this_host(cls) -> Sources:
        return cls(shutil.which("nvidia-smi"), shutil.which("rocm-smi"))


@frozen
class NodeSettings:
    """What `[node]` says about it."""

    name: str
    fabric: Literal["auto", "none"] | tuple[str, ...] = "auto"
    island: str | None = None
    address: str | None = None
    gpus: Literal["all"] | tuple[int | str, ...] = "all"


@frozen
class Adapters:
    """What was read of network adapters and addresses, and when: seconds since the epoch. A large node has thousands
    of such files, and they hardly ever change, so that a launch need not read them again."""

    read_at: float
    fabric: FabricInventory
    addresses: Mapping[str, Sequence[str]] = field(factory=dict)


@frozen
class NodeFacts:
    """The node at one moment. `availability` is by UUID."""

    node: NodeInventory
    availability: Mapping[str, Availability] = field(factory=dict)
    adapters: Adapters | None = None

    @property
    def inventory(self) -> Inventory:
        return self.node.gpu

    def without_engines(self, *, but: str | None = None) -> Inventory:
        """The GPUs as they would be without our engines, but for that of one shard."""
        holders = {holder.pid: holder for known in self.availability.values() for holder in known.holders}
        return without_engines(self.inventory, holders, but=but)


async def look_at_node(
    run_tool: RunTool,
    sources: Sources,
    settings: NodeSettings,
    *,
    timeout: float,
    now: Callable[[], float],
    records: Callable[[], Records],
    quarantined: Callable[[Inventory, Mapping[int, GpuHolder]], Mapping[str, str]] = lambda _, __: {},
    accepted: Mapping[str, Collection[int]] | None = None,
    last_good: NodeFacts | None = None,
    adapters: Adapters | None = None,
) -> NodeFacts:
    """Look now; never raises for what it finds. `timeout` in seconds bounds all questions about GPUs.

    After a failure the GPUs of `last_good` come back marked stale. `quarantined` is asked
    with the new facts and with whose the processes are.
    `adapters` are taken as they are, None: they are read too.
    """
    previous = last_good.inventory if last_good is not None and last_good.inventory.gpus else None
    found = await survey(
        run_tool,
        nvidia_smi=sources.nvidia_smi,
        timeout=timeout,
        now=now,
        meminfo=sources.meminfo,
        rocm_smi=sources.rocm_smi,
        sysfs=sources.sysfs,
        previous=previous,
    )
    inventory = merge_stale(previous, found)
    rest = partial(_rest, sources, settings, inventory, records, adapters, now)
    seen, host, found_reach, known = await trio.to_thread.run_sync(rest, abandon_on_cancel=True)
    fabric = chosen_fabrics(seen.fabric, settings.fabric, settings.island)
    node = NodeInventory(settings.name, inventory, fabric, host, found_reach.address, found_reach.interface)
    free = availability(
        inventory,
        known.holders,
        quarantined=quarantined(inventory, known.holders),
        accepted=accepted,
        engines=known.engines,
        allowed=settings.gpus,
    )
    return NodeFacts(node, free, seen)


def _rest(
    sources: Sources,
    settings: NodeSettings,
    inventory: Inventory,
    records: Callable[[], Records],
    adapters: Adapters | None,
    now: Callable[[], float],
) -> tuple[Adapters, HostHardware, Reach, Ownership]:
    """Everything that is read from files. Blocks."""
    if adapters is None:
        addresses = host_addresses() if sources.addresses is None else sources.addresses
        fabric = read_fabric(sources.sysfs, addresses) if sources.sysfs is not None else FabricInventory()
        adapters = Adapters(now(), fabric, addresses)
    pids = {process.pid for gpu in inventory.gpus for process in gpu.processes}
    if not sources.is_this_host:
        host = read_host(meminfo=sources.meminfo, shm=None, uvm=None)
        strangers = {pid: GpuHolder(pid, None, is_unknown=True) for pid in pids}
        return adapters, host, Reach(settings.address, None, ""), Ownership(strangers)
    host = read_host(meminfo=sources.meminfo, shm=SHM, uvm=UVM)
    chosen = chosen_fabrics(adapters.fabric, settings.fabric, settings.island)
    found = reach(adapters.addresses, host_routes(), settings.address, chosen)
    return adapters, host, found, ownership(pids, records() if inventory.gpus else Records())
