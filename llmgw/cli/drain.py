"""`llmgw drain`."""

from __future__ import annotations

from llmgw.cli import wishes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw drain (SHARD ... | --all) [--wait | --no-wait] [--timeout TIME] [--json]"
DETAILS = """\
They get no new requests and stay loaded until llmgw start or llmgw stop.
The wish holds over a reload and a restart of llmgw, until the next one or a reboot.
Exit code: 0 done, 1 failed, 4 no such shard, 5 no llmgw, 6 time is up.
"""
configure = wishes.configure


def run(args: argparse.Namespace) -> int:
    return wishes.run(args, "drain")
