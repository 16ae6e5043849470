"""One launch of an engine, spawned or adopted alike: `async with launch(...) as engine`.

Leaving the block means that it is gone: all of its processes dead, its leftovers removed, its GPUs asked about. The
one exception is an engine that was left running on purpose, because llmgw leaves and it stays.
"""

from __future__ import annotations

import logging
import os
import resource
import secrets
import shutil
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import trio
from attrs import define, evolve, field, frozen

from llmgw.board import Board, Cell, Leaving
from llmgw.config.model import Config, SupervisorConfig
from llmgw.discovery.installed import engine_version, find_program
from llmgw.domain.hardware import Inventory
from llmgw.domain.problem import ConfigError, Problem, Reason, errors_of
from llmgw.domain.shard import Endpoint, EngineKind, LaunchPlan, Secret, ShardId, ShardSpec, TcpEndpoint, UnixEndpoint
from llmgw.domain.status import Wish
from llmgw.engines.adapter import build_command, is_probe_line, profile
from llmgw.engines.diagnosis import ExitFacts, diagnose, is_error_line
from llmgw.engines.keys import why_no_key, with_key
from llmgw.engines.slots import Slots, slots_in_command
from llmgw.placement.assign import Devices, pinned_devices
from llmgw.placement.endpoints import choose_endpoint
from llmgw.placement.view import memory_of
from llmgw.supervisor.assigner import Assigner, Holding, Refused, Unplaced
from llmgw.supervisor.follow import FollowedTail, LogFollower
from llmgw.supervisor.gpu_release import GpuRelease, HeldGpu, used_before, wait_gpu_release
from llmgw.supervisor.leftovers import ShmUsage, clear_traces, note_shm, shm_usage
from llmgw.supervisor.listeners import listener_of, port_free, port_holders
from llmgw.supervisor.logtail import LogLine
from llmgw.supervisor.node_watch import NodeWatch
from llmgw.supervisor.oom import oom_kills
from llmgw.supervisor.ownership import shown
from llmgw.supervisor.processes import (
    Cgroup,
    Children,
    EngineProcesses,
    GatedChild,
    Member,
    SpawnFailed,
    TermTo,
    find_own_cgroup,
    spawn_engine,
    ticks_now,
)
from llmgw.supervisor.quarantine import Quarantine
from llmgw.supervisor.readiness import ListenerFact
from llmgw.supervisor.records import LoadTimes, OnStop, RecordStore, ShardRecord, ShmFile

log = logging.getLogger(__name__)

T = TypeVar("T")

TAIL_BYTES = 4 << 20
"""Bytes of output kept in memory per shard at most, however long its lines are."""

DEATHS_WINDOW = 10.0
"""Seconds within which several deaths count as one event: the OOM killer takes several engines at once."""

DESCRIPTORS_KEPT = 64
"""Descriptors for clients, tools and files of llmgw's own that no engine gets; a quarter where the limit is low."""

DESCRIPTORS_OWN = 16
"""What llmgw has open without any engine: locks, sockets, the event loop's."""

DESCRIPTORS_EACH = 4
"""What an engine takes: its pidfd, its output file, a connection for probes, and one to spare."""

KEY_BYTES = 32
"""Bytes of chance in a generated key, as many as anybody asks of one."""

CLEANUP_MARGIN = 60.0
"""Seconds beyond the longest stop that a clean-up gets when it is cut short by an error or a cancellation."""


class LaunchRefused(Exception):
    """The engine was not launched, and why. `counted` is False where a check said no before anything was tried."""

    def __init__(self, reason: Reason, *, counted: bool = False) -> None:
        super().__init__(reason.cause)
        self.reason = reason
        self.counted = counted


class LaunchUnplaced(Exception):
    """There are no GPUs for it now; nothing was tried. The text says why."""


class LaunchUnwanted(Exception):
    """llmgw leaves, or the shard is to be stopped, before anything was started."""


def made_key() -> str:
    return secrets.token_urlsafe(KEY_BYTES)


def engine_stays(on_stop: OnStop, leaving: Leaving) -> bool:
    """Whether an engine lives on when llmgw leaves like this."""
    if leaving.all_stay:
        return True
    return on_stop == "leave" or (on_stop == "auto" and leaving.engines_stay)


