"""`llmgw explain`: type, default and meaning of a key, from the schema."""

from __future__ import annotations

from llmgw.cli.errors import DONE, FAILED, CommandError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw explain [KEY] [--json]"
DETAILS = """\
Without KEY: all tables.

examples:
  llmgw explain shard
  llmgw explain shard.load_timeout
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", nargs="?", metavar="KEY", help="a table or a key, such as shard.load_timeout")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from llmgw.config.explain import explain, explain_json, find

    key = args.key or ""
    if not any(find(key)):
        raise CommandError(FAILED, f"cannot explain {key!r}: no such table or key", explain(key))
    if args.json:
        import json

        print(json.dumps({"api": 1, "keys": explain_json(key)}))
    else:
        print(explain(key).rstrip("\n"))
    return DONE
