"""`llmgw gpu release`: an operator's word that a GPU may be used although its memory has not come back."""

from __future__ import annotations

from llmgw.cli.errors import DONE, FAILED

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

USAGE = "llmgw gpu release UUID|INDEX [--json]"
DETAILS = """\
After an engine's end its GPUs are given to nobody until their memory is back; those whose memory stays used are in
quarantine, which llmgw status and llmgw inventory show with the holder. llmgw looks again and again and lets go of
them by itself. `release` ends the quarantine by hand, and whoever is on that GPU now counts as nobody as long as it
stays. llmgw never ends processes of others.

Exit code: 0 it was released, may be used, or one of our engines uses it; 1 there was nothing to release and it is
given to nobody, or there is no such GPU; 5 llmgw does not answer.

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
    print("\n".join(told(answer)))
    return DONE if answer["released"] or answer["assignable"] or answer["in_use_by"] else FAILED


def told(answer: dict[str, Any]) -> list[str]:
    """What came of it, and whether that GPU can be had now."""
    from llmgw.domain.display import neutralise

    name = f"GPU {answer['gpu']}"
    if answer["released"]:
        held = f" ({answer['was_held_by']})" if answer["was_held_by"] else ""
        lines = [f"{name}: released{held}"]
    elif answer["in_use_by"]:
        lines = [f"{name}: nothing to release: {', '.join(answer['in_use_by'])} uses it"]
    elif answer["assignable"]:
        lines = [f"{name}: nothing to release: it may be used"]
    else:
        lines = [f"{name}: nothing to release: {answer['why_not']}"]
    if answer["released"] and not answer["assignable"]:
        lines.append(f"{name}: still given to nobody: {answer['why_not']}; llmgw doctor says what mends that")
    return [neutralise(line) for line in lines]
