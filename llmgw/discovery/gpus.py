"""Text of nvidia-smi in, facts about GPUs out. Pure: nothing here raises on any text, and no value that is missing,
cut or unreadable ever turns into 0, "free" or "healthy".

The forms follow nvidia-smi of the drivers 470 to 610: cells separated by comma and blank without quoting, error
texts on stdout, rows that may be good whatever the exit code is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from llmgw.discovery.classes import capability_of, gpu_class, is_virtual
from llmgw.domain.display import neutralise
from llmgw.domain.hardware import (
    Gpu,
    GpuFlag,
    GpuProcess,
    Inventory,
    InventoryError,
    InventoryStatus,
    LostGpu,
)

CORE_QUERY: tuple[str, ...] = (
    "index",
    "uuid",
    "name",
    "pci.bus_id",
    "memory.total",
    "memory.reserved",
    "memory.used",
    "memory.free",
    "compute_cap",
    "driver_version",
    "mig.mode.current",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "persistence_mode",
    "temperature.gpu",
    "power.draw",
    "power.limit",
)
"""Fields that every driver from 535 on knows. One unknown field fails the whole query, see `unknown_field`."""

REQUIRED_FIELDS = frozenset({"index", "uuid", "name"})
"""Without these a row says nothing."""

RECOVERY_QUERY: tuple[str, ...] = ("uuid", "gpu_recovery_action")
"""Asked apart: drivers before 550 or so do not know it, and one unknown field fails a whole query."""

PROCESS_QUERY: tuple[str, ...] = ("pid", "gpu_uuid", "used_memory")
"""Not the process name: it may hold commas, and /proc knows it better."""

BUSY_MIB = 1024
"""More used memory than this is somebody's work, although no process is listed (container, vGPU)."""

LINE_MAX = 4096
"""Characters of a line that is looked at; the longest genuine row has about 250."""
LINES_MAX = 4096
"""Lines of an answer that are looked at: rows of 16 cards with some hundred processes each."""
TEXT_MAX = 1 << 20
"""Characters of an answer with rows that are looked at."""

_NUMBER = re.compile(r"(\d{1,12})(?: MiB)?", re.ASCII)
_WATTS = re.compile(r"(\d{1,6}(?:\.\d{1,4})?)(?: W)?", re.ASCII)
_CAPABILITY = re.compile(r"(\d{1,3})\.(\d{1,3})", re.ASCII)
_ACTION = re.compile(r"[A-Za-z][A-Za-z0-9 /_-]{1,40}", re.ASCII)
_UUID = re.compile(r"GPU-[0-9A-Za-z-]{1,64}", re.ASCII)
# Jetson modules print theirs without the prefix (comments in NVIDIA/go-nvlib show it for Orin and Thor).
_BARE_UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}", re.ASCII)
_SLICE_UUID = re.compile(r"MIG-(?:(GPU-[0-9A-Za-z-]{1,64})/\d{1,3}/\d{1,3}|[0-9A-Za-z-]{1,64})", re.ASCII)
_UNKNOWN_FIELD = re.compile(r'Field "([^"]{1,100})" is not a valid field to query')
_ADDRESS = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]"
# Written as `GPU3: 0000:04:00.0` and, without an index, as `GPU 0000:04:00.0` or `GPU0000:04:00.0`.
_LOST_LINE = re.compile(rf"device handle for GPU\s*(?:(\d{{1,4}}):\s+)?({_ADDRESS})", re.ASCII)
_MEMINFO = re.compile(r"^(MemTotal|MemAvailable):\s+(\d{1,15}) kB", re.ASCII | re.MULTILINE)
_BUS_ID = re.compile(r"(?:([0-9A-Fa-f]{4}|[0-9A-Fa-f]{8}):)?([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])", re.ASCII)

