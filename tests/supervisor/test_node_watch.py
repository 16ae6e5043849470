"""The node as it is watched: whose looks are shared, who is woken by what, and what a failure leaves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve, field, frozen

from llmgw.domain.hardware import InventoryError
from llmgw.fake.gpu import Machine, write_stranger
from llmgw.fake.nvidia_smi import Answer, Query, Report
from llmgw.supervisor.gpu_release import HeldGpu
from llmgw.supervisor.node_look import Sources
from llmgw.supervisor.node_watch import NodeWatch
from llmgw.supervisor.quarantine import Quarantine
from llmgw.supervisor.tools import ToolResult

CARD = "GPU-fa4e0000-0000-4000-8000-000000000000"


@frozen
class Spec:
    gpus: Any = 1


@frozen
class NodeSection:
    name: str = "n"
    gpus: Any = "all"
    fabric: Any = "none"
    island: str | None = None
    address: str | None = None
    discovery_timeout: float = 20.0
    inventory_interval: float = 3600.0


@frozen
class Section:
    node: NodeSection = field(factory=NodeSection)
    shards: tuple[Spec, ...] = (Spec(),)


class Holds:
    """What the watch asks of a cell with the configuration."""

    def __init__(self) -> None:
        self.value = Section()


class Smi:
    """An nvidia-smi that answers when it may. `looks` counts how often the cards were asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.describe(gpus=1)
        self.looks = 0
        self.open = trio.Event()
        self.open.set()
        self.code = 0

    def describe(self, **machine: Any) -> None:
        (self.folder / "gpus.json").write_text(json.dumps(machine))

    def close(self) -> None:
        self.open = trio.Event()

    async def __call__(self, argv: Sequence[str], *, timeout: float) -> ToolResult:
        query = Query(list(argv[1:]))
        if any(word.startswith("--query-gpu=index") for word in argv):
            self.looks += 1
        with trio.move_on_after(timeout) as limit:
            await self.open.wait()
        if limit.cancelled_caught:
            return ToolResult(None, b"", b"", timed_out=True)
        if self.code:
            return ToolResult(self.code, b"Failed to initialize NVML: Unknown Error\n", b"")
        try:
            answer = Report(Machine(self.folder)).answer(query)
        except Answer as refused:
            answer = refused
        return ToolResult(answer.code, answer.text.encode(), b"")


class Watched:
    """A watch with everything that it stands on, and a clock that a test moves."""

    def __init__(self, folder: Path) -> None:
        self.time = 1000.0
        self.config = Holds()
        self.smi = Smi(folder)
        self.quarantine = Quarantine(str(folder / "state"), now=lambda: self.time, boot=lambda: "boot")
        self.sources = Sources("nvidia-smi", sysfs=None, addresses={}, meminfo="", is_this_host=False)
        self.watch = NodeWatch(
            self.smi,
            self.config,  # type: ignore[arg-type]
            tuple,
            self.quarantine,
            now=lambda: self.time,
            sources=lambda: self.sources,
        )

    def configure(self, *, shards: tuple[Spec, ...] | None = None, **node: Any) -> None:
        section = self.config.value
        kept = section.shards if shards is None else shards
        self.config.value = Section(evolve(section.node, **node), kept)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[NodeWatch]:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.watch.run)
                yield self.watch
                nursery.cancel_scope.cancel()

    async def until(self, condition: Any) -> None:
        with trio.fail_after(20):
            while not condition():  # noqa: ASYNC110  (files and a watch, which tell nobody)
                await trio.sleep(0.005)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


async def test_the_first_look_comes_by_itself_and_further_ones_with_the_interval(watched: Watched) -> None:
    watched.configure(inventory_interval=0.01)
    async with watched.running() as watch:
        await watched.until(lambda: watched.smi.looks >= 3)
        assert watch.facts.value is not None and watch.facts.value.availability[CARD].assignable


async def test_where_no_shard_wants_gpus_nobody_looks_unless_asked(watched: Watched) -> None:
    watched.configure(shards=(Spec(0), Spec(())), inventory_interval=0.001)
    async with watched.running() as watch:
        await trio.sleep(0.05)
        assert watched.smi.looks == 0
        await watch.refresh()
        assert watched.smi.looks == 1
        await trio.sleep(0.05)
        assert watched.smi.looks == 1


async def test_where_there_is_no_nvidia_smi_no_process_is_started(watched: Watched) -> None:
    watched.sources = evolve(watched.sources, nvidia_smi=None)
    async with watched.running() as watch:
        facts = await watch.refresh()
    assert facts.inventory.error is InventoryError.COMMAND_MISSING and watched.smi.looks == 0


