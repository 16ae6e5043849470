"""Why an instance got no GPUs, counted, in one line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from llmgw.placement.model import Card, NodeView, Request

MOST = 4
"""Kinds of reasons that are told; the rest is counted."""


def explain(request: Request, nodes: Sequence[NodeView], uses: Mapping[str, Sequence[Request]]) -> str:
    """What was wanted, and what stands in the way: per GPU on one node, per node on several."""
    if request.pinned:
        return _explain_pins(request, nodes, uses)
    wanted = _wanted(request)
    if not nodes:
        return f"{wanted}: there are no nodes"
    if len(nodes) == 1:
        node = nodes[0]
        return f"{wanted}: {_of_node(request, node) or _of_cards(request, node, uses)}"
    counts: Counter[str] = Counter()
    for node in nodes:
        counts[_of_node(request, node) or _short(request, node, uses)] += 1
    told = [f"{count} node{'s' * (count > 1)}: {text}" for text, count in _most_first(counts)]
    if request.nodes > 1:
        fitting = {node.name for node in nodes if not _of_node(request, node) and _fits(request, node, uses)}
        told += _of_islands(request, nodes, fitting)
    return f"{wanted}: {_joined(told, '; ')}"


def _wanted(request: Request) -> str:
    size = request.gpus // request.nodes
    what = f"needs {size} GPU{'s' * (size > 1)}"
    if request.classes:
        what += f" of class {' or '.join(request.classes)}"
    if request.memory is not None:
        what += f" with {_gibibytes(request.memory)} free"
    if request.nodes > 1:
        what += f" on each of {request.nodes} nodes of one island"
    return what


def _of_node(request: Request, node: NodeView) -> str | None:
    """Why the whole node is out, if it is."""
    if node.why_not is not None:
        return node.why_not
    for key, values in request.where.items():
        if node.labels.get(key) not in values:
            return f"{key} is not {' or '.join(values)}"
    return None if node.cards else "no GPUs"


def _of_cards(request: Request, node: NodeView, uses: Mapping[str, Sequence[Request]]) -> str:
    counts: Counter[str] = Counter()
    for card in node.cards:
        counts[_of_card(request, card, uses)] += 1
    return _joined([f"{count} {text}" for text, count in _most_first(counts)])


def _of_card(request: Request, card: Card, uses: Mapping[str, Sequence[Request]]) -> str:
    if card.why_not is not None:
        return card.why_not
    if request.classes and card.gpu_class not in request.classes:
        return f"of class {card.gpu_class or 'unknown'}"
    if card.is_slice and not request.classes:
        return "MIG slice that nobody named"
    users = [user for user in uses.get(card.uuid, ()) if user.id != request.id]
    if request.memory is not None:
        if card.usable_memory is None:
            return "of unknown memory"
        if card.usable_memory < request.memory:
            return f"with only {_gibibytes(card.usable_memory)}"
    if not users:
        return f"free {card.gpu_class or ''}".rstrip()
    names = ", ".join(sorted({user.id.name for user in users}))
    if request.share and all(user.share for user in users):
        return f"too full beside {names}"
    reserved = all(user.pinned and not user.running for user in users)
    return f"{'reserved for' if reserved else 'used by'} {names}"


def _short(request: Request, node: NodeView, uses: Mapping[str, Sequence[Request]]) -> str:
    """One node of many in a few words."""
    classes = sorted({card.gpu_class for card in node.cards if card.gpu_class is not None})
    if request.classes and not set(classes) & set(request.classes):
        return f"no {' or '.join(request.classes)}"
    if _fits(request, node, uses):
        return "enough free"
    wanted = [name for name in classes if not request.classes or name in request.classes]
    return f"not enough free {' or '.join(wanted) or 'GPUs'}"


def _fits(request: Request, node: NodeView, uses: Mapping[str, Sequence[Request]]) -> bool:
    free: Counter[str | None] = Counter(
        card.gpu_class for card in node.cards if _of_card(request, card, uses).startswith("free ")
    )
    return any(count >= request.gpus // request.nodes for count in free.values())


def _of_islands(request: Request, nodes: Sequence[NodeView], fitting: set[str]) -> list[str]:
    islands: Counter[str] = Counter()
    for node in nodes:
        for island in node.islands:
            islands[island] += node.name in fitting
    if not islands:
        return ["no node is on a fabric"]
    return [f"island {island} has too few nodes" for island in sorted(islands) if islands[island] < request.nodes]


def _explain_pins(request: Request, nodes: Sequence[NodeView], uses: Mapping[str, Sequence[Request]]) -> str:
    cards = {card.uuid: (node, card) for node in nodes for card in node.cards}
    told = []
    for uuid in request.pinned:
        if uuid not in cards:
            told.append(f"GPU {uuid} is not there")
            continue
        node, card = cards[uuid]
        text = _of_node(request, node) or _of_card(request, card, uses)
        if not text.startswith("free"):
            name = card.index if card.index is not None else card.uuid
            told.append(f"GPU {name} {_as_sentence(text)}")
    return _joined(told, "; ") or "the GPUs that it names are on several nodes"


def _as_sentence(text: str) -> str:
    return text if text.startswith(("is ", "has ", "needs ")) else f"is {text}"


def _most_first(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def _joined(told: list[str], separator: str = ", ") -> str:
    shown = told[:MOST]
    if len(told) > MOST:
        shown.append(f"{len(told) - MOST} more")
    return separator.join(shown)


def _gibibytes(mebibytes: int) -> str:
    return f"{mebibytes / 1024:.1f} GiB"
