"""GPUs as people name them in a file (index, UUID, PCI bus id), looked up in an inventory. Pure."""

from __future__ import annotations

from attrs import frozen

from llmgw.discovery.gpus import card_uuid, normal_bus_id
from llmgw.domain.hardware import Gpu, GpuFlag, Inventory, InventoryError, InventoryStatus, MigInstance
from llmgw.domain.shard import ShardSpec

MISSING = "gpu-missing"
UNKNOWN = "gpu-unknown"
TWICE = "gpu-twice"


@frozen
class Pin:
    """One GPU of a shard: `entry` as written, and the card or MIG slice that it means. Both are None where it is
    taken on trust, because nobody looked."""

    entry: int | str
    gpu: Gpu | None = None
    instance: MigInstance | None = None

    @property
    def label(self) -> str:
        """What people see: the index of a card where it is known, the whole id of a slice."""
        if self.instance is not None:
            return self.instance.uuid
        return str(self.gpu.index if self.gpu is not None else self.entry)

    @property
    def uuid(self) -> str | None:
        found = self.gpu or self.instance
        return found.uuid if found is not None else None


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
        # Which cards a number comes to is for placement to say.
        return ()
    on_trust = tuple(Pin(entry) for entry in spec.gpus)
    if not spec.gpus or inventory is None:
        return on_trust
    pins: list[Pin] = []
    refused = unseen(inventory, spec)
    for position, entry in enumerate(spec.gpus if refused is None else ()):
        found = find_gpu(entry, inventory)
        if isinstance(found, str):
            refused = Refused(MISSING, found, f"GPUs of this node: {_list(inventory)}", position)
            break
        pin = Pin(entry, instance=found) if isinstance(found, MigInstance) else Pin(entry, found)
        if any(pin.label == other.label for other in pins):
            return Refused(TWICE, f"GPU {pin.label} is given twice", "name each GPU once", position)
        pins.append(pin)
    if refused is None:
        return tuple(pins)
    return on_trust if refused.code in spec.allow else refused


def find_gpu(entry: int | str, inventory: Inventory) -> Gpu | MigInstance | str:
    """The GPU that an index, a UUID (also shortened, when unique) or a PCI bus id means, the MIG slice that its UUID
    means, or why there is none."""
    if isinstance(entry, int):
        gpu = inventory.gpu(entry)
        if gpu is not None:
            return gpu if GpuFlag.LOST not in gpu.flags else f"GPU {entry} is lost: the driver cannot reach it"
        if any(lost.index == entry for lost in inventory.lost):
            return f"GPU {entry} is lost: it dropped off the bus"
        return f"GPU {entry} is not on this node"
    if entry.upper().startswith("MIG-"):
        return _find_slice(entry, inventory)
    # Jetson modules print a UUID without its prefix.
    entry = card_uuid(entry) or entry
    bus_id = normal_bus_id(entry)
    if bus_id is not None:
        matches = [gpu for gpu in inventory.gpus if normal_bus_id(gpu.bus_id) == bus_id]
        if not matches and any(normal_bus_id(lost.bus_id) == bus_id for lost in inventory.lost):
            return f"GPU {entry} is lost: it dropped off the bus"
    elif entry.lower().startswith("gpu-"):
        matches = [gpu for gpu in inventory.gpus if gpu.uuid.lower().startswith(entry.lower())]
    else:
        return f"{entry!r} is not an index, a UUID (GPU-..., MIG-...) or a PCI bus id"
    if len(matches) > 1:
        return f"GPU {entry} is not unique: {', '.join(gpu.uuid for gpu in matches)}"
    if not matches:
        return f"GPU {entry} is not on this node"
    return find_gpu(matches[0].index, inventory)


def _find_slice(entry: str, inventory: Inventory) -> MigInstance | str:
    slices = [slice_ for slice_ in inventory.mig_instances if slice_.uuid.lower().startswith(entry.lower())]
    exact = [slice_ for slice_ in slices if slice_.uuid.lower() == entry.lower()]
    found = exact or slices
    if len(found) > 1:
        return f"MIG slice {entry} is not unique: {', '.join(slice_.uuid for slice_ in found)}"
    return found[0] if found else f"MIG slice {entry} is not on this node"


def ordinals_may_differ(inventory: Inventory) -> bool:
    """A lost or MIG-mode card may be counted by one of CUDA and nvidia-smi and not by the other."""
    return bool(inventory.lost) or any(gpu.mig_enabled for gpu in inventory.gpus)


def unseen(inventory: Inventory, spec: ShardSpec) -> Refused | None:
    """Why nobody can say which GPUs this node has now; None where it can be said."""
    which = f"what GPU {spec.pinned_gpus[0]} is" if spec.pinned_gpus else "which GPUs there are"
    if inventory.stale is not None:
        detail = inventory.stale.detail or "nvidia-smi failed"
        return Refused(UNKNOWN, f"cannot tell {which} now: {detail}", _hint_of(inventory.stale.error))
    if inventory.status is not InventoryStatus.ERROR:
        return None
    detail = inventory.detail or "nvidia-smi failed"
    # No nvidia-smi says that there are no such GPUs; one that fails says nothing.
    code = MISSING if inventory.error is InventoryError.COMMAND_MISSING else UNKNOWN
    hint = _hint_of(inventory.error)
    if code == MISSING and not spec.pinned_gpus:
        hint = "install the NVIDIA driver's tools, or write gpus = 0 to run it on the CPU"
    return Refused(code, f"cannot tell {which}: {detail}", hint)


def _hint_of(error: InventoryError | None) -> str:
    hints = {
        InventoryError.COMMAND_MISSING: (
            'install the NVIDIA driver\'s tools, or write allow = ["gpu-missing"] to pass the indexes on as they are'
        ),
        InventoryError.DRIVER_MISMATCH: (
            "the driver package was upgraded under the running kernel module: reload the module or reboot"
        ),
        InventoryError.LIBRARY_MISSING: (
            "install the driver's libraries (libnvidia-ml) beside nvidia-smi; in a container, start it with GPU access"
        ),
        InventoryError.DRIVER_NOT_LOADED: "load the NVIDIA kernel module, or reboot after installing the driver",
        InventoryError.TIMEOUT: "the driver may be stuck; look at the kernel log for lines with NVRM",
    }
    default = "run nvidia-smi by hand; in a container, restart the container"
    return hints.get(error, default) if error is not None else default


def _list(inventory: Inventory) -> str:
    shown = [f"{gpu.index} ({gpu.gpu_class or 'lost'})" for gpu in inventory.gpus[:16]]
    shown += [f"{slice_.uuid} ({slice_.gpu_class})" for slice_ in inventory.mig_instances[:16]]
    return ", ".join(shown) or "none"
