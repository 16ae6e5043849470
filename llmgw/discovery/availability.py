"""May a GPU be handed out now? Pure. What is not known is never taken for free or for healthy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from attrs import evolve

from llmgw.discovery.gpus import BUSY_MIB
from llmgw.discovery.pins import find_gpu
from llmgw.domain.hardware import Availability, Gpu, GpuFlag, GpuHolder, GpuProcess, Hindrance, Inventory, MigInstance

UNHEALTHY: Mapping[GpuFlag, str] = {
    GpuFlag.LOST: "lost",
    GpuFlag.REQUIRES_RESET: "needs a reset",
    GpuFlag.UNCORRECTED_ECC: "uncorrected ECC",
    GpuFlag.ROW_REMAP_PENDING: "row remap pending",
    GpuFlag.ROW_REMAP_FAILURE: "row remap failure",
}
"""Signs of a card that nothing new goes to, as a few words; `memory_in_use` and MIG mode are no faults."""

NOT_ALLOWED = "not in [node] gpus"
UNSEEN = 0
"""Among accepted pids: memory that no process in nvidia-smi's list has."""


def availability(
    inventory: Inventory,
    processes: Mapping[int, GpuHolder],
    *,
    quarantined: Mapping[str, str] | None = None,
    accepted: Mapping[str, Collection[int]] | None = None,
    engines: Mapping[str, Sequence[GpuHolder]] | None = None,
    allowed: Literal["all"] | tuple[int | str, ...] = "all",
) -> Mapping[str, Availability]:
    """By UUID, for every card and every MIG slice of the inventory.

    `processes` tells what is known about the pids on the GPUs: one that is missing is a stranger whom nobody can see.
    `quarantined` are cards whose memory has not come back after an engine's end, each with the reason in words.
    `accepted` are pids by UUID, UNSEEN among them, that an operator has declared to be in nobody's way. `engines` are
    those of ours that live, by the UUIDs that they were given: nvidia-smi does not list one that has just begun to
    load, and in many containers it lists none. `allowed` is `[node] gpus`: the other cards are left to other programs.
    """
    usable = allowed_uuids(inventory, allowed)
    found = {}
    for gpu in inventory.gpus:
        if gpu.uuid:
            holders = _holders(gpu.processes, processes, (engines or {}).get(gpu.uuid, ()))
            text = (quarantined or {}).get(gpu.uuid)
            pids = (accepted or {}).get(gpu.uuid, ())
            found[gpu.uuid] = _of_card(gpu, inventory, holders, text, pids, _is_allowed(gpu.uuid, usable))
    for instance in inventory.mig_instances:
        uuid = instance.uuid
        holders = tuple((engines or {}).get(uuid, ()))
        found[uuid] = _of_slice(instance, inventory, holders, (quarantined or {}).get(uuid), _is_allowed(uuid, usable))
    return found


def allowed_uuids(inventory: Inventory, allowed: Literal["all"] | tuple[int | str, ...]) -> frozenset[str] | None:
    """The cards that `[node] gpus` names, with their slices, and the slices that it names; None: everything."""
    if allowed == "all":
        return None
    uuids = set()
    for entry in allowed:
        found = find_gpu(entry, inventory)
        if isinstance(found, Gpu):
            uuids.add(found.uuid)
            uuids |= {slice_.uuid for slice_ in inventory.mig_instances if slice_.parent_index == found.index}
        elif isinstance(found, MigInstance):
            uuids.add(found.uuid)
    return frozenset(uuids)


def unhealthy(gpu: Gpu) -> str | None:
    """What is wrong with a card, in a few words; None: nothing that the driver told."""
    signs = [UNHEALTHY[flag] for flag in gpu.flags if flag in UNHEALTHY]
    if GpuFlag.REQUIRES_RESET in gpu.flags and gpu.recovery_action is not None:
        signs[signs.index(UNHEALTHY[GpuFlag.REQUIRES_RESET])] += f" ({gpu.recovery_action})"
    return ", ".join(signs) or None


def _of_card(
    gpu: Gpu,
    inventory: Inventory,
    holders: tuple[GpuHolder, ...],
    quarantine: str | None,
    accepted: Collection[int],
    not_allowed: str | None,
) -> Availability:
    why_not, kind = _first(
        (_not_current(inventory), Hindrance.UNKNOWN),
        (unhealthy(gpu), Hindrance.UNHEALTHY),
        ("in MIG mode" if gpu.mig_enabled else None, Hindrance.MIG_MODE),
        ("whether it is in MIG mode is not known" if gpu.mig_enabled is None else None, Hindrance.UNKNOWN),
        (not_allowed, Hindrance.NOT_ALLOWED),
        (quarantine, Hindrance.QUARANTINED),
        _held(gpu, inventory, holders, accepted),
    )
    return Availability(gpu.uuid, why_not, _free(gpu), holders, kind)


