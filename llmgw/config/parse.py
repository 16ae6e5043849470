"""Files and facts in; the configuration, or everything that is wrong with it, out. The shell is `load.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve, field, frozen

from llmgw.config.document import Document, SourceFile, read_document
from llmgw.config.expand import absolute, expand_variables
from llmgw.config.masking import masked_text
from llmgw.config.model import Config
from llmgw.config.reading import Asked, Contents, Place, Reading
from llmgw.config.schema import GATEWAY
from llmgw.config.sections import (
    build_cluster,
    build_gateway,
    build_node,
    build_supervisor,
    check_gateway_ports,
)
from llmgw.config.shards import Surroundings, build_shards
from llmgw.config.show import show_tree
from llmgw.config.written import Written, merge_files, read_written
from llmgw.domain.host import HostFacts
from llmgw.domain.problem import Problem, Where
from llmgw.domain.shard import ShardSpec

__all__ = ["Include", "Parsed", "SourceFile", "includes_of", "parse"]


@frozen
class Parsed:
    """The outcome. `config` is None as soon as there is one error."""

    config: Config | None
    problems: tuple[Problem, ...]
    sources: Mapping[str, str]
    """Text of each file by the path that messages show; secrets are masked."""
    specs: tuple[ShardSpec, ...] = ()
    """Shards of this node that have no error of their own, for checks against the machine."""
    asked: Asked = field(factory=Asked)
    facts: HostFacts = field(factory=HostFacts)
    """What this outcome rests on."""


@frozen
class Include:
    """One element of `include`: an absolute path or glob, and where it stands."""

    pattern: str
    shown: str
    """The pattern as messages write paths: relative to where the main file's own path is relative to."""
    where: Where
    is_glob: bool


def includes_of(main: Document, env: Mapping[str, str], home: str) -> tuple[Include, ...]:
    """What the main file includes, as far as that can be read; mistakes in it are reported by `parse`."""
    raw = main.raw.get("include")
    found: list[Include] = []
    for index, text in enumerate(raw if isinstance(raw, list) else []):
        if not isinstance(text, str) or not text or "\0" in text:
            continue
        expanded, refusals = expand_variables(text, env, at_launch=False)
        if refusals:
            continue
        where = main.where(("include", index))
        folder = main.file.path.rpartition("/")[0]
        is_relative = not expanded.startswith(("/", "~"))
        shown = f"{folder}/{expanded}" if is_relative and "/" in main.file.path else expanded
        pattern = absolute(expanded, main.file.folder, home)
        found.append(Include(pattern, shown if is_relative else pattern, where, any(c in expanded for c in "*?[")))
    return tuple(found)


def parse(
    files: Sequence[SourceFile],
    facts: HostFacts,
    *,
    contents: Contents | None = None,
    problems: Sequence[Problem] = (),
    node: str | None = None,
    offline: bool = False,
    running: bool = False,
) -> Parsed:
    """Read everything and report everything. `files` begins with the main one, the others in reading order.

    `contents` holds what `asked.contents` of an earlier call named; `problems` are those of reading the files.
    `running`: a credential that cannot be seen is an error. Never raises for anything that stands in a file.
    """
    documents = tuple(read_document(file) for file in files)
    reading = Reading(facts, contents or {}, offline, running)
    reading.problems += [*problems, *(problem for doc in documents for problem in doc.problems)]
    read = [read_written(reading, doc) for doc in documents if not doc.problems]
    sources = {doc.file.path: masked_text(doc) for doc in documents}
    if not read:
        return Parsed(None, _sorted(reading.problems, documents), sources, facts=facts)
    merged = merge_files(reading, read)
    config = _resolve(reading, merged, node)
    _check_emptiness(reading, merged, documents)
    found = _sorted(reading.problems, documents)
    has_error = any(problem.is_error for problem in found)
    return Parsed(
        config=None if has_error else _with_files(config, files, reading),
        problems=found,
        sources=sources,
        specs=config.shards,
        asked=reading.asked,
        facts=facts,
    )


def _resolve(reading: Reading, merged: Written, node_name: str | None) -> Config:
    node = build_node(reading, merged, node_name)
    supervisor = build_supervisor(reading, merged)
    cluster = build_cluster(reading, merged)
    gateway = build_gateway(reading, merged)
    around = Surroundings(
        labels=node.labels,
        has_gateway=gateway is not None or not merged.is_usable("gateway"),
        has_cluster=cluster is not None or not merged.is_usable("cluster"),
        default_first_byte=gateway.first_byte_timeout if gateway else GATEWAY.by_name["first_byte_timeout"].builtin,
        default_chunk=gateway.chunk_timeout if gateway else GATEWAY.by_name["chunk_timeout"].builtin,
    )
    built = build_shards(reading, merged, around)
    check_gateway_ports(reading, merged, {s.port: s.name for s in built.specs if isinstance(s.port, int)})
    shown, origins = show_tree(merged, built.merged, node, supervisor)
    return Config(
        node, supervisor, built.specs, gateway, cluster, elsewhere=built.elsewhere, shown=shown, origins=origins
    )


def _with_files(config: Config, files: Sequence[SourceFile], reading: Reading) -> Config:
    return evolve(
        config, files=tuple(file.path for file in files), secret_variables=frozenset(reading.secret_variables)
    )


def _check_emptiness(reading: Reading, merged: Written, documents: Sequence[Document]) -> None:
    if any(problem.is_error for problem in reading.problems):
        return
    if not merged.arrays.get("shard") and "gateway" not in merged.tables:
        hint = "write a [[shard]] with name and model; llmgw.toml.example shows everything"
        reading.warn(Place(documents[0], ()), "nothing-to-run", "there is no [[shard]] and no [gateway]", hint)


def _sorted(problems: Sequence[Problem], documents: Sequence[Document]) -> tuple[Problem, ...]:
    """By file in reading order, then by position; each finding once."""
    order = {doc.file.path: index for index, doc in enumerate(documents)}

    def key(problem: Problem) -> tuple[int, int, int]:
        where = problem.where
        if where is None:
            return len(order), 0, 0
        return order.get(where.file, len(order)), where.line or 0, where.column or 0

    return tuple(sorted(dict.fromkeys(problems), key=key))
