"""PCI paths and NUMA nodes of GPUs and adapters, read from sysfs. Shell."""

from __future__ import annotations

import os
from collections.abc import Sequence

from llmgw.discovery.gpus import normal_bus_id
from llmgw.discovery.natural import natural
from llmgw.discovery.topology import PciPlace, nearness
from llmgw.domain.hardware import Gpu, Topology


def sysfs_nearness(gpus: Sequence[Gpu], sysfs: str) -> Topology | None:
    """How near the GPUs are to each other and to RDMA devices, by their place on the PCI bus. Never raises."""
    root = os.path.realpath(sysfs)
    places = {gpu.index: _gpu_place(root, gpu.bus_id) for gpu in gpus}
    folder = os.path.join(root, "class/infiniband")
    try:
        names = sorted(os.listdir(folder), key=natural)
    except OSError:
        names = []
    return nearness(places, {name: _place(root, os.path.join(folder, name, "device")) for name in names})


def _gpu_place(root: str, bus_id: str) -> PciPlace:
    normal = normal_bus_id(bus_id)
    if normal is None:
        return PciPlace(None, ())
    # nvidia-smi writes a domain of 8 digits in upper case, sysfs at least 4 in lower case.
    domain, _, rest = normal.lower().partition(":")
    return _place(root, os.path.join(root, "bus/pci/devices", f"{int(domain, 16):04x}:{rest}"))


def _place(root: str, path: str) -> PciPlace:
    if not os.path.exists(path):
        return PciPlace(None, ())
    parts = os.path.relpath(os.path.realpath(path), root).split(os.sep)
    below = [part for part in parts if part.startswith("pci") or part.count(":") == 2]
    try:
        with open(os.path.join(path, "numa_node"), encoding="ascii", errors="replace") as file:
            numa = int(file.read(16))
    except (OSError, ValueError):
        numa = -1
    return PciPlace(numa if numa >= 0 else None, tuple(below))
