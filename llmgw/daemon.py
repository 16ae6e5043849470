"""`llmgw run`: everything put together, in the order in which it starts and ends. No other module knows every part.

Nested nurseries give the order: signals outermost, then control, notifications and journal, then the engines.
Control answers until the last engine is gone. A service that breaks takes llmgw down by the rules of a restart: its
engines live on, and the next llmgw takes them over.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import random
import resource
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trio
from attrs import evolve

from llmgw import __version__, systemd
from llmgw.board import Board, Cell, Leaving
from llmgw.config.load import facts_for, gather_host, load
from llmgw.config.model import Config
from llmgw.config.parse import Parsed
from llmgw.config.render import render_problems
from llmgw.config.show import show_config
from llmgw.config.supported import not_served_yet
from llmgw.control import server as control
from llmgw.control.api import LogSource, ReloadAnswer, status_json
from llmgw.discovery.inventory_json import node_json
from llmgw.discovery.pins import find_gpu
from llmgw.domain.hardware import Gpu, Inventory
from llmgw.domain.host import HostFacts, PortHolder
from llmgw.domain.problem import ConfigError, LlmgwError, Problem, errors_of
from llmgw.domain.shard import Endpoint, ShardId, ShardSpec, TcpEndpoint
from llmgw.gateway import listeners as gateway_sockets
from llmgw.gateway import ui
from llmgw.gateway.assembly import make_gateway
from llmgw.gateway.listeners import Listeners
from llmgw.gateway.metrics.observation import Observation
from llmgw.gateway.on_demand.outlook import estimate
from llmgw.gateway.on_demand.service import OnDemand
from llmgw.gateway.own_pages import Page
from llmgw.gateway.server import Gateway
from llmgw.http.unix_socket import UnixSocket
from llmgw.metrics.exposition import CONTENT_TYPE
from llmgw.metrics.node import Node
from llmgw.own_log import set_up_logging
from llmgw.preflight.rules import preflight
from llmgw.supervisor.assigner import Assigner
from llmgw.supervisor.follow import LogFollower
from llmgw.supervisor.launch import Host
from llmgw.supervisor.leftovers import shm_warning
from llmgw.supervisor.listeners import port_free, port_holders
from llmgw.supervisor.locks import Locks
from llmgw.supervisor.node_watch import NodeWatch
from llmgw.supervisor.node_words import node_warnings
from llmgw.supervisor.processes import Children
from llmgw.supervisor.quarantine import Quarantine
from llmgw.supervisor.records import LoadTimes, RecordStore, ShardRecord, WishStore
from llmgw.supervisor.supervisor import Supervisor
from llmgw.supervisor.tools import SoleTool, ToolResult, run_tool

log = logging.getLogger(__name__)

CHECK_TIMEOUT = 60.0
"""Seconds that the new code gets to check the file before an upgrade: imports alone take some on a busy machine."""

INHERITED_SOCKET = "LLMGW_SOCKET_FD"
"""Carries the control socket over an upgrade, so that no client meets a closed door."""

INHERITED_GATEWAY = "LLMGW_GATEWAY_FDS"
"""Carries the gateway's listening sockets over an upgrade: `name=descriptor`, separated by commas."""

LATE_SIGNAL = "LLMGW_LATE_SIGNAL"
"""Over an upgrade: the number of a signal that came when the old code was leaving already. The new code obeys it."""

PATIENCE = 5.0
"""Seconds that somebody who only looks waits for nvidia-smi; afterwards the last facts are shown, with their age."""

OBEYED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

INDEX_DIGITS = 4
"""Digits of a GPU's index that are believed."""

STRICT = "LLMGW_STRICT"
"""Set in tests: an illegal transition raises instead of becoming a condition."""


def run(path: str, *, node: str | None = None) -> int:
    """Run until told to end; returns the exit code. Problems of the file go to stderr, exit code 78."""
    set_up_logging(os.environ)
    # systemd's watchdog ends a blocked loop with SIGABRT: the log then shows where it was blocked.
    faulthandler.enable(file=2)
    parsed = load(path, node=node, running=True)
    problems = list(parsed.problems)
    if parsed.config is not None:
        problems += not_served_yet(parsed.config)
    if problems:
        sys.stderr.write(render_problems(problems, parsed.sources))
    config = parsed.config
    if config is None or errors_of(problems):
        return ConfigError.exit_code
    try:
        return _run_owned(config, path, node)
    except LlmgwError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"  {error.hint}\n" if error.hint else ""))
        return error.exit_code


