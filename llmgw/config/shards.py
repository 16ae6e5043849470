"""From written tables to `ShardSpec`s: defaults, inheritance, and every check that needs more than one key."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import define, field, frozen

from llmgw.config.arithmetic import Sizes, Uneven, lay_out
from llmgw.config.kinds import closest
from llmgw.config.reading import Place, Reading
from llmgw.config.schema import SHARD
from llmgw.config.written import Setting, Written, require
from llmgw.domain.secret_names import sounds_secret
from llmgw.domain.shard import UNSET, EngineKind, Limits, ParallelLayout, RestartPolicy, Secret, ShardSpec
from llmgw.engines.adapter import owning_key, profile
from llmgw.engines.keys import why_no_key
from llmgw.engines.options import normal_name

NOT_INHERITED = ("name", "gpus", "port", "inherit")
MERGED = ("env", "args", "where")
"""Tables that are merged key by key; everything else is replaced."""

SECRET_OPTION = re.compile(r"(?:^|-)(?:api-keys?|(?:hf|auth|access|bearer)-token|secret|password)$", re.IGNORECASE)
"""Options of engines that take a secret as their value."""

HASHED = tuple(k.name for k in SHARD.keys if k.effect == "replace" and k.name not in ("name", "inherit"))
"""Keys that reach the engine or decide where it runs: a change replaces the shard."""


@define
class Shard:
    """A shard with all that is written for it, on its way to a spec."""

    written: Written
    merged: Written
    engine: EngineKind
    here: bool = True
    """`where` matches this node."""
    gpus: int | tuple[int | str, ...] = 0
    layout: ParallelLayout = field(factory=ParallelLayout)

    @property
    def name(self) -> str:
        return str(self.merged.value("name"))

    def value(self, name: str) -> Any:
        return self.merged.value(name)

    def is_written(self, name: str) -> bool:
        return name in self.merged.settings


@frozen
class Surroundings:
    """What shards are judged against."""

    labels: Mapping[str, str]
    """Of this node, `node` included."""
    has_gateway: bool
    has_cluster: bool
    default_first_byte: float | None
    default_chunk: float | None


@frozen
class Built:
    """`specs` are this node's shards that have no error, `elsewhere` names those of other nodes, `merged` all."""

    specs: tuple[ShardSpec, ...]
    elsewhere: tuple[str, ...]
    merged: tuple[Written, ...]


def build_shards(reading: Reading, file: Written, around: Surroundings) -> Built:
    """Every shard with defaults and inheritance applied; what is wrong is reported."""
    shards = _merge_all(reading, file)
    for shard in shards:
        _check_one(reading, shard, around)
    _check_names(reading, shards)
    here = [s for s in shards if s.here]
    _check_gpus(reading, here)
    _check_ports(reading, here)
    specs = [
        _spec(shard, around)
        for shard in here
        if shard.merged.is_usable("name") and not shard.merged.broken and not _has_failed(reading, shard)
    ]
    elsewhere = tuple(s.name for s in shards if not s.here and s.merged.is_usable("name"))
    return Built(tuple(specs), elsewhere, tuple(s.merged for s in shards))


# -------------------------------------------------------------------------------------------- defaults and inheritance


def _merge_all(reading: Reading, file: Written) -> list[Shard]:
    rows = file.arrays.get("shard", [])
    by_name: dict[str, Written] = {}
    for row in rows:
        if "name" in row.settings:
            by_name.setdefault(row.settings["name"].value, row)
    defaults = file.tables.get("defaults")
    return [_merge_one(reading, row, by_name, defaults) for row in rows]


