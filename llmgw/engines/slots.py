"""How many requests an engine works on at a time: from its command line, else from its own answer. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from llmgw.domain.shard import EngineKind, ParallelLayout
from llmgw.engines.adapter import profile
from llmgw.engines.options import normal_name

SLOTS_MAX = 1_000_000
"""More than any engine works on; a number above it is no limit but a mistake, or somebody else's page."""

RANKS_MAX = 4096
"""Entries of SGLang's list of data-parallel ranks that are looked at."""

Source = Literal["args", "props", "server_info"]


@frozen
class Slots:
    count: int
    source: Source


def slots_in_command(kind: EngineKind, argv: Sequence[str], layout: ParallelLayout) -> Slots | None:
    """The limit that stands on the command line, whoever put it there; the last one counts, as for the engines.

    vLLM's and SGLang's are for each data-parallel copy, but SGLang divides its one among attention ranks.
    """
    known = profile(kind)
    text = None
    names = set()
    for index, word in enumerate(argv):
        if not word.startswith("-"):
            continue
        name, equals, value = word.partition("=")
        names.add(normal_name(name))
        if normal_name(name) in known.slots_options:
            text = value if equals else argv[index + 1] if index + 1 < len(argv) else None
    count = _count(text)
    if count is None:
        return None
    copies = 1 if known.slots_divided_by is not None and known.slots_divided_by in names else layout.data
    return Slots(count * copies, "args")


def slots_in_answer(kind: EngineKind, body: str) -> Slots | None:
    """The limit in the engine's answer at its profile's `slots_path`; None when there is none in it. Never raises."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    if kind is EngineKind.LLAMACPP:
        count = _count(document.get("total_slots"))
        return Slots(count, "props") if count is not None else None
    if kind is EngineKind.SGLANG:
        count = _of_ranks(document)
        return Slots(count, "server_info") if count is not None else None
    return None


def _of_ranks(document: Mapping[str, Any]) -> int | None:
    """SGLang: what each data-parallel rank has room for, which may be less than what was asked for."""
    states = document.get("internal_states")
    counts = [
        _count(state.get("effective_max_running_requests_per_dp"))
        for state in (states[:RANKS_MAX] if isinstance(states, list) else ())
        if isinstance(state, dict)
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else _count(document.get("max_running_requests"))


def _count(value: object) -> int | None:
    """A number of requests; what is none (`-1`, llama.cpp's word for its own choice) is not known."""
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else None
    if type(value) is not int or not 1 <= value <= SLOTS_MAX:
        return None
    return value
