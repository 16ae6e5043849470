"""What a reload does with each kind of change."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.config.diff import Change, ConfigDiff, diff, keys_of, start_beside
from llmgw.config.model import Config, NodeConfig, SupervisorConfig
from llmgw.config.schema import SHARD
from llmgw.domain.shard import EngineKind, Limits, RestartPolicy, Secret, ShardId, ShardSpec

NODE = NodeConfig("gpu-01", {}, "all", "auto", None, None, (8101, 8499), (29500, 29899), 20.0, 30.0)
SUPERVISOR = SupervisorConfig("auto", "/s", "/r", "/l", "/r/control.sock", 0o660, None, 2000, 8192, 1 << 26, 3)


def spec(name: str = "a", hash_: str = "h1", **keys: object) -> ShardSpec:
    keys.setdefault("model", "m")
    return ShardSpec(name=name, engine=EngineKind.VLLM, command=("vllm", "serve"), config_hash=hash_, **keys)  # type: ignore[arg-type]


def config(*shards: ShardSpec, **parts: object) -> Config:
    return Config(**{"node": NODE, "supervisor": SUPERVISOR, "shards": shards, **parts})  # type: ignore[arg-type]


def kinds(result: ConfigDiff) -> dict[str, str]:
    return {str(action.id): action.kind for action in result.actions}


def test_a_start_from_nothing_starts_every_instance() -> None:
    result = diff(None, config(spec("a", replicas=2), spec("b")))
    assert kinds(result) == {"a/0": "start", "a/1": "start", "b/0": "start"}
    assert result.needs_restart == ()


def test_a_start_takes_over_what_fits_replaces_what_changed_and_stops_what_is_gone() -> None:
    left = {ShardId("a", 0): "h1", ShardId("a", 1): "h1", ShardId("b"): "old", ShardId("gone"): "h1"}
    result = start_beside(left, config(spec("a"), spec("b"), spec("new")))
    assert kinds(result) == {
        "a/0": "take_over", "a/1": "stop", "b/0": "replace", "gone/0": "stop", "new/0": "start",
    }  # fmt: skip
    assert start_beside({}, config(spec("a", replicas=2))).actions == diff(None, config(spec("a", replicas=2))).actions


def test_a_changed_hash_replaces_and_names_the_changed_option_alone() -> None:
    before = spec(args={"gpu-memory-utilization": 0.92, "seed": 1})
    after = spec(hash_="h2", args={"gpu-memory-utilization": 0.9, "seed": 1})
    (action,) = diff(config(before), config(after)).actions
    assert action.kind == "replace"
    assert action.changes == (Change("args.gpu-memory-utilization", 0.92, 0.9),)


def test_a_key_that_the_engine_does_not_see_is_applied_in_place() -> None:
    before, after = spec(aliases=()), spec(aliases=("gpt-4o-mini",), idle_timeout=1800.0)
    (action,) = diff(config(before), config(after)).actions
    assert action.kind == "in_place"
    assert action.changes == (Change("aliases", [], ["gpt-4o-mini"]), Change("idle_timeout", "off", "30m"))


def test_limits_and_restart_rules_are_applied_in_place() -> None:
    before, after = spec(), spec(limits=Limits(stop_timeout=90.0), restart=RestartPolicy(limit=0))
    (action,) = diff(config(before), config(after)).actions
    assert (action.kind, {change.key for change in action.changes}) == ("in_place", {"stop_timeout", "restart_limit"})


def test_a_new_default_of_an_engine_key_restarts_nothing() -> None:
    (action,) = diff(config(spec(host="127.0.0.1")), config(spec(host="127.0.0.2"))).actions
    assert action.kind == "keep" and action.changes == ()


def test_growing_keeps_the_first_instance_and_shrinking_ends_the_last_ones() -> None:
    grown = diff(config(spec(replicas=1)), config(spec(replicas=3)))
    assert kinds(grown) == {"a/0": "in_place", "a/1": "start", "a/2": "start"}
    assert [action.shown for action in grown.actions] == ["a/0", "a/1", "a/2"]
    shrunk = diff(config(spec(replicas=3)), config(spec(replicas=1)))
    assert kinds(shrunk) == {"a/1": "stop", "a/2": "stop", "a/0": "in_place"}


def test_a_renamed_shard_ends_and_another_one_starts() -> None:
    result = diff(config(spec("old")), config(spec("new")))
    assert [(action.kind, action.id) for action in result.actions] == [
        ("stop", ShardId("old")),
        ("start", ShardId("new")),
    ]


def test_a_changed_secret_replaces_and_shows_nothing_of_it() -> None:
    before, after = spec(api_key=Secret("hunter2")), spec(hash_="h2", api_key=Secret("hunter3"))
    result = diff(config(before), config(after))
    assert result.actions[0].changes == (Change("api_key", "***", "***"),)
    assert "hunter" not in repr(result) + str(result.as_json())


def test_directories_and_node_keys_need_a_restart_of_llmgw_but_on_stop_does_not() -> None:
    moved = attrs.evolve(SUPERVISOR, state_dir="/elsewhere", on_stop="stop")
    renamed = attrs.evolve(NODE, name="gpu-02")
    result = diff(config(spec()), config(spec(), supervisor=moved, node=renamed))
    assert result.needs_restart == ("node.name", "supervisor.state_dir")
    assert kinds(result) == {"a/0": "keep"}


def test_every_key_of_the_schema_is_compared() -> None:
    shown = {key.partition(".")[0] for key in keys_of(spec(env={"A": "1"}, args={"a": 1}, where={"rack": ("r",)}))}
    assert shown == set(SHARD.by_name) - {"inherit"}


def test_as_json_counts_what_it_lists() -> None:
    answer = diff(config(spec("a"), spec("b")), config(spec("a"), spec("c"))).as_json()
    assert answer["counts"] == {"keep": 1, "in_place": 0, "replace": 0, "start": 1, "stop": 1}
    assert answer["actions"][0] == {"name": "b", "shard": "b", "replica": 0, "action": "stop", "changes": []}


SPECS = st.builds(
    spec,
    name=st.sampled_from("abcd"),
    hash_=st.sampled_from(["h1", "h2"]),
    replicas=st.integers(1, 3),
    aliases=st.sampled_from([(), ("x",)]),
    autostart=st.booleans(),
    idle_timeout=st.sampled_from([None, 60.0]),
)
CONFIGS = st.lists(SPECS, max_size=4, unique_by=lambda made: made.name).map(lambda made: config(*made))


@given(CONFIGS)
def test_a_configuration_against_itself_only_keeps(one: Config) -> None:
    result = diff(one, one)
    assert not result.needs_restart and {action.kind for action in result.actions} <= {"keep"}


@given(CONFIGS, CONFIGS)
def test_carrying_out_the_actions_leads_exactly_to_the_new_configuration(before: Config, after: Config) -> None:
    running = {id_: (made.config_hash, made.aliases) for made in before.shards for id_ in made.ids}
    wanted = {id_: (made.config_hash, made.aliases) for made in after.shards for id_ in made.ids}
    for action in diff(before, after).actions:
        if action.kind == "stop":
            del running[action.id]
        elif action.kind == "start":
            assert action.id not in running
            running[action.id] = wanted[action.id]
        elif action.kind in ("replace", "in_place"):
            assert running[action.id] != wanted[action.id] or action.changes
            running[action.id] = wanted[action.id]
    assert running == wanted


@pytest.mark.parametrize("kept", ["keep", "in_place"])
def test_an_engine_that_stays_has_its_hash_unchanged(kept: str) -> None:
    before = config(spec("a"), spec("b", aliases=("x",)), spec("c", "h1"))
    after = config(spec("a"), spec("b"), spec("c", "h2"))
    for action in diff(before, after).of_kind(kept):  # type: ignore[arg-type]
        old, new = before.shard(action.id.name), after.shard(action.id.name)
        assert old is not None and new is not None and old.config_hash == new.config_hash
