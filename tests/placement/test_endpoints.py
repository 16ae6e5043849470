"""Where an engine is asked to listen."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from llmgw.config.model import Config, NodeConfig, SupervisorConfig
from llmgw.domain.shard import Endpoint, EngineKind, ShardId, ShardSpec, TcpEndpoint, UnixEndpoint
from llmgw.placement.endpoints import choose_endpoint

CONFIG = Config(
    NodeConfig("gpu-01", {}, "all", "auto", None, None, (8101, 8106), (29500, 29899), 20.0, 30.0),
    SupervisorConfig("auto", "/s", "/run/llmgw", "/l", "/run/llmgw/control.sock", 0o660, None, 2000, 8192, 1 << 26, 3),
    (),
)


def shard(name: str = "a", **keys: object) -> ShardSpec:
    return ShardSpec(name, "m", EngineKind.COMMAND, ("x",), "h", **keys)  # type: ignore[arg-type]


def chosen_for(
    spec: ShardSpec,
    *others: ShardSpec,
    replica: int = 0,
    chosen: Mapping[ShardId, int] | None = None,
    busy: tuple[int, ...] = (),
) -> Endpoint | None:
    config = attrs.evolve(CONFIG, shards=(spec, *others))
    return choose_endpoint(config, ShardId(spec.name, replica), spec, chosen or {}, lambda _, port: port not in busy)


def test_a_written_port_is_taken_as_it_is() -> None:
    assert chosen_for(shard(port=9000), busy=(9000,)) == TcpEndpoint("127.0.0.1", 9000)


def test_a_socket_is_named_after_the_instance() -> None:
    assert chosen_for(shard(port="unix"), replica=2) == UnixEndpoint("/run/llmgw/a.2.sock")


def test_the_lowest_port_is_chosen_that_is_free_and_nobody_elses() -> None:
    found = chosen_for(
        shard(port="auto"), shard("b", port=8101), chosen={ShardId("c", 0): 8102, ShardId("a", 1): 8103}, busy=(8104,)
    )
    assert found == TcpEndpoint("127.0.0.1", 8105)


def test_an_instance_keeps_its_port_while_it_is_free_and_in_the_range() -> None:
    own = ShardId("a", 0)
    assert chosen_for(shard(port="auto"), chosen={own: 8105}) == TcpEndpoint("127.0.0.1", 8105)
    assert chosen_for(shard(port="auto"), chosen={own: 8105}, busy=(8105,)) == TcpEndpoint("127.0.0.1", 8101)
    assert chosen_for(shard(port="auto"), chosen={own: 9999}) == TcpEndpoint("127.0.0.1", 8101)


def test_where_no_port_of_the_range_is_free_there_is_none() -> None:
    assert chosen_for(shard(port="auto"), busy=tuple(range(8101, 8107))) is None
