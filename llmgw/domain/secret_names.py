"""Which names promise a secret: of variables, options and keys, whoever shows their values. Standard library only."""

from __future__ import annotations

import re

_WORD = re.compile(
    r"[a-z0-9]*(?:token|secrets?|passw(?:or)?d|apikeys?|credentials?|keys?)[0-9]*"
    r"|pass|passphrase|auth|authorization|bearer|creds?",
    re.I,
)
# "tokens" alone are what a model reads, as in max-num-batched-tokens.
_PAIR = re.compile(r"(?:api|access|refresh|user)[_.-]tokens(?![a-z0-9])", re.I)
_PLACES = frozenset({"file", "path", "dir", "sock", "map"})
"""Last words of a name that says where something lies."""

_IN_A_LINE = re.compile(r"key|token|secret|pass|auth|cred|bearer", re.I)


def sounds_secret(name: str) -> bool:
    """Whether a value under this name is hidden although nobody declared it a secret: HF_TOKEN, --api-key, DB_PASS."""
    words = [word for word in re.split(r"[^A-Za-z0-9]+", name) if word]
    if not words or words[-1].lower() in _PLACES:
        return False
    return any(_WORD.fullmatch(word) for word in words) or _PAIR.search(name) is not None


_SHAPE = re.compile(r"(?<![A-Za-z0-9])(?:sk|pk|rk|hf|gsk|ghp|gho|glpat|xox[a-z])[-_][A-Za-z0-9_-]{8,}")
"""Beginnings that makers of keys give them so that they are recognised wherever they turn up."""


def hide_keys(text: str) -> str:
    """The text with whatever has the shape of a well-known kind of key as stars, whatever name it stands under."""
    return _SHAPE.sub(lambda found: "*" * len(found[0]), text)


def line_sounds_secret(line: str) -> bool:
    """For a line of a text that cannot be parsed, where even a part of such a word is a reason to hide the rest."""
    return _IN_A_LINE.search(line) is not None
