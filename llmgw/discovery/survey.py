"""Asks nvidia-smi, within one time limit for everything. The program is run by whoever is injected; what it says is
read in `gpus`. Nothing is raised: a survey that failed is an inventory that says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import trio
from attrs import evolve, frozen

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
    parse_recovery,
    unknown_field,
    with_processes,
    with_recovery,
)
from llmgw.discovery.nearness import sysfs_nearness
from llmgw.discovery.topology import parse_topology
from llmgw.domain.hardware import Inventory, InventoryError, InventoryStatus, MigInstance, Stale, Topology


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
    """Read the node's GPUs. `timeout` in seconds bounds all calls together: the first required one (cards, compute
    processes) that runs out ends the survey. Optional ones (recovery action, topology, slices, other vendors) come
    after those; what fails there leaves its facts unknown, and each has at most half of the time that is left, so that
    one that hangs leaves some to the others.

    `nvidia_smi` is the path of the program, None when there is none. `meminfo` stands in for the text of
    /proc/meminfo, which cards that share the host's memory need. `sysfs` is the root that PCI paths are read from,
    None for not at all. `previous` is the last good inventory. While cards, MIG modes and driver are those of it, its
    topology is taken over, and its slices' memory while the slices are the same too: on large nodes these calls are
    slow. Of an optional question that fails now, the last answer stays.
    """
    deadline = trio.current_time() + timeout
    asked = _Asked(run_tool, deadline)
    inventory = await _nvidia(asked, nvidia_smi, timeout, host_memory_of(meminfo), previous, sysfs, now)
    if rocm_smi is not None and (previous is None or previous.other_gpus):
        text = await asked.optional(rocm_smi, *amd.QUERY)
        cards = amd.parse_rocm(text) if text is not None else None
        if cards is None:
            cards = previous.other_gpus if previous is not None else ()
        inventory = evolve(inventory, other_gpus=cards)
    return inventory


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
    asked: _Asked,
    nvidia_smi: str | None,
    timeout: float,
    memory: HostMemory,
    previous: Inventory | None,
    sysfs: str | None,
    now: Callable[[], float],
) -> Inventory:
    if nvidia_smi is None:
        return _missing("nvidia-smi is not on PATH", now())
    try:
        inventory = await _read_gpus(partial(asked.required, nvidia_smi), memory)
        if not inventory.gpus:
            return evolve(inventory, read_at=now())
        query = "--query-compute-apps=" + ",".join(PROCESS_QUERY)
        processes = parse_processes(*await asked.required(nvidia_smi, query, _FORMAT))
    except _OutOfTime:
        return Inventory(
            InventoryStatus.ERROR,
            error=InventoryError.TIMEOUT,
            detail=f"nvidia-smi did not end within {timeout:g} s",
            read_at=now(),
        )
    except _NotStarted as error:
        return _missing(str(error), now())
    # What decides who may have a card is this old; the calls that follow may take a while.
    inventory = evolve(inventory, read_at=now())
    optional = partial(asked.optional, nvidia_smi)
    same = previous if previous is not None and _same_cards(previous, inventory) else None
    inventory = with_recovery(inventory, await _recovery(optional, same))
    inventory = evolve(inventory, mig_instances=await _slices(optional, inventory, same))
    inventory = with_processes(inventory, processes)
    if same is not None:
        return evolve(inventory, topology=same.topology)
    return evolve(inventory, topology=await _topology(optional, inventory, sysfs))


def _same_cards(one: Inventory, other: Inventory) -> bool:
    def cards(inventory: Inventory) -> object:
        return inventory.driver_version, [(gpu.index, gpu.uuid, gpu.mig_enabled) for gpu in inventory.gpus]

    return cards(one) == cards(other)


async def _recovery(optional: _Optional, same: Inventory | None) -> Mapping[str, str | None]:
    text = await optional("--query-gpu=" + ",".join(RECOVERY_QUERY), _FORMAT)
    actions = parse_recovery(text) if text is not None else {}
    # A card that was no good does not become healthy by a question that fails.
    before = {gpu.uuid: gpu.recovery_action for gpu in same.gpus} if same is not None else {}
    return {**before, **actions}


async def _slices(optional: _Optional, inventory: Inventory, same: Inventory | None) -> tuple[MigInstance, ...]:
    if not any(gpu.mig_enabled for gpu in inventory.gpus):
        return ()
    text = await optional("-L")
    listed = mig.parse_list(text, inventory.gpus) if text is not None else None
    known = same.mig_instances if same is not None else ()
    if listed is None or _unsized(listed) == _unsized(known):
        return known
    text = await optional("-q", "-x") if listed else None
    if text is None:
        return listed
    # Megabytes on a large node: read where nothing waits for it.
    sizes = await trio.to_thread.run_sync(mig.memory_of, text, abandon_on_cancel=True)
    return mig.with_memory(listed, sizes, inventory.gpus)


def _unsized(instances: Sequence[MigInstance]) -> list[MigInstance]:
    return [evolve(instance, memory_total=None) for instance in instances]


async def _topology(optional: _Optional, inventory: Inventory, sysfs: str | None) -> Topology | None:
    text = await optional("topo", "-m")
    found = parse_topology(text, {gpu.index for gpu in inventory.gpus}) if text is not None else None
    if found is not None or sysfs is None:
        return found
    look = partial(sysfs_nearness, inventory.gpus, sysfs)
    return await trio.to_thread.run_sync(look, abandon_on_cancel=True)


_FORMAT = "--format=csv,noheader,nounits"

OPTIONAL_SHARE = 0.5
"""Of the time that is left, for each optional call."""


@frozen
class _Asked:
    """Calls of one survey, with one deadline for all."""

    run_tool: RunTool
    deadline: float

    async def required(self, *argv: str) -> tuple[str, str, int | None]:
        """stdout, stderr and exit code. Raises _OutOfTime or _NotStarted."""
        return await self._call(argv, self.deadline - trio.current_time())

    async def optional(self, *argv: str) -> str | None:
        """What a call prints that nothing depends on, whatever its exit code is: a lost card changes that. None when
        it took too long."""
        try:
            stdout, _, _ = await self._call(argv, (self.deadline - trio.current_time()) * OPTIONAL_SHARE)
        except (_OutOfTime, _NotStarted):
            return None
        return stdout

    async def _call(self, argv: Sequence[str], seconds: float) -> tuple[str, str, int | None]:
        if seconds <= 0:
            raise _OutOfTime
        answer = await self.run_tool(argv, timeout=seconds)
        if answer.timed_out:
            # What came before the limit is no inventory: rows may be cut or missing.
            raise _OutOfTime
        stdout, stderr = (data.decode("utf-8", "replace") for data in (answer.stdout, answer.stderr))
        if answer.code in _NOT_STARTED and not stdout.strip():
            raise _NotStarted(_ERRNO.sub("", " ".join(stderr.split()))[:300])
        return stdout, stderr, answer.code


class _Ask(Protocol):
    async def __call__(self, *arguments: str) -> tuple[str, str, int | None]: ...


class _Optional(Protocol):
    async def __call__(self, *arguments: str) -> str | None: ...


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


def _missing(detail: str, read_at: float) -> Inventory:
    return Inventory(InventoryStatus.ERROR, error=InventoryError.COMMAND_MISSING, detail=detail, read_at=read_at)
