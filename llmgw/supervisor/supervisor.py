"""The nursery of all shards, and the way from one configuration to the next with the least that must change.

`apply` decides at once and returns what is going to happen; rollouts then carry it out, one shard of a model after
another. A newer `apply` replaces what an older one has left to do.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import trio
from attrs import evolve, frozen

from llmgw.board import Cell
from llmgw.config.diff import Action, ConfigDiff, diff
from llmgw.config.model import Config
from llmgw.domain.shard import ShardId, ShardSpec, TcpEndpoint
from llmgw.domain.status import ConditionKind, Intent, ShardState, ShardStatus, Snapshot, Wish
from llmgw.supervisor.assigner import Claim, Holding
from llmgw.supervisor.follow import FollowedTail
from llmgw.supervisor.launch import Engine, Host, Takeover, holding_of, kind_of
from llmgw.supervisor.leftovers import clear_traces, remove_unclaimed_tmp_dirs
from llmgw.supervisor.processes import EngineProcesses, adopt, leftovers_of, why_not_believed
from llmgw.supervisor.procfs import boot_id
from llmgw.supervisor.records import ShardRecord, WishStore
from llmgw.supervisor.shard import Orders, Shard

log = logging.getLogger(__name__)


@frozen
class Found:
    """What an earlier supervisor left behind, sorted by what is to be done with it."""

    takeovers: Mapping[ShardId, Takeover]
    remains: Mapping[ShardId, tuple[ShardRecord, EngineProcesses]]
    """Of a dead leader: to be ended before the shard may start again."""


@frozen
class _Member:
    """One shard's task, from outside."""

    shard: Shard
    orders: Cell[Orders]


