"""Rules about ports."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.domain.problem import Problem
from llmgw.domain.shard import ShardSpec
from llmgw.preflight.situation import Situation, problem

RENDEZVOUS = (
    "master-port",
    "data-parallel-rpc-port",
    "dpp",
    "nccl-port",
    "dist-init-addr",
    "data-parallel-supervisor-port",
)
"""Options by which an engine is told a port of its own ranks. llmgw gives each launch one of `rendezvous_ports`; the
engines' own defaults (vLLM: 29501 and 29550) would be the same for every shard."""


def port_taken(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    holder = situation.facts.port_holders.get(spec.port) if isinstance(spec.port, int) else None
    if holder is not None and (holder.pid is None or holder.pid not in situation.own_pids):
        yield problem(
            spec,
            "port-taken",
            "port",
            f"{spec.port} is held by {holder}",
            'stop that process, choose another port, or write port = "auto"',
        )


def derived_port_twice(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    """Ports for ranks that somebody wrote into `extra_args`, where llmgw's own choice does not reach."""
    mine = _rank_ports(spec)
    for other in situation.specs:
        if other.name == spec.name:
            return
        for port in sorted(mine.keys() & _rank_ports(other).keys()):
            yield problem(
                spec,
                "rank-port-taken",
                "extra_args",
                f'{mine[port]} {port} is also what shard "{other.name}" uses',
                "leave the option out: llmgw gives each launch a port of [node] rendezvous_ports",
            )
    if isinstance(spec.port, int) and spec.port in mine:
        yield problem(
            spec,
            "rank-port-taken",
            "extra_args",
            f"{mine[spec.port]} {spec.port} is also its own port",
            "leave the option out: llmgw gives each launch a port of [node] rendezvous_ports",
        )


def _rank_ports(spec: ShardSpec) -> dict[int, str]:
    """Port -> the option that names it, out of the words that are passed on as they are written."""
    found: dict[int, str] = {}
    words = list(spec.extra_args)
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.lstrip("-").replace("_", "-") not in RENDEZVOUS or not name.startswith("--"):
            continue
        text = value if equals else (words[at + 1] if at + 1 < len(words) else "")
        port = text.rpartition(":")[2]
        if port.isdecimal() and len(port) <= 5:
            found[int(port)] = name
    return found
