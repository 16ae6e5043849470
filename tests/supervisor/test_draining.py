"""What a drain waits for: the requests that the engine counts, and those that the gateway has under way."""

from __future__ import annotations

import json
import sys

import pytest
import trio

from llmgw.control.operations import is_done
from llmgw.domain.shard import ShardId
from llmgw.domain.status import ConditionKind, ShardState, Wish
from tests.node import fake
from tests.scripted import BEGINNING
from tests.supervisor.stand import Stand, standing

GATEWAY = '[gateway]\nlisten = "127.0.0.1:8080"\n'


def shard(more: str = "") -> str:
    return f'[[shard]]\nname = "a"\nmodel = "a"\nengine = "llamacpp"\ncommand = {fake("llamacpp")}\n{more}\n'


def plain(folder: str, more: str = "") -> str:
    """A program without counters."""
    path = f"{folder}/plain.py"
    with open(path, "w") as file:
        file.write(BEGINNING + "server.serve_forever()\n")
    command = json.dumps([sys.executable, "-u", path, "${llmgw.port}"])
    return f'[[shard]]\nname = "a"\nmodel = "a"\nengine = "command"\nmodels_path = ""\ncommand = {command}\n{more}\n'


def is_ready(status: object) -> bool:
    return getattr(status, "state", None) is ShardState.READY


async def stopped_within(stand: Stand, seconds: float) -> None:
    with trio.fail_after(seconds):
        await stand.until("a", lambda status: status.state is ShardState.STOPPED)


@pytest.mark.parametrize("kind", ["with counters", "without counters"])
async def test_a_stop_waits_for_what_the_gateway_has_under_way(kind: str, tmp_path: object) -> None:
    table = shard() if kind == "with counters" else plain(str(tmp_path))
    async with standing(GATEWAY + table) as stand:
        await stand.until("a", is_ready)
        stand.load(a=2, another=1)
        stand.wish("a", Wish.STOP)
        await stand.until("a", lambda status: status.detail == "draining, 2 requests left")
        stand.load(a=1, another=1)
        status = await stand.until("a", lambda status: status.detail == "draining, 1 request left")
        assert not status.routable and status.condition(ConditionKind.STOPPING) is not None
        assert status.may_finish
        stand.load(another=1)
        await stopped_within(stand, 20)
        assert stand.board.snapshot.shards[ShardId("a")].status.detail.startswith("stopped by ada")


async def test_a_request_that_the_gateway_tells_of_late_is_waited_for(tmp_path: object) -> None:
    async with standing(GATEWAY + plain(str(tmp_path))) as stand:
        await stand.until("a", is_ready)
        stand.wish("a", Wish.STOP)
        await stand.until("a", lambda status: not status.routable)
        # Given away just before the stop. The first look has been by now: it comes in the step that ends routing.
        stand.load(a=1)
        await stand.until("a", lambda status: status.detail == "draining, 1 request left")
        stand.load()
        await stopped_within(stand, 20)


async def test_a_drain_gives_up_on_the_gateways_requests_after_drain_timeout() -> None:
    async with standing(GATEWAY + shard('drain_timeout = "1s"')) as stand:
        await stand.until("a", is_ready)
        stand.load(a=1)
        began = trio.current_time()
        stand.wish("a", Wish.STOP)
        await stand.until("a", lambda status: status.detail == "draining, 1 request left" and status.may_finish)
        await stand.until("a", lambda status: not status.may_finish)
        assert trio.current_time() - began >= 1.0
        await stand.until("a", lambda status: status.state is ShardState.STOPPED)
        texts = [line.text for line in stand.board.history(0)[1]]
        # The gateway ends its connections when it sees that, and only then comes the first signal.
        told = texts.index("1 request still running, waited long enough")
        assert told < next(number for number, text in enumerate(texts) if "SIGTERM" in text)


async def test_without_a_gateway_its_count_is_nobodys() -> None:
    async with standing(shard()) as stand:
        await stand.until("a", is_ready)
        stand.load(a=1)
        stand.wish("a", Wish.STOP)
        await stopped_within(stand, 20)


async def test_a_drained_engine_stays_loaded_and_says_how_many_requests_are_left() -> None:
    async with standing(GATEWAY + shard()) as stand:
        await stand.until("a", is_ready)
        stand.load(a=1)
        before = stand.wish("a", Wish.DRAIN)
        await stand.until("a", lambda status: status.detail == "drained by ada, 1 request left")
        load = stand.board.gateway_load.value
        assert is_done("drain", before, stand.board.snapshot.shards[ShardId("a")], load[ShardId("a")]) is None
        stand.load()
        # Who waits for the operation looks when the board changes.
        await stand.until("a", lambda status: status.detail == "drained by ada")
        assert is_done("drain", before, stand.board.snapshot.shards[ShardId("a")]) == "done"
        pid = stand.status("a").pid
        stand.wish("a", Wish.START)
        assert (await stand.until("a", is_ready)).pid == pid
