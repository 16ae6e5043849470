"""Hides secrets in the text of files, so that an error message can show the line it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from llmgw.config.document import Document
from llmgw.config.kinds import SECRET_WORD, Entries, Kind, Many, SecretKind, closest
from llmgw.config.schema import FILE, Record, Records, Table
from llmgw.domain.problem import Path

REFERENCES = ("env", "file", "credential", "sha256")
"""Words of a secret table whose values are not the secret itself."""

_LINE = re.compile(
    r"""^([ \t]*[^=\n]*?(?:key|keys|token|secret|password|passwd|credential)s?["']?[ \t]*=[ \t]*)(\S.*)$""",
    re.IGNORECASE | re.MULTILINE,
)
_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
"""A value that only says where the secret is."""


def masked_text(doc: Document) -> str:
    """The text with every secret value replaced by stars of the same length, so that columns stay."""
    if doc.problems:
        return _masked_blindly(doc.text)
    text = doc.text
    spans = []
    for path in _secret_paths(doc.raw, FILE, ()):
        span = doc.positions.spans.get(path)
        if span is not None:
            spans.append((span.start, span.end))
    for start, end in sorted(spans, reverse=True):
        text = text[:start] + re.sub(r"[^\n]", "*", text[start:end]) + text[end:]
    return text


def _masked_blindly(text: str) -> str:
    """For a text that is no TOML: everything behind a name that sounds like a secret, and lists that follow it."""
    return _LINE.sub(lambda m: m[1] + _stars(m[2]), text)


def _stars(value: str) -> str:
    if re.match(r"\{\s*(?:env|file|credential|sha256)\s*=", value) or not value.strip("[{ "):
        return value
    return "*" * len(value)


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
        elif key is None and (SECRET_WORD.search(name) or _is_meant_as_secret(name, table)):
            yield from _inside(value, here)
        elif key is None:
            yield from _secret_paths(value, table, here)
            for index, row in enumerate(value if isinstance(value, list) else []):
                yield from _secret_paths(row, table, (*here, index))


def _is_meant_as_secret(name: str, table: Table | None) -> bool:
    """A misspelled name of a key that holds a secret."""
    if table is None:
        return False
    secrets = [k.name for k in table.keys if k.kind.text.startswith(("secret", "list[secret"))]
    return closest(name, secrets) is not None


def _named(value: Any, path: Path) -> Iterator[Path]:
    """`env` and `args`: what is written as a secret, and what is named like one."""
    if not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        if SECRET_WORD.search(name) or (isinstance(inner, Mapping) and "value" in inner):
            yield from _inside(inner, (*path, name))


def _words(words: list[Any], path: Path) -> Iterator[Path]:
    follows = False
    for index, word in enumerate(words):
        if follows:
            yield (*path, index)
        name, equals, _ = word.partition("=") if isinstance(word, str) else ("", "", "")
        is_secret = name.startswith("-") and SECRET_WORD.search(name) is not None
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
