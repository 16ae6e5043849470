"""Routes of the control socket: questions are answered from the board's snapshot, wishes go through `Board.ask`.

Called by `control.server`; knows the daemon only as `Services`, so that it can be served from anything with a board.
"""

from __future__ import annotations

import json
import pwd
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import trio
from attrs import frozen

from llmgw import __version__
from llmgw.board import Board
from llmgw.control import wire
from llmgw.control.openapi import describe_api
from llmgw.control.operations import HELD, REMEMBERED, VERBS, Operation, State, why_not
from llmgw.domain.problem import LlmgwError, NotPossible, Problem, UnknownShard, errors_of
from llmgw.domain.shard import ShardId
from llmgw.domain.status import Snapshot
from llmgw.http.server import Peer, Reply, Request, Send, Stream, json_reply
from llmgw.metrics.exposition import CONTENT_TYPE

API = wire.API

WAIT_MAX = 24 * 3600.0
"""Seconds that `?wait=` may ask for; the client's own limit is the one that matters."""
NAME_LOOKUP = 0.5
"""Seconds for the login name of a uid: the name service may be a directory on another machine."""
LINES_PER_PIECE = 500
"""Lines put into one piece of a stream, so that one reader cannot hold the loop for long."""
TAIL_DEFAULT = 100


class LogSource(Protocol):
    """One instance's output, as the follower keeps it."""

    @property
    def sequence(self) -> int: ...
    @property
    def skipped(self) -> int: ...
    @property
    def last_shown(self) -> str: ...
    def read(self, after: int) -> tuple[int, Sequence[wire.Line]]: ...
    async def wait_newer(self, after: int) -> None:
        """Return when there is a line above `after`."""


@frozen
class ReloadAnswer:
    """`plan`: what is carried out (or would be); None: refused. `problems` include warnings."""

    plan: Mapping[str, Any] | None
    problems: tuple[Problem, ...] = ()


class Services(Protocol):
    """What the daemon offers."""

    @property
    def board(self) -> Board: ...
    def header(self) -> dict[str, Any]:
        """The node's part of the status: everything but `api`, `now`, `revision` and `shards`."""

    def find(self, name: str) -> tuple[ShardId, ...]:
        """Instances of a shard, or the one that is shown under this name; empty: none."""

    def tail(self, id_: ShardId) -> LogSource | None: ...
    def shm_bytes(self, id_: ShardId) -> int | None:
        """What its engine's files in /dev/shm take; None without an engine."""

    async def reload(self, by: str, *, dry_run: bool) -> ReloadAnswer: ...
    def config(self) -> dict[str, Any]:
        """The configuration in force, secrets masked."""

    async def inventory(self) -> dict[str, Any]: ...
    async def release_gpu(self, name: str, by: str) -> dict[str, Any]:
        """Give a GPU out again although its memory has not come back. Raises LlmgwError."""

    async def metrics(self) -> bytes:
        """The page of metrics, as text of `metrics.exposition.CONTENT_TYPE`."""

    async def upgrade(self, by: str) -> ReloadAnswer:
        """Check the file with the new code and go over to it; refused: nothing happens."""


class _Answer(Exception):
    """Ends a route with an error."""

    def __init__(self, status: int, code: str, message: str, hint: str | None = None, **more: object) -> None:
        super().__init__(message)
        self.reply = json_reply(status, wire.error(code, message, hint, **more))


def status_json(services: Services) -> wire.Json:
    """What `llmgw status` and the gateway's page show."""
    board = services.board
    snapshot = board.snapshot
    shards = _shards(services, sorted(snapshot.shards), snapshot)
    return wire.status(services.header(), snapshot, shards, board.now())


def _shards(services: Services, ids: Sequence[ShardId], snapshot: Snapshot) -> list[wire.Json]:
    return [
        wire.shard(id_, snapshot.shards[id_], _log_facts(services, id_), services.shm_bytes(id_))
        for id_ in ids
        if id_ in snapshot.shards
    ]


def _log_facts(services: Services, id_: ShardId) -> wire.Json:
    source = services.tail(id_)
    if source is None:
        return {"lines": 0, "skipped": 0, "last": ""}
    return {"lines": source.sequence, "skipped": source.skipped, "last": source.last_shown}


