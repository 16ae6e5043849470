"""May a GPU be handed out now? Pure. What is not known is never taken for free or for healthy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import evolve

from llmgw.discovery.gpus import BUSY_MIB
from llmgw.domain.hardware import Availability, Gpu, GpuFlag, GpuHolder, GpuProcess, Hindrance, Inventory, MigInstance

UNHEALTHY: Mapping[GpuFlag, str] = {
    GpuFlag.LOST: "lost",
    GpuFlag.REQUIRES_RESET: "needs a reset",
    GpuFlag.UNCORRECTED_ECC: "uncorrected ECC",
    GpuFlag.ROW_REMAP_PENDING: "row remap pending",
    GpuFlag.ROW_REMAP_FAILURE: "row remap failure",
}
"""Signs of a card that nothing new goes to, as a few words; `memory_in_use` and MIG mode are no faults."""


def availability(
    inventory: Inventory,
    processes: Mapping[int, GpuHolder],
    *,
    quarantined: Mapping[str, str] | None = None,
    accepted: Mapping[str, Collection[int]] | None = None,
) -> Mapping[str, Availability]:
    """By UUID, for every card and every MIG slice of the inventory.

    `processes` tells what is known about the pids on the GPUs: one that is missing is a stranger whom nobody can see.
    `quarantined` are cards whose memory has not come back after an engine's end, each with the reason in words.
    `accepted` are pids by UUID that an operator has declared to be in nobody's way.
    """
    found = {}
    for gpu in inventory.gpus:
        if gpu.uuid:
            holders = _holders(gpu.processes, processes)
            text = (quarantined or {}).get(gpu.uuid)
            found[gpu.uuid] = _of_card(gpu, inventory, holders, text, (accepted or {}).get(gpu.uuid, ()))
    for instance in inventory.mig_instances:
        found[instance.uuid] = _of_slice(instance, inventory, (quarantined or {}).get(instance.uuid))
    return found


def unhealthy(gpu: Gpu) -> str | None:
    """What is wrong with a card, in a few words; None: nothing that the driver told."""
    signs = [UNHEALTHY[flag] for flag in gpu.flags if flag in UNHEALTHY]
    if GpuFlag.REQUIRES_RESET in gpu.flags and gpu.recovery_action is not None:
        signs[signs.index(UNHEALTHY[GpuFlag.REQUIRES_RESET])] += f" ({gpu.recovery_action})"
    return ", ".join(signs) or None


def _of_card(
    gpu: Gpu, inventory: Inventory, holders: tuple[GpuHolder, ...], quarantine: str | None, accepted: Collection[int]
) -> Availability:
    why_not, kind = _first(
        (_not_current(inventory), Hindrance.UNKNOWN),
        (unhealthy(gpu), Hindrance.UNHEALTHY),
        ("in MIG mode" if gpu.mig_enabled else None, Hindrance.MIG_MODE),
        (quarantine, Hindrance.QUARANTINED),
        _held(gpu, inventory, holders, accepted),
    )
    return Availability(gpu.uuid, why_not, _free(gpu), holders, kind)


def _of_slice(instance: MigInstance, inventory: Inventory, quarantine: str | None) -> Availability:
    parent = inventory.gpu(instance.parent_index)
    why_not, kind = _first(
        (_not_current(inventory), Hindrance.UNKNOWN),
        ("its card is not known" if parent is None else None, Hindrance.UNKNOWN),
        (unhealthy(parent) if parent is not None else None, Hindrance.UNHEALTHY),
        (quarantine, Hindrance.QUARANTINED),
    )
    # Processes of a slice are told for the whole card, so nobody can say whose slice they are on: an engine of ours
    # is kept apart by its assignment, and how much of the slice is free stays unknown.
    return Availability(instance.uuid, why_not, None, (), kind)


def _first(*reasons: tuple[str | None, Hindrance]) -> tuple[str | None, Hindrance | None]:
    return next(((text, kind) for text, kind in reasons if text is not None), (None, None))


def _not_current(inventory: Inventory) -> str | None:
    return None if inventory.is_current else "not known: nvidia-smi failed"


def _holders(rows: Sequence[GpuProcess], known: Mapping[int, GpuHolder]) -> tuple[GpuHolder, ...]:
    return tuple(evolve(known.get(row.pid, GpuHolder(row.pid, None)), memory=row.memory) for row in rows)


def _held(
    gpu: Gpu, inventory: Inventory, holders: tuple[GpuHolder, ...], accepted: Collection[int]
) -> tuple[str | None, Hindrance]:
    """Who holds it, when a process that is not ours uses more than a little or an unknown amount."""
    strangers = [holder for holder in holders if holder.shard is None and holder.pid not in accepted]
    large = [holder for holder in strangers if holder.memory is None or holder.memory > BUSY_MIB]
    if large:
        first = max(large, key=lambda holder: holder.memory or 0)
        more = f" and {len(large) - 1} more" if len(large) > 1 else ""
        return f"held by pid {first.pid} {first.command or '(not visible)'}{more}", Hindrance.HELD
    if gpu.memory_used is None:
        if gpu.unified_memory and inventory.processes_known:
            return None, Hindrance.HELD
        return "not known to be free: the driver does not tell its memory", Hindrance.UNKNOWN
    if accepted or any(holder.shard is not None and holder.memory is None for holder in holders):
        # One of unknown size that is in nobody's way may account for all of it.
        return None, Hindrance.HELD
    unseen = gpu.memory_used - sum(holder.memory or 0 for holder in holders)
    if unseen > BUSY_MIB:
        # A container's list can be empty while memory is used, and so can a guest's.
        return f"held by a process that nvidia-smi does not show ({unseen} MiB)", Hindrance.HELD
    return None, Hindrance.HELD


def _free(gpu: Gpu) -> int | None:
    if gpu.memory_free is not None:
        return gpu.memory_free
    if gpu.usable_memory is None or gpu.memory_used is None:
        return None
    return max(0, gpu.usable_memory - gpu.memory_used)
