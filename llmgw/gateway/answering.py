"""The way of one request, in straight lines: let in, read, queued, sent to an engine, concluded, recorded."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from llmgw.gateway import exchange as exchanges
from llmgw.gateway.admission.core import Granted, Offer, Refused
from llmgw.gateway.admission.desk import Desk
from llmgw.gateway.client import Client, Request
from llmgw.gateway.exchange import ChunkObserver, Exchange
from llmgw.gateway.in_force import InForce
from llmgw.gateway.own_pages import OwnPages
from llmgw.gateway.reading import answers, body, paths
from llmgw.gateway.reading.answers import Pair, Refusal
from llmgw.gateway.reading.head import Head, check, upstream_head
from llmgw.gateway.reading.identity import Caller
from llmgw.gateway.reading.paths import Kind, Route
from llmgw.gateway.reading.usage import read_usage
from llmgw.gateway.record import RequestRecord
from llmgw.gateway.routing.names import near_names, usable_names
from llmgw.gateway.routing.policies import NO_HINT, Hint
from llmgw.gateway.routing.prefix import block_hashes
from llmgw.gateway.routing.table import Endpoint
from llmgw.gateway.upstream import Upstream, host_header

log = logging.getLogger(__name__)

CONNECT, DIED, ENDPOINT_GONE = "connect", "died", "endpoint-gone"
"""How a try ended, beside the words of `exchange`: no connection; one that was fresh closed without a byte; the
endpoint had left the table."""

AGAIN = frozenset({CONNECT, exchanges.UPSTREAM, ENDPOINT_GONE})
"""After these the engine cannot have begun, and another one may be asked."""


ERROR_EVENT = re.compile(rb'(?:^|\n)data: ?\{"(?:error|object": ?"error)"')
"""An engine that fails in the middle of a stream says so in an event and then ends it well-formed."""

_OPERATORS = frozenset({Kind.METRICS, Kind.UI_STATUS, Kind.UPSTREAM})
"""What they alone may see. The page itself is open: it holds nothing, and it is where a browser asks for the key."""

_EXPOSED = (b"access-control-expose-headers", b"x-request-id, x-llmgw-reason, retry-after, retry-after-ms")


class Passed:
    """What was found out about a request whose head is good."""

    __slots__ = ("caller", "route")

    def __init__(self, route: Route, caller: Caller | None) -> None:
        self.route = route
        self.caller = caller


class Observer(Protocol):
    """Who counts."""

    def series(self, model: str, band: str) -> ChunkObserver: ...
    def ended(self, record: RequestRecord) -> None: ...


class _Uncounted:
    def chunk(self, gap: float) -> None:
        """Nobody's tokens: an engine's own page, or a gateway that does not count."""


_UNCOUNTED = _Uncounted()


class Silent:
    """Neither metrics nor access log."""

    def series(self, model: str, band: str) -> ChunkObserver:
        return _UNCOUNTED

    def ended(self, record: RequestRecord) -> None:
        """Nobody wants to know."""


class Answering:
    """Answers the requests of every connection. `now` is a monotonic clock in seconds, `new_id` makes request ids."""

    def __init__(
        self,
        in_force: InForce,
        *,
        desk: Desk,
        observer: Observer,
        own_pages: OwnPages,
        now: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._in_force = in_force
        self._desk = desk
        self._observer = observer
        self._own_pages = own_pages
        self._now = now
        self._new_id = new_id
        self._tickets = 0

    # -- as soon as a head is there, before its body is read ---------------------------------------------

    def judge(self, head: Head, peer: str) -> Refusal | Passed:
        """Whether a request is let in. Called by the connection, synchronously."""
        in_force = self._in_force
        refusal = check(head, in_force.limits)
        if refusal is not None:
            return refusal
        route = paths.classify(head.method, head.target)
        kind = route.kind
        if kind is Kind.INFERENCE or kind is Kind.MODELS or kind is Kind.NO_MODEL:
            if not in_force.takes_requests:
                return answers.draining()
            found = in_force.doors.caller(head.headers, peer)
            return found if isinstance(found, Refusal) else Passed(route, found)
        if kind in _OPERATORS:
            found = in_force.doors.operator(head.headers, peer)
            return found if isinstance(found, Refusal) else Passed(route, found)
        return Passed(route, None)

    # -- one request -------------------------------------------------------------------------------------

    async def answer(self, client: Client, request: Request) -> bool:
        """Answer one request. True when the connection may carry another one."""
        head = request.head
        if self._in_force.is_draining:
            head.keep_alive = False
        record = RequestRecord(request.arrived)
        record.method = head.method.decode("ascii", "replace")
        record.peer = client.peer
        record.bytes_in = request.size
        record.request_id = answers.request_id(head.headers) or self._new_id()
        try:
            if request.refusal is not None:
                return self._refuse(client, request, record, request.refusal)
            passed: Passed = request.passed
            route, caller = passed.route, passed.caller
            record.path = route.name
            if caller is not None:
                record.tenant, record.band = caller.tenant, caller.band
                record.band_clamped = caller.band_clamped
            if route.kind is Kind.INFERENCE:
                return await self._infer(client, request, record, passed)
            if route.kind is Kind.UPSTREAM:
                return await self._look(client, request, record, route)
            return await self._answer_itself(client, request, record, passed)
        except Exception:
            record.code, record.reason = record.code or 500, "internal-error"
            if not client.sent:
                self._refuse(client, request, record, answers.internal_error())
            log.exception("an error in llmgw itself ended the request %s", record.request_id)
            return False
        finally:
            record.ended = self._now()
            if client.gone and not record.code:
                # Nothing was answered yet. One that leaves right behind the last byte has had its answer.
                record.code, record.reason = 499, "client-gone"
            record.bytes_out = client.sent
            self._observer.ended(record)

    def _refuse(self, client: Client, request: Request, record: RequestRecord, refusal: Refusal) -> bool:
        record.code, record.reason = refusal.status, refusal.code
        head = request.head
        keep = head.keep_alive and not refusal.close
        client.write(
            answers.render(
                refusal,
                request_id=record.request_id,
                keep_alive=keep,
                head_only=head.method == b"HEAD",
                extra_headers=self._cors(head),
            )
        )
        return keep

    def _cors(self, head: Head) -> tuple[Pair, ...]:
        """The lines that let a page of another origin read the answer."""
        origins = self._in_force.gateway.cors_origins
        if not origins:
            return ()
        origin = head.index.get(b"origin")
        if origin is None or not ("*" in origins or origin.decode("latin-1") in origins):
            return ()
        return ((b"access-control-allow-origin", origin), (b"vary", b"origin"), _EXPOSED)

    # -- a request for a model ---------------------------------------------------------------------------

    async def _infer(self, client: Client, request: Request, record: RequestRecord, passed: Passed) -> bool:
        caller = passed.caller
        assert caller is not None
        asked = body.read(request.parts, request.head.content_type)
        if isinstance(asked, Refusal):
            if asked.code == "missing-model" and not passed.route.is_known:
                asked = answers.no_model()
            return self._refuse(client, request, record, asked)
        record.stream = asked.stream
        model = self._in_force.table.models.get(asked.model)
        if model is None or not caller.may_use(model.name, model.aliases):
            return self._refuse(client, request, record, self._no_such_model(asked.model, model is not None, caller))
        record.model = model.name
        if not model.endpoints:
            refusal = self._in_force.hopeless(model)
            if refusal is not None:
                return self._refuse(client, request, record, refusal)
        self._tickets += 1
        ticket = self._tickets
        offer = Offer(
            ticket=ticket,
            model=model.name,
            tenant=caller.tenant,
            band=caller.band,
            estimate=asked.estimate,
            hint=self._hint(request),
            arrived=record.arrived,
            wait=None if model.endpoints else self._in_force.gateway.load_wait,
        )
        outcome = self._desk.offer_nowait(offer)
        if outcome is None:
            record.position = self._desk.position(ticket)
            client.on_gone = partial(self._desk.leave, ticket)
            outcome = await self._desk.wait(ticket)
            client.on_gone = None
            if outcome is None:
                return False
        if isinstance(outcome, Refused):
            return self._refuse(client, request, record, answers.from_admission(outcome))
        record.granted = self._now()
        try:
            return await self._forward(client, request, record, asked, outcome)
        finally:
            self._desk.finish(ticket, record.prompt_tokens, record.completion_tokens)

    def _no_such_model(self, asked: str, exists: bool, caller: Caller) -> Refusal:
        table = self._in_force.table
        near = near_names(asked, usable_names(table, caller.models))
        if exists:
            return answers.model_not_allowed(asked, caller.tenant, near)
        return answers.unknown_model(asked, near)

    def _hint(self, request: Request) -> Hint:
        routing = self._in_force.gateway.routing
        if routing == "prefix":
            return Hint(prefix=block_hashes(request.parts))
        if routing == "consistent_hashing":
            session = request.head.index.get(b"x-session-id")
            return NO_HINT if session is None else Hint(session=session.decode("latin-1"))
        return NO_HINT

    async def _forward(
        self, client: Client, request: Request, record: RequestRecord, asked: body.Asked, granted: Granted
    ) -> bool:
        """Send it to the engine it was given; once more to another one where the first cannot have begun."""
        series = self._observer.series(record.model, record.band)
        head = request.head
        is_fresh = False
        while True:
            endpoint = self._in_force.table.endpoints.get(granted.key)
            if endpoint is None:
                result, keep = ENDPOINT_GONE, False
            else:
                parts = body.rename(request.parts, asked, endpoint.model)
                sent = upstream_head(
                    head,
                    path=head.target,
                    host=host_header(endpoint.address),
                    content_length=sum(map(len, parts)),
                    api_key=endpoint.api_key.reveal() if endpoint.api_key is not None else None,
                    request_id=record.request_id,
                )
                result, keep = await self._try(client, request, record, endpoint, [sent, *parts], series, is_fresh)
            if result not in AGAIN or record.retried or client.sent or client.gone:
                break
            record.retried = True
            again = self._desk.retry(granted.ticket, granted.key)
            if isinstance(again, Granted):
                granted = again
            elif result != exchanges.UPSTREAM:
                break
            # No other one is free, but the engine only closed a connection that it had kept: a fresh one will do.
            is_fresh = True
        limit = endpoint.first_byte_timeout if endpoint is not None else None
        return self._conclude(client, request, record, result, keep, limit)

    async def _try(
        self,
        client: Client,
        request: Request,
        record: RequestRecord,
        endpoint: Endpoint,
        parts: Sequence[bytes],
        series: ChunkObserver,
        is_fresh: bool = False,
    ) -> tuple[str, bool]:
        """One try on one endpoint, on a fresh connection where the kept ones are not to be trusted: how it ended, and
        whether the client's connection may carry another request.
        """
        head, key, in_force = request.head, endpoint.key, self._in_force
        record.shard = endpoint.name
        pool = in_force.pool(endpoint)
        result = CONNECT
        upstream: Upstream | None = None
        in_force.began(key)
        try:
            upstream = None if is_fresh else pool.take()
            if upstream is None:
                try:
                    upstream = await pool.connect(in_force.gateway.connect_timeout)
                except OSError as error:
                    in_force.tell_unreachable(endpoint, error)
                    return result, False
                if pool.is_closed:
                    # It left while the connection was made.
                    result = ENDPOINT_GONE
                    return result, False
            exchange = Exchange(
                client,
                upstream,
                is_head=head.method == b"HEAD",
                http10=head.version == "1.0",
                keep_alive=head.keep_alive and not in_force.is_draining,
                request_id=record.request_id,
                extra_headers=self._cors(head),
                first_byte_timeout=endpoint.first_byte_timeout,
                chunk_timeout=endpoint.chunk_timeout,
                observer=series,
                now=self._now,
            )
            try:
                exchange.send(parts)
                result = await exchange.wait()
            finally:
                exchange.unlink()
            if result == exchanges.UPSTREAM and not upstream.reused:
                result = DIED
            record.first_byte = exchange.first_byte
            record.chunks = exchange.chunks
            record.code = exchange.status
            tail = exchange.previous + exchange.last
            record.prompt_tokens, record.completion_tokens = read_usage(tail, exchange.sse)
            if result == exchanges.OK and exchange.sse and ERROR_EVENT.search(tail):
                record.reason = "error-event"
            if exchange.is_reusable:
                pool.put(upstream)
                upstream = None
            return result, exchange.keep_client
        finally:
            if upstream is not None:
                upstream.close()
            in_force.ended(key)
            if result != exchanges.GONE:
                in_force.judge(endpoint, result == exchanges.OK and record.code < 500 and not record.reason)

    def _conclude(
        self, client: Client, request: Request, record: RequestRecord, result: str, keep: bool, limit: float | None
    ) -> bool:
        """Tell the client how it ended, as far as an answer is still possible; never a made-up end."""
        if result == exchanges.OK:
            return keep
        if result == exchanges.GONE or client.gone:
            record.code, record.reason = 499, "client-gone"
            return False
        model = record.model
        if client.sent:
            record.reason = {exchanges.CHUNK: "chunk-timeout", exchanges.BAD: "bad-answer"}.get(result, "engine-died")
            client.truncate()
            return False
        if result == exchanges.FIRST_BYTE:
            refusal = answers.first_byte_timeout(model, limit or 0.0)
        elif result == exchanges.BAD:
            refusal = answers.bad_answer(model)
        elif result == CONNECT:
            refusal = answers.engine_unreachable(model)
        else:
            refusal = answers.engine_died(model)
        return self._refuse(client, request, record, refusal)

    # -- everything else ---------------------------------------------------------------------------------

    async def _look(self, client: Client, request: Request, record: RequestRecord, route: Route) -> bool:
        """An operator's look at one engine's own page."""
        endpoints = self._in_force.table.endpoints.values()
        endpoint = next((each for each in endpoints if route.shard in (each.name, str(each.id))), None)
        if endpoint is None:
            return self._refuse(client, request, record, answers.unknown_shard(route.shard))
        record.model = endpoint.model
        sent = upstream_head(
            request.head,
            path=route.what.encode(),
            host=host_header(endpoint.address),
            content_length=None,
            api_key=endpoint.api_key.reveal() if endpoint.api_key is not None else None,
            request_id=record.request_id,
        )
        result, keep = await self._try(client, request, record, endpoint, [sent], _UNCOUNTED)
        return self._conclude(client, request, record, result, keep, endpoint.first_byte_timeout)

    async def _answer_itself(self, client: Client, request: Request, record: RequestRecord, passed: Passed) -> bool:
        head = request.head
        if passed.route.kind is Kind.OPTIONS:
            return self._preflight(client, request, record)
        page = await self._own_pages.answer(passed.route, passed.caller)
        if isinstance(page, Refusal):
            return self._refuse(client, request, record, page)
        record.code = page.status
        client.write(
            answers.respond(
                page.status,
                page.content_type,
                page.body,
                request_id=record.request_id,
                keep_alive=head.keep_alive,
                head_only=head.method == b"HEAD",
                extra_headers=(*page.headers, *self._cors(head)),
            )
        )
        return head.keep_alive

    def _preflight(self, client: Client, request: Request, record: RequestRecord) -> bool:
        """A browser asks whether a page may ask. Without an allowed origin it gets no word that says so."""
        head = request.head
        allowed = self._cors(head)
        record.code = 204
        wished = head.index.get(b"access-control-request-headers")
        extra: tuple[Pair, ...] = ((b"allow", b"GET, HEAD, POST, OPTIONS"), *allowed)
        if allowed:
            extra += ((b"access-control-allow-methods", b"GET, POST, OPTIONS"), (b"access-control-max-age", b"600"))
            if wished is not None:
                extra += ((b"access-control-allow-headers", wished),)
        client.write(
            answers.respond(
                204,
                b"",
                b"",
                request_id=record.request_id,
                keep_alive=head.keep_alive,
                head_only=False,
                extra_headers=extra,
            )
        )
        return head.keep_alive
