"""What is wrong with a machine on which engines shall run: facts in, findings with a remedy out. Pure.

Thresholds that the rules of preflight have are taken from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from attrs import field, frozen

from llmgw.discovery.availability import unhealthy
from llmgw.domain.fabric import FabricInventory
from llmgw.domain.hardware import Availability, Hindrance, HostHardware, Inventory, InventoryError
from llmgw.domain.problem import Problem
from llmgw.preflight.gpus import REMEDIES
from llmgw.preflight.host import MEMLOCK_LEAST, SHM_LEAST_MIB

Level = Literal["ok", "warning", "problem"]

DISK_LEAST = 20 << 30
"""Bytes: a small model and its compiled kernels."""
FILES_LEAST = 4096
"""Open files that a service with some shards needs: four each, and its clients."""

DRIVER_REMEDIES: Mapping[InventoryError, str] = {
    InventoryError.COMMAND_MISSING: "install the NVIDIA driver with its tools (package nvidia-utils or the like)",
    InventoryError.DRIVER_NOT_LOADED: "load the module (modprobe nvidia), or reboot after installing the driver",
    InventoryError.LIBRARY_MISSING: "install the driver's libraries (libnvidia-ml), of the version of the driver",
    InventoryError.DRIVER_MISMATCH: "the package was upgraded under the running module: reload the module or reboot",
    InventoryError.TIMEOUT: "the driver may be stuck: look at dmesg for lines with NVRM, a reboot may be needed",
    InventoryError.NVML_INIT_FAILED: "run nvidia-smi by hand; in a container, restart the container",
}


@frozen
class Finding:
    """One line: what was looked at, how it is, and what to do where it is not well."""

    check: str
    level: Level
    text: str
    remedy: str | None = None


@frozen
class Control:
    """How asking at the control socket went. `trouble` None: llmgw answers; `absent`: there is no socket."""

    socket: str
    trouble: str | None = None
    hint: str | None = None
    absent: bool = False


@frozen
class Machine:
    """Everything that is judged. None and missing keys are unknown, and unknown is no fault."""

    inventory: Inventory
    has_card: bool
    availability: Mapping[str, Availability] = field(factory=dict)
    fabric: FabricInventory = field(factory=FabricInventory)
    host: HostHardware = field(factory=HostHardware)
    disks: Mapping[str, int] = field(factory=dict)
    """What for -> free bytes there."""
    open_files: int | None = None
    """The hard limit of this process."""
    pidfd: bool = True
    proc_hidden: bool = False
    """/proc is mounted with hidepid: processes of others cannot be seen."""
    unit: Mapping[str, str] | None = None
    """Properties of the installed unit as systemctl shows them; None: there is none."""
    control: Control | None = None
    late_stop: Problem | None = None
    """What is wrong with the unit's TimeoutStopSec for the shards of the configuration."""
    engines: Mapping[str, tuple[str | None, str | None]] = field(factory=dict)
    """Command of a configured shard -> its program and version; None where there is none, or it cannot be read."""
    config_errors: int | None = None
    """Errors of the configuration; None: there is no configuration."""
    engine_ports: tuple[int, int] = (8101, 8499)
    ephemeral_ports: tuple[int, int] | None = None
    ports_taken: Mapping[int, str] = field(factory=dict)
    """Ports of that range that somebody else listens on -> who, in words."""


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """All findings, in the order in which one would look."""
    checks = (_driver, _cards, _adapters, _host, _limits, _ports, _disks, _engines, _unit, _control)
    return tuple(found for check in checks for found in check(machine))


def _driver(machine: Machine) -> Iterator[Finding]:
    inventory = machine.inventory
    error = inventory.stale.error if inventory.stale is not None else inventory.error
    if error is None:
        version = inventory.driver_version or "of unknown version"
        yield Finding("driver", "ok", f"{version}, {len(inventory.gpus)} GPU{'s' * (len(inventory.gpus) != 1)}")
    elif error in (InventoryError.COMMAND_MISSING, InventoryError.DRIVER_NOT_LOADED) and not machine.has_card:
        yield Finding("driver", "ok", "no NVIDIA card in this machine; shards with gpus = 0 run on the CPU")
    else:
        detail = inventory.stale.detail if inventory.stale is not None else inventory.detail
        yield Finding("driver", "problem", detail or error.value, DRIVER_REMEDIES[error])
    if inventory.gpus and machine.host.nvidia_uvm is False:
        yield Finding(
            "nvidia-uvm",
            "problem",
            "/dev/nvidia-uvm is missing: CUDA does not start without it",
            "modprobe nvidia-uvm, or nvidia-modprobe -u -c=0",
        )
    elif inventory.gpus and machine.host.nvidia_uvm:
        yield Finding("nvidia-uvm", "ok", "/dev/nvidia-uvm is there")
    off = [str(gpu.index) for gpu in inventory.gpus if gpu.persistence_mode is False]
    if off:
        yield Finding(
            "persistence",
            "warning",
            f"persistence mode is off on GPU {', '.join(off)}: each first use waits for the driver",
            "enable the service nvidia-persistenced, or nvidia-smi -pm 1",
        )