def _merge_one(reading: Reading, row: Written, by_name: Mapping[str, Written], defaults: Written | None) -> Shard:
    chain = _ancestors(reading, row, by_name)
    layers: list[tuple[Written, tuple[str, ...]]] = [(ancestor, NOT_INHERITED) for ancestor in reversed(chain)]
    merged = Written(SHARD, row.place, broken=set(row.broken))
    for ancestor in chain:
        merged.broken |= ancestor.broken.difference(NOT_INHERITED)
    engine = _engine([row, *chain, *([defaults] if defaults else [])])
    if defaults is not None:
        special = defaults.tables.get(engine.value)
        layers = [(defaults, ()), *([(special, ())] if special else []), *layers]
        # Only what is wrong with a key of a shard: the nested tables of other engines are no concern of this one.
        names = SHARD.by_name.keys()
        merged.broken |= {n for n in defaults.broken if n in names and n != "command"}
        merged.broken |= special.broken if special else set()
    for layer, skipped in [*layers, (row, ())]:
        for name, setting in layer.settings.items():
            if name not in skipped:
                merged.settings[name] = _laid_over(merged.settings.get(name), name, setting)
    if "args" in merged.settings:
        args = merged.settings["args"]
        kept = {k: s for k, s in args.value.items() if s.value is not UNSET}
        merged.settings["args"] = Setting(kept, args.place)
    require(reading, merged)
    return Shard(row, merged, engine)


def _laid_over(below: Setting | None, name: str, setting: Setting) -> Setting:
    if name not in MERGED:
        return setting
    entries = dict(below.value) if below is not None else {}
    for key, inner in setting.value.items():
        option = normal_name(key) if name == "args" else key
        entries.pop(option, None)  # what is written later also stands later on the command line
        entries[option] = inner
    return Setting(entries, setting.place)


def _ancestors(reading: Reading, row: Written, by_name: Mapping[str, Written]) -> list[Written]:
    """The shards that `row` inherits from, nearest first."""
    chain: list[Written] = []
    seen = [row]
    at = row
    while "inherit" in at.settings and at.is_usable("inherit"):
        setting = at.settings["inherit"]
        parent = by_name.get(setting.value)
        if parent is None:
            if at is row:
                meant = closest(setting.value, tuple(by_name))
                hint = f'did you mean "{meant}"?' if meant else "it must be the name of a [[shard]]"
                reading.report(setting.place, "unknown-shard", f'there is no shard "{setting.value}"', hint)
                row.broken.add("inherit")
            break
        if any(parent is s for s in seen):
            if parent is row:
                names = " -> ".join(str(s.settings["name"].value) for s in [*seen, parent])
                message = f"inherit goes in a circle: {names}"
                reading.report(setting.place if at is row else row.settings["inherit"].place, "inherit-circle", message)
                row.broken.add("inherit")
            break
        chain.append(parent)
        seen.append(parent)
        at = parent
    return chain


def _engine(tables: Iterable[Written]) -> EngineKind:
    for table in tables:
        if "engine" in table.settings:
            return EngineKind(table.settings["engine"].value)
    return EngineKind(SHARD.by_name["engine"].default)


# ------------------------------------------------------------------------------------------------ checks of one shard


def _check_one(reading: Reading, shard: Shard, around: Surroundings) -> None:
    merged = shard.merged
    shard.here = _matches(shard.value("where"), around.labels)
    if merged.is_usable("gpus", "tensor_parallel", "pipeline_parallel", "data_parallel", "nodes", "engine"):
        _check_sizes(reading, shard, around)
    _check_engine(reading, shard, around)
    _check_args(reading, shard)
    _check_limits(reading, shard)
    _check_idle(reading, shard, around)


def _matches(where: Mapping[str, Setting], labels: Mapping[str, str]) -> bool:
    return all(labels.get(label) in setting.value for label, setting in where.items())


