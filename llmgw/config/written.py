"""What each file wrote, with places: tables of settings, variables replaced, and several files put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import define, field, frozen

from llmgw.config.document import Document
from llmgw.config.expand import absolute, expand_variables, is_path, own_variables
from llmgw.config.kinds import Entries, Many, Refusal, SecretForm, SecretKind
from llmgw.config.reading import Place, Reading
from llmgw.config.schema import ABSENT, FILE, SHARD, Key, Record, Records, Table
from llmgw.config.secret_values import resolve_secret
from llmgw.config.structure import structure, unknown_table_in_shard
from llmgw.domain.problem import Path
from llmgw.domain.secret_names import sounds_secret
from llmgw.engines.options import normal_name


@frozen
class Setting:
    """A written value and where it stands. Of a table with free keys each entry is a setting of its own."""

    value: Any
    place: Place


@define
class Written:
    """One table as written. `broken` names keys that are wrong, and keys that a misspelled word was meant to be."""

    table: Table
    place: Place
    settings: dict[str, Setting] = field(factory=dict)
    broken: set[str] = field(factory=set)
    tables: dict[str, Written] = field(factory=dict)
    arrays: dict[str, list[Written]] = field(factory=dict)

    def value(self, name: str) -> Any:
        """The written value, else the built-in default."""
        setting = self.settings.get(name)
        return self.table.by_name[name].builtin if setting is None else setting.value

    def plain(self, name: str) -> dict[str, Any]:
        """The values of a table with free keys."""
        return {key: inner.value for key, inner in (self.value(name) or {}).items()}

    def is_usable(self, *names: str) -> bool:
        """None of these keys is wrong, so that a check of them tells something new."""
        return not self.broken.intersection(names)

    def place_of(self, name: str) -> Place:
        """Where the key stands; the table's own place when it is not written."""
        setting = self.settings.get(name)
        return self.place if setting is None else setting.place


def read_written(reading: Reading, doc: Document) -> Written:
    """Structure one document and report everything that its values get wrong by themselves."""
    structured, faults = structure(_copied(doc.raw))
    broken: dict[Path, set[str]] = {}
    for fault in faults:
        inner = _at(doc.raw, fault.refusal.path)
        refusal = unknown_table_in_shard(fault, inner).refusal
        message, hint = refusal.message, refusal.hint
        names = [step for step in refusal.path if isinstance(step, str)]
        if refusal.code == "wrong-type" and sounds_secret(names[-1]):
            expected, _, got = message.partition(", got ")  # the value may be the secret: "an integer" is enough
            message, hint = f"{expected}, got {' '.join(got.split()[:2])}", None
        reading.report(Place(doc, refusal.path), refusal.code, message, hint, at_key=refusal.at_key)
        for path in (refusal.path, refusal.also or ()):
            for length, step in enumerate(path):
                broken.setdefault(path[:length], set()).add(str(step))
    written = _Writer(reading, doc, broken).table(structured, FILE, ())
    if doc.file.included_at is not None and "include" in written.settings:
        message = "only the main file may have include"
        reading.report(written.place_of("include"), "nested-include", message, "move it there", at_key=True)
    return written


def _copied(raw: Any) -> Any:
    if isinstance(raw, dict):
        return {key: _copied(value) for key, value in raw.items()}
    return [_copied(value) for value in raw] if isinstance(raw, list) else raw


def _at(raw: Any, path: Path) -> Any:
    for step in path:
        if isinstance(raw, dict):
            raw = raw.get(str(step))
        elif isinstance(raw, list) and isinstance(step, int) and step < len(raw):
            raw = raw[step]
        else:
            return None
    return raw


