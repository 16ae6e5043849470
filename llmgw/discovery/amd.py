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

_CARD = re.compile(r"card(\d{1,3})", re.ASCII)
_MIB = 1 << 20


def parse_rocm(stdout: str) -> tuple[OtherGpu, ...]:
    """The cards in the order of their numbers; empty for a text that is none."""
    start = stdout.find("{")
    try:
        # Warnings may stand before the object.
        found = json.loads(stdout[start:TEXT_MAX]) if start >= 0 else None
    except (ValueError, RecursionError):
        return ()
    if not isinstance(found, dict):
        return ()
    cards = []
    for name, values in found.items():
        match = _CARD.fullmatch(name)
        if match is not None and isinstance(values, dict):
            cards.append(_card(int(match.group(1)), values))
    return tuple(sorted(cards, key=lambda card: card.index)[:CARDS_MAX])


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
