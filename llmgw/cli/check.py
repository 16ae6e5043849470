"""`llmgw check`: everything that is wrong with the configuration, and with this machine for it, at once."""

from __future__ import annotations

from llmgw.cli.errors import CONFIG, DONE
from llmgw.cli.words import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from llmgw.config.model import Config
    from llmgw.domain.problem import Problem

USAGE = "llmgw check [CONFIG] [--offline] [--inventory FILE ...] [--strict] [--json]"
DETAILS = """\
Exit code: 0 without errors, 78 otherwise. Nothing is started or changed, and a running llmgw is not asked.

examples:
  llmgw check
  llmgw check --offline --strict conf/llmgw.toml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", metavar="CONFIG", help="the configuration; else as for --config")
    parser.add_argument("--offline", action="store_true", help="do not look at this machine: GPUs, ports, paths")
    parser.add_argument(
        "--inventory", metavar="FILE", nargs="+", default=[], help="use what `llmgw inventory --json` printed there"
    )
    parser.add_argument("--node", metavar="NAME", help="check it for this node")
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from llmgw.cli.config_file import config_path
    from llmgw.cli.screen import look
    from llmgw.cli.verdict import examine

    verdict = examine(
        config_path(args.path or args.config), node=args.node, offline=args.offline, inventory=args.inventory
    )
    problems = strictly(verdict.problems) if args.strict else verdict.problems
    refused = any(problem.is_error for problem in problems)
    if args.json:
        import json

        # Errors first: who reads one only, such as an upgrade, wants the reason of the refusal.
        errors = [problem.as_json() for problem in sorted(problems, key=lambda problem: not problem.is_error)]
        print(json.dumps({"api": 1, "ok": not refused, "config": verdict.path, "errors": errors}))
        return CONFIG if refused else DONE
    if problems:
        from llmgw.config.render import render_problems

        text = render_problems(problems, verdict.sources, colour=look(args.color).colour)
        print(text.rstrip("\n"))
    if not refused and verdict.config is not None and not args.quiet:
        print(summary(verdict.config, len(problems)))
    return CONFIG if refused else DONE


def strictly(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    from attrs import evolve

    return tuple(evolve(problem, severity="error") for problem in problems)


def summary(config: Config, warnings: int) -> str:
    parts = [counted(len(config.shards), "shard")]
    tenants = len(config.gateway.tenants) if config.gateway is not None else 0
    if tenants:
        parts.append(counted(tenants, "tenant"))
    parts.append(counted(len(config.files), "file"))
    parts.append(counted(warnings, "warning") if warnings else "no warnings")
    return f"ok: {', '.join(parts)}"
