"""GPUs whose memory has not come back after an engine's end. They are given to nobody until somebody sees that they
are free, or an operator says that they are.

One writer: whoever ends engines enters, whoever looks at the node lets go, all in trio's thread. Kept on disk, since a
restart of llmgw frees no memory; a reboot does, so entries of another boot are void.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping

import trio
from attrs import evolve, frozen

from llmgw.domain.hardware import Gpu, Inventory
from llmgw.supervisor.durable import read_bounded, remove_durably, write_durably
from llmgw.supervisor.gpu_release import HeldGpu, held_gpus
from llmgw.supervisor.procfs import boot_id
from llmgw.supervisor.records import RECORD_LIMIT

log = logging.getLogger(__name__)


@frozen
class Quarantined:
    """One GPU. `before` is what was used of it before the launch, in MiB; `since` is in seconds since the epoch."""

    uuid: str
    label: str
    shard: str
    """Whose engine ended."""
    before: int | None
    since: float
    holder: str
    """Who holds it, or why nothing is known, in words."""
    pids: tuple[int, ...] = ()
    """Processes of ours that could not be killed: as long as one of them is on it, it is not free."""


class Quarantine:
    """All of them. `texts` is what placement and people see."""

    def __init__(self, state_dir: str, *, now: Callable[[], float], boot: Callable[[], str] = boot_id) -> None:
        self._path = os.path.join(state_dir, "quarantine.json")
        self._now = now
        self._boot = boot
        self._entries: dict[str, Quarantined] = {}
        self._accepted: dict[str, frozenset[int]] = {}
        self._saving = trio.Lock()
        self._saved: object = {}
        self._load()

    @property
    def entries(self) -> tuple[Quarantined, ...]:
        """In the order in which they came."""
        return tuple(self._entries.values())

    @property
    def accepted(self) -> Mapping[str, Collection[int]]:
        """UUID -> pids that an operator has declared to be in nobody's way, as long as they are there."""
        return self._accepted

    def enter(
        self, shard: str, held: Iterable[HeldGpu], before: Mapping[str, int | None], pids: Iterable[int] = ()
    ) -> None:
        """Nobody gets these from now on. One that is in already keeps its time."""
        for gpu in held:
            old = self._entries.get(gpu.uuid)
            since = old.since if old is not None else self._now()
            entry = Quarantined(gpu.uuid, gpu.label, shard, before.get(gpu.uuid), since, gpu.what, tuple(pids))
            self._entries[gpu.uuid] = entry

    def recheck(self, inventory: Inventory) -> Mapping[str, str]:
        """Let go of what is free by this inventory; returns the others, UUID -> why it is given to nobody."""
        for entry in self.entries:
            found = held_gpus(
                inventory,
                (entry.uuid,),
                {entry.uuid: entry.before},
                is_ours=frozenset(entry.pids).__contains__,
                labels={entry.uuid: entry.label},
            )
            if found:
                self._entries[entry.uuid] = evolve(entry, label=found[0].label, holder=found[0].what)
            else:
                log.info("GPU %s: its memory is back, it may be used again", entry.label)
                del self._entries[entry.uuid]
        if inventory.is_current:
            self._forget_gone(inventory)
        return self.texts()

    def texts(self) -> Mapping[str, str]:
        return {
            entry.uuid: f"not released after {entry.shard} ended: {entry.holder}" for entry in self._entries.values()
        }

    def release(self, gpu: Gpu) -> bool:
        """An operator says that it may be used as it is. Whoever is on it now counts as nobody as long as it stays.

        Returns whether anything was in the way.
        """
        was = self._entries.pop(gpu.uuid, None) is not None
        pids = frozenset(process.pid for process in gpu.processes)
        changed = bool(pids - self._accepted.get(gpu.uuid, frozenset()))
        if pids:
            self._accepted[gpu.uuid] = pids
        return was or changed

    async def save(self) -> None:
        """Bring it to disk, where it differs from what is there; a full disk is told, and llmgw goes on."""
        async with self._saving:
            document = self._document()
            if document == self._saved:
                return
            try:
                await trio.to_thread.run_sync(self._write, document)
                self._saved = document
            except OSError as error:
                log.error("cannot keep the quarantine of GPUs over a restart: %s", error)

    def _forget_gone(self, inventory: Inventory) -> None:
        there = {gpu.uuid: {process.pid for process in gpu.processes} for gpu in inventory.gpus}
        for uuid, pids in list(self._accepted.items()):
            left = pids & there.get(uuid, set())
            if left:
                self._accepted[uuid] = frozenset(left)
            else:
                del self._accepted[uuid]

    def _document(self) -> dict[str, object]:
        if not self._entries:
            return {}
        return {
            "boot_id": self._boot(),
            "gpus": [
                {
                    "uuid": entry.uuid,
                    "label": entry.label,
                    "shard": entry.shard,
                    "before": entry.before,
                    "since": entry.since,
                    "holder": entry.holder,
                }
                for entry in self._entries.values()
            ],
        }

    def _write(self, document: dict[str, object]) -> None:
        if document:
            write_durably(self._path, json.dumps(document, indent=1).encode())
        else:
            remove_durably(self._path)

    def _load(self) -> None:
        try:
            document = json.loads(read_bounded(self._path, RECORD_LIMIT))
            if document["boot_id"] != self._boot():
                return
            for entry in document["gpus"]:
                found = Quarantined(
                    _text(entry["uuid"]),
                    _text(entry["label"]),
                    _text(entry["shard"]),
                    entry["before"] if type(entry["before"]) is int else None,
                    _time(entry["since"]),
                    _text(entry["holder"]),
                )
                self._entries[found.uuid] = found
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            # The next survey and the next launch look at the memory itself; what is lost is only whose it was.
            log.error("cannot read the quarantine of GPUs (%s): %s", self._path, error)
        self._saved = self._document()


def _time(value: object) -> float:
    # Before the year 5000, and no NaN.
    if not isinstance(value, int | float) or not 0 <= value < 1e11:
        raise ValueError("not a time")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > 500:
        raise ValueError("not a text")
    return value
