"""`llmgw explain`: type, default and meaning of a key or table, from the schema."""

from __future__ import annotations

import textwrap
from typing import Any

from llmgw.config.kinds import closest
from llmgw.config.schema import EFFECT_WORDS, FILE, TABLES, Key, Table, plain

WIDTH = 100


def explain(name: str) -> str:
    """Text about a table (`shard`), a key (`shard.load_timeout`), or for an empty name about the whole file.

    A bare key is found in every table that has it. For an unknown name the text says so and suggests others.
    """
    tables, keys = find(name)
    if keys:
        return "\n".join(_key_text(table, key) for table, key in keys)
    if tables:
        return "\n".join(_table_text(table) for table in tables)
    known = [t.title for t in TABLES if t.title] + [f"{t.title}.{k.name}" for t in TABLES if t.title for k in t.keys]
    meant = closest(name, [*known, *{k.name for t in TABLES for k in t.keys}])
    hint = f"did you mean {meant}?" if meant else "llmgw explain lists all tables"
    return f"there is no key or table {name}; {hint}\n"


def explain_json(name: str) -> list[dict[str, Any]]:
    """The same as data; empty for an unknown name."""
    tables, keys = find(name)
    pairs = keys or [(table, key) for table in tables for key in table.keys]
    return [
        {
            "table": table.title,
            "key": key.name,
            "type": plain(key.kind.text),
            "default": plain(key.default_shown),
            "required": key.required,
            "meaning": plain(key.meaning),
            "rule": plain(key.rule),
            "reload": EFFECT_WORDS[key.effect],
        }
        for table, key in pairs
    ]


def find(name: str) -> tuple[list[Table], list[tuple[Table, Key]]]:
    """Tables and keys that a name means; brackets are ignored."""
    wanted = name.strip().strip("[]").strip()
    exact = [table for table in TABLES if table.title == wanted]
    if exact:
        return exact, []
    head, _, last = wanted.rpartition(".")
    if head:
        return [], [(t, t.by_name[last]) for t in TABLES if t.title == head and last in t.by_name]
    # The tables of defaults repeat the keys of a shard.
    places = [t for t in TABLES if not t.title.startswith("defaults")]
    return [], [(t, t.by_name[last]) for t in places if last in t.by_name]


def _key_text(table: Table, key: Key) -> str:
    title = f"{table.title}.{key.name}" if table.title else key.name
    lines = [f"{title}   {plain(key.kind.text)}", f"  default: {plain(key.default_shown)}"]
    lines += textwrap.wrap(plain(key.meaning), WIDTH, initial_indent="  ", subsequent_indent="  ")
    if key.rule:
        lines += textwrap.wrap(plain(key.rule), WIDTH, initial_indent="  allowed: ", subsequent_indent="  ")
    lines.append(f"  changed: {EFFECT_WORDS[key.effect]}")
    return "\n".join(lines) + "\n"


def _table_text(table: Table) -> str:
    brackets = ("[[", "]]") if table.array else ("[", "]")
    head = f"{brackets[0]}{table.title}{brackets[1]}" if table is not FILE else "llmgw.toml"
    lines = [head, *textwrap.wrap(plain(table.meaning), WIDTH, initial_indent="  ", subsequent_indent="  ")]
    width = max(len(key.name) for key in table.keys)
    for key in table.keys:
        what = f"{plain(key.kind.text)}, {plain(key.default_shown)}"
        lines.append(f"  {key.name:<{width}}  {what if len(what) <= 70 else what[:69] + '…'}")
    if table is FILE:
        lines.append("  tables: " + ", ".join(t.title for t in TABLES if t.title))
    return "\n".join(lines) + "\n"
