"""Asks nvidia-smi, within one time limit for everything. The program is run by whoever is injected; what it says is
read in `gpus`. Nothing is raised: a survey that failed is an inventory that says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import trio
from attrs import evolve

from llmgw.discovery import amd, mig
from llmgw.discovery.gpus import (
    CORE_QUERY,
    PROCESS_QUERY,
    RECOVERY_QUERY,
    REQUIRED_FIELDS,
    HostMemory,
    failure,
    host_memory,
    parse_gpus,
    parse_processes,
    unknown_field,
    with_processes,
    with_recovery,
)
from llmgw.discovery.nearness import sysfs_nearness
from llmgw.discovery.topology import parse_topology
from llmgw.domain.hardware import Inventory, InventoryError, InventoryStatus, MigInstance, Stale


class ToolAnswer(Protocol):
    """How a tool ended. `code` is None when it was killed or could not be waited for."""

    @property
    def code(self) -> int | None: ...
    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...
    @property
    def timed_out(self) -> bool: ...


class RunTool(Protocol):
    """Runs one program to its end or to the time limit in seconds. A program that cannot be started has code 126 or
    127, as in a shell, and the reason on stderr."""

    async def __call__(self, argv: Sequence[str], *, timeout: float) -> ToolAnswer: ...


class _OutOfTime(Exception):
    pass


class _NotStarted(Exception):
    pass


_NOT_STARTED = (126, 127)
_ERRNO = re.compile(r"\[Errno \d+\] ")


async def survey(
    run_tool: RunTool,
    *,
    nvidia_smi: str | None,
    timeout: float,
    now: Callable[[], float],
    meminfo: str | None = None,
    rocm_smi: str | None = None,
    sysfs: str | None = "/sys",
    previous: Inventory | None = None,
) -> Inventory:
    """Read the node's GPUs. `timeout` in seconds bounds all calls together: the first required one that runs out ends
    the survey; optional ones (topology, slices, recovery action, other vendors) that fail leave their facts unknown.

    `nvidia_smi` is the path of the program, None when there is none. `meminfo` stands in for the text of
    /proc/meminfo, which cards that share the host's memory need. `sysfs` is the root that PCI paths are read from,
    None for not at all. `previous` is the last good inventory: topology and slices are asked for again only when the
    cards, their modes or the driver have changed, since on large nodes these calls are slow.
    """
    deadline = trio.current_time() + timeout
    inventory = await _nvidia(run_tool, nvidia_smi, deadline, timeout, host_memory_of(meminfo), previous, sysfs)
    if rocm_smi is not None and (previous is None or previous.other_gpus):
        left = deadline - trio.current_time()
        if left > 0:
            answer = await run_tool((rocm_smi, *amd.QUERY), timeout=left)
            if not answer.timed_out:
                cards = amd.parse_rocm(answer.stdout.decode("utf-8", "replace"))
                inventory = evolve(inventory, other_gpus=cards)
    return evolve(inventory, read_at=now())


def merge_stale(last_good: Inventory | None, failed: Inventory) -> Inventory:
    """What to go on with after a survey that failed: the last good facts, marked stale; where there are none, the
    failure itself."""
    if last_good is None or failed.status is not InventoryStatus.ERROR:
        return failed
    since = last_good.stale.since if last_good.stale is not None else failed.read_at or 0.0
    error = failed.error or InventoryError.NVML_INIT_FAILED
    return evolve(last_good, stale=Stale(error, failed.detail, since))


def host_memory_of(meminfo: str | None) -> HostMemory:
    """By the text given, or that of /proc/meminfo."""
    return host_memory(_read_meminfo() if meminfo is None else meminfo)


async def _nvidia(
    run_tool: RunTool,
    nvidia_smi: str | None,
    deadline: float,
    timeout: float,
    memory: HostMemory,
    previous: Inventory | None,
    sysfs: str | None,
) -> Inventory:
    if nvidia_smi is None:
        return _missing("nvidia-smi is not on PATH")

    async def ask(*arguments: str) -> tuple[str, str, int | None]:
        left = deadline - trio.current_time()
        if left <= 0:
            raise _OutOfTime
        answer = await run_tool((nvidia_smi, *arguments), timeout=left)
        if answer.timed_out:
            # What came before the limit is no inventory: rows may be cut or missing.
            raise _OutOfTime
        stdout, stderr = answer.stdout.decode("utf-8", "replace"), answer.stderr.decode("utf-8", "replace")
        if answer.code in _NOT_STARTED and not stdout.strip():
            raise _NotStarted(_ERRNO.sub("", " ".join(stderr.split()))[:300])
        return stdout, stderr, answer.code

    try:
        inventory = await _read_gpus(ask, memory)
        if inventory.gpus:
            query = "--query-compute-apps=" + ",".join(PROCESS_QUERY)
            inventory = with_processes(inventory, parse_processes(*await ask(query, _FORMAT)))
    except _OutOfTime:
        return Inventory(
            InventoryStatus.ERROR,
            error=InventoryError.TIMEOUT,
            detail=f"nvidia-smi did not end within {timeout:g} s",
        )
    except _NotStarted as error:
        return _missing(str(error))
    if not inventory.gpus:
        return inventory
    inventory = with_recovery(inventory, await _optional(ask, "--query-gpu=" + ",".join(RECOVERY_QUERY), _FORMAT))
    if previous is not None and _same_cards(previous, inventory):
        return evolve(inventory, mig_instances=previous.mig_instances, topology=previous.topology)
    topology = parse_topology(await _optional(ask, "topo", "-m"))
    if topology is None and sysfs is not None:
        look = partial(sysfs_nearness, inventory.gpus, sysfs)
        topology = await trio.to_thread.run_sync(look, abandon_on_cancel=True)
    return evolve(inventory, mig_instances=await _slices(ask, inventory), topology=topology)


def _same_cards(one: Inventory, other: Inventory) -> bool:
    def cards(inventory: Inventory) -> object:
        return inventory.driver_version, [(gpu.index, gpu.uuid, gpu.mig_enabled) for gpu in inventory.gpus]

    return cards(one) == cards(other)


async def _slices(ask: _Ask, inventory: Inventory) -> tuple[MigInstance, ...]:
    if not any(gpu.mig_enabled for gpu in inventory.gpus):
        return ()
    instances = mig.parse_list(await _optional(ask, "-L"), inventory.gpus)
    if not instances:
        return ()
    # Megabytes on a large node: read where nothing waits for the loop.
    text = await _optional(ask, "-q", "-x")
    memory = await trio.to_thread.run_sync(mig.memory_of, text, abandon_on_cancel=True)
    return mig.with_memory(instances, memory, inventory.gpus)


async def _optional(ask: _Ask, *arguments: str) -> str:
    """What a call prints that nothing depends on; empty when it failed or took too long."""
    try:
        stdout, _, code = await ask(*arguments)
    except (_OutOfTime, _NotStarted):
        return ""
    return stdout if code == 0 else ""


_FORMAT = "--format=csv,noheader,nounits"


class _Ask(Protocol):
    async def __call__(self, *arguments: str) -> tuple[str, str, int | None]: ...


async def _read_gpus(ask: _Ask, host: HostMemory) -> Inventory:
    fields = list(CORE_QUERY)
    while True:
        stdout, stderr, code = await ask("--query-gpu=" + ",".join(fields), _FORMAT)
        unknown = unknown_field(stdout)
        if unknown is None:
            return parse_gpus(stdout, stderr, code, fields, host=host)
        if unknown in REQUIRED_FIELDS or unknown not in fields:
            return failure(stdout, stderr, code)
        # Old drivers name one unknown field per failed call; each is dropped once, so this ends.
        fields.remove(unknown)


def _read_meminfo() -> str:
    try:
        with open("/proc/meminfo", encoding="ascii", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def _missing(detail: str) -> Inventory:
    return Inventory(InventoryStatus.ERROR, error=InventoryError.COMMAND_MISSING, detail=detail)
