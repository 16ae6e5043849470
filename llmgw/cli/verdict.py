"""A configuration file read and judged: its problems, and those of this machine for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from llmgw.domain.problem import Problem

if TYPE_CHECKING:
    from llmgw.config.model import Config
    from llmgw.domain.hardware import Inventory
    from llmgw.domain.host import PortHolder

INVENTORY_MAX = 16 << 20
"""Bytes of a saved inventory that are read."""


@frozen
class Verdict:
    path: str
    config: Config | None
    """None where the file could not be understood."""
    problems: tuple[Problem, ...]
    sources: Mapping[str, str]


def examine(path: str, *, node: str | None, offline: bool, inventory: str | None) -> Verdict:
    """Read the file and, unless `offline`, look at the machine. Raises CommandError for an unusable inventory."""
    from attrs import evolve

    from llmgw.cli.unit import UNIT, ask_systemd
    from llmgw.config.load import load
    from llmgw.preflight.needs import needs
    from llmgw.preflight.rules import preflight
    from llmgw.preflight.stop_time import stop_timeout_problem

    saved = saved_inventory(inventory) if inventory else None
    parsed = load(path, node=node, offline=offline, running=False)
    problems = list(parsed.problems)
    if not offline:
        wanted = needs(parsed.specs)
        facts = evolve(parsed.facts, port_holders=holders_of(wanted.ports))
        if wanted.inventory:
            facts = evolve(facts, inventory=saved or look_at_gpus())
        own = own_pids(facts.port_holders.values(), parsed.config)
        problems += preflight(parsed.specs, facts, own_pids=own)
        late = stop_timeout_problem(UNIT, ask_systemd(), parsed.specs)
        if late is not None:
            problems.append(late)
    return Verdict(path=path, config=parsed.config, problems=in_order(problems), sources=parsed.sources)


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


def look_at_gpus() -> Inventory:
    import trio

    from llmgw.cli import inventory

    return trio.run(inventory.look_at_gpus)


def saved_inventory(path: str) -> Inventory:
    """What `llmgw inventory --json` printed. Raises CommandError."""
    import json

    from llmgw.cli.errors import FAILED, CommandError
    from llmgw.discovery.inventory_json import read_inventory

    try:
        with open(path, "rb") as file:
            return read_inventory(json.loads(file.read(INVENTORY_MAX)))
    except OSError as error:
        raise CommandError(FAILED, f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(
            FAILED, f"cannot use {path}: {error}", "make one with: llmgw inventory --json > FILE"
        ) from error


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
