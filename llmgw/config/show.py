"""The merged configuration as llmgw understands it: `llmgw config show`, and `GET /v1/config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmgw.config.kinds import Kind
from llmgw.config.model import Config, NodeConfig, SupervisorConfig
from llmgw.config.reading import Place
from llmgw.config.schema import NODE, SUPERVISOR, Table
from llmgw.config.toml_text import assignment, key_text
from llmgw.config.written import Setting, Written
from llmgw.domain.shard import UNSET, Secret

MASK = "***"


def show_tree(
    file: Written, shards: Sequence[Written], node: NodeConfig, supervisor: SupervisorConfig
) -> tuple[dict[str, Any], dict[str, str]]:
    """TOML values of everything with defaults written out, and where each written key stands, by dotted path."""
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, table, resolved in (("node", NODE, node), ("supervisor", SUPERVISOR, supervisor)):
        written = file.tables.get(name)
        tree[name] = {
            key.name: key.kind.show(value) for key in table.keys if (value := getattr(resolved, key.name)) is not None
        }
        tree[name].pop("labels", None)
        labels = {k: v for k, v in node.labels.items() if k != "node"}
        if name == "node" and labels:
            tree[name]["labels"] = labels
        if written is not None:
            origins.update(_origins(written, name))
    for name in ("gateway", "cluster"):
        if name in file.tables:
            tree[name] = _shown(file.tables[name])
            origins.update(_origins(file.tables[name], name))
    if shards:
        tree["shard"] = [_shown(written) for written in shards]
        for index, written in enumerate(shards):
            origins.update(_origins(written, f"shard.{index}"))
    return tree, origins


def _shown(written: Written) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in written.table.keys:
        if key.name in written.tables:
            found[key.name] = _shown(written.tables[key.name])
        elif key.name in written.arrays:
            found[key.name] = [_shown(row) for row in written.arrays[key.name]]
        elif key.name in written.settings:
            found[key.name] = _value(key.kind, written.settings[key.name].value)
        elif key.default is not None and not _is_table(written.table, key.name):
            found[key.name] = key.default
    return {name: value for name, value in found.items() if value not in ({}, [])}


def _is_table(table: Table, name: str) -> bool:
    return hasattr(table.by_name[name].kind, "table")


def _value(kind: Kind, value: Any) -> Any:
    if isinstance(value, Secret):
        return MASK
    if value is UNSET:
        return {"unset": True}
    if isinstance(value, Mapping) and all(isinstance(inner, Setting) for inner in value.values()):
        item = getattr(kind, "item", kind)
        return {name: _value(item, inner.value) for name, inner in value.items()}
    return None if value is None and kind.text == "secret" else kind.show(value)


def _origins(written: Written, prefix: str) -> Iterator[tuple[str, str]]:
    for name, setting in written.settings.items():
        yield f"{prefix}.{name}", setting.place.exact
        if isinstance(setting.value, Mapping):
            for entry, inner in setting.value.items():
                place: Place = inner.place
                yield f"{prefix}.{name}.{entry}", place.exact
    for name, table in written.tables.items():
        yield from _origins(table, f"{prefix}.{name}")
    for name, rows in written.arrays.items():
        for index, row in enumerate(rows):
            yield from _origins(row, f"{prefix}.{name}.{index}")


SUBTABLES = ("labels", "env", "args", "where", "tls", "rate")
"""Tables that get a header of their own; smaller ones stay on one line."""


def show_config(config: Config, *, origins: bool = False) -> str:
    """The merged configuration as TOML; `origins` adds the place of each written value as a comment."""
    lines: list[str] = []
    for name, value in config.shown.items():
        lines += _table(value, name, name, config.origins if origins else None)
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(value: Any, header: str, path: str, origins: Mapping[str, str] | None) -> Iterator[str]:
    if isinstance(value, list):
        for index, row in enumerate(value):
            yield from ("", f"[[{header}]]")
            yield from _body(row, header, f"{path}.{index}", origins)
    else:
        yield from ("", f"[{header}]")
        yield from _body(value, header, path, origins)


def _body(table: Mapping[str, Any], header: str, path: str, origins: Mapping[str, str] | None) -> Iterator[str]:
    later = []
    for name, value in table.items():
        is_rows = isinstance(value, list) and value and isinstance(value[0], dict) and name in ("band", "tenant")
        if is_rows or (isinstance(value, Mapping) and name in SUBTABLES):
            later.append((name, value))
            continue
        origin = None if origins is None else origins.get(f"{path}.{name}", "default")
        yield assignment(name, value) + (f"  # {origin}" if origin else "")
    for name, value in later:
        yield from _table(value, f"{header}.{key_text(name)}", f"{path}.{name}", origins)
