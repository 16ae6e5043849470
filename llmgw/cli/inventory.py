"""`llmgw inventory`: what this node has, from the running llmgw or, without one, by a look of its own; and which nodes
reach each other, out of saved inventories."""

from __future__ import annotations

import sys

from llmgw.cli.errors import DONE, FAILED
from llmgw.discovery.pci import has_nvidia_card

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from typing import Any

    from llmgw.supervisor.node_look import NodeFacts, NodeSettings, Sources

USAGE = "llmgw inventory [--json] [--sysfs DIR] [--nvidia-smi PATH] [--addresses FILE] [--meminfo FILE] | FILE ..."
DETAILS = """\
With FILE, each what `llmgw inventory --json` printed on one node: the islands, which are nodes that reach each other
over one fabric. Those files are also what check and plan take with --inventory.

With any of --sysfs, --nvidia-smi, --addresses and --meminfo only these are read (and /proc/meminfo, unless --meminfo
is given): neither a configuration nor a running llmgw nor anything else of this host.

Unknown values are shown as -, never as 0.
Exit code: 0, also when a GPU is missing and on a host without an NVIDIA card; else 1 when the GPUs cannot be read.
"""
NOTHING_THERE = ("command_missing", "driver_not_loaded")
"""What a host without an NVIDIA card says, but also one with a card whose driver is not there."""
PATIENCE = 30.0
"""Seconds for everything: a cold driver without persistence mode takes more than ten."""
FILE_MAX = 16 << 20
"""Bytes of a file with addresses or memory that are read."""
PCI = "bus/pci/devices"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="saved inventories: print the islands of their nodes")
    parser.add_argument("--sysfs", metavar="DIR", help="read adapters from here instead of /sys")
    parser.add_argument("--nvidia-smi", metavar="PATH", help="ask this program for GPUs")
    parser.add_argument("--addresses", metavar="FILE", help='JSON: {"eth0": ["10.0.0.5/24"]}')
    parser.add_argument("--meminfo", metavar="FILE", help="read this instead of /proc/meminfo")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.files:
        return show_islands(args)
    offline = any(given is not None for given in (args.sysfs, args.nvidia_smi, args.addresses, args.meminfo))
    answer = from_files(args) if offline else (from_daemon(args) or from_host(args))
    has_card = look_for_card(args.sysfs) if offline else has_nvidia_card()
    if args.json:
        import json

        print(json.dumps(answer))
    else:
        from llmgw.cli.inventory_view import inventory_lines
        from llmgw.cli.screen import look

        screen = look(args.color)
        sys.stdout.write("\n".join(inventory_lines(answer, has_card=has_card, colour=screen.colour)) + "\n")
    for text in warnings(answer, has_card=has_card):
        print(f"warning: {text}", file=sys.stderr)
    return FAILED if is_failure(answer, has_card=has_card) else DONE


def is_without_card(answer: Mapping[str, Any], *, has_card: bool) -> bool:
    """Whether nvidia-smi has nothing to show because there is no card."""
    return answer["gpu"]["error_kind"] in NOTHING_THERE and not has_card


def is_failure(answer: Mapping[str, Any], *, has_card: bool) -> bool:
    """Whether the GPUs could not be read now; older facts that are shown meanwhile do not mend that."""
    gpu = answer["gpu"]
    if gpu.get("stale") is not None:
        return True
    return bool(gpu["status"] == "error") and not is_without_card(answer, has_card=has_card)


def warnings(answer: Mapping[str, Any], *, has_card: bool) -> list[str]:
    """What is wrong with the looking itself, for stderr."""
    from llmgw.domain.display import neutralise

    gpu = answer["gpu"]
    found = []
    stale = gpu.get("stale")
    if stale is not None:
        found.append(f"these are older facts: nvidia-smi fails ({stale['detail'] or stale['error_kind']})")
    elif is_failure(answer, has_card=has_card):
        found.append(f"cannot read the GPUs: {gpu['detail'] or gpu['error_kind']}")
    elif gpu["status"] == "partial":
        found.append(f"not all GPUs are there: {gpu['detail'] or 'a GPU is missing'}")
    if gpu["gpus"] and not gpu.get("processes_known", True):
        found.append("the processes on the GPUs cannot be read, so nobody knows whose memory is used")
    return [neutralise(text) for text in found]


# -- where it comes from ------------------------------------------------------------------------------------


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


def from_host(args: argparse.Namespace) -> dict[str, Any]:
    """A look at this host, with what the configuration says about it, if there is one."""
    facts = look_here(args.config, notify=lambda text: print(f"warning: {text}", file=sys.stderr))
    return as_json(facts)


