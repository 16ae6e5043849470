"""`llmgw inventory`: what this node has, from the running llmgw or, without one, by a look of its own; and which nodes
reach each other, out of saved inventories."""

from __future__ import annotations

import sys

from llmgw.cli.errors import DONE, FAILED
from llmgw.cli.errors import USAGE as WRONG_LINE
from llmgw.discovery.pci import has_nvidia_card

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from llmgw.cli.errors import CommandError
    from llmgw.supervisor.node_look import NodeFacts, NodeSettings, Sources
    from llmgw.supervisor.ownership import Records

USAGE = "llmgw inventory [--json] [--sysfs DIR] [--nvidia-smi PATH] [--addresses FILE] [--meminfo FILE] | FILE ..."
DETAILS = """\
Asks the running llmgw; where none answers, looks itself and reads the records of the engines that llmgw left.

With FILE, each what `llmgw inventory --json` printed on one node: the islands, which are nodes that reach each other
over one fabric. Those files are also what check and plan take with --inventory.

With any of --sysfs, --nvidia-smi, --addresses and --meminfo only these are read (and /proc/meminfo, unless --meminfo
is given): neither a configuration nor a running llmgw nor anything else of this host.

Unknown values are shown as -, never as 0. --json prints one object in every case, also after a failure.
Exit code: 0, also when a GPU is missing and on a host without an NVIDIA card; else 1 when the GPUs cannot be read.
"""
NOTHING_THERE = ("command_missing", "driver_not_loaded")
"""What a host without an NVIDIA card says, but also one with a card whose driver is not there."""
PATIENCE = 20.0
"""Seconds for questions about GPUs where no configuration says: a cold driver without persistence mode takes more
than ten."""
ANSWER = 60.0
"""Seconds for the running llmgw, which looks anew and may first have to see a look before to its end."""
OFFLINE = ("sysfs", "nvidia_smi", "addresses", "meminfo")
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
    offline = any(getattr(args, name) is not None for name in OFFLINE)
    if args.files and offline:
        from llmgw.cli.errors import CommandError

        raise CommandError(
            WRONG_LINE, "cannot read saved inventories and a node at once", "see: llmgw inventory --help"
        )
    if args.files:
        return show_islands(args)
    complaints = Complaints()
    answer = from_files(args, complaints) if offline else (from_daemon(args) or from_host(args))
    has_card = look_for_card(args.sysfs) if offline else has_nvidia_card()
    if args.json:
        import json

        print(json.dumps(answer))
    else:
        import time

        from llmgw.cli.inventory_view import inventory_lines

        shown = shards_of(args) if answer["source"] == "daemon" else {}
        lines = inventory_lines(answer, has_card=has_card, now=time.time(), shards=shown)
        sys.stdout.write("\n".join(lines) + "\n")
    for text in warnings(answer, has_card=has_card):
        print(f"warning: {text}", file=sys.stderr)
    return FAILED if complaints.told or is_failure(answer, has_card=has_card) else DONE


class Complaints:
    """What is wrong with what the command was given: told on stderr, and the rest is looked at all the same."""

    def __init__(self) -> None:
        self.told = False

    def __call__(self, error: CommandError) -> None:
        from llmgw.cli.errors import error_text
        from llmgw.domain.display import neutralise

        self.told = True
        hint = neutralise(error.hint) if error.hint else None
        print(error_text(neutralise(error.message), hint), file=sys.stderr)


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
    """The running llmgw's inventory; None where none answers."""
    from llmgw.cli.asking import Asker
    from llmgw.control.client import ClientError

    try:
        answer = Asker.of(args).get("/v1/inventory", timeout=ANSWER)
    except ClientError as error:
        if args.socket:
            # Somebody meant a certain one.
            print(f"warning: {error.message}; this is a look without it", file=sys.stderr)
        return None
    if not all(isinstance(answer.get(part), dict) for part in ("gpu", "fabric", "host")):
        print("warning: the running llmgw tells no inventory as this one knows it; look without it", file=sys.stderr)
        return None
    return answer


def shards_of(args: argparse.Namespace) -> dict[str, str]:
    """Shards as the inventory names them -> as status does, with a state that is not ready."""
    from llmgw.cli.asking import Asker
    from llmgw.control.client import ClientError

    try:
        shards = Asker.of(args).status().get("shards", ())
    except ClientError:
        return {}
    return {
        shard["shard"] if shard["replica"] == 0 else f"{shard['shard']}/{shard['replica']}": shard["name"]
        + (f" ({shard['state']})" if shard["state"] != "ready" else "")
        for shard in shards
    }


def from_host(args: argparse.Namespace) -> dict[str, Any]:
    """A look at this host, with what the configuration says about it, if there is one."""
    return as_json(look_here(args.config, notify=lambda text: print(f"warning: {text}", file=sys.stderr)))


