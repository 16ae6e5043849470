"""`${llmgw.NAME}`: what a launch knows, replaced in `command`, `args`, `extra_args` and `env` of a shard.

The file's reader has replaced `${NAME}` before; it leaves `$$` and `${llmgw.NAME}` as they stand and doubles the
dollar signs of what it puts in (`escape`), because here, at the launch, is the one place where both are resolved.
Secrets are never looked through.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmgw.domain.shard import LaunchPlan, TcpEndpoint

VARIABLES: Mapping[str, str] = {
    "port": "TCP port the engine is to listen on",
    "host": "address the engine is to bind",
    "model": "name clients ask for",
    "weights": "where the parameters are",
    "gpus": "the GPUs as CUDA_VISIBLE_DEVICES gets them, with commas",
    "name": "the shard's name",
    "replica": "number of this instance, from 0",
    "rank": "number of this node inside the instance, from 0",
    "node": "this node's name",
    "state_dir": "llmgw's state directory",
    "tmp_dir": "the instance's own temporary folder",
}
"""Every name with its meaning; `config` refuses others and the documentation is made from it."""

_PATTERN = re.compile(r"\$\$|\$\{llmgw\.([^}]*)\}")


def escape(text: str) -> str:
    """Text that `substitute` gives back unchanged."""
    return text.replace("$", "$$")


def values_of(plan: LaunchPlan) -> Mapping[str, str]:
    """The values for one launch; `port` and `host` are missing for a unix socket."""
    spec = plan.spec
    values = {
        "model": spec.model,
        "weights": spec.weights or spec.model,
        "gpus": ",".join(plan.devices),
        "name": spec.name,
        "replica": str(plan.id.replica),
        "rank": "0",
        "node": plan.node,
        "state_dir": plan.state_dir,
        "tmp_dir": plan.tmp_dir,
    }
    if isinstance(plan.endpoint, TcpEndpoint):
        values |= {"port": str(plan.endpoint.port), "host": plan.endpoint.host}
    return values


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace variables and `$$`. Raises ValueError for a name that has no value in this launch."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$"
        if name in values:
            return values[name]
        if name in VARIABLES:
            raise ValueError(f"${{llmgw.{name}}} has no value here: the shard listens on a unix socket")
        raise ValueError(f"there is no ${{llmgw.{name}}}; known are {', '.join(VARIABLES)}")

    return _PATTERN.sub(value, text)
