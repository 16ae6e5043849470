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

TICK = 0.1
"""Seconds between two looks at who has waited for long: nobody's limit is shorter than a second."""

RETRY_DRAINING = 5.0
"""Seconds until another llmgw answers here, as a rule."""


class Desk:
    """Where requests ask to be let in. `now` is a monotonic clock in seconds."""

    def __init__(self, config: GatewayConfig, chooser: Chooser, *, now: Callable[[], float]) -> None:
        self._now = now
        self._core = Admission(config, chooser, now())
        self._latches: dict[int, Latch] = {}
        self._told: dict[int, Outcome | None] = {}
        """What happened to those who have not looked yet; None: they have left."""

    def offer_nowait(self, offer: Offer) -> Outcome | None:
        """The outcome, or None when it has to `wait`."""
        mine: Outcome | None = None
        for ticket, outcome in self._core.offer(offer, self._now()):
            if ticket == offer.ticket:
                mine = outcome
            else:
                self._tell(ticket, outcome)
        if mine is None:
            self._latches[offer.ticket] = Latch()
        return mine

    async def wait(self, ticket: int) -> Outcome | None:
        """Sleep until it is let in or refused; None when it has left. A cancelled one has left too."""
        latch = self._latches[ticket]
        try:
            while ticket not in self._told:
                await latch.wait()
            return self._told[ticket]
        except trio.Cancelled:
            if isinstance(self._told.get(ticket), Granted):
                self.finish(ticket, 0, 0)
            self.leave(ticket)
            raise
        finally:
            self._latches.pop(ticket, None)
            self._told.pop(ticket, None)

    def leave(self, ticket: int) -> None:
        """The client is gone: its place is free at once. One that was let in meanwhile has to `finish`."""
        if ticket in self._latches and ticket not in self._told:
            self._tell_all(self._core.leave(ticket, self._now()))
            self._tell(ticket, None)

    def finish(self, ticket: int, prompt_tokens: int | None, completion_tokens: int | None) -> None:
        self._tell_all(self._core.finish(ticket, prompt_tokens, completion_tokens, self._now()))

    def retry(self, ticket: int, avoid: Key) -> Outcome:
        return self._core.retry(ticket, avoid)

    def set_endpoints(self, model: str, slots: Mapping[Key, int]) -> None:
        self._tell_all(self._core.set_endpoints(model, slots, self._now()))

    def refuse_model(self, model: str, refused: Refused) -> None:
        self._tell_all(self._core.refuse_model(model, refused))

    def refuse_all(self, reason: str, text: str) -> None:
        self._tell_all(self._core.refuse_all(Refused(reason, RETRY_DRAINING, text)))

    def adopt(self, config: GatewayConfig) -> None:
        self._tell_all(self._core.adopt(config, self._now()))

    def position(self, ticket: int) -> int | None:
        return self._core.position(ticket)

    def snapshot(self) -> AdmissionSnapshot:
        return self._core.snapshot(self._now())

    async def run(self) -> None:
        """Look at the clock until cancelled."""
        while True:
            await trio.sleep(TICK)
            due = self._core.next_event()
            if due is not None and due <= self._now():
                self._tell_all(self._core.tick(self._now()))

    def _tell_all(self, outcomes: Outcomes) -> None:
        for ticket, outcome in outcomes:
            self._tell(ticket, outcome)

    def _tell(self, ticket: int, outcome: Outcome | None) -> None:
        latch = self._latches.get(ticket)
        if latch is not None:
            self._told[ticket] = outcome
            latch.set()