class Api:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._board = services.board
        self._operations: dict[str, Operation] = {}
        self._finished: dict[str, State] = {}
        self._count = 0
        self._names: dict[int, str] = {}
        # Of its own: lookups that hang must not take the threads that everything else needs.
        self._lookups = trio.CapacityLimiter(1)

    async def handle(self, request: Request) -> Reply | Stream:
        """Answer one request. Errors for people become their JSON; anything else is the server's to catch."""
        try:
            return await self._route(request)
        except _Answer as answer:
            return answer.reply
        except UnknownShard as error:
            return json_reply(404, wire.error(error.code, error.message, error.hint))
        except NotPossible as error:
            return json_reply(409, wire.error(error.code, error.message, error.hint))
        except LlmgwError as error:
            return json_reply(500, wire.error(error.code, error.message, error.hint))

    async def keep_operations(self) -> None:
        """Note how operations end: the board moves on, and a start that once was ready stays done."""
        revision = -1
        while True:
            snapshot = await self._board.wait_newer(revision)
            revision = snapshot.revision
            for id_ in [id_ for id_ in self._operations if id_ not in self._finished]:
                self._settle(self._operations[id_], snapshot)

    # -- routes ------------------------------------------------------------------------------------------

    async def _route(self, request: Request) -> Reply | Stream:
        method = "GET" if request.method == "HEAD" else request.method
        match (method, *request.segments):
            case ("GET", "v1", "ping"):
                return json_reply(200, {"api": API, "llmgw": __version__})
            case ("GET", "v1", "status"):
                return json_reply(200, status_json(self._services))
            case ("GET", "v1", "shards", name):
                return json_reply(200, self._shard(name))
            case ("GET", "v1", "shards", name, "logs"):
                return self._logs(name, request)
            case ("GET", "v1", "events"):
                return self._events(request)
            case ("GET", "v1", "inventory"):
                return json_reply(200, {"api": API, **await self._services.inventory()})
            case ("GET", "v1", "config"):
                return json_reply(200, {"api": API, **self._services.config()})
            case ("GET", "v1", "plan"):
                return _plan_reply(await self._services.reload("", dry_run=True))
            case ("GET", "v1", "openapi.json"):
                return json_reply(200, describe_api())
            case ("GET", "metrics"):
                return Reply(200, await self._services.metrics(), CONTENT_TYPE)
            case ("GET", "v1", "operations", id_):
                return self._operation(id_)
            case ("POST", "v1", "shards", name, verb) if verb in VERBS:
                return await self._wish(verb, name, request)
            case ("POST", "v1", "gpus", name, "release"):
                by = await self._asker(request.peer)
                return json_reply(200, {"api": API, **await self._services.release_gpu(name, by)})
            case ("POST", "v1", "reload"):
                dry_run = _flag(request, "dry_run")
                if not dry_run:
                    self._refuse_while_leaving("reload")
                return _plan_reply(await self._services.reload(await self._asker(request.peer), dry_run=dry_run))
            case ("POST", "v1", "upgrade"):
                self._refuse_while_leaving("upgrade")
                answer = await self._services.upgrade(await self._asker(request.peer))
                return _plan_reply(answer, accepted=202)
            case _:
                raise _no_route(request)

    def _shard(self, name: str) -> wire.Json:
        """One instance as such, several as a list: a name means all its replicas."""
        shards = _shards(self._services, self._find(name), self._board.snapshot)
        return {"api": API, "now": self._board.now(), "revision": self._board.snapshot.revision, "shards": shards}

    def _find(self, name: str) -> tuple[ShardId, ...]:
        ids = self._services.find(name)
        if not ids:
            known = sorted({id_.name for id_ in self._board.snapshot.shards})
            shown = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
            raise UnknownShard(f"there is no shard {name!r}", f"known: {shown}" if known else "the file has no shards")
        return ids

    # -- wishes ------------------------------------------------------------------------------------------

    async def _wish(self, verb: str, name: str, request: Request) -> Reply:
        self._refuse_while_leaving(f"{verb} {name}")
        wait = _seconds(request, "wait")
        by = await self._asker(request.peer)
        # No await from here to the wish: the answer must fit the board that it was made on.
        self._refuse_while_leaving(f"{verb} {name}")
        operation = self._running(verb, name) or self._ask(verb, name, by)
        if wait is None:
            return json_reply(202, self._operation_json(operation, self._board.snapshot))
        with trio.move_on_after(min(wait, WAIT_MAX)):
            await self._board.wait_shards(lambda snapshot: self._settle(operation, snapshot) != "running")
        answer = self._operation_json(operation, self._board.snapshot)
        match self._settle(operation, self._board.snapshot):
            case "done":
                return json_reply(200, answer)
            case "running":
                return json_reply(202, answer)
            case _:
                return json_reply(409, {**answer, **self._why_failed(operation)})

    def _ask(self, verb: str, name: str, by: str) -> Operation:
        ids = self._find(name)
        for id_ in ids:
            refusal = why_not(verb, self._board.snapshot.shards[id_])
            if refusal is not None:
                shown = self._board.snapshot.shards[id_].status.name
                raise NotPossible(f"cannot {verb} {shown}: {refusal[0]}", refusal[1])
        for id_ in ids:
            self._board.ask(id_, VERBS[verb], by, restart=verb == "restart", operator=verb in HELD)
        snapshot = self._board.snapshot
        self._count += 1
        before = {id_: snapshot.shards[id_] for id_ in ids}
        operation = Operation(f"op-{self._count}", verb, name, by, self._board.now(), before)
        self._operations[operation.id] = operation
        self._forget_old()
        return operation

    def _running(self, verb: str, name: str) -> Operation | None:
        """The same wish, made before and not fulfilled yet."""
        for operation in self._operations.values():
            same = operation.verb == verb and operation.name == name
            if same and self._settle(operation, self._board.snapshot) == "running":
                return operation
        return None

    def _settle(self, operation: Operation, snapshot: Snapshot) -> State:
        """The state of an operation; its end is final, whatever the board shows later."""
        known = self._finished.get(operation.id)
        if known is not None:
            return known
        state = operation.state(snapshot, self._board.gateway_load.value)
        if state != "running":
            self._finished[operation.id] = state
        return state

    def _forget_old(self) -> None:
        surplus = len(self._operations) - REMEMBERED
        for id_ in [id_ for id_ in self._operations if id_ in self._finished][: max(0, surplus)]:
            del self._operations[id_], self._finished[id_]

    def _operation(self, id_: str) -> Reply:
        operation = self._operations.get(id_)
        if operation is None:
            raise _Answer(404, "no-such-operation", f"there is no operation {id_!r}", "old ones are forgotten")
        return json_reply(200, self._operation_json(operation, self._board.snapshot))

    def _operation_json(self, operation: Operation, snapshot: Snapshot) -> wire.Json:
        return wire.operation(
            operation.id,
            operation.verb,
            operation.name,
            operation.by,
            operation.at,
            self._settle(operation, snapshot),
            _shards(self._services, tuple(operation.before), snapshot),
        )

    def _why_failed(self, operation: Operation) -> wire.Json:
        for id_, before in operation.before.items():
            now = self._board.snapshot.shards.get(id_)
            if now is None:
                return wire.error("conflict", f"cannot {operation.verb} {id_}: it was removed from the configuration")
            if now.intent.serial != before.intent.serial:
                text = f"cannot {operation.verb} {now.status.name}: {now.intent.wish} was wished by {now.intent.by}"
                return wire.error("conflict", text)
            reason = now.status.reason
            if reason is not None:
                text = f"cannot {operation.verb} {now.status.name}: {reason.cause}"
                return wire.error("failed", text, reason.remedy)
        return wire.error("failed", f"cannot {operation.verb} {operation.name}", "see: llmgw status")

    def _refuse_while_leaving(self, what: str) -> None:
        leaving = self._board.leaving.value
        if leaving is not None:
            raise _Answer(503, "leaving", f"cannot {what}: llmgw is on its way out ({leaving.why})")

    async def _asker(self, peer: Peer) -> str:
        """`uid 1000 (ada)`, for events and status."""
        if peer.uid not in self._names:
            name = ""
            with trio.move_on_after(NAME_LOOKUP):
                name = await trio.to_thread.run_sync(
                    _login_name, peer.uid, abandon_on_cancel=True, limiter=self._lookups
                )
            # No name may be a name service that is out of order for now: the next time it is asked again.
            if name and len(self._names) < 1000:
                self._names[peer.uid] = name
        known = self._names.get(peer.uid)
        return f"uid {peer.uid} ({known})" if known else f"uid {peer.uid}"

    # -- streams -----------------------------------------------------------------------------------------

    def _events(self, request: Request) -> Stream:
        after = self._first_event(request.query.get("since") or request.headers.get("last-event-id"))
        follow = _flag(request, "follow", default=True)
        server_sent = "text/event-stream" in request.headers.get("accept", "")

        async def write(send: Send) -> None:
            async with aclosing(self._event_batches(after, follow)) as batches:
                async for batch in batches:
                    await send(_as_events(batch) if server_sent else _as_lines(batch))

        if server_sent:
            return Stream(write, "text/event-stream", {"x-accel-buffering": "no"})
        return Stream(write)

    def _first_event(self, since: str | None) -> int:
        """`since` is a sequence number, or a time such as 5m before now."""
        if since is None or since == "":
            return 0
        if since.isdecimal():
            return int(since)
        earliest = self._board.now() - parse_seconds(since, "since")
        _, lines = self._board.history(0)
        return next((line.sequence - 1 for line in lines if line.at >= earliest), self._board.sequence)

    async def _event_batches(self, after: int, follow: bool) -> AsyncGenerator[list[wire.Json], None]:
        # What fell out before a reader that asks for all came is not its loss.
        known_loss = after > 0
        revision = -1
        while True:
            lost, lines = self._board.history(after)
            batch = [wire.dropped(lost)] if lost and known_loss else []
            known_loss = True
            batch += [wire.event(line) for line in lines]
            after = self._board.sequence
            for start in range(0, len(batch), LINES_PER_PIECE):
                yield batch[start : start + LINES_PER_PIECE]
            if not follow:
                return
            revision = (await self._board.wait_newer(revision)).revision

    def _logs(self, name: str, request: Request) -> Stream:
        ids = self._find(name)
        if len(ids) > 1:
            names = ", ".join(self._board.snapshot.shards[id_].status.name for id_ in ids)
            raise _Answer(400, "bad-request", f"{name} has several instances", f"ask for one of: {names}")
        source = self._services.tail(ids[0])
        if source is None:
            raise NotPossible(f"cannot show the log of {name}: it has none yet", f"start it with: llmgw start {name}")
        follow = _flag(request, "follow")
        since = request.query.get("since")
        tail = _number(request, "tail", 0 if since else TAIL_DEFAULT)
        earliest = self._board.now() - parse_seconds(since, "since") if since else None
        after = _number(request, "after", -1)

        async def write(send: Send) -> None:
            async with aclosing(_log_batches(source, tail, earliest, after, follow)) as batches:
                async for batch in batches:
                    await send(_as_lines(batch))

        return Stream(write)


