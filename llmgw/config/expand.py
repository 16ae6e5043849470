"""Variables and paths in values: `${NAME}`, `${NAME:-default}`, `$$`, `~`, relative paths.

`${llmgw.NAME}` is left in place for the launch, which knows port and GPUs. Texts that the launch looks through again
therefore keep `$$`, and what is put into them has its dollar signs doubled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmgw.config.kinds import VARIABLE_NAME, Refusal, closest
from llmgw.engines.variables import VARIABLES, escape

_VARIABLE = re.compile(r"\$\$|\$\{([^}]*)\}")
_NAMED = re.compile(rf"({VARIABLE_NAME})(?::-(.*))?", re.DOTALL)
LONGEST_VALUE = 128 << 10
"""Characters of one replaced text: the kernel takes no longer argument or variable (MAX_ARG_STRLEN)."""


def expand_variables(text: str, env: Mapping[str, str], *, at_launch: bool) -> tuple[str, tuple[Refusal, ...]]:
    """The text with variables of the environment replaced, and what cannot be.

    `at_launch`: the text is looked through again when an engine is started.
    """
    refusals: list[Refusal] = []

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$$" if at_launch else "$"
        if name.startswith("llmgw."):
            refusals.extend(_own_variable(name, at_launch))
            return match[0]
        named = _NAMED.fullmatch(name)
        if named is None:
            refusals.append(_no_variable(name))
            return match[0]
        found = env.get(named[1])
        if named[2] is not None and not found:
            found = named[2]
        if found is None:
            refusals.append(_unset(named[1]))
            return match[0]
        return escape(found) if at_launch else found

    expanded = _VARIABLE.sub(value, text)
    if len(expanded) > LONGEST_VALUE:
        message = f"the text has {len(expanded)} characters after variables are replaced"
        refusals.append(Refusal("too-long", message, f"it may have {LONGEST_VALUE}"))
    return expanded, tuple(refusals)


def _unset(name: str) -> Refusal:
    message = f"environment variable {name} is not set (referenced as ${{{name}}})"
    hint = f"write ${{{name}:-default}} to allow that"
    if name.lower() in VARIABLES:
        hint = f"write ${{llmgw.{name.lower()}}} for llmgw's own; ${{{name}:-default}} allows an unset variable"
    return Refusal("unset-variable", message, hint)


def _own_variable(name: str, at_launch: bool) -> tuple[Refusal, ...]:
    word = name.removeprefix("llmgw.")
    if word not in VARIABLES:
        meant = closest(word, tuple(VARIABLES))
        hint = f"did you mean ${{llmgw.{meant}}}?" if meant else f"known are {', '.join(VARIABLES)}"
        return (Refusal("unknown-variable", f"there is no ${{{name[:60]}}}", hint),)
    if not at_launch:
        hint = "it is known in command, args, extra_args and env only"
        return (Refusal("unknown-variable", f"${{{name}}} has no value here", hint),)
    return ()


def _no_variable(name: str) -> Refusal:
    shown = name if len(name) <= 60 else name[:59] + "…"
    if name.startswith("env.") and re.fullmatch(VARIABLE_NAME, name[4:]):
        return Refusal("unknown-variable", f"${{{shown}}} is no variable", f"write ${{{name[4:]}}}")
    hint = "write ${NAME} or ${NAME:-default}; $$ is a dollar sign"
    return Refusal("unknown-variable", f"${{{shown}}} is no variable", hint)


def own_variables(text: str) -> tuple[tuple[Refusal, ...], tuple[str, ...]]:
    """For texts where only `${llmgw.NAME}` is replaced: what is wrong, and other variables, which stay as they are."""
    refusals: list[Refusal] = []
    others: list[str] = []
    for match in _VARIABLE.finditer(text):
        name = match[1]
        if name is not None and name.startswith("llmgw."):
            refusals.extend(_own_variable(name, True))
        elif name is not None:
            others.append(match[0])
    return tuple(refusals), tuple(others)


def is_path(text: str) -> bool:
    """Whether `weights` names something on this host and not on a hub."""
    return text.startswith(("/", ".", "~"))


def absolute(path: str, folder: str, home: str) -> str:
    """`~` and a relative path resolved; `.` and doubled slashes removed, `..` only where no link can hide it."""
    if path == "~" or path.startswith("~/"):
        path = home.rstrip("/") + path[1:]
    if not path.startswith("/"):
        path = f"{folder}/{path}"
    parts: list[str] = []
    for part in path.split("/"):
        if part in ("", "."):
            continue
        parts.append(part)
    return "/" + "/".join(parts)
