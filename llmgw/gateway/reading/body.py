"""What a request's body asks for, and the one change that is ever made to it: the model's name, for an alias.

JSON is read with msgspec, which skips what is not named here at about 2 GB/s; forms (audio) with python-multipart's
push parser. Apart from the model nothing in a body is judged: that is the engine's business.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from llmgw.gateway.reading import answers
from llmgw.gateway.reading.answers import Refusal

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MODEL_MAX = 512
"""Characters of a model's name in a request; no engine has names of such a length."""

USER_MAX = 256
"""Characters of `user` that are kept."""

BYTES_PER_TOKEN = 4
"""For the estimate at admission; the engine's own count corrects it at the end."""

_TOKENS_MAX = 10_000_000
_FIELD_MAX = 4096
"""Bytes of a form field that are read."""
_BOUNDARY_MAX = 256
"""Bytes; RFC 2046 allows 70."""
_BOM = b"\xef\xbb\xbf"


class Asked:
    """What a body asks for."""

    __slots__ = ("_fields", "max_tokens", "model", "prompt_bytes", "stream", "user")

    def __init__(
        self,
        model: str,
        stream: bool,
        user: str | None,
        max_tokens: int | None,
        prompt_bytes: int,
        fields: tuple[tuple[int, int], ...] | None = None,
    ) -> None:
        self.model = model
        """As the client wrote it: a name or an alias."""
        self.stream = stream
        self.user = user
        self.max_tokens = max_tokens
        """The longest answer that is wanted, in tokens, whatever the field is called."""
        self.prompt_bytes = prompt_bytes
        self._fields = fields
        """Of a form: where the values of its fields `model` begin and end. None: the body is JSON."""

    @property
    def estimate(self) -> int:
        """Tokens of the prompt, roughly."""
        return self.prompt_bytes // BYTES_PER_TOKEN + 1


class _Fields(msgspec.Struct, gc=False):
    """Raw, so that a field of a type that nobody expected is no error here."""

    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Fields).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read(parts: Sequence[bytes], content_type: bytes) -> Asked | Refusal:
    """Read a whole body, which came in `parts`. Never raises."""
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    if content_type[:20].lower().lstrip().startswith(b"multipart/"):
        return _read_form(data, content_type)
    return _read_json(data)


def rename(parts: Sequence[bytes], asked: Asked, name: str) -> list[bytes]:
    """The body with `name` as its model; every other byte stays, and so do the parts that do not hold the name.

    Of a body that names thousands of models or nests that deeply only the values stay as they are.
    """
    if name == asked.model:
        return list(parts)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    value = name.encode() if asked._fields is not None else msgspec.json.encode(name)
    spans = asked._fields if asked._fields is not None else _find_models(data)
    if spans is None:
        return [_write_anew(data, name)]
    if len(spans) == 1:
        return _replace(parts, *spans[0], value)
    # Several: in one go, or a body full of them would be copied once for each.
    pieces: list[bytes] = []
    at = 0
    for start, end in spans:
        pieces += (data[at:start], value)
        at = end
    return [b"".join((*pieces, data[at:]))]


def _replace(parts: Sequence[bytes], start: int, end: int, value: bytes) -> list[bytes]:
    """Write `value` in the place of the bytes from `start` to `end` of all parts together."""
    result: list[bytes] = []
    offset = 0
    written = False
    for part in parts:
        stop = offset + len(part)
        if stop < start or offset > end or (written and offset >= end):
            result.append(part)
        else:
            kept = part[: max(start - offset, 0)] if offset < start else b""
            rest = part[end - offset :] if end < stop else b""
            result.append(kept + rest if written else kept + value + rest)
            written = True
        offset = stop
    return result


# -- JSON ------------------------------------------------------------------------------------------------


def _read_json(data: bytes) -> Asked | Refusal:
    try:
        fields = _decode(data[3:] if data[:3] == _BOM else data)
        raw = bytes(fields.model)
        if raw[:1] != b'"':
            found = "it has no model" if not raw else f"its model is no text but {_kind(raw)}"
            return answers.missing_model(found)
        model = _decode_text(raw)
        user = _decode_text(fields.user)[:USER_MAX] if bytes(fields.user)[:1] == b'"' else None
    except msgspec.ValidationError:
        return answers.bad_body("it is JSON, but no object")
    except (ValueError, RecursionError) as error:
        return answers.bad_body(f"it is no JSON that can be read: {_reason(error)}" if data else "it is empty")
    if not model or len(model) > MODEL_MAX:
        return answers.missing_model("its model is an empty text" if not model else "its model is far too long")
    tokens = fields.max_completion_tokens or fields.max_tokens or fields.max_output_tokens
    return Asked(model, bytes(fields.stream) == b"true", user, _tokens(bytes(tokens)), len(data))


def _kind(raw: bytes) -> str:
    """What a JSON value is, in words."""
    return {b"{": "an object", b"[": "a list", b"t": "a boolean", b"f": "a boolean", b"n": "null"}.get(
        raw[:1], "a number"
    )


def _reason(error: Exception) -> str:
    """The decoder's words: they name a position and at most one byte of the body."""
    return str(error).removeprefix("JSON is malformed: ")[:200] or type(error).__name__


def _tokens(raw: bytes) -> int | None:
    """A positive count of tokens that can be believed."""
    if not raw.isdigit() or len(raw) > len(str(_TOKENS_MAX)):
        return None
    return min(int(raw), _TOKENS_MAX) or None


