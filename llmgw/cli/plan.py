"""`llmgw plan`: what a reload would change, and the exact command line and environment of a shard."""

from __future__ import annotations

import os
import sys

from llmgw.cli.errors import DONE, NO_SUCH_SHARD, NOT_READY, CommandError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from typing import Any

    from llmgw.cli.asking import Asker
    from llmgw.config.model import Config
    from llmgw.domain.shard import Command, Endpoint, ShardId, ShardSpec
    from llmgw.placement.proposal import Proposal
    from llmgw.supervisor.records import ShardRecord

USAGE = "llmgw plan [SHARD ...] [--offline] [--inventory FILE ...] [--exit-code] [--json]"
DETAILS = """\
Without SHARD: the file against the running llmgw, or, where none answers, against nothing.
With SHARD: the command line, one option a line, and the environment, each variable with where it comes from:
generated, inherited, or file and line. Secrets are shown as ***. Inherited variables are those of this shell; the
running llmgw has its own.
With --inventory: where placement would put every shard on these nodes, and why; nothing else is asked.
Exit code: 0, or with --exit-code 3 when there are changes; 78 the file is wrong.
"""
PATIENCE = 60.0
"""Seconds for the answer: llmgw looks at its GPUs and paths first."""
CHANGES = NOT_READY
"""The exit code of `--exit-code` when there are changes."""


ENVIRONMENT_COLUMN = 60
"""Characters for NAME=value before the origin."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", nargs="*", metavar="SHARD", help="show how these are started")
    parser.add_argument("--offline", action="store_true", help="do not ask a running llmgw, nor look at this machine")
    parser.add_argument(
        "--inventory", metavar="FILE", nargs="+", default=[], help="place on these nodes (llmgw inventory --json)"
    )
    parser.add_argument("--node", metavar="NAME", help="for this node, where no llmgw is asked")
    parser.add_argument("--exit-code", action="store_true", help="exit with 3 when something would change")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.inventory:
        return show_placement(args)
    running = None if args.offline else running_llmgw(args)
    if args.shards:
        return show_commands(args, running[1] if running else None)
    if running is not None:
        ask, status = running
        plan = plan_of_running(ask, args.color)
        cards = cards_beside_running(args, ask, status, plan)
        title = f"{status['config']['path']} against the running llmgw on {status['node']}"
        shards = {shard["name"]: shard for shard in status["shards"]}
    else:
        config, path = read(args, None)
        from llmgw.cli.asking import Asker
        from llmgw.config.diff import start_beside

        left = {} if args.offline else left_running(config)
        plan = start_beside({id_: record.config_hash for id_, record in left.items()}, config).as_json()
        cards = [] if args.offline else cards_here(args, config, left)
        shards = {id_.shown(spec.replicas): as_written(spec) for spec in config.shards for id_ in spec.ids}
        title = f"{path} against nothing"
        if not args.offline:
            title += f": no llmgw answers at {Asker.of(args).socket}"
            if left:
                title += f"; a start finds {len(left)} engine{'s' * (len(left) != 1)} that one has left running"
    return tell(args, plan, title, shards, cards)


def running_llmgw(args: argparse.Namespace) -> tuple[Asker, dict[str, Any]] | None:
    """The llmgw that answers; None where there is none and none was named."""
    from llmgw.cli.asking import Asker
    from llmgw.control.client import ClientError

    ask = Asker.of(args)
    try:
        return ask, ask.status()
    except ClientError:
        if args.socket:
            raise
        return None


def plan_of_running(ask: Asker, color: str) -> dict[str, Any]:
    from llmgw.cli.reload import plan_of, print_problems
    from llmgw.control import client

    code, answer = client.request(ask.socket, "GET", "/v1/plan", timeout=PATIENCE)
    if code >= 400:
        if answer.get("errors"):
            print_problems(answer["errors"], color)
        raise client.refusal(code, answer)
    return plan_of(answer)


def read(args: argparse.Namespace, status: dict[str, Any] | None) -> tuple[Config, str]:
    """The configuration that is meant: the running llmgw's, unless a file was named."""
    from llmgw.cli.config_file import config_path
    from llmgw.cli.verdict import read_or_refuse

    named = args.config or (status["config"]["path"] if status else None)
    path = config_path(named)
    return read_or_refuse(path, node=args.node, offline=args.offline, color=args.color), path


def as_written(spec: ShardSpec) -> dict[str, Any]:
    """What the file says of a shard that is not there yet, by the names that the status has."""
    return {"engine": spec.engine.value, "gpus": [str(gpu) for gpu in spec.pinned_gpus], "port": spec.port}