def _check_sizes(reading: Reading, shard: Shard, around: Surroundings) -> None:
    merged = shard.merged

    def written(name: str) -> Any:
        return merged.settings[name].value if name in merged.settings else None

    gpus, nodes = written("gpus"), int(shard.value("nodes"))
    sizes = Sizes(
        shard.engine,
        gpus,
        written("tensor_parallel"),
        written("pipeline_parallel"),
        written("data_parallel"),
        nodes,
    )
    result = lay_out(sizes)
    if isinstance(result, Uneven):
        _fail(reading, shard, result.key, "uneven-gpus", result.message, result.hint)
        return
    shard.gpus, shard.layout = result
    pinned = isinstance(gpus, tuple) and bool(gpus)
    if nodes > 1:
        if not around.has_cluster:
            _fail(reading, shard, "nodes", "needs-cluster", f"nodes = {nodes} needs a [cluster] table")
        if not profile(shard.engine).supports_nodes:
            message = f'engine = "{shard.engine}" cannot span nodes'
            _fail(reading, shard, "nodes", "engine-cannot", message, "vllm and sglang can")
        if pinned:
            hint = "write gpus as a number, for all nodes together"
            _fail(reading, shard, "gpus", "wrong-type", "a list of GPUs names those of one node only", hint)
        if shard.engine is EngineKind.SGLANG and shard.layout.data > 1:
            _fail(reading, shard, "data_parallel", "engine-cannot", "sglang has no data_parallel over several nodes")
    if merged.is_usable("replicas") and shard.value("replicas") > 1:
        if pinned:
            hint = "write gpus as a number, or one [[shard]] for each instance with the same model"
            _fail(reading, shard, "replicas", "replicas-pinned", "replicas above 1 cannot all have the same GPUs", hint)
        if isinstance(shard.value("port"), int):
            hint = 'write port = "auto"'
            _fail(reading, shard, "port", "replicas-pinned", "replicas above 1 cannot all have the same port", hint)
    if shard.is_written("gpu_class") and not isinstance(shard.gpus, int):
        message = "gpu_class does nothing when gpus lists them"
        reading.warn(merged.place_of("gpu_class"), "no-effect", message, "remove one of the two")
    if merged.is_usable("share_gpus", "gpu_memory") and shard.value("share_gpus") and not shard.value("gpu_memory"):
        _fail(reading, shard, "share_gpus", "share-needs-memory", "share_gpus needs gpu_memory", 'for example "40GiB"')


def _check_engine(reading: Reading, shard: Shard, around: Surroundings) -> None:
    merged, engine = shard.merged, shard.engine
    if not merged.is_usable("engine"):
        return
    if engine is EngineKind.COMMAND and not shard.is_written("command") and merged.is_usable("command"):
        hint = 'write command = ["PROGRAM", "--port", "${llmgw.port}"]'
        reading.report(merged.place, "missing-key", 'engine = "command" needs the key "command"', hint)
        merged.broken.add("command")
    if engine is EngineKind.SGLANG and ":" in str(shard.value("model")) and merged.is_usable("model"):
        _fail(reading, shard, "model", "bad-value", "sglang takes no ':' in the name of a model", "use - instead")
    if shard.value("port") == "unix" and not profile(engine).supports_unix and merged.is_usable("port"):
        message = f'engine = "{engine}" cannot listen on a unix socket'
        _fail(reading, shard, "port", "engine-cannot", message, 'write port = "auto"')
    if shard.value("models_path") == "" and engine is not EngineKind.COMMAND and merged.is_usable("models_path"):
        hint = "remove the key; without it a server that has no model yet would count as ready"
        _fail(reading, shard, "models_path", "engine-cannot", f"models_path cannot be empty for {engine}", hint)
    if shard.is_written("stall_timeout") and shard.value("stall_timeout") and profile(engine).metrics is None:
        message = f'engine = "{engine}" has no counter of steps'
        _fail(reading, shard, "stall_timeout", "engine-cannot", message, 'write stall_timeout = "off"')
    host = str(shard.value("host"))
    is_local = host == "localhost" or host == "::1" or host.startswith("127.")
    env, written = shard.value("env"), shard.is_written("api_key")
    is_open = not written and why_no_key(engine, env, written=written, served=around.has_gateway) is not None
    if shard.value("port") != "unix" and not is_local and is_open and merged.is_usable("api_key"):
        message = f"{host} can be reached from other machines and the engine asks for no key"
        reading.warn(merged.place_of("host"), "open-engine", message, 'set api_key, or host = "127.0.0.1"')


