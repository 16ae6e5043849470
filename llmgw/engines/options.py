"""Options on a command line: names, values of `[shard.args]`, and what several engines write alike."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from llmgw.domain.shard import ArgValue, LaunchPlan, ParallelLayout, TcpEndpoint, UnixEndpoint
from llmgw.engines.profile import EngineProfile, Option

Substitute = Callable[[str], str]

_NUMBER = re.compile(r"-\d+(\.\d*)?([eE][-+]?\d+)?|-\.\d+")
"""What argparse takes for a negative number and not for an option."""


def normal_name(name: str) -> str:
    """An option's name as it is compared: no leading dashes, no value, dashes for underscores.

    Only the part before a dot is changed: what follows is a key inside a JSON value and keeps its underscores.
    """
    head, dot, rest = name.lstrip("-").partition("=")[0].partition(".")
    return head.replace("_", "-") + dot + rest


def address(endpoint: TcpEndpoint) -> list[Option]:
    """`--host` and `--port`, spelt alike by all engines."""
    return [Option("host", (endpoint.host,)), Option("port", (str(endpoint.port),))]


def sizes(layout: ParallelLayout, *, tensor: str, pipeline: str, data: str) -> list[Option]:
    """The parallel sizes above 1; 1 is every engine's default."""
    wanted = ((tensor, layout.tensor), (pipeline, layout.pipeline), (data, layout.data))
    return [Option(name, (str(size),)) for name, size in wanted if size > 1]


def internal_port(plan: LaunchPlan) -> int:
    """The port of `plan.rendezvous_ports` on which the ranks of this launch find each other.

    It follows from the engine's own port, so two shards get the same one only when their ports differ by a
    multiple of the range's width (400 by default, one more than `engine_ports` has). With a unix socket it follows
    from the socket's path, where two may meet by chance.
    """
    first, last = plan.rendezvous_ports
    width = last - first + 1
    if isinstance(plan.endpoint, UnixEndpoint):
        return first + zlib.crc32(plan.endpoint.path.encode()) % width
    port = first + plan.endpoint.port % width
    return port if port != plan.endpoint.port else first + (plan.endpoint.port + 1) % width


def render_args(profile: EngineProfile, args: Mapping[str, ArgValue], substitute: Substitute) -> list[str]:
    """The words for `[shard.args]`, in file order.

    Raises ValueError for a value this engine has no form for; the text names the option.
    """
    words: list[str] = []
    for key, value in args.items():
        words += _render(profile, normal_name(key), value, substitute)
    return words


def _render(profile: EngineProfile, name: str, value: ArgValue, substitute: Substitute) -> list[str]:
    flag = f"--{name}"
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{name}"] if profile.negates else []
    if isinstance(value, Mapping):
        if not profile.json_tables:
            raise ValueError(f"{name}: {profile.kind} takes no table; write the value as a string")
        return [flag, _json(name, value, substitute)]
    if isinstance(value, tuple | list):
        values = [_text(name, item, substitute) for item in value]
        if not values:
            raise ValueError(f"{name}: the list is empty; leave the option out")
        if profile.list_style == "once":
            return [flag, *values]
        return [word for item in values for word in (flag, item)]
    text = _text(name, value, substitute)
    if profile.equals_form and text.startswith("-") and not _NUMBER.fullmatch(text):
        return [f"{flag}={text}"]
    return [flag, text]


def _text(name: str, value: Any, substitute: Substitute) -> str:
    if isinstance(value, str):
        return substitute(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping | tuple | list):
        return _json(name, value, substitute)
    return str(value)


def _json(name: str, value: Any, substitute: Substitute) -> str:
    plain = _plain(value, substitute)
    try:
        return json.dumps(plain, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError(f"{name}: JSON has neither nan nor inf") from None


def _plain(value: Any, substitute: Substitute) -> Any:
    if isinstance(value, str):
        return substitute(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, substitute) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, substitute) for item in value]
    return value
