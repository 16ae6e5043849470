"""Asks nvidia-smi, within one time limit for everything. The program is run by whoever is injected; what it says is
read in `gpus`. Nothing is raised: a survey that failed is an inventory that says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

import trio
from attrs import evolve

from llmgw.discovery.gpus import (
    CORE_QUERY,
    PROCESS_QUERY,
    REQUIRED_FIELDS,
    HostMemory,
    failure,
    host_memory,
    parse_gpus,
    parse_processes,
    unknown_field,
    with_processes,
)
from llmgw.domain.hardware import Inventory, InventoryError, InventoryStatus


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
) -> Inventory:
    """Read the node's GPUs. `timeout` in seconds bounds all calls together: the first that runs out ends the survey.

    `nvidia_smi` is the path of the program, None when there is none. `meminfo` stands in for the text of
    /proc/meminfo, which cards that share the host's memory need.
    """
    if nvidia_smi is None:
        return _missing("nvidia-smi is not on PATH", now())
    deadline = trio.current_time() + timeout

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
        inventory = await _read_gpus(ask, host_memory(_read_meminfo() if meminfo is None else meminfo))
        if inventory.gpus:
            query = "--query-compute-apps=" + ",".join(PROCESS_QUERY)
            inventory = with_processes(inventory, parse_processes(*await ask(query, _FORMAT)))
    except _OutOfTime:
        return Inventory(
            InventoryStatus.ERROR,
            error=InventoryError.TIMEOUT,
            detail=f"nvidia-smi did not end within {timeout:g} s",
            read_at=now(),
        )
    except _NotStarted as error:
        return _missing(str(error), now())
    return evolve(inventory, read_at=now())


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


def _missing(detail: str, at: float) -> Inventory:
    return Inventory(InventoryStatus.ERROR, error=InventoryError.COMMAND_MISSING, detail=detail, read_at=at)
