"""`llmgw version`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw version [--json]"
DETAILS = "The version of the running llmgw is in `llmgw status`.\n"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from llmgw import __version__

    if getattr(args, "json", False):
        import json
        import platform

        print(json.dumps({"api": 1, "llmgw": __version__, "python": platform.python_version()}))
    else:
        print(f"llmgw {__version__}")
    return 0
