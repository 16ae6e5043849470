"""Which shards to load, unload, put to sleep and wake, by what requests wait for and what is idle. Pure.

Shards take turns on the cards that they name. A turn ends by itself after `idle_timeout`, or earlier where another
model is waited for; so that models do not chase each other off the cards, a turn is worth its load:

- a model that was loaded keeps its cards until it has served somebody, for 30 s at least;
- one that had a turn lately waits until the present one has had as long as its load took, 30 s to 5 minutes;
- a busy one goes only after the same time, for somebody who has waited 15 s already. It is drained first: it gets
  nothing new, and is unloaded when its last request has ended. Nothing that runs is ever cut short for another model.

One step at a time: the board shows what came of it, and the next call goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations

from attrs import define, field, frozen

from llmgw.config.model import Config
from llmgw.domain.shard import ShardId, ShardSpec
from llmgw.domain.status import (
    ConditionKind,
    Instance,
    ShardState,
    ShardStatus,
    Snapshot,
    Want,
    Wish,
    is_coming,
    is_loadable,
)

TURN_MIN, TURN_MAX = 30.0, 300.0
"""Seconds of a turn where the time of the load would be less or more: below a client's retry and above its patience
nothing is gained."""

PATIENCE = 15.0
"""Seconds that requests wait until a busy model is drained for them: most requests end within that."""

LATELY = 600.0
"""Seconds after the end of a turn in which the next one of the same model counts as coming back."""

LOAD_UNKNOWN = 60.0
"""Seconds that a load is taken to cost before it was ever measured."""

LOOK_AGAIN = 0.25
"""Seconds until the next look while requests wait: a victim's last request ends without news of the board."""

PAIRED = 8
"""Of the cheapest victims, how many are tried in pairs; each try is a placement of everything."""

COUNTERS_AGE = 10.0
"""Seconds beyond three health questions after which an engine's counters no longer tell of a request that went through
the gateway, so that what they tell came from elsewhere."""

Fits = Callable[[ShardId, frozenset[ShardId], frozenset[ShardId]], bool]
"""Whether a shard would get its GPUs now, were these engines gone, and beside these others, which get theirs first."""


@frozen
class Wished:
    """A wish to make, and why, for people."""

    id: ShardId
    wish: Wish
    why: str


@frozen
class Decision:
    """`again_in`: seconds after which time alone may change the answer; None: only news can."""

    wishes: tuple[Wished, ...] = ()
    again_in: float | None = None


@frozen
class Traffic:
    """What the gateway knows of requests. Times in seconds since the epoch."""

    wanted: Mapping[str, Want] = field(factory=dict)
    last_used: Mapping[ShardId, float] = field(factory=dict)
    running: Mapping[ShardId, int] = field(factory=dict)


def decide(snapshot: Snapshot, config: Config, traffic: Traffic, now: float, fits: Fits) -> Decision:
    """What to wish now. `now` is seconds since the epoch."""
    if config.gateway is None:
        return Decision()
    shards = _shards(snapshot, config)
    if not any(shard.takes_turns or shard.is_sleeping for shard in shards):
        return Decision()
    ranks = {band.name: rank for rank, band in enumerate(config.gateway.bands)}
    return _Round(shards, traffic, now, fits, ranks).decide()


@frozen
class _Shard:
    spec: ShardSpec
    instance: Instance

    @property
    def id(self) -> ShardId:
        return self.instance.status.id

    @property
    def status(self) -> ShardStatus:
        return self.instance.status

    @property
    def wish(self) -> Wish:
        return self.instance.intent.wish

    @property
    def takes_turns(self) -> bool:
        return self.spec.idle_timeout is not None

    @property
    def is_loadable(self) -> bool:
        return is_loadable(self.instance, on_demand=self.takes_turns)

    @property
    def is_sleeping(self) -> bool:
        return bool(self.status.conditions) and self.status.condition(ConditionKind.SLEEPING) is not None

    @property
    def is_up(self) -> bool:
        """It answers, or will as soon as it is allowed to or woken."""
        return self.status.state is ShardState.READY

    @property
    def is_coming(self) -> bool:
        return is_coming(self.instance)

    @property
    def is_short_of_gpus(self) -> bool:
        """It is wanted and waits for GPUs."""
        return (
            self.wish is Wish.START
            and not self.status.state.is_live
            and self.status.condition(ConditionKind.UNPLACED) is not None
        )

    @property
    def is_being_drained(self) -> bool:
        """For another model: an operator's drain is the operator's to end."""
        return self.wish is Wish.DRAIN and not self.instance.intent.operator

    @property
    def is_going(self) -> bool:
        """Its cards come free by what was wished already."""
        return self.is_being_drained or (self.wish is Wish.STOP and self.status.state.is_live)

    @property
    def cost(self) -> float:
        """Seconds to bring it back once it is unloaded."""
        if not self.status.state.is_live:
            return 0.0
        return self.status.load_seconds if self.status.load_seconds is not None else LOAD_UNKNOWN

    @property
    def turn(self) -> float:
        """Seconds that its turn lasts at least where others wait who had theirs lately."""
        return min(max(self.cost, TURN_MIN), TURN_MAX)


