"""`llmgw gpu release`: an operator's word that a GPU may be used although its memory has not come back."""

from __future__ import annotations

from llmgw.cli.errors import DONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw gpu release UUID|INDEX [--json]"
DETAILS = """\
After an engine's end its GPUs are given to nobody until their memory is back; those whose memory stays used are in
quarantine, which llmgw status and llmgw inventory show with the holder. llmgw looks again and again and lets go of
them by itself. `release` ends the quarantine by hand, and whoever is on that GPU now counts as nobody as long as it
stays. llmgw never ends processes of others.

Exit code: 0 also when nothing was in the way; 1 there is no such GPU; 5 llmgw does not answer.

examples:
  llmgw gpu release 3
  llmgw gpu release GPU-98f27fe1-3d0b-4e40-9c1f-1d6f5c0a2b11
"""
PATIENCE = 60.0
"""Seconds: llmgw looks at the GPUs before and after."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["release"], metavar="release", help="give it out again")
    parser.add_argument("gpu", metavar="UUID|INDEX", help="the GPU: its index, UUID or PCI bus id")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from urllib.parse import quote

    from llmgw.cli.asking import Asker

    answer = Asker.of(args).post(f"/v1/gpus/{quote(args.gpu, safe='')}/release", timeout=PATIENCE)
    if args.json:
        import json

        print(json.dumps(answer))
        return DONE
    name = f"GPU {answer['gpu']}"
    if not answer["released"]:
        print(f"{name}: nothing was in its way")
    else:
        held = f" ({answer['was_held_by']})" if answer["was_held_by"] else ""
        print(f"{name}: released{held}")
    if not answer["assignable"]:
        print(f"{name}: still given to nobody: {answer['why_not']}")
    return DONE
