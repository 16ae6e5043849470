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


class GpuFlag(StrEnum):
    """What is noteworthy about a GPU. `memory_in_use` is no fault; the others are reasons not to hand it out whole."""

    MEMORY_IN_USE = "memory_in_use"
    UNCORRECTED_ECC = "uncorrected_ecc"
    ROW_REMAP_PENDING = "row_remap_pending"
    ROW_REMAP_FAILURE = "row_remap_failure"
    MIG_ENABLED = "mig_enabled"
    LOST = "lost"
    REQUIRES_RESET = "requires_reset"


@frozen
class LostGpu:
    """A GPU that dropped off. `bus_id` as it was printed; `index` is None where the message has none."""

    index: int | None
    bus_id: str


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
    memory_reserved: int | None = None
    gpu_class: str | None = None
    """None: a lost GPU."""
    unified_memory: bool = False
    """Host and GPU share the memory; the driver gives no size."""
    ecc_enabled: bool | None = None
    mig_enabled: bool | None = False
    uncorrected_ecc: int | None = None
    """Uncorrected errors since the driver was loaded."""
    flags: tuple[GpuFlag, ...] = ()
    """In the order of the enum."""


@frozen
class Inventory:
    """What was read, with the time it was read at (seconds since the epoch)."""

    status: InventoryStatus
    gpus: tuple[Gpu, ...] = ()
    error: InventoryError | None = None
    detail: str | None = None
    driver_version: str | None = None
    read_at: float | None = None
    lost: tuple[LostGpu, ...] = ()
    processes_known: bool = True
    """False: the list of compute processes could not be read, so an empty one proves nothing."""

    def gpu(self, index: int) -> Gpu | None:
        """The GPU of this index in PCI bus order, or None."""
        return next((gpu for gpu in self.gpus if gpu.index == index), None)