class Supervisor:
    """Owns all shards. Everything here runs in trio's thread; `apply` is called by `run` and by a reload alone."""

    def __init__(self, host: Host, wishes: WishStore) -> None:
        self._host = host
        self._board = host.board
        self._wish_store = wishes
        self._wishes: dict[ShardId, Intent] = {}
        """Of an earlier supervisor: each counts once, when its shard comes."""
        self._members: dict[ShardId, _Member] = {}
        self._rollouts: dict[str, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None
        self._inherited: dict[ShardId, Holding] = {}
        """GPUs of engines of an earlier supervisor, until their own launch or clean-up answers for them."""
        host.assigner.claims = self._claims

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take over what is proven ours, start what is wanted, and go on until `board.leaving` is set.

        Started when the configuration is applied; models load afterwards. Returns when every engine is gone, or was
        left running on purpose.
        """
        self._wishes = self._wish_store.load()
        # Before strangers are reaped: a child that outlived a re-execution of llmgw must not lose its exit code.
        found = self._find()
        async with trio.open_nursery() as services:
            await services.start(self._host.children.serve)
            await services.start(self._host.follower.serve)
            services.start_soon(self._keep_wishes)
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._begin(found)
                task_status.started()
                await self._board.leaving.wait_value(lambda leaving: leaving is not None)
                for scope in self._rollouts.values():
                    scope.cancel(reason="llmgw leaves")
            self._save_wishes()
            services.cancel_scope.cancel(reason="all shards have ended")

    def output(self, id_: ShardId) -> FollowedTail | None:
        """The output of one instance, over all its launches."""
        member = self._members.get(id_)
        return member.shard.tail if member is not None else None

    def _claims(self) -> list[Claim]:
        """Who has GPUs, wants some, or keeps others off them."""
        claims = []
        for id_, member in self._members.items():
            engine = self._host.engines.get(id_) or self._host.undead.get(id_)
            status = member.shard.status
            if engine is not None or status.generation > 0:
                # Taken over by now, and perhaps ended since: from here on its engine answers for its cards.
                self._inherited.pop(id_, None)
            inherited = self._inherited.get(id_)
            gave_up = status.state is ShardState.FAILED and status.condition(ConditionKind.BACKOFF) is None
            intent = self._board.intent_cell(id_).value
            claims.append(
                Claim(
                    id_,
                    member.orders.value.spec,
                    wanted=intent.wish is Wish.START and not member.orders.value.retired and not gave_up,
                    holds=engine.holding if engine is not None else self._host.spawning.get(id_) or inherited,
                )
            )
        return claims

    # -- from one configuration to the next --------------------------------------------------------------

    def plan(self, config: Config) -> ConfigDiff:
        """What `apply` would do, seen from what runs now and not only from what the last file said."""
        base = diff(self._host.config.value, config)
        specs = {spec.name: spec for spec in config.shards}
        return evolve(base, actions=tuple(self._as_running(action, specs) for action in base.actions))

    def _as_running(self, action: Action, specs: Mapping[str, ShardSpec]) -> Action:
        member = self._members.get(action.id)
        if member is None or action.kind not in ("keep", "in_place", "replace"):
            return action
        status = member.shard.status
        if not status.state.is_live:
            return action
        same = status.config_hash == specs[action.id.name].config_hash
        if same and action.kind == "replace":
            return evolve(action, kind="keep", changes=())
        if not same and action.kind != "replace":
            return evolve(action, kind="replace")
        return action

    def apply(self, config: Config, by: str) -> ConfigDiff:
        """Make `config` the one in force and begin to carry out what follows; returns that."""
        changes = self.plan(config)
        before = self._host.config.value
        # Folders, sockets and the node's name hold for the life of this process; the diff has said so.
        supervisor = evolve(before.supervisor, on_stop=config.supervisor.on_stop)
        self._host.config.set(evolve(config, node=before.node, supervisor=supervisor, cluster=before.cluster))
        if before.supervisor.on_stop != config.supervisor.on_stop:
            assert self._nursery is not None
            for engine in self._host.engines.values():
                self._nursery.start_soon(engine.set_on_stop, config.supervisor.on_stop)
        for scope in self._rollouts.values():
            scope.cancel(reason="a newer configuration replaces what is left to do")
        self._rollouts.clear()
        specs = {spec.name: spec for spec in config.shards}
        replace: dict[str, list[ShardId]] = {}
        for action in changes.actions:
            if action.kind == "stop":
                self._retire(action.id, by)
                continue
            spec = specs[action.id.name]
            if action.kind == "start":
                self._add(action.id, spec, by=by)
                continue
            member = self._members[action.id]
            old = member.orders.value.spec
            member.orders.set(Orders(spec))
            self._settle_wish(action.id, spec, by)
            status = member.shard.status
            if action.kind == "replace" and status.state.is_live:
                replace.setdefault(spec.model, []).append(action.id)
            elif old.config_hash != spec.config_hash and status.state is ShardState.FAILED:
                # What failed with the old keys deserves a try with the new ones.
                self._board.ask_again(action.id, by)
        for model, ids in replace.items():
            self._roll_out(model, ids, by)
        return changes

    def _settle_wish(self, id_: ShardId, spec: ShardSpec, by: str) -> None:
        """What requests and idleness wished does not outlive their say over a shard."""
        intent = self._board.intent_cell(id_).value
        if _still_fits(intent, spec):
            return
        if spec.idle_timeout is not None:
            # It was asleep: without sleep mode the next request loads it.
            self._board.ask(id_, Wish.STOP, by)
        elif spec.autostart or intent.wish is not Wish.STOP:
            self._board.ask(id_, Wish.START, by)

    def _roll_out(self, model: str, ids: Sequence[ShardId], by: str) -> None:
        assert self._nursery is not None
        scope = trio.CancelScope()
        self._rollouts[model] = scope
        self._nursery.start_soon(self._replace_in_turn, ids, by, scope)

    async def _replace_in_turn(self, ids: Sequence[ShardId], by: str, scope: trio.CancelScope) -> None:
        """One instance after another, the next when the last is ready; a failure holds the rest."""
        with scope:
            for position, id_ in enumerate(ids):
                # An operator's wish holds: what is drained is replaced and drained again, what is to stop only stops.
                self._board.ask_again(id_, by)
                await self._wait_replaced(id_, ids[position + 1 :])
                if scope.cancel_called:
                    # It may have been woken in the very step in which a newer configuration took over.
                    return

    async def _wait_replaced(self, id_: ShardId, rest: Sequence[ShardId]) -> None:
        """Until this one is ready with the new keys, or gone. While it is failed the rest is held, not given up."""
        wanted = self._members[id_].orders.value.spec.config_hash
        while True:
            snapshot = await self._board.wait_shards(partial(_settled, id_=id_, config_hash=wanted))
            instance = snapshot.shards.get(id_)
            if instance is None or instance.status.state is not ShardState.FAILED:
                self._hold(rest, "")
                return
            self._hold(rest, f"{instance.status.name} failed with the new configuration")
            await self._board.wait_shards(partial(_is_no_longer_failed, id_=id_))

    def _hold(self, ids: Sequence[ShardId], why: str) -> None:
        for id_ in ids:
            member = self._members.get(id_)
            if member is not None and member.orders.value.held != why:
                member.orders.set(evolve(member.orders.value, held=why))

    # -- shards come and go ------------------------------------------------------------------------------

    def _add(
        self,
        id_: ShardId,
        spec: ShardSpec,
        *,
        by: str,
        takeover: Takeover | None = None,
        remains: tuple[ShardRecord, EngineProcesses] | None = None,
    ) -> None:
        retired = self._members.get(id_)
        if retired is not None:
            # Wanted again before it was gone: it goes on with its task and a new wish.
            retired.orders.set(Orders(spec))
            self._board.ask(id_, Wish.START, by)
            return
        status = ShardStatus(
            id=id_,
            name=id_.shown(spec.replicas),
            model=spec.model,
            engine=spec.engine.value,
            since=self._board.now(),
            config_hash=spec.config_hash,
            load_seconds=self._host.load_times.get(id_),
            on_demand=spec.idle_timeout is not None,
            can_sleep=spec.idle_action == "sleep",
        )
        cell = self._board.add(status, self._first_intent(id_, spec, runs=takeover is not None))
        orders = Cell(Orders(spec))
        shard = Shard(self._host, id_, cell, self._board.intent_cell(id_), orders)
        member = _Member(shard, orders)
        self._members[id_] = member
        assert self._nursery is not None
        self._nursery.start_soon(self._run_member, id_, member, takeover, remains)

    def _first_intent(self, id_: ShardId, spec: ShardSpec, *, runs: bool) -> Intent:
        wished = self._wishes.pop(id_, None)
        if wished is not None and _still_fits(wished, spec):
            return wished
        # What runs already is not stopped by a file that only says what llmgw starts by itself.
        wish = Wish.START if spec.autostart or runs else Wish.STOP
        return Intent(wish, "file", self._board.now())

    async def _run_member(
        self,
        id_: ShardId,
        member: _Member,
        takeover: Takeover | None,
        remains: tuple[ShardRecord, EngineProcesses] | None,
    ) -> None:
        if remains is not None:
            record, processes = remains
            log.warning("%s: its main process died while llmgw was away; ending what it left", id_)
            spec = member.orders.value.spec
            old = Engine(self._host, spec, member.shard.tail, processes, record)
            while not await member.shard.clear_remains(old):
                # Nothing new beside it, and its cards stay its own.
                pass
            self._inherited.pop(id_, None)
        await member.shard.run(takeover)
        while self._board.leaving.value is None and not member.orders.value.retired:
            # Wanted again between its last look and here.
            await member.shard.run()
        if member.orders.value.retired:
            # Its own task takes it off the board: nobody else knows that it will not report any more.
            del self._members[id_]
            self._board.remove(id_)
            self._host.ports.pop(id_, None)

    def _retire(self, id_: ShardId, by: str) -> None:
        member = self._members[id_]
        member.orders.set(evolve(member.orders.value, retired=True))
        self._board.ask(id_, Wish.STOP, by)

    # -- what an earlier supervisor left -----------------------------------------------------------------

    def _find(self) -> Found:
        loaded = self._host.records.load_all()
        for bad in loaded.bad:
            where = f"kept as {bad.kept_as}" if bad.kept_as else "left where it is"
            log.error("cannot read the process record %s: %s; %s", bad.path, bad.why, where)
        takeovers: dict[ShardId, Takeover] = {}
        remains: dict[ShardId, tuple[ShardRecord, EngineProcesses]] = {}
        for record in loaded.records:
            processes = adopt(self._host.children, record)
            if processes is not None and not processes.is_leader_alive():
                # Our own child that died while llmgw executed itself anew: there is nothing to watch any more.
                remains[record.id] = (record, processes)
            elif processes is not None:
                takeovers[record.id] = Takeover(record, processes)
            elif (left := leftovers_of(self._host.children, record)) is not None:
                remains[record.id] = (record, left)
            else:
                log.info("%s: its process record is of no use any more: %s", record.id, why_not_believed(record))
                if record.leader.boot_id == boot_id() and record.gpu_memory_before:
                    # On disk before the record goes: nobody else knows by then that these were in use.
                    self._host.quarantine.doubt(str(record.id), record, "its engine ended while llmgw was away")
                    self._host.quarantine.save_now()
                self._forget(record)
        if not loaded.bad and not self._host.records.any_set_aside():
            # What cannot be read may speak of an engine that lives.
            claimed = [record.tmp_dir for record in loaded.records]
            for problem in remove_unclaimed_tmp_dirs(self._host.settings.state_dir, claimed):
                log.warning("%s", problem)
        return Found(takeovers, remains)

    def _forget(self, record: ShardRecord) -> None:
        for problem in clear_traces(record, self._host.settings.state_dir):
            log.warning("%s: %s", record.id, problem)
        try:
            self._host.records.delete(record.id)
        except OSError as error:
            log.warning("cannot delete the process record of %s: %s", record.id, error)

    def _begin(self, found: Found) -> None:
        """The first configuration: takeovers keep running, what no longer matches is replaced in turn."""
        config = self._host.config.value
        records = [running.record for running in found.takeovers.values()]
        records += [record for record, _ in found.remains.values()]
        self._inherited = {record.id: holding_of(record) for record in records if record.gpu_uuids}
        mismatched: dict[str, list[ShardId]] = {}
        wanted: set[ShardId] = set()
        for id_, running in found.takeovers.items():
            # Before the first launch chooses: an engine that still loads does not listen, so its port looks free.
            if isinstance(running.record.endpoint, TcpEndpoint):
                self._host.ports[id_] = running.record.endpoint.port
        for spec in config.shards:
            for id_ in spec.ids:
                wanted.add(id_)
                takeover = found.takeovers.get(id_)
                self._add(id_, spec, by="file", takeover=takeover, remains=found.remains.get(id_))
                if takeover is not None and takeover.record.config_hash != spec.config_hash:
                    mismatched.setdefault(spec.model, []).append(id_)
        for id_, takeover in found.takeovers.items():
            if id_ not in wanted:
                log.warning("%s: runs, but is no longer in the configuration; stopping it", id_)
                self._add(id_, _spec_of(takeover.record), by="file", takeover=takeover)
                self._retire(id_, "file (no longer in the configuration)")
        for id_, remains in found.remains.items():
            if id_ not in wanted:
                self._add(id_, evolve(_spec_of(remains[0]), autostart=False), by="file", remains=remains)
                self._retire(id_, "file (no longer in the configuration)")
        for model, ids in mismatched.items():
            self._roll_out(model, ids, "file (changed while llmgw was away)")

    # -- wishes ------------------------------------------------------------------------------------------

    async def _keep_wishes(self) -> None:
        """Write wishes that hold over a restart to disk whenever they change; a slow disk delays nobody else."""
        snapshot = self._board.snapshot
        kept = dict(self._wishes)
        told = ""
        while True:
            wishes = _kept_wishes(snapshot)
            if wishes != kept:
                try:
                    await trio.to_thread.run_sync(self._wish_store.save, wishes)
                    kept, told = wishes, ""
                except OSError as error:
                    # It is tried again with each change of anything, and told once.
                    if str(error) != told:
                        log.error("cannot keep the operators' wishes over a restart: %s", error)
                    told = str(error)
            snapshot = await self._board.wait_newer(snapshot.revision)

    def _save_wishes(self) -> None:
        try:
            self._wish_store.save(_kept_wishes(self._board.snapshot))
        except OSError as error:
            log.error("cannot keep the operators' wishes over a restart: %s", error)


def _still_fits(intent: Intent, spec: ShardSpec) -> bool:
    """Whether a wish means something for a shard as the file has it now. Those of operators and of the file always do,
    and so does a start; without `idle_timeout` nobody loads what was unloaded, and not every engine can sleep."""
    if intent.operator or intent.by == "file" or intent.wish is Wish.START:
        return True
    if intent.wish is Wish.SLEEP:
        return spec.idle_action == "sleep"
    return spec.idle_timeout is not None


def _kept_wishes(snapshot: Snapshot) -> dict[ShardId, Intent]:
    return {id_: instance.intent for id_, instance in snapshot.shards.items() if instance.intent.is_kept}


def _settled(snapshot: Snapshot, id_: ShardId, config_hash: str) -> bool:
    """A replacement has come to something: it is Ready with the new keys, or ended, or is no longer there."""
    instance = snapshot.shards.get(id_)
    if instance is None:
        return True
    status = instance.status
    if status.state is ShardState.FAILED:
        return status.failures > 0 or status.reason is not None
    if instance.intent.wish is Wish.STOP:
        return not status.state.is_live
    loaded = ShardState.DRAINING if instance.intent.wish is Wish.DRAIN else ShardState.READY
    return status.config_hash == config_hash and status.state in (loaded, ShardState.STOPPED)


def _is_no_longer_failed(snapshot: Snapshot, id_: ShardId) -> bool:
    instance = snapshot.shards.get(id_)
    return instance is None or instance.status.state is not ShardState.FAILED


def _spec_of(record: ShardRecord) -> ShardSpec:
    """As much of a spec as stopping an engine needs that no file describes any more."""
    return ShardSpec(
        name=record.id.name,
        model=record.model,
        engine=kind_of(record),
        command=(),
        config_hash=record.config_hash,
        replicas=record.id.replica + 1,
    )