def _cards(machine: Machine) -> Iterator[Finding]:
    inventory = machine.inventory
    for lost in inventory.lost:
        name = f"GPU {lost.index}" if lost.index is not None else "a GPU"
        yield Finding("gpu", "problem", f"{name} at {lost.bus_id} has dropped off", "reboot; then have it looked at")
    lost_indexes = {lost.index for lost in inventory.lost}
    for gpu in inventory.gpus:
        wrong = unhealthy(gpu)
        if wrong is not None and gpu.index not in lost_indexes:
            remedy = next((REMEDIES[flag] for flag in gpu.flags if flag in REMEDIES), None)
            yield Finding("gpu", "problem", f"GPU {gpu.index} is unhealthy: {wrong}", remedy)
    for uuid, known in machine.availability.items():
        if known.hindrance in (Hindrance.HELD, Hindrance.QUARANTINED):
            card = inventory.by_uuid(uuid)
            label = getattr(card, "index", uuid)
            remedy = "end that process, or llmgw gpu release" if known.hindrance is Hindrance.QUARANTINED else None
            yield Finding("gpu", "warning", f"GPU {label} is {known.why_not}", remedy or "end that process to use it")
    if inventory.gpus and not inventory.processes_known:
        yield Finding(
            "gpu",
            "warning",
            "the processes on the GPUs cannot be read, so nobody knows whose memory is used",
            "run nvidia-smi by hand; in a container this may be normal",
        )


def _adapters(machine: Machine) -> Iterator[Finding]:
    fabric = machine.fabric
    for name in fabric.unreadable_devices:
        yield Finding("adapter", "warning", f"{name} is listed, but cannot be read", "reload its driver or reboot")
    for port in fabric.ports:
        if not port.usable and port.pci is not None and port.driver != "efa":
            state = port.state or "unreadable"
            yield Finding("adapter", "warning", f"{port.label} is {state}: {port.reason}", _port_remedy(port.state))
    if fabric.fabrics:
        first = fabric.fabrics[0]
        yield Finding("fabric", "ok", f"{len(first.ports)} {first.kind.value} port{'s' * (len(first.ports) != 1)}")
    for path in machine.host.nccl_config_files:
        yield Finding("nccl", "warning", f"{path} adds variables to every engine", "check that it fits this node")


def _port_remedy(state: str | None) -> str:
    if state == "INIT":
        return "start a subnet manager on this fabric (opensm, or the switch's)"
    if state == "DOWN":
        return "look at cable and switch; a port that is not used needs no mending"
    return "give its interface an address, or leave it out with [node] fabric"


def _host(machine: Machine) -> Iterator[Finding]:
    shm = machine.host.shm_total
    if shm is not None and shm < SHM_LEAST_MIB:
        yield Finding(
            "/dev/shm",
            "warning",
            f"{shm} MiB: ranks of one engine talk through it",
            "mount -o remount,size=8G /dev/shm, or --shm-size for a container",
        )
    elif shm is not None:
        yield Finding("/dev/shm", "ok", f"{shm / 1024:.1f} GiB")
    if not machine.pidfd:
        yield Finding("kernel", "problem", "it has no pidfd (Linux 5.3)", "use a newer kernel")
    if machine.proc_hidden:
        yield Finding(
            "/proc",
            "warning",
            "mounted with hidepid: who holds a port or a GPU cannot be named",
            "give llmgw's user the group of the mount's gid= option",
        )