# By text first, by code second: codes differ between drivers (a version mismatch is 18 on 535 and 255 on 470).
_FAILURE_TEXTS = (
    ("couldn't communicate with the nvidia driver", InventoryError.DRIVER_NOT_LOADED),
    ("couldn't find libnvidia-ml", InventoryError.LIBRARY_MISSING),
    ("driver/library version mismatch", InventoryError.DRIVER_MISMATCH),
)
_FAILURE_CODES = {
    9: InventoryError.DRIVER_NOT_LOADED,
    12: InventoryError.LIBRARY_MISSING,
    18: InventoryError.DRIVER_MISMATCH,
}


@frozen
class HostMemory:
    """The host's own memory in MiB; None is unknown."""

    total: int | None = None
    available: int | None = None


@frozen
class ProcessList:
    """Compute processes by the UUID of a card or a MIG slice. `complete` is False when anything could not be read:
    then a GPU without a process in the list may still have one."""

    by_uuid: Mapping[str, tuple[GpuProcess, ...]]
    complete: bool
    detail: str | None = None


def unknown_field(stdout: str) -> str | None:
    """The field that this driver does not know, when that is why a query failed. It names one per failed call."""
    match = _UNKNOWN_FIELD.search(stdout)
    return match.group(1) if match else None


def failure(stdout: str, stderr: str, code: int | None) -> Inventory:
    """The inventory of a call that gave no rows: which kind of failure, and the program's first line as detail."""
    lowered = (stdout + "\n" + stderr).lower()
    kind = next((kind for text, kind in _FAILURE_TEXTS if text in lowered), None)
    if kind is None:
        kind = _FAILURE_CODES.get(code if code is not None else 0, InventoryError.NVML_INIT_FAILED)
    detail = _first_line(stdout) or _first_line(stderr) or "nvidia-smi printed nothing"
    if code:
        detail = f"{detail} (exit code {code})"
    return Inventory(InventoryStatus.ERROR, error=kind, detail=detail)


def parse_gpus(
    stdout: str,
    stderr: str,
    code: int | None,
    fields: Sequence[str] = CORE_QUERY,
    *,
    host: HostMemory | None = None,
) -> Inventory:
    """Read the rows of `--query-gpu=FIELDS --format=csv,noheader,nounits`.

    Rows are read whatever the exit code is, because a card that dropped off may or may not change it. Lines that
    are neither rows nor a known notice make the inventory partial: they may be a row that was cut. `host` is
    the host's memory, for cards that share it and report no size.
    """
    lost: list[LostGpu] = []
    gpus: list[Gpu] = []
    known: set[int | str] = set()
    lines, strange = _lines(stdout, stderr)
    driver: str | None = None
    for text in lines:
        notice = _LOST_LINE.search(text)
        if notice:
            index, address = notice.groups()
            _add_lost(lost, LostGpu(int(index) if index is not None else None, address))
            continue
        row = _row(text, fields)
        gone = _unidentified(row) if row is not None else None
        if gone is not None:
            _add_lost(lost, gone)
            continue
        gpu = _gpu(row, host or HostMemory()) if row is not None else None
        if row is None or gpu is None or known & {gpu.index, gpu.uuid}:
            strange = strange or text
            continue
        gpus.append(gpu)
        known |= {gpu.index, gpu.uuid}
        driver = driver or _word(row.get("driver_version", ""))
        if GpuFlag.LOST in gpu.flags:
            _add_lost(lost, LostGpu(gpu.index, gpu.bus_id))
    if not gpus and not lost:
        return failure(stdout, stderr, code)
    complete = not lost and strange is None and code == 0
    return Inventory(
        status=InventoryStatus.OK if complete else InventoryStatus.PARTIAL,
        gpus=tuple(gpus),
        detail=None if complete else _partial_detail(lost, strange, code),
        driver_version=driver,
        lost=tuple(lost),
    )


