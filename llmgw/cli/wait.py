"""`llmgw wait`: for scripts and deployment tools."""

from __future__ import annotations

from llmgw.cli import wishes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw wait (SHARD ... | --all) [--for ready|stopped] [--timeout TIME]"
DETAILS = """\
Exit code: 0 all are there, 1 one has failed and is not tried again, 4 no such shard, 5 no llmgw, 6 time is up.

examples:
  llmgw wait --all --timeout 10m && run-the-tests
  llmgw wait embed --for stopped
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", nargs="*", metavar="SHARD", help="which; NAME stands for all its replicas")
    parser.add_argument("--all", action="store_true", help="every shard")
    parser.add_argument("--for", choices=("ready", "stopped"), default="ready", dest="goal", help="default: ready")
    parser.add_argument("--timeout", type=wishes.span, metavar="TIME", help="give up after this (90s, 10m)")


def run(args: argparse.Namespace) -> int:
    from llmgw.cli.asking import Asker

    ask = Asker.of(args)
    judge = wishes.for_ready if args.goal == "ready" else wishes.for_stopped
    names = wishes.targets(ask, args)
    return wishes.follow(ask, names, judge, told=None, timeout=args.timeout, quiet=args.quiet, color=args.color)
