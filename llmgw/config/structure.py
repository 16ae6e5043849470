"""Raw tables in, attrs classes of the schema out: strict, and with everything that is wrong.

cattrs does the walking; each key is read by its own kind, since the default hooks convert (`"4"` becomes 4, a string
becomes the list of its letters). A table with mistakes is structured again without the faulty keys, so that later
checks see all that is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cattrs
from attrs import evolve, frozen
from cattrs.errors import AttributeValidationNote, ClassValidationError, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, override

from llmgw.config.kinds import Raw, Refusal, Refused, closest, described
from llmgw.config.schema import (
    DEFAULTS,
    ENGINE_DEFAULTS,
    FILE,
    NOT_TAKEN,
    SHARD,
    TABLES,
    Record,
    Records,
    Table,
    why_not_in_defaults,
)
from llmgw.domain.problem import Path


@frozen
class Fault:
    """A refusal with the table it was found in; `refusal.path` leads from the root of the document."""

    refusal: Refusal
    table: Table


class _Nested(Exception):
    """What went wrong in a table inside a table, with the way to it."""

    def __init__(self, parts: list[tuple[Path, Exception]]) -> None:
        super().__init__(f"{len(parts)} nested tables")
        self.parts = parts


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True)
    for table in reversed(TABLES):  # inner tables first: the outer ones' functions look them up
        overrides = {}
        for key in table.keys:
            kind = key.kind
            if isinstance(kind, Record):
                hook = _record_hook(converter, kind.table)
            elif isinstance(kind, Records):
                hook = _records_hook(converter, kind.table)
            else:
                hook = _value_hook(kind.read)
            overrides[key.name] = override(struct_hook=hook)
        structure = make_dict_structure_fn(
            table.cls,
            converter,
            _cattrs_forbid_extra_keys=True,
            **overrides,  # type: ignore[arg-type]
        )
        converter.register_structure_hook(table.cls, structure)
    return converter


def _value_hook(read: Any) -> Any:
    return lambda raw, _: read(raw)


def _record_hook(converter: cattrs.Converter, table: Table) -> Any:
    def hook(raw: Raw, _: Any) -> Any:
        if not isinstance(raw, dict):
            hint = f"write [{table.title}] once, with single brackets" if isinstance(raw, list) else None
            raise Refused(Refusal("wrong-type", f"expected a table, got {described(raw)}", hint))
        return converter.structure(raw, table.cls)

    return hook


def _records_hook(converter: cattrs.Converter, table: Table) -> Any:
    def hook(raw: Raw, _: Any) -> Any:
        if isinstance(raw, dict):
            raise Refused(*_as_array(raw, table))
        if not isinstance(raw, list):
            raise Refused(Refusal("wrong-type", f"expected tables [[{table.title}]], got {described(raw)}"))
        values = []
        parts: list[tuple[Path, Exception]] = []
        for index, element in enumerate(raw):
            if not isinstance(element, dict):
                message = f"expected a table [[{table.title}]], got {described(element)}"
                parts.append(((index,), Refused(Refusal("wrong-type", message))))
                continue
            try:
                values.append(converter.structure(element, table.cls))
            except ClassValidationError as error:
                parts.append(((index,), error))
        if parts:
            raise _Nested(parts)
        return tuple(values)

    return hook


def _as_array(raw: dict[str, Raw], table: Table) -> Iterator[Refusal]:
    """`[shard.qwen2.5]` parses without error as tables in tables: say what it is and what was meant."""
    nested = {key: value for key, value in raw.items() if key not in table.by_name and isinstance(value, dict)}
    if not nested:
        yield Refusal("not-an-array", f"[{table.title}] is a single table", f"write [[{table.title}]]", at_key=True)
    for key, value in nested.items():
        yield _dotted(key, value, table, (key,))


def _dotted(key: str, value: Raw, table: Table, path: Path) -> Refusal:
    parts = [key]
    while isinstance(value, dict) and len(value) == 1:
        inner, value = next(iter(value.items()))
        if not isinstance(value, dict) or inner in table.by_name:
            break
        parts.append(inner)
    name = ".".join(parts)
    chain = " with a table ".join(f'"{part[:60]}"' for part in parts)
    message = f"[{table.title}.{name[:80]}] makes a table {chain}"
    return Refusal(
        "not-an-array", message, f'write [[{table.title}]] with name = "{name[:80]}"', (*path, *parts[1:]), True
    )


_CONVERTER = _converter()


def structure(raw: dict[str, Raw]) -> tuple[Any, tuple[Fault, ...]]:
    """The whole document as an instance of `FILE.cls`, and everything wrong in it. Changes `raw`: faulty keys go."""
    found: list[Fault] | None = None
    while True:
        try:
            return _CONVERTER.structure(raw, FILE.cls), tuple(found or ())
        except ClassValidationError as error:
            faults = list(_flatten(error, (), FILE))
        if found is None:
            found = faults
        # What only shows up now follows from what was cut away; it is cut too, but not told.
        for fault in faults:
            _prune(raw, fault.refusal.path)


def _flatten(error: Exception, path: Path, table: Table) -> Iterator[Fault]:
    if isinstance(error, ClassValidationError):
        for inner in error.exceptions:
            name = next(
                (n.name for n in getattr(inner, "__notes__", ()) if isinstance(n, AttributeValidationNote)), None
            )
            if name is None:
                yield from _flatten(inner, path, table)
            else:
                kind = table.by_name[name].kind
                nested = kind.table if isinstance(kind, (Record, Records)) else table
                yield from _flatten(inner, (*path, name), nested)
    elif isinstance(error, _Nested):
        for more, inner in error.parts:
            yield from _flatten(inner, (*path, *more), table)
    elif isinstance(error, Refused):
        for r in error.refusals:
            yield Fault(evolve(r, path=(*path, *r.path)), table)
    elif isinstance(error, ForbiddenExtraKeysError):
        for name in sorted(error.extra_fields):
            yield Fault(_unknown(name, path, table), table)
    else:
        raise error


def _unknown(name: str, path: Path, table: Table) -> Refusal:
    here = (*path, name)
    message = f'unknown key "{name[:60]}"'
    if table is DEFAULTS or table in ENGINE_DEFAULTS.values():
        why = why_not_in_defaults(name)
        if why is not None and name not in table.by_name:
            return Refusal("not-in-defaults", f'"{name}" cannot stand in [{table.title}]', why, here, True)
    word = name.lower().replace("-", "_")
    if word in NOT_TAKEN:
        return Refusal("unknown-key", message, f"llmgw has no such thing: {NOT_TAKEN[word]}", here, True)
    known = [key.name for key in table.keys]
    foreign = {foreign.replace("-", "_"): key for foreign, key in table.foreign.items()}
    meant = foreign.get(word) or foreign.get(word.replace("_", "")) or (word if word in known else None)
    meant = meant or closest(name, known)
    if meant is None:
        return Refusal(
            "unknown-key", message, f"llmgw explain {table.title or 'FILE'} lists the keys".strip(), here, True
        )
    return Refusal("unknown-key", message, f'did you mean "{meant}"?', here, True, (*path, meant))


def unknown_table_in_shard(fault: Fault, raw: Raw) -> Fault:
    """`[shard.qwen2.5]` after a `[[shard]]` lands inside that shard: the same mistake as without one before it."""
    path = fault.refusal.path
    is_unknown = fault.table is SHARD and fault.refusal.code == "unknown-key"
    if is_unknown and isinstance(raw, dict):
        looks_like_shard = any(isinstance(value, dict) or key in SHARD.by_name for key, value in raw.items())
        if looks_like_shard:
            return Fault(_dotted(str(path[-1]), raw, SHARD, path), fault.table)
    return fault


def _prune(raw: Raw, path: Path) -> None:
    """Remove the innermost written key on `path`; a faulty element takes its whole list with it."""
    holder: Any = None
    name = ""
    at: Any = raw
    for step in path:
        if isinstance(at, dict) and isinstance(step, str) and step in at:
            holder, name = at, step
            at = at[step]
        elif isinstance(at, list) and isinstance(step, int) and step < len(at):
            at = at[step]
        else:
            break
    holder.pop(name) if holder is not None else raw.clear()
