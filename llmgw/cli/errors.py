"""How a verb fails: an exit code, one line that says what and why, and a line that says what to do."""

from __future__ import annotations

DONE = 0
FAILED = 1
USAGE = 2
"""A wrong command line; verbs have a `USAGE` text of their own and import this as WRONG_LINE."""
NOT_READY = 3
NO_SUCH_SHARD = 4
UNREACHABLE = 5
TIME_IS_UP = 6
CONFIG = 78
INTERRUPTED = 130
PIPE_CLOSED = 141
"""128 + SIGPIPE: what a shell shows for a program whose reader has gone."""


class CommandError(Exception):
    """Ends the command with `exit_code`; `message` and `hint` go to stderr."""

    def __init__(self, exit_code: int, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.message = message
        self.hint = hint


def error_text(message: str, hint: str | None) -> str:
    """The one form in which every verb reports a failure."""
    lines = [f"error: {message}"]
    if hint:
        lines += [f"  {line}" for line in hint.splitlines()]
    return "\n".join(lines)