def from_files(args: argparse.Namespace) -> dict[str, Any]:
    """A look at what the options name and at nothing else."""
    import socket

    from llmgw.supervisor.node_look import NodeSettings, Sources

    sources = Sources(
        nvidia_smi=args.nvidia_smi,
        sysfs=args.sysfs,
        addresses=read_addresses(args.addresses) if args.addresses is not None else {},
        meminfo=read_text(args.meminfo) if args.meminfo is not None else None,
        is_this_host=False,
    )
    return as_json(look_at(sources, NodeSettings(socket.gethostname()), PATIENCE, None))


def as_json(facts: NodeFacts) -> dict[str, Any]:
    from llmgw.discovery.inventory_json import node_json

    return node_json(facts.node, source="local", availability=facts.availability)


def look_here(config: str | None, notify: Any = lambda text: None) -> NodeFacts:
    """This host as it is now; never raises for what it finds. `notify` gets what is wrong with the configuration."""
    import os
    import socket

    from llmgw.cli.config_file import config_path
    from llmgw.cli.errors import CommandError
    from llmgw.config.load import load
    from llmgw.domain.directories import state_directory
    from llmgw.supervisor.node_look import NodeSettings, Sources

    settings, timeout = NodeSettings(socket.gethostname()), PATIENCE
    state_dir = state_directory(os.environ, os.getuid(), os.path.expanduser("~"))
    try:
        parsed = load(config_path(config), offline=True, running=False)
    except CommandError:
        parsed = None
        if config is not None:
            raise
    if parsed is not None and parsed.config is None:
        notify("the configuration has errors (llmgw check shows them), so it is left out of this")
    elif parsed is not None and parsed.config is not None:
        node = parsed.config.node
        settings = NodeSettings(node.name, node.fabric, node.island, node.address)
        timeout = node.discovery_timeout
        state_dir = parsed.config.supervisor.state_dir
    return look_at(Sources.of_this_host(), settings, timeout, state_dir)


def look_at(sources: Sources, settings: NodeSettings, timeout: float, state_dir: str | None) -> NodeFacts:
    """One look. Processes are told ours by the records in `state_dir`, None for nobody's."""
    import time
    from functools import partial

    import trio

    from llmgw.supervisor.children import Children
    from llmgw.supervisor.node_look import look_at_node
    from llmgw.supervisor.records import RecordStore
    from llmgw.supervisor.tools import run_tool

    def records() -> Sequence[Any]:
        try:
            return RecordStore(state_dir).read_all() if state_dir is not None else ()
        except OSError:
            return ()

    tool = partial(run_tool, Children())
    looking = partial(look_at_node, tool, sources, settings, timeout=timeout, now=time.time, records=records)
    return trio.run(looking)


def look_for_card(sysfs: str | None) -> bool:
    import os

    return sysfs is not None and has_nvidia_card(os.path.join(sysfs, PCI))


def read_text(path: str) -> str:
    """Raises CommandError."""
    from llmgw.cli.errors import CommandError

    try:
        with open(path, "rb") as file:
            return file.read(FILE_MAX).decode("utf-8", "replace")
    except OSError as error:
        raise CommandError(FAILED, f"cannot read {path}: {error.strerror}") from error


def read_addresses(path: str) -> dict[str, list[str]]:
    """Raises CommandError."""
    import json

    from llmgw.cli.errors import CommandError

    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CommandError(FAILED, f"cannot use {path}: it is no JSON: {error}") from error
    good = isinstance(found, dict) and all(
        isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in found.values()
    )
    if not good:
        raise CommandError(
            FAILED, f"cannot use {path}: interfaces with lists of addresses are wanted", '{"eth0": ["10.0.0.5/24"]}'
        )
    return found  # type: ignore[no-any-return]


# -- several nodes ------------------------------------------------------------------------------------------


def show_islands(args: argparse.Namespace) -> int:
    from llmgw.cli.saved_inventories import saved_nodes
    from llmgw.discovery.islands import islands, named_islands

    nodes = [(node.node, node.fabric) for node in saved_nodes(args.files)]
    if args.json:
        import json

        print(json.dumps({"api": 1, "islands": [list(island) for island in islands(nodes)]}))
        return DONE
    from llmgw.cli.table import plain_lines

    rows = [(island.name, str(len(island.nodes)), ", ".join(island.nodes)) for island in named_islands(nodes)]
    sys.stdout.write("\n".join(plain_lines(("ISLAND", "NODES", "NAMES"), rows)) + "\n")
    return DONE