@define
class Host:
    """What every launch needs of this node. Shared by all shards; each part has one owner."""

    board: Board
    children: Children
    config: Cell[Config]
    """The configuration in force; written by the supervisor's `apply` alone."""
    records: RecordStore
    load_times: LoadTimes
    follower: LogFollower
    env: Mapping[str, str]
    node: NodeWatch
    quarantine: Quarantine
    assigner: Assigner
    check: Callable[[ShardSpec, Endpoint], Awaitable[Sequence[Problem]]]
    """Preflight of one shard against the machine as it is now."""
    chance: Callable[[], float]
    new_run_id: Callable[[], str]
    """16 hex digits that were never given before."""
    new_key: Callable[[], str] = made_key
    """A key for one start of an engine that the gateway serves."""
    undead: dict[ShardId, Engine] = field(factory=dict)
    """Engines of which something could not be killed; entered and taken out by their own take-down."""
    engines: dict[ShardId, Engine] = field(factory=dict)
    """Engines that run now; each is entered and taken out by its own launch."""
    spawning: dict[ShardId, Holding] = field(factory=dict)
    """Cards of launches under way, from the choice until `engines` has them: entered and taken out by their own
    launches. A wish to stop that comes in between does not free them."""
    launching: int = 0
    """How many more are about to run: counted in and out by their own launches."""
    ports: dict[ShardId, int] = field(factory=dict)
    """Ports that llmgw chose, kept over restarts of a shard; those of takeovers are entered before any shard starts."""
    generations: dict[ShardId, int] = field(factory=dict)
    oom_explained: int = 0
    """The OOM killer's count when a shard's end was last explained."""
    deaths: deque[float] = field(factory=lambda: deque(maxlen=8))
    own_cgroup: str | None = field(factory=find_own_cgroup)

    @property
    def settings(self) -> SupervisorConfig:
        return self.config.value.supervisor

    def new_tail(self, spec: ShardSpec) -> FollowedTail:
        settings = self.settings
        return FollowedTail(
            settings.log_lines,
            TAIL_BYTES,
            settings.log_line_max,
            pin=lambda text: is_error_line(spec.engine, text),
            drop=lambda text: is_probe_line(spec.engine, text),
        )

    def log_path(self, id_: ShardId) -> str:
        return os.path.join(self.settings.log_dir, f"{id_.name}.{id_.replica}.log")

    def oom_killed_since(self, before: int | None) -> bool | None:
        """Whether the OOM killer was at work since its count was `before`; None is unknown.

        The count is of the whole unit, so a kill explains one shard's end and not the next one's an hour later.
        """
        now = oom_kills(self.own_cgroup)
        if before is None or now is None:
            return None
        killed = now > max(before, self.oom_explained)
        self.oom_explained = now
        return killed

    def several_died(self) -> bool:
        """Enter a death and say whether others died just now."""
        now = trio.current_time()
        self.deaths.append(now)
        return sum(1 for at in self.deaths if now - at <= DEATHS_WINDOW) > 1


@frozen
class Takeover:
    """An engine of an earlier supervisor that was proven ours, with its record."""

    record: ShardRecord
    processes: EngineProcesses


@frozen
class Ended:
    """What a take-down came to. `held` and `unkillable` are texts, empty when all is well."""

    how: str
    held: str = ""
    unkillable: str = ""


def holding_of(record: ShardRecord) -> Holding:
    """The cards of a recorded engine, as it was launched with them."""
    return Holding(record.gpu_uuids, record.gpu_share)


def kind_of(record: ShardRecord) -> EngineKind:
    """The kind of a recorded engine. One that only a newer llmgw knows is treated like any program."""
    try:
        return EngineKind(record.engine)
    except ValueError:
        return EngineKind.COMMAND


