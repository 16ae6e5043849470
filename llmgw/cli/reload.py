"""`llmgw reload`: the running llmgw reads its file again; with an error in it nothing changes."""

from __future__ import annotations

import sys

from llmgw.cli.errors import CONFIG, DONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

USAGE = "llmgw reload [--dry-run] [--json]"
DETAILS = """\
Unchanged shards are left alone. Exit code: 0 taken up, 5 no llmgw, 78 the file is wrong and nothing was changed.
"""
PATIENCE = 60.0
"""Seconds for the answer: llmgw looks at its GPUs and paths again first."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only show what would happen, as llmgw plan does")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    import json

    from llmgw.cli.asking import Asker
    from llmgw.cli.plan_view import plan_lines
    from llmgw.control import client

    ask = Asker.of(args)
    running = {shard["name"]: shard for shard in ask.status()["shards"]}
    path = "/v1/reload?dry_run=1" if args.dry_run else "/v1/reload"
    code, answer = client.request(ask.socket, "POST", path, timeout=PATIENCE)
    if code >= 400 and "errors" not in answer:
        raise client.refusal(code, answer)
    if args.json:
        print(json.dumps({"api": 1, **answer}))
        return CONFIG if code >= 400 else DONE
    if code >= 400:
        print_problems(answer["errors"], args.color)
        raise client.refusal(code, answer)
    if answer.get("problems"):
        print_problems(answer["problems"], args.color)
    if not args.quiet:
        lines = plan_lines(plan_of(answer), running)
        if args.dry_run:
            lines.append("This is what a reload would do; nothing was changed.")
        sys.stdout.write("\n".join(lines) + "\n")
    return DONE


def plan_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The plan in an answer."""
    return {"actions": [], **answer}


def print_problems(errors: list[dict[str, Any]], color: str) -> None:
    """As `check` prints them, with the lines of the files where these can be read here."""
    from llmgw.cli.screen import look
    from llmgw.config.render import render_problems
    from llmgw.domain.problem import Problem, Where

    problems = []
    for error in errors:
        where = None
        if error.get("file"):
            where = Where(error["file"], error.get("line"), error.get("column"), tuple(error.get("path") or ()))
        problems.append(
            Problem(
                code=error["code"],
                message=error["message"],
                hint=error.get("hint"),
                where=where,
                severity=error["severity"],
                context=error.get("context") or "",
            )
        )
    text = render_problems(problems, sources_of(problems), colour=look(color, sys.stderr).colour)
    print(text.rstrip("\n"), file=sys.stderr)


def sources_of(problems: list[Any]) -> dict[str, str]:
    """Text of the files that problems name, secrets masked; a file that cannot be read here is shown without it."""
    from llmgw.config.document import MAX_FILE, SourceFile, read_document
    from llmgw.config.masking import masked_text

    sources = {}
    for path in {problem.where.file for problem in problems if problem.where is not None}:
        try:
            with open(path, "rb") as file:
                sources[path] = masked_text(read_document(SourceFile(path, file.read(MAX_FILE), "/")))
        except OSError:
            continue
    return sources
