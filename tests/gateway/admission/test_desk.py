"""At the desk tasks wait for their turn: told once, gone at once when they leave, and never late."""

from __future__ import annotations

from itertools import count

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llmgw.config.model import GatewayConfig
from llmgw.gateway.admission.desk import RETRY_DRAINING, Desk
from llmgw.gateway.admission.messages import Granted, Offer, Outcome, Refused
from llmgw.gateway.routing.policies import Chooser
from tests.gateway.admission.setting import band, first_of_equals, key, rules

SLOT = key("qwen")


class Hall:
    """A desk, and clients who come to it."""

    def __init__(self, config: GatewayConfig | None = None, slots: int = 1) -> None:
        self.desk = Desk(config or rules(), Chooser("least_load", first_of_equals), now=trio.current_time)
        self.desk.set_endpoints("qwen", {SLOT: slots})
        self._numbers = count(1)
        self.told: dict[int, Outcome | None] = {}
        """What those heard who had to wait."""

    def offer(self, tenant: str = "a", band: str = "normal", wait: float | None = None) -> tuple[int, Outcome | None]:
        ticket = next(self._numbers)
        offer = Offer(ticket, "qwen", tenant, band, arrived=trio.current_time(), wait=wait)
        return ticket, self.desk.offer_nowait(offer)

    def run_one(self) -> int:
        ticket, outcome = self.offer()
        assert outcome == Granted(ticket, SLOT)
        return ticket

    async def queue_one(self, nursery: trio.Nursery, tenant: str = "a", wait: float | None = None) -> int:
        ticket, outcome = self.offer(tenant, wait=wait)
        assert outcome is None
        nursery.start_soon(self._wait, ticket)
        await wait_all_tasks_blocked()
        return ticket

    async def _wait(self, ticket: int) -> None:
        self.told[ticket] = await self.desk.wait(ticket)


async def test_a_free_slot_is_given_without_waiting() -> None:
    hall = Hall(slots=2)
    assert hall.offer() == (1, Granted(1, SLOT))
    assert hall.offer() == (2, Granted(2, SLOT))
    assert hall.offer() == (3, None)
    assert hall.desk.position(3) == 1


async def test_who_ends_wakes_the_next_one(nursery: trio.Nursery) -> None:
    hall = Hall()
    running = hall.run_one()
    first, second = await hall.queue_one(nursery), await hall.queue_one(nursery)
    assert (hall.desk.position(first), hall.desk.position(second)) == (1, 2)
    hall.desk.finish(running, 10, 10)
    await wait_all_tasks_blocked()
    assert hall.told == {first: Granted(first, SLOT)}
    hall.desk.finish(first, None, None)
    await wait_all_tasks_blocked()
    assert hall.told[second] == Granted(second, SLOT)


async def test_an_outcome_that_comes_before_anybody_waits_for_it_is_kept() -> None:
    hall = Hall()
    running = hall.run_one()
    ticket, _ = hall.offer()
    hall.desk.finish(running, 1, 1)
    assert await hall.desk.wait(ticket) == Granted(ticket, SLOT)


async def test_a_client_that_leaves_the_queue_frees_its_place_and_wakes_its_task(nursery: trio.Nursery) -> None:
    hall = Hall()
    hall.run_one()
    ticket = await hall.queue_one(nursery)
    hall.desk.leave(ticket)
    assert hall.desk.position(ticket) is None
    await wait_all_tasks_blocked()
    assert hall.told == {ticket: None}


async def test_a_client_that_leaves_before_its_task_waits_is_not_let_in() -> None:
    hall = Hall()
    running = hall.run_one()
    ticket, _ = hall.offer()
    hall.desk.leave(ticket)
    hall.desk.finish(running, 1, 1)
    assert await hall.desk.wait(ticket) is None
    assert hall.desk.snapshot().running == 0