def tell(
    args: argparse.Namespace, plan: dict[str, Any], title: str, shards: dict[str, Any], cards: list[dict[str, Any]]
) -> int:
    from llmgw.cli.plan_view import card_lines, has_changes, plan_lines

    if args.json:
        import json

        print(json.dumps({"api": 1, "title": title, **plan, "gpus": cards}))
    else:
        sys.stdout.write("\n".join([title, "", *plan_lines(plan, shards), *card_lines(cards)]) + "\n")
    return CHANGES if args.exit_code and has_changes(plan) else DONE


# -- which GPUs it gets ---------------------------------------------------------------------------------------


def show_placement(args: argparse.Namespace) -> int:
    """Every shard on saved nodes, by the same placement as the running llmgw's."""
    from llmgw.cli.plan_view import card_lines
    from llmgw.cli.saved_inventories import read_saved
    from llmgw.placement.proposal import Site, propose

    config, path = read(args, None)
    labels, allowed = config.node.labels, config.node.gpus
    sites = [
        Site(saved.node, saved.availability(), labels, allowed if saved.node.node == config.node.name else "all")
        for saved in read_saved(args.inventory)
    ]
    cards = cards_json(config, propose(config.shards, sites))
    if args.json:
        import json

        print(json.dumps({"api": 1, "config": path, "nodes": [site.node.node for site in sites], "gpus": cards}))
    else:
        nodes = ", ".join(site.node.node for site in sites)
        sys.stdout.write("\n".join([f"{path} placed on {nodes}", *card_lines(cards)]) + "\n")
    return DONE


def left_running(config: Config) -> dict[ShardId, ShardRecord]:
    """Engines that an llmgw has left and that a start finds, by their records as far as they can be read."""
    from llmgw.supervisor.adoption import why_not_believed
    from llmgw.supervisor.ownership import records_in
    from llmgw.supervisor.procfs import read_stat

    found = {}
    for record in records_in(config.supervisor.state_dir).found:
        stat = read_stat(record.leader.pid)
        if why_not_believed(record) is None and stat is not None and stat.state not in "ZX":
            found[record.id] = record
    return found


def cards_here(args: argparse.Namespace, config: Config, left: Mapping[ShardId, ShardRecord]) -> list[dict[str, Any]]:
    """What the shards would get on this machine now; empty where none wants a GPU. Engines that were `left` running
    keep theirs."""
    from llmgw.cli.inventory import look_here
    from llmgw.placement.model import Assignment, Slot
    from llmgw.placement.proposal import Site, propose

    if all(spec.gpus in (0, ()) for spec in config.shards):
        return []
    facts = look_here(args.config)
    site = Site(facts.node, facts.availability, config.node.labels, config.node.gpus)
    current = {
        id_: Assignment(id_, (Slot(facts.node.node, record.gpu_uuids),))
        for id_, record in left.items()
        if record.gpu_uuids
    }
    hashes = {id_: spec.config_hash for spec in config.shards for id_ in spec.ids}
    running = {id_ for id_ in current if left[id_].config_hash == hashes.get(id_)}
    return cards_json(config, propose(config.shards, [site], current, running))


def cards_beside_running(
    args: argparse.Namespace, ask: Asker, status: dict[str, Any], plan: dict[str, Any]
) -> list[dict[str, Any]]:
    """What a reload would give: engines that stay keep their cards, the others get theirs again where that fits."""
    from llmgw.cli.saved_inventories import saved_answer
    from llmgw.config.load import load
    from llmgw.domain.shard import ShardId
    from llmgw.placement.model import Assignment, Slot
    from llmgw.placement.proposal import Site, propose

    config = load(status["config"]["path"], node=args.node, offline=True, running=False).config
    if config is None or all(spec.gpus in (0, ()) for spec in config.shards):
        # Where the file cannot be read from here the plan itself is all that can be told.
        return []
    saved = saved_answer(ask.get("/v1/inventory", timeout=PATIENCE))
    stays = {action["name"] for action in plan["actions"] if action["action"] in ("keep", "in_place")}
    current, running = {}, set()
    for shard in status["shards"]:
        id_ = ShardId(shard["shard"], shard["replica"])
        uuids = saved.uuids(shard["gpus"])
        if shard["pid"] is None or not uuids:
            continue
        current[id_] = Assignment(id_, (Slot(saved.node.node, uuids),))
        if shard["name"] in stays:
            running.add(id_)
    site = Site(saved.node, saved.availability(), config.node.labels, config.node.gpus)
    return cards_json(config, propose(config.shards, [site], current, running))


