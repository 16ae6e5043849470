"""PCI paths and NUMA nodes of GPUs and adapters, read from sysfs. Shell."""

from __future__ import annotations

import os
from collections.abc import Sequence

from llmgw.discovery.natural import natural
from llmgw.discovery.topology import PciPlace, nearness
from llmgw.domain.hardware import Gpu, Topology


def sysfs_nearness(gpus: Sequence[Gpu], sysfs: str) -> Topology | None:
    """How near the GPUs are to each other and to RDMA devices, by their place on the PCI bus."""
    places = {gpu.index: _place(os.path.join(sysfs, "bus/pci/devices", _sysfs_address(gpu.bus_id))) for gpu in gpus}
    folder = os.path.join(sysfs, "class/infiniband")
    try:
        names = sorted(os.listdir(folder), key=natural)
    except OSError:
        names = []
    nics = {name: _place(os.path.join(folder, name, "device")) for name in names}
    return nearness(places, nics)


def _sysfs_address(bus_id: str) -> str:
    # nvidia-smi writes a domain of 8 digits in upper case, sysfs 4 in lower case.
    return bus_id[4:].lower() if len(bus_id.partition(":")[0]) == 8 else bus_id.lower()


def _place(path: str) -> PciPlace:
    if not os.path.exists(path):
        return PciPlace(None, ())
    parts = os.path.realpath(path).split(os.sep)
    below = [part for part in parts if part.startswith("pci") or part.count(":") == 2]
    try:
        with open(os.path.join(path, "numa_node"), encoding="ascii", errors="replace") as file:
            numa = int(file.read(16))
    except (OSError, ValueError):
        numa = -1
    return PciPlace(numa if numa >= 0 else None, tuple(below))
