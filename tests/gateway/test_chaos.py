"""Engines that crash, drain, hang and lie under many impatient clients: everybody gets an answer, nothing is left.

The short run is part of CI; the long one (LLMGW_TEST_PROOF=1) takes two minutes with 20 engines and 500 clients.
"""

from __future__ import annotations

import gc
import json
import random
from collections import Counter

import psutil
import pytest
import trio
from stand import STREAM_HEAD, Answer, Connection, Engine, Stand, answer, chunk, configuration, post, shard_text, stand

from llmgw.domain.problem import Reason
from llmgw.domain.status import DrainBegan, DrainEnded, Failed, Requeued

MODELS = 5
PATIENCE = 30.0
"""Seconds after which a request without an answer is a failure: more than all limits of the gateway together."""

GATEWAY = """
first_byte_timeout = "2s"
chunk_timeout = "2s"
queue_timeout = "5s"
queue_limit = 200
write_timeout = "2s"
connect_timeout = "1s"
load_wait = "5s"
[[gateway.band]]
name = "interactive"
default = true
promote_after = "1s"
[[gateway.band]]
name = "batch"
promote_after = "1s"
"""


class Misbehaving(Engine):
    """An engine of one model that does something else each time."""

    def __init__(self, model: str, chance: random.Random) -> None:
        super().__init__(self._play_badly)
        self.model = model
        self._chance = chance

    async def _play_badly(self, connection: Connection) -> None:
        while (found := await connection.request()) is not None:
            request = json.loads(found[1])
            # The one thing that must never happen.
            assert request["model"] == self.model
            mood = self._chance.random()
            if mood < 0.70:
                await self._answer(connection, is_stream=bool(request.get("stream")))
            elif mood < 0.76:
                return
            elif mood < 0.80:
                await connection.send(STREAM_HEAD + chunk(self._words()))
                return
            elif mood < 0.83:
                await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + self._words())
                return
            elif mood < 0.86:
                await connection.wait_closed()
                return
            elif mood < 0.89:
                await connection.send(STREAM_HEAD + chunk(self._words()))
                await connection.wait_closed()
                return
            elif mood < 0.92:
                await connection.send(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
                return
            elif mood < 0.96:
                await connection.send(answer(self._words(), status="500 Internal Server Error"))
            else:
                await connection.send(answer(self._words()) + b"HTTP/1.1 200 OK\r\n\r\nmore than was asked for")

    def _words(self) -> bytes:
        return json.dumps({"model": self.model}).encode()

    async def _answer(self, connection: Connection, *, is_stream: bool) -> None:
        if not is_stream:
            await connection.send(answer(self._words()))
            return
        await connection.send(STREAM_HEAD)
        for _ in range(self._chance.randrange(1, 6)):
            await connection.send(chunk(b"data: " + self._words() + b"\n\n"))
            await trio.sleep(self._chance.random() * 0.01)
        await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


class Clients:
    """Many that ask, leave, dawdle and come back."""

    def __init__(self, it: Stand, chance: random.Random) -> None:
        self._it = it
        self._chance = chance
        self.answers: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.scope = trio.CancelScope()
        self.is_over = False

    async def ask_again_and_again(self) -> None:
        while not self.is_over:
            with trio.move_on_after(PATIENCE) as scope:
                await self._ask()
            if scope.cancelled_caught:
                self.wrong.append(f"no answer within {PATIENCE:g} s")

    async def _ask(self) -> None:
        chance = self._chance
        model = f"m{chance.randrange(MODELS)}"
        head = f"x-llmgw-priority: {chance.choice(['interactive', 'batch'])}\r\n"
        data = post({"model": model, "stream": chance.random() < 0.6, "pad": "x" * chance.randrange(3000)}, head=head)
        caller = await self._it.call()
        try:
            if chance.random() < 0.05:
                await caller.send(data[: chance.randrange(len(data))])
                return
            await caller.send(data)
            if chance.random() < 0.1:
                await trio.sleep(chance.random() * 0.05)
                return
            if chance.random() < 0.05:
                await trio.sleep(0.5)
            got = await caller.answer()
            self._judge(model, got)
        except AssertionError:
            # The connection ended before an answer: allowed to nobody who kept it.
            self.wrong.append(f"closed without an answer: {caller.data[:60]!r}")
        except trio.BrokenResourceError:
            self.wrong.append("reset while sending")
        finally:
            self._it.callers.remove(caller)
            await caller.aclose()

    def _judge(self, model: str, got: Answer) -> None:
        self.answers[got.status] += 1
        if got.status == 200 and b'"model"' in got.body and f'"{model}"'.encode() not in got.body:
            self.wrong.append(f"{model} was answered by {got.body[:80]!r}")
        if got.status not in (200, 429, 500, 502, 503, 504):
            self.wrong.append(f"status {got.status}: {got.body[:80]!r}")
        if got.status == 200 and got.whole and b"data:" in got.body and b"[DONE]" not in got.body:
            self.wrong.append("half a stream looks whole")


async def trouble(it: Stand, engines: dict[str, Misbehaving], chance: random.Random) -> None:
    """Drains, deaths, new generations and reloads, one after the other."""
    text = it.text
    while True:
        await trio.sleep(0.05 + chance.random() * 0.2)
        name = chance.choice(list(engines))
        cell = it.cell(name)
        what = chance.random()
        if what < 0.3:
            cell.report(DrainBegan("uid 0 (root)"))
            await trio.sleep(chance.random() * 0.3)
            cell.report(DrainEnded())
        elif what < 0.7:
            cell.report(Failed(Reason("killed", "killed by SIGKILL", "")))
            await trio.sleep(chance.random() * 0.3)
            cell.report(Requeued())
            it.ready(name, engines[name].port)
        else:
            it.config.set(
                configuration(text.replace("queue_limit = 200", f"queue_limit = {chance.randrange(100, 300)}"))
            )


def memory() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize(
    ("seconds", "per_model", "clients"),
    [(5.0, 2, 40), pytest.param(120.0, 4, 500, marks=[pytest.mark.proof, pytest.mark.slow])],
)
async def test_everybody_gets_an_answer_of_the_right_model_and_nothing_is_left(
    seconds: float, per_model: int, clients: int
) -> None:
    chance = random.Random(20)
    names = {f"s{m}-{i}": f"m{m}" for m in range(MODELS) for i in range(per_model)}
    text = "".join(shard_text(name, model=model, max_inflight=8) for name, model in names.items())
    async with stand(text, gateway=GATEWAY, patience=seconds + 120) as it:
        engines = {name: Misbehaving(model, chance) for name, model in names.items()}
        for name, engine in engines.items():
            await it.nursery.start(engine.serve)
            it.ready(name, engine.port)
        crowd = Clients(it, chance)
        early = 0
        async with trio.open_nursery() as troubles:
            troubles.start_soon(trouble, it, engines, chance)
            async with trio.open_nursery() as asking:
                for _ in range(clients):
                    asking.start_soon(crowd.ask_again_and_again)
                await trio.sleep(seconds / 3)
                early = memory()
                await trio.sleep(seconds * 2 / 3)
                crowd.is_over = True
            troubles.cancel_scope.cancel()
        assert crowd.wrong == []
        assert crowd.answers[200] > clients
        # Whatever the engines did: no slot is taken, nobody waits, nothing runs.
        with trio.fail_after(20):
            await it.board.gateway_load.wait_value(lambda load: not load)
        left = it.gateway.admission()
        assert left.running == 0 and not [row for row in left.queues if row.waiting]
        assert all(row.running == 0 for row in left.endpoints)
        assert memory() < early * 1.3 + (32 << 20)