def _check_args(reading: Reading, shard: Shard) -> None:
    merged, engine = shard.merged, shard.engine
    if not merged.is_usable("engine"):
        return
    known = profile(engine)
    for option, setting in shard.value("args").items():
        key = owning_key(engine, option)
        if key is not None:
            _refuse_owned(reading, setting.place, option, key)
        elif SECRET_OPTION.search(option):
            message = f'"{option}" would put a secret on the command line, where every user of this host can read it'
            reading.report(setting.place, "secret-in-args", message, "use env or api_key", at_key=True)
        elif isinstance(setting.value, Mapping) and not known.json_tables:
            message = f'engine = "{engine}" takes no table for an option'
            reading.report(setting.place, "wrong-type", message, "write the value as a string")
        for name, aliases in (
            ("max_model_len", known.max_model_len_aliases),
            ("quantization", known.quantization_aliases),
        ):
            if option in aliases and shard.is_written(name):
                message = f'"{option}" and {name} are the same and both are written'
                hint = f"remove one; {name} is in {merged.place_of(name)}"
                reading.report(setting.place, "given-twice", message, hint, at_key=True)
    extra: tuple[str, ...] = shard.value("extra_args")
    for index, word in enumerate(extra):
        if not word.startswith("-") or not merged.is_usable("extra_args"):
            continue
        place = merged.place_of("extra_args").at(index)
        name = normal_name(word)
        key = owning_key(engine, word)
        if SECRET_OPTION.search(name) or key == "api_key":
            message = f"--{name} would put a secret on the command line, where every user of this host can read it"
            reading.report(place, "secret-in-args", message, "use env or api_key")
        elif key is not None:
            message = f"--{name} is set by llmgw too; the engine decides which of the two counts"
            reading.warn(place, "owned-option", message, f"use {key} instead")


def _refuse_owned(reading: Reading, place: Place, option: str, key: str) -> None:
    if key == "api_key":
        message = f'"{option}" would put a secret on the command line, where every user of this host can read it'
        reading.report(place, "secret-in-args", message, "use api_key", at_key=True)
        return
    hint = f"use {key}" if key in SHARD.by_name else key
    reading.report(place, "owned-option", f'"{option}" is set by llmgw', hint, at_key=True)


def _check_limits(reading: Reading, shard: Shard) -> None:
    for low, high in (("load_timeout", "load_timeout_max"), ("restart_delay", "restart_delay_max")):
        if not shard.merged.is_usable(low, high):
            continue
        least, most = shard.value(low), shard.value(high)
        if most is None or least <= most:
            continue
        key = high if shard.is_written(high) else low
        shown = {name: SHARD.by_name[name].kind.show(shard.value(name)) for name in (low, high)}
        message = f'{low} = "{shown[low]}" is longer than {high} = "{shown[high]}"'
        _fail(reading, shard, key, "out-of-range", message, f"set {high} too" if key == low else f"raise {high}")


def _check_idle(reading: Reading, shard: Shard, around: Surroundings) -> None:
    merged = shard.merged
    if not merged.is_usable("idle_timeout", "idle_action", "sleep_level"):
        return
    if shard.value("idle_timeout") is not None and not around.has_gateway:
        _fail(reading, shard, "idle_timeout", "needs-gateway", "idle_timeout needs a [gateway] that counts requests")
    if shard.value("idle_action") == "sleep":
        host = str(shard.value("host"))
        if merged.is_usable("engine") and shard.engine is not EngineKind.VLLM:
            _fail(reading, shard, "idle_action", "engine-cannot", "only vllm can sleep", 'write idle_action = "stop"')
        elif shard.value("port") != "unix" and not (host == "::1" or host == "localhost" or host.startswith("127.")):
            message = 'idle_action = "sleep" opens the engine\'s control door, so it must listen on loopback'
            _fail(reading, shard, "idle_action", "engine-cannot", message, 'write host = "127.0.0.1"')
    elif shard.is_written("sleep_level"):
        message = 'sleep_level needs idle_action = "sleep"'
        _fail(reading, shard, "sleep_level", "no-effect", message, "remove it")


