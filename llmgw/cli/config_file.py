"""Which configuration file a verb means."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from llmgw.cli.errors import CONFIG, CommandError

LOCAL = "llmgw.toml"
SYSTEM = "/etc/llmgw/llmgw.toml"


def choose(given: str | None, env: Mapping[str, str], exists: Callable[[str], bool]) -> str:
    """The option or argument, $LLMGW_CONFIG, ./llmgw.toml, /etc/llmgw/llmgw.toml: the first that there is.

    Raises CommandError where nothing was named and nothing is there.
    """
    named = given or env.get("LLMGW_CONFIG")
    if named:
        return named
    for path in (LOCAL, SYSTEM):
        if exists(path):
            return path
    raise CommandError(
        CONFIG,
        f"cannot find a configuration: neither ./{LOCAL} nor {SYSTEM} exists",
        "name one with --config FILE; `llmgw init` writes a first one; `llmgw demo` shows a running example",
    )


def config_path(given: str | None) -> str:
    return choose(given, os.environ, os.path.exists)
