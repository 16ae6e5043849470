"""Cards of AMD out of `rocm-smi --json`: listed, not placed on. Pure; nothing here raises.

Keys differ between releases in case and spelling (`Card series`, `Card Series`), so they are compared without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llmgw.domain.display import neutralise
from llmgw.domain.hardware import OtherGpu

QUERY = ("--showproductname", "--showmeminfo", "vram", "--showbus", "--json")
TEXT_MAX = 1 << 20
CARDS_MAX = 64

_CARD = re.compile(r"card(\d{1,3})", re.ASCII | re.IGNORECASE)
_START = re.compile(r"^\s*\{", re.MULTILINE)
_MIB = 1 << 20


def parse_rocm(stdout: str) -> tuple[OtherGpu, ...] | None:
    """The cards in the order of their numbers; None for a text that is no answer."""
    # Warnings may stand before and behind the object.
    start = _START.search(stdout[:TEXT_MAX])
    if start is None:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(stdout[start.end() - 1 : TEXT_MAX])
    except (ValueError, RecursionError):
        return None
    cards: dict[int, OtherGpu] = {}
    for name, values in found.items():
        match = _CARD.fullmatch(name)
        if match is not None and isinstance(values, dict):
            cards.setdefault(int(match.group(1)), _card(int(match.group(1)), values))
    return tuple(cards[index] for index in sorted(cards)[:CARDS_MAX])


def _card(index: int, values: Mapping[str, Any]) -> OtherGpu:
    texts = {key.lower(): value.strip() for key, value in values.items() if isinstance(value, str)}

    def text(*keys: str) -> str | None:
        value = next((texts[key] for key in keys if texts.get(key) not in (None, "", "N/A")), None)
        return None if value is None else neutralise(value[:200])

    return OtherGpu(
        vendor="amd",
        index=index,
        name=text("card series", "card model", "device name") or "unknown",
        bus_id=text("pci bus") or "",
        memory_total=_mebibytes(text("vram total memory (b)")),
        memory_used=_mebibytes(text("vram total used memory (b)")),
        architecture=text("gfx version"),
    )


def _mebibytes(value: str | None) -> int | None:
    return int(value) // _MIB if value is not None and re.fullmatch(r"[0-9]{1,18}", value) else None
