"""`llmgw explain`: type, default and meaning of a key, from the schema."""

from __future__ import annotations

from llmgw.cli.errors import DONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw explain [KEY]"
DETAILS = """\
Without KEY: all tables.

examples:
  llmgw explain shard
  llmgw explain shard.load_timeout
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", nargs="?", metavar="KEY", help="a table or a key, such as shard.load_timeout")


def run(args: argparse.Namespace) -> int:
    from llmgw.config.explain import explain

    print(explain(args.key or "").rstrip("\n"))
    return DONE
