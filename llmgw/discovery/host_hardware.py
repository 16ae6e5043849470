"""What engines need of the host beside GPUs: memory, /dev/shm, locked memory, the device that CUDA needs. Shell."""

from __future__ import annotations

import os
import pwd
import resource
from collections.abc import Mapping

from llmgw.discovery.survey import host_memory_of
from llmgw.domain.hardware import HostHardware

SHM = "/dev/shm"
UVM = "/dev/nvidia-uvm"

NCCL_FILE = "/etc/nccl.conf"
NCCL_USER_FILE = ".nccl.conf"
"""In the home directory that the user database names, whatever HOME says. NCCL reads both files by itself;
NCCL_CONF_FILE names another one in place of the user's (NCCL, src/misc/param.cc)."""


def read_host(
    *,
    meminfo: str | None = None,
    shm: str | None = SHM,
    uvm: str | None = UVM,
    nccl_file: str = NCCL_FILE,
    user_home: str | None = None,
    env: Mapping[str, str] | None = None,
) -> HostHardware:
    """Never raises; what cannot be read is None. `meminfo` is the text that stands in for /proc/meminfo. With `shm`
    and `uvm` None these are not looked at. `user_home` None: that of this user, where NCCL looks.
    """
    memory = host_memory_of(meminfo)
    total, free = _space(shm) if shm is not None else (None, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK) if shm is not None else (None, None)
    found: tuple[str, ...] = ()
    if uvm is not None:
        found = _nccl_files(nccl_file, user_home or _home(), os.environ if env is None else env)
    return HostHardware(
        memory_total=memory.total,
        memory_available=memory.available,
        shm_total=total,
        shm_free=free,
        memlock_soft=soft,
        memlock_hard=hard,
        nvidia_uvm=os.path.exists(uvm) if uvm is not None else None,
        nccl_config_files=found,
    )


def _space(path: str) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(path)
    except (OSError, ValueError):
        return None, None
    return found.f_blocks * found.f_frsize >> 20, found.f_bavail * found.f_frsize >> 20


def _home() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None


def _nccl_files(system: str, home: str | None, env: Mapping[str, str]) -> tuple[str, ...]:
    own = env.get("NCCL_CONF_FILE") or (os.path.join(home, NCCL_USER_FILE) if home else None)
    return tuple(path for path in (system, own) if path is not None and os.path.isfile(path))
