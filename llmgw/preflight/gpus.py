"""Rules about the GPUs that a shard names or was given."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.discovery import pins
from llmgw.discovery.availability import unhealthy
from llmgw.discovery.classes import gpu_class
from llmgw.domain.hardware import Gpu, GpuFlag, Hindrance
from llmgw.domain.problem import Problem
from llmgw.domain.shard import ShardSpec
from llmgw.preflight.situation import SPLITTING, Situation, dotted, gibibytes, gpus_of, pins_of, problem, warning

MIB = 1 << 20


def gpus_not_there(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    inventory = situation.facts.inventory
    found: object = None
    if isinstance(spec.gpus, tuple):
        found = pins.resolve_pins(spec, inventory)
    elif spec.gpus > 0 and inventory is not None:
        found = pins.unseen(inventory, spec)
    if isinstance(found, pins.Refused):
        yield problem(spec, found.code, "gpus", found.message, found.hint, position=found.position)


def gpu_taken(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    """Two shards that mean one card and write it differently, such as by index and by UUID. The same word in both is
    found when the files are read, without any GPU."""
    mine = {pin.label: pin for pin in pins_of(spec, situation)}
    for other in situation.specs:
        if other.name == spec.name:
            return
        takes_turns = spec.idle_timeout is not None and other.idle_timeout is not None
        if takes_turns or (spec.share_gpus and other.share_gpus):
            continue
        for pin in pins_of(other, situation):
            if pin.label in mine and mine[pin.label].entry != pin.entry:
                yield problem(
                    spec,
                    "gpu-taken",
                    "gpus",
                    f'GPU {pin.label} already belongs to shard "{other.name}"',
                    "set share_gpus = true and gpu_memory on both if that is meant",
                )


def gpu_held(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    known = situation.facts.availability
    found = ((pin, known.get(pin.uuid)) for pin in pins_of(spec, situation) if pin.uuid is not None)
    texts = [
        f"GPU {pin.label} is {may.why_not}"
        for pin, may in found
        if may is not None and may.hindrance in (Hindrance.HELD, Hindrance.QUARANTINED)
    ]
    if texts:
        yield problem(
            spec,
            "gpu-held",
            "gpus",
            "; ".join(texts),
            'it starts by itself when the memory is free; end that process, or write allow = ["gpu-held"]',
        )


REMEDIES = {
    GpuFlag.REQUIRES_RESET: "reset it (nvidia-smi --gpu-reset) or reboot",
    GpuFlag.ROW_REMAP_PENDING: "reset it (nvidia-smi --gpu-reset) or reboot",
    GpuFlag.ROW_REMAP_FAILURE: "have the card replaced",
    GpuFlag.UNCORRECTED_ECC: "reset it; if the errors come back, have it replaced",
    GpuFlag.LOST: "reboot; if it is lost again, have it looked at",
}


def gpu_unfit(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    for gpu in gpus_of(spec, situation):
        wrong = unhealthy(gpu)
        if wrong is not None:
            remedy = next(REMEDIES[flag] for flag in gpu.flags if flag in REMEDIES)
            yield problem(spec, "gpu-unfit", "gpus", f"GPU {gpu.index} is unhealthy: {wrong}", remedy)
        if gpu.mig_enabled or GpuFlag.MIG_ENABLED in gpu.flags:
            yield problem(
                spec,
                "gpu-unfit",
                "gpus",
                f"GPU {gpu.index} is in MIG mode",
                "name one of its slices by UUID (llmgw inventory), or end MIG mode",
            )


def mixed_gpus(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    if spec.engine not in SPLITTING or spec.layout.tensor < 2:
        return
    found = pins_of(spec, situation)
    slices = [pin for pin in found if pin.instance is not None]
    if slices and len(found) > 1:
        yield problem(
            spec,
            "mixed-gpu-classes",
            "gpus",
            f"{slices[0].label} is a MIG slice, and slices cannot be one tensor-parallel group",
            "run one instance on each slice",
        )
        return
    gpus = gpus_of(spec, situation)
    if len(gpus) < 2:
        return
    if len({gpu.virtual for gpu in gpus}) > 1:
        shared = next(gpu for gpu in gpus if gpu.virtual)
        yield problem(
            spec,
            "mixed-gpu-classes",
            "gpus",
            f"{shared.index} is a vGPU and others are whole cards; one tensor-parallel group needs GPUs of one class",
            "give each kind a shard of its own",
        )
        return
    first, *others = gpus
    for other in others:
        unknown = [gpu for gpu in (first, other) if gpu.memory_total is None and not gpu.unified_memory]
        of_one_product = gpu_class(first.name, None) == gpu_class(other.name, None)
        if unknown and of_one_product:
            yield problem(
                spec,
                "gpu-memory-unknown",
                "gpus",
                f"the driver does not say how much memory GPU {unknown[0].index} has, so nobody can tell whether "
                f"{first.index} and {other.index} are alike",
                "look at nvidia-smi -q; a group with a smaller card runs out of memory on it",
                severity="warning",
            )
            return
        if first.gpu_class != other.gpu_class:
            ecc = of_one_product and first.ecc_enabled is not other.ecc_enabled
            yield problem(
                spec,
                "mixed-gpu-classes",
                "gpus",
                f"{first.index} is {first.gpu_class} and {other.index} is {other.gpu_class}; one tensor-parallel "
                "group needs GPUs of one class",
                "the same product with different usable memory: its ECC mode differs"
                if ecc
                else "give each class a shard of its own",
            )
            return
        if None not in (pair := (first.compute_capability, other.compute_capability)) and pair[0] != pair[1]:
            yield problem(
                spec,
                "mixed-gpu-classes",
                "gpus",
                f"{first.index} has compute capability {dotted(pair[0])} and {other.index} has {dotted(pair[1])}; "
                "one tensor-parallel group needs GPUs of one class",
                "give each class a shard of its own",
            )
            return


def unplaced(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    """Whether llmgw finds GPUs for a shard that leaves the choice to it, where somebody has tried."""
    reason = situation.facts.unplaced.get(spec.name)
    inventory = situation.facts.inventory
    if reason is None or not isinstance(spec.gpus, int):
        return
    per_node = spec.gpus // spec.nodes
    there = [
        gpu
        for gpu in (inventory.gpus if inventory is not None else ())
        if not spec.gpu_class or gpu.gpu_class in spec.gpu_class
    ]
    known = inventory is not None and inventory.is_current and not inventory.mig_instances
    if known and spec.nodes == 1 and len(there) < per_node:
        yield problem(
            spec,
            "gpu-count",
            "gpus",
            f"{per_node} are asked for, and this node has {len(there)}"
            + (f" of class {' or '.join(spec.gpu_class)}" if spec.gpu_class else ""),
            "ask for fewer, allow further classes, or write gpus = 0 for the CPU",
        )
        return
    yield warning(spec, "unplaced", "gpus", reason, "it waits for them, and starts by itself when they are free")


def class_unknown(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    inventory = situation.facts.inventory
    if not spec.gpu_class or inventory is None or not inventory.is_current:
        return
    known = sorted(
        {gpu.gpu_class for gpu in inventory.gpus if gpu.gpu_class is not None}
        | {slice_.gpu_class for slice_ in inventory.mig_instances}
    )
    strange = [name for name in spec.gpu_class if name not in known]
    if strange and (len(strange) == len(spec.gpu_class) or not known):
        yield warning(
            spec,
            "gpu-class-unknown",
            "gpu_class",
            f"this node has no GPU of class {' or '.join(strange)}",
            f"classes of this node: {', '.join(known) or 'none'}",
        )


def gpu_memory(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    """What is asked for on a card against what it has, alone and together with those that share it."""
    if spec.gpu_memory is None:
        return
    for gpu in gpus_of(spec, situation):
        usable = gpu.usable_memory
        if usable is None:
            continue
        if spec.gpu_memory > usable * MIB:
            yield problem(
                spec,
                "gpu-memory",
                "gpu_memory",
                f"{gibibytes(spec.gpu_memory)} are more than GPU {gpu.index} ({gpu.gpu_class}) has: "
                f"{gibibytes(usable * MIB)} usable",
                "ask for less, or use a larger card",
            )
            return
        sharers = _sharers(spec, gpu, situation)
        total = spec.gpu_memory + sum(other.gpu_memory or 0 for other in sharers)
        if sharers and total > usable * MIB:
            names = ", ".join(other.name for other in sharers)
            yield problem(
                spec,
                "gpu-memory",
                "gpu_memory",
                f"{gibibytes(total)} together with {names} are more than GPU {gpu.index} has: "
                f"{gibibytes(usable * MIB)} usable",
                "ask for less on each, or give one of them another card",
            )
            return


def _sharers(spec: ShardSpec, gpu: Gpu, situation: Situation) -> list[ShardSpec]:
    """Shards before it in the file that name the same card and share it."""
    found = []
    for other in situation.specs:
        if other.name == spec.name:
            break
        if other.share_gpus and any(mine.uuid == gpu.uuid for mine in gpus_of(other, situation)):
            found.append(other)
    return found