class Engine:
    """A running engine, as its shard's task sees it."""

    def __init__(
        self, host: Host, spec: ShardSpec, tail: FollowedTail, processes: EngineProcesses, record: ShardRecord
    ) -> None:
        self._host = host
        self._spec = spec
        self._tail = tail
        self._processes = processes
        self._record = record
        self._profile = profile(kind_of(record))
        self._began = trio.current_time()
        self._oom_before = oom_kills(host.own_cgroup)
        self._exit_code: int | None = None
        self._last_words: tuple[str, ...] | None = None
        self._ended: Ended | None = None
        self._stays = False
        self._saving = trio.Lock()
        self._removed = False
        """Whether its record is: at its end."""
        self._was_ready = record.ready_at is not None
        self._log_path = record.log_path or host.log_path(record.id)
        processes.before_kill = self._note_before_kill
        tail.secrets = self._secrets()

    # -- what it is --------------------------------------------------------------------------------------

    @property
    def kind(self) -> EngineKind:
        """What it is, also when the file says by now that the shard is to be another engine."""
        return self._profile.kind

    @property
    def pid(self) -> int:
        return self._record.leader.pid

    @property
    def pgid(self) -> int:
        return self._record.pgid

    @property
    def generation(self) -> int:
        return self._record.generation

    @property
    def endpoint(self) -> Endpoint:
        return self._record.endpoint

    @property
    def config_hash(self) -> str:
        return self._record.config_hash

    @property
    def gpus(self) -> tuple[str, ...]:
        return self._record.gpus

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        return self._record.gpu_uuids

    @property
    def holding(self) -> Holding:
        return holding_of(self._record)

    @property
    def allowed(self) -> tuple[str, ...]:
        """Findings that the file allows, as they were at its launch."""
        return self._record.allowed

    @property
    def launched_at(self) -> float:
        return self._record.launched_at

    @property
    def key(self) -> Secret | None:
        return Secret(self._record.api_key, "record") if self._record.api_key is not None else None

    @property
    def slots(self) -> tuple[int | None, str]:
        """Requests that it works on at a time by its own limit, and where that was read; None is not known."""
        return self._record.slots, self._record.slots_from

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that its list of models may show it under."""
        return (self._record.model, *self._spec.aliases)

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and for an engine whose exit code cannot be known."""
        return self._exit_code

    # -- asking about it ---------------------------------------------------------------------------------

    async def wait_exit(self) -> None:
        """Return when the leader is dead."""
        self._exit_code = (await self._processes.wait_exit()).code

    async def hear_last_words(self) -> None:
        """Keep the output as it is when the leader has just died: what its workers complain about while they are
        ended is no cause of anything.
        """
        await self._host.follower.catch_up(self._log_path, self._tail)
        # A last line without an end is one too.
        self._tail.settle(self._host.board.now())
        self._last_words = self._tail.evidence()

    async def members(self) -> tuple[Member, ...]:
        """Everything of it that lives. A walk through /proc, in a thread."""
        return await self._processes.scan_members()

    async def wait_member(self, members: Sequence[Member]) -> Member:
        """Return the first of these that is gone."""
        return await self._processes.wait_member_exit(members)

    async def listener(self) -> ListenerFact:
        """Whose the socket is that answers at its endpoint."""
        members = await self._processes.scan_members()
        found = await trio.to_thread.run_sync(
            listener_of, self.endpoint, self._processes, members, abandon_on_cancel=True
        )
        return ListenerFact(found.kind, str(found.holder) if found.holder else "")

    def loading_title(self, beginnings: Sequence[str]) -> str | None:
        """The sign of loading that a descendant's name is, if there is one."""
        if not beginnings:
            return None
        found = (name for name in self._processes.names() if name.startswith(tuple(beginnings)))
        name = next(found, None)
        return f"process {name}" if name is not None else None

    def shm_usage(self) -> ShmUsage:
        """What its files in /dev/shm take, as far as they are known: they are noted when it becomes Ready."""
        return shm_usage(self._record.shm)

    async def follow_output(self, on_lines: Callable[[Sequence[LogLine]], None]) -> None:
        """Bring new output into the tail until cancelled."""
        await self._host.follower.follow(self._log_path, self._tail, on_lines)

    async def diagnose(self) -> Reason:
        """Why it exited, from its code, its last lines and what the host knows."""
        lines = self._tail.evidence() if self._last_words is None else self._last_words
        spec = self._spec
        oom_killed = self._host.oom_killed_since(self._oom_before)
        port = holder = None
        if isinstance(self.endpoint, TcpEndpoint):
            port = self.endpoint.port
            found = (await trio.to_thread.run_sync(port_holders, [port], abandon_on_cancel=True)).get(port)
            holder = str(found) if found is not None else None
        return diagnose(
            ExitFacts(
                engine=self.kind,
                code=self._exit_code,
                lines=lines,
                name=spec.name,
                oom_killed=oom_killed,
                several_died=self._host.several_died(),
                ready=self._was_ready,
                seconds_alive=trio.current_time() - self._began,
                port=port,
                port_holder=holder,
                secrets=self._secrets(),
            )
        )

    def _secrets(self) -> tuple[str, ...]:
        """Texts of this engine that must never be shown, should it print them."""
        written = [value.reveal() for value in self._spec.env.values() if isinstance(value, Secret)]
        return tuple(written) if self.key is None else (*written, self.key.reveal())

    # -- keeping the record ------------------------------------------------------------------------------

    async def note_ready(self, load_seconds: float | None) -> None:
        """It is Ready: keep what is only known now, for the next supervisor and the next load."""
        first = not self._was_ready
        self._was_ready = True
        ready_at = self._host.board.now()
        pids = [member.pid for member in await self._processes.scan_members()]
        # Reading every mapping and an fsync take their time; other shards do not wait for that.
        shm = await trio.to_thread.run_sync(note_shm, pids, abandon_on_cancel=True)
        await self._keep(evolve(self._record, ready_at=ready_at, shm=_in_order(shm), alive_at=ticks_now()))
        if first and load_seconds is not None:
            await trio.to_thread.run_sync(self._keep_load_time, load_seconds)

    def _keep_load_time(self, seconds: float) -> None:
        try:
            self._host.load_times.put(self._record.id, seconds)
        except OSError as error:
            log.warning("cannot keep the load time of %s: %s", self._record.id, error)

    def note_slots(self, slots: Slots) -> None:
        """The engine has told its limit. It comes to disk with the next writing of the record: who does not find it
        there asks again."""
        self._record = evolve(self._record, slots=slots.count, slots_from=slots.source)

    async def set_on_stop(self, on_stop: OnStop) -> None:
        """A reload changed what happens to it at the end of llmgw."""
        await self._keep(evolve(self._record, on_stop=on_stop))

    async def _keep(self, record: ShardRecord) -> None:
        """Bring the record to disk, in a thread: an fsync takes as long as it takes. One writer at a time, the newest
        wins, and one that is removed does not come back.
        """
        self._record = record
        async with self._saving:
            if not self._removed:
                await trio.to_thread.run_sync(self._save)

    def _save(self) -> None:
        record = self._record
        try:
            self._host.records.save(record)
        except OSError as error:
            # The record of the launch is there; only what was learnt since is not.
            log.warning("cannot rewrite the process record of %s: %s", record.id, error)

    def _note_before_kill(self, members: tuple[Member, ...]) -> None:
        """After SIGKILL nobody removes its /dev/shm names, and nobody could tell any more whose they were."""
        shm = note_shm(member.pid for member in members)
        self._record = evolve(self._record, shm=_in_order({*self._record.shm, *shm}))

    # -- the end -----------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """llmgw leaves; it stays. Its record is what the next supervisor finds it by."""
        if self._stays:
            return
        self._stays = True
        if self._processes.is_leader_alive():
            await self._keep(evolve(self._record, alive_at=ticks_now()))

    @property
    def stays(self) -> bool:
        leaving = self._host.board.leaving.value
        return self._stays or (leaving is not None and engine_stays(self._host.settings.on_stop, leaving))

    @property
    def longest_end(self) -> float:
        """Seconds that a take-down may take, whatever happens."""
        return self._spec.limits.longest_stop + CLEANUP_MARGIN

    async def take_down(self, on_step: Callable[[str], None] = lambda _: None, *, at_once: bool = False) -> Ended:
        """The one stop order from SIGTERM on, then leftovers, then the GPUs. Asked twice it is done once.

        Not cancellable before it is through or its time is up: half a stop would leave orphans.
        """
        if self._ended is None or self._ended.unkillable:
            with trio.move_on_after(self.longest_end, shield=True):
                self._ended = await self._take_down(on_step, at_once)
        return self._ended or Ended("given up", unkillable=f"pid {self.pid}")

    async def _take_down(self, on_step: Callable[[str], None], at_once: bool) -> Ended:
        host, limits = self._host, self._spec.limits
        term_to: TermTo | None = self._profile.term_to
        if at_once or (self._profile.kill_while_loading and not self._was_ready):
            term_to = None
        outcome = await self._processes.stop(
            term_to=term_to, stop_timeout=limits.stop_timeout, hurry=host.board.hurry, on_step=on_step
        )
        self._exit_code = (await self._processes.wait_exit()).code if outcome.kind != "unkillable" else None
        await host.follower.drain(self._log_path, self._tail)
        if outcome.kind == "unkillable":
            left = ", ".join(str(member) for member in outcome.leftover)
            stuck = [
                HeldGpu(uuid, label, None, f"held by {left}")
                for uuid, label in zip(self._record.gpu_uuids, self._record.gpus, strict=False)
            ]
            pids = [member.pid for member in outcome.leftover]
            host.quarantine.enter(self._shown, stuck, self._record.gpu_memory_before, pids)
            await host.quarantine.save()
            # Its record stays, and nothing is launched beside it: two engines would be one too many.
            host.undead[self._record.id] = self
            held = f"{_gpus_in_words(self.gpus)} held by {left}" if self.gpus else ""
            return Ended("SIGKILL without effect", held, left)
        host.undead.pop(self._record.id, None)
        words = {"gone": "it was gone already", "gone-term": "SIGTERM", "gone-kill": "SIGKILL"}[outcome.kind]
        how = f"{words}, {outcome.seconds:.1f} s"
        await trio.to_thread.run_sync(self._clear_traces)
        held = await self._wait_gpus(on_step)
        # Before its record goes: whoever comes after a crash right here must know of it.
        await host.quarantine.save()
        self._processes.close()
        async with self._saving:
            self._removed = True
            await trio.to_thread.run_sync(self._delete_record)
        return Ended(how, held)

    @property
    def _shown(self) -> str:
        return self._record.id.shown(self._spec.replicas)

    def _clear_traces(self) -> None:
        for problem in clear_traces(self._record, self._host.settings.state_dir):
            log.warning("%s: %s", self._record.id, problem)

    def _delete_record(self) -> None:
        try:
            self._host.records.delete(self._record.id)
        except OSError as error:
            # Harmless: the next supervisor finds that this pid is gone, or another process.
            log.warning("cannot delete the process record of %s: %s", self._record.id, error)

    async def _wait_gpus(self, on_step: Callable[[str], None]) -> str:
        gpus = tuple(self._record.gpu_memory_before)
        if not gpus:
            return ""
        if self._host.board.hurry.value:
            self._doubt_gpus("everything was ended at once")
            return ""
        on_step("waiting for its GPU memory")
        answers: list[GpuRelease] = []
        async with trio.open_nursery() as nursery:

            async def give_up_in_a_hurry() -> None:
                await self._host.board.hurry.wait_value(bool)
                nursery.cancel_scope.cancel(reason="hurry")

            nursery.start_soon(give_up_in_a_hurry)
            release = await wait_gpu_release(
                self._ask_without_neighbours,
                gpus,
                self._record.gpu_memory_before,
                timeout=self._spec.limits.gpu_release_timeout,
                # Nothing of the engine lives any more, so whoever holds it now is another.
                is_ours=lambda pid: False,
                labels=dict(zip(self._record.gpu_uuids, self._record.gpus, strict=False)),
            )
            answers.append(release)
            nursery.cancel_scope.cancel(reason="answered")
        if not answers:
            self._doubt_gpus("everything was ended at once")
            return ""
        release = answers[0]
        self._host.quarantine.enter(self._shown, release.held, self._record.gpu_memory_before)
        return "" if release.freed else str(release)

    async def _ask_without_neighbours(self) -> Inventory:
        """The GPUs as they are now, as if no other engine of ours shared them."""
        return (await self._host.node.refresh()).without_engines(but=shown(self._record.id))

    def _doubt_gpus(self, why: str) -> None:
        self._host.quarantine.doubt(self._shown, self._record, why)


