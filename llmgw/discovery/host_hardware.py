"""What engines need of the host beside GPUs: memory, /dev/shm, locked memory, the device that CUDA needs. Shell."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping

from llmgw.discovery.survey import host_memory_of
from llmgw.domain.hardware import HostHardware

SHM = "/dev/shm"
UVM = "/dev/nvidia-uvm"

NCCL_FILES = ("/etc/nccl.conf", "~/.nccl.conf")
"""Files that NCCL reads by itself (NCCL's user guide); NCCL_CONF_FILE names another one in place of the second."""


def read_host(
    *, meminfo: str | None = None, shm: str | None = SHM, uvm: str | None = UVM, env: Mapping[str, str] | None = None
) -> HostHardware:
    """Never raises; what cannot be read is None. `meminfo` is the text that stands in for /proc/meminfo. With `shm`
    and `uvm` None these are not looked at."""
    memory = host_memory_of(meminfo)
    total, free = _space(shm) if shm is not None else (None, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK) if shm is not None else (None, None)
    return HostHardware(
        memory_total=memory.total,
        memory_available=memory.available,
        shm_total=total,
        shm_free=free,
        memlock_soft=soft,
        memlock_hard=hard,
        nvidia_uvm=os.path.exists(uvm) if uvm is not None else None,
        nccl_config_files=_nccl_files(os.environ if env is None else env) if uvm is not None else (),
    )


def _space(path: str) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize >> 20, found.f_bavail * found.f_frsize >> 20


def _nccl_files(env: Mapping[str, str]) -> tuple[str, ...]:
    paths = [NCCL_FILES[0], env.get("NCCL_CONF_FILE") or os.path.expanduser(NCCL_FILES[1])]
    return tuple(path for path in paths if os.path.isfile(path))