def _run_owned(config: Config, path: str, node: str | None) -> int:
    _raise_open_files()
    settings = config.supervisor
    for folder, mode in ((settings.state_dir, 0o750), (settings.runtime_dir, 0o755), (settings.log_dir, 0o750)):
        make_folder(folder, mode)
    locks = Locks.take((settings.state_dir, settings.runtime_dir), os.environ)
    try:
        passed = _passed_sockets()
        door = _open_door(config, passed)
        listeners = Listeners({name: fd for name, fd in passed.items() if name.startswith(gateway_sockets.NAME)})
        late = LateSignals(os.environ.pop(LATE_SIGNAL, ""))
        comes_back = True
        try:
            wanted = config.gateway.listen if config.gateway is not None else ()
            listeners.adopt(wanted, listeners.bind(wanted))
            while True:
                daemon = Daemon(config, path, node, door, listeners, late)
                code = trio.run(daemon.serve)
                if not daemon.upgrading:
                    late.ignore()
                    leaving = daemon.board.leaving.value
                    comes_back = leaving is not None and leaving.engines_stay
                    return code
                config = daemon.in_force
                _execute_anew(locks, door, listeners, late)
        finally:
            # The manager holds the sockets until llmgw is back; without a manager it is a clean start.
            listeners.close(is_kept=comes_back)
            door.close()
    finally:
        locks.release()


def _passed_sockets() -> dict[str, int]:
    """Listening sockets by name: kept over an upgrade, or given by systemd."""
    kept = os.environ.pop(INHERITED_GATEWAY, None)
    if kept is None:
        return systemd.listen_fds(os.environ)
    # After an upgrade the variables of systemd still stand there, and their numbers mean something else by now.
    pairs = (pair.partition("=") for pair in kept.split(",") if pair)
    return {name: int(number) for name, _, number in pairs if number.isdecimal()}


def _raise_open_files() -> None:
    """Each engine holds a descriptor here and each wait another; engines inherit the limit and want it high too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def make_folder(path: str, mode: int) -> None:
    """Make one of llmgw's own folders. Raises LlmgwError."""
    try:
        os.makedirs(path, mode=mode, exist_ok=True)
    except OSError as error:
        raise LlmgwError(
            f"cannot create the folder {path}: {error.strerror}",
            "run as a user that may write there, or set [supervisor] state_dir, runtime_dir and log_dir",
        ) from error


def _open_door(config: Config, passed: Mapping[str, int]) -> UnixSocket:
    """The control socket: kept over an upgrade, given by systemd, or bound anew."""
    settings = config.supervisor
    inherited = os.environ.pop(INHERITED_SOCKET, "")
    number, _, bound_at = inherited.partition(":")
    if number.isdecimal():
        # Without a path it is systemd's: the file must outlive us.
        return control.take_over(int(number), bound_at or None)
    given = next((fd for name, fd in passed.items() if not name.startswith(gateway_sockets.NAME)), None)
    if given is not None:
        return control.take_over(given, None)
    door = control.bind(settings.socket, mode=settings.socket_mode, group=settings.socket_group)
    control.point_clients(settings.runtime_dir, settings.socket)
    return door


def _execute_anew(locks: Locks, door: UnixSocket, listeners: Listeners, late: LateSignals) -> None:
    """Become the new code: same pid, engines stay children, locks and socket are passed on. Returns if that failed."""
    kept = listeners.descriptors()
    env = {
        **os.environ,
        **locks.pass_on(),
        INHERITED_SOCKET: f"{door.fileno()}:{door.path or ''}",
        INHERITED_GATEWAY: ",".join(f"{name}={fd}" for name, fd in kept.items()),
    }
    for fd in (door.fileno(), *kept.values()):
        os.set_inheritable(fd, True)
    logging.shutdown()
    try:
        env[LATE_SIGNAL] = late.pass_on()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)
    except OSError as error:
        late.keep()
        log.error("cannot go over to the new code: %s; going on with the old one", error)
        locks.keep()
        for fd in (door.fileno(), *kept.values()):
            os.set_inheritable(fd, False)