_SPACE = rb"[ \t\r\n]*"
_STRING = rb'"(?:[^"]*+(?<!\\)|(?:[^"\\]++|\\.)*+)"'
"""Possessive, here and below: what could be taken back would be remembered, 2 GB of it for an image of 20 MB.
Its first half is the fast one, for what has no quotes inside.
"""
_KEY = rb'"(?:m|\\u006[dD])(?:o|\\u006[fF])(?:d|\\u0064)(?:e|\\u0065)(?:l|\\u006[cC])"'
"""The text `model`, in all its spellings."""
_NEST_LEVELS = 30
"""Levels that are skipped by one expression; deeper ones are walked in Python, some microseconds each."""


def _nest() -> bytes:
    nest = rb"(?!)"
    for _ in range(_NEST_LEVELS):
        nest = rb'[{\[](?:[^"{}\[\]]++|%b|%b)*+[}\]]' % (_STRING, nest)
    return nest


_NEST = _nest()
_INSIDE = re.compile(rb'(?:[^"{}\[\]]++|%b|%b)*+' % (_STRING, _NEST), re.DOTALL)
"""Everything up to the end of a level, or to one that is too deep."""
_UNTIL_KEY = re.compile(rb'(?:[^"{}\[\]]++|(?!%b)%b|%b)*+' % (_KEY, _STRING, _NEST), re.DOTALL)
"""The same, and not beyond a text `model`, be it a key or a value."""
_MODEL = re.compile(rb"%b%b:%b(%b)?" % (_KEY, _SPACE, _SPACE, _STRING), re.DOTALL)
_WORD = re.compile(_KEY)


_STEPS_MAX = 10_000
"""Some 50 ms, in which no stream moves. A body that somebody sends in earnest takes three steps."""


def _find_models(data: bytes) -> Sequence[tuple[int, int]] | None:
    """Where the texts behind all keys `model` of the outermost object begin and end. The body has been decoded: it is
    well-formed, and the last of them is a text. Of several, engines differ in which they read, so all are found.
    None: it would take too long.
    """
    spans = []
    steps = 0
    # Behind the outermost bracket; a byte order mark may stand before it.
    at, depth = data.index(b"{") + 1, 1
    while depth:
        steps += 1
        if steps > _STEPS_MAX:
            return None
        at = _end(_UNTIL_KEY if depth == 1 else _INSIDE, data, at)
        if data[at : at + 1] != b'"':
            depth += 1 if data[at : at + 1] in (b"{", b"[") else -1
            at += 1
        elif (found := _MODEL.match(data, at)) is None:
            at = _end(_WORD, data, at)
        else:
            if found[1] is not None:
                spans.append(found.span(1))
            at = found.end()
    return spans


def _write_anew(data: bytes, name: str) -> bytes:
    """The same object with each key once: the last one counts, as it did when the body was read."""
    fields: dict[str, object] = dict(_decode_fields(data.removeprefix(_BOM)))
    fields["model"] = name
    return msgspec.json.encode(fields)


def _end(pattern: re.Pattern[bytes], data: bytes, at: int) -> int:
    found = pattern.match(data, at)
    assert found is not None
    return found.end()


# -- forms -----------------------------------------------------------------------------------------------


class _Form:
    """What the push parser tells: where in the body the values of the few fields lie that count here."""

    def __init__(self) -> None:
        self.models: list[tuple[int, int]] = []
        self.values: dict[str, bytes] = {}
        self.is_whole = False
        self._name = b""
        self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._field: str | None = None
        self._data = bytearray()
        self._start = self._end = 0

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._headers = {}
        self._field = None
        self._data.clear()
        self._start = self._end = 0

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _headers_finished(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        # A file that is called `model` is a file.
        if kind == b"form-data" and b"filename" not in options and name in ("model", "stream", "user"):
            self._field = name

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            return
        if not self._end:
            self._start = start
        self._end = end
        if len(self._data) + end - start > _FIELD_MAX:
            raise FormParserError(f"the field {self._field} is far too long")
        self._data += data[start:end]

    def _part_end(self) -> None:
        if self._field is None:
            return
        self.values[self._field] = bytes(self._data)
        if self._field == "model":
            self.models.append((self._start, self._end))

    def _finish(self) -> None:
        self.is_whole = True


def _read_form(data: bytes, content_type: bytes) -> Asked | Refusal:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > _BOUNDARY_MAX:
        return answers.bad_body("it is multipart, but no multipart/form-data with a boundary")
    form = _Form()
    try:
        parser = MultipartParser(boundary, cast("MultipartCallbacks", form.callbacks()))
        parser.write(data)
        parser.finalize()
    except (FormParserError, ValueError) as error:
        return answers.bad_body(f"it is no form that can be read: {_reason(error)}")
    if not form.is_whole:
        return answers.bad_body("it is a form without an end")
    if not form.models:
        return answers.missing_model("it has no field model")
    try:
        model = form.values["model"].decode()
    except UnicodeDecodeError:
        return answers.missing_model("its model is no UTF-8")
    if not model or len(model) > MODEL_MAX:
        return answers.missing_model("its model is an empty text" if not model else "its model is far too long")
    user = form.values.get("user", b"").decode("utf-8", "replace")[:USER_MAX] or None
    is_stream = form.values.get("stream", b"").strip().lower() in (b"true", b"1")
    # What a file holds is no text; its length says little about tokens, and is all that is known.
    return Asked(model, is_stream, user, None, len(data), tuple(form.models))
