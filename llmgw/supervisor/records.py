"""What is on disk for the next supervisor: one record per running launch, the operators' wishes, the last load times.

Written before an engine may run and read before anything is started. Neither command line nor log offset is kept:
the first proves nothing, the second is a line in the log itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from attrs import field, frozen

from llmgw.domain.shard import Endpoint, ShardId, TcpEndpoint, UnixEndpoint
from llmgw.domain.status import Intent, Wish
from llmgw.supervisor.durable import read_bounded, remove_durably, write_durably
from llmgw.supervisor.procfs import ProcessId, boot_id

VERSION = 1

RECORD_LIMIT = 1 << 20
"""Bytes of a record: a few thousand /dev/shm names fit, a file that somebody filled does not."""

TEXT_LIMIT = 16384
"""Characters of one text in a record: four times the longest path."""

NUMBER_LIMIT = 1 << 53
"""What every reader of JSON keeps exactly; times and counts lie far below."""

PID_LIMIT = 1 << 22
"""The kernel gives no higher one (PID_MAX_LIMIT in linux/threads.h)."""

ASIDE = ".bad"
"""Ending of a file that is no record, once it has been found out."""

OnStop = Literal["auto", "stop", "leave"]
T = TypeVar("T")


@frozen
class ShmFile:
    """A file in /dev/shm. Names are random but may come again; with the inode it is certainly the same file."""

    name: str
    inode: int


@frozen
class ShardRecord:
    """One launch. `gpu_memory_before`: MiB in use per UUID before it, None where the driver did not say."""

    id: ShardId
    generation: int
    run_id: str
    leader: ProcessId
    pgid: int
    sid: int
    alive_at: int
    """Clock ticks since boot at the last writing while the leader was known to live: what is in its session and is
    older than that is the shard's, also when the leader has died meanwhile."""
    endpoint: Endpoint
    config_hash: str
    engine: str
    model: str
    on_stop: OnStop = "auto"
    cgroup: str | None = None
    devices: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    """As shown to people."""
    gpu_uuids: tuple[str, ...] = ()
    """What `gpus` are; shorter where they could not be looked up."""
    gpu_memory_before: Mapping[str, int | None] = field(factory=dict)
    gpu_share: int | None = None
    """MiB of each card that it was launched with, beside others that share it; None: its cards are its own."""
    allowed: tuple[str, ...] = ()
    """Findings that the file allows, as they were at the launch."""
    api_key: str | None = field(default=None, repr=False)
    slots: int | None = None
    """Requests that it works on at a time, as far as that was found out."""
    slots_from: str = ""
    shm: tuple[ShmFile, ...] = ()
    tmp_dir: str | None = None
    log_path: str | None = None
    engine_version: str | None = None
    launched_at: float = 0.0
    ready_at: float | None = None
    failures: int = 0
    restarts: int = 0

    def as_json(self) -> dict[str, Any]:
        if isinstance(self.endpoint, UnixEndpoint):
            endpoint: dict[str, Any] = {"unix": self.endpoint.path}
        else:
            endpoint = {"host": self.endpoint.host, "port": self.endpoint.port}
        return {
            "version": VERSION,
            "shard": self.id.name,
            "replica": self.id.replica,
            "generation": self.generation,
            "run_id": self.run_id,
            "boot_id": self.leader.boot_id,
            "pid": self.leader.pid,
            "start_ticks": self.leader.start_ticks,
            "pgid": self.pgid,
            "sid": self.sid,
            "alive_at": self.alive_at,
            "endpoint": endpoint,
            "config_hash": self.config_hash,
            "engine": self.engine,
            "model": self.model,
            "on_stop": self.on_stop,
            "cgroup": self.cgroup,
            "devices": list(self.devices),
            "gpus": list(self.gpus),
            "gpu_uuids": list(self.gpu_uuids),
            "memory_before": dict(self.gpu_memory_before),
            "gpu_share": self.gpu_share,
            "allowed": list(self.allowed),
            "api_key": self.api_key,
            "slots": self.slots,
            "slots_from": self.slots_from,
            "shm": [[file.name, file.inode] for file in self.shm],
            "tmp_dir": self.tmp_dir,
            "log_path": self.log_path,
            "engine_version": self.engine_version,
            "launched_at": self.launched_at,
            "ready_at": self.ready_at,
            "failures": self.failures,
            "restarts": self.restarts,
        }


