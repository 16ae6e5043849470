"""A configuration file read and judged: its problems, and those of this machine for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from llmgw.domain.problem import Problem

if TYPE_CHECKING:
    from llmgw.cli.saved_inventories import SavedNode
    from llmgw.config.model import Config
    from llmgw.domain.host import PortHolder
    from llmgw.domain.shard import ShardSpec
    from llmgw.placement.proposal import Proposal
    from llmgw.supervisor.node_look import NodeFacts


@frozen
class Verdict:
    path: str
    config: Config | None
    """None where the file could not be understood."""
    problems: tuple[Problem, ...]
    sources: Mapping[str, str]


def examine(path: str, *, node: str | None, offline: bool, inventory: Sequence[str] = ()) -> Verdict:
    """Read the file and, unless `offline`, look at the machine. Raises CommandError for an unusable inventory."""
    from attrs import evolve

    from llmgw.cli.inventory import look_here
    from llmgw.cli.saved_inventories import read_saved
    from llmgw.cli.unit import UNIT, ask_systemd
    from llmgw.config.load import load
    from llmgw.placement.proposal import with_chosen
    from llmgw.preflight.needs import needs
    from llmgw.preflight.rules import preflight
    from llmgw.preflight.stop_time import stop_timeout_problem

    saved = read_saved(inventory)
    fabrics = {one.node.node: one.node.fabric for one in saved}
    fabric = fabrics.get(node) if node is not None else saved[0].node.fabric if len(saved) == 1 else None
    parsed = load(path, node=node, offline=offline, running=False, fabric=fabric)
    problems = list(parsed.problems)
    if not offline:
        wanted = needs(parsed.specs)
        facts = evolve(parsed.facts, port_holders=holders_of(wanted.ports))
        looked = None
        if wanted.inventory or saved:
            looked = as_facts(saved, parsed.config) if saved else look_here(path)
            facts = evolve(
                facts,
                inventory=looked.inventory,
                availability=looked.availability,
                hardware=looked.node.host,
                fabric=looked.node.fabric,
            )
        own = own_pids(facts.port_holders.values(), parsed.config)
        proposal = propose_here(parsed.specs, parsed.config, looked) if looked is not None else None
        specs = parsed.specs
        if proposal is not None and looked is not None:
            specs = tuple(with_chosen(spec, proposal, looked.node.node) for spec in specs)
            reasons = ((id_.name, proposal.placement.reasons.get(id_)) for spec in specs for id_ in spec.ids)
            facts = evolve(facts, unplaced={name: reason for name, reason in reasons if reason is not None})
        problems += preflight(specs, facts, own_pids=own)
        late = stop_timeout_problem(UNIT, ask_systemd(), parsed.specs)
        if late is not None:
            problems.append(late)
    return Verdict(path=path, config=parsed.config, problems=in_order(problems), sources=parsed.sources)


def propose_here(specs: Sequence[ShardSpec], config: Config | None, looked: NodeFacts) -> Proposal | None:
    """What placement would do on this node now; None where the GPUs cannot be read. Engines of ours are no hindrance:
    it is the whole configuration that is placed."""
    from llmgw.placement.proposal import Site, propose

    if not looked.inventory.is_current:
        return None
    labels = config.node.labels if config is not None else {}
    allowed = config.node.gpus if config is not None else "all"
    return propose(specs, [Site(looked.node, looked.availability, labels, allowed)])


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """By file as they were first met, then by line; what belongs to no line comes last."""
    found = list(problems)
    files = list(dict.fromkeys(problem.where.file for problem in found if problem.where is not None))

    def place(problem: Problem) -> tuple[bool, int, int, int]:
        where = problem.where
        if where is None or where.line is None:
            return (True, 0, 0, 0)
        return (False, files.index(where.file), where.line, where.column or 0)

    return tuple(sorted(found, key=place))


def holders_of(ports: Collection[int]) -> Mapping[int, PortHolder]:
    from llmgw.supervisor.listeners import port_holders

    return port_holders(ports)


def own_pids(holders: Iterable[PortHolder], config: Config | None) -> set[int]:
    """Those holders that are engines of the llmgw that runs with this configuration, by their process groups. Where
    it cannot be asked there are none: then a port it holds is in the way of a second one."""
    import os

    from llmgw.control.client import ClientError, find_socket, request

    pids = [holder.pid for holder in holders if holder.pid is not None]
    if not pids:
        return set()
    socket = config.supervisor.socket if config is not None else find_socket(None, os.environ, os.getuid())
    try:
        status, answer = request(socket, "GET", "/v1/status")
    except ClientError:
        return set()
    groups = {shard.get("pgid") for shard in answer.get("shards", ())} if status == 200 else set()
    own = set()
    for pid in pids:
        try:
            if os.getpgid(pid) in groups:
                own.add(pid)
        except ProcessLookupError:
            pass
    return own


def as_facts(saved: Sequence[SavedNode], config: Config | None) -> NodeFacts:
    """The saved node that the configuration means: the one of its name, else the only one."""
    from llmgw.cli.errors import FAILED, CommandError
    from llmgw.supervisor.node_look import NodeFacts

    name = config.node.name if config is not None else None
    found = next((one for one in saved if one.node.node == name), saved[0] if len(saved) == 1 else None)
    if found is None:
        names = ", ".join(one.node.node for one in saved)
        raise CommandError(FAILED, f"cannot check for node {name}: the inventories are of {names}", "name one: --node")
    return NodeFacts(found.node, found.availability(config.node.gpus if config is not None else "all"))


def read_or_refuse(path: str, *, node: str | None, offline: bool, color: str) -> Config:
    """The configuration; where it has errors they are printed and CommandError(78) is raised."""
    import sys

    from llmgw.cli.errors import CONFIG, CommandError
    from llmgw.cli.screen import look
    from llmgw.config.load import load
    from llmgw.config.render import render_problems
    from llmgw.domain.problem import errors_of

    parsed = load(path, node=node, offline=offline, running=False)
    errors = errors_of(parsed.problems)
    if errors or parsed.config is None:
        print(render_problems(errors, parsed.sources, colour=look(color, sys.stderr).colour).rstrip(), file=sys.stderr)
        raise CommandError(CONFIG, f"cannot use {path}: it has errors", "see: llmgw check")
    return parsed.config
