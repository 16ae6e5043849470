"""Whatever happens in whatever order: every request comes out once, no limit is passed, and nobody waits in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmgw.config.model import GatewayConfig
from llmgw.gateway.admission.core import Admission
from llmgw.gateway.admission.messages import Granted, Offer, Outcome, Refused
from llmgw.gateway.routing.policies import Chooser
from llmgw.gateway.routing.table import Key
from tests.gateway.admission.setting import DEFAULT_BANDS, band, first_of_equals, key, rules, tenant

MODELS = ("qwen", "llama")
TENANTS = ("a", "b", "c", "stranger")
BANDS = ("interactive", "normal", "batch", "unknown")

maybe = st.none() | st.integers(1, 4)


@st.composite
def configs(draw: st.DrawFn) -> GatewayConfig:
    names = draw(st.sampled_from([("interactive", "normal", "batch"), ("normal",), ("batch", "normal")]))
    bands = [
        band(
            name,
            default=name == "normal",
            max_inflight=draw(maybe),
            reserved=draw(st.integers(0, 1)),
            queue_limit=draw(st.integers(0, 6)),
            queue_timeout=draw(st.none() | st.just(60.0) | st.just(20.0)),
            promote_after=draw(st.none() | st.just(15.0) | st.just(5.0)),
        )
        for name in names
    ]
    tenants = [
        tenant(name, weight=draw(st.integers(1, 3)), max_inflight=draw(maybe), queue_limit=draw(st.none() | st.just(2)))
        for name in draw(st.sampled_from([("a", "b", "c"), ("a", "b"), ()]))
    ]
    limit = draw(st.none() | st.integers(len(bands) + 1, 6))
    return rules(*tenants, bands=bands, fairness=draw(st.sampled_from(["requests", "tokens"])), max_inflight=limit)


class AdmissionMachine(RuleBasedStateMachine):
    """Beside the queue, what a reader of its messages knows."""

    @initialize(config=configs())
    def open(self, config: GatewayConfig) -> None:
        self.config = config
        self.now = 0.0
        self.subject = Admission(config, Chooser("least_load", first_of_equals), 0.0)
        self.slots: dict[str, dict[Key, int]] = {model: {} for model in MODELS}
        self.offers: dict[int, Offer] = {}
        self.waiting: dict[int, Offer] = {}
        self.running: dict[int, Key] = {}

    # -- what can happen

    @rule(
        model=st.sampled_from(MODELS),
        name=st.sampled_from(TENANTS),
        level=st.sampled_from(BANDS),
        estimate=st.integers(1, 50),
    )
    def offer(self, model: str, name: str, level: str, estimate: int) -> None:
        ticket = len(self.offers) + 1
        offer = self.offers[ticket] = Offer(ticket, model, name, level, estimate, arrived=self.now)
        outcome = self.subject.offer(offer, self.now)
        self.waiting[ticket] = offer
        if outcome is not None:
            self.heard([(ticket, outcome)])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        self.subject.leave(ticket, self.now)
        del self.waiting[ticket]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.none() | st.tuples(st.integers(0, 100), st.integers(0, 100)))
    def finish(self, data: st.DataObject, tokens: tuple[int, int] | None) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[ticket]
        self.heard(self.subject.finish(ticket, *(tokens or (None, None)), self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[ticket]
        self.heard(self.subject.give_back(ticket, self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        failed = self.running[ticket]
        others = [each for each, free in self.free(self.offers[ticket].model).items() if free > 0 and each != failed]
        outcome = self.subject.retry(ticket, failed)
        if others:
            assert isinstance(outcome, Granted)
            assert outcome.key in others
            self.running[ticket] = outcome.key
        else:
            assert isinstance(outcome, Refused)

    @rule(ticket=st.integers(-3, -1))
    def hear_of_a_ticket_that_is_not_there(self, ticket: int) -> None:
        self.subject.leave(ticket, self.now)
        assert self.subject.finish(ticket, 1, 1, self.now) == []
        assert self.subject.give_back(ticket, self.now) == []
        assert self.subject.position(ticket) is None

    @rule(model=st.sampled_from(MODELS), counts=st.dictionaries(st.integers(0, 2), st.integers(0, 3), max_size=3))
    def set_endpoints(self, model: str, counts: dict[int, int]) -> None:
        self.slots[model] = {key(model, replica): count for replica, count in counts.items()}
        self.heard(self.subject.set_endpoints(model, self.slots[model], self.now))

    @rule(seconds=st.sampled_from([0.5, 5.0, 15.0, 30.0, 600.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        outcomes = self.subject.tick(self.now)
        assert all(isinstance(outcome, Refused) for _, outcome in outcomes)
        self.heard(outcomes)
        due = self.subject.next_event()
        assert due is None or due > self.now

    @rule(model=st.sampled_from(MODELS))
    def refuse_model(self, model: str) -> None:
        refused = Refused("load-failed", None, "in vain")
        tickets = {ticket for ticket, offer in self.waiting.items() if offer.model == model}
        outcomes = self.subject.refuse_model(model, refused, self.now)
        assert {ticket for ticket, _ in outcomes} == tickets
        self.heard(outcomes)

    @rule(config=configs())
    def adopt(self, config: GatewayConfig) -> None:
        self.config = config
        outcomes = self.subject.adopt(config, self.now)
        assert all(isinstance(outcome, Granted) for _, outcome in outcomes)
        self.heard(outcomes)

    # -- what has to be true then

    def heard(self, outcomes: Iterable[tuple[int, Outcome]]) -> None:
        granted = []
        for ticket, outcome in outcomes:
            offer = self.waiting.pop(ticket)
            if isinstance(outcome, Granted):
                assert outcome.ticket == ticket
                assert self.slots[offer.model].get(outcome.key, 0) > 0
                older = [other for other, its in self.waiting.items() if self.lane(its) == self.lane(offer)]
                assert all(other > ticket for other in older), "one of the same tenant and band was first"
                self.running[ticket] = outcome.key
                granted.append(offer)
            else:
                assert outcome.retry_after is None or 1.0 <= outcome.retry_after <= 60.0
                assert outcome.text.startswith("cannot ") or outcome.reason == "load-failed"
        for offer in granted:
            self.check_limits(offer)

    def lane(self, offer: Offer) -> tuple[str, str, str]:
        return offer.model, offer.tenant, self.band_of(offer)

    def band_of(self, offer: Offer) -> str:
        return offer.band if any(row.name == offer.band for row in self.config.bands) else "normal"

    def limit_of(self, name: str) -> int | None:
        return next((row.max_inflight for row in self.config.tenants if row.name == name), None)

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        offers = [self.offers[ticket] for ticket in self.running]
        return Counter(self.band_of(offer) for offer in offers), Counter(offer.tenant for offer in offers)

    def free(self, model: str) -> dict[Key, int]:
        busy = Counter(self.running.values())
        return {each: count - busy[each] for each, count in self.slots[model].items()}

    def check_limits(self, offer: Offer) -> None:
        """After it was let in, what counts for it is within its limits."""
        by_band, by_tenant = self.counts()
        assert self.free(offer.model)[self.running[offer.ticket]] >= 0
        row = next(row for row in self.config.bands if row.name == self.band_of(offer))
        assert row.max_inflight is None or by_band[row.name] <= row.max_inflight
        limit = self.limit_of(offer.tenant)
        assert limit is None or by_tenant[offer.tenant] <= limit
        assert self.config.max_inflight is None or len(self.running) <= self.config.max_inflight

    def reserve_stands_in_the_way(self, offer: Offer) -> bool:
        own = self.band_of(offer)
        if self.config.max_inflight is not None:
            total = self.config.max_inflight
            free, by_band = total - len(self.running), self.counts()[0]
        else:
            total = sum(self.slots[offer.model].values())
            free = sum(max(0, count) for count in self.free(offer.model).values())
            tickets = [ticket for ticket in self.running if self.offers[ticket].model == offer.model]
            by_band = Counter(self.band_of(self.offers[ticket]) for ticket in tickets)
        kept, left = 0, total - 1
        for row in self.config.bands:
            share = min(row.reserved, left)
            left -= share
            kept += max(0, share - by_band[row.name]) if row.name != own else 0
        return free <= kept

    @invariant()
    def nobody_waits_who_could_run(self) -> None:
        if not hasattr(self, "subject"):
            return
        by_band, by_tenant = self.counts()
        for offer in self.waiting.values():
            row = next(row for row in self.config.bands if row.name == self.band_of(offer))
            limit = self.limit_of(offer.tenant)
            assert (
                not any(free > 0 for free in self.free(offer.model).values())
                or (row.max_inflight is not None and by_band[row.name] >= row.max_inflight)
                or (limit is not None and by_tenant[offer.tenant] >= limit)
                or (self.config.max_inflight is not None and len(self.running) >= self.config.max_inflight)
                or self.reserve_stands_in_the_way(offer)
            ), f"{offer} could run"

    @invariant()
    def the_snapshot_shows_what_the_messages_said(self) -> None:
        if not hasattr(self, "subject"):
            return
        shown = self.subject.snapshot(self.now)
        waiting = Counter((offer.model, self.band_of(offer)) for offer in self.waiting.values())
        running = Counter((self.offers[ticket].model, self.band_of(self.offers[ticket])) for ticket in self.running)
        assert {(row.model, row.band): row.waiting for row in shown.queues if row.waiting} == waiting
        assert {(row.model, row.band): row.running for row in shown.queues if row.running} == running
        oldest: dict[tuple[str, str], float] = {}
        for offer in self.waiting.values():
            oldest.setdefault((offer.model, self.band_of(offer)), self.now - offer.arrived)
        assert {(row.model, row.band): row.oldest for row in shown.queues if row.waiting} == oldest
        by_tenant = Counter(offer.tenant for offer in self.waiting.values())
        assert {row.name: row.waiting for row in shown.tenants if row.waiting} == by_tenant
        assert {row.name: row.running for row in shown.tenants if row.running} == self.counts()[1]
        assert {row.key: row.running for row in shown.endpoints if row.running} == Counter(self.running.values())
        assert shown.running == len(self.running)
        positions = sorted((offer.model, self.subject.position(ticket)) for ticket, offer in self.waiting.items())
        assert all(place is not None and place >= 1 for _, place in positions)

    def teardown(self) -> None:
        """With engines and without limits everyone gets through, and nothing is left."""
        if not hasattr(self, "subject"):
            return
        self.adopt_and_serve(rules(bands=DEFAULT_BANDS))
        assert not self.waiting
        shown = self.subject.snapshot(self.now)
        assert shown.running == 0
        assert shown.queues == ()
        assert all(row.waiting == row.running == 0 for row in shown.tenants)
        assert self.subject.next_event() is None

    def adopt_and_serve(self, config: GatewayConfig) -> None:
        self.config = config
        self.heard(self.subject.adopt(config, self.now))
        for model in MODELS:
            self.slots[model] = {key(model): 1}
            self.heard(self.subject.set_endpoints(model, self.slots[model], self.now))
        while self.running:
            ticket = next(iter(self.running))
            del self.running[ticket]
            self.heard(self.subject.finish(ticket, None, None, self.now))


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAdmission = AdmissionMachine.TestCase
