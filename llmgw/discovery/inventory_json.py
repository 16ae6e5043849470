"""An inventory as JSON and back: what `llmgw inventory --json` and `/v1/inventory` print, and what saved inventories
hold. Pure.

The keys of `gpu` and `fabric` are fixed and always present; null means that the driver does not say. Lists hold exactly
what is named here, so that two inventories can be compared key by key; whatever else is known stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from llmgw.domain.fabric import Fabric, FabricInventory, FabricPort, PortKind
from llmgw.domain.hardware import (
    Availability,
    Gpu,
    GpuFlag,
    GpuProcess,
    HostHardware,
    Inventory,
    InventoryError,
    InventoryStatus,
    LostGpu,
    MigInstance,
    NodeInventory,
    OtherGpu,
    Stale,
    Topology,
)

API = 1

BF16_FROM, FP8_FROM, NVFP4_FROM = (8, 0), (8, 9), (10, 0)
"""Compute capability from which the format runs natively."""

NOT_WHOLE = frozenset({GpuFlag.MIG_ENABLED, GpuFlag.LOST, GpuFlag.REQUIRES_RESET})
"""A card with one of these is never given out as a whole, whatever uses it."""

T = TypeVar("T")


def node_json(
    node: NodeInventory, *, source: str, availability: Mapping[str, Availability] | None = None
) -> dict[str, Any]:
    """The one object that is printed. `source` is `local` or `daemon`."""
    return {
        "api": API,
        "node": node.node,
        "source": source,
        "gpu": gpu_json(node.gpu, availability or {}),
        "fabric": fabric_json(node.fabric),
        "host": host_json(node.host, node.gpu, node.address, node.interface),
    }


def gpu_json(inventory: Inventory, availability: Mapping[str, Availability] | None = None) -> dict[str, Any]:
    known = availability or {}
    topology = inventory.topology
    return {
        "status": inventory.status.value,
        "error_kind": inventory.error.value if inventory.error is not None else None,
        "detail": inventory.detail,
        "driver_version": inventory.driver_version,
        "read_at": inventory.read_at,
        "stale": _stale(inventory.stale),
        "processes_known": inventory.processes_known,
        "gpus": [_gpu(gpu, known.get(gpu.uuid)) for gpu in inventory.gpus],
        "lost": [{"index": lost.index, "bus_id": lost.bus_id} for lost in inventory.lost],
        "mig_instances": [_slice(instance) for instance in inventory.mig_instances],
        "mig_assignable": {instance.uuid: _may(known.get(instance.uuid)) for instance in inventory.mig_instances},
        "topology": _topology(topology) if topology is not None and topology.source == "nvidia-smi" else None,
        "nearness": _topology(topology) if topology is not None and topology.source != "nvidia-smi" else None,
        "other_gpus": [_other(gpu) for gpu in inventory.other_gpus],
    }


def fabric_json(fabric: FabricInventory) -> dict[str, Any]:
    preferred = fabric.preferred
    return {
        "ports": [_port(port) for port in fabric.ports],
        "unreadable_devices": list(fabric.unreadable_devices),
        "fabrics": [_fabric(one) for one in fabric.fabrics],
        "preferred_fabric": 0 if preferred is not None else None,
        "nccl_ib_hca": preferred.nccl_hca if preferred is not None else None,
        "nccl_extra": preferred.nccl_extra if preferred is not None else {},
        "multi_node": preferred is not None,
        # What tells fabrics of different nodes apart, in the order of `fabrics`.
        "identities": [_identity(one) for one in fabric.fabrics],
    }


def host_json(host: HostHardware, gpu: Inventory, address: str | None, interface: str | None) -> dict[str, Any]:
    modes = {card.persistence_mode for card in gpu.gpus if card.persistence_mode is not None}
    return {
        "memory_total_mib": host.memory_total,
        "memory_available_mib": host.memory_available,
        "shm_total_mib": host.shm_total,
        "shm_free_mib": host.shm_free,
        "memlock_soft_bytes": host.memlock_soft,
        "memlock_hard_bytes": host.memlock_hard,
        "driver_version": gpu.driver_version,
        # Off on one card is off: that one pays for it at each start.
        "persistence_mode": None if not modes else False not in modes,
        "nvidia_uvm": host.nvidia_uvm,
        "nccl_config_files": list(host.nccl_config_files),
        "address": address,
        "interface": interface,
    }


# -- back -----------------------------------------------------------------------------------------------------


def read_node(answer: object) -> NodeInventory:
    """The inventory that `node_json` printed. Raises ValueError, with the place in its text, for anything else."""
    if not isinstance(answer, Mapping) or answer.get("api") != API:
        raise ValueError(f'not an inventory: an object with "api": {API} is expected')
    for key, kind in (("node", str), ("gpu", Mapping)):
        if not isinstance(answer.get(key), kind):
            raise ValueError(f"not an inventory: it has no {key!r}")  # noqa: TRY004
    fabric, host = answer.get("fabric") or {}, answer.get("host") or {}
    return NodeInventory(
        node=answer["node"],
        gpu=_reading("gpu", _read_gpus, answer["gpu"]),
        fabric=_reading("fabric", _read_fabric, fabric),
        host=_reading("host", _read_host, host),
        address=_reading("host", lambda found: _optional(found, "address", str), host),
        interface=_reading("host", lambda found: _optional(found, "interface", str), host),
    )


def _reading(place: str, read: Callable[[Mapping[str, Any]], T], found: Any) -> T:
    try:
        return read(found)
    except KeyError as error:
        raise ValueError(f"not an inventory: {place} has no {error}") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not an inventory: {place}: {error}") from error


def _typed(value: Any, kind: type[T], name: str) -> T:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} is {str(value)[:40]!r}, not {kind.__name__}")
    return value


def _optional(entry: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    value = entry.get(name)
    return None if value is None else _typed(value, kind, name)


def _texts(values: Any, name: str) -> tuple[str, ...]:
    return tuple(_typed(value, str, name) for value in values)


def _read_gpus(gpu: Mapping[str, Any]) -> Inventory:
    error, stale = _optional(gpu, "error_kind", str), gpu.get("stale")
    return Inventory(
        status=InventoryStatus(gpu["status"]),
        gpus=tuple(_read_gpu(entry) for entry in gpu["gpus"]),
        error=InventoryError(error) if error is not None else None,
        detail=_optional(gpu, "detail", str),
        driver_version=_optional(gpu, "driver_version", str),
        read_at=_optional(gpu, "read_at", float),
        lost=tuple(
            LostGpu(_optional(entry, "index", int), _typed(entry["bus_id"], str, "bus_id")) for entry in gpu["lost"]
        ),
        processes_known=_typed(gpu.get("processes_known", True), bool, "processes_known"),
        mig_instances=tuple(_read_slice(entry) for entry in gpu.get("mig_instances", ())),
        topology=_read_topology(gpu.get("topology"), "nvidia-smi") or _read_topology(gpu.get("nearness"), "sysfs"),
        other_gpus=tuple(_read_other(entry) for entry in gpu.get("other_gpus", ())),
        stale=None
        if stale is None
        else Stale(
            InventoryError(stale["error_kind"]), _optional(stale, "detail", str), _typed(stale["since"], float, "since")
        ),
    )


def _read_gpu(entry: Mapping[str, Any]) -> Gpu:
    def number(name: str) -> int | None:
        return _optional(entry, name, int)

    capability = _optional(entry, "compute_cap", str)
    major, _, minor = capability.partition(".") if capability is not None else ("", "", "")
    return Gpu(
        index=_typed(entry["index"], int, "index"),
        uuid=_typed(entry["uuid"], str, "uuid"),
        bus_id=_typed(entry["bus_id"], str, "bus_id"),
        name=_typed(entry["name"], str, "name"),
        memory_total=number("memory_total_mib"),
        memory_used=number("memory_used_mib"),
        memory_free=number("memory_free_mib"),
        compute_capability=(int(major), int(minor)) if capability is not None else None,
        processes=tuple(
            GpuProcess(_typed(pid, int, "pid"), None if memory is None else _typed(memory, int, "memory"))
            for pid, memory in entry["processes"]
        ),
        memory_reserved=number("memory_reserved_mib"),
        gpu_class=_optional(entry, "class", str),
        unified_memory=_typed(entry["unified_memory"], bool, "unified_memory"),
        ecc_enabled=_optional(entry, "ecc_enabled", bool),
        mig_enabled=_optional(entry, "mig_enabled", bool),
        uncorrected_ecc=number("uncorrected_ecc_volatile"),
        flags=tuple(GpuFlag(flag) for flag in entry["health_flags"]),
        virtual=_typed(entry.get("virtual", False), bool, "virtual"),
        persistence_mode=_optional(entry, "persistence_mode", bool),
        recovery_action=_optional(entry, "recovery_action", str),
        temperature=number("temperature_c"),
        power=_optional(entry, "power_w", float),
        power_limit=_optional(entry, "power_limit_w", float),
    )


def _read_slice(entry: Mapping[str, Any]) -> MigInstance:
    return MigInstance(
        parent_index=_typed(entry["parent_index"], int, "parent_index"),
        device=_typed(entry["device"], int, "device"),
        uuid=_typed(entry["uuid"], str, "uuid"),
        profile=_typed(entry["profile"], str, "profile"),
        gpu_class=_typed(entry["class"], str, "class"),
        memory_total=_optional(entry, "memory_total_mib", int),
    )


def _read_topology(found: Mapping[str, Any] | None, source: str) -> Topology | None:
    if found is None:
        return None
    links = {}
    for name, link in found.get("links", {}).items():
        a, _, b = name.partition("-")
        links[int(a), int(b)] = _typed(link, str, "links")
    nearest = {int(index): _typed(name, str, "nearest_nic") for index, name in found["nearest_nic"].items()}
    return Topology(links, nearest, source)


def _read_other(entry: Mapping[str, Any]) -> OtherGpu:
    return OtherGpu(
        vendor=_typed(entry["vendor"], str, "vendor"),
        index=_typed(entry["index"], int, "index"),
        name=_typed(entry["name"], str, "name"),
        bus_id=_typed(entry["bus_id"], str, "bus_id"),
        memory_total=_optional(entry, "memory_total_mib", int),
        memory_used=_optional(entry, "memory_used_mib", int),
        architecture=_optional(entry, "architecture", str),
    )


def _read_fabric(fabric: Mapping[str, Any]) -> FabricInventory:
    fabrics = list(fabric.get("fabrics", ()))
    identities = list(fabric.get("identities", ())) or [{}] * len(fabrics)
    return FabricInventory(
        ports=tuple(_read_port(entry) for entry in fabric.get("ports", ())),
        fabrics=tuple(_read_one_fabric(one, more) for one, more in zip(fabrics, identities, strict=True)),
        unreadable_devices=_texts(fabric.get("unreadable_devices", ()), "unreadable_devices"),
    )


def _read_port(entry: Mapping[str, Any]) -> FabricPort:
    def text(name: str) -> str | None:
        return _optional(entry, name, str)

    def number(name: str) -> int | None:
        return _optional(entry, name, int)

    return FabricPort(
        device=_typed(entry["device"], str, "device"),
        port=_typed(entry["port"], int, "port"),
        kind=PortKind(entry["kind"]),
        state=text("state"),
        rate_gbps=_optional(entry, "rate_gbps", float),
        usable=_typed(entry["usable"], bool, "usable"),
        reason=text("reason"),
        subnet_prefix=text("subnet_prefix"),
        sm_lid=number("sm_lid"),
        lid=number("lid"),
        ipv4=text("ipv4"),
        ipv6=text("ipv6"),
        gid_index=number("gid_index_roce_v2"),
        netdev=text("netdev"),
        pci=text("pci"),
        numa=number("numa"),
        driver=text("driver"),
    )


def _read_one_fabric(entry: Mapping[str, Any], more: Mapping[str, Any]) -> Fabric:
    return Fabric(
        kind=PortKind(entry["kind"]),
        ports=_texts(entry["ports"], "ports"),
        # Inventories that were written by hand may have it all in one place.
        driver=_optional(more, "driver", str) or _optional(entry, "driver", str),
        rate_gbps=_optional(more, "rate_gbps", float),
        subnet_prefix=_optional(entry, "subnet_prefix", str),
        sm_lid=_optional(entry, "sm_lid", int),
        pkeys=_texts(more.get("pkeys") or entry.get("pkeys") or (), "pkeys"),
        networks=_texts(entry.get("networks", ()), "networks"),
        ipv6_only=_typed(more.get("ipv6_only", False), bool, "ipv6_only"),
        island=_optional(more, "island", str),
    )


def _read_host(host: Mapping[str, Any]) -> HostHardware:
    def number(name: str) -> int | None:
        return _optional(host, name, int)

    return HostHardware(
        memory_total=number("memory_total_mib"),
        memory_available=number("memory_available_mib"),
        shm_total=number("shm_total_mib"),
        shm_free=number("shm_free_mib"),
        memlock_soft=number("memlock_soft_bytes"),
        memlock_hard=number("memlock_hard_bytes"),
        nvidia_uvm=_optional(host, "nvidia_uvm", bool),
        nccl_config_files=_texts(host.get("nccl_config_files", ()), "nccl_config_files"),
    )


# -- entries --------------------------------------------------------------------------------------------------


def _gpu(gpu: Gpu, known: Availability | None) -> dict[str, Any]:
    capability = gpu.compute_capability
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "bus_id": gpu.bus_id,
        "memory_total_mib": gpu.memory_total,
        "memory_reserved_mib": gpu.memory_reserved,
        "memory_used_mib": gpu.memory_used,
        "memory_free_mib": gpu.memory_free,
        "unified_memory": gpu.unified_memory,
        "virtual": gpu.virtual,
        "compute_cap": f"{capability[0]}.{capability[1]}" if capability is not None else None,
        "class": gpu.gpu_class,
        "ecc_enabled": gpu.ecc_enabled,
        "mig_enabled": gpu.mig_enabled,
        "uncorrected_ecc_volatile": gpu.uncorrected_ecc,
        "busy": GpuFlag.MEMORY_IN_USE in gpu.flags,
        "processes": [[process.pid, process.memory] for process in gpu.processes],
        "holders": [
            {
                "pid": holder.pid,
                "memory_mib": holder.memory,
                "user": holder.user,
                "command": holder.command,
                "shard": holder.shard,
            }
            for holder in (known.holders if known is not None else ())
        ],
        "assignable": known.assignable if known is not None else None,
        "why_not": known.why_not if known is not None else None,
        "health_flags": [flag.value for flag in gpu.flags],
        "recovery_action": gpu.recovery_action,
        "persistence_mode": gpu.persistence_mode,
        "temperature_c": gpu.temperature,
        "power_w": gpu.power,
        "power_limit_w": gpu.power_limit,
        "fp8_native": capability is not None and capability >= FP8_FROM,
        "bf16_native": capability is not None and capability >= BF16_FROM,
        "nvfp4_native": capability is not None and capability >= NVFP4_FROM,
        "schedulable_whole": NOT_WHOLE.isdisjoint(gpu.flags),
    }


def _stale(stale: Stale | None) -> dict[str, Any] | None:
    return (
        None
        if stale is None
        else {
            "error_kind": stale.error.value,
            "detail": stale.detail,
            "since": stale.since,
        }
    )


def _slice(instance: MigInstance) -> dict[str, Any]:
    return {
        "parent_index": instance.parent_index,
        "device": instance.device,
        "uuid": instance.uuid,
        "profile": instance.profile,
        "class": instance.gpu_class,
        "memory_total_mib": instance.memory_total,
    }


def _may(known: Availability | None) -> dict[str, Any]:
    return {
        "assignable": known.assignable if known is not None else None,
        "why_not": known.why_not if known is not None else None,
    }


def _topology(topology: Topology) -> dict[str, Any]:
    return {
        "gpu_gpu": topology.gpu_gpu,
        "nearest_nic": {str(index): name for index, name in sorted(topology.nearest_nic.items())},
        "nvlink_sets": [list(members) for members in topology.nvlink_sets],
        "links": {f"{a}-{b}": link for (a, b), link in sorted(topology.links.items())},
    }


def _other(gpu: OtherGpu) -> dict[str, Any]:
    return {
        "vendor": gpu.vendor,
        "index": gpu.index,
        "name": gpu.name,
        "bus_id": gpu.bus_id,
        "memory_total_mib": gpu.memory_total,
        "memory_used_mib": gpu.memory_used,
        "architecture": gpu.architecture,
    }


def _port(port: FabricPort) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": port.device,
        "port": port.port,
        "kind": port.kind.value,
        "state": port.state,
        "rate_gbps": port.rate_gbps,
        "usable": port.usable,
        "pci": port.pci,
        "numa": port.numa,
    }
    optional = {
        "reason": port.reason,
        "subnet_prefix": port.subnet_prefix,
        "sm_lid": port.sm_lid,
        "lid": port.lid,
        "ipv4": port.ipv4,
        "ipv6": port.ipv6,
        "gid_index_roce_v2": port.gid_index,
        "netdev": port.netdev,
        "driver": port.driver,
    }
    return found | {name: value for name, value in optional.items() if value is not None}


def _fabric(fabric: Fabric) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": fabric.kind.value}
    if fabric.kind is PortKind.INFINIBAND:
        optional = {"subnet_prefix": fabric.subnet_prefix, "sm_lid": fabric.sm_lid}
        found |= {name: value for name, value in optional.items() if value is not None}
    else:
        found["networks"] = list(fabric.networks)
    return {**found, "ports": list(fabric.ports)}


def _identity(fabric: Fabric) -> dict[str, Any]:
    return {
        "driver": fabric.driver,
        "rate_gbps": fabric.rate_gbps,
        "pkeys": list(fabric.pkeys),
        "ipv6_only": fabric.ipv6_only,
        "island": fabric.island,
    }
