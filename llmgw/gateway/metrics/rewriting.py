"""Pages of metrics of several engines made into one. Pure.

Each line gets the labels `shard` and `model`; lines of one family come together below one TYPE and HELP, as the format
demands. What is no line of metrics is left out: an engine can break its own series, never the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator

PAGE_MAX = 4 << 20
"""Bytes of one engine's page; vLLM's has some 100 kB."""

LINE_MAX = 4096
"""Characters of a line, and of what HELP says."""

SERIES_MAX = 20_000
"""Lines taken from one engine."""

LINES_MAX = 100_000
"""Lines taken from all engines together: some 20 MB."""

FAMILIES_MAX = 2_000
"""Families of all engines together."""

STEP = 64
"""Lines after which there may be a pause."""

_COMMENT = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.*)")
_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(?:\{(.*)\})?[ \t]*([^ \t{}]+)(?:[ \t]+-?\d+)?[ \t]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\[\\"n])*)"[ \t]*(?:,|$)')
_TYPES = frozenset({"counter", "gauge", "histogram", "summary", "untyped"})
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
_OURS = frozenset({"shard", "model"})


class _Family:
    __slots__ = ("help", "kind", "lines")

    def __init__(self) -> None:
        self.kind = ""
        self.help = ""
        self.lines: list[str] = []


class Merged:
    """Pages put together one after the other. `is_reserved(name)`: a family that llmgw has itself."""

    def __init__(self, is_reserved: Callable[[str], bool]) -> None:
        self._is_reserved = is_reserved
        self._families: dict[str, _Family] = {}
        self._taken = 0

    def add(self, shard: str, model: str, text: str) -> Iterator[None]:
        """Take one engine's page; comes up for a pause every now and then."""
        added = f'shard="{_escaped(shard)}",model="{_escaped(model)}"'
        kinds: dict[str, str] = {}
        """The types that this page tells, by the name of the family."""
        taken = 0
        for number, line in enumerate(_lines(text)):
            if number % STEP == STEP - 1:
                yield
            if len(line) > LINE_MAX:
                continue
            if line.startswith("#"):
                self._comment(line, kinds)
                continue
            row = _row(line, added)
            if row is None:
                continue
            name, written = row
            family = self._of(_family_name(name, kinds), kinds)
            if family is None:
                continue
            if taken == SERIES_MAX or self._taken == LINES_MAX:
                return
            taken += 1
            self._taken += 1
            family.lines.append(written)

    def _comment(self, line: str, kinds: dict[str, str]) -> None:
        found = _COMMENT.fullmatch(line)
        if found is None:
            return
        what, name, rest = found.groups()
        if what == "TYPE" and rest.strip() in _TYPES and name not in kinds:
            kinds[name] = rest.strip()
        elif what == "HELP" and (family := self._of(name, {})) is not None and not family.help:
            family.help = rest

    def _of(self, name: str, kinds: dict[str, str]) -> _Family | None:
        """The family of this name, if lines of the type that the page tells may go into it."""
        family = self._families.get(name)
        if family is None:
            if self._is_reserved(name) or len(self._families) >= FAMILIES_MAX:
                return None
            family = self._families[name] = _Family()
        kind = kinds.get(name, "")
        if kind and kind != family.kind:
            if family.lines or family.kind:
                # Two engines, two releases: lines of two types in one family would break the page for both.
                return None
            family.kind = kind
        return family

    def lines(self) -> Iterator[str]:
        """The one page, line by line."""
        for name, family in self._families.items():
            if not family.lines:
                continue
            if family.help:
                yield f"# HELP {name} {family.help}\n"
            yield f"# TYPE {name} {family.kind or 'untyped'}\n"
            yield from family.lines


def merged_lines(pages: Iterable[tuple[str, str, str]], is_reserved: Callable[[str], bool]) -> Iterator[str]:
    """The page of several (shard, model, text); empty pieces are good moments for a pause."""
    merged = Merged(is_reserved)
    for shard, model, text in pages:
        for _ in merged.add(shard, model, text):
            yield ""
    yield from merged.lines()


def _lines(text: str) -> Iterator[str]:
    # One after the other: a list of all lines of a large page would cost its memory twice, at once.
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end].rstrip("\r")
        start = end + 1


def _row(line: str, added: str) -> tuple[str, str] | None:
    """Name and new text of a series; None for what is none. Its time stamp is dropped: it is ours to say when."""
    found = _SERIES.fullmatch(line)
    if found is None:
        return None
    name, labels, value = found.groups()
    if not _is_number(value):
        return None
    kept = ""
    if labels and labels.strip():
        pairs = _pairs(labels.strip())
        if pairs is None:
            return None
        kept = "".join(f',{f"exported_{label}" if label in _OURS else label}="{text}"' for label, text in pairs)
    return name, f"{name}{{{added}{kept}}} {value}\n"


def _pairs(labels: str) -> list[tuple[str, str]] | None:
    pairs: list[tuple[str, str]] = []
    names = set()
    position = 0
    while position < len(labels):
        found = _LABEL.match(labels, position)
        if found is None or found[1] in names:
            return None
        names.add(found[1])
        pairs.append((found[1], found[2]))
        position = found.end()
    return pairs


def _is_number(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    # Python reads 1_0 and other scripts' digits too.
    return text.isascii() and "_" not in text and (math.isfinite(value) or text.lstrip("+-").lower() in ("inf", "nan"))


def _family_name(name: str, kinds: dict[str, str]) -> str:
    """The family to which a sample's name belongs, by the types that its page has told before."""
    if name in kinds:
        return name
    for kind, suffixes in _SUFFIXES.items():
        for suffix in suffixes:
            base = name.removesuffix(suffix)
            if base != name and kinds.get(base) == kind:
                return base
    return name


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
