"""Facts about the node's GPUs as they were read. "The driver does not say" is None, never 0."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen


class InventoryStatus(StrEnum):
    """`partial`: rows are there, but at least one GPU is missing or lost. `error`: no inventory."""

    OK = "ok"
    PARTIAL = "partial"
    ERROR = "error"


class InventoryError(StrEnum):
    """Why there is no inventory, by the text of nvidia-smi first and by its exit code second."""

    COMMAND_MISSING = "command_missing"
    DRIVER_NOT_LOADED = "driver_not_loaded"
    LIBRARY_MISSING = "library_missing"
    DRIVER_MISMATCH = "driver_mismatch"
    NVML_INIT_FAILED = "nvml_init_failed"
    TIMEOUT = "timeout"


@frozen
class GpuProcess:
    """A process that computes on a GPU. `memory` in MiB, None when the driver does not say."""

    pid: int
    memory: int | None


@frozen
class Gpu:
    """One NVIDIA GPU. Memory in MiB; `compute_capability` is a pair of integers such as (9, 0)."""

    index: int
    uuid: str
    bus_id: str
    name: str
    memory_total: int | None
    memory_used: int | None
    memory_free: int | None
    compute_capability: tuple[int, int] | None
    processes: tuple[GpuProcess, ...] = ()


@frozen
class Inventory:
    """What was read, with the time it was read at (seconds since the epoch)."""

    status: InventoryStatus
    gpus: tuple[Gpu, ...] = ()
    error: InventoryError | None = None
    detail: str | None = None
    driver_version: str | None = None
    read_at: float | None = None

    def gpu(self, index: int) -> Gpu | None:
        """The GPU of this index in PCI bus order, or None."""
        return next((gpu for gpu in self.gpus if gpu.index == index), None)
