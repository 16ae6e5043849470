"""Asks an engine its questions. No answer, whatever its form, raises: it becomes an `Answer`.

httpx with `trust_env=False` (a proxy of the environment must never answer for a loopback engine), one client per
engine (requests to a hung engine must not use up the places of another), no TLS context at all (building one per
client costs seconds of CPU for a hundred engines; engines are asked in clear text on loopback or the node's own
network).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx
import trio

from llmgw.domain.shard import Endpoint, Secret, UnixEndpoint
from llmgw.supervisor.readiness import Answer, Answered, Listed, ModelsAnswer, Refused, TimedOut, Unknown

BODY_MAX = 1 << 20
"""Bytes of an answer that are read at most: a list of models or a metrics page is far smaller."""

WARMUP_MAX = 3600.0
"""Seconds for the one token of a warm-up: an upper bound only, the limits of loading end it earlier."""

MODELS_MAX = 10_000
"""Entries of a model list that are looked at."""


class Probes:
    """The questions of one engine. One at a time; the caller sees to that."""

    def __init__(self, endpoint: Endpoint, key: Secret | None = None) -> None:
        self._path = endpoint.path if isinstance(endpoint, UnixEndpoint) else None
        headers = {"User-Agent": "llmgw-probe", "Accept": "*/*", "Accept-Encoding": "identity"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key.reveal()}"
        transport = httpx.AsyncHTTPTransport(
            verify=False,
            trust_env=False,
            uds=self._path,
            limits=httpx.Limits(max_connections=4, max_keepalive_connections=1, keepalive_expiry=60),
        )
        # The time limit is ours, over the whole answer: httpx's own would let an endless body through.
        self._client = httpx.AsyncClient(
            base_url=endpoint.base_url,
            headers=headers,
            transport=transport,
            trust_env=False,
            timeout=None,
            follow_redirects=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with trio.move_on_after(1, shield=True):
            await self._client.aclose()

    async def ask_health(self, path: str, timeout: float) -> Answer:
        """The first question: is the server up?"""
        return await self._ask("GET", path, timeout)

    async def ask_models(self, path: str, timeout: float) -> ModelsAnswer:
        """The second question: which models are loaded?"""
        answer = await self._ask("GET", path, timeout)
        if isinstance(answer, Answered) and answer.is_yes:
            names = listed_names(answer.body)
            return Listed(names) if names is not None else Unknown("no list of models in the answer")
        return answer

    async def ask_metrics(self, timeout: float) -> str | None:
        """The text of /metrics, or None when there is none to be had now."""
        answer = await self._ask("GET", "/metrics", timeout)
        return answer.body if isinstance(answer, Answered) and answer.is_yes else None

    async def ask_slots(self, path: str, timeout: float) -> Answer:
        """The engine's page about itself, on which its limit of requests stands."""
        return await self._ask("GET", path, timeout)

    async def tell(self, method: str, path: str, timeout: float, body: Mapping[str, Any] | None = None) -> Answer:
        """One of its own control calls."""
        return await self._ask(method, path, timeout, body)

    async def ask_is_sleeping(self, path: str, timeout: float) -> bool:
        """Whether it says that it sleeps; without a clear yes it does not."""
        answer = await self._ask("GET", path, timeout)
        if not isinstance(answer, Answered) or not answer.is_yes:
            return False
        try:
            document = json.loads(answer.body)
        except (ValueError, RecursionError):
            return False
        return isinstance(document, dict) and document.get("is_sleeping") is True

    async def ask_one_token(self, model: str) -> Answer:
        """A request for one token. The limits of loading hold for it too."""
        body = {"model": model, "prompt": "hello", "max_tokens": 1, "temperature": 0}
        return await self._ask("POST", "/v1/completions", WARMUP_MAX, body)

    async def _ask(self, method: str, path: str, timeout: float, body: Mapping[str, Any] | None = None) -> Answer:
        with trio.move_on_after(timeout) as limit:
            return await self._exchange(method, path, body)
        assert limit.cancelled_caught
        return TimedOut(timeout)

    async def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> Answer:
        try:
            async with self._client.stream(method, path, json=body) as response:
                read = bytearray()
                # Raw bytes: a small compressed answer must not unfold into a large one.
                async for chunk in response.aiter_raw():
                    read += chunk
                    if len(read) > BODY_MAX:
                        return Unknown(f"the answer to {path} is larger than {BODY_MAX >> 20} MiB")
                return Answered(response.status_code, read.decode("utf-8", "replace"))
        except httpx.ConnectError as error:
            if not is_refusal(error):
                return Unknown(f"cannot connect: {_cause(error)}")
            return Refused(absent=self._path is not None and not await trio.Path(self._path).exists())
        except httpx.TimeoutException:
            return TimedOut(0.0)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
            return Unknown(_short(error))


REFUSALS = (errno.ECONNREFUSED, errno.ENOENT)
"""Nobody listens, or the socket's file is missing. Whatever else keeps us from connecting (no descriptors left, no
rights) tells about us and not about the engine, which would be ended for it."""


def is_refusal(error: BaseException) -> bool:
    """Whether every attempt to connect was refused: httpx has one exception for that and for our own troubles."""
    roots = tuple(_roots(error))
    return bool(roots) and all(isinstance(root, OSError) and root.errno in REFUSALS for root in roots)


def _roots(error: BaseException) -> Iterator[BaseException]:
    """What lies at the bottom of an exception, and each one of a group (an address each). The context is followed
    too, since httpcore takes the cause away.
    """
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _roots(inner)
    elif (below := error.__cause__ or error.__context__) is not None:
        yield from _roots(below)
    else:
        yield error


def _cause(error: BaseException) -> str:
    root = next(_roots(error))
    return (root.strerror if isinstance(root, OSError) else None) or str(root) or type(root).__name__


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (text[:120] or type(error).__name__).rstrip(".")


def listed_names(body: str) -> tuple[str, ...] | None:
    """The names in an OpenAI list of models; None when the body is no such list."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    entries = document.get("data") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        return None
    names: list[str] = []
    for entry in entries[:MODELS_MAX]:
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            names.append(entry["id"])
            aliases = entry.get("aliases")
            if isinstance(aliases, list):
                names.extend(alias for alias in aliases if isinstance(alias, str))
    return tuple(names)
