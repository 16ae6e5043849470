"""`llmgw sweep`: ends engines that no supervisor looks after, from their records alone.

Works with a wrong or missing configuration, in a `trio.run` of its own, as a command or as systemd's ExecStopPost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import trio
from attrs import evolve, frozen

from llmgw.board import Cell
from llmgw.supervisor.adoption import adopt, leftovers_of, why_not_believed
from llmgw.supervisor.children import Children
from llmgw.supervisor.family import StopOutcome
from llmgw.supervisor.leftovers import clear_traces, note_shm
from llmgw.supervisor.locks import Locks
from llmgw.supervisor.members import Member
from llmgw.supervisor.records import OnStop, RecordStore, ShardRecord, ShmFile

Job = Literal["stop", "restart", "none", "unreadable"]

STOP_TIMEOUT = 10.0
"""Seconds between SIGTERM and SIGKILL: whoever sweeps does not wait for streams."""


@frozen
class SweepReport:
    """Names of shards: `ended` and gone, `stayed` by their on_stop, `failed` and still there; `bad` are files."""

    ended: tuple[str, ...] = ()
    stayed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()


def ends(on_stop: OnStop, *, if_stopping: bool, job: Job) -> bool:
    """Whether an engine with this record is to be ended.

    `auto` means the end only when nobody comes back: systemd's job is a stop. After a crash or a restart the next
    supervisor takes it over, and an unreadable job is no proof. Somebody who sweeps by hand wants it ended.
    """
    if on_stop == "auto":
        return not if_stopping or job == "stop"
    return on_stop == "stop"


async def sweep(
    state_dir: str, *, if_stopping: bool, job: Job, on_line: Callable[[str], None] = lambda _: None
) -> SweepReport:
    """End what is to be ended, all at once, and say so line by line. SIGTERM, 10 s, SIGKILL.

    Raises OwnedByAnother while a supervisor holds the lock of `state_dir`, LlmgwError when that is not writable.
    """
    if not await trio.Path(state_dir).is_dir():
        return SweepReport()
    locks = Locks.take([state_dir])
    try:
        return await _Sweep(state_dir, if_stopping=if_stopping, job=job, on_line=on_line).run()
    finally:
        locks.release()


class _Sweep:
    def __init__(self, state_dir: str, *, if_stopping: bool, job: Job, on_line: Callable[[str], None]) -> None:
        self._state_dir = state_dir
        self._if_stopping = if_stopping
        self._job = job
        self._on_line = on_line
        self._store = RecordStore(state_dir)
        self._children = Children()
        self._ended: list[str] = []
        self._stayed: list[str] = []
        self._failed: list[str] = []

    async def run(self) -> SweepReport:
        loaded = self._store.load_all()
        for bad in loaded.bad:
            self._on_line(f"{bad.path} is no record ({bad.why}); nothing of it was touched")
        async with trio.open_nursery() as nursery:
            for record in loaded.records:
                nursery.start_soon(self._one, record)
        return SweepReport(
            tuple(sorted(self._ended)),
            tuple(sorted(self._stayed)),
            tuple(sorted(self._failed)),
            tuple(bad.path for bad in loaded.bad),
        )

    async def _one(self, record: ShardRecord) -> None:
        name = str(record.id) if record.id.replica else record.id.name
        if not ends(record.on_stop, if_stopping=self._if_stopping, job=self._job):
            why = "with this job of systemd" if record.on_stop == "auto" else "by its configuration"
            self._on_line(f"{name}: stays (on_stop = {record.on_stop!r}, {why})")
            self._stayed.append(name)
            return
        shm: set[ShmFile] = set(record.shm)

        def note(members: tuple[Member, ...]) -> None:
            shm.update(note_shm(member.pid for member in members))

        try:
            doubt = why_not_believed(record)
            engine = adopt(self._children, record) or leftovers_of(self._children, record)
            if engine is not None:
                engine.before_kill = note
                outcome = await engine.stop(
                    term_to="group", stop_timeout=STOP_TIMEOUT, hurry=Cell(False), last_words=0.0
                )
                engine.close()
                self._on_line(f"{name}: {describe(record, outcome)}")
                if outcome.leftover:
                    self._failed.append(name)
                    return
                self._ended.append(name)
            elif doubt is not None:
                self._on_line(f"{name}: nothing to end, {doubt}")
            noted = evolve(record, shm=tuple(shm))
            for complaint in await trio.to_thread.run_sync(clear_traces, noted, self._state_dir):
                self._on_line(f"{name}: {complaint}")
            self._store.delete(record.id)
        except OSError as error:
            self._on_line(f"{name}: cannot finish: {error}")
            self._failed.append(name)


def describe(record: ShardRecord, outcome: StopOutcome) -> str:
    """What became of an engine, in words."""
    match outcome.kind:
        case "gone":
            return f"pid {record.leader.pid} had ended already"
        case "gone-term":
            return f"pid {record.leader.pid} ended after SIGTERM ({outcome.seconds:.1f} s)"
        case "gone-kill":
            return f"pid {record.leader.pid} ended by SIGKILL ({outcome.seconds:.1f} s)"
        case "unkillable":
            left = ", ".join(str(member) for member in outcome.leftover)
            return f"does not die: {left}; its record stays"
