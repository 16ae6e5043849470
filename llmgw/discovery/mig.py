"""MIG slices from nvidia-smi: names and UUIDs out of `-L`, memory out of `-q -x`. Pure; nothing here raises."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.parsers import expat

from attrs import define, evolve, field

from llmgw.discovery.classes import mig_class
from llmgw.discovery.gpus import LINE_MAX, LINES_MAX, card_uuid, mebibytes, normal_bus_id
from llmgw.domain.hardware import Gpu, MigInstance

XML_MAX = 8 << 20
"""Characters of `-q -x` that are read: 16 cards with seven slices each print about 1 MiB."""

DEPTH_MAX = 32
"""Elements inside one another; nvidia-smi has six."""
WORD_MAX = 64
"""Characters of a text that are kept."""

_GPU_LINE = re.compile(r"GPU (\d{1,4}): .*\(UUID: ([0-9A-Za-z-]{1,68})\)\s*", re.ASCII)
# Before driver 470 a slice was called MIG-GPU-<uuid of the card>/<gpu instance>/<compute instance>.
_SLICE_LINE = re.compile(
    r"\s+MIG ([0-9A-Za-z.+_]{1,32})\s+Device\s+(\d{1,3}): \(UUID: (MIG-[0-9A-Za-z/-]{1,80})\)\s*", re.ASCII
)
_SMALL = re.compile(r"\d{1,3}", re.ASCII)


def parse_list(stdout: str, gpus: Sequence[Gpu]) -> tuple[MigInstance, ...] | None:
    """The slices that `-L` lists under cards of `gpus`; memory comes from elsewhere. None: this is no such list."""
    lines = [line[:LINE_MAX] for line in stdout.splitlines()[:LINES_MAX]]
    if not any(_GPU_LINE.fullmatch(line) for line in lines):
        return None
    return tuple(_slices(lines, {gpu.uuid: gpu for gpu in gpus}))


def _slices(lines: Iterable[str], gpus: Mapping[str, Gpu]) -> Iterator[MigInstance]:
    parent: Gpu | None = None
    seen = set()
    for text in lines:
        card = _GPU_LINE.fullmatch(text)
        if card is not None:
            known = gpus.get(card_uuid(card.group(2)) or "")
            parent = known if known is not None and known.index == int(card.group(1)) else None
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

    Read as a stream without a tree, so that of a text that was cut the entries before the cut are good. Declared
    entities are refused: nvidia-smi declares none, and expanding them is how a small text becomes a large one.
    """
    # A card that dropped off has its notice before the document.
    xml = xml[max(xml.find("<"), 0) : XML_MAX]
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.EntityDeclHandler = reader.entity
    try:
        parser.Parse(xml, True)
    except (expat.ExpatError, ValueError):
        return reader.found
    except _Refused:
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
        if len(self.path) > DEPTH_MAX:
            raise _Refused
        if self.path[1:] == ["gpu"]:
            address = attributes.get("id", "")
            self.address = normal_bus_id(address) or address
        elif name == "mig_device":
            self.device = self.total = None

    def text(self, data: str) -> None:
        if len(self.word) < WORD_MAX:
            self.word += data[:WORD_MAX]

    def end(self, name: str) -> None:
        word, inside = self.word.strip(), self.path[-3:]
        if inside[1:] == ["mig_device", "index"]:
            self.device = int(word) if _SMALL.fullmatch(word) else None
        elif inside == ["mig_device", "fb_memory_usage", "total"]:
            self.total = mebibytes(word)
        elif name == "mig_device" and self.device is not None and self.address:
            self.found[self.address, self.device] = self.total
        elif self.path[1:] == ["gpu"]:
            self.address = ""
        self.path.pop()
        self.word = ""

    def entity(self, *_: object) -> None:
        raise _Refused
