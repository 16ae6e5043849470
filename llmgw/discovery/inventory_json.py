"""An inventory as JSON and back: what `llmgw inventory --json` and `/v1/inventory` print, and what saved inventories
hold. Pure.

The keys of `gpu` and `fabric` are fixed and always present; null means that the driver does not say. Lists hold exactly
what is named here, so that two inventories can be compared key by key; whatever else is known stands beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from llmgw.domain.fabric import Fabric, FabricInventory, FabricPort, PortKind
from llmgw.domain.hardware import (
    Availability,
    Gpu,
    GpuFlag,
    GpuHolder,
    GpuProcess,
    Hindrance,
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
E = TypeVar("E", bound=StrEnum)

NUMBER_MAX = 1 << 63
"""Larger numbers are no sizes, times or pids; an unlimited lock limit may be as large as this."""

KINDS: Mapping[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}

_CAPABILITY = re.compile(r"(\d{1,3})\.(\d{1,3})", re.ASCII)
_PAIR = re.compile(r"(\d{1,4})-(\d{1,4})", re.ASCII)
_INDEX = re.compile(r"\d{1,4}", re.ASCII)
_PKEY = re.compile(r"0x[0-9a-fA-F]{1,4}", re.ASCII)
_PORT = re.compile(r"[^:,=^]{1,64}:\d{1,3}", re.ASCII)


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
        # What else is known about each port, in the order of `ports`.
        "port_details": [
            {"network": port.network, "pkeys": list(port.pkeys), "pkey_indexes": list(port.pkey_indexes)}
            for port in fabric.ports
        ],
        # [node] fabric = "none": traffic between nodes goes over sockets, among those of one name.
        "sockets": fabric.sockets,
        "sockets_island": fabric.sockets_island,
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
    """The inventory that `node_json` printed. Raises ValueError, with the key in its text, for anything else.

    Keys that are not among those of `node_json` are passed over; of the further ones beside the fixed keys, any may be
    missing.
    """
    found = _Table(answer, "")
    if found.optional("api", int) != API:
        raise ValueError(f'not an inventory: an object with "api": {API} is expected')
    host = found.table("host", needed=False)
    return NodeInventory(
        node=found.needed("node", str),
        gpu=_read_gpus(found.table("gpu")),
        fabric=_read_fabric(found.table("fabric", needed=False)),
        host=_read_host(host),
        address=host.optional("address", str),
        interface=host.optional("interface", str),
    )


def read_holders(answer: object) -> Mapping[str, tuple[GpuHolder, ...]]:
    """What the same object tells about who is on the cards and slices, by UUID. Raises ValueError likewise."""
    return {uuid: tuple(_read_holder(entry) for entry in may.tables("holders")) for uuid, may in _read_may(answer)}


def read_quarantined(answer: object) -> Mapping[str, str]:
    """Cards in quarantine, with the reason in words, by UUID. Raises ValueError likewise."""
    return {
        uuid: may.needed("why_not", str)
        for uuid, may in _read_may(answer)
        if may.optional("hindrance", str) == Hindrance.QUARANTINED
    }


def _read_may(answer: object) -> Iterator[tuple[str, _Table]]:
    """Each card and slice with what was decided about it."""
    gpu = _Table(answer, "").table("gpu")
    for entry in gpu.tables("gpus"):
        yield entry.needed("uuid", str), entry
    yield from gpu.table("mig_assignable", needed=False).subtables()


def _read_holder(entry: _Table) -> GpuHolder:
    return GpuHolder(
        pid=entry.needed("pid", int),
        memory=entry.optional("memory_mib", int),
        user=entry.optional("user", str),
        command=entry.optional("command", str),
        shard=entry.optional("shard", str),
        is_unknown=not entry.is_set("ours"),
    )


class _Table:
    """An object of the file with the place that it stands at, so that whatever is wrong in it is told with its key."""

    def __init__(self, found: object, place: str) -> None:
        if not isinstance(found, Mapping):
            raise ValueError(f"not an inventory: {place or 'it'} is no object")  # noqa: TRY004
        self._found = found
        self._place = f"{place}." if place else ""

    @property
    def is_empty(self) -> bool:
        return not self._found

    def wrong(self, name: str, why: str) -> ValueError:
        return ValueError(f"not an inventory: {self._place}{name} {why}")

    def optional(self, name: str, kind: type[T]) -> T | None:
        value = self._found.get(name)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        # JSON has no bounds, but what counts with these has.
        if type(value) is not kind or (isinstance(value, int | float) and not -NUMBER_MAX <= value <= NUMBER_MAX):
            raise self.wrong(name, f"is {str(value)[:40]!r}, not {KINDS[kind]}")
        return value

    def needed(self, name: str, kind: type[T]) -> T:
        value = self.optional(name, kind)
        if value is None:
            raise self.wrong(name, "is missing")
        return value

    def is_set(self, name: str) -> bool:
        return self._found.get(name) is not None

    def switch(self, name: str, default: bool) -> bool:
        value = self.optional(name, bool)
        return default if value is None else value

    def one_of(self, name: str, kinds: type[E]) -> E:
        text = self.needed(name, str)
        if text not in list(kinds):
            raise self.wrong(name, f"is {text[:40]!r}, not one of {', '.join(kinds)}")
        return kinds(text)

    def entries(self, name: str) -> Sequence[Any]:
        value = self._found.get(name, ())
        if not isinstance(value, list | tuple):
            raise self.wrong(name, "is no list")
        return value

    def texts(self, name: str, form: re.Pattern[str] | None = None) -> tuple[str, ...]:
        values = self.entries(name)
        for value in values:
            if not isinstance(value, str) or (form is not None and not form.fullmatch(value)):
                raise self.wrong(name, f"holds {str(value)[:40]!r}")
        return tuple(values)

    def places(self, name: str) -> tuple[int | None, ...]:
        """Indexes into a table, null where there is none."""
        values = self.entries(name)
        for value in values:
            if value is not None and (type(value) is not int or not 0 <= value <= NUMBER_MAX):
                raise self.wrong(name, f"holds {str(value)[:40]!r}")
        return tuple(values)

    def table(self, name: str, *, needed: bool = True) -> _Table:
        value = self._found.get(name)
        if value is None:
            if needed:
                raise self.wrong(name, "is missing")
            value = {}
        return _Table(value, self._place + name)

    def tables(self, name: str) -> Sequence[_Table]:
        return [_Table(value, f"{self._place}{name}[{n}]") for n, value in enumerate(self.entries(name))]

    def subtables(self) -> Iterator[tuple[str, _Table]]:
        for key in self._found:
            yield str(key), self.table(key)

    def items(self, name: str) -> Iterator[tuple[str, str]]:
        """The entries of an object of texts."""
        table = self.table(name, needed=False)
        for key in table._found:
            yield str(key), table.needed(key, str)


def _read_gpus(gpu: _Table) -> Inventory:
    status = gpu.one_of("status", InventoryStatus)
    failed = gpu.optional("error_kind", str) is not None
    if (status is InventoryStatus.ERROR) != failed:
        raise gpu.wrong("error_kind", f"does not go with status {status.value!r}")
    stale = gpu.table("stale", needed=False)
    topology = _read_topology(gpu, "topology", "nvidia-smi")
    return Inventory(
        status=status,
        gpus=tuple(_read_gpu(entry) for entry in gpu.tables("gpus")),
        error=gpu.one_of("error_kind", InventoryError) if failed else None,
        detail=gpu.optional("detail", str),
        driver_version=gpu.optional("driver_version", str),
        read_at=gpu.optional("read_at", float),
        lost=tuple(LostGpu(entry.optional("index", int), entry.needed("bus_id", str)) for entry in gpu.tables("lost")),
        processes_known=gpu.switch("processes_known", True),
        mig_instances=tuple(_read_slice(entry) for entry in gpu.tables("mig_instances")),
        topology=topology if topology is not None else _read_topology(gpu, "nearness", "sysfs"),
        other_gpus=tuple(_read_other(entry) for entry in gpu.tables("other_gpus")),
        stale=None
        if stale.is_empty
        else Stale(
            stale.one_of("error_kind", InventoryError), stale.optional("detail", str), stale.needed("since", float)
        ),
    )


def _read_gpu(entry: _Table) -> Gpu:
    def number(name: str) -> int | None:
        return entry.optional(name, int)

    flags = entry.texts("health_flags")
    for flag in flags:
        if flag not in list(GpuFlag):
            raise entry.wrong("health_flags", f"holds {flag[:40]!r}")
    return Gpu(
        index=entry.needed("index", int),
        uuid=entry.needed("uuid", str),
        bus_id=entry.needed("bus_id", str),
        name=entry.needed("name", str),
        memory_total=number("memory_total_mib"),
        memory_used=number("memory_used_mib"),
        memory_free=number("memory_free_mib"),
        compute_capability=_read_capability(entry),
        processes=tuple(_read_processes(entry)),
        memory_reserved=number("memory_reserved_mib"),
        gpu_class=entry.optional("class", str),
        unified_memory=entry.needed("unified_memory", bool),
        ecc_enabled=entry.optional("ecc_enabled", bool),
        mig_enabled=entry.optional("mig_enabled", bool),
        uncorrected_ecc=number("uncorrected_ecc_volatile"),
        flags=tuple(flag for flag in GpuFlag if flag in flags),
        virtual=entry.switch("virtual", False),
        persistence_mode=entry.optional("persistence_mode", bool),
        recovery_action=entry.optional("recovery_action", str),
        temperature=number("temperature_c"),
        power=entry.optional("power_w", float),
        power_limit=entry.optional("power_limit_w", float),
    )


def _read_capability(entry: _Table) -> tuple[int, int] | None:
    text = entry.optional("compute_cap", str)
    if text is None:
        return None
    match = _CAPABILITY.fullmatch(text)
    if match is None:
        raise entry.wrong("compute_cap", f"is {text[:40]!r}, not like '9.0'")
    return int(match[1]), int(match[2])


def _read_processes(entry: _Table) -> Iterator[GpuProcess]:
    for row in entry.entries("processes"):
        if not (
            isinstance(row, list | tuple)
            and len(row) == 2
            and type(row[0]) is int
            and (row[1] is None or type(row[1]) is int)
            and all(cell is None or 0 <= cell <= NUMBER_MAX for cell in row)
        ):
            raise entry.wrong("processes", f"holds {str(row)[:40]!r}, not [pid, MiB or null]")
        yield GpuProcess(*row)


def _read_slice(entry: _Table) -> MigInstance:
    return MigInstance(
        parent_index=entry.needed("parent_index", int),
        device=entry.needed("device", int),
        uuid=entry.needed("uuid", str),
        profile=entry.needed("profile", str),
        gpu_class=entry.needed("class", str),
        memory_total=entry.optional("memory_total_mib", int),
    )


def _read_topology(gpu: _Table, name: str, source: str) -> Topology | None:
    found = gpu.table(name, needed=False)
    if found.is_empty:
        return None
    links = {}
    for pair, link in found.items("links"):
        match = _PAIR.fullmatch(pair)
        if match is None:
            raise found.wrong("links", f"holds {pair[:40]!r}, not like '0-1'")
        links[int(match[1]), int(match[2])] = link
    nearest = {}
    for index, adapter in found.items("nearest_nic"):
        if not _INDEX.fullmatch(index):
            raise found.wrong("nearest_nic", f"holds {index[:40]!r}, not a GPU's index")
        nearest[int(index)] = adapter
    return Topology(links, nearest, source)


def _read_other(entry: _Table) -> OtherGpu:
    return OtherGpu(
        vendor=entry.needed("vendor", str),
        index=entry.needed("index", int),
        name=entry.needed("name", str),
        bus_id=entry.needed("bus_id", str),
        memory_total=entry.optional("memory_total_mib", int),
        memory_used=entry.optional("memory_used_mib", int),
        architecture=entry.optional("architecture", str),
    )


def _read_fabric(fabric: _Table) -> FabricInventory:
    ports, details = fabric.tables("ports"), fabric.tables("port_details")
    fabrics, identities = fabric.tables("fabrics"), fabric.tables("identities")
    nothing = _Table({}, "")
    # Lists beside others that do not match them belong to what stood there before somebody edited it.
    if len(details) != len(ports):
        details = [nothing] * len(ports)
    if len(identities) != len(fabrics):
        identities = [nothing] * len(fabrics)
    return FabricInventory(
        ports=tuple(_read_port(entry, more) for entry, more in zip(ports, details, strict=True)),
        fabrics=tuple(_read_one_fabric(entry, more) for entry, more in zip(fabrics, identities, strict=True)),
        unreadable_devices=fabric.texts("unreadable_devices"),
        sockets=fabric.switch("sockets", False),
        sockets_island=fabric.optional("sockets_island", str),
    )


def _read_port(entry: _Table, more: _Table) -> FabricPort:
    def text(name: str) -> str | None:
        return entry.optional(name, str)

    def number(name: str) -> int | None:
        return entry.optional(name, int)

    return FabricPort(
        device=entry.needed("device", str),
        port=entry.needed("port", int),
        kind=entry.one_of("kind", PortKind),
        state=text("state"),
        rate_gbps=entry.optional("rate_gbps", float),
        usable=entry.needed("usable", bool),
        reason=text("reason"),
        subnet_prefix=text("subnet_prefix"),
        sm_lid=number("sm_lid"),
        lid=number("lid"),
        ipv4=text("ipv4"),
        ipv6=text("ipv6"),
        gid_index=number("gid_index_roce_v2"),
        network=more.optional("network", str),
        netdev=text("netdev"),
        pci=text("pci"),
        numa=number("numa"),
        driver=text("driver"),
        pkeys=more.texts("pkeys", _PKEY),
        pkey_indexes=tuple(place for place in more.places("pkey_indexes") if place is not None),
    )


def _read_one_fabric(entry: _Table, more: _Table) -> Fabric:
    # Inventories that were written by hand may have it all in one place.
    return Fabric(
        kind=entry.one_of("kind", PortKind),
        ports=entry.texts("ports", _PORT),
        driver=entry.optional("driver", str) or more.optional("driver", str),
        rate_gbps=more.optional("rate_gbps", float),
        subnet_prefix=entry.optional("subnet_prefix", str),
        sm_lid=entry.optional("sm_lid", int),
        pkeys=entry.texts("pkeys", _PKEY) or more.texts("pkeys", _PKEY),
        pkey_indexes=more.places("pkey_indexes"),
        networks=entry.texts("networks"),
        ipv6_only=more.switch("ipv6_only", False),
        island=more.optional("island", str),
    )


def _read_host(host: _Table) -> HostHardware:
    def number(name: str) -> int | None:
        return host.optional(name, int)

    return HostHardware(
        memory_total=number("memory_total_mib"),
        memory_available=number("memory_available_mib"),
        shm_total=number("shm_total_mib"),
        shm_free=number("shm_free_mib"),
        memlock_soft=number("memlock_soft_bytes"),
        memlock_hard=number("memlock_hard_bytes"),
        nvidia_uvm=host.optional("nvidia_uvm", bool),
        nccl_config_files=host.texts("nccl_config_files"),
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
        **_may(known),
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
    if known is None:
        return {"holders": [], "assignable": None, "why_not": None, "hindrance": None}
    return {
        "holders": [_holder(holder) for holder in known.holders],
        "assignable": known.assignable,
        "why_not": known.why_not,
        "hindrance": known.hindrance.value if known.hindrance is not None else None,
    }


def _holder(holder: GpuHolder) -> dict[str, Any]:
    return {
        "pid": holder.pid,
        "memory_mib": holder.memory,
        "user": holder.user,
        "command": holder.command,
        "shard": holder.shard,
        "ours": None if holder.is_unknown else holder.shard is not None,
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
        "pkey_indexes": list(fabric.pkey_indexes),
        "ipv6_only": fabric.ipv6_only,
        "island": fabric.island,
    }
