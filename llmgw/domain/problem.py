"""What can be wrong, as data: one `Problem` per finding, and the small tree of exceptions that carry them.

LlmgwError              cannot <do X> for <name>: <why>
├── ConfigError         problems in files; exit code 78, nothing was changed
├── OwnedByAnother      another llmgw holds the state or runtime directory; exit code 2
├── UnknownShard        no such shard; exit code 4, HTTP 404
├── NotPossible         not in this state; HTTP 409
└── Unreachable         the supervisor cannot be reached; exit code 5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from attrs import field, frozen

Severity = Literal["error", "warning"]
Path = tuple[str | int, ...]
"""A place in a document: keys and indexes, for example ("shard", 1, "gpus", 2)."""


@frozen
class Where:
    """A place in a file. Lines and columns count characters from 1; None is unknown."""

    file: str
    line: int | None = None
    column: int | None = None
    path: Path = ()

    def __str__(self) -> str:
        parts = [self.file]
        if self.line is not None:
            parts.append(str(self.line))
            if self.column is not None:
                parts.append(str(self.column))
        return ":".join(parts)

    @classmethod
    def parse(cls, text: str) -> Where:
        """Read `file`, `file:line` or `file:line:column` back; colons in the file's name do no harm."""
        numbers: list[int] = []
        while len(numbers) < 2:
            head, colon, tail = text.rpartition(":")
            if not colon or not tail.isdecimal() or len(tail) > 9:
                break
            text = head
            numbers.insert(0, int(tail))
        line, column = (*numbers, None, None)[:2]
        return cls(text, line, column)


@frozen
class Problem:
    """One finding. `code` is a stable word (`unknown-key`) and the anchor of its paragraph in the docs.

    `message` says what is wrong with the value that stands there, `hint` what to write or do instead;
    `context` names the table as a person would: `[shard "llama-70b" env]`.
    """

    code: str
    message: str
    hint: str | None = None
    where: Where | None = None
    severity: Severity = "error"
    context: str = ""

    @property
    def is_error(self) -> bool:
        return self.severity == "error"

    def as_json(self) -> dict[str, Any]:
        """The form of `llmgw check --json` and of the answer to a refused reload."""
        where = self.where
        return {
            "file": where.file if where else None,
            "line": where.line if where else None,
            "column": where.column if where else None,
            "path": list(where.path) if where else [],
            "severity": self.severity,
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "context": self.context or None,
        }


def errors_of(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """The problems that refuse; warnings are left out."""
    return tuple(problem for problem in problems if problem.is_error)


class LlmgwError(Exception):
    """A failure that is told to a person: `message` in the project's form, `hint` is what to do."""

    exit_code = 1
    code = "failed"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(LlmgwError):
    """The configuration is refused as a whole. Nothing was changed."""

    exit_code = 78
    code = "config"

    def __init__(self, message: str, problems: Sequence[Problem] = (), hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.problems = tuple(problems)


class OwnedByAnother(LlmgwError):
    """Another supervisor holds a lock that this one needs."""

    exit_code = 2
    code = "owned"


class UnknownShard(LlmgwError):
    """A name that no shard has."""

    exit_code = 4
    code = "no-such-shard"


class NotPossible(LlmgwError):
    """The request makes sense, but not in the present state."""

    exit_code = 1
    code = "conflict"


class Unreachable(LlmgwError):
    """No supervisor answers at the control socket."""

    exit_code = 5
    code = "unreachable"


@frozen
class Reason:
    """Why something failed: a cause in words, what to do, and the lines that prove it.

    `retry` is False when trying again cannot help (a wrong option, missing weights). `code` is the rule that
    matched (`D4`) or a word of our own (`load-timeout`), and the anchor of its paragraph in the docs.
    """

    code: str
    cause: str
    remedy: str | None = None
    evidence: tuple[str, ...] = ()
    retry: bool = field(default=True, kw_only=True)
