"""An inventory as JSON and back: what `llmgw inventory --json` and `/v1/inventory` print, and what
`check --inventory` reads. Pure.

The keys of `gpu` are fixed and always present; null means that the driver does not say. Entries of the lists hold
exactly what is named here, so that two inventories can be compared key by key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmgw.domain.hardware import Gpu, GpuFlag, GpuProcess, Inventory, InventoryError, InventoryStatus, LostGpu

API = 1

BF16_FROM, FP8_FROM, NVFP4_FROM = (8, 0), (8, 9), (10, 0)
"""Compute capability from which the format runs natively."""

NOT_WHOLE = frozenset({GpuFlag.MIG_ENABLED, GpuFlag.LOST, GpuFlag.REQUIRES_RESET})
"""A card with one of these is never given out as a whole, whatever uses it."""


def inventory_json(inventory: Inventory, *, node: str, source: str) -> dict[str, Any]:
    """The one object that is printed. `source` is `local` or `daemon`; `fabric` and `host` are null until they are
    discovered."""
    return {"api": API, "node": node, "source": source, "gpu": gpu_json(inventory), "fabric": None, "host": None}


def gpu_json(inventory: Inventory) -> dict[str, Any]:
    return {
        "status": inventory.status.value,
        "error_kind": inventory.error.value if inventory.error is not None else None,
        "detail": inventory.detail,
        "driver_version": inventory.driver_version,
        "read_at": inventory.read_at,
        "processes_known": inventory.processes_known,
        "gpus": [_one(gpu) for gpu in inventory.gpus],
        "lost": [{"index": lost.index, "bus_id": lost.bus_id} for lost in inventory.lost],
        "mig_instances": [],
        "topology": None,
    }


def read_inventory(answer: object) -> Inventory:
    """The inventory that `inventory_json` printed. Raises ValueError, with the place in its text, for anything else."""
    if not isinstance(answer, Mapping) or answer.get("api") != API or not isinstance(answer.get("gpu"), Mapping):
        raise ValueError(f'not an inventory: an object with "api": {API} and "gpu" is expected')
    gpu = answer["gpu"]
    try:
        return Inventory(
            status=InventoryStatus(gpu["status"]),
            gpus=tuple(_read_one(entry) for entry in gpu["gpus"]),
            error=InventoryError(gpu["error_kind"]) if gpu["error_kind"] is not None else None,
            detail=gpu.get("detail"),
            driver_version=gpu["driver_version"],
            read_at=gpu.get("read_at"),
            lost=tuple(LostGpu(entry["index"], entry["bus_id"]) for entry in gpu["lost"]),
            processes_known=gpu.get("processes_known", True),
        )
    except KeyError as error:
        raise ValueError(f"not an inventory: gpu has no {error}") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not an inventory: gpu: {error}") from error


def _one(gpu: Gpu) -> dict[str, Any]:
    capability = gpu.compute_capability
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "bus_id": gpu.bus_id,
        "memory_total_mib": gpu.memory_total,
        "memory_reserved_mib": gpu.memory_reserved,
        "memory_used_mib": gpu.memory_used,
        "memory_free_mib": gpu.memory_free,
        "unified_memory": gpu.unified_memory,
        "compute_cap": f"{capability[0]}.{capability[1]}" if capability is not None else None,
        "class": gpu.gpu_class,
        "ecc_enabled": gpu.ecc_enabled,
        "mig_enabled": gpu.mig_enabled,
        "uncorrected_ecc_volatile": gpu.uncorrected_ecc,
        "busy": GpuFlag.MEMORY_IN_USE in gpu.flags,
        "processes": [[process.pid, process.memory] for process in gpu.processes],
        "health_flags": [flag.value for flag in gpu.flags],
        "fp8_native": capability is not None and capability >= FP8_FROM,
        "bf16_native": capability is not None and capability >= BF16_FROM,
        "nvfp4_native": capability is not None and capability >= NVFP4_FROM,
        "schedulable_whole": NOT_WHOLE.isdisjoint(gpu.flags),
    }


def _read_one(entry: Mapping[str, Any]) -> Gpu:
    capability = entry["compute_cap"]
    major, _, minor = capability.partition(".") if capability is not None else ("", "", "")
    return Gpu(
        index=entry["index"],
        uuid=entry["uuid"],
        bus_id=entry["bus_id"],
        name=entry["name"],
        memory_total=entry["memory_total_mib"],
        memory_used=entry["memory_used_mib"],
        memory_free=entry.get("memory_free_mib"),
        compute_capability=(int(major), int(minor)) if capability is not None else None,
        processes=tuple(GpuProcess(pid, memory) for pid, memory in entry["processes"]),
        memory_reserved=entry.get("memory_reserved_mib"),
        gpu_class=entry["class"],
        unified_memory=entry["unified_memory"],
        ecc_enabled=entry["ecc_enabled"],
        mig_enabled=entry["mig_enabled"],
        uncorrected_ecc=entry["uncorrected_ecc_volatile"],
        flags=tuple(GpuFlag(flag) for flag in entry["health_flags"]),
    )
