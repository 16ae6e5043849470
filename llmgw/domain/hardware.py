"""Facts about the node's hardware as they were read. "The driver does not say" is None, never 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from attrs import field, frozen

from llmgw.domain.fabric import FabricInventory


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
    virtual: bool = False
    """A vGPU: a share of a card that a hypervisor gave to this machine."""
    persistence_mode: bool | None = None
    recovery_action: str | None = None
    """What the driver says has to be done to it (`Reset`, `Reboot`, ...), None when nothing or when it does not say."""
    temperature: int | None = None
    """Degrees Celsius."""
    power: float | None = None
    power_limit: float | None = None
    """Watts."""

    @property
    def usable_memory(self) -> int | None:
        """MiB that CUDA can see: the total without what the driver reserves; None is unknown."""
        return None if self.memory_total is None else self.memory_total - (self.memory_reserved or 0)


@frozen
class MigInstance:
    """A slice of a card in MIG mode. Memory in MiB; None: the driver did not say, never taken from the name."""

    parent_index: int
    device: int
    """Its number in `nvidia-smi -L`."""
    uuid: str
    profile: str
    """Such as `3g.40gb`."""
    gpu_class: str
    memory_total: int | None


@frozen
class OtherGpu:
    """A GPU of another vendor: listed, not placed on. Memory in MiB."""

    vendor: str
    index: int
    name: str
    bus_id: str
    memory_total: int | None = None
    memory_used: int | None = None
    architecture: str | None = None
    """Such as `gfx942`."""


@frozen
class Topology:
    """How near the GPUs of a node are to one another and to network adapters."""

    links: Mapping[tuple[int, int], str] = field(factory=dict)
    """(lower index, higher index) -> `NV18`, `PIX`, `PXB`, `PHB`, `NODE` or `SYS`, as `nvidia-smi topo -m` says."""
    nearest_nic: Mapping[int, str] = field(factory=dict)
    """GPU index -> device name of the adapter with the shortest way."""
    source: str = "nvidia-smi"
    """`nvidia-smi`, or `sysfs` where only NUMA nodes and PCI paths are known."""

    def link(self, a: int, b: int) -> str | None:
        return self.links.get((min(a, b), max(a, b)))

    @property
    def gpu_gpu(self) -> str | None:
        """The one link that all pairs have, None when pairs differ or there is no pair."""
        kinds = set(self.links.values())
        return next(iter(kinds)) if len(kinds) == 1 else None

    @property
    def nvlink_sets(self) -> tuple[tuple[int, ...], ...]:
        """Groups of GPUs in which each has NVLink to each other one, in order of the lowest index."""
        return tuple(self._cliques())

    def _cliques(self) -> Iterator[tuple[int, ...]]:
        left = sorted({index for pair in self.links for index in pair})
        while left:
            clique = [left[0]]
            for index in left[1:]:
                if all((self.link(index, other) or "").startswith("NV") for other in clique):
                    clique.append(index)
            left = [index for index in left if index not in clique]
            if len(clique) > 1:
                yield tuple(clique)


@frozen
class Stale:
    """Why older facts are still shown: the last question after them failed. `since` in seconds since the epoch."""

    error: InventoryError
    detail: str | None
    since: float


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
    mig_instances: tuple[MigInstance, ...] = ()
    topology: Topology | None = None
    """None: neither nvidia-smi nor sysfs said anything."""
    other_gpus: tuple[OtherGpu, ...] = ()
    stale: Stale | None = None
    """These are the last good facts, and the question after newer ones failed: nothing new is placed by them."""

    @property
    def is_current(self) -> bool:
        """Whether it tells what is free: an inventory that failed or is stale proves nothing."""
        return self.status is not InventoryStatus.ERROR and self.stale is None

    def gpu(self, index: int) -> Gpu | None:
        """The GPU of this index in PCI bus order, or None."""
        return next((gpu for gpu in self.gpus if gpu.index == index), None)

    def by_uuid(self, uuid: str) -> Gpu | MigInstance | None:
        """The card or slice with exactly this UUID, or None."""
        found: Gpu | MigInstance | None = next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)
        return found or next((slice_ for slice_ in self.mig_instances if slice_.uuid == uuid), None)


@frozen
class GpuHolder:
    """A process on a GPU as people know it. `shard` names the one of ours that it belongs to, None: a stranger, or one
    of which nobody can say whose it is. User and command are None where /proc does not show them. Memory in MiB, None
    is unknown."""

    pid: int
    memory: int | None
    user: str | None = None
    command: str | None = None
    shard: str | None = None
    is_unknown: bool = False
    """It cannot be told whether it is ours: the records of our engines could not be read."""

    def __str__(self) -> str:
        details = [self.command or "not visible"]
        if self.user is not None:
            details.append(self.user)
        return f"pid {self.pid} ({', '.join(details)})"


class Hindrance(StrEnum):
    """What kind of reason keeps a GPU from being handed out."""

    UNKNOWN = "unknown"
    UNHEALTHY = "unhealthy"
    MIG_MODE = "mig-mode"
    NOT_ALLOWED = "not-allowed"
    QUARANTINED = "quarantined"
    HELD = "held"


@frozen
class Availability:
    """Whether a GPU may be handed out now, beside engines of ours that may be on it.

    `why_not` is None exactly when it may. `free` in MiB: what a new engine can have, with small strangers and our own
    engines subtracted; None is unknown.
    """

    uuid: str
    why_not: str | None
    free: int | None
    holders: tuple[GpuHolder, ...] = ()
    hindrance: Hindrance | None = None
    """What kind of reason `why_not` is."""

    @property
    def assignable(self) -> bool:
        return self.why_not is None


@frozen
class HostHardware:
    """The rest of the node that engines need. Sizes in MiB but `memlock`, which is in bytes; -1 is unlimited, None is
    unknown."""

    memory_total: int | None = None
    memory_available: int | None = None
    shm_total: int | None = None
    shm_free: int | None = None
    memlock_soft: int | None = None
    memlock_hard: int | None = None
    nvidia_uvm: bool | None = None
    """Whether the device that CUDA needs is there: /dev/nvidia-uvm."""
    nccl_config_files: tuple[str, ...] = ()
    """Files that NCCL reads by itself and that override what llmgw sets, such as /etc/nccl.conf."""


@frozen
class NodeInventory:
    """Everything that is known about the hardware of one node."""

    node: str
    gpu: Inventory
    fabric: FabricInventory = field(factory=FabricInventory)
    host: HostHardware = field(factory=HostHardware)
    address: str | None = None
    """By which other nodes reach it; None is unknown."""
    interface: str | None = None
    """The network interface that has `address`."""