async def test_who_asks_during_a_look_gets_one_that_began_afterwards_and_shares_it(watched: Watched) -> None:
    watched.smi.close()
    async with watched.running() as watch:
        await watched.until(lambda: watched.smi.looks == 1)
        seen = []

        async def ask() -> None:
            await watch.refresh()
            seen.append(watched.smi.looks)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            watched.smi.open.set()
        assert seen == [2] * 5


async def test_who_stops_waiting_cuts_the_look_short_for_nobody(watched: Watched) -> None:
    watched.configure(shards=())
    watched.smi.close()
    async with watched.running() as watch:
        with trio.move_on_after(0.01):
            await watch.refresh()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.refresh)
            await trio.testing.wait_all_tasks_blocked()
            watched.smi.open.set()
        assert watch.facts.value is not None and watch.facts.value.inventory.is_current


async def test_a_failed_look_keeps_the_last_facts_and_places_nothing(watched: Watched) -> None:
    async with watched.running() as watch:
        await watch.refresh()
        watched.smi.code = 255
        watched.time = 1060.0
        failed = await watch.refresh()
        assert failed.inventory.stale is not None and failed.inventory.stale.since == 1060.0
        assert [gpu.uuid for gpu in failed.inventory.gpus] == [CARD]
        assert not failed.availability[CARD].assignable
        watched.time = 1090.0
        again = await watch.refresh()
        assert again.inventory.stale is not None and again.inventory.stale.since == 1060.0
        watched.smi.code = 0
        assert (await watch.refresh()).availability[CARD].assignable


async def test_who_only_looks_gets_the_last_facts_from_a_hanging_nvidia_smi_marked_stale(watched: Watched) -> None:
    async with watched.running() as watch:
        await watch.refresh()
        watched.smi.close()
        facts = await watch.refresh_within(0.01)
        assert facts.inventory.stale is not None and "not answered" in (facts.inventory.stale.detail or "")
        assert facts.inventory.gpus and not facts.availability[CARD].assignable
        # Nobody has said that it failed: what is known stays as it is.
        assert watch.facts.value is not None and watch.facts.value.inventory.stale is None


async def test_before_the_first_look_who_only_looks_waits_for_its_end(watched: Watched) -> None:
    watched.smi.close()
    async with watched.running() as watch:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_open_later, watched.smi)
            facts = await watch.refresh_within(0.001)
        assert facts.inventory.is_current


async def _open_later(smi: Smi) -> None:
    await trio.sleep(0.05)
    smi.open.set()


async def test_before_the_first_look_a_hang_is_told_after_the_time_for_a_look(watched: Watched) -> None:
    watched.configure(discovery_timeout=0.05)
    watched.smi.close()
    async with watched.running() as watch:
        facts = await watch.refresh_within(0.001)
    assert facts.inventory.error is InventoryError.TIMEOUT and not facts.inventory.gpus


async def test_a_change_that_decides_wakes_and_memory_that_moves_a_little_does_not(watched: Watched) -> None:
    async with watched.running() as watch:
        await watch.refresh()
        news = watch.news.value
        await watch.refresh()
        for mib in (1000, 400, 900):
            write_stranger(watched.smi.folder, "0", mib, 4190001, "x")
            await watch.refresh()
        assert watch.news.value == news
        write_stranger(watched.smi.folder, "0", 9000, 4190001, "x")
        await watch.refresh()
        assert watch.news.value == news + 1
        watched.smi.describe(gpus=[{"ecc.errors.uncorrected.volatile.total": "3"}])
        await watch.refresh()
        assert watch.news.value == news + 2


async def test_a_card_in_quarantine_is_looked_at_often_also_where_no_shard_wants_one(watched: Watched) -> None:
    watched.configure(shards=())
    held = write_stranger(watched.smi.folder, "0", 41000, 4190001, "x")
    watched.quarantine.enter("a", (HeldGpu(CARD, "0", 41000, "by pid 4190001"),), {CARD: 4})
    async with watched.running() as watch:
        await watched.until(lambda: watch.facts.value is not None)
        assert watched.quarantine.entries
        assert watch.facts.value is not None
        assert "not released after a ended" in (watch.facts.value.availability[CARD].why_not or "")
        held.unlink()
        await watched.until(lambda: not watched.quarantine.entries)
        await watched.until(lambda: watch.facts.value.availability[CARD].assignable)


async def test_an_error_of_our_own_is_a_failed_look_and_the_watch_goes_on(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched.running() as watch:
        await watch.refresh()
        good = watched.sources
        watched.sources = evolve(good, meminfo=7)  # type: ignore[arg-type]
        facts = await watch.refresh()
        assert facts.inventory.stale is not None and "an error in llmgw itself" in caplog.text
        watched.sources = good
        assert (await watch.refresh()).inventory.is_current
