"""What the place that is written to can show: colours, lines that are rewritten, block characters, width."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

UNBOUNDED = 100_000
"""Columns of a pipe: nothing is cut or wrapped there."""


class Screen:
    """`terminal`: a person watches. `colour`: escape codes for colour are wanted. `live`: lines may be rewritten."""

    __slots__ = ("colour", "live", "terminal", "unicode", "width")

    def __init__(self, *, terminal: bool, colour: bool, live: bool, unicode: bool, width: int) -> None:
        self.terminal = terminal
        self.colour = colour
        self.live = live
        self.unicode = unicode
        self.width = width

    @property
    def drawn(self) -> bool:
        """Worth the time that rich takes to import."""
        return self.terminal or self.colour


def judge(option: str, env: Mapping[str, str], *, terminal: bool, encoding: str, width: int) -> Screen:
    """The option wins over the environment; of the variables NO_COLOR wins, as no-color.org asks."""
    dumb = env.get("TERM") == "dumb"
    if option != "auto":
        colour = option == "always"
    elif env.get("NO_COLOR") or dumb:
        colour = False
    else:
        colour = terminal or bool(env.get("FORCE_COLOR"))
    return Screen(
        terminal=terminal,
        colour=colour,
        live=terminal and not dumb,
        unicode=can_carry("█░", encoding),
        width=width if terminal else UNBOUNDED,
    )


def can_carry(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def look(option: str, stream: TextIO | None = None) -> Screen:
    """The screen of `stream`, by default stdout."""
    stream = stream or sys.stdout
    terminal = stream.isatty()
    width = 80
    if terminal:
        try:
            width = os.get_terminal_size(stream.fileno()).columns or width
        except (OSError, ValueError):
            pass
        columns = os.environ.get("COLUMNS", "")
        if columns.isdecimal() and int(columns) > 0:
            width = int(columns)
    return judge(option, os.environ, terminal=terminal, encoding=stream.encoding or "ascii", width=width)


def prepare_streams() -> None:
    """A character that the locale cannot carry is escaped instead of ending the command.

    A stream that was closed by the caller (`>&-`) leads nowhere: Python has None for it, and whatever is opened next
    would get its number and what is written there.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    # They live as long as the process.
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