def from_files(args: argparse.Namespace, complain: Complaints) -> dict[str, Any]:
    """A look at what the options name and at nothing else."""
    import os
    import socket

    from llmgw.cli.errors import CommandError
    from llmgw.supervisor.node_look import NodeSettings, Sources
    from llmgw.supervisor.ownership import Records

    addresses: Mapping[str, Sequence[str]] = {}
    meminfo = None
    try:
        if args.addresses is not None:
            addresses = read_addresses(args.addresses)
    except CommandError as error:
        complain(error)
    try:
        if args.meminfo is not None:
            meminfo = read_text(args.meminfo)
    except CommandError as error:
        complain(error)
        # Unknown, and not that of this host.
        meminfo = ""
    if args.sysfs is not None and not os.path.isdir(args.sysfs):
        print(f"warning: no adapters are read from {args.sysfs}: it is no folder", file=sys.stderr)
    sources = Sources(
        # The option names a file: what PATH would find is something else.
        nvidia_smi=os.path.abspath(args.nvidia_smi) if args.nvidia_smi is not None else None,
        sysfs=args.sysfs,
        addresses=addresses,
        meminfo=meminfo,
        is_this_host=False,
    )
    answer = as_json(look_at(sources, NodeSettings(socket.gethostname()), PATIENCE, Records()))
    if args.nvidia_smi is None:
        answer["gpu"]["detail"] = "no --nvidia-smi was given"
    return answer


def as_json(facts: NodeFacts) -> dict[str, Any]:
    from llmgw.discovery.inventory_json import node_json

    return node_json(facts.node, source="local", availability=facts.availability)


def look_here(config: str | None, notify: Callable[[str], None] = lambda text: None) -> NodeFacts:
    """This host as it is now, with what the configuration says about it; never raises for what it finds. `notify` gets
    what is wrong with the configuration or the records."""
    import os
    import socket

    from llmgw.cli.config_file import config_path
    from llmgw.cli.errors import CommandError
    from llmgw.config.load import load
    from llmgw.domain.directories import state_directory
    from llmgw.supervisor.node_look import NodeSettings, Sources
    from llmgw.supervisor.ownership import Records, records_in

    settings, timeout = NodeSettings(socket.gethostname()), PATIENCE
    state_dir = state_directory(os.environ, os.getuid(), os.path.expanduser("~"))
    wrong = None
    try:
        path = config_path(config)
        found = load(path, offline=True, running=False).config
        if found is None:
            wrong = f"{path} cannot be used (llmgw check shows why), so it is left out of this"
    except CommandError as error:
        found = None
        wrong = error.message if config is not None else None
    if found is not None:
        node, state_dir = found.node, found.supervisor.state_dir
        settings = NodeSettings(node.name, node.fabric, node.island, node.address, node.gpus)
        timeout = node.discovery_timeout
    records = records_in(state_dir)
    if wrong is not None:
        notify(wrong)
        # Where its records are stands in the file that cannot be read.
        records = Records(records.found, complete=False)
    else:
        told_of(records, state_dir, notify)
    # Whoever may not read the records may not read this either.
    return look_at(Sources.of_this_host(), settings, timeout, records, state_dir if records.complete else None)


def told_of(records: Records, state_dir: str, notify: Callable[[str], None]) -> None:
    if not records.complete:
        notify(
            f"not all process records in {state_dir} can be read, so a process on a GPU may be an engine of llmgw "
            "that is not known as one; ask as the user that runs llmgw, or as root"
        )


def look_at(
    sources: Sources, settings: NodeSettings, timeout: float, records: Records, state_dir: str | None = None
) -> NodeFacts:
    """One look; `timeout` in seconds is for questions about GPUs. Processes are told ours by `records`; GPUs that the
    last llmgw kept in quarantine are in `state_dir`."""
    import time
    from functools import partial

    import trio

    from llmgw.supervisor.children import Children
    from llmgw.supervisor.node_look import look_at_node
    from llmgw.supervisor.quarantine import Quarantine
    from llmgw.supervisor.tools import SoleTool

    tool = SoleTool(Children()).run
    looking = partial(look_at_node, tool, sources, settings, timeout=timeout, now=time.time, records=lambda: records)
    if state_dir is not None:
        looking = partial(looking, quarantined=Quarantine(state_dir, now=time.time).recheck)
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
    from llmgw.domain.display import neutralise

    nodes = [(node.node, node.fabric) for node in saved_nodes(args.files)]
    if args.json:
        import json

        print(json.dumps({"api": 1, "islands": [list(island) for island in islands(nodes)]}))
        return DONE
    from llmgw.cli.table import plain_lines

    rows = [(island.name, str(len(island.nodes)), ", ".join(island.nodes)) for island in named_islands(nodes)]
    lines = plain_lines(("ISLAND", "NODES", "NAMES"), rows)
    sys.stdout.write("\n".join(neutralise(line) for line in lines) + "\n")
    return DONE
