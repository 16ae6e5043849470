"""vLLM's API server: answers HTTP, and does what a SIGTERM with open streams does to it."""

import json
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from urllib.parse import parse_qs

from llmgw.fake import chatter, openai
from llmgw.fake.answers import Probes
from llmgw.fake.http import REASONS, Connection, Request, Server
from llmgw.fake.loop import READ, Loop
from llmgw.fake.mishaps import arm_exit
from llmgw.fake.profiles.vllm_core import DEAD, HANG, STEP, receive, send
from llmgw.fake.profiles.vllm_setup import Setup

IDLE_STOP, INTERRUPT_STOP, CUT_STOP, CLIENTS_GONE_STOP, HANG_REFUSES = 0.6, 0.3, 0.5, 0.3, 2.0
CORE_KILLED_503, CORE_KILLED_EXIT, WORKER_KILLED_503, WORKER_KILLED_EXIT, REFUSED_BEFORE_EXIT = 0.3, 3.0, 0.1, 4.9, 0.3
STATISTICS, WORKERS_LEAVE = 10.0, 4.4
"""Seconds, measured; multiplied by the time factor."""

SLEEPS, WAKES, WEIGHTS_READ = 5.0, 1.6, 20.0
"""Seconds to fall asleep, to get memory back, and to read dropped weights again; multiplied by the time factor."""