class _Fields:
    """A JSON object read strictly: a value of another type is an error, an unknown key is a newer llmgw's."""

    def __init__(self, document: Any) -> None:
        if not isinstance(document, dict):
            # One kind of error for all that can be wrong in a file.
            raise ValueError("not a JSON object")  # noqa: TRY004
        self._document = document

    def get(self, name: str, kind: type[T]) -> T:
        value = self.optional(name, kind)
        if value is None:
            raise ValueError(f"{name} is missing")
        return value

    def optional(self, name: str, kind: type[T]) -> T | None:
        value = self._document.get(name)
        if kind is float and type(value) is int:
            value = _sane(value)
        if value is not None and type(value) is not kind:
            raise ValueError(f"{name} is {_shown(value)}, not {kind.__name__}")
        if isinstance(value, str) and not _is_text(value):
            raise ValueError(f"{name} is no text that can be used: {_shown(value)}")
        if isinstance(value, float):
            _sane(value)
        return value

    def number(self, name: str, least: int, most: int = NUMBER_LIMIT) -> int:
        value = self.get(name, int)
        if not least <= value <= most:
            raise ValueError(f"{name} is {_shown(value)}, not from {least} to {most}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.optional(name, list) or []
        if not all(isinstance(value, str) and _is_text(value) for value in values):
            raise ValueError(f"{name} is not a list of texts")
        return tuple(values)


def _is_text(value: str) -> bool:
    """Whether it may become a path or part of a message: bounded, without NUL, and nothing that cannot be encoded."""
    return len(value) <= TEXT_LIMIT and "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


def _sane(value: float) -> float:
    """As a float. Raises ValueError for NaN, infinity and what no clock and no counter says."""
    if not -NUMBER_LIMIT <= value <= NUMBER_LIMIT:
        raise ValueError(f"{_shown(value)} is out of range")
    return float(value)


def _shown(value: object) -> str:
    """For a message about a file that anything may stand in."""
    if type(value) is int and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:80]


def parse_record(data: bytes) -> ShardRecord:
    """Raises ValueError with the reason when it is no record of a version that this llmgw knows."""
    fields = _Fields(_parse_json(data))
    version = fields.get("version", int)
    if version != VERSION:
        raise ValueError(f"version {version}, this llmgw reads version {VERSION}")
    place = _Fields(fields.get("endpoint", dict))
    path = place.optional("unix", str)
    endpoint = (
        UnixEndpoint(path) if path is not None else TcpEndpoint(place.get("host", str), place.number("port", 1, 65535))
    )
    on_stop = fields.get("on_stop", str)
    if on_stop not in ("auto", "stop", "leave"):
        raise ValueError(f"on_stop is {on_stop!r}")
    return ShardRecord(
        id=ShardId(fields.get("shard", str), fields.number("replica", 0)),
        generation=fields.number("generation", 0),
        run_id=fields.get("run_id", str),
        # Never 0 or 1: a signal to those would mean everybody.
        leader=ProcessId(
            fields.get("boot_id", str), fields.number("pid", 2, PID_LIMIT), fields.number("start_ticks", 0)
        ),
        pgid=fields.number("pgid", 2, PID_LIMIT),
        sid=fields.number("sid", 2, PID_LIMIT),
        alive_at=fields.number("alive_at", 0),
        endpoint=endpoint,
        config_hash=fields.get("config_hash", str),
        engine=fields.get("engine", str),
        model=fields.get("model", str),
        on_stop=on_stop,  # type: ignore[arg-type]
        cgroup=fields.optional("cgroup", str),
        devices=fields.texts("devices"),
        gpus=fields.texts("gpus"),
        gpu_uuids=fields.texts("gpu_uuids"),
        gpu_memory_before=_parse_memory(fields.optional("memory_before", dict) or {}),
        gpu_share=fields.optional("gpu_share", int),
        allowed=fields.texts("allowed"),
        api_key=fields.optional("api_key", str),
        slots=fields.number("slots", 1) if fields.optional("slots", int) is not None else None,
        slots_from=fields.optional("slots_from", str) or "",
        shm=_parse_shm(fields.optional("shm", list) or []),
        tmp_dir=fields.optional("tmp_dir", str),
        log_path=fields.optional("log_path", str),
        engine_version=fields.optional("engine_version", str),
        launched_at=fields.get("launched_at", float),
        ready_at=fields.optional("ready_at", float),
        failures=fields.number("failures", 0),
        restarts=fields.number("restarts", 0),
    )


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parse_memory(values: Mapping[Any, Any]) -> dict[str, int | None]:
    for key, value in values.items():
        if not (_is_text(key) and (value is None or (type(value) is int and 0 <= value < NUMBER_LIMIT))):
            raise ValueError("memory_before is not a table of numbers")
    return dict(values)


def _parse_shm(values: list[Any]) -> tuple[ShmFile, ...]:
    files = []
    for value in values:
        if not (isinstance(value, list) and len(value) == 2 and type(value[0]) is str and type(value[1]) is int):
            raise ValueError("shm is not a list of names and inodes")
        if not _is_text(value[0]):
            raise ValueError("a name in shm is no text that can be used")
        files.append(ShmFile(value[0], value[1]))
    return tuple(files)


@frozen
class BadRecord:
    """A file that is no record; it was moved to `kept_as`, or stayed where it was when that was impossible."""

    path: str
    why: str
    kept_as: str | None


@frozen
class Loaded:
    records: tuple[ShardRecord, ...]
    bad: tuple[BadRecord, ...]


