"""vLLM's engine core and workers: the processes behind the API server, and the steps they make.

Between an API server and a core, and between a core and each worker, single bytes travel: STEP asks for one
step and is answered in kind; LOADED goes up when all weights are in; QUIT goes down for a clean end; HANG makes
the core take its workers and itself away at once, as vLLM's abrupt shutdown does.
"""

import os
import signal
import socket
import tempfile
from functools import partial

from llmgw.fake import chatter, failures, family, leftovers, proctitle
from llmgw.fake.gpu import Holdings
from llmgw.fake.loop import READ, Loop
from llmgw.fake.profiles.vllm_setup import Setup

STEP, LOADED, DEAD, QUIT, HANG = b"s", b"r", b"d", b"q", b"h"

CORE_TITLE, WORKERS_START, WORKER_TITLE, WEIGHTS, WEIGHTS_DONE, GRAPHS = 35.0, 37.0, 47.0, 48.0, 52.0, 53.5
"""Moments of the load (seconds, measured), multiplied by the time factor."""

WORKER_OBEYS_TERM = 2.0
WORKER_LEAVES_DEAD_CORE = 2.5


def run_core(setup: Setup, index: int, fronts: list[socket.socket], names: leftovers.SharedNames) -> int:
    """The engine core; `fronts` are its ends of the channels to the API servers."""
    return Core(setup, index, fronts, names).run()


class Core:
    def __init__(self, setup: Setup, index: int, fronts: list[socket.socket], names: leftovers.SharedNames) -> None:
        self._setup = setup
        self._index = index
        self._fronts = fronts
        self._names = names
        self._loop = Loop()
        self._log = chatter.VllmLog(setup.core_name(index))
        self._workers: dict[int, socket.socket] = {}
        self._loaded: set[int] = set()
        self._is_loaded = False
        self._asking: list[socket.socket] = []
        self._awaited: set[int] = set()
        self._ipc: socket.socket | None = None

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        proctitle.set_spawned()
        until = self._setup.timeline.until
        self._loop.call_later(until(CORE_TITLE), self._begin)
        self._loop.call_later(until(WORKERS_START), self._start_workers)
        for front in self._fronts:
            front.setblocking(False)
            self._loop.watch(front, READ, partial(self._hear_front, front))
        return self._loop.run()

    def _begin(self) -> None:
        if self._setup.knobs.title:
            proctitle.set_title(self._setup.title(self._setup.core_name(self._index)))
        # A SIGTERM to the whole group ends the workers; the core follows them.
        self._loop.on_signal(signal.SIGTERM, lambda: None)
        self._loop.on_signal(signal.SIGCHLD, self._reap)
        self._log.info(f"Initializing a V1 LLM engine with config: model='{self._setup.model}'")
        folder = os.environ.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
        try:
            self._ipc = leftovers.ipc_socket(self._setup.knobs, folder)
        except OSError as error:
            self._log.error(f"zmq.error.ZMQError: ipc path in {folder} cannot be used: {error}")
            self._loop.stop(1)
            return
        leftovers.temp_file(self._setup.knobs, f"vllm_dist_{leftovers.random_name(16)}")
        self._names.create()

    def _start_workers(self) -> None:
        for rank in range(self._setup.local_ranks):
            ours, theirs = socket.socketpair()

            def main(rank: int = rank, theirs: socket.socket = theirs) -> int:
                return Worker(self._setup, self._index, rank, theirs).run()

            pid = family.fork(self._loop, main, keep=[theirs.fileno()])
            theirs.close()
            ours.setblocking(False)
            self._workers[pid] = ours
            self._loop.watch(ours, READ, partial(self._hear_worker, pid))

    def _hear_front(self, front: socket.socket, _events: int) -> None:
        data = receive(front)
        if not data:
            self._loop.unwatch(front)  # the API server died: vLLM's core lives on, so does this one
            return
        for number in data:
            message = bytes((number,))
            if message == STEP:
                self._asking.append(front)
                self._step()
            elif message == QUIT:
                self._quit(0)
            elif message == HANG:
                self._kill_workers()
                os.kill(os.getpid(), signal.SIGKILL)

    def _step(self) -> None:
        if self._awaited or not self._asking:
            return
        self._awaited = set(self._workers)
        for worker in self._workers.values():
            send(worker, STEP)

    def _hear_worker(self, pid: int, _events: int) -> None:
        data = receive(self._workers[pid])
        if not data:
            self._loop.unwatch(self._workers[pid])
            self._reap()
            return
        if LOADED in data:
            self._loaded.add(pid)
            if len(self._loaded) == len(self._workers):
                self._is_loaded = True
                total = self._setup.timeline.total
                self._log.info(f"init engine (profile, create kv cache, warmup model) took {total / 3:.2f} seconds")
                for front in self._fronts:
                    send(front, LOADED)
        if STEP in data and self._awaited:
            self._awaited.discard(pid)
            if not self._awaited:
                send(self._asking.pop(0), STEP)
                self._step()

    def _reap(self) -> None:
        gone = [pid for pid in self._workers if family.exit_of(pid) is not None]
        if not gone:
            return
        if self._is_loaded:
            self._log.error("Worker proc VllmWorker-0 died unexpectedly, shutting down executor.")
            for front in self._fronts:
                send(front, DEAD)
        else:
            self._log.error("EngineCore failed to start.")
            for line in failures.traceback_lines([], 4, "vllm/v1"):
                self._log.error(line)
            self._log.error("Exception: WorkerProc initialization failed due to an exception in a background process.")
        self._quit(1)

    def _quit(self, code: int) -> None:
        self._kill_workers()
        self._loop.stop(code)

    def _kill_workers(self) -> None:
        for pid in self._workers:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # reaped before


