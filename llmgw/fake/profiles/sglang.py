"""`sglang serve`: scheduler and detokenizer as children, the port bound last, and every crash an exit by SIGKILL."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial

from llmgw.fake import chatter, failures, family, leftovers, openai, options, proctitle, rendezvous
from llmgw.fake.answers import Probes
from llmgw.fake.gpu import Holdings
from llmgw.fake.http import REASONS, Connection, Request, Server, bind_tcp
from llmgw.fake.knobs import Knobs
from llmgw.fake.loop import READ, Loop, Timer
from llmgw.fake.mishaps import Failing, arm_exit, arm_flood, die
from llmgw.fake.profiles.vllm_core import STEP, receive, send
from llmgw.fake.timeline import Timeline

READY = 22.5
CHILDREN, DETOKENIZER, SCHEDULER, WEIGHTS, WEIGHTS_DONE, PORT_OPENS = 8.6, 16.5, 16.9, 17.0, 18.2, 18.9
BAD_FLAG = 8.0
HEALTH_TAKES, HEALTH_LIMIT = 1.0, 20.0
DRAIN_LOOKS, IDLE_STOP, INTERRUPT_STOP = 5.0, 4.5, 1.0
CRASH_SLEEP, PYSPY_DUMP, COREDUMP_WAIT = 5.0, 5.0, 60.0
ORPHAN_SCHEDULER_LEAVES = 15.0
"""Seconds, measured; multiplied by the time factor."""

OPEN_WITH_KEY = ("/health", "/ready", "/metrics")
USAGE_LINES = 475


class Setup:
    """What was asked for. Raises options.OptionError."""

    def __init__(self, given: options.Options, knobs: Knobs) -> None:
        self.given = given
        self.knobs = knobs
        self.factor = knobs.time_factor
        self.timeline = Timeline(knobs, READY)
        self.model = given.text("model-path")
        self.name = given.text("served-model-name", self.model)
        self.host = given.text("host", "127.0.0.1")
        self.port = given.number("port", 30000)
        self.nodes = given.number("nnodes", 1)
        self.node_rank = given.number("node-rank", 0)
        host, _, port = given.text("dist-init-addr", "127.0.0.1:29500").rpartition(":")
        self.meeting_host, self.meeting_port = host, int(port)
        self.ranks = max(1, given.number("tp-size", 1) * given.number("pp-size", 1) // self.nodes)
        self.context = given.number("context-length", 32768)
        self.max_running = given.number("max-running-requests", 256)
        limit = given.number("max-queued-requests", -1)
        self.max_waiting = None if limit < 0 else limit
        self.access_lines = knobs.access_log and given.text("log-level-http", "info") not in ("warning", "error")
        self.keys = {given.text("api-key"), given.text("admin-api-key")} - {""}
        self.cheap_health = os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "1") in ("0", "false")
        self.health_limit = _seconds("SGLANG_HEALTH_CHECK_TIMEOUT", HEALTH_LIMIT * self.factor)
        self.failing = Failing.from_knobs(knobs, "sglang")

    def rank_suffix(self, rank: int) -> str:
        return f"_TP{rank + self.node_rank * self.ranks}" if self.ranks * self.nodes > 1 else ""


def _seconds(variable: str, default: float) -> float:
    """A time from the environment in plain seconds."""
    text = os.environ.get(variable)
    return float(text) if text else default


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "true").lower() not in ("0", "false")


def run(argv: list[str], knobs: Knobs) -> int:
    if argv[:1] != ["serve"]:
        chatter.stderr(f"sglang: error: argument command: invalid choice: {argv[0] if argv else ''!r}")
        return 2
    try:
        given, unknown = options.SGLANG.parse(argv[1:])
        unknown += given.positional
        setup = Setup(given, knobs)
    except (options.OptionError, ValueError) as error:
        return _usage_error(knobs, str(error))
    if unknown:
        return _usage_error(knobs, f"unrecognized arguments: {' '.join(unknown)}")
    if not setup.model:
        return _usage_error(knobs, "the following arguments are required: --model-path/--model")
    if setup.failing.wanted and setup.failing.place() == "usage":
        return _usage_error(knobs, setup.failing.cause_lines()[0].partition("error: ")[2])
    if ":" in setup.name:
        chatter.stderr("AssertionError: served_model_name cannot contain a colon (':') character.")
        return 1
    return Leader(setup).run()


def _usage_error(knobs: Knobs, complaint: str) -> int:
    time.sleep(BAD_FLAG * knobs.time_factor)
    chatter.stderr("usage: sglang serve [-h] --model-path MODEL_PATH")
    for number in range(USAGE_LINES - 1):
        chatter.stderr(f"                    [--option-{number} VALUE_{number}]")
    chatter.stderr(f"sglang serve: error: {complaint}")
    return 2


class Scheduler:
    """One rank: holds the GPU memory and makes the steps; its answers pass through the detokenizer."""

    def __init__(self, setup: Setup, rank: int, leader: socket.socket, onward: socket.socket | None) -> None:
        self._setup = setup
        self._rank = rank
        self._leader = leader
        self._onward = onward
        self._loop = Loop()
        self._log = chatter.SglangLog(setup.rank_suffix(rank).removeprefix("_"))
        self._gpu = Holdings(setup.knobs)

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        proctitle.set_spawned()
        until = self._setup.timeline.until
        self._loop.call_later(until(SCHEDULER), self._begin)
        self._loop.call_later(until(WEIGHTS), self._load)
        self._leader.setblocking(False)
        self._loop.watch(self._leader, READ, self._hear)
        failing = self._setup.failing
        if failing.wanted and failing.place() == "child" and self._rank == 0:
            delay = self._setup.timeline.until_elapsed(failing.delay(self._setup.timeline.total))
            self._loop.call_later(max(delay, until(SCHEDULER)), lambda: self._fail(failing.cause_lines()))
        return self._loop.run()

    def _begin(self) -> None:
        if self._setup.knobs.title:
            proctitle.set_title(f"sglang::scheduler{self._setup.rank_suffix(self._rank)}")
        proctitle.die_with_parent(signal.SIGKILL)  # too late for a parent that died during the imports
        if self._setup.knobs.worker_ignores_term or self._setup.node_rank > 0:
            self._loop.on_signal(signal.SIGTERM, lambda: None)

    def _load(self) -> None:
        self._log.line("Init torch distributed begin.")
        self._log.line("Load weight begin. avail mem=78.57 GB")
        reason = self._gpu.take_rank(self._rank)
        if reason is not None:
            self._fail([f"RuntimeError: {reason}"])
            return
        seconds = self._setup.timeline.until(WEIGHTS_DONE)
        if self._rank == 0:
            chatter.ProgressBar(self._loop, self._setup.knobs, "Multi-thread loading shards").run(seconds)
        failing = self._setup.failing
        if not self._setup.knobs.never_ready and not (failing.wanted and failing.place() == "child"):
            self._loop.call_later(seconds, self._loaded)

    def _loaded(self) -> None:
        self._log.line("Load weight end. elapsed=1.21 s, type=LlamaForCausalLM, mem usage=14.98 GB.")
        self._log.line("KV Cache is allocated. #tokens: 428033, K size: 26.13 GB, V size: 26.13 GB")
        self._log.line(f"max_total_num_tokens=428033, chunked_prefill_size=8192, context_len={self._setup.context}")
        send(self._leader, b"r")

    def _fail(self, cause: list[str]) -> None:
        self._log.line("Scheduler hit an exception: Traceback (most recent call last):")
        for line in failures.traceback_lines(cause, 10, "sglang/srt")[1:]:
            chatter.stderr(line)
        self._loop.stop(1)

    def _hear(self, _events: int) -> None:
        data = receive(self._leader)
        if data is None:
            # The parent died before PDEATHSIG was armed: the real one stays for a while.
            self._loop.unwatch(self._leader)
            self._loop.call_later(ORPHAN_SCHEDULER_LEAVES * self._setup.factor, lambda: self._loop.stop(0))
        elif self._onward is not None:
            send(self._onward, data)


class Detokenizer:
    """Passes the steps of rank 0 to the leader; stays for good when its parent died early."""

    def __init__(self, setup: Setup, leader: socket.socket, scheduler: socket.socket) -> None:
        self._setup = setup
        self._leader = leader
        self._scheduler = scheduler
        self._loop = Loop()

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        proctitle.set_spawned()
        self._loop.call_later(self._setup.timeline.until(DETOKENIZER), self._begin)
        self._scheduler.setblocking(False)
        self._loop.watch(self._scheduler, READ, self._hear)
        return self._loop.run()

    def _begin(self) -> None:
        if self._setup.knobs.title:
            proctitle.set_title("sglang::detokenizer")
        proctitle.die_with_parent(signal.SIGKILL)

    def _hear(self, _events: int) -> None:
        data = receive(self._scheduler)
        if data is None:
            self._loop.unwatch(self._scheduler)
        else:
            send(self._leader, data)


class Leader:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._loop = Loop()
        self._log = chatter.SglangLog()
        self._server = Server(self._loop, self._handle, self._access)
        self._probes = Probes(self._loop, setup.knobs)
        self._schedulers: dict[int, socket.socket] = {}
        self._detokenizer = 0
        self._loaded = 0
        self._well = False
        self._stopping = False
        self._complete = setup.nodes <= 1
        self._head: rendezvous.Head | None = None
        self._step_done: list[Callable[[], None]] = []
        self._completions = openai.Completions(
            self._loop,
            setup.knobs,
            self._ask_step,
            names=[setup.name],
            max_model_len=setup.context,
            max_running=setup.max_running,
            max_waiting=setup.max_waiting,
        )
        shared = f"sglang_loads_{leftovers.random_name()}_{leftovers.random_name()}.shm"
        self._names = leftovers.SharedNames(setup.knobs, removed=[], lasting=[shared])

    def run(self) -> int:
        setup, until = self._setup, self._setup.timeline.until
        chatter.long_line(self._log.line, setup.knobs.long_line, "server_args")
        chatter.filler(self._log.line, setup.knobs.burst_lines)
        if setup.knobs.bad_bytes:
            chatter.bad_bytes(2)
        self._loop.call_later(until(CHILDREN), self._start_children)
        if setup.nodes > 1:
            self._loop.call_later(until(CHILDREN), self._meet)
        arm_flood(self._loop, setup.knobs, 2)
        failing = setup.failing
        if failing.wanted and failing.place() == "leader":
            delay = setup.timeline.until_elapsed(failing.delay(setup.timeline.total))
            self._loop.call_later(delay, lambda: self._fail(failing))
        code = self._loop.run()
        if self._head is not None:
            self._head.dismiss()
        for pid in (*self._schedulers, self._detokenizer):
            if pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # gone and reaped
        if setup.knobs.noise:
            chatter.tracker_noise()
        return code

    def _meet(self) -> None:
        """Join the other nodes; only when all have met does the load come to its end."""
        host, port = self._setup.meeting_host, self._setup.meeting_port
        if self._setup.node_rank > 0:
            rendezvous.Follower(self._loop, host, port, self._met, lambda: self._loop.stop(0))
            return
        try:
            self._head = rendezvous.Head(self._loop, host, port, self._setup.nodes - 1, self._met)
        except OSError as error:
            self._log.line(f"torch.distributed.DistNetworkError: [Errno {error.errno}] {error.strerror}")
            die(-signal.SIGKILL)

    def _met(self) -> None:
        self._complete = True
        self._open_port_when_loaded()

    def _start_children(self) -> None:
        setup = self._setup
        tracker_read, tracker_write = os.pipe()
        code = f"from multiprocessing.resource_tracker import main;main({tracker_read})"
        family.fork(self._loop, family.exec_python(code, [tracker_read]), keep=[tracker_read])
        os.close(tracker_read)
        for _ in range(5):
            leftovers.temp_file(setup.knobs, f"tmp{leftovers.random_name()}")
        self._names.create()
        to_detokenizer, from_scheduler = socket.socketpair()
        back, detokenizer_end = socket.socketpair()
        for rank in range(setup.ranks):
            ours, theirs = socket.socketpair()
            onward = to_detokenizer if rank == 0 else None
            keep = [theirs.fileno(), tracker_write, *([onward.fileno()] if onward else [])]
            pid = family.fork(self._loop, partial(self._run_scheduler, rank, theirs, onward), keep=keep)
            theirs.close()
            ours.setblocking(False)
            self._schedulers[pid] = ours
            self._loop.watch(ours, READ, partial(self._hear_scheduler, ours))
        keep = [from_scheduler.fileno(), detokenizer_end.fileno(), tracker_write]
        run_detokenizer = partial(self._run_detokenizer, detokenizer_end, from_scheduler)
        self._detokenizer = family.fork(self._loop, run_detokenizer, keep=keep)
        for sock in (to_detokenizer, from_scheduler, detokenizer_end):
            sock.close()
        back.setblocking(False)
        self._back = back
        self._loop.watch(back, READ, self._hear_detokenizer)
        self._loop.on_signal(signal.SIGCHLD, self._reap)
        if setup.knobs.detached != "none":
            family.detach(self._loop, setup.knobs.detached)

    def _run_scheduler(self, rank: int, leader: socket.socket, onward: socket.socket | None) -> int:
        return Scheduler(self._setup, rank, leader, onward).run()

    def _run_detokenizer(self, leader: socket.socket, scheduler: socket.socket) -> int:
        return Detokenizer(self._setup, leader, scheduler).run()

    def _hear_scheduler(self, channel: socket.socket, _events: int) -> None:
        data = receive(channel)
        if data is None:
            self._loop.unwatch(channel)
        elif b"r" in data:
            self._loaded += 1
            self._open_port_when_loaded()

    def _open_port_when_loaded(self) -> None:
        if self._complete and self._schedulers and self._loaded == len(self._schedulers):
            self._loop.call_later(self._setup.timeline.until(PORT_OPENS), self._open_port)

    def _fail(self, failing: Failing) -> None:
        cause = failing.cause_lines()
        if cause:
            for line in failures.traceback_lines(cause, 50, "sglang/srt"):
                chatter.stderr(line)
        code = failing.exit_code("leader")
        if code < 0:
            die(code)
        self._loop.stop(code)

    # --- ready ------------------------------------------------------------------------------------------------

    def _open_port(self) -> None:
        setup = self._setup
        try:
            self._server.listen(bind_tcp(setup.host, setup.port))
        except OSError as error:
            chatter.stderr(
                f"ERROR:    [Errno {error.errno}] error while attempting to bind on address ('{setup.host}', "
                f"{setup.port}): {(error.strerror or '').lower()}"
            )
            die(-signal.SIGKILL)
        chatter.stderr("INFO:     Application startup complete.")
        if setup.node_rank > 0:
            # A follower serves a stand-in only, and waits for rank 0's word whatever signal comes.
            self._well = True
            self._loop.on_signal(signal.SIGTERM, lambda: None)
            return
        self._loop.call_later(setup.timeline.until(READY), self._become_ready)

    def _become_ready(self) -> None:
        self._well = True
        self._probes.became_ready()
        self._log.line("The server is fired up and ready to roll!")
        arm_exit(self._loop, self._setup.knobs)
        ignore = self._setup.knobs.ignore_term
        self._loop.on_signal(signal.SIGTERM, (lambda: None) if ignore else self._terminate)
        self._loop.on_signal(signal.SIGINT, self._interrupt)

    # --- stopping and dying -----------------------------------------------------------------------------------

    def _terminate(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._log.line("SIGTERM received. Draining requests and shutting down...")
        self._loop.call_later((DRAIN_LOOKS if self._completions.open else IDLE_STOP) * self._setup.factor, self._look)

    def _look(self) -> None:
        self._log.line(f"Gracefully exiting... Remaining number of requests {self._completions.open}.")
        if self._completions.open and os.environ.get("SGL_FORCE_SHUTDOWN") != "1":
            self._loop.call_later(DRAIN_LOOKS * self._setup.factor, self._look)
        else:
            self._loop.stop(0)

    def _interrupt(self) -> None:
        self._stopping = True
        self._loop.call_later(INTERRUPT_STOP * self._setup.factor, lambda: self._loop.stop(0))

    def _reap(self) -> None:
        for pid in (*self._schedulers, self._detokenizer):
            code = family.exit_of(pid)
            if code is not None:
                self._crash(pid, code)

    def _crash(self, pid: int, code: int) -> None:
        """A child is gone: the leader answers nobody any more and in the end kills itself."""
        chatter.stderr(f"Received sigquit from a child process (pid {pid}, exit code {code}).")
        factor = self._setup.factor
        self._log.line("Sleeping 5 seconds before crash diagnostics")
        time.sleep(CRASH_SLEEP * factor)
        if pid == self._detokenizer:
            if _is_on("SGLANG_PYSPY_DUMP_BEFORE_CRASH"):
                self._log.line("Pyspy dump for the remaining processes")
                time.sleep(PYSPY_DUMP * factor)
            if _is_on("SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
                wait = _seconds("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", COREDUMP_WAIT * factor)
                self._log.line(f"Waiting {wait:.1f} seconds for CUDA coredumps")
                time.sleep(wait)
        die(-signal.SIGKILL)

    # --- answers ----------------------------------------------------------------------------------------------

    def _ask_step(self, made: Callable[[], None]) -> None:
        self._step_done.append(made)
        for channel in self._schedulers.values():
            send(channel, STEP)

    def _hear_detokenizer(self, _events: int) -> None:
        data = receive(self._back)
        if data is None:
            self._loop.unwatch(self._back)
            return
        for _ in data:
            if self._step_done:
                self._step_done.pop(0)()

    def _handle(self, request: Request, connection: Connection) -> None:
        path = request.path
        if self._setup.node_rank > 0:
            known = path in ("/health", "/health_generate", "/ping")
            connection.reply(200 if known else 404, b"")
        elif not path.startswith(OPEN_WITH_KEY) and not self._allowed(request):
            connection.reply(401, b'{"error":"Unauthorized"}')
        elif path in ("/ready", "/ping"):
            connection.reply(200 if self._well and not self._stopping else 503, b"")
        elif path in ("/health", "/health_generate"):
            unwell = partial(connection.reply, 503, b"")
            self._probes.health(connection, partial(self._health, connection), unwell)
        elif path == "/v1/models":
            self._probes.models(connection, partial(self._models, connection))
        elif path == "/metrics":
            if self._setup.given.has("enable-metrics") and self._setup.knobs.metrics:
                connection.reply(200, self._metrics(), "text/plain; version=0.0.4")
            else:
                connection.reply(404, b'{"detail":"Not Found"}')
        elif path in ("/model_info", "/get_model_info"):
            connection.reply(200, json.dumps({"model_path": self._setup.model, "is_generation": True}).encode())
        elif path in ("/server_info", "/get_server_info"):
            connection.reply(200, json.dumps(self._server_info()).encode())
        elif path == "/v1/loads":
            connection.reply(200, self._loads())
        elif path in ("/v1/chat/completions", "/v1/completions") and request.method == "POST":
            self._completions.accept(request, connection)
        else:
            connection.reply(404, b'{"detail":"Not Found"}')

    def _server_info(self) -> dict[str, object]:
        """The options as given, and what the one data-parallel rank made of them."""
        setup = self._setup
        given = setup.max_running if setup.given.has("max-running-requests") else None
        state = {"last_gen_throughput": 0.0, "effective_max_running_requests_per_dp": setup.max_running}
        info = {"model_path": setup.model, "served_model_name": setup.name, "max_running_requests": given}
        return {**info, "internal_states": [state], "version": "0.5.23"}

    def _allowed(self, request: Request) -> bool:
        keys = self._setup.keys
        return not keys or request.headers.get("authorization", "").removeprefix("Bearer ") in keys

    def _health(self, connection: Connection) -> None:
        """At least a second, by one generated token; after the limit 503, and unwell until a token comes."""
        if self._stopping or not self._probes.is_ready:
            connection.reply(503, b"")
            return
        if self._setup.cheap_health or self._completions.running:
            connection.reply(200 if self._well else 503, b"")
            return
        limit: list[Timer] = []

        def give_up() -> None:
            self._well = False
            connection.reply(503, b"")

        def made() -> None:
            if limit[0].cancelled or connection.closed:
                return
            limit[0].cancel()
            self._well = True
            self._loop.call_later(HEALTH_TAKES * self._setup.factor, lambda: connection.reply(200, b""))

        limit.append(self._loop.call_later(self._setup.health_limit, give_up))
        self._ask_step(made)

    def _models(self, connection: Connection) -> None:
        setup = self._setup
        names = ["some-other-model" if setup.knobs.wrong_model_name else setup.name]
        connection.reply(200, openai.model_list(names, setup.model, setup.context, "sglang"))

    def _loads(self) -> bytes:
        running, waiting = len(self._completions.running), len(self._completions.waiting)
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting, "max_total_num_tokens": 428033}
        return json.dumps({"loads": [load]}).encode()

    def _metrics(self) -> bytes:
        counters = self._completions.counters
        running = len(self._completions.running)
        moving = running / max(self._setup.knobs.token_interval, 1e-3)
        values: list[tuple[str, str, float]] = [
            ("sglang:num_running_reqs", "gauge", running),
            ("sglang:num_queue_reqs", "gauge", len(self._completions.waiting)),
            ("sglang:token_usage", "gauge", min(1.0, running / 256)),
            ("sglang:num_used_tokens", "gauge", running * 100),
            ("sglang:max_total_num_tokens", "gauge", 428033),
            ("sglang:num_retracted_reqs", "gauge", 0),
            ("sglang:gen_throughput", "gauge", moving),
            ("sglang:prompt_tokens_total", "counter", counters.prompt_tokens),
            ("sglang:generation_tokens_total", "counter", counters.generated_tokens),
            ("sglang:realtime_tokens_total", "counter", counters.generated_tokens),
        ]
        name = self._setup.name
        labels = f'engine_type="unified",model_name="{name}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        return openai.exposition([(metric, kind, labels, value) for metric, kind, value in values])

    def _access(self, connection: Connection, status: int) -> None:
        request = connection.request
        if request is not None and self._setup.access_lines:
            where = f'{connection.client} - "{request.method} {request.target} HTTP/1.1"'
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            chatter.stdout(f"[{stamp}] INFO:     {where} {status} {REASONS.get(status, '')}")