def _in_order(files: Collection[ShmFile]) -> tuple[ShmFile, ...]:
    return tuple(sorted(files, key=lambda file: file.name))


@asynccontextmanager
async def launch(
    host: Host, id_: ShardId, spec: ShardSpec, tail: FollowedTail, takeover: Takeover | None = None
) -> AsyncIterator[Engine]:
    """Spawn (or take over) the engine of one instance; see the module's text for what leaving it means.

    Raises LaunchRefused when it was not started, and LaunchUnwanted when it need not be any more; nothing is left of
    the attempt then.
    """
    if takeover is None:
        _keep_descriptors(len(host.engines) + host.launching)
        host.launching += 1
        try:
            engine = await _spawn(host, id_, spec, tail)
            host.engines[id_] = engine
        finally:
            host.launching -= 1
            host.spawning.pop(id_, None)
    else:
        host.generations[id_] = takeover.record.generation
        engine = Engine(host, spec, tail, takeover.processes, takeover.record)
        host.engines[id_] = engine
        try:
            await host.follower.read_back(host.log_path(id_), tail)
        except BaseException:
            del host.engines[id_]
            raise
    try:
        yield engine
    finally:
        with trio.move_on_after(engine.longest_end, shield=True):
            if engine.stays:
                await engine.leave()
            elif host.undead.get(id_) is not engine:
                await engine.take_down()
        del host.engines[id_]


