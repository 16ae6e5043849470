"""Hours of traffic on few cards, in virtual time: no model chases another off the cards, and nobody is forgotten."""

from __future__ import annotations

import random
from collections import deque

import pytest
from attrs import define, field

from llmgw.domain.shard import ShardId
from llmgw.domain.status import ConditionKind, ShardState, Want, Wish
from llmgw.gateway.on_demand.decide import PATIENCE, TURN_MAX, TURN_MIN
from tests.gateway.on_demand.world import World, spec

TICK = 1.0


@define
class Client:
    """Asks one model again and again: `thinks` seconds between an answer and the next request, `takes` for one."""

    model: str
    thinks: float
    takes: float
    due: float = 0.0
    asked: float | None = None
    answered_at: float | None = None
    waits: list[float] = field(factory=list)


@define
class Traffic:
    """Clients on a world whose shards have the names of their models."""

    world: World
    clients: list[Client]
    queues: dict[str, deque[Client]] = field(factory=dict)
    flying: list[tuple[float, Client]] = field(factory=list)

    def run(self, seconds: float) -> None:
        end = self.world.now + seconds
        while self.world.now < end:
            self.world.step(TICK)
            self._arrive()
            self._finish()
            self._grant()
            self._tell()
            self.world.decide()

    def _arrive(self) -> None:
        now = self.world.now
        for client in self.clients:
            if client.asked is None and client.answered_at is None and now >= client.due:
                client.asked = now
                self.queues.setdefault(client.model, deque()).append(client)

    def _finish(self) -> None:
        now, world = self.world.now, self.world
        for entry in [entry for entry in self.flying if entry[0] <= now]:
            self.flying.remove(entry)
            client = entry[1]
            world.running[ShardId(client.model)] -= 1
            world.use(client.model)
            client.answered_at = None
            client.due = now + client.thinks

    def _grant(self) -> None:
        world, now = self.world, self.world.now
        for model, queue in self.queues.items():
            while queue and self._serves(model):
                client = queue.popleft()
                assert client.asked is not None
                client.waits.append(now - client.asked)
                client.asked, client.answered_at = None, now
                world.running[ShardId(model)] += 1
                world.use(model)
                self.flying.append((now + client.takes, client))

    def _serves(self, model: str) -> bool:
        status = self.world.engines[ShardId(model)].cell.status
        awake = status.condition(ConditionKind.SLEEPING) is None
        return status.state is ShardState.READY and awake and self.world.wish(model) is Wish.START

    def _tell(self) -> None:
        self.world.wanted = {
            model: Want(model, len(queue), min(c.asked or 0.0 for c in queue), "normal")
            for model, queue in self.queues.items()
            if queue and not self._serves(model)
        }
        for id_, count in self.world.running.items():
            if count:
                self.world.last_used[id_] = self.world.now


LOAD = 60.0


def test_two_models_that_are_asked_all_the_time_share_a_card_in_turns_worth_their_load() -> None:
    world = World((spec("a", 0), spec("b", 0)))
    traffic = Traffic(world, [Client(model, 1.0, 3.0, due=world.now) for model in ("a", "b") for _ in range(3)])
    hours = 1
    traffic.run(hours * 3600.0)
    # A swap costs a load, and a turn lasts as long as one at least: half of the time is the most that goes into loads.
    assert world.loads <= hours * 3600.0 / (2 * LOAD) + 2
    assert world.loads >= hours * 3600.0 / (4 * LOAD)
    longest = max(wait for client in traffic.clients for wait in client.waits)
    # Who comes right after its own turn waits for the load and the turn of the other, a drain, and its own load.
    assert longest <= 3 * LOAD + PATIENCE + 30.0
    served = [sum(len(client.waits) for client in traffic.clients if client.model == model) for model in ("a", "b")]
    assert min(served) > 0.7 * max(served)


def test_single_requests_to_two_models_in_alternation_do_not_make_a_swap_each() -> None:
    world = World((spec("a", 0), spec("b", 0)))
    traffic = Traffic(world, [Client("a", 2.0, 1.0, due=world.now), Client("b", 2.0, 1.0, due=world.now)])
    traffic.run(3600.0)
    answers = sum(len(client.waits) for client in traffic.clients)
    assert world.loads <= 3600.0 / (2 * LOAD) + 2
    assert answers > 8 * world.loads


def test_a_model_asked_once_gets_the_card_at_once_when_the_other_is_done() -> None:
    world = World((spec("a", 0), spec("b", 0)))
    first, second = Client("a", 1e9, 2.0, due=world.now), Client("b", 1e9, 2.0, due=world.now + 70.0)
    traffic = Traffic(world, [first, second])
    traffic.run(300.0)
    assert world.loads == 2
    assert second.waits and second.waits[0] < LOAD + 10.0


def test_small_models_are_not_swapped_more_often_than_the_shortest_turn_allows() -> None:
    world = World((spec("a", 0), spec("b", 0)), load={"a": 2.0, "b": 2.0})
    traffic = Traffic(world, [Client(model, 0.5, 1.0, due=world.now) for model in ("a", "b")])
    traffic.run(1800.0)
    assert world.loads <= 1800.0 / TURN_MIN + 2


def test_a_huge_model_does_not_keep_its_cards_longer_than_the_longest_turn() -> None:
    world = World((spec("a", 0), spec("b", 0)), load={"a": 1500.0, "b": 20.0})
    traffic = Traffic(world, [Client("b", 1.0, 1.0, due=world.now), Client("a", 1.0, 1.0, due=world.now + 60.0)])
    traffic.run(2 * 3600.0)
    waits = next(client.waits for client in traffic.clients if client.model == "b")
    assert max(waits) <= 1500.0 + TURN_MAX + 20.0 + PATIENCE + 40.0


@pytest.mark.parametrize(("seed", "mistaken"), [(0, 0.0), (1, 0.0), (3, 0.05), (6, 0.05)])
def test_many_models_on_few_cards_all_get_their_turn(seed: int, mistaken: float) -> None:
    chance = random.Random(seed)
    names = [f"m{number}" for number in range(7)]
    specs = tuple(
        spec(
            name,
            *sorted(chance.sample(range(4), chance.choice((1, 1, 2, 4)))),
            idle=chance.choice((60.0, 600.0)),
            idle_action=chance.choice(("stop", "stop", "sleep")),
        )
        for name in names
    )
    world = World(specs, load={name: chance.choice((5.0, 30.0, 120.0)) for name in names})
    world.is_mistaken = lambda: chance.random() < mistaken
    clients = [
        Client(
            chance.choice(names),
            chance.expovariate(1 / 30),
            chance.uniform(0.5, 20.0),
            due=world.now + chance.uniform(0, 600),
        )
        for _ in range(12)
    ]
    traffic = Traffic(world, clients)
    traffic.run(3600.0)
    for client in clients:
        # It is served, and what waits at the end has not waited for an age.
        assert client.waits, client
        if client.asked is not None:
            assert world.now - client.asked < 1800.0, (client, world.log[-20:])
    assert world.loads < 3600.0 / TURN_MIN * 4