def cards_json(config: Config, proposal: Proposal) -> list[dict[str, Any]]:
    """One entry for each instance that wants GPUs; `network` for one over several nodes."""
    from llmgw.domain.problem import Problem
    from llmgw.placement.network import group_environments

    found: list[dict[str, Any]] = []
    for spec in config.shards:
        for id_ in spec.ids:
            chosen, why_not = proposal.chosen(id_), proposal.why_not(id_)
            entry: dict[str, Any] = {"name": id_.shown(spec.replicas), "slots": [], "why": why_not, "network": None}
            if chosen is not None:
                entry["why"] = proposal.why(id_, spec)
                entry["class"] = chosen.gpu_class
                entry["slots"] = [
                    {"node": slot.node, "gpus": list(proposal.labels(slot)), "uuids": list(slot.uuids)}
                    for slot in chosen.slots
                ]
                if len(chosen.slots) > 1:
                    nodes = [proposal.sites[slot.node].node for slot in chosen.slots]
                    told = group_environments(spec, nodes)
                    entry["network"] = (
                        {"problem": told.message, "hint": told.hint}
                        if isinstance(told, Problem)
                        else {
                            node: {
                                "variables": [[v.name, v.value, v.why] for v in env.variables],
                                "overrides": list(env.overrides),
                                "notes": list(env.notes),
                            }
                            for node, env in told.items()
                        }
                    )
            elif why_not is None:
                continue
            found.append(entry)
    return found


# -- how a shard is started --------------------------------------------------------------------------------


def show_commands(args: argparse.Namespace, status: dict[str, Any] | None) -> int:
    config, path = read(args, status)
    wanted: list[tuple[ShardId, ShardSpec]] = []
    for name in args.shards:
        found = [
            (id_, spec) for spec in config.shards for id_ in spec.ids if name in (spec.name, id_.shown(spec.replicas))
        ]
        if not found:
            known = ", ".join(spec.name for spec in config.shards)
            raise CommandError(NO_SUCH_SHARD, f"cannot find {name!r}: no such shard in {path}", f"there are: {known}")
        wanted += found
    chosen = chosen_ports(config, status)
    shown = []
    settled = settle_cards(args, config, status)
    for id_, spec in ((id_, settled.get(id_, spec)) for id_, spec in wanted):
        shown.append((id_.shown(spec.replicas), *command_of(config, id_, spec, chosen, offline=args.offline)))
    if args.json:
        import json

        print(json.dumps({"api": 1, "shards": [as_json(name, command) for name, command, _ in shown]}))
        return DONE
    text = []
    for name, command, notes in shown:
        text += [*command_lines(name, command, notes), ""]
    sys.stdout.write("\n".join(text[:-1]) + "\n")
    return DONE


def settle_cards(args: argparse.Namespace, config: Config, status: dict[str, Any] | None) -> dict[ShardId, ShardSpec]:
    """Shards that leave the choice to llmgw, with what they have, or with what they would get on this machine now."""
    from attrs import evolve

    from llmgw.domain.shard import ShardId
    from llmgw.placement.model import Assignment, Slot
    from llmgw.placement.proposal import Site, propose

    chosen = [spec for spec in config.shards if isinstance(spec.gpus, int) and spec.gpus > 0]
    if not chosen or args.offline:
        return {}
    found: dict[ShardId, ShardSpec] = {}
    have: dict[ShardId, Sequence[str]]
    if status is not None:
        have = {ShardId(shard["shard"], shard["replica"]): shard["gpus"] for shard in status["shards"] if shard["pid"]}
    else:
        have = {id_: record.gpus for id_, record in left_running(config).items()}
    for spec in chosen:
        for id_ in spec.ids:
            labels = have.get(id_, ())
            if len(labels) == spec.gpus:
                gpus = tuple(int(label) if label.isdecimal() else label for label in labels)
                found[id_] = evolve(spec, gpus=gpus)
    if all(id_ in found for spec in chosen for id_ in spec.ids):
        return found
    from llmgw.cli.inventory import look_here

    facts = look_here(args.config)
    site = Site(facts.node, facts.availability, config.node.labels, config.node.gpus)
    current = {}
    for id_, labels in have.items():
        inventory = facts.inventory
        cards = [inventory.gpu(int(label)) if label.isdecimal() else inventory.by_uuid(label) for label in labels]
        uuids = tuple(card.uuid for card in cards if card is not None)
        if uuids and len(uuids) == len(labels):
            current[id_] = Assignment(id_, (Slot(facts.node.node, uuids),))
    proposal = propose(config.shards, [site], current, current.keys())
    for spec in chosen:
        for id_ in spec.ids:
            assignment = proposal.chosen(id_)
            if id_ not in found and assignment is not None:
                labels = proposal.labels(assignment.slots[0])
                gpus = tuple(int(label) if label.isdecimal() else label for label in labels)
                found[id_] = evolve(spec, gpus=gpus)
    return found


