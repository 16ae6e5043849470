"""Why an instance got no GPUs, counted, in one line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from llmgw.domain.shard import ShardId
from llmgw.placement.model import Card, NodeView, Request, by_turns

MOST = 4
"""Kinds of reasons that are told; the rest is counted."""

Uses = Mapping[str, Sequence[Request]]
"""UUID of a card -> who has it, or has it reserved."""
Fitting = Callable[[Request, str], frozenset[int]]
"""Groups of equal cards of which a node, by its name, has enough for one share of a request."""


def explain(requests: Iterable[Request], nodes: Sequence[NodeView], uses: Uses, fitting: Fitting) -> dict[ShardId, str]:
    """For each request what was wanted, and what stands in the way: per GPU on one node, per node on several."""
    told: dict[object, str] = {}
    reasons: dict[ShardId, str] = {}
    for request in requests:
        if request.pinned:
            reasons[request.id] = _explain_pins(request, nodes, uses)
            continue
        # Replicas ask for the same, and a thousand nodes are many to look at for each of them.
        where = tuple(sorted(request.where.items()))
        same = (request.gpus, request.nodes, request.classes, request.one_class, request.memory, request.share, where)
        if same not in told:
            told[same] = _explain(request, nodes, uses, fitting)
        reasons[request.id] = told[same]
    return reasons


def _explain(request: Request, nodes: Sequence[NodeView], uses: Uses, fitting: Fitting) -> str:
    wanted = _wanted(request)
    if request.gpus % request.nodes:
        return f"{wanted}: {request.gpus} GPUs are no equal shares for {request.nodes} nodes"
    if not nodes:
        return f"{wanted}: there are no nodes"
    if len(nodes) == 1 and request.nodes == 1:
        node = nodes[0]
        if node.why_not is None and not node.cards:
            return f"{wanted}: this node has no GPU; gpus = 0 runs it on the CPU"
        most = _most_there(request, node)
        only = f"this node has only {most}: " if node.why_not is None and most < request.gpus else ""
        return f"{wanted}: {_of_node(request, node) or only + _of_cards(request, node, uses)}"
    if request.nodes > len(nodes):
        return f"{wanted}: there {'is 1 node' if len(nodes) == 1 else f'are {len(nodes)} nodes'}"
    counts: Counter[str] = Counter()
    fit: dict[str, frozenset[int]] = {}
    for node in nodes:
        fit[node.name] = fitting(request, node.name)
        counts["enough free" if fit[node.name] else _of_node(request, node) or _short(request, node)] += 1
    told = [f"{count} node{'s' * (count > 1)}: {text}" for text, count in _most_first(counts)]
    if request.nodes > 1:
        # First, since it is what stands in the way where single nodes have enough.
        told = [*_of_islands(request, nodes, fit), *told] if any(fit.values()) else told
    return f"{wanted}: {_joined(told, '; ')}"


def _most_there(request: Request, node: NodeView) -> int:
    """How many cards of the node would do, were all of them free."""
    fitting = [
        card.gpu_class
        for card in node.cards
        if (card.gpu_class in request.classes if request.classes else not card.is_slice)
    ]
    if not request.one_class:
        return len(fitting)
    return max(Counter(fitting).values(), default=0)


def _wanted(request: Request) -> str:
    size = request.gpus // request.nodes
    what = f"needs {size} GPU{'s' * (size > 1)}"
    if request.classes:
        what += f" of class {' or '.join(request.classes)}"
    elif size > 1 and request.one_class:
        what += " of one class"
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


def _of_cards(request: Request, node: NodeView, uses: Uses) -> str:
    counts: Counter[str] = Counter()
    for card in node.cards:
        counts[_of_card(request, card, uses)] += 1
    return _joined([f"{count} {text}" for text, count in _most_first(counts)])


def _of_card(request: Request, card: Card, uses: Uses) -> str:
    if card.why_not is not None:
        return card.why_not
    if request.classes and card.gpu_class not in request.classes and not request.pinned:
        return f"of class {card.gpu_class or 'unknown'}"
    if card.is_slice and not request.pinned:
        if not request.classes:
            return "MIG, given only by name"
        if request.gpus > 1:
            return "MIG, given only one by one"
    users = [user for user in uses.get(card.uuid, ()) if user.id != request.id and not by_turns(user, request)]
    if request.memory is not None:
        if card.usable_memory is None:
            return "of unknown memory"
        if card.usable_memory < request.memory:
            return f"with only {_gibibytes(card.usable_memory)}"
    names = ", ".join(sorted({user.id.name for user in users}))
    if request.share and all(user.share and user.memory is not None for user in users):
        left = (card.usable_memory or 0) - sum(user.memory or 0 for user in users)
        if request.memory is not None and left < request.memory:
            return f"too full beside {names}"
        users = []
    if not users:
        return f"free {card.gpu_class or 'of unknown class'}"
    reserved = all(user.pinned and not user.running for user in users)
    return f"{'reserved for' if reserved else 'used by'} {names}"


def _short(request: Request, node: NodeView) -> str:
    """One node of many in a few words."""
    classes = sorted({card.gpu_class for card in node.cards if card.gpu_class is not None and not card.is_slice})
    if request.classes:
        classes = sorted({card.gpu_class for card in node.cards if card.gpu_class in request.classes})
    if not classes:
        return f"no {' or '.join(request.classes) or 'whole GPUs'}"
    return f"not enough free {' or '.join(classes)}"


def _of_islands(request: Request, nodes: Sequence[NodeView], fit: Mapping[str, frozenset[int]]) -> list[str]:
    islands: dict[str, Counter[int]] = {}
    for node in nodes:
        for island in node.islands:
            islands.setdefault(island, Counter()).update(fit[node.name])
    if not islands:
        return ["no node is on a fabric that others are on"]
    few = [island for island in sorted(islands) if max(islands[island].values(), default=0) < request.nodes]
    if len(few) > MOST // 2:
        return [f"{len(few)} islands have too few nodes with enough free"]
    return [f"island {island} has too few nodes with enough free" for island in few]


def _explain_pins(request: Request, nodes: Sequence[NodeView], uses: Uses) -> str:
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
            told.append(f"GPU {name}: {text}")
    if len(set(request.pinned)) < len(request.pinned):
        told.append("it names a GPU twice")
    return _joined(told, "; ") or "the GPUs that it names are on several nodes"


def _most_first(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def _joined(told: list[str], separator: str = ", ") -> str:
    shown = told[:MOST]
    if len(told) > MOST:
        shown.append(f"{len(told) - MOST} more")
    return separator.join(shown)


def _gibibytes(mebibytes: int) -> str:
    return f"{mebibytes / 1024:.1f} GiB"
