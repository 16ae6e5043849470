"""Problems as people read them: place, text, context, the line with a caret, and one closing line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmgw.domain.problem import Problem

WIDTH = 100
"""Characters of a source line that are shown; a longer one is cut around the caret."""


def render_problems(problems: Sequence[Problem], sources: Mapping[str, str], *, colour: bool = False) -> str:
    """All problems and the closing line; an empty text when there are none."""
    if not problems:
        return ""
    lines = [line for problem in problems for line in render_problem(problem, sources, colour=colour)]
    return "\n".join([*lines, _closing(problems)]) + "\n"


def render_problem(problem: Problem, sources: Mapping[str, str], *, colour: bool = False) -> list[str]:
    """One problem: `FILE:LINE:COLUMN: error: TEXT   [CONTEXT]`, the source line, a caret."""
    where = problem.where
    word = f"{problem.severity}:"
    if colour:
        word = f"\x1b[1;{'31' if problem.is_error else '33'}m{word}\x1b[0m"
    text = problem.message if problem.hint is None else f"{problem.message}; {problem.hint}"
    head = f"{where}: {word} {text}" if where is not None else f"{word} {text}"
    if problem.context:
        head += f"   {problem.context}"
    lines = [head]
    if where is not None and where.line is not None:
        source = sources.get(where.file, "").split("\n")
        if where.line <= len(source):
            lines += _excerpt(source[where.line - 1], where.line, where.column)
    return [_printable(line, keep_escape=colour and index == 0) for index, line in enumerate(lines)]


def _excerpt(line: str, number: int, column: int | None) -> list[str]:
    shown = line.replace("\t", " ").rstrip()
    if column is None:
        return [f"{number:6} | {_cut(shown, 0)[0]}"]
    shown, at = _cut(shown, column - 1)
    return [f"{number:6} | {shown}", f"{'':6} | {' ' * at}^"]


def _cut(line: str, at: int) -> tuple[str, int]:
    """The part of a long line around a position, and where the position is in it."""
    if len(line) <= WIDTH:
        return line, at
    start = max(0, min(at - WIDTH // 2, len(line) - WIDTH))
    part = line[start : start + WIDTH]
    if start + WIDTH < len(line):
        part = part[:-1] + "…"
    if start:
        part = "…" + part[1:]
    return part, at - start


def _printable(line: str, *, keep_escape: bool) -> str:
    """Control characters of a file must not reach a terminal."""
    return "".join(c if c.isprintable() or (keep_escape and c == "\x1b") else "\ufffd" for c in line)


def _closing(problems: Sequence[Problem]) -> str:
    errors = sum(problem.is_error for problem in problems)
    warnings = len(problems) - errors
    files = list(dict.fromkeys(p.where.file for p in problems if p.where is not None and p.is_error))
    if not errors:
        return _count(warnings, "warning")
    where = f" in {files[0]}" if len(files) == 1 else f" in {len(files)} files" if files else ""
    also = f" and {_count(warnings, 'warning')}" if warnings else ""
    return f"{_count(errors, 'error')}{also}{where}; nothing was changed"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
