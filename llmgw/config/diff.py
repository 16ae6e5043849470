"""Two configurations in, what a reload does out; supervisor, control and `plan` share it. Pure. Which keys touch an
engine and which need a restart of llmgw is said by `effect` in the schema.

Whether an engine is replaced is decided by `config_hash` alone, which covers the written engine keys and the digests
of secrets: a new llmgw with another default restarts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal

import attrs
from attrs import frozen

from llmgw.config.model import Config
from llmgw.config.schema import CLUSTER, NODE, SHARD, SUPERVISOR
from llmgw.config.units import format_duration
from llmgw.domain.shard import Limits, ParallelLayout, RestartPolicy, Secret, ShardId, ShardSpec, Unset

Kind = Literal["keep", "take_over", "in_place", "replace", "start", "stop"]
KINDS: tuple[Kind, ...] = ("keep", "in_place", "replace", "start", "stop")
"""What a reload does. `take_over` is what a start does with an engine that an llmgw has left running."""


@frozen
class Change:
    """One key that differs, as values that JSON can carry; secrets are masked, durations in llmgw's own form."""

    key: str
    before: Any
    after: Any


@frozen
class Action:
    """What happens to one instance. `shown` is the name that people see after the reload."""

    id: ShardId
    kind: Kind
    shown: str
    changes: tuple[Change, ...] = ()


@frozen
class ConfigDiff:
    """`needs_restart` names keys that the running llmgw cannot take up; engines live on over that restart."""

    actions: tuple[Action, ...] = ()
    needs_restart: tuple[str, ...] = ()

    def of_kind(self, kind: Kind) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.kind == kind)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return ("take_over", *KINDS) if self.of_kind("take_over") else KINDS

    def as_json(self) -> dict[str, Any]:
        """The form of `llmgw plan --json` and of the answer to a reload."""
        return {
            "actions": [
                {
                    "name": action.shown,
                    "shard": action.id.name,
                    "replica": action.id.replica,
                    "action": action.kind,
                    "changes": [attrs.asdict(change, recurse=False) for change in action.changes],
                }
                for action in self.actions
            ],
            "counts": {kind: len(self.of_kind(kind)) for kind in self.kinds},
            "needs_restart": list(self.needs_restart),
        }


def diff(before: Config | None, after: Config) -> ConfigDiff:
    """What leads from one configuration to the other; `before` None is a start from nothing.

    Stops come first, in the order of the old files, then everything else in the order of the new ones.
    """
    old = {spec.name: spec for spec in before.shards} if before is not None else {}
    new = {spec.name: spec for spec in after.shards}
    actions: list[Action] = []
    for spec in old.values():
        kept = new[spec.name].replicas if spec.name in new else 0
        actions += [Action(id_, "stop", id_.shown(spec.replicas)) for id_ in spec.ids if id_.replica >= kept]
    for spec in new.values():
        was = old.get(spec.name)
        actions += [compare(id_, was, spec) for id_ in spec.ids]
    return ConfigDiff(tuple(actions), tuple(_needs_restart(before, after)) if before is not None else ())


def start_beside(left: Mapping[ShardId, str], config: Config) -> ConfigDiff:
    """What a start does where engines of an earlier llmgw still run: `left` has the `config_hash` of each."""
    wanted = {id_ for spec in config.shards for id_ in spec.ids}
    gone = tuple(Action(id_, "stop", str(id_) if id_.replica else id_.name) for id_ in sorted(left.keys() - wanted))
    actions = []
    for spec in config.shards:
        for id_ in spec.ids:
            found = left.get(id_)
            kind: Kind = "start" if found is None else "take_over" if found == spec.config_hash else "replace"
            actions.append(Action(id_, kind, id_.shown(spec.replicas)))
    return ConfigDiff((*gone, *actions), ())


def compare(id_: ShardId, was: ShardSpec | None, spec: ShardSpec) -> Action:
    """What one instance needs: `was` is the spec it has now, None when there is no such instance."""
    shown = id_.shown(spec.replicas)
    if was is None or id_.replica >= was.replicas:
        return Action(id_, "start", shown)
    changes = tuple(_changes(keys_of(was), keys_of(spec)))
    if was.config_hash != spec.config_hash:
        return Action(id_, "replace", shown, changes)
    # With an equal hash an engine key can differ by its default alone, and that restarts nothing.
    live = tuple(change for change in changes if not _touches_engine(change.key))
    return Action(id_, "in_place" if live else "keep", shown, live)


# -- keys of a shard ------------------------------------------------------------------------------------------


def keys_of(spec: ShardSpec) -> dict[str, Any]:
    """A shard by the names of the keys in the file; entries of tables stand alone (`args.max-num-seqs`), so that one
    changed option of twenty is shown alone. Times are text, since None says "off" there and nothing elsewhere."""
    keys: dict[str, Any] = {}
    for attribute in attrs.fields(ShardSpec):
        name, value = attribute.name, getattr(spec, attribute.name)
        match value:
            case _ if name in ("config_hash", "origins"):
                pass
            case ParallelLayout():
                keys["tensor_parallel"] = value.tensor
                keys["pipeline_parallel"] = value.pipeline
                keys["data_parallel"] = value.data
            case Limits():
                keys |= {limit.name: _time(getattr(value, limit.name)) for limit in attrs.fields(Limits)}
            case RestartPolicy():
                keys["restart"] = value.mode
                keys["restart_delay"] = _time(value.delay)
                keys["restart_delay_max"] = _time(value.delay_max)
                keys["restart_limit"] = value.limit
                keys["restart_stable"] = _time(value.stable)
            case Mapping():
                keys |= {f"{name}.{key}": entry for key, entry in value.items()}
            case _ if name in _TIMES:
                keys[name] = _time(value)
            case _:
                keys[name] = value
    return keys


_TIMES = frozenset({"idle_timeout", "first_byte_timeout", "chunk_timeout"})


def _touches_engine(key: str) -> bool:
    return SHARD.by_name[key.partition(".")[0]].effect == "replace"


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for key in (*before, *(key for key in after if key not in before)):
        old, new = before.get(key), after.get(key)
        # Compared before masking, so that a changed secret shows as a change from *** to ***.
        if old != new or type(old) is not type(new):
            yield Change(key, _plain(old), _plain(new))


def _plain(value: Any) -> Any:
    match value:
        case Secret():
            return "***"
        case Unset():
            return "unset"
        case StrEnum():
            return value.value
        case tuple() | list():
            return [_plain(entry) for entry in value]
        case Mapping():
            return {str(key): _plain(entry) for key, entry in value.items()}
        case _:
            return value


def _time(seconds: float | None) -> str:
    return "off" if seconds is None else format_duration(seconds)


# -- everything else ------------------------------------------------------------------------------------------


def _needs_restart(before: Config, after: Config) -> Iterator[str]:
    for section, table, old, new in (
        ("node", NODE, before.node, after.node),
        ("supervisor", SUPERVISOR, before.supervisor, after.supervisor),
        ("cluster", CLUSTER, before.cluster, after.cluster),
    ):
        if old is None or new is None:
            if old is not new:
                yield section
            continue
        for key in table.keys:
            if key.effect == "restart" and getattr(old, key.name) != getattr(new, key.name):
                yield f"{section}.{key.name}"
