"""Where an engine is asked to listen. Whether a port is free is an argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmgw.config.model import Config
from llmgw.domain.shard import Endpoint, ShardId, ShardSpec, TcpEndpoint, UnixEndpoint


def choose_endpoint(
    config: Config,
    id_: ShardId,
    spec: ShardSpec,
    chosen: Mapping[ShardId, int],
    is_free: Callable[[str, int], bool],
) -> Endpoint | None:
    """The endpoint of one launch; None where `port = "auto"` and no port of the range is free.

    `chosen` are the ports that llmgw chose before, this instance's own among them: it keeps that one while it is
    free. `is_free(address, port)` says whether an engine could bind there now.
    """
    if spec.port == "unix":
        return UnixEndpoint(f"{config.supervisor.runtime_dir}/{id_.name}.{id_.replica}.sock")
    if isinstance(spec.port, int):
        return TcpEndpoint(spec.host, spec.port)
    written = {other.port for other in config.shards if isinstance(other.port, int)}
    others = {port for other, port in chosen.items() if other != id_}
    first, last = config.node.engine_ports
    previous = chosen.get(id_)
    candidates = [previous] if previous is not None and first <= previous <= last else []
    candidates += [port for port in range(first, last + 1) if port != previous]
    taken = written | others
    port = next((port for port in candidates if port not in taken and is_free(spec.host, port)), None)
    return None if port is None else TcpEndpoint(spec.host, port)