async def _log_batches(
    source: LogSource, tail: int, earliest: float | None, after: int, follow: bool
) -> AsyncGenerator[list[wire.Json], None]:
    """`tail` newest lines (0: all) that arrived after `earliest`, or all above number `after`; then what follows."""
    lost, lines = source.read(max(0, after))
    if after < 0:
        lost = 0
        if earliest is not None:
            lines = [line for line in lines if line.at >= earliest]
        if tail:
            lines = lines[-tail:]
    position = source.sequence
    while True:
        batch = [wire.dropped(lost)] if lost else []
        batch += [wire.log_line(line) for line in lines]
        for start in range(0, len(batch), LINES_PER_PIECE):
            yield batch[start : start + LINES_PER_PIECE]
        if not follow:
            return
        await source.wait_newer(position)
        lost, lines = source.read(position)
        position = source.sequence


def _as_lines(batch: Sequence[wire.Json]) -> bytes:
    return b"".join(json.dumps(item, separators=(",", ":")).encode("ascii") + b"\n" for item in batch)


def _as_events(batch: Sequence[wire.Json]) -> bytes:
    """Server-sent events (the HTML standard, section 9.2); the number is the id, so that a browser resumes."""
    pieces = []
    for item in batch:
        if "seq" in item:
            pieces.append(f"id: {item['seq']}\n")
        pieces.append(f"data: {json.dumps(item, separators=(',', ':'))}\n\n")
    return "".join(pieces).encode("ascii")