class LateSignals:
    """Signals that come while nobody obeys them: before the event loop, and while new code takes over in this process.

    Unanswered they would end llmgw by the kernel's hand, and the engines would be left to nobody.
    """

    def __init__(self, passed_on: str = "") -> None:
        self._number = int(passed_on) if passed_on.isdecimal() else 0
        for number in OBEYED:
            signal.signal(number, lambda number, _: self.note(number))
        self.keep()

    def note(self, number: int) -> None:
        """Remember it, unless it only asks to read a file that is going to be read anyway."""
        if number != signal.SIGHUP:
            self._number = number

    def take(self) -> int:
        """The last one that came, 0 for none; it is forgotten here."""
        number, self._number = self._number, 0
        return number

    def pass_on(self) -> str:
        """From here on signals wait in the kernel, also over an exec. Returns the text for LATE_SIGNAL."""
        signal.pthread_sigmask(signal.SIG_BLOCK, OBEYED)
        return str(self._number or "")

    def ignore(self) -> None:
        """All is done: one more signal must not turn the exit code into its own while the interpreter shuts down."""
        for number in OBEYED:
            signal.signal(number, signal.SIG_IGN)

    def keep(self) -> None:
        """Take `pass_on` back, of this process or of the code that was here before."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OBEYED)


class Daemon:
    """One run of the event loop: the services, and what the control socket asks of the whole."""

    def __init__(
        self,
        config: Config,
        path: str,
        node: str | None,
        door: UnixSocket,
        listeners: Listeners,
        late: LateSignals,
    ) -> None:
        self.upgrading = False
        self._late = late
        self.board = Board(strict=STRICT in os.environ)
        self._path = path
        self._node = node
        self._door = door
        self._listeners = listeners
        self._gateway: Gateway | None = None
        """The one that serves now; None without [gateway]."""
        self._started = time.time()
        self._config = Cell(config)
        self._config_error: str | None = None
        self._changing = trio.Lock()
        """One reload or upgrade at a time."""
        self._children = Children()
        self._nvidia_smi = SoleTool(self._children)
        self._notifier = systemd.Notifier(os.environ)
        self._unit = systemd.own_unit(_own_cgroup_text())
        self._had_terminal = sys.stdin is not None and sys.stdin.isatty()
        chance = random.SystemRandom()
        settings = config.supervisor
        records = RecordStore(settings.state_dir)
        self._quarantine = Quarantine(settings.state_dir, now=time.time)
        self._node_watch = NodeWatch(
            self._nvidia_smi.run, self._config, partial(_readable, records), self._quarantine, now=time.time
        )
        self._host = Host(
            board=self.board,
            children=self._children,
            config=self._config,
            records=records,
            load_times=LoadTimes(settings.state_dir),
            follower=LogFollower(settings.log_dir, file_max=settings.log_file_max, files=settings.log_files),
            env=dict(os.environ),
            node=self._node_watch,
            quarantine=self._quarantine,
            assigner=Assigner(self._config, self._node_watch),
            check=self._check,
            chance=chance.random,
            new_run_id=partial(secrets.token_hex, 8),
        )
        self._supervisor = Supervisor(self._host, WishStore(settings.state_dir))
        self._observation = Observation(
            self.board, self._config, node=self._node_as_seen, gateway=lambda: self._gateway
        )

    @property
    def in_force(self) -> Config:
        return self._config.value

    async def serve(self) -> int:
        """Start everything, wait for the end, end everything; returns the exit code."""
        with trio.open_signal_receiver(*OBEYED) as signals:
            async with trio.open_nursery() as outermost:
                outermost.start_soon(self._guard, "signals", partial(self._obey_signals, signals, outermost))
                async with trio.open_nursery() as observers:
                    async with trio.open_nursery() as engines:
                        await engines.start(self._guard, "supervisor", self._supervisor.run)
                        # Beside the engines: it lets its streams end before llmgw does.
                        engines.start_soon(self._guard, "gateway", self._serve_gateway)
                        observers.start_soon(self._guard, "node", self._node_watch.run)
                        await observers.start(self._guard, "control", self._serve_control)
                        self._start_observers(observers)
                        self._greet()
                        _set_aside()
                        if late := self._late.take():
                            signal.raise_signal(late)
                    observers.cancel_scope.cancel(reason="the last engine is gone")
                outermost.cancel_scope.cancel(reason="everything has ended")
        return 0

    def _start_observers(self, nursery: trio.Nursery) -> None:
        watchdog = systemd.watchdog_interval(os.environ)
        notify = partial(
            systemd.serve_notify, self.board, self._notifier, watchdog=watchdog, longest_stop=self._longest_stop
        )
        nursery.start_soon(self._guard, "notify", notify)
        nursery.start_soon(self._guard, "metrics", self._observation.run)
        on_demand = OnDemand(self.board, self._config, self._host.assigner.fits)
        nursery.start_soon(self._guard, "on-demand", on_demand.run)
        if self._notifier:
            nursery.start_soon(self._guard, "socket store", self._keep_sockets)
        if os.environ.get("INVOCATION_ID"):
            nursery.start_soon(self._guard, "journal", partial(systemd.serve_journal, self.board))

    async def _guard(
        self,
        name: str,
        service: Callable[..., Awaitable[None]],
        task_status: trio.TaskStatus[None] | None = None,
    ) -> None:
        """A broken service must not take engines with it: it makes llmgw leave them, as a restart would."""
        try:
            await (service() if task_status is None else service(task_status=task_status))
        except Exception:
            log.exception("the %s service broke; llmgw ends and leaves the engines to the next one", name)
            if self.board.leaving.value is None:
                self.board.leaving.set(Leaving(f"the {name} service broke", engines_stay=True))
            raise

    async def _serve_gateway(self) -> None:
        """Serve [gateway] for as long as the file has it and llmgw does not leave; reloads may add and remove it."""
        html = ui.page()
        while await self._wants_gateway():
            self._gateway = make_gateway(
                self.board,
                self._config,
                self._listeners.sockets,
                observer=self._observation,
                metrics=self._metrics_page,
                status=partial(status_json, self),
                ui=Page(200, b"text/html; charset=utf-8", html, ui.headers(html)),
                estimate=lambda model: estimate(model, self.board.now()),
                chance=random.SystemRandom().random,
            )
            try:
                await self._gateway.run()
            finally:
                self._gateway = None

    async def _wants_gateway(self) -> bool:
        """True as soon as the file has a gateway, False as soon as llmgw leaves."""
        async with trio.open_nursery() as nursery:

            async def until_leaving() -> None:
                await self.board.leaving.wait_value(lambda leaving: leaving is not None)
                nursery.cancel_scope.cancel(reason="llmgw leaves")

            nursery.start_soon(until_leaving)
            await self._config.wait_value(lambda config: config.gateway is not None)
            nursery.cancel_scope.cancel(reason="the file has a gateway")
        return self.board.leaving.value is None

    async def _keep_sockets(self) -> None:
        """Let the manager hold the gateway's sockets: clients wait while llmgw restarts, also after it has died."""
        stored: dict[str, int] = {}
        while True:
            sockets = self._listeners.sockets.value
            now = self._listeners.descriptors()
            for name in stored.keys() - now.keys():
                self._notifier.forget(name)
            for name, fd in now.items():
                if stored.get(name) != fd:
                    self._notifier.store(name, fd)
            stored = now
            await self._listeners.sockets.wait_change(sockets)

    async def _serve_control(self, task_status: trio.TaskStatus[None]) -> None:
        await control.serve(self._door, self, task_status=task_status)

    def _greet(self) -> None:
        count = len(self.board.snapshot.shards)
        where = self._door.path or "the socket that systemd passed"
        log.info("llmgw %s: %d shard%s, control socket %s", __version__, count, "s" * (count != 1), where)

    def _longest_stop(self) -> float:
        return max((spec.limits.longest_stop for spec in self.in_force.shards), default=10.0)

    # -- signals -----------------------------------------------------------------------------------------

    async def _obey_signals(self, signals: Any, nursery: trio.Nursery) -> None:
        """SIGTERM and SIGINT end llmgw, a second one at once; SIGHUP reads the file again."""
        async for number in signals:
            name = signal.Signals(number).name
            if number == signal.SIGHUP and not (self._had_terminal and _terminal_is_gone()):
                # Beside the signals: a file system that hangs must not make llmgw deaf to SIGTERM.
                nursery.start_soon(self._guard, "reload", self._reload_by_signal)
            elif self.upgrading:
                # The engines stay by now. The new code ends them, if that is what the signal means there.
                self._late.note(number)
            elif self.board.leaving.value is None:
                await self._leave(name)
            else:
                log.warning("%s again: everything is killed at once", name)
                self.board.hurry.set(True)

    async def _leave(self, name: str) -> None:
        stays = False
        if self._unit is not None and name == "SIGTERM" and self.in_force.supervisor.on_stop == "auto":
            job = await systemd.pending_job(partial(run_tool, self._children), self._unit)
            stays = job == "restart"
            if job == "unreadable":
                log.warning("cannot ask systemd whether this is a stop or a restart: taken as a stop")
        if self.upgrading:
            self._late.note(signal.Signals[name])
            return
        why = f"{name} ({'restart' if stays else 'stop'})"
        log.info("%s: %s", name, "the engines stay for the next llmgw" if stays else "stopping the engines")
        self.board.note(f"llmgw ends: {why}", by=name)
        self.board.leaving.set(Leaving(why, engines_stay=stays))

    async def _reload_by_signal(self) -> None:
        if self.board.leaving.value is not None:
            log.warning("SIGHUP: llmgw is on its way out, nothing is reloaded")
            return
        answer = await self.reload("SIGHUP", dry_run=False)
        if answer.plan is None and self.board.leaving.value is None:
            log.error("SIGHUP: the file is refused, nothing was changed; see llmgw check %s", self._path)

    # -- what shards ask of the host ---------------------------------------------------------------------

    @property
    def _inventory(self) -> Inventory | None:
        """The GPUs as they were read last."""
        facts = self._node_watch.facts.value
        return facts.inventory if facts is not None else None

    async def _check(self, spec: ShardSpec, endpoint: Endpoint) -> Sequence[Problem]:
        """Preflight of one shard right before its launch, by the facts that its GPUs were chosen with."""
        return await trio.to_thread.run_sync(self._preflight, spec, endpoint, abandon_on_cancel=True)

    def _preflight(self, spec: ShardSpec, endpoint: Endpoint) -> Sequence[Problem]:
        holders: Mapping[int, PortHolder] = {}
        if isinstance(endpoint, TcpEndpoint):
            # As if the file had said the port that llmgw chose: whoever holds it is in the way all the same.
            spec = evolve(spec, port=endpoint.port)
            if port_free(endpoint.host, endpoint.port) is not None:
                holders = port_holders([endpoint.port]) or {endpoint.port: PortHolder(endpoint.port)}
        env = self._host.env
        home = env.get("HOME") or os.path.expanduser("~")
        gathered = gather_host(env, home, port_holders=holders, with_groups=False)
        return preflight([spec], facts_for([spec], self._with_hardware(gathered)))

    def _with_hardware(self, gathered: HostFacts) -> HostFacts:
        facts = self._node_watch.facts.value
        if facts is None:
            return gathered
        return evolve(gathered, inventory=facts.inventory, availability=facts.availability, hardware=facts.node.host)

    # -- what control asks (control.api.Services) --------------------------------------------------------

    def header(self) -> dict[str, Any]:
        leaving = self.board.leaving.value
        return {
            "llmgw": __version__,
            "pid": os.getpid(),
            "node": self.in_force.node.name,
            "started": self._started,
            "config": {"path": os.path.abspath(self._path), "error": self._config_error},
            "hardware": _hardware(self._inventory),
            "stopping": leaving.why if leaving is not None else None,
            "warnings": self._warnings(),
            "gateway": self._observation.as_json(),
            "inventory": self._inventory_as_read(),
        }

    def _inventory_as_read(self) -> dict[str, Any] | None:
        """GPUs and host of the last look: who watches the status must not have nvidia-smi run every second."""
        facts = self._node_watch.facts.value
        if facts is None:
            return None
        whole = node_json(facts.node, source="daemon", availability=facts.availability)
        return {"gpu": whole["gpu"], "host": whole["host"]}

    def _node_as_seen(self) -> Node:
        facts = self._node_watch.facts.value
        return Node(
            version=__version__,
            started=self._started,
            config_in_force=self._config_error is None,
            stopping=self.board.leaving.value is not None,
            inventory=facts.inventory if facts is not None else None,
            availability=facts.availability if facts is not None else {},
        )

    async def metrics(self) -> bytes:
        return await self._observation.render()

    async def _metrics_page(self) -> Page:
        return Page(200, CONTENT_TYPE.encode(), await self.metrics())

    def find(self, name: str) -> tuple[ShardId, ...]:
        return tuple(instance.status.id for instance in self.board.snapshot.named(name))

    def tail(self, id_: ShardId) -> LogSource | None:
        return self._supervisor.output(id_)

    def shm_bytes(self, id_: ShardId) -> int | None:
        engine = self._host.engines.get(id_)
        return engine.shm_usage().bytes if engine is not None else None

    def _warnings(self) -> list[str]:
        usages = {str(id_): engine.shm_usage() for id_, engine in self._host.engines.items()}
        full = shm_warning(usages)
        return [*([full] if full is not None else []), *self._node_warnings()]

    def _node_warnings(self) -> list[str]:
        """What is wrong with the GPUs, each with what to do."""
        facts = self._node_watch.facts.value
        return node_warnings(
            facts.inventory if facts is not None and self._node_watch.is_needed else None,
            self._quarantine.entries,
            in_use=frozenset(uuid for engine in self._host.engines.values() for uuid in engine.gpu_uuids),
            now=time.time(),
        )

    async def reload(self, by: str, *, dry_run: bool) -> ReloadAnswer:
        """Read the file again. With an error nothing changes, and status says so until the next good reload."""
        async with self._changing:
            if dry_run:
                return await self._read_again(by, dry_run=True)
            self._notifier.reloading()
            try:
                return await self._read_again(by, dry_run=False)
            finally:
                # Also after a refusal: for systemd a reload ends with READY, and until then it is under way.
                self._notifier.ready(systemd.status_line(self.board.snapshot))

    async def _read_again(self, by: str, *, dry_run: bool) -> ReloadAnswer:
        read = partial(load, self._path, node=self._node, running=True, inventory=self._inventory)
        parsed: Parsed = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
        problems = list(parsed.problems)
        if parsed.config is not None:
            problems += not_served_yet(parsed.config)
        if parsed.config is not None and not errors_of(problems):
            problems += self._preflight_changes(parsed)
        errors = errors_of(problems)
        if parsed.config is None or errors:
            if not dry_run:
                self._refuse(by, len(errors))
            return ReloadAnswer(None, tuple(problems))
        if dry_run:
            return ReloadAnswer(self._supervisor.plan(parsed.config).as_json(), tuple(problems))
        if (late := self._too_late("reload-refused")) is not None:
            # Told to end while the file was read: shards come and go no more.
            return ReloadAnswer(None, (late,))
        wanted = parsed.config.gateway.listen if parsed.config.gateway is not None else ()
        try:
            opened = self._listeners.bind(wanted)
        except LlmgwError as error:
            self._refuse(by, 1)
            return ReloadAnswer(None, (*problems, Problem("cannot-listen", error.message, error.hint)))
        self._config_error = None
        self.board.note("reload", by=by)
        changes = self._supervisor.apply(parsed.config, f"reload by {by}")
        self._listeners.adopt(wanted, opened)
        return ReloadAnswer(changes.as_json(), tuple(problems))

    def _preflight_changes(self, parsed: Parsed) -> Sequence[Problem]:
        """Checks against the machine of what a reload would launch; what runs already has passed them."""
        assert parsed.config is not None
        changes = self._supervisor.plan(parsed.config)
        touched = {action.id.name for action in changes.actions if action.kind in ("start", "replace")}
        facts = self._with_hardware(parsed.facts)
        return preflight([spec for spec in parsed.config.shards if spec.name in touched], facts)

    def _too_late(self, code: str) -> Problem | None:
        leaving = self.board.leaving.value
        if leaving is None:
            return None
        hint = "it is read by the new code" if self.upgrading else "start it again"
        return Problem(code, f"llmgw is on its way out ({leaving.why})", hint)

    def _refuse(self, by: str, count: int) -> None:
        self._config_error = f"{count} error{'s' * (count != 1)} in the file; the last good one is in force"
        self.board.note(f"reload refused: {self._config_error}", by=by)

    def config(self) -> dict[str, Any]:
        return {"path": os.path.abspath(self._path), "text": show_config(self.in_force)}

    async def inventory(self) -> dict[str, Any]:
        """The node as it is now; when nvidia-smi fails or takes long, the last good facts, marked stale."""
        facts = await self._node_watch.refresh_within(PATIENCE)
        return node_json(facts.node, source="daemon", availability=facts.availability)

    async def release_gpu(self, name: str, by: str) -> dict[str, Any]:
        """An operator says that a GPU may be used although its memory has not come back. Raises LlmgwError."""
        facts = await self._node_watch.refresh_within(PATIENCE)
        is_index = name.isascii() and name.isdecimal() and len(name) <= INDEX_DIGITS
        found = find_gpu(int(name) if is_index else name, facts.inventory)
        entries = self._quarantine.entries
        if isinstance(found, str):
            # Also one that cannot be seen now may leave.
            entry = next((entry for entry in entries if name in (entry.uuid, entry.label)), None)
            if entry is None:
                raise LlmgwError(f"cannot release GPU {name}: {found}", "llmgw inventory lists them")
            uuid, label, card = entry.uuid, entry.label, None
        else:
            entry = next((entry for entry in entries if entry.uuid == found.uuid), None)
            card = found if isinstance(found, Gpu) and facts.inventory.is_current else None
            uuid, label = found.uuid, str(found.index) if isinstance(found, Gpu) else found.uuid
        known = facts.availability.get(uuid)
        ours = {holder.pid for holder in known.holders if holder.shard is not None} if known is not None else set()
        changed = self._quarantine.release(uuid, card, ours=ours)
        if changed:
            held = f", {entry.holder}" if entry is not None else ""
            self.board.note(f"GPU {label} released by hand{held}", by=by)
        facts = await self._node_watch.refresh_within(PATIENCE)
        self._node_watch.wake()
        known = facts.availability.get(uuid)
        users = {holder.shard for holder in known.holders if holder.shard is not None} if known is not None else set()
        return {
            "gpu": int(label) if label.isdecimal() else label,
            "uuid": uuid,
            "released": changed,
            "was_held_by": entry.holder if entry is not None else None,
            "in_use_by": sorted(users),
            "assignable": known.assignable if known is not None else None,
            "why_not": known.why_not if known is not None else None,
        }

    async def upgrade(self, by: str) -> ReloadAnswer:
        """Check the file with the code on disk, then leave the loop to become it."""
        async with self._changing:
            argv = [sys.executable, "-m", "llmgw", "check", "--offline", "--json", self._path]
            if self._node is not None:
                argv[4:4] = ["--node", self._node]
            result = await run_tool(self._children, argv, timeout=CHECK_TIMEOUT, env=dict(os.environ))
            if result.code != 0:
                return ReloadAnswer(None, (_refusal_of(result),))
            if (late := self._too_late("upgrade-refused")) is not None:
                # Told to end while the new code read the file: it would come back from the dead.
                return ReloadAnswer(None, (late,))
            self.upgrading = True
            self.board.note("upgrade: going over to the new code", by=by)
            self.board.leaving.set(Leaving("upgrade", engines_stay=True, all_stay=True))
            return ReloadAnswer({"upgrade": True})


