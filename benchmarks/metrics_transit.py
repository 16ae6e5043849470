"""How long a chunk takes through the real gateway while pages of metrics are read: 30 models, 50 tenants, 3 bands.

`python -m benchmarks.metrics_transit [STREAMS]`. Engine, clients and scraper are processes of their own; each chunk
carries the time at which the engine sent it. Beside it: the same streams while nobody reads metrics.
"""

from __future__ import annotations

import http.client
import multiprocessing
import os
import random
import re
import select
import socket
import sys
import time
from multiprocessing.connection import Connection

import trio

from benchmarks.measure import machine, percentile
from benchmarks.metrics_render import LIMIT, configuration, observation
from llmgw.board import Board, Cell
from llmgw.config.kinds import Listen
from llmgw.domain.shard import ShardId
from llmgw.domain.status import Intent, Launched, ReadyConfirmed, ShardStatus, Wish
from llmgw.gateway.assembly import make_gateway
from llmgw.gateway.listeners import Listeners
from llmgw.gateway.metrics.observation import Observation
from llmgw.gateway.own_pages import Page
from llmgw.metrics.exposition import CONTENT_TYPE

PACE = 0.02
"""Seconds between two chunks of one stream."""
PHASE = 5.0
"""Seconds without and with scrapes."""
BETWEEN = 0.25
"""Seconds between two scrapes: far more often than anybody does it, to meet many chunks."""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STAMP = re.compile(rb"data: (\d+)\n")


def engine(listener: socket.socket) -> None:
    """Answers every request with a chunk each PACE, for ever. The streams take turns within it."""
    streams: list[socket.socket] = []
    listener.setblocking(False)
    due = time.monotonic()
    while True:
        for sock in select.select([listener], [], [], max(0.0, due - time.monotonic()))[0]:
            stream, _ = sock.accept()
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.recv(65536)
            stream.sendall(HEAD)
            streams.append(stream)
        if time.monotonic() < due:
            continue
        for stream in streams:
            data = b"data: %d\n\n" % time.monotonic_ns()
            try:
                stream.sendall(b"%x\r\n%b\r\n" % (len(data), data))
            except OSError:
                return
        due = max(due + PACE, time.monotonic())


def clients(port: int, count: int, results: Connection) -> None:
    """Reads all streams; tells (when, how long) of each chunk in the end."""
    body = b'{"model": "model-0", "stream": true, "messages": []}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    poll = select.epoll()
    socks: dict[int, socket.socket] = {}
    for _ in range(count):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(head % len(body) + body)
        socks[sock.fileno()] = sock
        poll.register(sock, select.EPOLLIN)
    results.send(None)
    found: list[tuple[float, float]] = []
    while not results.poll():
        for fd, _ in poll.poll(0.1):
            data = socks[fd].recv(65536)
            now = time.monotonic_ns()
            found += [(now / 1e9, (now - int(sent)) / 1e9) for sent in STAMP.findall(data)]
    results.send(found)


def scraper(port: int, seconds: float, results: Connection) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    until = time.monotonic() + seconds
    pages = size = 0
    while time.monotonic() < until:
        connection.request("GET", "/metrics")
        size = len(connection.getresponse().read())
        pages += 1
        time.sleep(BETWEEN)
    results.send((pages, size))


class Turns(trio.abc.Instrument):
    """CPU seconds that the event loop works between two looks at its sockets, the most since `longest` was set to 0:
    how long a chunk waits for llmgw itself, whatever else the machine does.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self._began = 0.0

    def after_io_wait(self, timeout: float) -> None:
        del timeout
        self._began = time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        del timeout
        self.longest = max(self.longest, time.thread_time() - self._began)


async def measure(count: int, turns: Turns) -> None:
    board, config, listeners = Board(), Cell(configuration()), Listeners()
    door = Listen(host="127.0.0.1", port=0)
    listeners.adopt((door,), listeners.bind((door,)))
    port = listeners.sockets.value[0].getsockname()[1]
    upstream = socket.create_server(("127.0.0.1", 0), backlog=1024)
    cell = board.add(ShardStatus(ShardId("s0"), "s0", "model-0", "command"), Intent(Wish.START))
    cell.report(Launched(1, 1, 1, f"127.0.0.1:{upstream.getsockname()[1]}", "hash"))
    cell.report(ReadyConfirmed())
    it: Observation = observation(board, config)

    async def page() -> Page:
        return Page(200, CONTENT_TYPE.encode(), await it.render())

    gateway = make_gateway(
        board,
        config,
        listeners.sockets,
        observer=it,
        metrics=page,
        status=dict,
        ui=Page(200, b"text/html", b""),
        estimate=lambda model: None,
        chance=random.Random(1).random,
    )
    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe()
    parts = [fork.Process(target=engine, args=(upstream,)), fork.Process(target=clients, args=(port, count, theirs))]
    wait = trio.to_thread.run_sync
    async with trio.open_nursery() as nursery:
        for part in parts:
            part.start()
        try:
            await nursery.start(gateway.run)
            await wait(mine.recv)
            await trio.sleep(1.0)
            began = time.monotonic()
            turns.longest = 0.0
            await trio.sleep(PHASE)
            scraping = time.monotonic()
            quiet_turn, turns.longest = turns.longest, 0.0
            told, tell = fork.Pipe()
            parts.append(fork.Process(target=scraper, args=(port, PHASE, tell)))
            parts[-1].start()
            pages, size = await wait(told.recv)
            ended = time.monotonic()
            loud_turn = turns.longest
            mine.send(None)
            found = await wait(mine.recv)
        finally:
            for part in parts:
                part.kill()
                part.join()
        nursery.cancel_scope.cancel()
    listeners.close()
    upstream.close()
    quiet = [took for at, took in found if began <= at < scraping]
    loud = [took for at, took in found if scraping <= at < ended]
    print(f"{count} streams, a chunk each {PACE * 1e3:.0f} ms; {pages} pages of {size / 2**20:.1f} MiB")
    for name, values, turn in (("no metrics read", quiet, quiet_turn), ("metrics read", loud, loud_turn)):
        shown = ", ".join(f"{word} {percentile(values, q) * 1e3:.2f}" for word, q in (("p50", 0.5), ("p99.9", 0.999)))
        print(f"  {name}: {shown}, max {max(values) * 1e3:.2f} ms (n = {len(values)})")
        print(f"    longest turn of the event loop: {turn * 1e3:.2f} ms of CPU")
    added = max(loud) - max(quiet)
    print(f"  longest transit beside longest: {added * 1e3:+.1f} ms; limit {LIMIT * 1e3:.0f} ms")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    print(machine(), f"pid {os.getpid()}")
    turns = Turns()
    trio.run(measure, count, turns, instruments=[turns])


if __name__ == "__main__":
    main()