async def _unless_unwanted(host: Host, id_: ShardId, question: Callable[[], Awaitable[T]]) -> T:
    """The answer to what may take long (a driver that hangs). Raises LaunchUnwanted when nobody wants it any more."""
    answers: list[T] = []
    async with trio.open_nursery() as nursery:

        async def until(wait: Callable[[], Awaitable[object]]) -> None:
            await wait()
            nursery.cancel_scope.cancel(reason="not wanted any more")

        nursery.start_soon(until, lambda: host.board.leaving.wait_value(lambda leaving: leaving is not None))
        nursery.start_soon(until, lambda: host.board.intent_cell(id_).wait_value(lambda i: i.wish is Wish.STOP))
        answers.append(await question())
        nursery.cancel_scope.cancel(reason="answered")
    if not answers:
        raise LaunchUnwanted
    return answers[0]


async def _spawn(host: Host, id_: ShardId, spec: ShardSpec, tail: FollowedTail) -> Engine:
    undead = host.undead.get(id_)
    if undead is not None:
        ended = await undead.take_down()
        if ended.unkillable:
            raise LaunchRefused(unkillable(ended.unkillable))
    endpoint = _choose_endpoint(host, id_, spec)
    placed = await _unless_unwanted(host, id_, lambda: _place(host, id_, spec))
    if isinstance(placed, Exception):
        raise placed
    findings = await _unless_unwanted(host, id_, lambda: host.check(placed, endpoint))
    problems = errors_of(findings)
    if problems:
        raise LaunchRefused(_reason_of(problems))
    allowed = tuple(finding.message for finding in findings if finding.code in spec.allow)
    devices, before = _devices(host, placed)
    served, written = host.config.value.gateway is not None, spec.api_key is not None
    if why_no_key(spec.engine, spec.env, written=written, served=served) is None:
        spec = with_key(spec, host.new_key())
    plan = _plan(host, id_, spec, endpoint, devices)
    try:
        command = build_command(plan)
    except ConfigError as error:
        reason = Reason(error.code, error.message, error.hint, retry=False)
        raise LaunchRefused(reason, counted=True) from error
    for warning in command.warnings:
        log.warning("%s: %s", plan.name, warning.message)
    slots = slots_in_command(spec.engine, command.argv, spec.layout)
    output = host.log_path(id_)
    try:
        _make_folders(plan, host.settings.log_dir)
        host.follower.write_marker(output, f"launch {plan.generation} of {plan.name}: {command.argv[0]}")
    except OSError as error:
        shutil.rmtree(plan.tmp_dir, ignore_errors=True)
        remedy = "make state_dir and log_dir writable, or free some space"
        reason = Reason("no-folder", f"cannot prepare its folders: {error}", remedy)
        raise LaunchRefused(reason, counted=True) from error
    cgroup = Cgroup.create(f"shard-{id_.name}.{id_.replica}.{plan.generation}", host.own_cgroup)
    try:
        child = spawn_engine(host.children, command, log_path=output, cgroup=cgroup)
    except SpawnFailed as error:
        shutil.rmtree(plan.tmp_dir, ignore_errors=True)
        raise LaunchRefused(Reason(error.code, error.message, error.hint), counted=True) from error
    record = ShardRecord(
        id=id_,
        generation=plan.generation,
        run_id=plan.run_id,
        leader=child.engine.leader,
        pgid=child.engine.pgid,
        sid=child.engine.sid,
        alive_at=ticks_now(),
        endpoint=endpoint,
        config_hash=spec.config_hash,
        engine=spec.engine.value,
        model=spec.model,
        on_stop=host.settings.on_stop,
        cgroup=child.engine.cgroup.path if child.engine.cgroup is not None else None,
        devices=devices.visible,
        gpus=devices.labels,
        gpu_uuids=devices.uuids,
        gpu_memory_before=before,
        gpu_share=memory_of(spec) if spec.share_gpus else None,
        allowed=allowed,
        api_key=spec.api_key.reveal() if spec.api_key is not None else None,
        slots=slots.count if slots is not None else None,
        slots_from=slots.source if slots is not None else "",
        tmp_dir=plan.tmp_dir,
        log_path=output,
        engine_version=plan.engine_version,
        launched_at=host.board.now(),
    )
    try:
        # In a thread, since an fsync on a busy disk takes as long as it takes; not abandoned, since a record that
        # appears after the child was given up would name nobody.
        await trio.to_thread.run_sync(host.records.save, record)
    except OSError as error:
        _give_up(child, plan)
        reason = Reason(
            "no-record",
            f"cannot write its process record: {error.strerror or error}",
            "without a record it could become an orphan, so it was not started; free some space in state_dir",
        )
        raise LaunchRefused(reason, counted=True) from error
    except BaseException:
        _give_up(child, plan)
        raise
    child.open_gate()
    return Engine(host, spec, tail, child.engine, record)