def _limits(machine: Machine) -> Iterator[Finding]:
    hard = machine.host.memlock_hard
    if hard is not None and 0 <= hard < MEMLOCK_LEAST:
        level: Level = "warning" if machine.fabric.fabrics else "ok"
        yield Finding(
            "memlock",
            level,
            f"{hard >> 10} KiB in this shell" + (": too little for RDMA" if level == "warning" else ""),
            "LimitMEMLOCK=infinity in the unit (the shipped one has it), or ulimit -l" if level == "warning" else None,
        )
    elif hard is not None:
        yield Finding("memlock", "ok", "unlimited" if hard < 0 else f"{hard >> 20} MiB")
    files = machine.open_files
    if files is not None and 0 <= files < FILES_LEAST:
        yield Finding("open files", "warning", f"{files} at most", "LimitNOFILE=1048576 in the unit, or ulimit -Hn")
    elif files is not None:
        yield Finding("open files", "ok", f"{files} at most")


def _ports(machine: Machine) -> Iterator[Finding]:
    first, last = machine.engine_ports
    ephemeral = machine.ephemeral_ports
    if ephemeral is not None and first <= ephemeral[1] and ephemeral[0] <= last:
        yield Finding(
            "ports",
            "warning",
            f"engine_ports {first}-{last} overlap the ephemeral range {ephemeral[0]}-{ephemeral[1]}",
            "choose others in [node] engine_ports",
        )
    taken = len(machine.ports_taken)
    if taken and taken == last - first + 1:
        yield Finding("ports", "problem", f"no port of {first}-{last} is free", "widen [node] engine_ports")
    else:
        examples = ", ".join(f"{port} {who}" for port, who in sorted(machine.ports_taken.items())[:3])
        rest = f"; {taken} in use: {examples}" if taken else ""
        yield Finding("ports", "ok", f"{last - first + 1 - taken} of {first}-{last} free{rest}")


def _disks(machine: Machine) -> Iterator[Finding]:
    for name, free in machine.disks.items():
        text = f"{free / (1 << 30):.1f} GiB free"
        if free < DISK_LEAST and "weights" in name:
            yield Finding(name, "warning", text, "models take tens of GiB: make room, or set HF_HOME to another disk")
        elif free < 1 << 30:
            yield Finding(name, "problem", text, "free some space: records and logs are written there")
        else:
            yield Finding(name, "ok", text)


def _engines(machine: Machine) -> Iterator[Finding]:
    if machine.config_errors is None:
        yield Finding("configuration", "ok", "none here; llmgw init writes one")
    elif machine.config_errors:
        count = machine.config_errors
        yield Finding("configuration", "problem", f"{count} error{'s' * (count != 1)}", "llmgw check shows them")
    else:
        yield Finding("configuration", "ok", "no errors; llmgw check looks closer")
    for command, (program, version) in machine.engines.items():
        if program is None and "/" in command:
            yield Finding("engine", "problem", f"{command} is not there, or cannot be executed", "check the path")
        elif program is None:
            yield Finding(
                "engine", "problem", f"{command} is not on PATH", 'write its whole path: command = ["/…/vllm", "serve"]'
            )
        else:
            yield Finding("engine", "ok", f"{program}" + (f" {version}" if version is not None else ""))


def _unit(machine: Machine) -> Iterator[Finding]:
    unit = machine.unit
    if unit is None:
        yield Finding("unit", "ok", "not installed; llmgw install-systemd does that")
        return
    wanted = {
        "KillMode": ("process", "engines would end with each restart of llmgw"),
        "Delegate": ("yes", "llmgw cannot keep engines in cgroups of their own"),
        "LimitMEMLOCK": ("infinity", "RDMA may lack memory that it can lock"),
    }
    fine = True
    for name, (value, why) in wanted.items():
        if name in unit and unit[name] != value:
            fine = False
            yield Finding("unit", "warning", f"{name}={unit[name]}: {why}", f"systemctl edit llmgw: {name}={value}")
    files = unit.get("LimitNOFILE", "")
    if files.isdecimal() and int(files) < FILES_LEAST:
        fine = False
        yield Finding("unit", "warning", f"LimitNOFILE={files}", "systemctl edit llmgw: LimitNOFILE=1048576")
    if machine.late_stop is not None:
        fine = False
        yield Finding("unit", "warning", machine.late_stop.message, machine.late_stop.hint)
    if fine:
        yield Finding("unit", "ok", f"llmgw.service is {unit.get('ActiveState', 'installed')}")


def _control(machine: Machine) -> Iterator[Finding]:
    control = machine.control
    if control is None:
        return
    if control.trouble is None:
        yield Finding("llmgw", "ok", f"answers at {control.socket}")
    elif control.absent:
        yield Finding("llmgw", "ok", f"does not run: there is no {control.socket}")
    else:
        # Whoever may not ask learns here which group that takes.
        yield Finding("llmgw", "warning", control.trouble, control.hint or "see: journalctl -u llmgw -e")
