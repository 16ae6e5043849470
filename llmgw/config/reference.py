"""The reference pages about the file, made from the schema and the table of problems.

`python -m llmgw.config.reference docs/reference` writes them; a test compares the files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from llmgw.config.problem_codes import CODES
from llmgw.config.schema import EFFECT_WORDS, FILE, TABLES, Key, Table

_HEAD = "<!-- Made by `python -m llmgw.config.reference docs/reference`; do not edit. -->\n"


def pages() -> Mapping[str, str]:
    """File name -> text."""
    return {"config.md": config_page(), "problems.md": problems_page()}


def config_page() -> str:
    """Every table and key."""
    out = ["# llmgw.toml", _HEAD]
    out += [
        "Durations are texts such as `90s`, `1h30m`, `250ms` (units `ms s m h d`, large to small); sizes `512MiB`, "
        '`16GiB`, `80GB`. A secret is a text, `{ env = "NAME" }`, `{ file = "PATH" }` or '
        '`{ credential = "NAME" }`; keys of clients may also be `{ sha256 = "HEX" }`. `${NAME}` and '
        "`${NAME:-default}` are replaced in `env`, `command`, `weights`, `include` and paths; `${llmgw.port}` and "
        "others of llmgw's own in `command`, `args`, `extra_args` and `env`; `$$` is a dollar sign.",
        "",
    ]
    for table in TABLES:
        if not table.title.startswith("defaults."):
            out += _table(table)
    return "\n".join(out).rstrip("\n") + "\n"


def _table(table: Table) -> list[str]:
    title = f"[[{table.title}]]" if table.array else f"[{table.title}]"
    out = [f"## `{title}`" if table is not FILE else "## Top level", "", table.meaning, ""]
    if table.title == "defaults":
        return [
            *out,
            "Later wins: built-in default, `[defaults]`, `[defaults.ENGINE]` (`vllm`, `sglang`, `llamacpp`, "
            "`command`; these take `command` too), written keys of the inherited shard, written keys of the shard. "
            "`env`, `args` and `where` are merged key by key; `{ unset = true }` removes an inherited entry.",
            "",
        ]
    out += ["| key | type | default | meaning | allowed | on reload |", "|---|---|---|---|---|---|"]
    return [*out, *(_row(key) for key in table.keys), ""]


def _row(key: Key) -> str:
    default = key.default_shown
    if key.default is not None and key.default_text is None:
        default = f"`{default}`"
    cells = (f"`{key.name}`", key.kind.text, default, key.meaning, key.rule, EFFECT_WORDS[key.effect])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def problems_page() -> str:
    """Every code that reading a file can report."""
    out = [
        "# Problems in llmgw.toml",
        _HEAD,
        "`llmgw check --json` and a refused reload name each finding by one of these codes.",
        "",
    ]
    for code, paragraph in sorted(CODES.items()):
        out += [f"## {code}", "", paragraph, ""]
    return "\n".join(out).rstrip("\n") + "\n"


if __name__ == "__main__":
    for file_name, text in pages().items():
        with open(f"{sys.argv[1]}/{file_name}", "w", encoding="utf-8") as file:
            file.write(text)
