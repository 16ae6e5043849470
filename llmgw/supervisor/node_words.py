"""What is wrong with this node's GPUs, one line each, with what to do. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from llmgw.discovery.availability import unhealthy
from llmgw.domain.hardware import Inventory, InventoryStatus
from llmgw.supervisor.quarantine import Quarantined


def node_warnings(
    inventory: Inventory | None, quarantined: Sequence[Quarantined], *, in_use: Collection[str], now: float
) -> list[str]:
    """`inventory` None: nobody asked. GPUs that are `in_use` are told by the shard that has them."""
    found = []
    if inventory is not None and inventory.stale is not None:
        why = inventory.stale.detail or inventory.stale.error.value
        found.append(
            f"nvidia-smi has failed for {_age(now - inventory.stale.since)} ({why}): engines run on, nothing new is "
            "placed; run nvidia-smi by hand, and look at dmesg for lines with NVRM"
        )
    elif inventory is not None and inventory.status is InventoryStatus.ERROR and inventory.error is not None:
        found.append(
            f"the GPUs cannot be read ({inventory.detail or inventory.error.value}): none is placed; llmgw doctor"
        )
    found += [_of_entry(entry, now) for entry in quarantined]
    if inventory is not None:
        found += _of_cards(inventory, in_use)
    return found


def _of_entry(entry: Quarantined, now: float) -> str:
    return (
        f"GPU {entry.label} is in quarantine for {_age(now - entry.since)}, not released after {entry.shard} ended: "
        f"{entry.holder}; end that process, or: llmgw gpu release {entry.label}"
    )


def _of_cards(inventory: Inventory, in_use: Collection[str]) -> Iterator[str]:
    lost = {gpu.index for gpu in inventory.lost}
    for gone in inventory.lost:
        name = f"GPU {gone.index}" if gone.index is not None else "a GPU"
        yield f"{name} at {gone.bus_id} is lost: reboot; if it comes back, have the card looked at"
    for gpu in inventory.gpus:
        wrong = unhealthy(gpu)
        if wrong is not None and gpu.uuid not in in_use and gpu.index not in lost:
            yield f"GPU {gpu.index} is given to nobody: {wrong}; reset it (nvidia-smi --gpu-reset) or replace it"


def _age(seconds: float) -> str:
    minutes = int(max(0.0, seconds)) // 60
    if minutes < 1:
        return f"{int(max(0.0, seconds))}s"
    return f"{minutes}m" if minutes < 120 else f"{minutes // 60}h"
