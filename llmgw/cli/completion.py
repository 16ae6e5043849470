"""`llmgw completion`: a static script, so that TAB starts no Python."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw completion (bash | zsh | fish)"
DETAILS = """\
examples:
  llmgw completion bash > /etc/bash_completion.d/llmgw
  llmgw completion zsh > "${fpath[1]}/_llmgw"
  llmgw completion fish > ~/.config/fish/completions/llmgw.fish
"""
SHELLS = ("bash", "zsh", "fish")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    import shtab

    from llmgw.cli.main import full_parser

    print(shtab.complete(full_parser(), shell=args.shell))
    return 0
