"""`llmgw unload`."""

from __future__ import annotations

from llmgw.cli import wishes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw unload (SHARD ... | --all) [--wait | --no-wait] [--timeout TIME] [--json]"
DETAILS = """\
Requests may finish first (drain_timeout). llmgw stop keeps them down, also when requests come.
Exit code: 0 done, 1 failed, 4 no such shard, 5 no llmgw, 6 time is up.
"""
configure = wishes.configure


def run(args: argparse.Namespace) -> int:
    return wishes.run(args, "unload")