class Worker:
    """One rank: loads, holds the GPU memory, makes steps while it can run."""

    def __init__(self, setup: Setup, core: int, rank: int, channel: socket.socket | None) -> None:
        self._setup = setup
        self._rank = rank
        self._suffix = setup.rank_name(rank)
        self._channel = channel
        self._loop = Loop()
        self._log = chatter.VllmLog(f"Worker{self._suffix}")
        self._gpu = Holdings(setup.knobs)
        self._gpu_index = core * setup.local_ranks + rank

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        proctitle.set_spawned()
        setup, until = self._setup, self._setup.timeline.until
        self._loop.call_later(until(WORKER_TITLE), self._begin)
        self._loop.call_later(until(WEIGHTS), self._load_weights)
        failing = setup.failing
        if failing.wanted and failing.place() == "child":
            if self._rank == 0:
                delay = setup.timeline.until_elapsed(failing.delay(setup.timeline.total))
                self._loop.call_later(max(delay, until(WORKER_TITLE)), lambda: self.fail(failing.cause_lines()))
        elif not setup.knobs.never_ready:
            self._loop.call_later(until(WEIGHTS_DONE), self._weights_done)
            self._loop.call_later(until(GRAPHS), self._loaded)
        if self._channel is not None:
            self._channel.setblocking(False)
            self._loop.watch(self._channel, READ, lambda _events: self._hear())
        return self._loop.run()

    def _begin(self) -> None:
        if self._setup.knobs.title:
            proctitle.set_title(self._setup.title("Worker"))
            if self._suffix:
                proctitle.set_title(self._setup.title(f"Worker{self._suffix}"))
        if self._setup.knobs.worker_ignores_term:
            self._loop.on_signal(signal.SIGTERM, lambda: None)
        else:
            self._loop.on_signal(signal.SIGTERM, self._obey_term)

    def _load_weights(self) -> None:
        self._log.info(f"Starting to load model {self._setup.model}...", "gpu_model_runner.py:3000")
        reason = self._gpu.take_rank(self._gpu_index)
        if reason is not None:
            self.fail([f"ValueError: {reason}"])
            return
        if self._rank == 0:
            seconds = self._setup.timeline.until(WEIGHTS_DONE)
            chatter.ProgressBar(self._loop, self._setup.knobs, "Loading safetensors checkpoint shards").run(seconds)

    def _weights_done(self) -> None:
        if self._rank == 0:
            self._log.info(
                f"Loading weights took {self._setup.timeline.total / 6:.2f} seconds", "default_loader.py:267"
            )
            self._log.info("Model loading took 14.99 GiB and 3.21 seconds", "gpu_model_runner.py:3050")

    def _loaded(self) -> None:
        if self._rank == 0:
            self._log.info("GPU KV cache size: 421,136 tokens", "kv_cache_utils.py:864")
            self._log.info("Graph capturing finished in 3 secs, took 0.62 GiB", "gpu_model_runner.py:3100")
        if self._channel is not None:
            send(self._channel, LOADED)

    def fail(self, cause: list[str]) -> None:
        """Say why, as every line of a traceback with the ERROR prefix, and leave with 1."""
        for line in failures.traceback_lines(cause, 8, "vllm/worker"):
            self._log.error(line)
        self._loop.stop(1)

    def _obey_term(self) -> None:
        self._loop.call_later(WORKER_OBEYS_TERM * self._setup.factor, lambda: self._loop.stop(0))

    def _hear(self) -> None:
        assert self._channel is not None
        data = receive(self._channel)
        if not data:
            self._loop.unwatch(self._channel)
            self._loop.call_later(WORKER_LEAVES_DEAD_CORE * self._setup.factor, lambda: self._loop.stop(0))
            return
        send(self._channel, data)


def send(channel: socket.socket, message: bytes) -> None:
    try:
        channel.send(message, socket.MSG_NOSIGNAL)
    except OSError:
        pass  # the other side is dead; its end is noticed by its owner


def receive(channel: socket.socket) -> bytes | None:
    """What has come; None at the end of the channel."""
    try:
        return channel.recv(4096) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None
