"""The rest of the node: read from paths that are arguments, unknown where they are not there."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from llmgw.discovery.host_hardware import read_host
from llmgw.domain.hardware import HostHardware

MEMINFO = "MemTotal:       131072000 kB\nMemFree:         1024000 kB\nMemAvailable:   65536000 kB\n"


def test_memory_comes_from_the_text_that_is_given() -> None:
    found = read_host(meminfo=MEMINFO, shm=None, uvm=None)
    assert (found.memory_total, found.memory_available) == (128000, 64000)


@pytest.mark.parametrize("text", ["", "MemTotal: lots kB\n", "\x00\xff", "MemTotal:\n"])
def test_memory_that_cannot_be_read_is_unknown(text: str) -> None:
    assert read_host(meminfo=text, shm=None, uvm=None) == HostHardware()


def test_shared_memory_and_limits_are_those_of_this_process(tmp_path: Path) -> None:
    found = read_host(meminfo=MEMINFO, shm=str(tmp_path), uvm=None)
    assert found.shm_total is not None and found.shm_free is not None and 0 <= found.shm_free <= found.shm_total
    assert (found.memlock_soft, found.memlock_hard) == resource.getrlimit(resource.RLIMIT_MEMLOCK)


def test_shared_memory_that_is_not_there_is_unknown(tmp_path: Path) -> None:
    assert read_host(meminfo=MEMINFO, shm=str(tmp_path / "none"), uvm=None).shm_total is None


def test_the_device_of_cuda_is_there_or_not_or_not_asked_for(tmp_path: Path) -> None:
    device = tmp_path / "nvidia-uvm"
    assert read_host(meminfo=MEMINFO, uvm=str(device)).nvidia_uvm is False
    device.touch()
    assert read_host(meminfo=MEMINFO, uvm=str(device)).nvidia_uvm is True
    assert read_host(meminfo=MEMINFO, uvm=None).nvidia_uvm is None


def test_files_that_nccl_reads_by_itself_are_named(tmp_path: Path) -> None:
    system, user, other = tmp_path / "nccl.conf", tmp_path / ".nccl.conf", tmp_path / "other.conf"

    def files(env: dict[str, str] | None = None) -> tuple[str, ...]:
        return read_host(
            meminfo=MEMINFO, nccl_file=str(system), user_home=str(tmp_path), env=env or {}
        ).nccl_config_files

    assert files() == ()
    system.write_text("NCCL_IB_GID_INDEX=3\n")
    user.write_text("")
    other.write_text("")
    assert files() == (str(system), str(user))
    assert files({"NCCL_CONF_FILE": str(other)}) == (str(system), str(other))
    assert files({"NCCL_CONF_FILE": str(tmp_path / "none")}) == (str(system),)
