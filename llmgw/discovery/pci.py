"""Whether a graphics card of NVIDIA is in this machine, whatever its driver says. Shell: reads sysfs.

Standard library only: `llmgw inventory` asks it also where a running llmgw answers.
"""

from __future__ import annotations

import os

DEVICES = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
DISPLAY = "0x03"
"""PCI base class of display controllers: VGA, and 3D controllers, which cards for servers are."""


def has_nvidia_card(devices: str = DEVICES) -> bool:
    """False also where sysfs cannot be read."""
    try:
        found = os.listdir(devices)
    except OSError:
        return False
    return any(
        _read(os.path.join(devices, name, "vendor")) == NVIDIA
        and _read(os.path.join(devices, name, "class")).startswith(DISPLAY)
        for name in found
    )


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(32).strip().lower()
    except OSError:
        return ""
