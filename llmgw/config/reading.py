"""What the resolving modules share while one set of files is read: findings, places, and questions about the host.

`Reading` is made for one call of `parse` and thrown away. Questions that the facts do not answer are noted in `asked`,
so that the shell can gather exactly what this configuration needs and read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import define, field, frozen

from llmgw.config.document import Document
from llmgw.config.kinds import Refusal
from llmgw.domain.fabric import FabricInventory
from llmgw.domain.host import HostFacts, PathFact
from llmgw.domain.problem import Path, Problem, Severity

SECRET_MAX = 64 << 10
"""Bytes a secret's file may have."""


@frozen
class Place:
    """A key in a file."""

    doc: Document
    path: Path

    def at(self, *more: str | int) -> Place:
        return Place(self.doc, (*self.path, *more))

    def __str__(self) -> str:
        return self.doc.line(self.path)

    @property
    def exact(self) -> str:
        """`file:line:column` of the value."""
        return str(self.doc.where(self.path))


@frozen
class Asked:
    """What a configuration needs to know about the host: modes and kinds of paths, contents of secrets' files, and
    whether it says anything about network adapters."""

    paths: frozenset[str] = frozenset()
    contents: frozenset[str] = frozenset()
    adapters: bool = False


Contents = Mapping[str, bytes | str]
"""Path of a secret's file -> its content (cut after SECRET_MAX + 1 bytes), or in words why it cannot be read."""


@define
class Reading:
    """One run over the files; collects problems."""

    facts: HostFacts
    contents: Contents = field(factory=dict)
    offline: bool = False
    running: bool = False
    """The files are read to be run, not only to be checked: what cannot be seen is an error then."""
    problems: list[Problem] = field(factory=list)
    failed: set[tuple[str, Path]] = field(factory=set)
    asked_paths: set[str] = field(factory=set)
    asked_contents: set[str] = field(factory=set)
    asked_adapters: bool = False
    secret_variables: set[str] = field(factory=set)

    def report(
        self,
        place: Place,
        code: str,
        message: str,
        hint: str | None = None,
        *,
        severity: Severity = "error",
        at_key: bool = False,
    ) -> None:
        """Note a finding; an error makes later checks of the same key silent."""
        where = place.doc.where(place.path, at_key=at_key)
        self.problems.append(Problem(code, message, hint, where, severity, context_of(place)))
        if severity == "error":
            self.failed.add((place.doc.file.path, place.path))

    def warn(self, place: Place, code: str, message: str, hint: str | None = None) -> None:
        self.report(place, code, message, hint, severity="warning")

    def refuse_all(self, place: Place, refusals: Iterable[Refusal]) -> None:
        for r in refusals:
            self.report(place.at(*r.path), r.code, r.message, r.hint)

    def path(self, path: str) -> PathFact | None:
        """What stands at an absolute path; None is unknown."""
        if self.offline:
            return None
        self.asked_paths.add(path)
        return self.facts.paths.get(path)

    def content(self, path: str) -> bytes | str | None:
        """The content of a secret's file, in words why there is none, or None while it is unknown."""
        if self.offline:
            return None
        self.asked_contents.add(path)
        self.asked_paths.add(path)
        return self.contents.get(path)

    def adapters(self) -> FabricInventory | None:
        """The network adapters of this host; None is unknown."""
        if self.offline:
            return None
        self.asked_adapters = True
        return self.facts.fabric

    @property
    def asked(self) -> Asked:
        return Asked(frozenset(self.asked_paths), frozenset(self.asked_contents), self.asked_adapters)


def context_of(place: Place) -> str:
    """The table of a key as a person would name it: `[shard "llama-70b" env]`; empty at the top of the file."""
    path = place.path
    at: Any = place.doc.raw
    steps = path[:-1] if path and isinstance(path[-1], str) else path
    words: list[str] = []
    for step in steps:
        if isinstance(step, str):
            words.append(step if len(step) <= 40 else step[:39] + "…")
            at = at.get(step) if isinstance(at, dict) else None
            continue
        at = at[step] if isinstance(at, list) and step < len(at) else None
        if isinstance(at, dict):
            name = at.get("name")
            words.append(f'"{name[:63]}"' if isinstance(name, str) else f"#{step + 1}")
    return f"[{' '.join(words)}]" if words else ""
