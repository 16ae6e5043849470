"""`llmgw completion`: a static script, so that TAB starts no Python."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

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


FILES = frozenset({"FILE", "CONFIG", "PATH"})
FOLDERS = frozenset({"DIR"})
"""Placeholders in the help whose values are completed from the file system."""


def run(args: argparse.Namespace) -> int:
    import shtab

    from llmgw.cli.main import full_parser

    parser = full_parser()
    for action in every_action(parser):
        if action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=args.shell))
    return 0


def every_action(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Options and arguments of all verbs; argparse has no public way to walk them (shtab does the same)."""
    for action in parser._actions:
        yield action
        if isinstance(action.choices, dict):
            for verb in action.choices.values():
                yield from every_action(verb)
