"""`vllm serve`: the leader's long silence, its children, and how each way of starting ends.

The leader loads nothing itself. It binds the port without listening, starts the engine cores, and opens the
port when they have loaded. With one API server it answers HTTP; with several it is a plain parent.
"""

import os
import signal
import socket
import time
from functools import partial

from llmgw.fake import chatter, failures, family, leftovers, options, proctitle, rendezvous
from llmgw.fake.http import bind_tcp, bind_unix
from llmgw.fake.knobs import Knobs
from llmgw.fake.loop import READ, Loop
from llmgw.fake.mishaps import arm_flood, die
from llmgw.fake.profiles.vllm_core import HANG, LOADED, QUIT, Worker, receive, run_core, send
from llmgw.fake.profiles.vllm_frontend import FrontEnd
from llmgw.fake.profiles.vllm_setup import READY, Setup

BAD_FLAG, BIND, REGISTRY, SOCKET_FILE, BIND_FAILS, CHILDREN, WORKERS_BUSY = 8.0, 2.0, 11.0, 11.0, 15.0, 25.0, 38.0
REGISTRY_LIVES = 14.0
FOLLOWER_STOPS = 12.0
PARENT_STOPS = 2.0
CORES_MAY_TAKE = 2.0
"""Seconds, measured; all but the last, which is plain, multiplied by the time factor."""


def run(argv: list[str], knobs: Knobs) -> int:
    if argv[:1] != ["serve"]:
        chatter.stderr(
            f"vllm: error: argument subparser: invalid choice: {argv[0] if argv else ''!r} (choose from serve)"
        )
        return 2
    try:
        given, unknown = options.VLLM.parse(argv[1:])
        # `--model X` beside `serve` is refused with its value, and so is a second positional argument.
        unknown += given.positional[1:] + [word for value in given.many("model") for word in ("--model", value)]
        setup = Setup(given, knobs)
        complaint = f"unrecognized arguments: {' '.join(unknown)}" if unknown else ""
    except (options.OptionError, ValueError) as error:
        return _usage_error(knobs, str(error))
    if complaint:
        return _usage_error(knobs, complaint)
    if setup.failing.wanted and setup.failing.place() == "usage":
        return _usage_error(knobs, setup.failing.cause_lines()[0].removeprefix("vllm: error: "))
    return Follower(setup).run() if setup.headless else Leader(setup).run()


def _usage_error(knobs: Knobs, complaint: str) -> int:
    """argparse's answer, after the imports."""
    time.sleep(BAD_FLAG * knobs.time_factor)
    chatter.stderr("usage: vllm serve [model_tag] [options]")
    chatter.stderr(f"vllm: error: {complaint}")
    return 2