def parse_processes(stdout: str, stderr: str, code: int | None) -> ProcessList:
    """Read the rows of `--query-compute-apps=pid,gpu_uuid,used_memory`.

    An empty answer of a call that succeeded means idle; so does one that failed for nothing but a card that dropped
    off. Rows are taken from both ends, so that a build of nvidia-smi that puts a name with commas between them does
    no harm.
    """
    found: dict[str, list[GpuProcess]] = {}
    lines, strange = _lines(stdout, stderr)
    explained = False
    for text in lines:
        if _LOST_LINE.search(text):
            explained = True
            continue
        if text.lower().startswith("no running processes"):
            continue
        cells = [cell.strip() for cell in text.split(",")]
        pid = _number(cells[0])
        uuid = next((known for cell in cells[1:-1] if (known := _card_or_slice(cell)) is not None), None)
        if pid is None or uuid is None:
            strange = strange or text
            continue
        found.setdefault(uuid, []).append(GpuProcess(pid, _number(cells[-1])))
    complete = strange is None and (code == 0 or (explained and code is not None and code > 0))
    detail = None
    if not complete:
        why = neutralise(strange[:300]) if strange is not None else _first_line(stderr) or f"exit code {code}"
        detail = f"compute processes are not known: {why}"
    return ProcessList({uuid: tuple(rows) for uuid, rows in found.items()}, complete, detail)


def with_processes(inventory: Inventory, processes: ProcessList) -> Inventory:
    """The inventory with each GPU's compute processes, and `memory_in_use` where somebody works.

    Processes on a MIG slice count for its card; those of a slice that belongs to no known card leave the list
    unknown, since any card may have them.
    """
    cards = {gpu.index: gpu.uuid for gpu in inventory.gpus}
    parents = {slice_.uuid: cards.get(slice_.parent_index) for slice_ in inventory.mig_instances}
    by_card: dict[str, list[GpuProcess]] = {}
    placed = True
    for uuid, rows in processes.by_uuid.items():
        slice_form = _SLICE_UUID.fullmatch(uuid)
        card = parents.get(uuid) or slice_form.group(1) if slice_form else uuid
        if card is None:
            placed = False
        else:
            by_card.setdefault(card, []).extend(rows)
    gpus = []
    for gpu in inventory.gpus:
        rows = tuple(by_card.get(gpu.uuid, ()))
        flags = set(gpu.flags)
        if rows or (gpu.memory_used is not None and gpu.memory_used > BUSY_MIB):
            flags.add(GpuFlag.MEMORY_IN_USE)
        gpus.append(evolve(gpu, processes=rows, flags=_ordered(flags)))
    detail = processes.detail or (None if placed else "compute processes run on a MIG slice of no known GPU")
    return evolve(
        inventory,
        gpus=tuple(gpus),
        processes_known=processes.complete and placed,
        detail=inventory.detail or detail,
    )


def parse_recovery(stdout: str) -> Mapping[str, str | None]:
    """What the driver says has to be done to each card, by UUID; None: nothing. Cards whose rows cannot be read are
    left out.
    """
    actions: dict[str, str | None] = {}
    for text in _lines(stdout, "")[0]:
        cell, comma, action = text.partition(",")
        uuid, action = card_uuid(cell), action.strip()
        if comma and uuid is not None and _ACTION.fullmatch(action) and action.lower() != "n/a":
            actions[uuid] = None if action.lower() == "none" else action
    return actions


def with_recovery(inventory: Inventory, actions: Mapping[str, str | None]) -> Inventory:
    """The inventory with these actions: one other than None means that the card is no good until that was done."""
    gpus = []
    for gpu in inventory.gpus:
        action = actions.get(gpu.uuid)
        if action is not None:
            gpu = evolve(gpu, recovery_action=action, flags=_ordered({*gpu.flags, GpuFlag.REQUIRES_RESET}))
        gpus.append(gpu)
    return evolve(inventory, gpus=tuple(gpus))


