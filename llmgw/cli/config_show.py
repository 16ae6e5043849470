"""`llmgw config show`: the files merged, with defaults, as llmgw understands them."""

from __future__ import annotations

from llmgw.cli.errors import DONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw config show [CONFIG] [--origin]"
DETAILS = """\
TOML with every default written out; secrets are shown as ***.
Exit code: 0, or 78 where the configuration is wrong.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("show",), metavar="show", help="print it")
    parser.add_argument("path", nargs="?", metavar="CONFIG", help="the configuration; else as for --config")
    parser.add_argument("--origin", action="store_true", help="with the file and line of each value")
    parser.add_argument("--node", metavar="NAME", help="as this node sees it")


def run(args: argparse.Namespace) -> int:
    from llmgw.cli.config_file import config_path
    from llmgw.cli.verdict import read_or_refuse
    from llmgw.config.show import show_config

    config = read_or_refuse(config_path(args.path or args.config), node=args.node, offline=True, color=args.color)
    print(show_config(config, origins=args.origin).rstrip("\n"))
    return DONE