def _set_aside() -> None:
    """What is there now stays until the end: no garbage collection looks at it again. A full one took 20 ms and more
    of every stream's time, most of them for the modules alone.
    """
    gc.collect()
    gc.freeze()


def _terminal_is_gone() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return True
    return False


def _own_cgroup_text() -> str:
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def _readable(records: RecordStore) -> Sequence[ShardRecord]:
    try:
        return records.read_all()
    except OSError:
        return ()


def _hardware(inventory: Inventory | None) -> str | None:
    """`8x h100-80g`, or None without GPUs or without knowledge of them."""
    if inventory is None or not inventory.gpus:
        return None
    counts: dict[str, int] = {}
    for gpu in inventory.gpus:
        name = gpu.gpu_class or gpu.name
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count}x {name}" for name, count in counts.items())


def _refusal_of(result: ToolResult) -> Problem:
    """Why the new code does not want to run this file, in its own words."""
    if result.timed_out:
        message = f"the new code did not check the file within {CHECK_TIMEOUT:g} s"
    else:
        try:
            found = json.loads(result.stdout)["errors"][0]["message"]
        except (ValueError, LookupError, TypeError):
            found = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-500:]
        message = f"the new code refuses the file: {found}"
    return Problem("upgrade-refused", message, "run llmgw check with the new code; the running one goes on")