def _of_slice(
    instance: MigInstance,
    inventory: Inventory,
    holders: tuple[GpuHolder, ...],
    quarantine: str | None,
    not_allowed: str | None,
) -> Availability:
    parent = inventory.gpu(instance.parent_index)
    why_not, kind = _first(
        (_not_current(inventory), Hindrance.UNKNOWN),
        ("its card is not known" if parent is None else None, Hindrance.UNKNOWN),
        (unhealthy(parent) if parent is not None else None, Hindrance.UNHEALTHY),
        (not_allowed, Hindrance.NOT_ALLOWED),
        (quarantine, Hindrance.QUARANTINED),
    )
    # Processes of a slice are told for the whole card, so nobody can say whose slice they are on: an engine of ours
    # is kept apart by its assignment, and how much of the slice is free stays unknown.
    return Availability(instance.uuid, why_not, None, holders, kind)


def _is_allowed(uuid: str, usable: frozenset[str] | None) -> str | None:
    return None if usable is None or uuid in usable else NOT_ALLOWED


def _first(*reasons: tuple[str | None, Hindrance]) -> tuple[str | None, Hindrance | None]:
    return next(((text, kind) for text, kind in reasons if text is not None), (None, None))


def _not_current(inventory: Inventory) -> str | None:
    return None if inventory.is_current else "not known: nvidia-smi failed"


def _holders(
    rows: Sequence[GpuProcess], known: Mapping[int, GpuHolder], engines: Sequence[GpuHolder]
) -> tuple[GpuHolder, ...]:
    listed = [evolve(known.get(row.pid, GpuHolder(row.pid, None)), memory=row.memory) for row in rows]
    shards = {holder.shard for holder in listed}
    return (*listed, *(engine for engine in engines if engine.shard not in shards))


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
    if UNSEEN in accepted:
        return None, Hindrance.HELD
    if gpu.memory_used is None:
        if gpu.unified_memory and inventory.processes_known:
            return None, Hindrance.HELD
        return "not known to be free: the driver does not tell its memory", Hindrance.UNKNOWN
    unseen = _unseen(gpu.memory_used, holders)
    if unseen > BUSY_MIB:
        # A container's list can be empty while memory is used, and so can a guest's.
        return f"held by a process that nvidia-smi does not show ({unseen} MiB)", Hindrance.HELD
    return None, Hindrance.HELD


def without_engines(
    inventory: Inventory, holders: Mapping[int, GpuHolder], *, but: str | None = None, keep: Collection[int] = ()
) -> Inventory:
    """The cards as they would be without the engines of ours that `holders` tell, but for that of the shard `but` and
    the pids to `keep`: what others of ours use on a shared card says nothing about an engine that has ended.

    Where the size of one of them is not known, what is used without them is not either.
    """
    gpus = []
    for gpu in inventory.gpus:
        ours = [row for row in gpu.processes if row.pid not in keep and _is_neighbour(holders.get(row.pid), but)]
        if ours:
            sizes = [row.memory for row in ours]
            known = [size for size in sizes if size is not None]
            used = gpu.memory_used
            left = max(0, used - sum(known)) if used is not None and len(known) == len(sizes) else None
            rest = tuple(row for row in gpu.processes if row not in ours)
            gpus.append(evolve(gpu, memory_used=left, processes=rest))
        else:
            gpus.append(gpu)
    return evolve(inventory, gpus=tuple(gpus))


def _is_neighbour(holder: GpuHolder | None, but: str | None) -> bool:
    return holder is not None and holder.shard is not None and holder.shard != but


def unseen_memory(gpu: Gpu) -> int | None:
    """MiB that no process in nvidia-smi's list has; None is unknown."""
    return None if gpu.memory_used is None else _unseen(gpu.memory_used, gpu.processes)


def _unseen(used: int, processes: Sequence[GpuHolder | GpuProcess]) -> int:
    if any(process.memory is None for process in processes):
        # One of unknown size may account for all of it.
        return 0
    return used - sum(process.memory or 0 for process in processes)


def _free(gpu: Gpu) -> int | None:
    if gpu.memory_free is not None:
        return gpu.memory_free
    if gpu.usable_memory is None or gpu.memory_used is None:
        return None
    return max(0, gpu.usable_memory - gpu.memory_used)
