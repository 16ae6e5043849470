"""Which of the engines that have a free slot gets a request. Cheap: this runs once for every request.

The default takes the engine with the fewest requests in flight. Affinity (`prefix`, `consistent_hashing`) gives way
when its engine has much more to do than the others; then the default decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence

from attrs import frozen

from llmgw.domain.shard import ShardId
from llmgw.gateway.routing.prefix import Memory
from llmgw.gateway.routing.table import Key

SPREAD = 1.25
"""An engine that is preferred may have so many times the mean of the requests in flight ..."""

HEADROOM = 8
"""... or so many more than the engine with the fewest: at low load the mean says little."""


class Load:
    """What an endpoint has to do. One object per endpoint, kept up to date by admission."""

    __slots__ = ("inflight", "key", "slots")

    def __init__(self, key: Key, inflight: int, slots: int) -> None:
        self.key = key
        self.inflight = inflight
        self.slots = slots

    def __repr__(self) -> str:
        return f"Load({self.key[0]}, generation {self.key[1]}, {self.inflight}/{self.slots})"


@frozen
class Hint:
    """What of a request bears on where it goes."""

    prefix: Sequence[bytes] | None = None
    """Hashes of its blocks, see `prefix.block_hashes`."""
    session: str | None = None
    """What its client calls the conversation."""


NO_HINT = Hint()


def bound(loads: Sequence[Load]) -> float:
    """The most requests in flight that an engine may have and still be preferred over the least loaded one."""
    inflight = [load.inflight for load in loads]
    return max(SPREAD * sum(inflight) / len(inflight), min(inflight) + HEADROOM)


class Chooser:
    """Chooses by one of the policies of `gateway.routing`. `chance` gives numbers in [0, 1)."""

    def __init__(self, policy: str, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._turns: dict[Key, int] = {}
        self._turn = 0
        self._memories: dict[str, Memory] = {}
        self._seeds: dict[ShardId, int] = {}
        self._policies: dict[str, Callable[[str, Sequence[Load], Hint], int]] = {
            "least_load": self._least_load,
            "power_of_two": self._power_of_two,
            "round_robin": self._round_robin,
            "random": self._random,
            "prefix": self._prefix,
            "consistent_hashing": self._consistent_hashing,
        }
        self.set_policy(policy)

    def set_policy(self, policy: str) -> None:
        """Raises KeyError for a policy that there is not."""
        self._choose = self._policies[policy]
        self.policy = policy

    def keep(self, models: Collection[str], keys: Collection[Key]) -> None:
        """Forget everything about other models and endpoints than these."""
        self._memories = {name: memory for name, memory in self._memories.items() if name in models}
        self._turns = {key: turn for key, turn in self._turns.items() if key in keys}
        ids = {id_ for id_, _ in keys}
        self._seeds = {id_: seed for id_, seed in self._seeds.items() if id_ in ids}

    def choose(self, model: str, loads: Sequence[Load], hint: Hint = NO_HINT) -> int:
        """The index of the endpoint that gets the request. Only endpoints with a free slot are to be offered, so a
        second try leaves out the one that failed. Raises ValueError when none is offered.
        """
        if not loads:
            raise ValueError(f"no endpoint of {model} was offered")
        return self._choose(model, loads, hint)

    # -- without a memory --------------------------------------------------------------------------------

    def _least_load(self, model: str, loads: Sequence[Load], hint: Hint) -> int:
        inflight = [load.inflight for load in loads]
        least = min(inflight)
        ties = inflight.count(least)
        index = inflight.index(least)
        if ties > 1:
            # At random: several gateways, or one after a pause, would all begin with the same engine.
            for _ in range(int(self._chance() * ties)):
                index = inflight.index(least, index + 1)
        return index

    def _power_of_two(self, model: str, loads: Sequence[Load], hint: Hint) -> int:
        count = len(loads)
        first = int(self._chance() * count)
        if count == 1:
            return first
        second = int(self._chance() * (count - 1))
        if second >= first:
            second += 1
        return second if loads[second].inflight < loads[first].inflight else first

    def _random(self, model: str, loads: Sequence[Load], hint: Hint) -> int:
        return int(self._chance() * len(loads))

    # -- with one ----------------------------------------------------------------------------------------

    def _round_robin(self, model: str, loads: Sequence[Load], hint: Hint) -> int:
        """Whose turn was longest ago. A counter would skip endpoints whenever a full one is not offered."""
        turns = [self._turns.get(load.key, 0) for load in loads]
        index = turns.index(min(turns))
        self._turn += 1
        self._turns[loads[index].key] = self._turn
        return index

    def _prefix(self, model: str, loads: Sequence[Load], hint: Hint) -> int:
        hashes = hint.prefix
        if not hashes:
            return self._least_load(model, loads, hint)
        memory = self._memories.get(model)
        if memory is None:
            memory = self._memories[model] = Memory()
        index = self._holder(memory, loads, hashes)
        if index is None:
            index = self._least_load(model, loads, hint)
        memory.note(hashes, loads[index].key)
        return index

    def _holder(self, memory: Memory, loads: Sequence[Load], hashes: Sequence[bytes]) -> int | None:
        """The endpoint with the longest beginning of it, among those that are offered and not overloaded."""
        most = bound(loads)
        offered = {load.key: index for index, load in enumerate(loads) if load.inflight <= most}
        for key in memory.holders(hashes):
            index = offered.get(key)
            if index is not None:
                return index
        return None

    def _consistent_hashing(self, model: str, loads: Sequence[Load], hint: Hint) -> int:
        """Of the endpoints within the bound, the one with the highest score for this session.

        Highest score (rendezvous hashing) instead of a ring: no state to rebuild, and when an endpoint goes, full or
        for good, its sessions alone move. An endpoint keeps its score over restarts.
        """
        if not hint.session:
            return self._least_load(model, loads, hint)
        session = _number(hint.session.encode())
        most = bound(loads)
        best, highest = 0, -1
        for index, load in enumerate(loads):
            if load.inflight <= most:
                score = ((session ^ self._seed(load.key[0])) * _ODD) & _MASK
                score = ((score ^ (score >> 32)) * _ODD) & _MASK
                if score > highest:
                    best, highest = index, score
        return best

    def _seed(self, id_: ShardId) -> int:
        seed = self._seeds.get(id_)
        if seed is None:
            seed = self._seeds[id_] = _number(str(id_).encode())
        return seed


_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: a multiplication by it spreads bits upwards, the shift brings them down again."""


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