async def test_one_that_was_let_in_and_leaves_before_it_looks_hands_its_slot_on_at_once(nursery: trio.Nursery) -> None:
    hall = Hall()
    running = hall.run_one()
    first, second = await hall.queue_one(nursery), await hall.queue_one(nursery)
    hall.desk.finish(running, 1, 1)
    hall.desk.leave(first)
    hall.desk.leave(first)
    await wait_all_tasks_blocked()
    assert hall.told == {first: None, second: Granted(second, SLOT)}
    assert hall.desk.snapshot().running == 1


async def test_one_that_was_refused_and_leaves_before_it_looks_has_just_left(nursery: trio.Nursery) -> None:
    hall = Hall()
    hall.run_one()
    ticket = await hall.queue_one(nursery)
    hall.desk.refuse_model("qwen", Refused("load-failed", None, "in vain"))
    hall.desk.leave(ticket)
    await wait_all_tasks_blocked()
    assert hall.told == {ticket: None}


async def test_leaving_after_having_looked_or_after_the_end_changes_nothing(nursery: trio.Nursery) -> None:
    hall = Hall()
    running = hall.run_one()
    hall.desk.leave(running)
    assert hall.desk.snapshot().running == 1
    waited = await hall.queue_one(nursery)
    hall.desk.finish(running, 1, 1)
    await wait_all_tasks_blocked()
    hall.desk.leave(waited)
    assert hall.desk.snapshot().running == 1
    hall.desk.finish(waited, 1, 1)
    hall.desk.finish(waited, 1, 1)
    hall.desk.leave(waited)
    assert hall.desk.snapshot().running == 0


async def test_a_cancelled_task_has_left() -> None:
    hall = Hall()
    running = hall.run_one()
    ticket, _ = hall.offer()
    with trio.move_on_after(0):
        await hall.desk.wait(ticket)
    assert hall.desk.position(ticket) is None
    hall.desk.finish(running, 1, 1)
    assert hall.desk.snapshot().running == 0
    with pytest.raises(KeyError):
        await hall.desk.wait(ticket)


async def test_a_task_that_is_let_in_and_cancelled_at_once_still_hears_it_and_can_finish() -> None:
    hall = Hall()
    running = hall.run_one()
    ticket, _ = hall.offer()
    heard: list[Outcome | None] = []

    async def client() -> None:
        heard.append(await hall.desk.wait(ticket))
        hall.desk.finish(ticket, 0, 0)

    async with trio.open_nursery() as clients:
        clients.start_soon(client)
        await wait_all_tasks_blocked()
        hall.desk.finish(running, 1, 1)
        clients.cancel_scope.cancel()
    assert heard == [Granted(ticket, SLOT)]
    assert hall.desk.snapshot().running == 0


# -- time -----------------------------------------------------------------------------------------------------


