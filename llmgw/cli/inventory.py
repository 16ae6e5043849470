"""`llmgw inventory`: the GPUs of this node, from the running llmgw or, without one, from nvidia-smi."""

from __future__ import annotations

import sys

from llmgw.cli.errors import DONE, FAILED
from llmgw.cli.table import plain_lines
from llmgw.cli.words import counted
from llmgw.discovery.pci import has_nvidia_card
from llmgw.domain.display import neutralise

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import Any

    from llmgw.domain.hardware import Inventory

USAGE = "llmgw inventory [--nvidia-smi PATH] [--json]"
DETAILS = """\
The output of --json is what check --inventory takes. Unknown values are shown as -, never as 0.
Exit code: 0 also when a GPU is missing, and on a host without an NVIDIA card; else 1 when nvidia-smi fails.
"""
COLUMNS = ("GPU", "CLASS", "CC", "MEMORY", "FREE", "HELD BY", "NAME")
NOTHING_THERE = ("command_missing", "driver_not_loaded")
"""What a host without an NVIDIA card says, but also one with a card whose driver is not there."""
PATIENCE = 30.0
"""Seconds for nvidia-smi: a cold driver without persistence mode takes more than ten."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nvidia-smi", metavar="PATH", help="use this program, and do not ask a running llmgw")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    answer = (None if args.nvidia_smi else from_daemon(args)) or from_host(args.nvidia_smi)
    if args.json:
        import json

        print(json.dumps(answer))
    else:
        sys.stdout.write("\n".join(lines(answer)) + "\n")
    return FAILED if answer["gpu"]["status"] == "error" and (args.nvidia_smi or not is_without_card(answer)) else DONE


def is_without_card(answer: dict[str, Any], has_card: Callable[[], bool] = has_nvidia_card) -> bool:
    """Whether nvidia-smi has nothing to show because there is no card."""
    return answer["gpu"]["error_kind"] in NOTHING_THERE and not has_card()


def from_daemon(args: argparse.Namespace) -> dict[str, Any] | None:
    """The running llmgw's inventory; None where none answers, unless one was named by --socket."""
    from llmgw.cli.asking import Asker
    from llmgw.control.client import ClientError

    try:
        return Asker.of(args).get("/v1/inventory", timeout=PATIENCE)
    except ClientError:
        if args.socket:
            raise
        return None


def from_host(nvidia_smi: str | None) -> dict[str, Any]:
    import socket

    import trio

    from llmgw.discovery.inventory_json import inventory_json

    return inventory_json(trio.run(look_at_gpus, nvidia_smi), node=socket.gethostname(), source="local")


async def look_at_gpus(nvidia_smi: str | None = None) -> Inventory:
    """Ask nvidia-smi here and now; never raises for what it says."""
    import shutil
    import time

    from llmgw.discovery.survey import survey
    from llmgw.supervisor.children import Children
    from llmgw.supervisor.tools import ToolResult, run_tool

    children = Children()

    async def tool(argv: Sequence[str], *, timeout: float) -> ToolResult:
        return await run_tool(children, argv, timeout=timeout)

    return await survey(tool, nvidia_smi=nvidia_smi or shutil.which("nvidia-smi"), timeout=PATIENCE, now=time.time)


def lines(answer: dict[str, Any], has_card: Callable[[], bool] = has_nvidia_card) -> list[str]:
    """The table of GPUs; whoever holds memory is named by pid."""
    found = answer["gpu"]
    gpus = found["gpus"]
    head = [f"node {answer['node']}"]
    if found["driver_version"]:
        head.append(f"driver {found['driver_version']}")
    without_card = is_without_card(answer, has_card)
    if gpus or found["status"] != "error" or without_card:
        # Where nvidia-smi failed, nobody knows how many there are.
        head.append(counted(len(gpus), "GPU"))
    text = ["   ".join(head)]
    if found["status"] != "ok":
        word = "no GPU" if without_card else found["status"]
        text.append(f"{word}: {found['detail'] or found['error_kind']}")
    text += [f"GPU {lost['index']} at {lost['bus_id']} is lost" for lost in found["lost"]]
    if gpus:
        text += ["", *plain_lines(COLUMNS, [row(gpu) for gpu in gpus])]
    return [neutralise(line) for line in text]


def row(gpu: dict[str, Any]) -> tuple[str, ...]:
    holders = [f"pid {pid}" + (f" {gibibytes(memory)}" if memory else "") for pid, memory in gpu["processes"]]
    return (
        str(gpu["index"]),
        gpu["class"] or "-",
        gpu["compute_cap"] or "-",
        gibibytes(gpu["memory_total_mib"]),
        gibibytes(gpu["memory_free_mib"]),
        ", ".join(holders) or "-",
        ", ".join((gpu["name"], *gpu["health_flags"])),
    )


def gibibytes(mebibytes: int | None) -> str:
    return "-" if mebibytes is None else f"{mebibytes / 1024:.1f} GiB"
