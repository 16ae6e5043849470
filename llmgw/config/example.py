"""`llmgw.toml.example`, made from the schema: every key with its meaning, and shards that run as they stand.

`python -m llmgw.config.example > llmgw.toml.example` writes it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from llmgw.config.schema import (
    BAND,
    CLUSTER,
    DEFAULTS,
    ENGINE_DEFAULTS,
    FILE,
    GATEWAY,
    NODE,
    RATE,
    SHARD,
    SUPERVISOR,
    TENANT,
    TLS,
    Key,
    Record,
    Records,
    Table,
    plain,
)
from llmgw.config.toml_text import assignment

WIDTH = 100

HEAD = """\
#:schema ./llmgw.schema.json
# Everything that llmgw.toml can say. Lines that begin with "#" and a key show the default, or a sample where the
# default depends on other keys. Only what is not commented out here is in force: two shards that need no GPU.
# llmgw check llmgw.toml finds every mistake at once; with --offline it does not look for the programs and files that
# are named (llama-server and a model, below). llmgw explain KEY tells more about a key.
"""

SHARDS: tuple[Mapping[str, Any], ...] = (
    {
        "name": "tiny",
        "model": "gemma-3-270m",
        "engine": "llamacpp",
        "weights": "~/models/gemma-3-270m-Q4_K_M.gguf",
        "max_model_len": 4096,
        "extra_args": ["--threads", "2"],
    },
    {
        "name": "files",
        "model": "any-program",
        "engine": "command",
        "command": ["python3", "-m", "http.server", "--bind", "${llmgw.host}", "${llmgw.port}"],
        "ready_path": "/",
        "models_path": "",
        "autostart": False,
    },
)
"""What the example starts: a real engine, and a program that every host has."""


def example() -> str:
    """The whole file."""
    return "\n".join([HEAD, *_lines()]).rstrip("\n") + "\n"


def _lines() -> Iterator[str]:
    yield from _key(FILE.by_name["include"])
    yield ""
    for table in (NODE, SUPERVISOR, DEFAULTS):
        yield from _table(table, active=True)
    for engine, table in ENGINE_DEFAULTS.items():
        yield from _heading(f"# [defaults.{engine}]", table.meaning)
        yield from _key(table.by_name["command"], SAMPLE_COMMANDS[engine])
        yield ""
    for index, shard in enumerate(SHARDS):
        if index == 0:
            yield from _comment(SHARD.meaning)
        yield "[[shard]]"
        for name, value in shard.items():
            yield assignment(name, value)
        yield ""
    yield from _comment("Every key of a shard:")
    yield from _table(SHARD, active=False)
    for table in (GATEWAY, TLS, BAND, TENANT, RATE, CLUSTER):
        yield from _table(table, active=False)


SAMPLE_COMMANDS: Mapping[str, list[str]] = {
    "vllm": ["/opt/vllm/bin/vllm", "serve"],
    "sglang": ["/opt/sglang/bin/sglang", "serve"],
    "llamacpp": ["/usr/local/bin/llama-server"],
    "command": ["/usr/local/bin/my-engine", "--port", "${llmgw.port}"],
}


def _table(table: Table, *, active: bool) -> Iterator[str]:
    brackets = f"[[{table.title}]]" if table.array else f"[{table.title}]"
    yield from _heading(brackets if active else f"# {brackets}", table.meaning)
    for key in table.keys:
        if not isinstance(key.kind, (Record, Records)):
            yield from _key(key)
    yield ""


def _heading(header: str, meaning: str) -> Iterator[str]:
    yield from _comment(meaning)
    yield header


def _key(key: Key, value: Any = None) -> Iterator[str]:
    rule = f" {plain(key.rule)}" if key.rule else ""
    yield from _comment(f"{plain(key.meaning)}{rule}")
    if value is None:
        value = key.sample if key.default is None or key.default in ([], {}) else key.default
        value = key.default if value is None else value
    note = f"   # default: {plain(key.default_shown)}" if key.default is None and not key.required else ""
    yield f"# {assignment(key.name, value)}{note}"


def _comment(text: str) -> Iterator[str]:
    for line in textwrap.wrap(plain(text), WIDTH):
        yield f"## {line}"


if __name__ == "__main__":
    print(example(), end="")