async def test_a_time_out_comes_when_it_is_due(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    hall = Hall()
    nursery.start_soon(hall.desk.run)
    await wait_all_tasks_blocked()
    hall.run_one()
    began = trio.current_time()
    ticket, _ = hall.offer()
    outcome = await hall.desk.wait(ticket)
    assert isinstance(outcome, Refused)
    assert outcome.reason == "queue-timeout"
    assert trio.current_time() - began == pytest.approx(60.0)


async def test_one_that_comes_later_and_is_due_earlier_is_told_in_time(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    bands = (band("normal", default=True), band("batch", queue_timeout=10.0))
    hall = Hall(rules(bands=bands))
    nursery.start_soon(hall.desk.run)
    hall.run_one()
    await hall.queue_one(nursery)
    began = trio.current_time()
    ticket, _ = hall.offer(band="batch")
    outcome = await hall.desk.wait(ticket)
    assert isinstance(outcome, Refused)
    assert trio.current_time() - began == pytest.approx(10.0)


async def test_promotion_needs_no_other_event_than_time(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    hall = Hall()
    nursery.start_soon(hall.desk.run)
    running = hall.run_one()
    old, _ = hall.offer(band="batch")
    await trio.sleep(31)
    young, _ = hall.offer(band="normal")
    hall.desk.finish(running, 1, 1)
    assert await hall.desk.wait(old) == Granted(old, SLOT)
    assert hall.desk.position(young) == 1


async def test_the_desk_sleeps_while_nobody_waits(nursery: trio.Nursery) -> None:
    hall = Hall()
    looks = 0

    def now() -> float:
        nonlocal looks
        looks += 1
        return 0.0

    desk = Desk(rules(), Chooser("least_load", first_of_equals), now=now)
    nursery.start_soon(desk.run)
    await wait_all_tasks_blocked()
    before = looks
    # Nothing but an event of the test itself can wake it now: all tasks are blocked without a deadline.
    await wait_all_tasks_blocked(0.05)
    assert looks == before
    assert hall.desk.snapshot().running == 0


async def test_who_waits_for_an_engine_is_let_in_when_it_comes_however_long_it_takes(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    hall = Hall()
    hall.desk.set_endpoints("qwen", {})
    nursery.start_soon(hall.desk.run)
    patient = await hall.queue_one(nursery, wait=600.0)
    impatient = await hall.queue_one(nursery, wait=30.0)
    await trio.sleep(500)
    assert isinstance(hall.told[impatient], Refused)
    hall.desk.set_endpoints("qwen", {SLOT: 1})
    await wait_all_tasks_blocked()
    assert hall.told[patient] == Granted(patient, SLOT)


# -- for all --------------------------------------------------------------------------------------------------


async def test_a_drain_refuses_who_waits_and_who_comes(nursery: trio.Nursery) -> None:
    hall = Hall()
    running = hall.run_one()
    waiting = await hall.queue_one(nursery)
    hall.desk.refuse_all("draining", "cannot take new requests")
    await wait_all_tasks_blocked()
    draining = Refused("draining", RETRY_DRAINING, "cannot take new requests")
    assert hall.told == {waiting: draining}
    assert hall.offer()[1] == draining
    hall.desk.finish(running, 1, 1)
    assert hall.desk.snapshot().running == 0


async def test_a_reload_drops_nobody(nursery: trio.Nursery) -> None:
    hall = Hall()
    running = hall.run_one()
    waiting = [await hall.queue_one(nursery, tenant) for tenant in ("a", "b", "c")]
    hall.desk.adopt(rules(bands=(band("only", default=True, queue_limit=0),), fairness="tokens"))
    await wait_all_tasks_blocked()
    assert hall.told == {}
    for ticket in [running, *waiting]:
        hall.desk.finish(ticket, 1, 1)
        await wait_all_tasks_blocked()
    assert hall.told == {ticket: Granted(ticket, SLOT) for ticket in waiting}


async def test_a_second_try_goes_to_another_engine() -> None:
    hall = Hall()
    hall.desk.set_endpoints("qwen", {SLOT: 1, key("qwen", 1): 1})
    ticket = hall.run_one()
    assert hall.desk.retry(ticket, SLOT) == Granted(ticket, key("qwen", 1))
    assert hall.offer()[1] == Granted(2, SLOT)


async def test_a_snapshot_tells_who_waits_for_how_long_and_what_runs_where(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    hall = Hall(rules(max_inflight=9))
    hall.run_one()
    await hall.queue_one(nursery, "b")
    await trio.sleep(2)
    await hall.queue_one(nursery, "b")
    assert hall.desk.snapshot().as_json() == {
        "running": 1,
        "max_inflight": 9,
        "queues": [{"model": "qwen", "band": "normal", "waiting": 2, "oldest_seconds": 2.0, "running": 1}],
        "tenants": [
            {"name": "a", "waiting": 0, "running": 1, "granted": 1, "refused": 0},
            {"name": "b", "waiting": 2, "running": 0, "granted": 0, "refused": 0},
        ],
        "endpoints": [{"model": "qwen", "shard": "qwen/0", "running": 1, "slots": 1}],
    }
    assert hall.desk.waiting() == {("qwen", "normal", "b"): 2}
    nursery.cancel_scope.cancel()
