"""What it costs to let a request in and out again: `python -m benchmarks.admission`.

Beside it, in the same run, a floor without rules: a count of free slots, a deque of who waits, a dict of who runs.
Requests of 50 tenants, in turn; the times are CPU of this process, the best of several runs. *at once*: there is a free
slot. *queued*: a standing queue of as many as the row says, so that each end lets in one that has waited. The cost of
the queue must not grow with its length, which is the second verdict.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable

from benchmarks.measure import machine
from llmgw.config.document import SourceFile
from llmgw.config.model import GatewayConfig
from llmgw.config.parse import parse
from llmgw.domain.host import HostFacts
from llmgw.domain.shard import ShardId
from llmgw.gateway.admission.core import Admission
from llmgw.gateway.admission.messages import Offer
from llmgw.gateway.routing.policies import Chooser
from llmgw.gateway.routing.table import Key

REQUESTS, RUNS, TENANTS, SLOTS = 5000, 15, 50, 256
SHORT, LONG = 100, 20_000
"""Waiting requests of the two standing queues."""
MOST_AT_ONCE = 20.0
"""Times the floor that a request may take which goes at once."""
MOST_GROWTH = 2.0
"""Times the short queue's cost that the long one's may be: memory gets slower, the work stays the same."""

ROWS = {
    "rules by default": "",
    "turns by tokens": 'fairness = "tokens"',
    "limits and rates": "max_inflight = 1000",
}
RATES = "max_inflight = 200\nrate = { requests_per_minute = 1000000000, tokens_per_minute = 1000000000 }"


def configuration(keys: str, rates: str) -> GatewayConfig:
    tenants = (
        f'[[gateway.tenant]]\nname = "t{i}"\nkeys = [{{ sha256 = "{i:064x}" }}]\n{rates}\n' for i in range(TENANTS)
    )
    shard = '[[shard]]\nname = "qwen"\nmodel = "qwen"\nengine = "command"\ncommand = ["true"]\n'
    text = "\n".join((shard, f"[gateway]\nqueue_limit = {2 * LONG}\n{keys}", *tenants))
    facts = HostFacts(hostname="gpu-01", uid=0, home="/root", env={"HOME": "/root"}, groups=frozenset({"root"}))
    parsed = parse([SourceFile("llmgw.toml", text.encode(), "/", "/llmgw.toml")], facts)
    assert parsed.config is not None, [problem.message for problem in parsed.problems]
    assert parsed.config.gateway is not None
    return parsed.config.gateway


class Floor:
    """First come, first served, and nothing else."""

    def __init__(self) -> None:
        self._free = SLOTS
        self._waiting: deque[Offer] = deque()
        self._running: dict[int, Offer] = {}

    def offer(self, offer: Offer) -> bool:
        if not self._free:
            self._waiting.append(offer)
            return False
        self._free -= 1
        self._running[offer.ticket] = offer
        return True

    def finish(self, ticket: int) -> int | None:
        del self._running[ticket]
        if not self._waiting:
            self._free += 1
            return None
        offer = self._waiting.popleft()
        self._running[offer.ticket] = offer
        return offer.ticket


class Ruled:
    """The queue of the gateway, asked like the floor."""

    def __init__(self, config: GatewayConfig, endpoints: int = 1) -> None:
        slots: dict[Key, int] = {(ShardId("qwen", i), 1): SLOTS // endpoints for i in range(endpoints)}
        self._subject = Admission(config, Chooser("least_load", lambda: 0.5), 0.0)
        self._subject.set_endpoints("qwen", slots, 0.0)

    def offer(self, offer: Offer) -> bool:
        return self._subject.offer(offer, 1.0) is not None

    def finish(self, ticket: int) -> int | None:
        outcomes = self._subject.finish(ticket, 100, 50, 2.0)
        return outcomes[0][0] if outcomes else None


def offers(first: int, count: int) -> list[Offer]:
    return [Offer(ticket, "qwen", f"t{ticket % TENANTS}", "normal", 100) for ticket in range(first, first + count)]


def timed(work: Callable[[list[Offer]], None]) -> float:
    """Microseconds of one request, the best of several runs."""
    best = float("inf")
    for run in range(RUNS):
        requests = offers((run + 1) * 10_000_000, REQUESTS)
        gc.collect()
        gc.disable()
        began = time.process_time()
        work(requests)
        best = min(best, time.process_time() - began)
        gc.enable()
    return 1e6 * best / REQUESTS


def at_once(queue: Floor | Ruled) -> float:
    def work(requests: list[Offer]) -> None:
        for offer in requests:
            assert queue.offer(offer)
            queue.finish(offer.ticket)

    return timed(work)


def queued(queue: Floor | Ruled, depth: int) -> float:
    """One comes and one ends, where `depth` others wait."""
    running: deque[int] = deque()
    for offer in offers(0, SLOTS + depth):
        if queue.offer(offer):
            running.append(offer.ticket)

    def work(requests: list[Offer]) -> None:
        for offer in requests:
            assert not queue.offer(offer)
            ticket = queue.finish(running.popleft())
            assert ticket is not None
            running.append(ticket)

    return timed(work)


def main() -> None:
    print(f"{machine()}; {REQUESTS} requests of {TENANTS} tenants, best of {RUNS}")
    floor = at_once(Floor()), queued(Floor(), SHORT), queued(Floor(), LONG)
    heads = ("at once", f"queued, {SHORT}", f"queued, {LONG}")
    print(f"{'':<22}" + "".join(f"{head:>24}" for head in heads))
    print(f"{'floor':<22}" + "".join(f"{value:>20.2f} us " for value in floor))
    verdicts: list[tuple[str, float, float]] = []
    for name, keys in ROWS.items():
        for endpoints in (1, 4) if not keys else (1,):
            config = configuration(keys, RATES if "limits" in name else "")
            took = (
                at_once(Ruled(config, endpoints)),
                queued(Ruled(config, endpoints), SHORT),
                queued(Ruled(config, endpoints), LONG),
            )
            what = name if endpoints == 1 else f"{name}, {endpoints} engines"
            cells = (f"{us:.2f} us, {us / least:.0f} x" for us, least in zip(took, floor, strict=True))
            print(f"{what:<22}" + "".join(f"{cell:>24}" for cell in cells))
            if name == "rules by default" and endpoints == 1:
                verdicts.append(("at once, rules by default, in floors", took[0] / floor[0], MOST_AT_ONCE))
            verdicts.append((f"{what}: the long queue in short ones", took[2] / took[1], MOST_GROWTH))
    for text, value, most in verdicts:
        print(f"{'ok  ' if value <= most else 'MISS'} {text}: {value:.1f} (at most {most:g})")
    if any(value > most for _, value, most in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
