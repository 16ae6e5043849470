"""The slots of one model's endpoints: how many are free, and which one a request gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmgw.gateway.routing.policies import Chooser, Hint, Load
from llmgw.gateway.routing.table import Key


class Places:
    """An endpoint that is withdrawn keeps what it runs and gets nothing new. Nothing runs beyond the slots, except
    where they were made fewer meanwhile.
    """

    __slots__ = ("_live", "_loads", "_model", "free", "slots")

    def __init__(self, model: str) -> None:
        self._model = model
        self._loads: dict[Key, Load] = {}
        self._live: list[Load] = []
        self.slots = 0
        """Of all endpoints together."""
        self.free = 0

    @property
    def loads(self) -> Iterable[Load]:
        """Those that take requests, and those that still run some."""
        return self._loads.values()

    @property
    def is_open(self) -> bool:
        """There is an endpoint, busy or not."""
        return self.slots > 0

    def set(self, slots: Mapping[Key, int]) -> None:
        """The endpoints that there are now."""
        for key, load in tuple(self._loads.items()):
            if key not in slots:
                load.slots = 0
                if not load.inflight:
                    del self._loads[key]
        for key, count in slots.items():
            known = self._loads.get(key)
            if known is None:
                self._loads[key] = Load(key, 0, count)
            else:
                known.slots = count
        self._live = [self._loads[key] for key, count in slots.items() if count > 0]
        self.slots = sum(load.slots for load in self._live)
        self.free = sum(max(0, load.slots - load.inflight) for load in self._live)

    def take(self, chooser: Chooser, hint: Hint) -> Load:
        """A slot, which must be free."""
        live = self._live
        if len(live) == 1:
            load = live[0]
        else:
            free = [load for load in live if load.inflight < load.slots]
            load = free[chooser.choose(self._model, free, hint)]
        load.inflight += 1
        self.free -= 1
        return load

    def take_another(self, chooser: Chooser, hint: Hint, avoid: Key) -> Load | None:
        """A slot at another endpoint; None where none is free."""
        free = [load for load in self._live if load.inflight < load.slots and load.key != avoid]
        if not free:
            return None
        load = free[chooser.choose(self._model, free, hint)]
        load.inflight += 1
        self.free -= 1
        return load

    def give_back(self, load: Load) -> None:
        load.inflight -= 1
        if load.inflight < load.slots:
            self.free += 1
        elif not load.slots and not load.inflight:
            del self._loads[load.key]
