"""Requests and streams in OpenAI's form, produced token by token in step with the imitated engine.

A step is asked of a `Ticker`, which answers when the engine's worker has made one: a stopped or dead worker
answers nothing, and then no token flows and no counter moves, exactly as with the real ones.
"""

import json
import time
from collections.abc import Callable

from llmgw.fake.http import Connection, Request
from llmgw.fake.knobs import Knobs
from llmgw.fake.loop import Loop

Ticker = Callable[[Callable[[], None]], None]
"""Called with what to do when one step has been made."""


def error_body(message: str, kind: str, code: int | str) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


class Generation:
    """One request that is running or waiting."""

    __slots__ = (
        "chat",
        "connection",
        "ident",
        "limit",
        "model",
        "produced",
        "prompt_tokens",
        "reason",
        "stream",
        "usage",
    )

    def __init__(self, connection: Connection, body: dict[str, object], chat: bool, model: str, tokens: int) -> None:
        self.connection = connection
        self.chat = chat
        self.model = model
        self.stream = body.get("stream") is True
        options = body.get("stream_options")
        self.usage = isinstance(options, dict) and options.get("include_usage") is True
        self.prompt_tokens = count_prompt_tokens(body)
        asked = body.get("max_tokens", body.get("max_completion_tokens"))
        wanted = asked if isinstance(asked, int) and asked > 0 else None
        if wanted is not None and (body.get("ignore_eos") is True or wanted <= tokens):
            self.limit, self.reason = wanted, "length"
        else:
            self.limit, self.reason = tokens, "stop"
        self.produced = 0
        self.ident = ("chatcmpl-" if chat else "cmpl-") + format(time.monotonic_ns() & 0xFFFFFFFFFFFF, "x")

    def body(self, piece: str | None, finish: str | None) -> dict[str, object]:
        """One chunk of a stream."""
        choice: dict[str, object] = {"index": 0, "finish_reason": finish}
        if not self.chat:
            choice["text"] = piece or ""
        elif self.produced == 1 and piece is not None:
            choice["delta"] = {"role": "assistant", "content": piece}
        else:
            choice["delta"] = {} if piece is None else {"content": piece}
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {"id": self.ident, "object": kind, "created": int(time.time()), "model": self.model, "choices": [choice]}

    def whole(self, finish: str) -> dict[str, object]:
        """The answer without streaming."""
        text = "".join(word(number) for number in range(1, self.produced + 1))
        choice: dict[str, object] = {"index": 0, "finish_reason": finish}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return {
            "id": self.ident,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice],
            "usage": self.usage_body(),
        }

    def usage_body(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.produced,
            "total_tokens": self.prompt_tokens + self.produced,
        }


def word(number: int) -> str:
    """The text of token `number` of any answer, so that a test can see a missing or doubled one."""
    return f"word{number} "


def count_prompt_tokens(body: dict[str, object]) -> int:
    """One token per word."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return len(prompt.split())
    messages = body.get("messages")
    total = 0
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            total += len(content.split())
    return total


class Counters:
    """What /metrics reports; moves only when something really happens."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.steps = 0
        self.finished = 0
        self.aborted = 0
        self.rejected = 0


