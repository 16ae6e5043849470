"""Hides secrets in the text of files, so that an error message can show the line it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from llmgw.config.document import Document
from llmgw.config.kinds import Entries, Kind, Many, SecretKind
from llmgw.config.schema import FILE, Record, Records, Table
from llmgw.domain.problem import Path
from llmgw.domain.secret_names import hide_keys, line_sounds_secret, sounds_secret

REFERENCES = ("env", "file", "credential", "sha256")
"""Words of a secret table whose values are not the secret itself."""

_LONG_WORD = re.compile(r"[^\s,\[\]{}]{8,}")
_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
"""A value that only says where the secret is."""


def masked_text(doc: Document) -> str:
    """The text with every secret value replaced by stars of the same length, so that columns stay."""
    if doc.problems:
        return hide_keys(_masked_blindly(doc.text))
    text = doc.text
    spans = []
    for path in _secret_paths(doc.raw, FILE, ()):
        span = doc.positions.spans.get(path)
        if span is not None:
            spans.append((span.start, span.end))
    for start, end in sorted(spans, reverse=True):
        text = text[:start] + re.sub(r"[^\n]", "*", text[start:end]) + text[end:]
    return hide_keys(text)


def _masked_blindly(text: str) -> str:
    """For a text that is no TOML: all longer strings, and everything behind `=` on a line that sounds like a secret."""
    return "\n".join(_masked_line(line) for line in text.split("\n"))


def _masked_line(line: str) -> str:
    if line_sounds_secret(line):
        key, equals, rest = line.partition("=")
        line = key + equals + re.sub(r"\S", "*", rest)
    has_quotes = any(quote in line for quote in "\"'")
    if not has_quotes and "=" not in line and line.lstrip().startswith("["):
        # The head of a table. Every other line may be the value of a key on an earlier one.
        return line
    # A slip shifts which quotes belong together, or loses them, so every longer word of a value counts as inside.
    key, equals, rest = line.partition("=")
    if not equals or any(quote in key for quote in "\"'"):
        key, equals, rest = "", "", line
    return key + equals + _LONG_WORD.sub(lambda m: "*" * len(m[0]), rest)


def _secret_paths(raw: Any, table: Table | None, path: Path) -> Iterator[Path]:
    """Paths of the values that are secrets by the schema, or by their name where the schema has no such key."""
    if not isinstance(raw, Mapping):
        return
    for name, value in raw.items():
        here = (*path, name)
        key = table.by_name.get(name) if table is not None else None
        kind: Kind | None = key.kind if key is not None else None
        if isinstance(kind, Record):
            yield from _secret_paths(value, kind.table, here)
        elif isinstance(kind, Records):
            rows = value if isinstance(value, list) else []
            for index, row in enumerate(rows):
                yield from _secret_paths(row, kind.table, (*here, index))
            if isinstance(value, Mapping):
                yield from _secret_paths(value, kind.table, here)
        elif isinstance(kind, SecretKind) or (isinstance(kind, Many) and isinstance(kind.item, SecretKind)):
            yield from _inside(value, here)
        elif isinstance(kind, Entries):
            yield from _named(value, here)
        elif name == "extra_args" and isinstance(value, list):
            yield from _words(value, here)
        elif key is None:
            # Misspelled, so nobody knows what it holds; its message does not need the value.
            yield from (p for p in _inside(value, here) if isinstance(_at(raw, p[len(path) :]), str))
        elif isinstance(value, Mapping):
            yield from _inside(value, here)


def _at(raw: Any, path: Path) -> Any:
    for step in path:
        raw = raw[step]
    return raw


def _named(value: Any, path: Path) -> Iterator[Path]:
    """`env` and `args`: what is written as a secret, and what is named like one."""
    if not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        if sounds_secret(name) or isinstance(inner, Mapping):
            yield from _inside(inner, (*path, name))


def _words(words: list[Any], path: Path) -> Iterator[Path]:
    follows = False
    for index, word in enumerate(words):
        if follows:
            yield (*path, index)
        name, equals, _ = word.partition("=") if isinstance(word, str) else ("", "", "")
        is_secret = name.startswith("-") and sounds_secret(name)
        follows = is_secret and not equals
        if is_secret and equals:
            yield (*path, index)


def _inside(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in REFERENCES:
                yield from _inside(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _inside(inner, (*path, index))
    elif not (isinstance(value, str) and _REFERENCE.fullmatch(value)):
        yield path
