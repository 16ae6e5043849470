"""A server of a whole page of metrics, with every family, and a real Prometheus that scrapes it."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import trio

from llmgw.board import Board, Cell
from llmgw.config.document import SourceFile
from llmgw.config.parse import parse
from llmgw.domain.hardware import Availability, Gpu, GpuHolder, GpuProcess, Inventory, InventoryStatus
from llmgw.domain.host import HostFacts
from llmgw.domain.shard import ShardId
from llmgw.domain.status import (
    Activity,
    ActivitySeen,
    Intent,
    Launched,
    LoadingSeen,
    Progress,
    ProgressSeen,
    ReadyConfirmed,
    ShardStatus,
    SlotsFound,
    Wish,
)
from llmgw.gateway.admission.snapshot import AdmissionSnapshot, EndpointLoad, Queued, TenantUse
from llmgw.gateway.metrics.observation import Observation
from llmgw.gateway.record import RequestRecord
from llmgw.metrics.node import Node

TEXT = """
[gateway]
access_log = "off"
[[gateway.tenant]]
name = "search"
keys = [{ sha256 = "%s" }]
[[shard]]
name = "a"
model = "m"
engine = "command"
command = ["true"]
[[shard]]
name = "b"
model = "m"
engine = "command"
command = ["true"]
""" % ("0" * 64)


class Serving:
    """A gateway with something in its queue."""

    ejected: Mapping[str, int] = {"a": 1}

    def waiting(self) -> Mapping[tuple[str, str, str], int]:
        return {("m", "normal", "search"): 2}

    def admission(self) -> AdmissionSnapshot:
        return AdmissionSnapshot(
            queues=(Queued("m", "normal", 2, 1.5, 3),),
            tenants=(TenantUse("search", 2, 3, 9, 0),),
            endpoints=(EndpointLoad("m", (ShardId("a"), 1), 3, 8),),
            running=3,
            limit=None,
        )


def observation() -> Observation:
    """One that shows every family but those of engines' own series."""
    facts = HostFacts(hostname="gpu-01", uid=0, home="/root", env={"HOME": "/root"}, groups=frozenset({"root"}))
    parsed = parse([SourceFile("llmgw.toml", TEXT.encode(), "/", "/llmgw.toml")], facts)
    assert parsed.config is not None, [problem.message for problem in parsed.problems]
    board = Board(strict=True)
    for name in ("a", "b"):
        cell = board.add(ShardStatus(ShardId(name), name, "m", "vllm"), Intent(Wish.START))
        cell.report(Launched(4711, 4711, 1, "127.0.0.1:8101", "hash", ("0",)))
        cell.report(LoadingSeen("a sign"))
        if name == "b":
            cell.report(ProgressSeen(Progress("weights", 0.5)))
            continue
        cell.report(ReadyConfirmed())
        cell.report(SlotsFound(8, "args"))
        cell.report(ActivitySeen(Activity(running=3, waiting=1, tokens_per_second=99.0, kv_usage=0.4)))
    holders = (GpuHolder(1, 600, shard="a"), GpuHolder(2, 300, "ada", "python"))
    gpu = Gpu(
        0,
        "GPU-0",
        "0:1",
        "NVIDIA H100",
        81559,
        1000,
        80559,
        (9, 0),
        (GpuProcess(1, 600), GpuProcess(2, 300)),
        gpu_class="h100-80g",
        temperature=45,
        power=123.5,
    )
    inventory = Inventory(InventoryStatus.OK, (gpu,), read_at=time.time())
    node = Node("0.0", time.time(), True, False, inventory, {"GPU-0": Availability("GPU-0", None, 80000, holders)})
    return Observation(board, Cell(parsed.config), node=lambda: node, gateway=Serving)


def requests(it: Observation) -> None:
    """Some more requests of every kind."""
    for code, reason in ((200, ""), (200, ""), (502, "engine-died"), (429, "rate"), (499, "client-gone")):
        record = RequestRecord(0.0)
        record.model, record.tenant, record.band = "m", "search", "normal"
        record.code, record.reason, record.stream, record.retried = code, reason, True, code == 502
        record.first_byte, record.ended = 0.3, 2.0
        record.granted = None if reason == "rate" else 0.1
        record.prompt_tokens, record.completion_tokens = 100, 20
        record.band_clamped = code == 502
        it.series("m", "normal").chunk(0.02)
        it.ended(record)


def page() -> str:
    it = observation()
    requests(it)
    return trio.run(it.render).decode()


@contextmanager
def served() -> Iterator[int]:
    """A server on this port; each look finds more requests."""
    it = observation()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests(it)
            body = trio.run(it.render)
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Prometheus:
    """A running one."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, what: str, **query: str) -> Any:
        with urlopen(f"{self._base}{what}?{urlencode(query)}", timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[Any]:
        found = self.get("query", query=expression)["result"]
        assert isinstance(found, list)
        return found


@contextmanager
def prometheus(program: str, folder: Path, target: int) -> Iterator[Prometheus]:
    """Scrapes `target` every 0.5 s; comes up when it has done so four times."""
    config = f"""
global:
  scrape_interval: 500ms
  scrape_timeout: 500ms
scrape_configs:
  - job_name: llmgw
    static_configs:
      - targets: ["127.0.0.1:{target}"]
"""
    (folder / "prometheus.yml").write_text(config)
    port = _free_port()
    process = subprocess.Popen(
        [
            program,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        it = Prometheus(port)
        deadline = time.monotonic() + 60
        while not _has_scraped(it):
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline, "Prometheus has scraped nothing for a minute"
            time.sleep(0.2)
        yield it
    finally:
        process.terminate()
        process.communicate(timeout=30)


def _has_scraped(it: Prometheus) -> bool:
    try:
        found = it.query("count_over_time(llmgw_requests_total[1m])")
    except OSError:
        return False
    return bool(found) and min(float(row["value"][1]) for row in found) >= 4


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
