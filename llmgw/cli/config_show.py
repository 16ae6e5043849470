"""`llmgw config show`: the files merged, with defaults, as llmgw understands them."""

from __future__ import annotations

from llmgw.cli.errors import DONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

USAGE = "llmgw config show [CONFIG] [--origin]"
DETAILS = """\
TOML with every default written out; secrets are shown as ***. Without CONFIG, what the running llmgw has in force;
with --origin, or where none runs, what the file says now.
Exit code: 0, or 78 where the configuration is wrong.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("show",), metavar="show", help="print it")
    parser.add_argument("path", nargs="?", metavar="CONFIG", help="this file, whatever is running")
    parser.add_argument("--origin", action="store_true", help="with the file and line of each value")
    parser.add_argument("--node", metavar="NAME", help="as this node sees it")


def run(args: argparse.Namespace) -> int:
    named = args.path or args.config
    in_force = None if named or args.node else ask_running(args)
    if in_force is not None and not args.origin:
        print(in_force["text"].rstrip("\n"))
        return DONE

    from llmgw.cli.config_file import config_path
    from llmgw.cli.verdict import read_or_refuse
    from llmgw.config.show import show_config

    path = in_force["path"] if in_force is not None else config_path(named)
    config = read_or_refuse(path, node=args.node, offline=True, color=args.color)
    print(show_config(config, origins=args.origin).rstrip("\n"))
    return DONE


def ask_running(args: argparse.Namespace) -> dict[str, Any] | None:
    """What the running llmgw has in force; None where none answers, unless one was named by --socket."""
    from llmgw.cli.asking import Asker
    from llmgw.control.client import ClientError

    try:
        return Asker.of(args).get("/v1/config")
    except ClientError:
        if args.socket:
            raise
        return None
