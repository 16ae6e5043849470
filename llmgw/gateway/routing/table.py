"""From a snapshot of the board and the file to what the gateway may do: one immutable table per revision.

The file says which names there are, the board which engines stand behind them. An engine that the file no longer has
(removed, or under another model's name while it is replaced) gets nothing new; what it runs may finish.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from llmgw.config.model import Config
from llmgw.domain.shard import Secret, ShardId, ShardSpec, TcpEndpoint, UnixEndpoint
from llmgw.domain.status import (
    DEFAULT_SLOTS,
    ConditionKind,
    Instance,
    ShardState,
    ShardStatus,
    Snapshot,
    Wish,
    is_coming,
    is_loadable,
)

Key = tuple[ShardId, int]
"""An endpoint's identity: the instance and its generation. An engine that was started anew is another endpoint."""


@frozen
class Endpoint:
    """An engine that takes requests. Times are seconds; None is off."""

    id: ShardId
    generation: int
    name: str
    address: TcpEndpoint | UnixEndpoint
    model: str
    """What the engine itself calls its model."""
    api_key: Secret | None
    slots: int
    """Requests it gets at a time."""
    first_byte_timeout: float | None
    chunk_timeout: float | None
    key: Key = field(init=False, eq=False, repr=False)

    @key.default
    def _key(self) -> Key:
        return (self.id, self.generation)


@frozen
class Standing:
    """Where one instance of a model stands, ready or not."""

    id: ShardId
    name: str
    status: ShardStatus
    loadable: bool
    """A request may bring it up (again): it has an `idle_timeout`, or sleeps and can be woken, and no operator has
    stopped or drained it. True also while it is up already."""
    is_coming: bool
    """It comes without anybody's asking: under way, waiting for its next attempt or its GPUs, or ill for the moment."""

    @property
    def state(self) -> ShardState:
        return self.status.state

    @property
    def is_sleeping(self) -> bool:
        return self.status.condition(ConditionKind.SLEEPING) is not None

    @property
    def word(self) -> str:
        """Its state as a client sees it."""
        return "sleeping" if self.is_sleeping else self.state.value

    @property
    def words(self) -> str:
        """The state and why, on one line: `failed: GPU memory ran out`."""
        status = self.status
        if status.reason is not None:
            why = status.reason.cause
        elif status.progress is not None:
            percent = "" if status.progress.fraction is None else f" {status.progress.fraction:.0%}"
            why = f"{status.progress.phase}{percent}"
        else:
            why = "; ".join(c.text for c in status.conditions if c.kind in _EXPLAINS and c.text) or status.detail
        return f"{self.word}: {why}" if why else self.word


_EXPLAINS = frozenset(
    {
        ConditionKind.UNPLACED,
        ConditionKind.UNHEALTHY,
        ConditionKind.GPU_HELD,
        ConditionKind.HELD,
        ConditionKind.SLEEPING,
        ConditionKind.STOPPING,
    }
)
"""Conditions that say why an instance takes no request."""


@frozen
class Model:
    """One model under all of its names."""

    name: str
    aliases: tuple[str, ...]
    unlisted: bool
    endpoints: tuple[Endpoint, ...]
    """Ready and routable, in the file's order."""
    standings: tuple[Standing, ...]
    """Every instance that the board knows, in the file's order."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name first."""
        return (self.name, *self.aliases)

    @property
    def is_loadable(self) -> bool:
        return any(standing.loadable for standing in self.standings)

    @property
    def is_coming(self) -> bool:
        return any(standing.is_coming for standing in self.standings)

    @property
    def word(self) -> str:
        """The state of the instance that is nearest to answering; `pending` while the board knows none."""
        if self.endpoints:
            return ShardState.READY.value
        # One that is ready and takes nothing is behind those under way: nobody knows when it is well again.
        nearest = min(self.standings, key=lambda standing: _NEARNESS.index(standing.state), default=None)
        if nearest is None:
            return ShardState.PENDING.value
        is_ill = nearest.state is ShardState.READY and not nearest.is_sleeping
        return "unhealthy" if is_ill else nearest.word