@frozen
class _Writer:
    reading: Reading
    doc: Document
    broken: Mapping[Path, set[str]]

    def table(self, structured: Any, table: Table, path: Path) -> Written:
        written = Written(table, Place(self.doc, path), broken=set(self.broken.get(path, ())))
        for key in table.keys:
            value = getattr(structured, key.name)
            if value is ABSENT:
                continue
            here = (*path, key.name)
            if isinstance(key.kind, Record):
                written.tables[key.name] = self.table(value, key.kind.table, here)
            elif isinstance(key.kind, Records):
                inner = key.kind.table
                rows = [self.table(v, inner, (*here, i)) for i, v in enumerate(value)]
                written.arrays[key.name] = rows
                # What is required of a shard may be inherited, so that is asked later.
                for row in rows if inner is not SHARD else ():
                    require(self.reading, row)
            else:
                place = Place(self.doc, here)
                before = len(self.reading.failed)
                written.settings[key.name] = Setting(self.value(key, value, place), place)
                if len(self.reading.failed) > before:
                    written.broken.add(key.name)
        return written

    def value(self, key: Key, value: Any, place: Place) -> Any:
        if key.name == "args":
            self.check_spellings(value, place)
        if isinstance(key.kind, Entries):
            return {name: Setting(self.entry(key, v, place.at(name)), place.at(name)) for name, v in value.items()}
        if isinstance(key.kind, SecretKind):
            return resolve_secret(self.reading, value, place)
        if key.name == "extra_args":
            for index, text in enumerate(value):
                self.check_own(text, place.at(index))
            return value
        if key.expand is None:
            return value
        if isinstance(key.kind, Many):
            at_launch = key.expand == "command"
            return tuple(self.text(key, text, place.at(i), at_launch=at_launch) for i, text in enumerate(value))
        return self.text(key, value, place, at_launch=False)

    def text(self, key: Key, text: str, place: Place, *, at_launch: bool) -> str:
        expanded, refusals = expand_variables(text, self.reading.facts.env, at_launch=at_launch)
        self.reading.refuse_all(place, refusals)
        home = self.reading.facts.home
        if key.expand == "path" or (key.expand == "weights" and is_path(expanded)):
            return absolute(expanded, self.doc.file.folder, home)
        if key.expand == "command" and place.path[-1] == 0 and ("/" in expanded or expanded.startswith("~")):
            return absolute(expanded, self.doc.file.folder, home)
        return expanded

    def entry(self, key: Key, value: Any, place: Place) -> Any:
        if isinstance(value, SecretForm):
            return resolve_secret(self.reading, value, place)
        if key.name == "env" and isinstance(value, str):
            expanded, refusals = expand_variables(value, self.reading.facts.env, at_launch=True)
            self.reading.refuse_all(place, refusals)
            return expanded
        if key.name == "args":
            for text in _texts(value):
                self.check_own(text, place)
        return value

    def check_spellings(self, options: Mapping[str, Any], place: Place) -> None:
        """`a-b` and `a_b` are one option."""
        seen: dict[str, str] = {}
        for name in options:
            first = seen.setdefault(normal_name(name), name)
            if first != name:
                message = f'"{name}" and "{first}" are one option'
                self.reading.report(place.at(name), "given-twice", message, "remove one", at_key=True)

    def check_own(self, text: str, place: Place) -> None:
        refusals, others = own_variables(text)
        self.reading.refuse_all(place, [Refusal(r.code, r.message, r.hint) for r in refusals])
        if others:
            message = f"{others[0][:60]} is not replaced here and reaches the engine as it stands"
            hint = "variables of the environment are replaced in env, command, weights and paths; $$ is a dollar sign"
            self.reading.warn(place, "variable-not-replaced", message, hint)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)


def require(reading: Reading, written: Written) -> None:
    """Report required keys that are not written."""
    for key in written.table.keys:
        if key.required and key.name not in written.settings and written.is_usable(key.name):
            reading.report(written.place, "missing-key", f'missing required key "{key.name}"')
            written.broken.add(key.name)


def merge_files(reading: Reading, files: list[Written]) -> Written:
    """One table out of several files: arrays of tables are appended, a key set twice is an error, nothing overrides."""
    merged = Written(FILE, files[0].place)
    for written in files:
        _merge(reading, merged, written, "")
    # Two files may each hold a part of one table.
    for table in _inner_tables(merged):
        require(reading, table)
    return merged


def _inner_tables(written: Written) -> Iterator[Written]:
    for name, table in written.tables.items():
        if name != "defaults":
            yield table
            yield from _inner_tables(table)


def _merge(reading: Reading, into: Written, written: Written, name: str) -> None:
    into.broken |= written.broken
    for key, setting in written.settings.items():
        full = f"{name}{key}"
        first = into.settings.get(key)
        if first is None:
            into.settings[key] = setting
        elif isinstance(into.table.by_name[key].kind, Entries):
            entries = dict(first.value)
            for entry, inner in setting.value.items():
                if entry in entries:
                    _conflict(reading, inner.place, f"{full}.{entry}", entries[entry].place)
                entries.setdefault(entry, inner)
            into.settings[key] = Setting(entries, first.place)
        elif key != "include":
            _conflict(reading, setting.place, full, first.place)
    for key, inner_table in written.tables.items():
        if key not in into.tables:
            into.tables[key] = Written(inner_table.table, inner_table.place)
        _merge(reading, into.tables[key], inner_table, f"{name}{key}.")
    for key, rows in written.arrays.items():
        into.arrays.setdefault(key, []).extend(rows)


def _conflict(reading: Reading, place: Place, name: str, first: Place) -> None:
    message = f'"{name}" is already set in {first}'
    hint = "a later file never overrides: remove one of the two"
    reading.report(place, "set-twice", message, hint, at_key=True)
