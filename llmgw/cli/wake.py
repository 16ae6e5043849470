"""`llmgw wake`."""

from __future__ import annotations

from llmgw.cli import wishes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw wake (SHARD ... | --all) [--wait | --no-wait] [--timeout TIME] [--json]"
DETAILS = """\
Waits, on a terminal, until they answer again.
Exit code: 0 done, 1 failed, 4 no such shard, 5 no llmgw, 6 time is up.
"""
configure = wishes.configure


def run(args: argparse.Namespace) -> int:
    return wishes.run(args, "wake")
