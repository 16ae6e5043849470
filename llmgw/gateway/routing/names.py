"""The names of models as one caller sees them: what is listed, and what was probably meant."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from itertools import islice

from llmgw.gateway.routing.table import Model, Table

MayUse = Callable[[str], bool]

NEAR = 3
"""Names that are offered for one that does not exist."""

ALIKE = 0.6
"""The least likeness of a name that is offered, from 0 to 1."""

COMPARED = 80
"""Characters of a name that are compared; it came from outside, and comparing costs the product of the lengths."""

CANDIDATES = 200
"""Names that it is compared with, roughly; and of these so many closely:"""
CLOSELY = 10


def models_of(table: Table) -> tuple[Model, ...]:
    """Every model once, in the file's order."""
    return tuple(model for name, model in table.models.items() if name == model.name)


def names_of(model: Model, may_use: MayUse) -> tuple[str, ...]:
    """The names under which a caller may use it. A tenant's list may name an alias alone."""
    return tuple(name for name in model.names if may_use(name))


def usable_names(table: Table, may_use: MayUse) -> list[str]:
    """All names that may be told to a caller: its own, without those of unlisted models."""
    return [name for model in models_of(table) if not model.unlisted for name in names_of(model, may_use)]


def near_names(asked: str, allowed_names: Iterable[str]) -> list[str]:
    """Up to three of the allowed names that are like the one asked for, the nearest first; case does not count, and
    `qwen3-8b` is near `Qwen/Qwen3-8B` too. Takes a few milliseconds at the worst.
    """
    word = asked[:COMPARED].lower()
    # A matcher keeps what it knows of its second word.
    whole, last = SequenceMatcher(b=word, autojunk=False), SequenceMatcher(b=_last(word), autojunk=False)
    rough = []
    for name in islice(allowed_names, CANDIDATES):
        plain = name[:COMPARED].lower()
        whole.set_seq1(plain)
        last.set_seq1(_last(plain))
        rough.append((-max(whole.quick_ratio(), last.quick_ratio()), name, plain))
    scored = []
    for _, name, plain in sorted(rough)[:CLOSELY]:
        whole.set_seq1(plain)
        last.set_seq1(_last(plain))
        likeness = max(whole.ratio(), last.ratio())
        if likeness >= ALIKE:
            scored.append((-likeness, name))
    return [name for _, name in sorted(scored)[:NEAR]]


def listing(table: Table, may_use: MayUse, now: float) -> bytes:
    """The body of `GET /v1/models`: what is ready or can be loaded by a request. `now` in seconds since the epoch.

    `created` is when the engine was launched, and now for one that is not: the field has to be there.
    """
    data = []
    for model in models_of(table):
        if model.unlisted or not (model.endpoints or model.is_loadable):
            continue
        names = names_of(model, may_use)
        if not names:
            continue
        launched = [s.status.launched_at for s in model.standings if s.status.launched_at is not None]
        data.append(
            {
                "id": names[0],
                "object": "model",
                "created": int(min(launched, default=now)),
                "owned_by": "llmgw",
                "llmgw": {"state": model.word, "aliases": list(names[1:])},
            }
        )
    return json.dumps({"object": "list", "data": data}, ensure_ascii=False, separators=(",", ":")).encode()


def _last(name: str) -> str:
    return name.rpartition("/")[2]