class Leader:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._loop = Loop()
        self._log = chatter.VllmLog("APIServer")
        self._socket: socket.socket | None = None
        self._cores: list[int] = []
        self._servers: list[int] = []
        self._short_lived: list[int] = []
        self._channels: list[list[socket.socket]] = []
        """Per API server its ends of the channels, one per core."""
        self._loaded = 0
        self._complete = setup.nodes <= 1
        self._ready = False
        self._stopping = False
        self._names = leftovers.SharedNames(
            setup.knobs,
            removed=[f"psm_{leftovers.random_name()}" for _ in range(2 + (setup.tensor > 1))]
            + [f"sem.mp-{leftovers.random_name()}"],
        )

    def run(self) -> int:
        setup, until = self._setup, self._setup.timeline.until
        chatter.vllm_banner(self._log)
        self._log.info(f"vLLM API server version 0.32.0, model {setup.model}", "api_server.py:1772")
        chatter.long_line(self._log.info, setup.knobs.long_line // 6, "non-default args")
        if setup.knobs.noise:
            chatter.ulimit_warning(self._log)
        if setup.knobs.bad_bytes:
            chatter.bad_bytes(1)
        self._loop.call_later(until(BIND), self._bind)
        self._loop.call_later(until(REGISTRY), self._start_short_children)
        self._loop.call_later(until(CHILDREN), self._start_children)
        if setup.nodes > 1:
            self._loop.call_later(until(CHILDREN), self._meet)
        self._loop.call_later(setup.ready_timeout, self._give_up)
        arm_flood(self._loop, setup.knobs, 1)
        failing = setup.failing
        if failing.wanted and failing.place() == "leader":
            self._loop.call_later(
                setup.timeline.until_elapsed(failing.delay(setup.timeline.total)),
                lambda: self._fail(failing.cause_lines(), failing.exit_code("leader")),
            )
        code = self._loop.run()
        self._end_cores()
        if setup.knobs.noise:
            chatter.nanobind_noise()
            chatter.tracker_noise()
        return code

    # --- loading ----------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        setup = self._setup
        try:
            rendezvous.Head(self._loop, setup.master_host, setup.master_port, setup.nodes - 1, self._met)
        except OSError as error:
            self._fail([f"torch.distributed.DistNetworkError: [Errno {error.errno}] {error.strerror}"], 1)

    def _met(self) -> None:
        self._complete = True
        self._become_ready_when_loaded()

    def _bind(self) -> None:
        if self._setup.uds:
            self._loop.call_later(self._setup.timeline.until(SOCKET_FILE), self._bind_unix)
            return
        try:
            self._socket = bind_tcp(self._setup.host, self._setup.port)
        except OSError as error:
            self._cannot_bind(error)

    def _bind_unix(self) -> None:
        try:
            self._socket = bind_unix(self._setup.uds)
        except OSError as error:
            self._cannot_bind(error)

    def _cannot_bind(self, error: OSError) -> None:
        delay = self._setup.timeline.until(BIND_FAILS)
        self._loop.call_later(delay, lambda: self._fail([f"OSError: [Errno {error.errno}] {error.strerror}"], 1))

    def _start_short_children(self) -> None:
        if not self._setup.knobs.short_children:
            return

        def registry() -> int:
            proctitle.set_spawned("python3\0-m\0vllm.model_executor.models.registry")
            time.sleep(min(REGISTRY_LIVES * self._setup.factor, 5.0))
            return 0

        def shell() -> int:
            os.execv("/bin/sh", ["sh", "-c", "exit 0"])

        self._short_lived = [family.fork(self._loop, registry), family.fork(self._loop, shell)]
        self._loop.on_signal(signal.SIGCHLD, self._reap)

    def _start_children(self) -> None:
        setup = self._setup
        chatter.filler(self._log.info, setup.knobs.burst_lines)
        tracker_read, tracker_write = os.pipe()
        code = f"from multiprocessing.resource_tracker import main;main({tracker_read})"
        family.fork(self._loop, family.exec_python(code, [tracker_read]), keep=[tracker_read])
        os.close(tracker_read)
        pairs = [[socket.socketpair() for _ in range(setup.data)] for _ in range(max(1, setup.api_servers))]
        self._channels = [[pair[0] for pair in row] for row in pairs]
        for index in range(setup.data):
            theirs = [row[index][1] for row in pairs]

            def main(index: int = index, theirs: list[socket.socket] = theirs) -> int:
                return run_core(setup, index, theirs, self._names)

            keep = [*(sock.fileno() for sock in theirs), tracker_write]
            self._cores.append(family.fork(self._loop, main, keep=keep))
        for row in pairs:
            for _, core_end in row:
                core_end.close()
        if setup.data > 1:
            family.fork(self._loop, self._coordinator)
        if setup.knobs.detached != "none":
            family.detach(self._loop, setup.knobs.detached)
        if setup.knobs.swallow_term:
            self._loop.on_signal(signal.SIGTERM, lambda: None)
        for channel in self._channels[0]:
            channel.setblocking(False)
            self._loop.watch(channel, READ, partial(self._hear_core, channel))

    def _coordinator(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        proctitle.set_title(self._setup.title("DPCoordinator"))
        return family.sleep_for_ever()

    def _hear_core(self, channel: socket.socket, _events: int) -> None:
        data = receive(channel)
        if data is None:
            self._core_failed()
        elif LOADED in data:
            self._loaded += 1
            self._become_ready_when_loaded()

    def _become_ready_when_loaded(self) -> None:
        if self._complete and self._cores and self._loaded == len(self._cores):
            self._loop.call_later(self._setup.timeline.until(READY), self._become_ready)

    def _core_failed(self) -> None:
        name = self._setup.core_name(0)
        consequence = f"Engine core initialization failed. See root cause above. Failed core proc(s): {{'{name}': 1}}"
        self._fail([f"RuntimeError: {consequence}"], 1)

    def _give_up(self) -> None:
        if not self._ready:
            self._fail(failures.find("d29").lines("vllm"), 1)

    def _fail(self, cause: list[str], code: int) -> None:
        if cause and cause != [""]:
            for line in failures.traceback_lines(cause, 50, "vllm/entrypoints"):
                chatter.stderr(line)
        if code < 0:
            die(code)
        for channel in self._all_channels():
            self._loop.unwatch(channel)
            send(channel, HANG)
        self._loop.stop(code)

    # --- ready ------------------------------------------------------------------------------------------------

    def _become_ready(self) -> None:
        self._ready = True
        for channel in self._all_channels():
            self._loop.unwatch(channel)
        assert self._socket is not None
        self._log.info(f"Starting vLLM API server on {self._setup.uds or self._setup.port}", "api_server.py:1880")
        if self._setup.api_servers <= 1:
            FrontEnd(self._loop, self._setup, self._channels[0], self._loop.stop).open(self._socket)
            return
        for index in range(self._setup.api_servers):
            keep = [self._socket.fileno(), *(channel.fileno() for channel in self._channels[index])]
            self._servers.append(family.fork(self._loop, partial(self._serve, index), keep=keep))
        self._socket.close()
        self._loop.on_signal(signal.SIGCHLD, self._reap)
        self._loop.on_signal(signal.SIGTERM, self._stop_servers)
        self._loop.on_signal(signal.SIGINT, self._stop_servers)

    def _serve(self, index: int) -> int:
        """One of several API servers: the same front end in a process of its own."""
        assert self._socket is not None
        proctitle.set_title(self._setup.title(f"APIServer_{index}"))
        loop = Loop()
        front = FrontEnd(loop, self._setup, self._channels[index], loop.stop, f"APIServer_{index}")
        front.on_engine_dead = lambda: loop.stop(1)
        front.open(self._socket)
        return loop.run()

    def _stop_servers(self) -> None:
        self._stopping = True
        for pid in self._servers:
            os.kill(pid, signal.SIGTERM)

    def _reap(self) -> None:
        """With several API servers the parent raises when a process ends that should not have."""
        self._short_lived = [pid for pid in self._short_lived if family.exit_of(pid) is None]
        if not self._servers:
            return  # a core's end is heard from its channel; it stays a zombie while the leader hangs
        ended = [pid for pid in (*self._servers, *self._cores) if family.exit_of(pid) is not None]
        if self._stopping:
            self._servers = [pid for pid in self._servers if pid not in ended]
            if not self._servers:
                self._loop.call_later(PARENT_STOPS * self._setup.factor, lambda: self._loop.stop(0))
        elif ended:
            for pid in self._servers:
                if pid not in ended:
                    os.kill(pid, signal.SIGKILL)
            self._servers = []
            self._fail([f"RuntimeError: Process VLLM child (PID: {ended[0]}) died with exit code -9"], 1)

    # --- the end ----------------------------------------------------------------------------------------------

    def _all_channels(self) -> list[socket.socket]:
        return [channel for row in self._channels for channel in row]

    def _end_cores(self) -> None:
        for channel in self._all_channels():
            send(channel, QUIT)
        deadline = time.monotonic() + CORES_MAY_TAKE
        for pid in self._cores:
            while family.exit_of(pid) is None and time.monotonic() < deadline:
                try:
                    os.kill(pid, 0)
                except ProcessLookupError:
                    break
                time.sleep(0.002)
        self._names.remove()


class Follower:
    """A further node of one engine: no port, workers only; does not notice the end of the head."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._loop = Loop()
        self._workers: list[int] = []

    def run(self) -> int:
        self._loop.call_later(self._setup.timeline.until(CHILDREN), self._start_workers)
        self._loop.call_later(self._setup.timeline.until(CHILDREN), self._meet)
        return self._loop.run()

    def _meet(self) -> None:
        """Join the head; whatever happens to it later goes unnoticed."""
        setup = self._setup
        rendezvous.Follower(self._loop, setup.master_host, setup.master_port, lambda: None, lambda: None)

    def _start_workers(self) -> None:
        for rank in range(self._setup.local_ranks):
            worker = partial(self._run_worker, rank)
            self._workers.append(family.fork(self._loop, worker))
        self._loop.on_signal(signal.SIGTERM, self._terminate)

    def _run_worker(self, rank: int) -> int:
        return Worker(self._setup, 0, rank, None).run()

    def _terminate(self) -> None:
        self._loop.call_later(FOLLOWER_STOPS * self._setup.factor, self._leave)

    def _leave(self) -> None:
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
        self._loop.stop(0)
