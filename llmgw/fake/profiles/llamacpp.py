"""llama-server: one process that listens at once and answers 503 until the model is loaded."""

import os
import signal
import time

from llmgw.fake import openai, options
from llmgw.fake.answers import Probes
from llmgw.fake.gpu import Holdings
from llmgw.fake.http import Connection, Request, Server, bind_tcp
from llmgw.fake.knobs import Knobs
from llmgw.fake.loop import Loop, write_all
from llmgw.fake.mishaps import Failing, arm_exit, arm_flood, die

PORT_OPENS = 0.1
LOADED = 2.3
STOPS_AFTER = 0.1
"""Seconds, measured; multiplied by the time factor."""

OPEN_PATHS = ("/health", "/v1/health")


class Log:
    """Lines `0.00.013.444 I srv  text` (elapsed time, level letter) on stderr; stdout stays empty."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def line(self, level: str, text: str) -> None:
        write_all(2, f"{self._stamp()} {level} {text}\n".encode())

    def _stamp(self) -> str:
        micros = int((time.monotonic() - self._start) * 1_000_000)
        seconds, micros = divmod(micros, 1_000_000)
        return f"{seconds // 60}.{seconds % 60:02}.{micros // 1000:03}.{micros % 1000:03}"


class LlamaServer:
    def __init__(self, loop: Loop, given: options.Options, knobs: Knobs, log: Log) -> None:
        self._loop = loop
        self._given = given
        self._knobs = knobs
        self._log = log
        self._factor = knobs.time_factor
        self._loaded = False
        self._stopping = False
        self._host = given.text("host", "127.0.0.1")
        self._port = given.number("port", 8080)
        self._model = given.text("model")
        self._alias = given.text("alias", self._model.rpartition("/")[2])
        self._names = ["some-other-model"] if knobs.wrong_model_name else self._alias.split(",")
        self._keys = read_keys(given)
        self._context = given.number("ctx-size", 4096)
        self._slots = max(1, given.number("parallel", 4))
        self._server = Server(loop, self._handle)
        self._probes = Probes(loop, knobs)
        self._failing = Failing.from_knobs(knobs, "llamacpp")
        self._gpu = Holdings(knobs)
        self._completions = openai.Completions(
            loop,
            knobs,
            lambda made: made(),
            names=[self._alias],
            max_model_len=self._context,
            max_running=self._slots,
            any_model=True,
        )

    def start(self) -> None:
        total = LOADED * self._factor if self._knobs.load_seconds is None else self._knobs.load_seconds
        self._loop.call_later(min(PORT_OPENS * self._factor, total), self._open_port)
        self._log.line("I", "build: 11434 (fake) with a compiler for Linux")
        self._log.line("I", f"system_info: n_threads = {self._given.text('threads', '2')} | CPU : LLAMAFILE = 1 |")
        if self._failing.wanted:
            self._loop.call_later(self._failing.delay(total), self._fail)
        elif not self._knobs.never_ready:
            self._loop.call_later(total, self._finish_loading)
        arm_flood(self._loop, self._knobs, 2)

    def _open_port(self) -> None:
        try:
            self._server.listen(bind_tcp(self._host, self._port))
        except OSError:
            self._log.line(
                "E", f"srv  start: couldn't bind HTTP server socket, hostname: {self._host}, port: {self._port}"
            )
            self._log.line("E", "srv  llama_server: exiting due to HTTP server error")
            self._loop.stop(1)
            return
        self._log.line("I", f"srv  main: HTTP server is listening, hostname: {self._host}, port: {self._port}")
        self._log.line("I", "srv  main: loading model")
        self._log.line("I", f"srv  load_model: loading model '{self._model}'")

    def _fail(self) -> None:
        for line in self._failing.cause_lines():
            self._log.line("E", line)
        if self._failing.exit_code("leader") >= 0:
            self._log.line("E", f"common_init_from_params: failed to load model '{self._model}'")
            self._log.line("E", "srv  llama_server: exiting due to model loading error")
        die(self._failing.exit_code("leader"))

    def _finish_loading(self) -> None:
        self._gpu.take_all()
        self._log.line("I", f"srv  load_model: initializing slots, n_slots = {self._slots}")
        self._log.line("I", "srv  main: model loaded")
        if not self._keys:
            self._log.line("W", "srv  main: no API key is set, every origin may ask")
        self._log.line("I", f"srv  main: server is listening on http://{self._host}:{self._port}")
        self._loaded = True
        self._probes.became_ready()
        # Before this point SIGTERM has its default action: the real one dies with -15 while loading.
        if self._knobs.ignore_term:
            self._loop.on_signal(signal.SIGTERM, lambda: None)
        else:
            self._loop.on_signal(signal.SIGTERM, self._terminate)
            self._loop.on_signal(signal.SIGINT, self._terminate)
        arm_exit(self._loop, self._knobs)

    def _terminate(self) -> None:
        if self._stopping:
            self._log.line("W", "Received second interrupt, terminating immediately.")
            self._loop.stop(1)
            return
        self._stopping = True
        self._log.line("I", "srv  operator(): cleaning up before exit...")
        self._completions.on_idle = self._quit_soon
        self._completions.freeze()
        self._server.close_listeners()
        if not self._completions.open:
            self._quit_soon()

    def _quit_soon(self) -> None:
        self._loop.call_later(STOPS_AFTER * self._factor, lambda: self._loop.stop(0))

    def _handle(self, request: Request, connection: Connection) -> None:
        path = request.path
        if path in OPEN_PATHS:
            self._probes.health(connection, lambda: self._health(connection), lambda: self._unavailable(connection))
        elif not self._allowed(request):
            self._log.line("W", "srv  operator(): Unauthorized: Invalid API Key")
            connection.reply(401, openai.error_body("Invalid API Key", "authentication_error", 401))
        elif not self._loaded:
            self._unavailable(connection)
        elif path in ("/v1/models", "/models"):
            self._probes.models(connection, lambda: self._models(connection))
        elif path == "/metrics":
            self._metrics(connection)
        elif path == "/props":
            connection.reply(200, b'{"total_slots": %d, "model_path": "%b"}' % (self._slots, self._model.encode()))
        elif path == "/slots":
            busy = len(self._completions.running)
            slots = ", ".join(
                f'{{"id": {number}, "is_processing": {str(number < busy).lower()}}}' for number in range(self._slots)
            )
            connection.reply(200, f"[{slots}]".encode())
        elif path.endswith("completions") and request.method == "POST":
            self._completions.accept(request, connection)
        else:
            connection.reply(404, openai.error_body("File Not Found", "not_found_error", 404))

    def _allowed(self, request: Request) -> bool:
        if not self._keys:
            return True
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        return sent in self._keys or request.headers.get("x-api-key", "") in self._keys

    def _unavailable(self, connection: Connection) -> None:
        connection.reply(503, b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}')

    def _health(self, connection: Connection) -> None:
        if self._loaded:
            connection.reply(200, b'{"status":"ok"}')
        else:
            self._unavailable(connection)

    def _models(self, connection: Connection) -> None:
        connection.reply(200, openai.model_list(self._names, self._model, self._context, "llamacpp"))

    def _metrics(self, connection: Connection) -> None:
        if not (self._given.has("metrics") and self._knobs.metrics):
            message = "This server does not support metrics endpoint. Start it with `--metrics`"
            connection.reply(501, openai.error_body(message, "not_supported_error", 501))
            return
        counters = self._completions.counters
        running = len(self._completions.running)
        connection.reply(
            200,
            openai.exposition(
                [
                    ("llamacpp:prompt_tokens_total", "counter", "", counters.prompt_tokens),
                    ("llamacpp:tokens_predicted_total", "counter", "", counters.generated_tokens),
                    ("llamacpp:n_decode_total", "counter", "", counters.steps),
                    ("llamacpp:n_busy_slots_per_decode", "counter", "", float(running)),
                    ("llamacpp:requests_processing", "gauge", "", running),
                    ("llamacpp:requests_deferred", "gauge", "", len(self._completions.waiting)),
                ]
            ),
            "text/plain; version=0.0.4",
        )


def read_keys(given: options.Options) -> set[str]:
    """The accepted keys: from the option, the environment and the file (one a line)."""
    keys = {key for text in given.many("api-key") for key in text.split(",")}
    keys.update(key for key in os.environ.get("LLAMA_API_KEY", "").split(",") if key)
    path = given.text("api-key-file")
    if path:
        with open(path, encoding="utf-8") as file:
            keys.update(line.strip() for line in file if line.strip())
    return keys


def run(argv: list[str], knobs: Knobs) -> int:
    log = Log()
    try:
        given, unknown = options.LLAMACPP.parse(argv)
        unknown += given.positional
        if unknown:
            write_all(2, f"error: invalid argument: {unknown[0]}\n".encode())
            return 1
        loop = Loop()
        server = LlamaServer(loop, given, knobs, log)
    except options.OptionError as error:
        write_all(2, f"error: {error}\n".encode())
        return 1
    except OSError as error:
        write_all(2, f"error: error while handling argument: {error}\n".encode())
        return 1
    server.start()
    return loop.run()