_NEARNESS = (
    ShardState.LOADING,
    ShardState.STARTING,
    ShardState.READY,
    ShardState.PENDING,
    ShardState.STOPPED,
    ShardState.DRAINING,
    ShardState.FAILED,
)
"""Of a model without an endpoint, whose word counts."""


@frozen
class Table:
    """Everything that is routed by, at one revision of the board; immutable."""

    models: Mapping[str, Model]
    """By name and by every alias."""
    endpoints: Mapping[Key, Endpoint]
    """What may get new requests."""
    draining: frozenset[Key]
    """What gets nothing new and may finish what it runs. What is in neither has ended or is being stopped."""
    revision: int


def build_table(snapshot: Snapshot, config: Config) -> Table:
    """The table at a snapshot. Raises ValueError for an address that llmgw cannot have written."""
    specs: dict[str, list[ShardSpec]] = {}
    for spec in config.shards:
        specs.setdefault(spec.model, []).append(spec)
    models: dict[str, Model] = {}
    endpoints: dict[Key, Endpoint] = {}
    for name, group in specs.items():
        model = _model(name, group, snapshot.shards)
        for endpoint in model.endpoints:
            endpoints[endpoint.key] = endpoint
        for alias in model.names:
            models[alias] = model
    statuses = ((id_, instance.status) for id_, instance in snapshot.shards.items())
    keys = {(id_, status.generation) for id_, status in statuses if status.may_finish}
    return Table(models, endpoints, frozenset(keys - endpoints.keys()), snapshot.revision)


def _model(name: str, specs: list[ShardSpec], instances: Mapping[ShardId, Instance]) -> Model:
    endpoints = []
    standings = []
    for spec in specs:
        for id_ in spec.ids:
            instance = instances.get(id_)
            if instance is None:
                # A moment old in the file: its task is about to put it on the board.
                continue
            endpoint = _endpoint(spec, instance)
            if endpoint is not None:
                endpoints.append(endpoint)
            standings.append(
                Standing(
                    id=id_,
                    name=instance.status.name,
                    status=instance.status,
                    loadable=is_loadable(instance, on_demand=spec.idle_timeout is not None),
                    is_coming=endpoint is None and is_coming(instance),
                )
            )
    aliases = dict.fromkeys(alias for spec in specs for alias in spec.aliases if alias != name)
    return Model(
        name=name,
        aliases=tuple(aliases),
        unlisted=all(spec.unlisted for spec in specs),
        endpoints=tuple(endpoints),
        standings=tuple(standings),
    )


def _endpoint(spec: ShardSpec, instance: Instance) -> Endpoint | None:
    status = instance.status
    # The wish counts before its shard has carried it out, so that nothing new meets a drain.
    if not status.routable or instance.intent.wish is not Wish.START or status.endpoint is None:
        return None
    if status.model != spec.model:
        # A reload has given the shard another model; this life still serves the old one.
        return None
    return Endpoint(
        id=status.id,
        generation=status.generation,
        name=status.name,
        address=read_address(status.endpoint),
        model=status.model,
        api_key=status.api_key,
        slots=spec.max_inflight or status.slots or DEFAULT_SLOTS,
        first_byte_timeout=spec.first_byte_timeout,
        chunk_timeout=spec.chunk_timeout,
    )


def read_address(text: str) -> TcpEndpoint | UnixEndpoint:
    """The endpoint that a status shows: `127.0.0.1:8101`, `[::1]:8101` or `unix:PATH`, as `str` of one writes it.

    Raises ValueError for anything else.
    """
    if text.startswith("unix:"):
        return UnixEndpoint(text.removeprefix("unix:"))
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError(f"{text!r} is no address of an engine")
    return TcpEndpoint(host.removeprefix("[").removesuffix("]"), int(port))
