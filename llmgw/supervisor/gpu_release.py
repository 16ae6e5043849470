"""Has an ended engine's GPU memory really come back? The driver returns it later than the process exits, or another
process holds it; an engine that is started too early dies of out of memory.

A question that got no answer proves nothing: such a GPU is reported as not confirmed, never as free.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio
from attrs import frozen

from llmgw.discovery.gpus import BUSY_MIB
from llmgw.domain.display import neutralise
from llmgw.domain.hardware import Gpu, GpuFlag, GpuProcess, Inventory, InventoryError, InventoryStatus, MigInstance
from llmgw.supervisor.procfs import read_stat

TOLERANCE_MIB = 128
"""Above the level before the launch. The driver's own bookkeeping moves by some ten MiB; what a process leaves
behind begins with its CUDA context, some 250 MiB or more."""

FIRST_PAUSE = 0.25
"""Seconds. Memory is usually back within one; doubled up to LONGEST_PAUSE, since each question costs a process."""
LONGEST_PAUSE = 2.0


@frozen
class HeldGpu:
    """A GPU that was not confirmed free. `used` in MiB; None: that could not be asked or the driver does not say."""

    uuid: str
    label: str
    """What people see: the index where it is known."""
    used: int | None
    holders: str
    """Who holds it, or why nothing is known, in words."""

    def __str__(self) -> str:
        return f"GPU {self.label}: {self.what}"

    @property
    def what(self) -> str:
        return self.holders if self.used is None else f"{self.used} MiB used {self.holders}"


@frozen
class GpuRelease:
    """The outcome. `asked` is False when there was nothing to ask about, or no nvidia-smi to ask."""

    freed: bool
    held: tuple[HeldGpu, ...] = ()
    asked: bool = True
    seconds: float = 0.0

    def __str__(self) -> str:
        return "; ".join(str(gpu) for gpu in self.held)


def used_before(inventory: Inventory, uuids: Sequence[str]) -> dict[str, int | None]:
    """MiB used on each of these GPUs: what `wait_gpu_release` compares with later. None is unknown.

    MIG slices are left out: what nvidia-smi tells of processes and memory is of the whole card.
    """
    found = {uuid: inventory.by_uuid(uuid) for uuid in uuids}
    return {uuid: gpu.memory_used for uuid, gpu in found.items() if isinstance(gpu, Gpu)}


def describe_process(pid: int) -> str | None:
    """A process as /proc shows it (`python, uid 1000`); None for one that cannot be seen, such as a pid of the host
    that is told to a container."""
    stat = read_stat(pid)
    if stat is None:
        return None
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return neutralise(stat.comm)
    return f"{neutralise(stat.comm)}, uid {uid}"


async def wait_gpu_release(
    ask: Callable[[], Awaitable[Inventory]],
    gpus: Sequence[str],
    before: Mapping[str, int | None],
    *,
    timeout: float,
    is_ours: Callable[[int], bool],
    describe: Callable[[int], str | None] | None = None,
    labels: Mapping[str, str] | None = None,
) -> GpuRelease:
    """Ask until the memory of `gpus` is back to the level `before` the launch, at most `timeout` seconds.

    `is_ours` tells whether a pid is one of the shard's; `describe` gives a visible process in words and None for
    one that cannot be seen; without it /proc is asked. `labels` are what people call the cards.
    """
    await trio.lowlevel.checkpoint()
    if not gpus:
        return GpuRelease(freed=True, asked=False)
    began = trio.current_time()
    silence = f"not confirmed free: no answer within {timeout:g} s"
    held = tuple(HeldGpu(uuid, (labels or {}).get(uuid, uuid), None, silence) for uuid in gpus)
    pause = FIRST_PAUSE
    with trio.move_on_after(timeout):
        while True:
            inventory = await ask()
            if inventory.error is InventoryError.COMMAND_MISSING and all(before.get(uuid) is None for uuid in gpus):
                return GpuRelease(freed=True, asked=False)
            held = held_gpus(inventory, gpus, before, is_ours=is_ours, describe=describe, labels=labels)
            if not held:
                return GpuRelease(freed=True, seconds=trio.current_time() - began)
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
    return GpuRelease(freed=False, held=held, seconds=trio.current_time() - began)


def held_gpus(
    inventory: Inventory,
    gpus: Sequence[str],
    before: Mapping[str, int | None],
    *,
    is_ours: Callable[[int], bool],
    describe: Callable[[int], str | None] | None = None,
    labels: Mapping[str, str] | None = None,
) -> tuple[HeldGpu, ...]:
    """Those of `gpus` that are not free by this inventory, each with the reason in words.

    `labels` are what they were called when they could be seen.
    """
    describe = describe or describe_process
    held = []
    for uuid in gpus:
        gpu = inventory.by_uuid(uuid)
        label = str(gpu.index) if isinstance(gpu, Gpu) else (labels or {}).get(uuid, uuid)
        failure = inventory.stale.detail or "nvidia-smi failed" if inventory.stale is not None else None
        if inventory.status is InventoryStatus.ERROR:
            failure = inventory.detail or "nvidia-smi failed"
        if failure is not None:
            held.append(HeldGpu(uuid, label, None, f"not confirmed free: {failure}"))
        elif isinstance(gpu, MigInstance):
            # Memory is told for the whole card alone: what counts is whether a process of ours is left on it.
            card = inventory.gpu(gpu.parent_index)
            left = [process.pid for process in card.processes if is_ours(process.pid)] if card is not None else []
            if left:
                held.append(HeldGpu(uuid, label, None, "held by " + ", ".join(f"pid {pid} (ours)" for pid in left)))
        elif gpu is None or GpuFlag.LOST in gpu.flags:
            held.append(HeldGpu(uuid, label, None, "not confirmed free: the driver cannot reach it"))
        elif not _is_free(gpu, before.get(uuid), inventory.processes_known, is_ours):
            words = _holders(gpu, before.get(uuid), is_ours, describe)
            held.append(HeldGpu(uuid, label, gpu.memory_used, words))
    return tuple(held)


def _is_free(gpu: Gpu, before: int | None, processes_known: bool, is_ours: Callable[[int], bool]) -> bool:
    if any(is_ours(process.pid) for process in gpu.processes):
        return False
    if gpu.memory_used is not None:
        # Without a level to compare with, what discovery calls busy decides.
        return gpu.memory_used <= (before + TOLERANCE_MIB if before is not None else BUSY_MIB)
    # No size at all (unified memory): only the list of processes can tell, and only a complete one.
    return processes_known and not any(_is_large(process) for process in gpu.processes)


def _is_large(process: GpuProcess) -> bool:
    return process.memory is None or process.memory > BUSY_MIB


def _holders(
    gpu: Gpu, before: int | None, is_ours: Callable[[int], bool], describe: Callable[[int], str | None]
) -> str:
    told = []
    for process in gpu.processes:
        size = f" {process.memory} MiB" if process.memory is not None and len(gpu.processes) > 1 else ""
        if is_ours(process.pid):
            details = "ours"
        else:
            seen = describe(process.pid)
            details = f"{seen}, not ours" if seen else "not ours, not visible"
        told.append(f"pid {process.pid}{size} ({details})")
    if told:
        return "by " + ", ".join(told)
    if gpu.memory_used is None:
        return "not confirmed free: the driver tells neither its memory nor its processes"
    level = f", {before} MiB before the launch" if before is not None else ""
    return f"by a process that nvidia-smi does not show{level}"
