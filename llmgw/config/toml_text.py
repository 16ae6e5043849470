"""TOML on as few lines as people like it: tomli-w writes keys and scalars, lists and small tables stay on one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w


def key_text(key: str) -> str:
    """A key, quoted where it has to be."""
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def inline(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key_text(k)} = {inline(v)}" for k, v in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(inline(v) for v in value) + "]"
    return tomli_w.dumps({"k": value}).removeprefix("k = ").removesuffix("\n")


def assignment(key: str, value: Any) -> str:
    """`key = value` on one line."""
    return f"{key_text(key)} = {inline(value)}"