class RecordStore:
    """The folder `shards` of a state directory: `NAME.REPLICA.json`, 0600 in 0700, since a record may hold a key."""

    def __init__(self, state_dir: str) -> None:
        self.folder = os.path.join(state_dir, "shards")

    def path(self, id_: ShardId) -> str:
        # A name may end in `.1`, but the part behind its last dot is always the replica: no two share a file.
        return os.path.join(self.folder, f"{id_.name}.{id_.replica}.json")

    def save(self, record: ShardRecord) -> None:
        """On return it is on disk. Raises OSError (disk full, read-only): the engine must not run then."""
        write_durably(self.path(record.id), json.dumps(record.as_json(), indent=1).encode())

    def delete(self, id_: ShardId) -> None:
        """Raises OSError; a record that is not there is fine."""
        remove_durably(self.path(id_))

    def load_all(self) -> Loaded:
        """Every record. What is none is moved aside and reported. Raises OSError when the folder cannot be read."""
        records: list[ShardRecord] = []
        bad: list[BadRecord] = []
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return Loaded((), ())
        for name in names:
            path = os.path.join(self.folder, name)
            if not name.endswith(".json"):
                continue
            try:
                records.append(self._read(path))
            except (OSError, ValueError) as error:
                bad.append(BadRecord(path, str(error), _move_aside(path)))
        return Loaded(tuple(records), tuple(bad))

    def read_all(self) -> tuple[ShardRecord, ...]:
        """Every record that can be read, for who only looks: nothing is moved, what is no record is left out.

        Raises OSError when the folder cannot be read.
        """
        records = []
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return ()
        for name in names:
            if name.endswith(".json"):
                with contextlib.suppress(OSError, ValueError):
                    records.append(self._read(os.path.join(self.folder, name)))
        return tuple(records)

    def any_set_aside(self) -> bool:
        """Whether there are files that were meant to be records, now or at an earlier start, or none can be seen."""
        try:
            return any(name.endswith(ASIDE) for name in os.listdir(self.folder))
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def _read(self, path: str) -> ShardRecord:
        record = parse_record(read_bounded(path, RECORD_LIMIT))
        if self.path(record.id) != path:
            raise ValueError(f"it speaks of shard {record.id}")
        return record


def _move_aside(path: str) -> str | None:
    aside = path + ASIDE
    try:
        os.rename(path, aside)
    except OSError:
        return None
    return aside


class WishStore:
    """`wishes.json`: what operators asked for, and what is unloaded or asleep until a request comes; each holds until
    the next wish or the next boot."""

    def __init__(self, state_dir: str, *, boot: Callable[[], str] = boot_id) -> None:
        self._path = os.path.join(state_dir, "wishes.json")
        self._boot = boot

    def load(self) -> dict[ShardId, Intent]:
        """Empty after a reboot and for a file that cannot be read: then the configuration alone speaks."""
        try:
            fields = _Fields(_parse_json(read_bounded(self._path, RECORD_LIMIT)))
            if fields.get("boot_id", str) != self._boot():
                return {}
            wishes: dict[ShardId, Intent] = {}
            for entry in fields.get("wishes", list):
                wish = _Fields(entry)
                id_ = ShardId(wish.get("shard", str), wish.number("replica", 0))
                # Those of older versions were all of operators.
                operator = wish.optional("operator", bool) is not False
                wishes[id_] = Intent(
                    Wish(wish.get("wish", str)), by=wish.get("by", str), at=wish.get("at", float), operator=operator
                )
        except (OSError, ValueError):
            return {}
        return wishes

    def save(self, wishes: Mapping[ShardId, Intent]) -> None:
        """Keep those that hold over a restart. Raises OSError."""
        document = {
            "boot_id": self._boot(),
            "wishes": [
                {
                    "shard": id_.name,
                    "replica": id_.replica,
                    "wish": intent.wish.value,
                    "by": intent.by,
                    "at": intent.at,
                    "operator": intent.operator,
                }
                for id_, intent in sorted(wishes.items())
                if intent.is_kept
            ],
        }
        write_durably(self._path, json.dumps(document, indent=1).encode())


class LoadTimes:
    """`load-times.json`: seconds that each shard's last load took, for the estimate of the next."""

    MAX_AGE = 90 * 86400.0
    """Seconds after which a shard that never came back is dropped."""

    def __init__(self, state_dir: str, *, now: Callable[[], float] = time.time) -> None:
        self._path = os.path.join(state_dir, "load-times.json")
        self._now = now
        self._times: dict[str, tuple[float, float]] = {}
        with contextlib.suppress(OSError, ValueError):
            document = _parse_json(read_bounded(self._path, RECORD_LIMIT))
            for name, entry in (document if isinstance(document, dict) else {}).items():
                if isinstance(entry, list) and len(entry) == 2 and all(type(part) in (int, float) for part in entry):
                    self._times[name] = (_sane(entry[0]), _sane(entry[1]))

    def get(self, id_: ShardId) -> float | None:
        entry = self._times.get(str(id_))
        return entry[0] if entry is not None else None

    def put(self, id_: ShardId, seconds: float) -> None:
        """Raises OSError when it cannot be kept on disk; it is known until the end of this process all the same."""
        now = self._now()
        self._times[str(id_)] = (round(seconds, 1), now)
        self._times = {name: entry for name, entry in self._times.items() if now - entry[1] < self.MAX_AGE}
        write_durably(self._path, json.dumps(self._times, indent=1).encode())
