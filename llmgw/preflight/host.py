"""Rules about the rest of the machine: shared memory, locked memory, the device that CUDA needs."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.domain.problem import Problem
from llmgw.domain.shard import ShardSpec
from llmgw.preflight.situation import SPLITTING, Situation, gpus_of, warning

SHM_LEAST_MIB = 1024
"""Ranks exchange requests and small tensors through /dev/shm; a container's default of 64 MiB is too little."""

MEMLOCK_LEAST = 64 << 20
"""Bytes. RDMA pins what it sends and receives; the usual default of 8 MiB fails at the first transfer."""


def shm_small(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    host = situation.facts.hardware
    if spec.engine not in SPLITTING or spec.layout.world < 2 or host is None or host.shm_total is None:
        return
    if host.shm_total < SHM_LEAST_MIB:
        yield warning(
            spec,
            "shm-small",
            "gpus",
            f"/dev/shm has {host.shm_total} MiB, and its {spec.layout.world} ranks talk through it",
            "give it 1 GiB or more: mount -o remount,size=8G /dev/shm, or --shm-size for a container",
        )


def memlock_small(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    host, fabric = situation.facts.hardware, situation.facts.fabric
    if host is None or host.memlock_hard is None or host.memlock_hard < 0 or host.memlock_hard >= MEMLOCK_LEAST:
        return
    spans = spec.nodes > 1
    # On one node only engines with adapters beside them pin memory for RDMA (prefill and decode on two nodes).
    beside = spec.layout.world > 1 and fabric is not None and bool(fabric.fabrics)
    if spec.engine in SPLITTING and (spans or beside):
        yield warning(
            spec,
            "memlock-small",
            "nodes" if spans else "gpus",
            f"only {host.memlock_hard >> 10} KiB of memory may be locked, which RDMA needs more of",
            "write LimitMEMLOCK=infinity into the unit, or raise ulimit -l",
        )


def uvm_missing(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    host = situation.facts.hardware
    if host is not None and host.nvidia_uvm is False and gpus_of(spec, situation):
        yield warning(
            spec,
            "nvidia-uvm",
            "gpus",
            "/dev/nvidia-uvm is not there, and CUDA does not start without it",
            "load the module: modprobe nvidia-uvm, or nvidia-modprobe -u -c=0",
        )
