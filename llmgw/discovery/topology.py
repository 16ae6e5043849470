"""How near GPUs and network adapters are: `nvidia-smi topo -m`, or PCI paths of sysfs. Pure; nothing here raises."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from attrs import frozen

from llmgw.discovery.gpus import LINE_MAX, LINES_MAX
from llmgw.domain.hardware import Topology

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINK = re.compile(r"NV\d{1,3}|PIX|PXB|PHB|NODE|SYS", re.ASCII)
_LEGEND = re.compile(r"\s*(NIC\d{1,3}):\s+([A-Za-z0-9_.-]{1,64})\s*", re.ASCII)
_GPU = re.compile(r"GPU(\d{1,4})", re.ASCII)
_NIC = re.compile(r"NIC\d{1,3}", re.ASCII)
# Columns that follow the devices, such as `CPU Affinity`, have a blank in their names.
_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{1,63}", re.ASCII)

COLUMNS_MAX = 256
"""Devices of a matrix that are looked at."""

NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE", "SYS")


def parse_topology(stdout: str, indexes: Collection[int] | None = None) -> Topology | None:
    """Read the matrix of `topo -m`; None for a text without one.

    Adapters are NIC0, NIC1 there and get their names from the legend below it; drivers without that legend name them
    in the columns. `indexes` are the GPUs that are known, None: all. A pair for which the two halves of the matrix say
    different things is left out.
    """
    lines = [_ANSI.sub("", line) for line in stdout.splitlines()[:LINES_MAX] if len(line) <= LINE_MAX]
    start = next((i for i, line in enumerate(lines) if _GPU.match(line.strip())), None)
    if start is None:
        return None
    columns = _columns(lines[start])
    names = {match.group(1): match.group(2) for line in lines if (match := _LEGEND.fullmatch(line))}
    links: dict[tuple[int, int], str | None] = {}
    nearest: dict[int, str] = {}
    for line in lines[start + 1 : start + 1 + COLUMNS_MAX]:
        cells = [cell.strip() for cell in line.split("\t")]
        row = _number(cells[0])
        if row is None or (indexes is not None and row not in indexes):
            continue
        ways: list[tuple[int, int, str]] = []
        for order, (column, cell) in enumerate(zip(columns, cells[1:], strict=False)):
            if not _LINK.fullmatch(cell):
                continue
            other = _number(column)
            if other is None:
                name = names.get(column) if _NIC.fullmatch(column) else column
                if name is not None and cell in NEAREST_FIRST and _DEVICE.fullmatch(name):
                    ways.append((NEAREST_FIRST.index(cell), order, name))
            elif other != row and (indexes is None or other in indexes):
                pair = (min(row, other), max(row, other))
                links[pair] = cell if links.get(pair, cell) == cell else None
        if ways:
            nearest[row] = min(ways)[2]
    agreed = {pair: link for pair, link in links.items() if link is not None}
    return Topology(agreed, nearest) if agreed or nearest else None


def _columns(header: str) -> list[str]:
    cells = [cell.strip() for cell in header.split("\t")[: COLUMNS_MAX + 1]]
    return cells[next(i for i, cell in enumerate(cells) if cell) :]


def _number(cell: str) -> int | None:
    match = _GPU.fullmatch(cell)
    return int(match.group(1)) if match else None


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
    # Both hang below one bridge. A switch is two of them on the way to a device (its own port and one for each device),
    # so four steps lead through a single switch, and more through several.
    steps = len(one.path) + len(other.path) - 2 * shared
    return "PIX" if steps <= 4 else "PXB"


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