def _fail(reading: Reading, shard: Shard, key: str, code: str, message: str, hint: str | None = None) -> None:
    reading.report(shard.merged.place_of(key), code, message, hint)
    shard.merged.broken.add(key)


def _has_failed(reading: Reading, shard: Shard) -> bool:
    """An error was found inside the shard's table or at a value that it takes from another one."""
    places = [place for _, place in _places(shard.merged)] + [shard.merged.place]
    for file, path in reading.failed:
        for place in places:
            if place.doc.file.path == file and (path == place.path or path[: len(place.path)] == place.path):
                return True
    return False


def _places(merged: Written) -> Iterable[tuple[str, Place]]:
    for name, setting in merged.settings.items():
        yield name, setting.place
        if name in MERGED:
            for entry, inner in setting.value.items():
                yield f"{name}.{entry}", inner.place
        elif name == "gpus" and isinstance(setting.value, tuple):
            yield from ((f"gpus.{index}", setting.place.at(index)) for index in range(len(setting.value)))


# --------------------------------------------------------------------------------------------- checks between shards


def _check_names(reading: Reading, shards: list[Shard]) -> None:
    first: dict[str, Shard] = {}
    models: dict[str, Shard] = {}
    for shard in shards:
        if "name" in shard.written.settings:
            other = first.setdefault(shard.name, shard)
            if other is not shard:
                message = f'shard name "{shard.name}" is used twice (first in {other.written.place_of("name")})'
                reading.report(shard.written.place_of("name"), "duplicate-name", message)
        if shard.is_written("model"):
            models.setdefault(shard.value("model"), shard)
    owners: dict[str, Shard] = {}
    for shard in shards:
        for index, alias in enumerate(shard.value("aliases")):
            if not shard.is_written("model"):
                continue
            owner = models.get(alias) or owners.setdefault(alias, shard)
            if owner.value("model") != shard.value("model"):
                what = "model" if alias in models else "an alias"
                message = f'"{alias}" is already {what} of shard "{owner.name}"'
                place = shard.merged.place_of("aliases").at(index)
                reading.report(place, "alias-taken", message, "a name leads to one model")


def _check_gpus(reading: Reading, shards: list[Shard]) -> None:
    holders: dict[int | str, list[Shard]] = {}
    for shard in shards:
        setting = shard.merged.settings.get("gpus")
        if setting is None or not isinstance(setting.value, tuple) or not shard.merged.is_usable("gpus"):
            continue
        for index, gpu in enumerate(setting.value):
            others = [s for s in holders.get(gpu, []) if not _may_share(s, shard)]
            if others:
                line = others[0].merged.place_of("gpus")
                message = f'GPU {gpu} already belongs to shard "{others[0].name}" ({line})'
                hint = "set share_gpus = true and gpu_memory on both if that is meant"
                reading.report(setting.place.at(index), "gpu-taken", message, hint)
            holders.setdefault(gpu, []).append(shard)


def _may_share(one: Shard, other: Shard) -> bool:
    if all(s.value("idle_timeout") is not None for s in (one, other)):
        return True
    # A share_gpus that is itself wrong, or only a word that was meant to be it, is not judged a second time.
    return all(s.value("share_gpus") or not s.merged.is_usable("share_gpus", "idle_timeout") for s in (one, other))


def _check_ports(reading: Reading, shards: list[Shard]) -> None:
    first: dict[int, Shard] = {}
    for shard in shards:
        port = shard.value("port")
        if not isinstance(port, int) or not shard.merged.is_usable("port"):
            continue
        place = shard.merged.place_of("port")
        other = first.setdefault(port, shard)
        if other is not shard:
            message = f'port {port} already belongs to shard "{other.name}" ({other.merged.place_of("port")})'
            reading.report(place, "port-taken", message, 'write port = "auto"')
        ephemeral = reading.facts.ephemeral_ports
        if ephemeral is not None and not reading.offline and ephemeral[0] <= port <= ephemeral[1]:
            message = f"port {port} lies in the ephemeral range {ephemeral[0]}-{ephemeral[1]}"
            hint = 'another program\'s outgoing connection may hold it; write port = "auto", or a lower one'
            reading.warn(place, "ephemeral-port", message, hint)