def _shards(snapshot: Snapshot, config: Config) -> list[_Shard]:
    specs = {spec.name: spec for spec in config.shards}
    found = []
    for id_, instance in snapshot.shards.items():
        spec = specs.get(id_.name)
        # A reload may have given it another model or taken it away; this life still serves the old one.
        if spec is not None and id_.replica < spec.replicas and instance.status.model == spec.model:
            found.append(_Shard(spec, instance))
    return found


@frozen
class _Need:
    """Somebody waits for one of these shards, the cheapest first."""

    shards: tuple[_Shard, ...]
    since: float
    rank: int
    model: str


@define
class _Round:
    """One call of `decide`."""

    shards: Sequence[_Shard]
    traffic: Traffic
    now: float
    fits: Fits
    ranks: Mapping[str, int]
    again: float | None = None
    needed: set[ShardId] = field(factory=set)
    """Those being drained that somebody still waits for."""
    short: set[ShardId] = field(init=False)
    """Those that are wanted and wait for GPUs: they are in nobody's way, unless they are ahead."""
    ahead: set[ShardId] = field(factory=set)
    """Those that somebody has waited for longer than for the one that is looked at."""
    next_up: set[ShardId] = field(factory=set)
    """Those that are wished already and whose cards are free now."""

    def __attrs_post_init__(self) -> None:
        self.short = {shard.id for shard in self.shards if shard.is_short_of_gpus}

    def decide(self) -> Decision:
        wishes = self._wake() or self._serve() or (*self._take_back(), *self._retire_idle())
        return Decision(tuple(wishes), self.again)

    def _would_fit(self, id_: ShardId, without: frozenset[ShardId]) -> bool:
        return self.fits(id_, (without | self.short) - self.ahead - {id_}, frozenset(self.ahead))

    def _look_in(self, seconds: float) -> None:
        self.again = seconds if self.again is None else min(self.again, seconds)

    # -- what is waited for ------------------------------------------------------------------------------

    def _of_model(self, model: str) -> list[_Shard]:
        return [shard for shard in self.shards if shard.spec.model == model]

    def _wake(self) -> tuple[Wished, ...]:
        """A sleeper has its cards already: nobody needs to make room."""
        woken = []
        for want in self.traffic.wanted.values():
            group = self._of_model(want.model)
            if any(shard.is_coming for shard in group):
                continue
            sleepers = [shard for shard in group if shard.is_up and shard.wish is Wish.SLEEP and shard.is_loadable]
            if sleepers:
                woken.append(Wished(sleepers[0].id, Wish.START, _waiting(want)))
        return tuple(woken)

    def _needs(self) -> list[_Need]:
        """What has to be loaded, in the order in which it gets its turn."""
        needs = []
        for want in self.traffic.wanted.values():
            group = self._of_model(want.model)
            short = [shard for shard in group if shard.is_short_of_gpus]
            under_way = [shard for shard in group if shard.is_coming and shard not in short]
            if under_way or any(shard.is_up and (shard.is_sleeping or shard.wish is Wish.SLEEP) for shard in group):
                continue
            down = [shard for shard in group if not shard.status.state.is_live and shard.is_loadable]
            chosen = [shard for shard in short if shard.takes_turns] or sorted(down, key=_load_time)
            if chosen:
                rank = self.ranks.get(want.band, len(self.ranks))
                needs.append(_Need(tuple(chosen), want.since, rank, want.model))
        for shard in self.shards:
            # Loaded by hand: nobody needs to wait for it in the queue.
            by_hand = shard.is_short_of_gpus and shard.takes_turns and not shard.instance.intent.by_gateway
            asked = shard.instance.intent
            if by_hand and asked.by != "file" and shard.spec.model not in self.traffic.wanted:
                needs.append(_Need((shard,), asked.at, -1, shard.spec.model))
        return sorted(needs, key=lambda need: (need.rank, need.since, need.model))

    def _serve(self) -> tuple[Wished, ...]:
        going = frozenset(shard.id for shard in self.shards if shard.is_going)
        for need in self._needs():
            self._look_in(LOOK_AGAIN)
            free = self._first_that_fits(need, frozenset())
            if free is not None:
                if free.wish is not Wish.START:
                    return (Wished(free.id, Wish.START, self._why(need)),)
                # It asks again by itself, now that its cards are free.
                self.ahead.add(free.id)
                self.next_up.add(free.id)
                continue
            soon = self._first_that_fits(need, going)
            wishes = self._let_go(soon, going) if soon is not None else self._make_room(need, going)
            if wishes:
                return wishes
            if not any(self._is_busy(shard) for shard in self.shards if shard.is_going):
                # What comes free for it goes to nobody who came later. While it waits for the last request of another
                # model, which may take long, others may use what is free.
                hoped = soon or next((shard for shard in need.shards if self._could_ever_fit(shard)), None)
                self.ahead.update({hoped.id} if hoped is not None else ())
        return ()

    def _first_that_fits(self, need: _Need, without: frozenset[ShardId]) -> _Shard | None:
        return next((shard for shard in need.shards if self._would_fit(shard.id, without)), None)

    def _could_ever_fit(self, shard: _Shard) -> bool:
        """Once everybody's turn is over."""
        turns = frozenset(other.id for other in self.shards if other.takes_turns and other.id != shard.id)
        return self.fits(shard.id, turns, frozenset())

    def _why(self, need: _Need) -> str:
        want = self.traffic.wanted.get(need.model)
        return _waiting(want) if want is not None else f"for {need.model}"

    def _let_go(self, shard: _Shard, going: frozenset[ShardId]) -> tuple[Wished, ...]:
        """What is on its way out is enough: those that are drained and have nothing left are unloaded."""
        needed = set(going)
        for id_ in sorted(going):
            if self._would_fit(shard.id, frozenset(needed - {id_})):
                needed.discard(id_)
        self.needed |= needed
        drained = [one for one in self.shards if one.id in needed and one.is_being_drained and not self._is_busy(one)]
        return tuple(Wished(one.id, Wish.STOP, f"for {shard.spec.model}") for one in drained)

    def _make_room(self, need: _Need, going: frozenset[ShardId]) -> tuple[Wished, ...]:
        """Those that are busy are drained before any other is unloaded: until then nobody has lost anything."""
        choices = [found for shard in need.shards if (found := self._victims(need, shard, going)) is not None]
        if not choices:
            return self._ask_in_vain(need)
        victims = min(choices, key=lambda found: (any(map(self._is_busy, found)), len(found), self._losses(found)))
        self.needed |= going
        busy = [victim for victim in victims if self._is_busy(victim)]
        still_busy = any(one.id in going and one.is_being_drained and self._is_busy(one) for one in self.shards)
        if busy:
            return tuple(Wished(victim.id, Wish.DRAIN, f"for {need.model}") for victim in busy)
        if still_busy:
            return ()
        return tuple(Wished(victim.id, Wish.STOP, f"for {need.model}") for victim in victims)

    def _ask_in_vain(self, need: _Need) -> tuple[Wished, ...]:
        """Where no turn's end could ever free its cards, its start says in its status what is in the way."""
        if any(shard.wish is Wish.START or self._could_ever_fit(shard) for shard in need.shards):
            return ()
        return (Wished(need.shards[0].id, Wish.START, self._why(need)),)

    # -- who makes room ----------------------------------------------------------------------------------

    def _victims(self, need: _Need, shard: _Shard, going: frozenset[ShardId]) -> Sequence[_Shard] | None:
        """The fewest and cheapest that free the cards for a shard; None where nobody may go, or it would not help."""
        pool = [other for other in self.shards if self._may_go(other, need)]
        idle = [other for other in pool if not self._is_busy(other)]
        for among in (idle, pool) if len(idle) < len(pool) else (idle,):
            found = self._fewest(shard.id, among, going)
            if found is not None:
                return found
        return None

    def _fewest(self, id_: ShardId, among: Collection[_Shard], going: frozenset[ShardId]) -> Sequence[_Shard] | None:
        def help_of(victims: Iterable[_Shard]) -> bool:
            return self._would_fit(id_, going.union(victim.id for victim in victims))

        if not among or not help_of(among):
            return None
        ranked = sorted(among, key=lambda victim: (self._loss(victim), victim.id))
        for victim in ranked:
            if help_of((victim,)):
                return (victim,)
        pairs = sorted(combinations(ranked[:PAIRED], 2), key=self._losses)
        for pair in pairs:
            if help_of(pair):
                return pair
        chosen: list[_Shard] = []
        for victim in ranked:
            chosen.append(victim)
            if help_of(chosen):
                break
        for victim in sorted(chosen, key=self._loss, reverse=True):
            rest = [other for other in chosen if other is not victim]
            if help_of(rest):
                chosen = rest
        return chosen

    def _loss(self, victim: _Shard) -> float:
        """What its end is expected to cost: the load, and the less likely the longer nobody has asked for it."""
        return victim.cost / (1.0 + self._idle_for(victim))

    def _losses(self, victims: Iterable[_Shard]) -> float:
        return sum(map(self._loss, victims))

    def _may_go(self, victim: _Shard, need: _Need) -> bool:
        """Whether it may end its turn now for this need; notes when it may, if later."""
        if not victim.takes_turns or victim.spec.model == need.model or victim.wish not in (Wish.START, Wish.SLEEP):
            return False
        if not victim.status.state.is_live:
            return self._only_hopes(victim)
        if not victim.is_up or victim.spec.model in self.traffic.wanted:
            return False
        turn_over = self._turn_over(victim, need)
        if turn_over > self.now:
            self._look_in(turn_over - self.now)
        return turn_over <= self.now

    def _only_hopes(self, victim: _Shard) -> bool:
        """It has no cards, but is next to get some, and nobody asks for it: it waits until somebody does."""
        asked = victim.instance.intent
        idly = victim.is_short_of_gpus and (asked.by_gateway or asked.by == "file")
        failed = victim.status.state is ShardState.FAILED and victim.is_coming
        return (idly or failed) and victim.spec.model not in self.traffic.wanted

    def _turn_over(self, victim: _Shard, need: _Need) -> float:
        if victim.is_sleeping:
            return 0.0
        # A wake is a turn too, and changes no state.
        up_since = max(victim.status.since, victim.instance.intent.at)
        served = self.traffic.last_used.get(victim.id, 0.0) >= up_since
        over = up_since if served else up_since + TURN_MIN
        if self._had_turn_lately(need):
            over = max(over, up_since + victim.turn)
        if self._is_busy(victim):
            over = max(over, up_since + victim.turn, need.since + PATIENCE)
        return over

    def _had_turn_lately(self, need: _Need) -> bool:
        return any(
            shard.status.state is ShardState.STOPPED
            and shard.status.generation > 0
            and self.now - shard.status.since < LATELY
            for shard in self._of_model(need.model)
        )

    def _is_busy(self, shard: _Shard) -> bool:
        if self.traffic.running.get(shard.id, 0) > 0:
            return True
        activity = shard.status.activity
        if activity is None or not (activity.running or activity.waiting):
            return False
        age = 3 * shard.spec.limits.probe_interval_ready + COUNTERS_AGE
        return self.now - self.traffic.last_used.get(shard.id, 0.0) > age

    def _idle_since(self, shard: _Shard) -> float:
        # A wake changes no state: what it was woken for may still be on its way.
        return max(self.traffic.last_used.get(shard.id, 0.0), shard.status.since, shard.instance.intent.at)

    def _idle_for(self, shard: _Shard) -> float:
        return max(0.0, self.now - self._idle_since(shard))

    # -- what nobody waits for ---------------------------------------------------------------------------

    def _take_back(self) -> Iterable[Wished]:
        """Wishes of the gateway that nobody needs any more."""
        for shard in self.shards:
            if shard.is_being_drained and shard.id not in self.needed:
                yield Wished(shard.id, Wish.START, "nobody waits for its GPUs any more")
            elif shard.is_short_of_gpus and shard.instance.intent.by_gateway and shard.id not in self.next_up:
                if shard.spec.model not in self.traffic.wanted:
                    yield Wished(shard.id, Wish.STOP, "nobody waits for it any more")
                elif self._could_ever_fit(shard):
                    # It seemed to fit and did not. It must not take what comes free for somebody else.
                    yield Wished(shard.id, Wish.STOP, "others come first")

    def _retire_idle(self) -> Iterable[Wished]:
        for shard in self.shards:
            limit = shard.spec.idle_timeout
            is_idle = shard.is_up and shard.wish is Wish.START and not shard.is_sleeping and not self._is_busy(shard)
            if limit is None or not is_idle or shard.spec.model in self.traffic.wanted:
                continue
            left = limit - self._idle_for(shard)
            if left > 0:
                self._look_in(left)
            else:
                wish = Wish.SLEEP if shard.spec.idle_action == "sleep" else Wish.STOP
                yield Wished(shard.id, wish, f"idle for {limit:g} s")
        if any(shard.takes_turns and shard.is_up and self._is_busy(shard) for shard in self.shards):
            # Its idle time begins without news of the board.
            self._look_in(TURN_MIN)


def _load_time(shard: _Shard) -> tuple[float, ShardId]:
    known = shard.status.load_seconds
    return (known if known is not None else LOAD_UNKNOWN, shard.id)


def _waiting(want: Want) -> str:
    return f"{want.waiting} request{'s' * (want.waiting != 1)} waiting"
