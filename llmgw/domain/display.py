"""Text from engines, files and names, made harmless for a terminal.

Standard library only: every verb that prints something uses it, and they must start at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Escape sequences go as a whole, since their printable remains would litter the line: CSI with its parameters, OSC
# and the other string sequences up to their terminator (or the end of the line, when that was cut off), the rest
# by their intermediate bytes and final byte (ECMA-48, sections 5.3 to 5.6).
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|$)"
    r"|\x1b[ -/]*[0-~]?"
)
# Controls but for the tab; line and paragraph separators; what reorders or hides text (bidirectional controls, zero
# width, byte order mark, tags); surrogates, which no terminal can be given.
_UNSAFE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def neutralise(text: str) -> str:
    """The text with escape sequences removed and every other control character written out (`\\x07`, `\\u202e`)."""
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE.sub(_written_out, without_sequences(text))


def without_sequences(text: str) -> str:
    """The text without escape sequences and what they carry (colours, titles, clipboards)."""
    return _SEQUENCE.sub("", text)


def hide(text: str, secrets: Iterable[str]) -> str:
    """The text without these secrets."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return text


def _written_out(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