def command_of(
    config: Config, id_: ShardId, spec: ShardSpec, chosen: dict[ShardId, int], *, offline: bool
) -> tuple[Command, list[str]]:
    """The command that a launch would run now, and what is not settled before one."""
    from llmgw.discovery.installed import engine_version, find_program
    from llmgw.domain.problem import Problem
    from llmgw.engines.adapter import build_command, profile
    from llmgw.engines.keys import why_no_key, with_key
    from llmgw.placement.assign import Devices, pinned_devices
    from llmgw.supervisor.launch import make_plan

    notes = []
    if isinstance(spec.gpus, int) and spec.gpus > 0:
        notes.append(f"its {spec.gpus} GPUs are chosen at the launch: none can be told now (llmgw plan says why)")
    devices = pinned_devices(spec, None) if spec.pinned_gpus else Devices()
    if isinstance(devices, Problem):
        notes.append(devices.message)
        devices = Devices()
    endpoint, note = endpoint_of(config, id_, spec, chosen, offline=offline)
    notes += [note] if note else []
    known = profile(spec.engine)
    served = config.gateway is not None
    no_key = why_no_key(spec.engine, spec.env, written=spec.api_key is not None, served=served)
    if no_key is None:
        notes.append(f"{known.key_variable} is a new one at each start, which the gateway sends")
        spec = with_key(spec, "made at the launch")
    elif served and spec.api_key is None:
        notes.append(f"no key is made for it: {no_key}")
    distribution = known.distribution
    program = find_program(spec, os.environ)
    plan = make_plan(
        config,
        id_,
        spec,
        endpoint,
        devices,
        env=os.environ,
        generation=1,
        run_id="0" * 32,
        version=engine_version(program, distribution) if program and distribution else None,
        state_dir=config.supervisor.state_dir,
    )
    command = build_command(plan)
    notes += [warning.message for warning in command.warnings]
    return command, notes


def endpoint_of(
    config: Config, id_: ShardId, spec: ShardSpec, chosen: dict[ShardId, int], *, offline: bool
) -> tuple[Endpoint, str | None]:
    """Where a launch would listen now, and what may come out differently. Enters a chosen port into `chosen`."""
    from llmgw.domain.shard import TcpEndpoint
    from llmgw.placement.endpoints import choose_endpoint
    from llmgw.supervisor.listeners import port_free

    own = chosen.get(id_)

    def is_free(address: str, port: int) -> bool:
        # Its own engine would be gone by then.
        return offline or port == own or port_free(address, port) is None

    endpoint = choose_endpoint(config, id_, spec, chosen, is_free)
    first, last = config.node.engine_ports
    if endpoint is None:
        return TcpEndpoint(spec.host, first), f"port {first} stands for one of {first}-{last}, of which none is free"
    if spec.port == "auto" and isinstance(endpoint, TcpEndpoint):
        chosen[id_] = endpoint.port
        if endpoint.port != own:
            return endpoint, f"port {endpoint.port} stands for the first free one of {first}-{last}"
    return endpoint, None


def chosen_ports(config: Config, status: dict[str, Any] | None) -> dict[ShardId, int]:
    """The ports that the running llmgw chose."""
    from llmgw.domain.shard import ShardId

    auto = {spec.name for spec in config.shards if spec.port == "auto"}
    chosen = {}
    for shard in (status or {}).get("shards", ()):
        port = (shard["endpoint"] or "").rpartition(":")[2].rstrip("/")
        if shard["shard"] in auto and port.isdecimal():
            chosen[ShardId(shard["shard"], shard["replica"])] = int(port)
    return chosen


def as_json(name: str, command: Command) -> dict[str, Any]:
    return {
        "name": name,
        "argv": list(command.masked_argv()),
        "cwd": command.cwd,
        "env": [
            {"name": variable, "value": value, "origin": command.origins.get(variable, "generated")}
            for variable, value in command.masked_env().items()
        ],
    }


def command_lines(name: str, command: Command, notes: Sequence[str]) -> list[str]:
    """One option a line, in a form that a shell would read; then the environment in columns."""
    import shlex

    from llmgw.domain.display import neutralise

    groups: list[list[str]] = [[]]
    for word in command.masked_argv():
        if word.startswith("-") and len(word) > 1 and not word[1].isdigit():
            groups.append([])
        groups[-1].append(word if word == "***" else shlex.quote(word))
    lines = [f"{name}:", f"  cd {shlex.quote(command.cwd)}"]
    options = [" ".join(group) for group in groups if group]
    lines += [
        ("  " if i == 0 else "      ") + option + (" \\" if i + 1 < len(options) else "")
        for i, option in enumerate(options)
    ]
    lines += ["", "  environment, and where each variable comes from:"]
    for variable, value in sorted(command.masked_env().items()):
        text = f"{variable}={value if value == '***' else shlex.quote(value)}"
        # Columns for the short ones only: one long PATH must not push every origin out of sight.
        lines.append(f"  {text:<{ENVIRONMENT_COLUMN}}  {command.origins.get(variable, 'generated')}")
    lines += [f"  note: {note}" for note in notes]
    return [neutralise(line) for line in lines]
