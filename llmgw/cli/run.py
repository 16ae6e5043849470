"""`llmgw run`: the supervisor in the foreground, for a terminal, systemd or a container."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw run [CONFIG] [--node NAME]"
DETAILS = """\
Ctrl-C or SIGTERM stops the engines in order (or leaves them, see on_stop); a second one kills them at once.
SIGHUP reads the configuration again. Exit code 2: another llmgw owns the directories; 78: the configuration is wrong.

examples:
  llmgw run llmgw.toml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", metavar="CONFIG", help="the configuration; else as for --config")
    parser.add_argument("--node", metavar="NAME", help="be this node instead of the one named after the host")


def run(args: argparse.Namespace) -> int:
    import signal

    from llmgw.cli.config_file import config_path

    # "Read the file again" says nothing to who has not read it yet; unanswered it would end llmgw.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    path = config_path(args.path or args.config)
    from llmgw.daemon import run as run_daemon

    return run_daemon(path, node=args.node)
