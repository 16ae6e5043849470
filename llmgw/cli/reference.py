"""The command line as a page of the documentation, from the same parsers that print `--help`.

python -m llmgw.cli.reference > docs/reference/cli.md
"""

from __future__ import annotations

import argparse
from importlib import import_module

from llmgw.cli.main import GROUPS, Parser, add_verb, top_parser

HEAD = """\
# The `llmgw` command

<!-- Generated from the command's own help by `python -m llmgw.cli.reference`; a test compares the two. -->
"""


def page() -> str:
    """The whole page, ending with a newline."""
    parts = [HEAD, block(top_parser())]
    holder = argparse.ArgumentParser()
    subparsers = holder.add_subparsers(parser_class=Parser)
    for title, group in GROUPS:
        parts.append(f"## {title[0].upper()}{title[1:]}\n")
        for verb in group:
            parser = add_verb(subparsers, verb, import_module(verb.module), with_global_options=False)
            parts += [f"### `llmgw {verb.name}`\n", block(parser)]
    return "\n".join(parts)


def block(parser: argparse.ArgumentParser) -> str:
    text = parser.format_help().rstrip("\n")
    return f"```text\n{text}\n```\n"


if __name__ == "__main__":
    print(page(), end="")