GUARDED = ("/v1", "/v2", "/inference", "/cohere")
DEAD_TEXT = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class FrontEnd:
    """`cores` are its ends of the channels; `leave(code)` ends the process cleanly."""

    def __init__(
        self,
        loop: Loop,
        setup: Setup,
        cores: list[socket.socket],
        leave: Callable[[int], None],
        name: str = "APIServer",
    ) -> None:
        self._loop = loop
        self._setup = setup
        self._cores = cores
        self._leave = leave
        self._log = chatter.VllmLog(name)
        self._dead = False
        self._stopping = False
        self._refusing_work = False
        self._asleep: set[str] = set()
        """What has no memory on the GPU: `weights`, `kv_cache`."""
        self._weights_lost = False
        """After a sleep of level 2, until they are read again."""
        self._step_done: list[Callable[[], None]] = []
        self._server = Server(loop, self._handle, self._access)
        self._probes = Probes(loop, setup.knobs)
        self._completions = openai.Completions(
            loop,
            setup.knobs,
            self._ask_step,
            names=setup.names,
            max_model_len=setup.max_model_len,
            max_running=setup.max_running,
            max_waiting=setup.max_waiting,
        )
        self.on_engine_dead: Callable[[], None] | None = None

    def open(self, sock: socket.socket) -> None:
        """All is loaded: listen. Where another process listens on the same port already, nothing is said about it:
        the real one reports a complete start too, and its memory stays held."""
        for core in self._cores:
            core.setblocking(False)
            self._loop.watch(core, READ, partial(self._hear, core))
        try:
            self._server.listen(sock)
        except OSError:
            sock.close()
        chatter.stderr(f"{self._log.prefix}INFO:     Started server process [{os.getpid()}]")
        chatter.stderr(f"{self._log.prefix}INFO:     Waiting for application startup.")
        chatter.stderr(f"{self._log.prefix}INFO:     Application startup complete.")
        self._probes.became_ready()
        arm_exit(self._loop, self._setup.knobs)
        self._loop.on_signal(signal.SIGINT, self._interrupt)
        if self._setup.knobs.ignore_term:
            self._loop.on_signal(signal.SIGTERM, lambda: None)
        else:
            self._loop.on_signal(signal.SIGTERM, self._terminate)
        self._completions.on_busy = self._start_statistics

    # --- stopping -----------------------------------------------------------------------------------------

    def _terminate(self) -> None:
        if self._stopping or self._dead:
            return
        self._stopping = True
        self._log.info("[shutdown] Shutting down FastAPI HTTP server.", "launcher.py:150")
        if self._setup.shutdown_timeout > 0:
            self._refusing_work = True
            if not self._completions.open:
                self._await_workers()
                return
            self._completions.on_idle = self._await_workers
            self._loop.call_later(self._setup.shutdown_timeout, self._end_streams)
        elif not self._completions.open:
            self._stop_after(IDLE_STOP)
        else:
            self._end_streams()

    def _await_workers(self) -> None:
        """A drain waits for the workers to leave by themselves, with the port open until they have."""
        self._loop.call_later(WORKERS_LEAVE * self._setup.factor, lambda: self._stop_after(IDLE_STOP))

    def _interrupt(self) -> None:
        if not self._stopping and not self._dead:
            self._stopping = True
            self._stop_after(INTERRUPT_STOP)

    def _end_streams(self) -> None:
        """The race that SIGTERM starts, or the end of the time for draining: streams are cut, or hang for ever."""
        if not self._completions.open or self._dead:
            return
        self._dead = True
        self._completions.on_idle = None
        if self._setup.knobs.streams_at_stop == "cut":
            self._completions.end_all("abort")
            self._stop_after(CUT_STOP)
            return
        for core in self._cores:
            self._loop.unwatch(core)
            send(core, HANG)  # never reaped: the core stays a zombie
        self._completions.on_idle = lambda: self._stop_after(CLIENTS_GONE_STOP)
        self._completions.freeze()
        self._loop.call_later(HANG_REFUSES * self._setup.factor, self._server.close_listeners)

    def _stop_after(self, seconds: float) -> None:
        self._server.close_listeners()

        def leave() -> None:
            if self._setup.knobs.noise and not self._dead:
                # An orderly drain, and yet ERROR records: only exits that nobody asked for mean something.
                self._log.error("AsyncLLM output_handler failed.", "async_llm.py:480")
                self._log.error("Traceback (most recent call last):", "async_llm.py:480")
                self._log.error(f"vllm.v1.engine.exceptions.EngineDeadError: {DEAD_TEXT}", "async_llm.py:480")
            self._leave(0)

        self._loop.call_later(seconds * self._setup.factor, leave)

    # --- the engine -----------------------------------------------------------------------------------------

    def _ask_step(self, made: Callable[[], None]) -> None:
        if self._dead:
            return
        self._step_done.append(made)
        send(self._cores[self._completions.counters.steps % len(self._cores)], STEP)

    def _hear(self, core: socket.socket, _events: int) -> None:
        data = receive(core)
        if data is None:
            self._loop.unwatch(core)
            self._engine_died(CORE_KILLED_503, CORE_KILLED_EXIT)
        elif DEAD in data:
            self._engine_died(WORKER_KILLED_503, WORKER_KILLED_EXIT)
        elif STEP in data and self._step_done:
            self._step_done.pop(0)()

    def _engine_died(self, until_503: float, until_exit: float) -> None:
        if self._dead or (self._stopping and not self._completions.open):
            return
        self._dead = True
        factor = self._setup.factor
        if self.on_engine_dead is not None:
            self.on_engine_dead()
            return
        self._loop.call_later(until_503 * factor, self._report_death)
        if not self._setup.keep_alive_on_death:
            refuse = (until_exit - REFUSED_BEFORE_EXIT) * factor
            self._loop.call_later(refuse, self._server.close_listeners)
            self._loop.call_later(until_exit * factor, lambda: self._leave(0))

    def _report_death(self) -> None:
        self._log.error(f"vllm.v1.engine.exceptions.EngineDeadError: {DEAD_TEXT}", "async_llm.py:480")
        self._completions.end_all(None, DEAD_TEXT)

    # --- answers ----------------------------------------------------------------------------------------------

    def _handle(self, request: Request, connection: Connection) -> None:
        path = request.path
        if path.startswith(GUARDED) and not self._allowed(request):
            connection.reply(401, b'{"error":"Unauthorized"}')
        elif path in ("/health", "/ping"):
            status = 503 if self._dead else 200
            self._probes.health(connection, lambda: connection.reply(status, b""), lambda: connection.reply(503, b""))
        elif path == "/v1/models":
            self._probes.models(connection, lambda: self._models(connection))
        elif path == "/metrics" and self._setup.knobs.metrics:
            connection.reply(200, self._metrics(), "text/plain; version=0.0.4")
        elif path == "/load":
            tracked = self._setup.given.has("enable-server-load-tracking")
            connection.reply(200, json.dumps({"server_load": self._completions.open if tracked else 0}).encode())
        elif path == "/version":
            connection.reply(200, b'{"version":"0.32.0"}')
        elif path in ("/v1/chat/completions", "/v1/completions") and request.method == "POST":
            self._completion(request, connection)
        elif self._setup.dev_mode and path in ("/sleep", "/wake_up", "/is_sleeping", "/collective_rpc"):
            self._control(request, connection)
        elif path == "/tokenize" and request.method == "POST":
            connection.reply(200, b'{"count":0,"max_model_len":%d,"tokens":[]}' % self._setup.max_model_len)
        else:
            connection.reply(404, b'{"detail":"Not Found"}')

    # --- sleep (only with VLLM_SERVER_DEV_MODE, and to anybody, also without the key) ---------------------------

    def _control(self, request: Request, connection: Connection) -> None:
        asked = parse_qs(request.target.partition("?")[2])
        if request.path == "/is_sleeping":
            connection.reply(200, json.dumps({"is_sleeping": bool(self._asleep)}).encode())
        elif request.method != "POST":
            connection.reply(405, b'{"detail":"Method Not Allowed"}')
        elif not self._setup.sleep_mode and request.path != "/collective_rpc":
            connection.reply(500, openai.error_body("Sleep mode is not enabled.", "InternalServerError", 500))
        elif request.path == "/sleep":
            self._fall_asleep(int(asked.get("level", ["1"])[0]), connection)
        elif request.path == "/wake_up" and not self._setup.knobs.wake_fails:
            self._wake(set(asked.get("tags", ["weights", "kv_cache"])), connection)
        elif b"reload_weights" in request.body and "weights" not in self._asleep:
            self._after(WEIGHTS_READ, connection, self._read_weights)
        else:
            connection.reply(500, openai.error_body("cannot do that", "InternalServerError", 500))

    def _fall_asleep(self, level: int, connection: Connection) -> None:
        """What runs is dropped, as with its default mode."""
        self._completions.end_all("abort")

        def sleep() -> None:
            self._asleep = {"weights", "kv_cache"}
            self._weights_lost = self._weights_lost or level > 1
            self._log.info("It took 0.5 seconds to fall asleep.", "executor_base.py:211")

        self._after(SLEEPS, connection, sleep)

    def _wake(self, tags: set[str], connection: Connection) -> None:
        def wake() -> None:
            self._asleep -= tags
            self._log.info(f"It took 0.2 seconds to wake up tags {tags}.", "executor_base.py:227")

        self._after(WAKES, connection, wake)

    def _read_weights(self) -> None:
        self._weights_lost = False

    def _after(self, seconds: float, connection: Connection, act: Callable[[], None]) -> None:
        def done() -> None:
            act()
            connection.reply(200, b"")

        self._loop.call_later(seconds * self._setup.factor, done)

    def _completion(self, request: Request, connection: Connection) -> None:
        if self._dead:
            connection.reply(500, openai.error_body(DEAD_TEXT, "InternalServerError", 500))
        elif self._refusing_work:
            text = "cannot schedule new futures after shutdown"
            connection.reply(500, openai.error_body(text, "InternalServerError", 500))
        elif self._asleep or self._weights_lost:
            text = "the engine sleeps" if self._asleep else "the weights are lost"
            connection.reply(503, openai.error_body(text, "ServiceUnavailableError", 503))
        else:
            self._completions.accept(request, connection)

    def _allowed(self, request: Request) -> bool:
        if not self._setup.keys:
            return True
        return request.headers.get("authorization", "").removeprefix("Bearer ") in self._setup.keys

    def _models(self, connection: Connection) -> None:
        setup = self._setup
        names = ["some-other-model"] if setup.knobs.wrong_model_name else setup.names
        connection.reply(200, openai.model_list(names, setup.model, setup.max_model_len, "vllm"))

    def _metrics(self) -> bytes:
        counters = self._completions.counters
        labels = f'engine="0",model_name="{self._setup.names[0]}"'
        running, waiting = len(self._completions.running), len(self._completions.waiting)
        values: list[tuple[str, str, str, float]] = [
            ("vllm:num_requests_running", "gauge", labels, running),
            ("vllm:num_requests_waiting", "gauge", labels, waiting),
            ("vllm:num_requests_waiting_by_reason", "gauge", labels + ',reason="capacity"', waiting),
            ("vllm:num_requests_waiting_by_reason", "gauge", labels + ',reason="deferred"', 0),
            ("vllm:engine_sleep_state", "gauge", labels + ',sleep_state="awake"', 0 if self._asleep else 1),
            ("vllm:kv_cache_usage_perc", "gauge", labels, min(1.0, running / 256)),
            ("vllm:admission_rejections_total", "counter", labels, counters.rejected),
            ("vllm:num_preemptions_total", "counter", labels, 0),
            ("vllm:prompt_tokens_total", "counter", labels, counters.prompt_tokens),
            ("vllm:generation_tokens_total", "counter", labels, counters.generated_tokens),
            ("vllm:iteration_tokens_total_sum", "histogram", labels, counters.generated_tokens),
            ("vllm:iteration_tokens_total_count", "histogram", labels, counters.steps),
            ("vllm:time_to_first_token_seconds_sum", "histogram", labels, 0.05 * counters.finished),
            ("vllm:time_to_first_token_seconds_count", "histogram", labels, counters.finished),
            ("vllm:cache_config_info", "gauge", 'block_size="16",engine="0",num_gpu_blocks="26321"', 1),
        ]
        extra = [
            (name, kind, labels.replace('engine="0"', f'engine="{index}"'), 0.0)
            for index in range(1, self._setup.data)
            for name, kind, _, _ in values[:2]
        ]
        return openai.exposition(sorted(values + extra, key=lambda sample: sample[0]))

    def _start_statistics(self) -> None:
        self._loop.call_later(STATISTICS * self._setup.factor, self._statistics)

    def _statistics(self) -> None:
        running, waiting = len(self._completions.running), len(self._completions.waiting)
        speed = (
            0.0 if self._completions.frozen or not running else running / max(self._setup.knobs.token_interval, 1e-3)
        )
        self._log.info(
            f"Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {speed:.1f} tokens/s, "
            f"Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: 0.1%",
            "loggers.py:127",
        )
        if running or waiting:
            self._start_statistics()
        else:
            self._completions.on_busy = self._start_statistics

    def _access(self, connection: Connection, status: int) -> None:
        request = connection.request
        if request is None or not self._setup.access_lines or request.path in self._setup.quiet_paths:
            return
        self._log.access(connection.client, request.method, request.target, status, REASONS.get(status, ""))
