"""How near GPUs and network adapters are: `nvidia-smi topo -m`, or PCI paths of sysfs. Pure; nothing here raises."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations

from attrs import frozen

from llmgw.discovery.gpus import LINE_MAX
from llmgw.domain.hardware import Topology

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CELL = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS", re.ASCII)
_NIC = re.compile(r"\s*(NIC\d{1,3}):\s+([A-Za-z0-9_.-]{1,64})\s*", re.ASCII)
_GPU = re.compile(r"GPU(\d{1,4})", re.ASCII)

NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE", "SYS")


def parse_topology(stdout: str) -> Topology | None:
    """Read the matrix of `topo -m`; None for a text without one. Adapters are NIC0, NIC1 there and get their names
    from the legend below it.
    """
    lines = [_ANSI.sub("", line[:LINE_MAX]) for line in stdout.splitlines()]
    head = next((i for i, line in enumerate(lines) if line.strip().startswith("GPU0")), None)
    if head is None:
        head = next((i for i, line in enumerate(lines) if _GPU.match(line.strip())), None)
    if head is None:
        return None
    columns = [cell.strip() for cell in lines[head].split("\t")]
    columns = [cell for cell in columns if re.fullmatch(r"(?:GPU|NIC)\d+", cell)]
    names = {match.group(1): match.group(2) for line in lines if (match := _NIC.fullmatch(line))}
    links: dict[tuple[int, int], str] = {}
    nearest: dict[int, str] = {}
    for line in lines[head + 1 :]:
        cells = [cell.strip() for cell in line.split("\t")]
        row = _GPU.fullmatch(cells[0])
        if row is None:
            continue
        index = int(row.group(1))
        ways: list[tuple[int, int, str]] = []
        for order, (column, cell) in enumerate(zip(columns, cells[1:], strict=False)):
            if not _CELL.fullmatch(cell) or cell == "X":
                continue
            other = _GPU.fullmatch(column)
            if other is not None and int(other.group(1)) != index:
                pair = (min(index, int(other.group(1))), max(index, int(other.group(1))))
                links.setdefault(pair, cell)
            elif other is None and column in names and cell in NEAREST_FIRST:
                ways.append((NEAREST_FIRST.index(cell), order, names[column]))
        if ways:
            nearest[index] = min(ways)[2]
    return Topology(links, nearest) if links or nearest else None


@frozen
class PciPlace:
    """Where a device sits: its NUMA node (None is unknown) and the PCI addresses from the root to itself."""

    numa: int | None
    path: tuple[str, ...]


def nearness(gpus: Mapping[int, PciPlace], nics: Mapping[str, PciPlace]) -> Topology | None:
    """The same answer from PCI paths, without NVLink, where `topo -m` says nothing. `nics` in natural order."""
    links = {(a, b): _way(gpus[a], gpus[b]) for a, b in combinations(sorted(gpus), 2)}
    nearest: dict[int, str] = {}
    for index, place in gpus.items():
        ways = [(NEAREST_FIRST.index(way), n) for n, nic in enumerate(nics.values()) if (way := _way(place, nic))]
        if ways:
            nearest[index] = tuple(nics)[min(ways)[1]]
    known = {pair: way for pair, way in links.items() if way is not None}
    return Topology(known, nearest, "sysfs") if known or nearest else None


def _way(one: PciPlace, other: PciPlace) -> str | None:
    """By how many bridges two devices share: the words of `topo -m`."""
    if not one.path or not other.path:
        return None
    shared = _shared(one.path, other.path)
    if shared == 0:
        if one.numa is None or other.numa is None:
            return None
        return "NODE" if one.numa == other.numa else "SYS"
    if shared == 1:
        return "PHB"
    # Both hang below one bridge or switch; how many steps apart decides.
    steps = len(one.path) + len(other.path) - 2 * shared
    return "PIX" if steps <= 2 else "PXB"


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
