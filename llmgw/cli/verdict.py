"""A configuration file read and judged: its problems, and those of this machine for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from llmgw.domain.problem import Problem

if TYPE_CHECKING:
    from llmgw.config.model import Config


@frozen
class Verdict:
    path: str
    config: Config | None
    """None where the file could not be understood."""
    problems: tuple[Problem, ...]
    sources: Mapping[str, str]


def examine(path: str, *, node: str | None, offline: bool, inventory: str | None) -> Verdict:
    """Read the file and, unless `offline`, look at the machine. Raises CommandError for an unreadable inventory."""
    from llmgw.cli.unit import ask_systemd, too_short
    from llmgw.config.load import load

    parsed = load(path, node=node, offline=offline)
    problems = list(parsed.problems)
    if parsed.config is not None and not offline:
        late = too_short(parsed.config.shards, ask_systemd())
        if late is not None:
            problems.append(late)
    return Verdict(path=path, config=parsed.config, problems=tuple(problems), sources=parsed.sources)


def read_or_refuse(path: str, *, node: str | None, offline: bool, color: str) -> Config:
    """The configuration; where it has errors they are printed and CommandError(78) is raised."""
    import sys

    from llmgw.cli.errors import CONFIG, CommandError
    from llmgw.cli.screen import look
    from llmgw.config.load import load
    from llmgw.config.render import render_problems
    from llmgw.domain.problem import errors_of

    parsed = load(path, node=node, offline=offline)
    errors = errors_of(parsed.problems)
    if errors or parsed.config is None:
        print(render_problems(errors, parsed.sources, colour=look(color, sys.stderr).colour).rstrip(), file=sys.stderr)
        raise CommandError(CONFIG, f"cannot use {path}: it has errors", "see: llmgw check")
    return parsed.config
