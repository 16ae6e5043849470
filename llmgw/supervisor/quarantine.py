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

from llmgw.discovery.availability import UNSEEN, unseen_memory, without_engines
from llmgw.discovery.gpus import BUSY_MIB
from llmgw.domain.hardware import Gpu, GpuHolder, Inventory
from llmgw.supervisor.durable import read_bounded, remove_durably, write_durably
from llmgw.supervisor.gpu_release import HeldGpu, held_gpus
from llmgw.supervisor.procfs import boot_id
from llmgw.supervisor.records import RECORD_LIMIT, ShardRecord

log = logging.getLogger(__name__)

TEXT_MAX = 500
"""Characters of a text that are kept."""


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
        self._told = ""
        self._load()

    @property
    def entries(self) -> tuple[Quarantined, ...]:
        """In the order in which they came."""
        return tuple(self._entries.values())

    @property
    def accepted(self) -> Mapping[str, Collection[int]]:
        """UUID -> pids that an operator has declared to be in nobody's way, as long as they are there; UNSEEN among
        them stands for memory that no process in the list has."""
        return self._accepted

    def enter(
        self, shard: str, held: Iterable[HeldGpu], before: Mapping[str, int | None], pids: Iterable[int] = ()
    ) -> None:
        """Nobody gets these from now on. One that is in already keeps its time."""
        for gpu in held:
            old = self._entries.get(gpu.uuid)
            since = old.since if old is not None else self._now()
            holder = gpu.what[:TEXT_MAX]
            entry = Quarantined(gpu.uuid, gpu.label, shard, before.get(gpu.uuid), since, holder, tuple(pids))
            self._entries[gpu.uuid] = entry

    def doubt(self, shard: str, record: ShardRecord, why: str) -> None:
        """Nobody has asked whether the GPUs of an engine that is gone are free: the next look says it."""
        labels = dict(zip(record.gpu_uuids, record.gpus, strict=False))
        text = f"not confirmed free: {why}"
        held = [HeldGpu(uuid, labels.get(uuid, uuid), None, text) for uuid in record.gpu_memory_before]
        self.enter(shard, held, record.gpu_memory_before)

    def recheck(self, inventory: Inventory, holders: Mapping[int, GpuHolder] | None = None) -> Mapping[str, str]:
        """Let go of what is free by this inventory; returns the others, UUID -> why it is given to nobody.

        `holders` tell whose the processes are: engines of ours that share a card hold nothing of an ended one.
        """
        for entry in self.entries:
            found = held_gpus(
                without_engines(inventory, holders or {}, keep=entry.pids),
                (entry.uuid,),
                {entry.uuid: entry.before},
                is_ours=frozenset(entry.pids).__contains__,
                labels={entry.uuid: entry.label},
            )
            if found:
                self._entries[entry.uuid] = evolve(entry, label=found[0].label, holder=found[0].what[:TEXT_MAX])
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

    def release(self, uuid: str, gpu: Gpu | None, *, ours: Collection[int] = ()) -> bool:
        """An operator says that it may be used as it is. Whoever is on it now counts as nobody as long as it stays.

        `gpu` is the card as it is now, None for a slice and for one that cannot be seen; `ours` are pids of our
        engines. Returns whether anything was in the way.
        """
        was = self._entries.pop(uuid, None) is not None
        there = _there(gpu) - frozenset(ours) if gpu is not None else frozenset()
        changed = bool(there - self._accepted.get(uuid, frozenset()))
        if there:
            self._accepted[uuid] = there
        return was or changed

    async def save(self) -> None:
        """Bring it to disk, where it differs from what is there; a full disk is told, and llmgw goes on."""
        async with self._saving:
            try:
                document = self._document()
                if document == self._saved:
                    return
                await trio.to_thread.run_sync(self._write, document)
            except OSError as error:
                self._complain(error)
            else:
                self._saved, self._told = document, ""

    def save_now(self) -> None:
        """As `save`, before anything runs that must not be held up."""
        try:
            self._write(document := self._document())
        except OSError as error:
            self._complain(error)
        else:
            self._saved, self._told = document, ""

    def _complain(self, error: OSError) -> None:
        # It is tried again after each look, and told once.
        if str(error) != self._told:
            log.error("cannot keep the quarantine of GPUs over a restart: %s", error)
        self._told = str(error)

    def _forget_gone(self, inventory: Inventory) -> None:
        there = {gpu.uuid: _there(gpu) for gpu in inventory.gpus}
        for uuid, pids in list(self._accepted.items()):
            left = pids & there.get(uuid, frozenset())
            if left:
                self._accepted[uuid] = left
            else:
                del self._accepted[uuid]

    def _document(self) -> dict[str, object]:
        if not self._entries and not self._accepted:
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
            "accepted": {uuid: sorted(pids) for uuid, pids in self._accepted.items()},
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
            for uuid, pids in document.get("accepted", {}).items():
                self._accepted[_text(uuid)] = frozenset(map(_pid, pids))
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            # The next survey and the next launch look at the memory itself; what is lost is only whose it was.
            log.error("cannot read the quarantine of GPUs (%s): %s", self._path, error)
        self._saved = self._document()


def _there(gpu: Gpu) -> frozenset[int]:
    """Whoever is on it, UNSEEN for memory that nobody in the list has."""
    unseen = unseen_memory(gpu)
    hidden = {UNSEEN} if unseen is None or unseen > BUSY_MIB else set()
    return frozenset({process.pid for process in gpu.processes} | hidden)


def _pid(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError("not a pid")
    return value


def _time(value: object) -> float:
    # Before the year 5000, and no NaN.
    if not isinstance(value, int | float) or not 0 <= value < 1e11:
        raise ValueError("not a time")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > TEXT_MAX:
        raise ValueError("not a text")
    return value