def _give_up(child: GatedChild, plan: LaunchPlan) -> None:
    child.abandon()
    shutil.rmtree(plan.tmp_dir, ignore_errors=True)


def unkillable(what: str) -> Reason:
    """Why nothing is launched: something of the last launch is still there."""
    return Reason(
        "unkillable",
        f"{what} does not die, also not of SIGKILL",
        "its GPUs stay held and nothing is launched beside it; it is stuck in the driver or the kernel: look at dmesg, "
        "a reboot may be needed",
    )


def _gpus_in_words(gpus: Sequence[str]) -> str:
    return f"GPU{'s' * (len(gpus) > 1)} {', '.join(gpus)}"


def _reason_of(problems: Sequence[Problem]) -> Reason:
    first = problems[0]
    return Reason(first.code, first.message, first.hint, tuple(problem.message for problem in problems[1:]))


def _keep_descriptors(engines: int) -> None:
    """Refuse the engine that would take the last descriptors: nobody could ask llmgw then why nothing works.

    Without any even a free port looks taken. Raises LaunchRefused.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = min(DESCRIPTORS_KEPT, limit // 4)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = limit
    # Those that were launched just now have not taken theirs yet.
    if max(used, DESCRIPTORS_OWN + DESCRIPTORS_EACH * engines) + DESCRIPTORS_EACH > limit - kept:
        cause = f"llmgw may have {limit} files open, which is too few for one more engine"
        remedy = "raise LimitNOFILE= of the service, or the hard limit of the shell (ulimit -Hn)"
        raise LaunchRefused(Reason("descriptors", cause, remedy))


def _choose_endpoint(host: Host, id_: ShardId, spec: ShardSpec) -> Endpoint:
    config = host.config.value
    endpoint = choose_endpoint(config, id_, spec, host.ports, lambda address, port: port_free(address, port) is None)
    if endpoint is None:
        first, last = config.node.engine_ports
        reason = Reason("no-port", f"no port of {first}-{last} is free", "widen [node] engine_ports")
        raise LaunchRefused(reason)
    if spec.port == "auto" and isinstance(endpoint, TcpEndpoint):
        host.ports[id_] = endpoint.port
    return endpoint


async def _place(host: Host, id_: ShardId, spec: ShardSpec) -> ShardSpec | LaunchUnplaced | LaunchRefused:
    """The spec with the cards that it gets, by UUID, or why it gets none (an exception to raise: out of a nursery it
    would come wrapped)."""
    if spec.gpus in (0, ()):
        await trio.lowlevel.checkpoint()
        return spec
    try:
        uuids = await host.assigner.assign(id_, spec)
    except Unplaced as error:
        return LaunchUnplaced(error.reason)
    except Refused as error:
        return LaunchRefused(error.reason)
    if not uuids:
        # It names what nobody can look up, which the file allows.
        return spec
    host.spawning[id_] = Holding(uuids, memory_of(spec) if spec.share_gpus else None)
    return evolve(spec, gpus=uuids)


def _devices(host: Host, spec: ShardSpec) -> tuple[Devices, Mapping[str, int | None]]:
    """The devices of a spec whose cards are settled, by the facts that they were settled with or newer ones."""
    facts = host.node.facts.value
    if not spec.pinned_gpus or facts is None:
        return Devices(), {}
    devices = pinned_devices(spec, facts.inventory)
    if isinstance(devices, Problem):
        raise LaunchRefused(Reason(devices.code, devices.message, devices.hint))
    for warning in devices.warnings:
        log.warning("%s: %s", spec.name, warning.message)
    return devices, used_before(facts.without_engines(), devices.uuids)


def _plan(host: Host, id_: ShardId, spec: ShardSpec, endpoint: Endpoint, devices: Devices) -> LaunchPlan:
    settings = host.settings
    run_id = host.new_run_id()
    generation = host.generations.get(id_, 0) + 1
    host.generations[id_] = generation
    return make_plan(
        host.config.value,
        id_,
        spec,
        endpoint,
        devices,
        env=host.env,
        generation=generation,
        run_id=run_id,
        version=_version(spec, host.env),
        state_dir=settings.state_dir,
    )


def make_plan(
    config: Config,
    id_: ShardId,
    spec: ShardSpec,
    endpoint: Endpoint,
    devices: Devices,
    *,
    env: Mapping[str, str],
    generation: int,
    run_id: str,
    version: str | None,
    state_dir: str,
) -> LaunchPlan:
    """The plan of one launch; `llmgw plan` makes the same one to show it."""
    tmp_dir = os.path.join(state_dir, "tmp", run_id[:8])
    return LaunchPlan(
        id=id_,
        spec=spec,
        endpoint=endpoint,
        generation=generation,
        run_id=run_id,
        node=config.node.name,
        state_dir=state_dir,
        tmp_dir=tmp_dir,
        work_dir=os.path.join(state_dir, "work", f"{id_.name}.{id_.replica}"),
        inherited_env=env,
        devices=devices.visible,
        engine_version=version,
        secret_variables=config.secret_variables,
        rendezvous_ports=config.node.rendezvous_ports,
    )


def _version(spec: ShardSpec, env: Mapping[str, str]) -> str | None:
    distribution = profile(spec.engine).distribution
    if distribution is None:
        return None
    executable = find_program(spec, env)
    return engine_version(executable, distribution) if executable is not None else None


def _make_folders(plan: LaunchPlan, log_dir: str) -> None:
    """The engine's own folders, and that of logs if somebody removed it; what stands in the way of a socket goes."""
    os.makedirs(plan.tmp_dir, mode=0o700)
    os.makedirs(log_dir, mode=0o750, exist_ok=True)
    if plan.spec.workdir is None:
        os.makedirs(plan.work_dir, mode=0o750, exist_ok=True)
    if isinstance(plan.endpoint, UnixEndpoint):
        # A socket file outlives its engine, and vLLM does not start on one (measured).
        try:
            os.unlink(plan.endpoint.path)
        except FileNotFoundError:
            pass