class Completions:
    """All requests of one engine."""

    def __init__(
        self,
        loop: Loop,
        knobs: Knobs,
        ticker: Ticker,
        *,
        names: list[str],
        max_model_len: int,
        max_running: int = 256,
        max_waiting: int | None = None,
        any_model: bool = False,
    ) -> None:
        self._loop = loop
        self._knobs = knobs
        self._ticker = ticker
        self._names = names
        self._max_model_len = max_model_len
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._any_model = any_model
        self.running: list[Generation] = []
        self.waiting: list[Generation] = []
        self.counters = Counters()
        self.on_idle: Callable[[], None] | None = None
        """Called whenever the last request has gone."""
        self.on_busy: Callable[[], None] | None = None
        """Called once when the next request begins, then forgotten."""
        self._stepping = False
        self.frozen = False

    @property
    def open(self) -> int:
        return len(self.running) + len(self.waiting)

    def accept(self, request: Request, connection: Connection) -> None:
        """Begin a completion, or answer why not."""
        try:
            body = json.loads(request.body)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            connection.reply(400, error_body("the body is no JSON object", "BadRequestError", 400))
            return
        model = body.get("model", self._names[0])
        if not self._any_model and model not in self._names:
            message = f"The model `{model}` does not exist."
            connection.reply(404, error_body(message, "NotFoundError", 404))
            return
        tokens = min(self._knobs.tokens, self._max_model_len)
        generation = Generation(connection, body, "/chat/" in request.path, str(model), tokens)
        if generation.prompt_tokens + (generation.limit if generation.reason == "length" else 1) > self._max_model_len:
            message = f"This model's maximum context length is {self._max_model_len} tokens; the request has more."
            connection.reply(400, error_body(message, "BadRequestError", 400))
            return
        if len(self.running) >= self._max_running and (
            self._max_waiting is not None and len(self.waiting) >= self._max_waiting
        ):
            self.counters.rejected += 1
            connection.reply(503, error_body("The request queue is full.", "ServiceUnavailableError", 503))
            return
        connection.on_gone = lambda: self._forget(generation)
        if self._knobs.first_token_delay:
            self.waiting.append(generation)
            self._loop.call_later(self._knobs.first_token_delay, lambda: self._admit(generation))
        elif len(self.running) >= self._max_running:
            self.waiting.append(generation)
        else:
            self._begin(generation)

    def freeze(self) -> None:
        """No byte and no end for anybody from now on."""
        self.frozen = True
        for generation in self.running + self.waiting:
            generation.connection.freeze()

    def end_all(self, finish: str | None, error: str | None = None, *, done: bool = True) -> None:
        """End every open request now: with a finish reason, an error event, or by a cut connection."""
        everyone = self.running + self.waiting
        self.running, self.waiting = [], []
        for generation in everyone:
            connection = generation.connection
            connection.on_gone = None
            if finish is None and error is None:
                connection.abort()
            elif not generation.stream or generation.produced == 0:
                connection.reply(500, error_body(error or "the request was aborted", "InternalServerError", 500))
            else:
                if error is not None:
                    self._event(generation, json.loads(error_body(error, "InternalServerError", 500)))
                else:
                    self._event(generation, generation.body(None, finish))
                if done:
                    connection.send_chunk(b"data: [DONE]\n\n")
                connection.end_stream()
        self._check_idle()

    def _admit(self, generation: Generation) -> None:
        if generation in self.waiting and len(self.running) < self._max_running:
            self.waiting.remove(generation)
            self._begin(generation)

    def _begin(self, generation: Generation) -> None:
        self.running.append(generation)
        self.counters.prompt_tokens += generation.prompt_tokens
        busy, self.on_busy = self.on_busy, None
        if busy is not None:
            busy()
        if not self._stepping:
            self._stepping = True
            self._loop.call_later(self._knobs.token_interval, self._ask_for_step)

    def _ask_for_step(self) -> None:
        if self.frozen or not self.running:
            self._stepping = False
            return
        if self._knobs.stall_after is not None and self.counters.steps >= self._knobs.stall_after:
            return  # stepping for ever: nothing moves again
        self._ticker(self._made_step)

    def _made_step(self) -> None:
        if self.frozen:
            return
        self.counters.steps += 1
        for generation in list(self.running):
            self._token(generation)
        if self.running:
            self._loop.call_later(self._knobs.token_interval, self._ask_for_step)
        else:
            self._stepping = False

    def _token(self, generation: Generation) -> None:
        generation.produced += 1
        self.counters.generated_tokens += 1
        connection = generation.connection
        finish = generation.reason if generation.produced >= generation.limit else None
        if generation.stream:
            if generation.produced == 1:
                connection.start_stream()
            self._event(generation, generation.body(word(generation.produced), finish))
        if finish is None or connection.closed:
            return
        self.counters.finished += 1
        connection.on_gone = None
        if not generation.stream:
            connection.reply(200, json.dumps(generation.whole(finish)).encode())
        else:
            if generation.usage:
                last = generation.body(None, None)
                last["choices"], last["usage"] = [], generation.usage_body()
                self._event(generation, last)
            connection.send_chunk(b"data: [DONE]\n\n")
            connection.end_stream()
        self._forget(generation, aborted=False)

    def _event(self, generation: Generation, body: dict[str, object]) -> None:
        generation.connection.send_chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    def _forget(self, generation: Generation, *, aborted: bool = True) -> None:
        if generation in self.running:
            self.running.remove(generation)
        elif generation in self.waiting:
            self.waiting.remove(generation)
        else:
            return
        if aborted:
            self.counters.aborted += 1
        if self.waiting and not self._knobs.first_token_delay and len(self.running) < self._max_running:
            self._begin(self.waiting.pop(0))
        self._check_idle()

    def _check_idle(self) -> None:
        if not self.running and not self.waiting and self.on_idle is not None:
            self.on_idle()


def model_list(names: list[str], root: str, max_model_len: int, owner: str) -> bytes:
    """The body of /v1/models."""
    data = [
        {
            "id": name,
            "object": "model",
            "created": 1700000000,
            "owned_by": owner,
            "root": root,
            "parent": None,
            "max_model_len": max_model_len,
        }
        for name in names
    ]
    return json.dumps({"object": "list", "data": data}).encode()


def exposition(samples: list[tuple[str, str, str, float]]) -> bytes:
    """Prometheus text from (name, type, labels without braces, value)."""
    lines = []
    seen = set()
    for name, kind, labels, value in samples:
        family = name.removesuffix("_count").removesuffix("_sum") if kind == "histogram" else name
        if family not in seen:
            seen.add(family)
            lines += [f"# HELP {family} {family}", f"# TYPE {family} {kind}"]
        lines.append(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}")
    return ("\n".join(lines) + "\n").encode()
