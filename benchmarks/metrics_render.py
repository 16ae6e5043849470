"""What a page of metrics costs, and how long it keeps everybody else waiting: 30 models, 50 tenants, 3 bands.

Beside it: writing the same numbers behind names that are ready (the floor), and prometheus_client's own writer with
the same families. The wait is measured by a task that does nothing but come round the event loop.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable

import trio
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from benchmarks.measure import machine, percentile
from llmgw.board import Board, Cell
from llmgw.config.document import SourceFile
from llmgw.config.model import Config
from llmgw.config.parse import parse
from llmgw.domain.host import HostFacts
from llmgw.gateway.metrics.observation import Observation
from llmgw.gateway.record import RequestRecord
from llmgw.metrics.node import Node

MODELS, TENANTS, BANDS, CODES = 30, 50, ("interactive", "normal", "batch"), (200, 429, 499)
PAGES = 7
LIMIT = 0.030
"""Seconds: more than that no chunk may wait for a page."""


def configuration_text() -> str:
    shards = (
        f'[[shard]]\nname = "s{i}"\nmodel = "model-{i}"\nengine = "command"\ncommand = ["true"]\n'
        for i in range(MODELS)
    )
    bands = (f'[[gateway.band]]\nname = "{band}"\n{"default = true" if band == "normal" else ""}\n' for band in BANDS)
    tenants = (f'[[gateway.tenant]]\nname = "tenant-{i}"\nkeys = [{{ sha256 = "{i:064x}" }}]\n' for i in range(TENANTS))
    return "\n".join((*shards, '[gateway]\naccess_log = "off"\nallow_anonymous = true', *bands, *tenants))


def configuration() -> Config:
    facts = HostFacts(hostname="gpu-01", uid=0, home="/root", env={"HOME": "/root"}, groups=frozenset({"root"}))
    parsed = parse([SourceFile("llmgw.toml", configuration_text().encode(), "/", "/llmgw.toml")], facts)
    assert parsed.config is not None, [problem.message for problem in parsed.problems]
    return parsed.config


def observation(board: Board, config: Cell[Config]) -> Observation:
    """One that has seen every combination."""
    node = Node("0", 0.0, True, False, None, {})
    it = Observation(board, config, node=lambda: node, gateway=lambda: None)
    for model in range(MODELS):
        for tenant in range(TENANTS):
            for band in BANDS:
                for code in CODES:
                    it.ended(_record(f"model-{model}", f"tenant-{tenant}", band, code))
    return it


def _record(model: str, tenant: str, band: str, code: int) -> RequestRecord:
    record = RequestRecord(0.0)
    record.model, record.tenant, record.band, record.code = model, tenant, band, code
    record.granted, record.first_byte, record.ended, record.stream = 0.1, 0.3, 4.2, True
    record.prompt_tokens, record.completion_tokens = 1234, 567
    return record


class _Everything(Collector):
    def __init__(self, text: str) -> None:
        self._families = list(text_string_to_metric_families(text))

    def collect(self) -> Iterable[object]:
        return self._families


async def pages(it: Observation) -> tuple[str, list[float], list[float]]:
    """The last page; CPU seconds of each page but the first; the longest wait during each, the first one included."""
    costs, waits = [], []
    page = b""
    for _ in range(PAGES):
        longest = 0.0

        async def come_round() -> None:
            nonlocal longest
            last = time.perf_counter()
            while True:
                await trio.lowlevel.checkpoint()
                now = time.perf_counter()
                longest = max(longest, now - last)
                last = now

        async with trio.open_nursery() as nursery:
            nursery.start_soon(come_round)
            await it.render()
            nursery.cancel_scope.cancel()
        waits.append(longest)
        began = time.process_time()
        page = await it.render()
        costs.append(time.process_time() - began)
    return page.decode(), costs, waits


def _is_sample(line: str) -> bool:
    return bool(line) and not line.startswith("#")


def seconds_of(work: object, times: int = 3) -> float:
    """Median CPU seconds."""
    assert callable(work)
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return statistics.median(found)


def main() -> None:
    print(machine())
    began = time.process_time()
    it = observation(Board(), Cell(configuration()))
    gc.collect()
    count = MODELS * TENANTS * len(BANDS) * len(CODES)
    print(f"{count} requests ended: {(time.process_time() - began) * 1e6 / count:.1f} us each")
    page, costs, waits = trio.run(pages, it)
    lines = page.split("\n")
    samples = [
        (start, float(value)) for start, _, value in (line.rpartition(" ") for line in lines if _is_sample(line))
    ]
    floor = seconds_of(lambda: "".join([f"{start} {value!r}\n" for start, value in samples]).encode())
    everything = _Everything(page)
    library = seconds_of(lambda: generate_latest(everything))
    cost = statistics.median(costs)
    print(f"a page: {len(lines)} lines, {len(page) / 2**20:.1f} MiB")
    print(f"  it costs {cost * 1e3:.1f} ms of CPU ({min(costs) * 1e3:.1f} to {max(costs) * 1e3:.1f})")
    print(f"  floor, the same numbers behind the same names: {floor * 1e3:.1f} ms; ratio {cost / floor:.1f}")
    print(f"  prometheus_client's writer: {library * 1e3:.0f} ms; ratio {cost / library:.2f}")
    longest = max(waits)
    print(f"longest wait of another task: first page, where every series is new, {waits[0] * 1e3:.1f} ms;")
    print(f"  later ones median {percentile(waits[1:], 0.5) * 1e3:.1f} ms, max {max(waits[1:]) * 1e3:.1f} ms")
    chunk = it.series("model-0", "normal").chunk
    took = seconds_of(lambda: [chunk(0.021) for _ in range(100_000)])
    print(f"a chunk: {took * 1e9 / 100_000:.0f} ns")
    verdict = "kept" if longest < LIMIT else "NOT kept"
    print(f"limit of {LIMIT * 1e3:.0f} ms: {verdict}")


if __name__ == "__main__":
    main()