# ------------------------------------------------------------------------------------------------------------ the spec


def _spec(shard: Shard, around: Surroundings) -> ShardSpec:
    value = shard.value
    known = profile(shard.engine)
    args = {option: setting.value for option, setting in value("args").items()}
    max_model_len, quantization = value("max_model_len"), value("quantization")
    for option in known.max_model_len_aliases:
        if type(args.get(option)) is int:
            max_model_len = args.pop(option)
    for option in known.quantization_aliases:
        if isinstance(args.get(option), str):
            quantization = args.pop(option)
    weights = value("weights")
    return ShardSpec(
        name=shard.name,
        model=value("model"),
        engine=shard.engine,
        command=value("command") or known.default_command,
        config_hash=config_hash(shard.merged),
        weights=weights if weights or shard.engine is EngineKind.COMMAND else value("model"),
        aliases=value("aliases"),
        unlisted=value("unlisted"),
        gpus=shard.gpus,
        gpu_class=value("gpu_class") or (),
        gpu_memory=value("gpu_memory"),
        share_gpus=value("share_gpus"),
        layout=shard.layout,
        replicas=value("replicas"),
        nodes=value("nodes"),
        placement_priority=value("placement_priority"),
        where=shard.merged.plain("where"),
        host=value("host"),
        port=value("port"),
        args=args,
        extra_args=value("extra_args"),
        env={name: _guarded(name, setting.value) for name, setting in value("env").items()},
        workdir=value("workdir"),
        api_key=value("api_key"),
        quantization=quantization,
        allow=value("allow"),
        max_model_len=max_model_len,
        ready_path=value("ready_path"),
        models_path=value("models_path"),
        warmup=value("warmup"),
        limits=Limits(**{name: value(name) for name in _LIMITS}),
        restart=RestartPolicy(
            value("restart"),
            value("restart_delay"),
            value("restart_delay_max"),
            value("restart_limit"),
            value("restart_stable"),
        ),
        autostart=value("autostart"),
        idle_timeout=value("idle_timeout"),
        idle_action=value("idle_action"),
        sleep_level=value("sleep_level"),
        max_inflight=None if value("max_inflight") == "auto" else value("max_inflight"),
        first_byte_timeout=_own_or(shard, "first_byte_timeout", around.default_first_byte),
        chunk_timeout=_own_or(shard, "chunk_timeout", around.default_chunk),
        origins={name: place.exact for name, place in _places(shard.merged)},
    )


_LIMITS = (
    "probe_interval",
    "probe_interval_ready",
    "probe_timeout",
    "start_timeout",
    "load_timeout",
    "load_timeout_max",
    "stall_timeout",
    "unhealthy_timeout",
    "drain_timeout",
    "stop_timeout",
    "gpu_release_timeout",
)


def _own_or(shard: Shard, name: str, default: float | None) -> Any:
    return shard.value(name) if shard.is_written(name) else default


def _guarded(name: str, value: Any) -> Any:
    """A plain text under a secret's name is masked like one."""
    return Secret(value, "inline") if isinstance(value, str) and value and sounds_secret(name) else value


def config_hash(merged: Written) -> str:
    """A hash over the written engine keys and the digests of secrets: 16 hex digits.

    Built-in defaults are left out, so that a new llmgw with a new default restarts nothing.
    """
    written = {name: _canonical(merged.settings[name].value) for name in HASHED if name in merged.settings}
    text = json.dumps(written, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    if isinstance(value, Setting):
        return _canonical(value.value)
    if isinstance(value, Secret):
        return {"secret": value.digest}
    if value is UNSET:
        return {"unset": True}
    if isinstance(value, Mapping):
        return {str(key): _canonical(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(inner) for inner in value]
    return value
