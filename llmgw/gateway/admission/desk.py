"""The queue's shell: the clock, and who sleeps until it is told. What is decided is `core`'s."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from llmgw.config.model import GatewayConfig
from llmgw.gateway.admission.core import Admission, Outcomes
from llmgw.gateway.admission.messages import Granted, Offer, Outcome, Refused
from llmgw.gateway.admission.snapshot import AdmissionSnapshot
from llmgw.gateway.plane import Latch
from llmgw.gateway.routing.policies import Chooser
from llmgw.gateway.routing.table import Key

LOOK = 0.25
"""Seconds, at the most, between two looks at the clock while somebody waits: a later request may be due earlier than
the one that was first when the look was planned."""

RETRY_DRAINING = 5.0
"""Seconds until another llmgw answers here, as a rule."""


class _Sleeper:
    """One who waits to be told."""

    __slots__ = ("latch", "outcome")

    def __init__(self) -> None:
        self.latch = Latch()
        self.outcome: Outcome | None = None
        """None when it is told: it has left."""


class Desk:
    """Where requests ask to be let in. `now` is a monotonic clock in seconds."""

    def __init__(self, config: GatewayConfig, chooser: Chooser, *, now: Callable[[], float]) -> None:
        self._now = now
        self._core = Admission(config, chooser, now())
        self._sleepers: dict[int, _Sleeper] = {}
        self._news = Latch()
        """Somebody may be due who was not before."""

    # -- one request -------------------------------------------------------------------------------------

    def offer_nowait(self, offer: Offer) -> Outcome | None:
        """The outcome, or None when it has to `wait`."""
        outcome = self._core.offer(offer, self._now())
        if outcome is None:
            self._news.set()
            self._sleepers[offer.ticket] = _Sleeper()
        return outcome

    async def wait(self, ticket: int) -> Outcome | None:
        """Sleep until it is let in or refused; None when it has left. A task that is cancelled here has left too.
        Called once for each ticket that has to wait; raises KeyError for others.
        """
        sleeper = self._sleepers[ticket]
        try:
            await sleeper.latch.wait()
        except trio.Cancelled:
            self.leave(ticket)
            raise
        finally:
            del self._sleepers[ticket]
        return sleeper.outcome

    def leave(self, ticket: int) -> None:
        """The client is gone. Its place is free at once, also when it was let in and has not looked yet; who has got
        its outcome from `wait` or `offer_nowait` has to `finish` instead, and nothing happens here.
        """
        sleeper = self._sleepers.get(ticket)
        if sleeper is None:
            return
        if isinstance(sleeper.outcome, Granted):
            self._tell(self._core.give_back(ticket, self._now()))
        else:
            self._core.leave(ticket, self._now())
        sleeper.outcome = None
        sleeper.latch.set()

    def finish(self, ticket: int, prompt_tokens: int | None, completion_tokens: int | None) -> None:
        """It has ended, however: its slot is another's. Tokens as the engine counted them, None where nobody knows."""
        self._tell(self._core.finish(ticket, prompt_tokens, completion_tokens, self._now()))

    def retry(self, ticket: int, avoid: Key) -> Outcome:
        """Another endpoint for one that was let in; refused, it keeps its own. Raises KeyError if it does not run."""
        return self._core.retry(ticket, avoid)

    # -- what changes for all ----------------------------------------------------------------------------

    def set_endpoints(self, model: str, slots: Mapping[Key, int]) -> None:
        """All endpoints of a model that may get requests, with their slots."""
        self._tell(self._core.set_endpoints(model, slots, self._now()))
        self._news.set()

    def refuse_model(self, model: str, refused: Refused) -> None:
        """Whoever waits for a model waits in vain."""
        self._tell(self._core.refuse_model(model, refused, self._now()))

    def refuse_all(self, reason: str, text: str) -> None:
        """Nobody waits from now on: who does is refused, and who comes later and cannot go at once is too."""
        self._tell(self._core.refuse_all(Refused(reason, RETRY_DRAINING, text), self._now()))

    def adopt(self, config: GatewayConfig) -> None:
        """Other bands, tenants and limits; nobody is dropped for it."""
        self._tell(self._core.adopt(config, self._now()))
        self._news.set()

    def waiting(self) -> Mapping[tuple[str, str, str], int]:
        """How many wait, by model, band and tenant."""
        return self._core.waiting()

    async def run(self) -> None:
        """Tell those whose time is over, until cancelled. Sleeps while nobody can be due."""
        while True:
            due = self._core.next_event()
            if due is None:
                await self._news.wait()
            elif (left := due - self._now()) > 0:
                await trio.sleep(min(left, LOOK))
            else:
                self._tell(self._core.tick(self._now()))
                await trio.lowlevel.checkpoint()

    # -- seeing it ---------------------------------------------------------------------------------------

    def position(self, ticket: int) -> int | None:
        """Its place in the queue as things stand, from 1; None when it does not wait."""
        return self._core.position(ticket)

    def snapshot(self) -> AdmissionSnapshot:
        return self._core.snapshot(self._now())

    def _tell(self, outcomes: Outcomes) -> None:
        for ticket, outcome in outcomes:
            sleeper = self._sleepers[ticket]
            sleeper.outcome = outcome
            sleeper.latch.set()
