"""GPUs that a shard gets, as the values its command needs."""

from __future__ import annotations

from attrs import frozen

from llmgw.discovery.pins import Refused, ordinals_may_differ, resolve_pins
from llmgw.domain.hardware import Inventory
from llmgw.domain.problem import Problem
from llmgw.domain.shard import ShardSpec

BY_UUID = "gpu-order"


@frozen
class Devices:
    """GPUs of one launch. `visible` is what CUDA_VISIBLE_DEVICES gets, `labels` what people see, `uuids` what they are
    (those that could not be looked up are left out)."""

    visible: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    warnings: tuple[Problem, ...] = ()


def pinned_devices(spec: ShardSpec, inventory: Inventory | None) -> Devices | Problem:
    """The devices that `gpus = [...]` names, or why the shard cannot have them. What llmgw chose is named by UUID.

    CUDA gets indexes in PCI bus order, because some engine versions accept nothing else (vllm#20939, #46132); only
    on a node with a lost or MIG-mode card, where CUDA may count other cards than nvidia-smi, it gets full UUIDs. A MIG
    slice has no index.
    """
    pins = resolve_pins(spec, inventory)
    if isinstance(pins, Refused):
        return _problem(spec, pins.code, pins.message, pins.hint)
    by_uuid = inventory is not None and ordinals_may_differ(inventory) and any(pin.gpu for pin in pins)
    return Devices(
        visible=tuple(pin.uuid if by_uuid and pin.uuid is not None else pin.label for pin in pins),
        labels=tuple(pin.label for pin in pins),
        uuids=tuple(pin.uuid for pin in pins if pin.uuid is not None),
        warnings=(_by_uuid_warning(spec),) if by_uuid else (),
    )


def _by_uuid_warning(spec: ShardSpec) -> Problem:
    return _problem(
        spec,
        BY_UUID,
        "a card of this node is lost or in MIG mode, so the engine gets full UUIDs instead of indexes",
        "some vLLM versions fail on UUIDs: if this one does, repair the card or end its MIG mode",
        warning=True,
    )


def _problem(spec: ShardSpec, code: str, message: str, hint: str | None, *, warning: bool = False) -> Problem:
    return Problem(
        code,
        f'shard "{spec.name}" gpus: {message}',
        hint,
        where=spec.written_at("gpus"),
        severity="warning" if warning else "error",
    )
