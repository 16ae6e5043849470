"""`llmgw load`."""

from __future__ import annotations

from llmgw.cli import wishes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw load (SHARD ... | --all) [--wait | --no-wait] [--timeout TIME] [--json]"
DETAILS = """\
Makes room as a request does: an idle shard that shares its GPUs is unloaded, a busy one first drained.
It stays until it has been idle for its idle_timeout. After a stop it arms loading on request again.
Exit code: 0 done, 1 failed, 4 no such shard, 5 no llmgw, 6 time is up.
"""
configure = wishes.configure


def run(args: argparse.Namespace) -> int:
    return wishes.run(args, "load")
