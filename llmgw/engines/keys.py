"""Which engines get a key of llmgw's own making, one for each start, so that only the gateway can use them. Pure."""

from __future__ import annotations

from collections.abc import Container

from attrs import evolve

from llmgw.domain.shard import EngineKind, Secret, ShardSpec
from llmgw.engines.adapter import profile


def why_no_key(engine: EngineKind, env: Container[str], *, written: bool, served: bool) -> str | None:
    """Why no key is made for a shard; None where one is. `env` are the names in its own `env`, `written` says whether
    it has an `api_key`, `served` whether there is a gateway that would send it.

    Only where the engine reads its key from the environment: a command line can be read by every user.
    """
    known = profile(engine)
    if written:
        return "api_key is written"
    if not served:
        return "there is no [gateway] to send it"
    if known.key_variable is None:
        if known.key_in_argv:
            return f"{known.kind} takes a key on its command line only, where every user of the machine can read it"
        return "llmgw does not know how this program takes a key"
    if known.key_variable in env:
        return f"{known.key_variable} is written in env"
    return None


def with_key(spec: ShardSpec, key: str) -> ShardSpec:
    """The spec of one start whose engine asks for this key. Its `config_hash` stays: a key of each start is no change
    of the file, so that `[gateway]` may come and go without replacing an engine.
    """
    return evolve(spec, api_key=Secret(key, "generated"))