def host_memory(meminfo: str) -> HostMemory:
    """MemTotal and MemAvailable of /proc/meminfo."""
    sizes = {name: int(kib) // 1024 for name, kib in _MEMINFO.findall(meminfo)}
    return HostMemory(sizes.get("MemTotal"), sizes.get("MemAvailable"))


def normal_bus_id(text: str) -> str | None:
    """A PCI address with a domain of 8 digits in upper case, from any of the forms in use; None for another text.

    nvidia-smi writes `00000000:0C:00.0`, sysfs `0000:0c:00.0`, people often `0c:00.0`.
    """
    match = _BUS_ID.fullmatch(text)
    return f"{(match.group(1) or '').rjust(8, '0')}:{match.group(2)}".upper() if match else None


def card_uuid(text: str) -> str | None:
    """The UUID of a card in its usual form with `GPU-`, which Jetson modules leave out; None for another text."""
    if _BARE_UUID.fullmatch(text):
        return f"GPU-{text}"
    return text if _UUID.fullmatch(text) else None


# -- one row --------------------------------------------------------------------------------------------------


def _row(text: str, fields: Sequence[str]) -> Mapping[str, str] | None:
    cells = [cell.strip() for cell in text.split(",")]
    surplus = len(cells) - len(fields)
    if surplus < 0:
        return None
    if surplus and "name" in fields:
        # No cell is quoted; the name is the only one that could hold commas.
        at = list(fields).index("name")
        cells[at : at + surplus + 1] = [", ".join(cells[at : at + surplus + 1])]
    elif surplus:
        return None
    return dict(zip(fields, cells, strict=True))


def _lines(stdout: str, stderr: str) -> tuple[list[str], str | None]:
    """The lines that are looked at, and a note when there was more or less. What may have been cut is no row: a
    shortened number is a wrong one."""
    texts = stdout[:TEXT_MAX].splitlines()
    note = None
    if texts and not stdout.endswith("\n") and not _LOST_LINE.search(texts[-1]):
        note = f"{texts.pop()[:300]} (cut)"
    texts += stderr[:TEXT_MAX].splitlines()
    lines = [text for line in texts if len(line) <= LINE_MAX and (text := line.strip())]
    if (
        len(lines) > LINES_MAX
        or max(len(stdout), len(stderr)) > TEXT_MAX
        or any(len(line) > LINE_MAX for line in texts)
    ):
        note = "more text than any node has"
    return lines[:LINES_MAX], note


def _add_lost(lost: list[LostGpu], gpu: LostGpu) -> None:
    """Once for each card: it may have a notice, in which its address is shorter, beside its row."""
    address = normal_bus_id(gpu.bus_id)
    for other in lost:
        if (gpu.index is not None and gpu.index == other.index) or (
            address is not None and address == normal_bus_id(other.bus_id)
        ):
            return
    lost.append(gpu)


def _unidentified(row: Mapping[str, str]) -> LostGpu | None:
    """A card whose row has an error text where its UUID belongs: as good as lost, since nothing can name it."""
    index, uuid = _number(row.get("index", "")), row.get("uuid", "")
    if index is None or not uuid.startswith("[") or _is_not_available(uuid):
        return None
    return LostGpu(index, _address(row.get("pci.bus_id", "")))


def _gpu(row: Mapping[str, str], host: HostMemory) -> Gpu | None:
    index = _number(row.get("index", ""))
    uuid = card_uuid(row.get("uuid", ""))
    if index is None or uuid is None:
        return None
    flags = _flags(row)
    lost = GpuFlag.LOST in flags
    name = neutralise(_value(row.get("name", "")) or "")
    total = _number(row.get("memory.total", ""))
    # [N/A] in every memory cell of a card that is there: host and GPU share the memory.
    unified = total is None and not lost and _is_not_available(row.get("memory.total"))
    # A driver without the field is older than MIG.
    mig = row.get("mig.mode.current", "[N/A]")
    return Gpu(
        index=index,
        uuid=uuid,
        bus_id=_address(row.get("pci.bus_id", "")),
        name=name,
        memory_total=total,
        memory_used=_number(row.get("memory.used", "")),
        memory_free=host.available if unified else _number(row.get("memory.free", "")),
        memory_reserved=_number(row.get("memory.reserved", "")),
        compute_capability=_capability(row.get("compute_cap", "")) or capability_of(name),
        gpu_class=None if lost else gpu_class(name, host.total if unified else total),
        unified_memory=unified,
        ecc_enabled=_switch(row.get("ecc.mode.current", "")),
        # [N/A] says that the card cannot do MIG.
        mig_enabled=None if lost else False if _is_not_available(mig) else _switch(mig),
        uncorrected_ecc=_number(row.get("ecc.errors.uncorrected.volatile.total", "")),
        flags=flags,
        virtual=is_virtual(name),
        persistence_mode=_switch(row.get("persistence_mode", "")),
        temperature=_number(row.get("temperature.gpu", "")),
        power=_watts(row.get("power.draw", "")),
        power_limit=_watts(row.get("power.limit", "")),
    )


def _flags(row: Mapping[str, str]) -> tuple[GpuFlag, ...]:
    flags = set()
    for cell in row.values():
        lowered = cell.lower()
        if "gpu is lost" in lowered:
            flags.add(GpuFlag.LOST)
        elif "gpu requires reset" in lowered:
            flags.add(GpuFlag.REQUIRES_RESET)
    if _number(row.get("ecc.errors.uncorrected.volatile.total", "")):
        flags.add(GpuFlag.UNCORRECTED_ECC)
    if row.get("remapped_rows.pending") == "Yes":
        flags.add(GpuFlag.ROW_REMAP_PENDING)
    if row.get("remapped_rows.failure") == "Yes":
        flags.add(GpuFlag.ROW_REMAP_FAILURE)
    if _switch(row.get("mig.mode.current", "")):
        flags.add(GpuFlag.MIG_ENABLED)
    return _ordered(flags)


def _ordered(flags: set[GpuFlag]) -> tuple[GpuFlag, ...]:
    return tuple(flag for flag in GpuFlag if flag in flags)


def _is_not_available(cell: str | None) -> bool:
    return cell is not None and cell.strip("[]").lower() in ("n/a", "not supported")


def _value(cell: str) -> str | None:
    """The text of a cell, or None for one of the values that are no values: [N/A], [Unknown Error] and so on."""
    return None if not cell or cell.startswith("[") or cell == "N/A" else cell


def _word(cell: str) -> str | None:
    value = _value(cell)
    return None if value is None else neutralise(value[:64])


def _address(cell: str) -> str:
    """A PCI address as printed; empty for what is none (Jetson modules have no PCI address)."""
    return cell if normal_bus_id(cell) is not None else ""


def _card_or_slice(cell: str) -> str | None:
    return cell if _SLICE_UUID.fullmatch(cell) else card_uuid(cell)


def _number(cell: str) -> int | None:
    match = _NUMBER.fullmatch(cell)
    return int(match.group(1)) if match else None


def mebibytes(text: str) -> int | None:
    """`40448 MiB` or a bare number; anything else is None."""
    return _number(text)


def _watts(cell: str) -> float | None:
    match = _WATTS.fullmatch(cell)
    return float(match.group(1)) if match else None


def _capability(cell: str) -> tuple[int, int] | None:
    # A pair of integers: as text "12.0" would be below "8.9", as a float 8.10 would be 8.1.
    match = _CAPABILITY.fullmatch(cell)
    return (int(match.group(1)), int(match.group(2))) if match else None


def _switch(cell: str) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(cell)


def _first_line(text: str) -> str | None:
    return next((neutralise(line.strip()[:300]) for line in text.splitlines() if line.strip()), None)


def _partial_detail(lost: Sequence[LostGpu], strange: str | None, code: int | None) -> str:
    if lost:
        names = ", ".join(f"GPU {gpu.index}" if gpu.index is not None else f"the GPU at {gpu.bus_id}" for gpu in lost)
        return f"{names} dropped off"
    if strange is not None:
        return f"nvidia-smi also said: {neutralise(strange[:300])}"
    return f"nvidia-smi ended with exit code {code}"