def _plan_reply(answer: ReloadAnswer, accepted: int = 200) -> Reply:
    if answer.plan is None or errors_of(answer.problems):
        return json_reply(422, wire.refused_config(answer.problems))
    warnings = [problem.as_json() for problem in answer.problems]
    return json_reply(accepted, {"api": API, **answer.plan, "problems": warnings})


def _no_route(request: Request) -> _Answer:
    described = describe_api()["paths"]
    path = "/" + "/".join(request.segments)
    for template, methods in described.items():
        pattern = re.sub(r"\\\{[a-z]+\\\}", "[^/]+", re.escape(template))
        if re.fullmatch(pattern, request.path):
            allowed = ", ".join(sorted(method.upper() for method in methods))
            return _Answer(405, "method-not-allowed", f"{request.method} is not possible at {path}", f"use {allowed}")
    return _Answer(404, "not-found", f"there is nothing at {path}", "see: GET /v1/openapi.json")


def _login_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s|m|h|d|)")
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str, name: str) -> float:
    """`120s`, `5m`, `1h30m`, `90`: seconds. Raises _Answer (400)."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise _Answer(400, "bad-request", f"{name}={text[:40]!r} is no duration", "write it like 30s, 5m or 1h30m")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _seconds(request: Request, name: str) -> float | None:
    text = request.query.get(name)
    return None if text is None else parse_seconds(text, name)


def _flag(request: Request, name: str, *, default: bool = False) -> bool:
    """`?follow`, `?follow=true`, `?follow=0`."""
    text = request.query.get(name)
    if text is None:
        return default
    if text.lower() in ("", "1", "true", "yes"):
        return True
    if text.lower() in ("0", "false", "no"):
        return False
    raise _Answer(400, "bad-request", f"{name}={text[:40]!r} is neither true nor false")


def _number(request: Request, name: str, default: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if text == "all":
        return 0
    if not text.isdecimal() or len(text) > 12:
        raise _Answer(400, "bad-request", f"{name}={text[:40]!r} is no number")
    return int(text)
