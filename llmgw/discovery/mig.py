"""MIG slices from nvidia-smi: names and UUIDs out of `-L`, memory out of `-q -x`. Pure; nothing here raises."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from xml.parsers import expat

from attrs import define, evolve, field

from llmgw.discovery.classes import mig_class
from llmgw.discovery.gpus import LINE_MAX, mebibytes, normal_bus_id
from llmgw.domain.hardware import Gpu, MigInstance

XML_MAX = 8 << 20
"""Characters of `-q -x` that are read: 16 cards with seven slices each print less than 1 MiB."""

_GPU_LINE = re.compile(r"GPU (\d{1,4}): .*\(UUID: (GPU-[0-9A-Za-z-]{1,64})\)\s*", re.ASCII)
# Before driver 470 a slice was called MIG-GPU-<uuid of the card>/<gpu instance>/<compute instance>.
_SLICE_LINE = re.compile(
    r"\s+MIG ([0-9A-Za-z.+_]{1,32})\s+Device\s+(\d{1,3}): \(UUID: (MIG-[0-9A-Za-z/-]{1,80})\)\s*", re.ASCII
)


def parse_list(stdout: str, gpus: Sequence[Gpu]) -> tuple[MigInstance, ...]:
    """The slices that `-L` lists under cards of `gpus`; memory comes from elsewhere."""
    return tuple(_slices(stdout, {gpu.index: gpu for gpu in gpus}))


def _slices(stdout: str, gpus: Mapping[int, Gpu]) -> Iterator[MigInstance]:
    parent: Gpu | None = None
    seen = set()
    for line in stdout.splitlines():
        text = line[:LINE_MAX]
        card = _GPU_LINE.fullmatch(text)
        if card is not None:
            parent = gpus.get(int(card.group(1)))
            continue
        found = _SLICE_LINE.fullmatch(text)
        if found is None:
            if text[:1].strip():
                # Some other heading: what stands below it belongs to no known card.
                parent = None
            continue
        profile, device, uuid = found.groups()
        if parent is not None and uuid not in seen:
            seen.add(uuid)
            yield MigInstance(parent.index, int(device), uuid, profile, mig_class(parent.name, profile), None)


def with_memory(
    instances: Sequence[MigInstance], memory: Mapping[tuple[str, int], int | None], gpus: Sequence[Gpu]
) -> tuple[MigInstance, ...]:
    """The slices with the memory that `memory_of` found. Those that it lacks keep None."""
    addresses = {gpu.index: normal_bus_id(gpu.bus_id) or gpu.bus_id for gpu in gpus}
    return tuple(
        evolve(instance, memory_total=memory.get((addresses.get(instance.parent_index, ""), instance.device)))
        for instance in instances
    )


def memory_of(xml: str) -> Mapping[tuple[str, int], int | None]:
    """(PCI address of the card in its normal form, device number) -> MiB, out of `-q -x`; empty for what is no XML.

    Read as a stream without a tree. Declared entities are refused: nvidia-smi declares none, and expanding them is how
    a small text becomes a large one.
    """
    if len(xml) > XML_MAX:
        return {}
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.EntityDeclHandler = reader.entity
    try:
        parser.Parse(xml, True)
    except (expat.ExpatError, _Refused, ValueError):
        # What came before the fault may be half an entry.
        return {}
    return reader.found


class _Refused(Exception):
    pass


@define
class _Reader:
    found: dict[tuple[str, int], int | None] = field(factory=dict)
    path: list[str] = field(factory=list)
    address: str = ""
    device: int | None = None
    total: int | None = None
    word: str = ""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self.path.append(name)
        self.word = ""
        if name == "gpu":
            self.address = normal_bus_id(attributes.get("id", "")) or attributes.get("id", "")
        elif name == "mig_device":
            self.device = self.total = None

    def text(self, data: str) -> None:
        self.word += data[:64]

    def end(self, name: str) -> None:
        inside = self.path[-3:]
        if inside[-2:] == ["mig_device", "index"] and self.word.strip().isdecimal():
            self.device = int(self.word.strip()[:4])
        elif inside == ["mig_device", "fb_memory_usage", "total"]:
            self.total = mebibytes(self.word.strip())
        elif name == "mig_device" and self.device is not None:
            self.found[self.address, self.device] = self.total
        self.path.pop()
        self.word = ""

    def entity(self, *_: object) -> None:
        raise _Refused
