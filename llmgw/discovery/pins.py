"""GPUs as people name them in a file (index, UUID, PCI bus id), looked up in an inventory. Pure."""

from __future__ import annotations

from attrs import frozen

from llmgw.discovery.gpus import normal_bus_id
from llmgw.domain.hardware import Gpu, GpuFlag, Inventory, InventoryError, InventoryStatus
from llmgw.domain.shard import ShardSpec

MISSING = "gpu-missing"
UNKNOWN = "gpu-unknown"
TWICE = "gpu-twice"
NOT_CHOSEN = "gpu-choice"


@frozen
class Pin:
    """One GPU of a shard: `entry` as written, `gpu` None where it is taken on trust (MIG slice, nothing to ask)."""

    entry: int | str
    gpu: Gpu | None

    @property
    def label(self) -> str:
        """What people see: the index where it is known."""
        return str(self.gpu.index if self.gpu is not None else self.entry)


@frozen
class Refused:
    """Why the pins of a shard are no GPUs: the rule's code, a text, and what to do. `position` is the entry's."""

    code: str
    message: str
    hint: str | None = None
    position: int | None = None


def resolve_pins(spec: ShardSpec, inventory: Inventory | None) -> tuple[Pin, ...] | Refused:
    """The GPUs that `gpus = [...]` names, or why it cannot have them.

    Without an inventory (None: nobody looked) entries are taken as written. `allow = ["gpu-missing"]` does the same
    on a node whose GPUs nvidia-smi does not list.
    """
    if isinstance(spec.gpus, int):
        if spec.gpus == 0:
            return ()
        return Refused(
            NOT_CHOSEN,
            f"{spec.gpus} leaves the choice to llmgw, which this version cannot make yet",
            "list the GPUs, for example gpus = [0]",
        )
    on_trust = tuple(Pin(entry, None) for entry in spec.gpus)
    if not spec.gpus or inventory is None:
        return on_trust
    pins: list[Pin] = []
    refused = _unseen(inventory, spec)
    for position, entry in enumerate(spec.gpus if refused is None else ()):
        # MIG slices are not listed yet; their ids go to the engine as they are.
        gpu = None if isinstance(entry, str) and entry.startswith("MIG-") else find_gpu(entry, inventory)
        if isinstance(gpu, str):
            refused = Refused(MISSING, gpu, f"GPUs of this node: {_list(inventory)}", position)
            break
        pin = Pin(entry, gpu)
        if any(pin.label == other.label for other in pins):
            return Refused(TWICE, f"GPU {pin.label} is given twice", "name each GPU once", position)
        pins.append(pin)
    if refused is None:
        return tuple(pins)
    return on_trust if refused.code in spec.allow else refused


def find_gpu(entry: int | str, inventory: Inventory) -> Gpu | str:
    """The GPU that an index, a UUID (also shortened, when unique) or a PCI bus id means, or why there is none."""
    if isinstance(entry, int):
        gpu = inventory.gpu(entry)
        if gpu is not None:
            return gpu if GpuFlag.LOST not in gpu.flags else f"GPU {entry} is lost: the driver cannot reach it"
        if any(lost.index == entry for lost in inventory.lost):
            return f"GPU {entry} is lost: it dropped off the bus"
        return f"GPU {entry} is not on this node"
    bus_id = normal_bus_id(entry)
    if bus_id is not None:
        matches = [gpu for gpu in inventory.gpus if normal_bus_id(gpu.bus_id) == bus_id]
        if not matches and any(normal_bus_id(lost.bus_id) == bus_id for lost in inventory.lost):
            return f"GPU {entry} is lost: it dropped off the bus"
    elif entry.lower().startswith("gpu-"):
        matches = [gpu for gpu in inventory.gpus if gpu.uuid.lower().startswith(entry.lower())]
    else:
        return f"{entry!r} is not an index, a UUID (GPU-...) or a PCI bus id"
    if len(matches) > 1:
        return f"GPU {entry} is not unique: {', '.join(gpu.uuid for gpu in matches)}"
    if not matches:
        return f"GPU {entry} is not on this node"
    return find_gpu(matches[0].index, inventory)


def ordinals_may_differ(inventory: Inventory) -> bool:
    """A lost or MIG-mode card may be counted by one of CUDA and nvidia-smi and not by the other."""
    return bool(inventory.lost) or any(gpu.mig_enabled for gpu in inventory.gpus)


def _unseen(inventory: Inventory, spec: ShardSpec) -> Refused | None:
    if inventory.status is not InventoryStatus.ERROR:
        return None
    detail = inventory.detail or "nvidia-smi failed"
    # No nvidia-smi says that there are no such GPUs; one that fails says nothing.
    code = MISSING if inventory.error is InventoryError.COMMAND_MISSING else UNKNOWN
    return Refused(code, f"cannot tell what GPU {spec.pinned_gpus[0]} is: {detail}", _hint_of(inventory.error))


def _hint_of(error: InventoryError | None) -> str:
    hints = {
        InventoryError.COMMAND_MISSING: (
            'install the NVIDIA driver\'s tools, or write allow = ["gpu-missing"] to pass the indexes on as they are'
        ),
        InventoryError.DRIVER_MISMATCH: (
            "the driver package was upgraded under the running kernel module: reload the module or reboot"
        ),
        InventoryError.DRIVER_NOT_LOADED: "load the NVIDIA kernel module, or reboot after installing the driver",
        InventoryError.TIMEOUT: "the driver may be stuck; look at the kernel log for lines with NVRM",
    }
    default = "run nvidia-smi by hand; in a container, restart the container"
    return hints.get(error, default) if error is not None else default


def _list(inventory: Inventory) -> str:
    shown = ", ".join(f"{gpu.index} ({gpu.gpu_class or 'lost'})" for gpu in inventory.gpus[:16])
    return shown or "none"
