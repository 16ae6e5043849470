"""The kinds of values a key can have: how each is read strictly, described in words and put into a JSON schema.

TOML's types are never converted: `"4"` is not an integer and `true` is not 1, although Python thinks so. `read`
returns the value in llmgw's own units (seconds, bytes, tuples) or raises `Refused` with everything that is wrong.
"""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import evolve, field, frozen

from llmgw.config.units import format_duration, format_size, parse_duration, parse_size
from llmgw.domain.problem import Path
from llmgw.domain.shard import UNSET

Raw = Any
"""What tomllib gives: str, int, float, bool, a date or time, list, dict."""


@frozen
class Refusal:
    """One thing that is wrong with a value; `path` leads from the value to the faulty part of it."""

    code: str
    message: str
    hint: str | None = None
    path: Path = ()
    at_key: bool = False
    """The fault is the key, not its value."""
    also: Path | None = None
    """A key that must be taken as touched by this mistake: the suggestion for a misspelled one."""


class Refused(Exception):
    """A value that its kind does not accept."""

    def __init__(self, *refusals: Refusal) -> None:
        super().__init__("; ".join(r.message for r in refusals))
        self.refusals = refusals


def refuse(code: str, message: str, hint: str | None = None, path: Path = ()) -> Refused:
    return Refused(Refusal(code, message, hint, path))


class Kind(Protocol):
    """What a key accepts."""

    @property
    def text(self) -> str:
        """The type in words, as the reference prints it."""

    def read(self, raw: Raw) -> Any:
        """The value in llmgw's units. Raises Refused."""

    def show(self, value: Any) -> Raw:
        """The value as it would stand in a file; secrets as `***`."""

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the TOML value."""


def quoted(text: str, limit: int = 60) -> str:
    """A text from the file in single quotes, on one line and cut."""
    flat = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return f"'{flat if len(flat) <= limit else flat[: limit - 1] + '…'}'"


def described(raw: Raw) -> str:
    """What stands in the file, in words: `a string '8101'`, `an integer 32768`, `a table`."""
    if isinstance(raw, bool):
        return "a boolean " + ("true" if raw else "false")
    if isinstance(raw, str):
        return f"a string {quoted(raw)}"
    if isinstance(raw, int):
        digits = str(raw) if abs(raw) < 10**20 else "of many digits"
        return f"an integer {digits}"
    if isinstance(raw, float):
        return f"a float {raw}"
    if isinstance(raw, (datetime.datetime, datetime.date, datetime.time)):
        return "a date or time"
    return "a list" if isinstance(raw, list) else "a table"


def closest(word: str, known: Sequence[str]) -> str | None:
    """The known word that was probably meant."""
    lowered = {k.lower(): k for k in reversed(known)}
    found = difflib.get_close_matches(word.lower()[:80], list(lowered), n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def wrong_type(expected: str, raw: Raw, hint: str | None = None) -> Refused:
    return refuse("wrong-type", f"expected {expected}, got {described(raw)}", hint)


@frozen
class Boolean:
    text: str = "bool"

    def read(self, raw: Raw) -> bool:
        if type(raw) is bool:
            return raw
        hint = "TOML booleans are true / false without quotes" if isinstance(raw, str) else None
        raise wrong_type("true or false", raw, hint)

    def show(self, value: bool) -> Raw:
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@frozen
class Integer:
    """An integer from `low` to `high`; `words` are texts that may stand instead of it."""

    low: int | None = None
    high: int | None = None
    words: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return _either(["int", *(f'`"{w}"`' for w in self.words)])

    def read(self, raw: Raw) -> int | str:
        if isinstance(raw, str) and raw in self.words:
            return raw
        if type(raw) is not int:
            hint = None
            if isinstance(raw, str):
                if re.fullmatch(r"[+-]?[0-9]{1,15}", raw):
                    hint = "remove the quotes"
                elif (thousands := re.fullmatch(r"([1-9][0-9]{0,8})[kK]", raw)) is not None:
                    hint = f"write the number: {int(thousands[1]) * 1024}, without quotes"
                elif (word := closest(raw, self.words)) is not None:
                    hint = f'did you mean "{word}"?'
            raise wrong_type(_either(["an integer", *(f'"{w}"' for w in self.words)]), raw, hint)
        if self.low is not None and raw < self.low:
            raise refuse("out-of-range", f"{_number(raw)} is too small", f"the least is {self.low}")
        if self.high is not None and raw > self.high:
            raise refuse("out-of-range", f"{_number(raw)} is too large", f"the most is {self.high}")
        return raw

    def show(self, value: int | str) -> Raw:
        return value

    def schema(self) -> dict[str, Any]:
        number: dict[str, Any] = {"type": "integer"}
        if self.low is not None:
            number["minimum"] = self.low
        if self.high is not None:
            number["maximum"] = self.high
        return {"anyOf": [number, {"enum": list(self.words)}]} if self.words else number


def _number(value: int) -> str:
    return str(value) if abs(value) < 10**20 else "this number"


@frozen
class Text:
    """A string; `pattern` is matched over the whole of it, `form` says in words what is allowed."""

    pattern: str | None = None
    form: str = ""
    most: int = 4096
    empty: bool = False
    text: str = "string"

    def read(self, raw: Raw) -> str:
        if type(raw) is not str:
            raise wrong_type("a string", raw)
        if not raw and not self.empty:
            raise refuse("empty", "an empty string", "write a value or remove the key")
        if len(raw) > self.most:
            raise refuse("too-long", f"a string of {len(raw)} characters", f"it may have {self.most}")
        if "\0" in raw:
            raise refuse("bad-value", "a string with a NUL character", "no program can be given one")
        if self.pattern is not None and not re.fullmatch(self.pattern, raw):
            raise refuse("bad-value", f"{quoted(raw)} does not fit", f"allowed: {self.form}")
        return raw

    def show(self, value: str) -> Raw:
        return value

    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string"}
        if self.pattern is not None:
            found["pattern"] = f"^(?:{self.pattern})$"
        return found


@frozen
class Choice:
    """One of a few words."""

    words: tuple[str, ...]
    not_boolean: bool = False
    otherwise: str | None = None
    """What to do with a word that is like none of them."""
    text: str = "enum"

    def read(self, raw: Raw) -> str:
        listed = ", ".join(self.words)
        if type(raw) is not str:
            raise wrong_type(f"one of {listed}", raw, "the words are strings" if type(raw) is bool else None)
        if raw not in self.words:
            meant = closest(raw, self.words)
            hint = f'did you mean "{meant}"?' if meant else self.otherwise
            raise refuse("unknown-value", f"{quoted(raw)} is not one of {listed}", hint)
        return raw

    def show(self, value: str) -> Raw:
        return value

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.words)}


@frozen
class Duration:
    """A string such as "1h30m", read as seconds; where `off` is allowed, "off" is read as None."""

    low: float = 0.0
    high: float | None = None
    off: bool = False

    @property
    def text(self) -> str:
        return 'duration or `"off"`' if self.off else "duration"

    def read(self, raw: Raw) -> float | None:
        if self.off and raw == "off":
            return None
        also = ', or "off"' if self.off else ""
        if type(raw) in (int, float):
            number = f"{raw:g}" if isinstance(raw, float) else _number(raw)
            raise refuse("wrong-type", "a duration needs a unit", f'write "{number}s" (or ms, m, h, d){also}')
        if type(raw) is not str:
            raise wrong_type('a duration such as "90s"' + also, raw)
        seconds = parse_duration(raw)
        if seconds is None:
            raise refuse("not-a-duration", f"not a duration: {quoted(raw)}", f'write "90s", "10m" or "1h30m"{also}')
        if seconds < self.low:
            raise refuse("out-of-range", f"{quoted(raw)} is too short", f'the least is "{format_duration(self.low)}"')
        if self.high is not None and seconds > self.high:
            raise refuse("out-of-range", f"{quoted(raw)} is too long", f'the most is "{format_duration(self.high)}"')
        return seconds

    def show(self, value: float | None) -> Raw:
        return "off" if value is None else format_duration(value)

    def schema(self) -> dict[str, Any]:
        pattern = r"^(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+$"
        found: dict[str, Any] = {"type": "string", "pattern": pattern}
        return {"anyOf": [{"const": "off"}, found]} if self.off else found


@frozen
class Size:
    """A string such as "16GiB", read as bytes."""

    low: int = 0
    high: int | None = None
    text: str = "size"

    def read(self, raw: Raw) -> int:
        if type(raw) in (int, float):
            raise refuse("wrong-type", "a size needs a unit", f'write "{raw}MiB" (or KiB, GiB, TiB, KB, MB, GB, TB, B)')
        if type(raw) is not str:
            raise wrong_type('a size such as "16GiB"', raw)
        size = parse_size(raw)
        if size is None:
            raise refuse("not-a-size", f"not a size: {quoted(raw)}", 'write "512MiB", "16GiB" or "80GB"')
        if size < self.low:
            raise refuse("out-of-range", f"{quoted(raw)} is too small", f'the least is "{format_size(self.low)}"')
        if self.high is not None and size > self.high:
            raise refuse("out-of-range", f"{quoted(raw)} is too large", f'the most is "{format_size(self.high)}"')
        return size

    def show(self, value: int) -> Raw:
        return format_size(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": r"^[0-9]+(?:\.[0-9]+)? ?(?:[KMGT]i?B|B)$"}


@frozen
class Many:
    """A list, read as a tuple. A single value is refused unless `single`: else a string became its letters."""

    item: Kind
    least: int = 0
    single: bool = False
    words: tuple[str, ...] = ()
    """Texts that may stand instead of the list; they are read as themselves."""
    distinct: bool = False

    @property
    def text(self) -> str:
        listed = f"list[{self.item.text}]"
        return _either([*(f'`"{w}"`' for w in self.words), *([self.item.text] if self.single else []), listed])

    def read(self, raw: Raw) -> Any:
        if isinstance(raw, str) and raw in self.words:
            return raw
        if self.single and not isinstance(raw, list):
            return (self.item.read(raw),)
        if not isinstance(raw, list):
            if isinstance(self.item, SecretKind):
                raise refuse("wrong-type", "expected a list, got a single value", "put it into brackets")
            # Several words are a command line as a shell would take it: each is an item.
            items = raw.split() if isinstance(raw, str) else [raw]
            listed = ", ".join(_sample(item) for item in items or [raw])
            hint = f"put it into brackets: [{listed}]" if isinstance(raw, (str, int)) else None
            if self.words and isinstance(raw, str) and (word := closest(raw, self.words)):
                hint = f'did you mean "{word}"?'
            raise wrong_type(_either([*(f'"{w}"' for w in self.words), "a list"]), raw, hint)
        if len(raw) < self.least:
            instead = f'write "{self.words[-1]}"' if self.words else "name at least one"
            raise refuse("empty", "an empty list", instead)
        values, refusals = _each(self.item.read, enumerate(raw))
        if self.distinct and not refusals:
            seen: dict[Any, int] = {}
            for index, value in enumerate(values):
                if value in seen:
                    refusals.append(Refusal("given-twice", f"{_sample(value)} is given twice", "remove one", (index,)))
                seen.setdefault(value, index)
        if refusals:
            raise Refused(*refusals)
        return tuple(values)

    def show(self, value: Any) -> Raw:
        return value if isinstance(value, str) else [self.item.show(v) for v in value]

    def schema(self) -> dict[str, Any]:
        listed: dict[str, Any] = {"type": "array", "items": self.item.schema()}
        if self.least:
            listed["minItems"] = self.least
        others = [{"const": w} for w in self.words] + ([self.item.schema()] if self.single else [])
        return {"anyOf": [*others, listed]} if others else listed


def _sample(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _each(read: Callable[[Raw], Any], items: Any) -> tuple[list[Any], list[Refusal]]:
    """Read every item and collect what is wrong with any of them."""
    values: list[Any] = []
    refusals: list[Refusal] = []
    for key, raw in items:
        try:
            values.append(read(raw))
        except Refused as error:
            values.append(None)
            refusals += [evolve(r, path=(key, *r.path)) for r in error.refusals]
    return values, refusals


@frozen
class Entries:
    """A table with free keys of one kind of value."""

    item: Kind
    key: Callable[[str], Refusal | None]
    """Why a name cannot be a key here; None when it can."""
    sample: str
    """One entry, for hints."""
    instead_of_list: str = ""
    """Where a list belongs that was written here."""

    @property
    def text(self) -> str:
        return f"table of {self.item.text}"

    def read(self, raw: Raw) -> Mapping[str, Any]:
        if not isinstance(raw, dict):
            instead = f", or {self.instead_of_list}" if isinstance(raw, list) and self.instead_of_list else ""
            raise wrong_type("a table", raw, f"write {{ {self.sample} }}{instead}")
        refusals = [
            Refusal(found.code, found.message, found.hint, (name,), True) for name in raw if (found := self.key(name))
        ]
        values, more = _each(self.item.read, raw.items())
        if refusals or more:
            raise Refused(*refusals, *more)
        return dict(zip(raw, values, strict=True))

    def show(self, value: Mapping[str, Any]) -> Raw:
        return {name: self.item.show(v) for name, v in value.items()}

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.item.schema()}


@frozen
class SecretForm:
    """A secret as the file has it: `form` is value, env, file, credential or sha256. Never shows an inline text."""

    form: str
    word: str = field(repr=False)


_SECRET_FORMS = ("value", "env", "file", "credential")
VARIABLE_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
CREDENTIAL_NAME = r"[A-Za-z0-9_.-]{1,128}"


@frozen
class SecretKind:
    """A secret: text, `{ env }`, `{ file }`, `{ credential }`; for keys of clients also `{ sha256 }`."""

    hashes: bool = False
    inline: bool = True
    """False: only `file` and `credential`, for what is never typed by hand (a private key)."""

    @property
    def text(self) -> str:
        return "secret or hash" if self.hashes else "secret"

    @property
    def forms(self) -> tuple[str, ...]:
        return (*(_SECRET_FORMS if self.inline else ("file", "credential")), *(("sha256",) if self.hashes else ()))

    def read(self, raw: Raw) -> SecretForm:
        if type(raw) is str and self.inline:
            return self._checked("value", raw)
        listed = _either([f"{{ {form} = … }}" for form in self.forms])
        if not isinstance(raw, dict):
            got = "a string" if isinstance(raw, str) else described(raw)
            raise refuse("wrong-type", f"expected {'a string or ' if self.inline else ''}{listed}, got {got}")
        unknown = [key for key in raw if key not in self.forms]
        if unknown:
            refusals = []
            for key in unknown:
                meant = closest(key, self.forms)
                hint = f'did you mean "{meant}"?' if meant else f"a secret is {listed}"
                refusals.append(Refusal("unknown-key", f'unknown key "{key[:60]}" in a secret', hint, (key,), True))
            raise Refused(*refusals)
        if len(raw) != 1:
            what = "none is given" if not raw else f"{len(raw)} are given ({', '.join(raw)})"
            raise refuse("secret-form", f"exactly one of {', '.join(self.forms)} must say where the secret is; {what}")
        ((form, word),) = raw.items()
        if type(word) is not str:
            got = " ".join(described(word).split(" ")[:2])  # without the value
            raise refuse("wrong-type", f"expected a string, got {got}", path=(form,))
        return self._checked(form, word)

    def _checked(self, form: str, word: str) -> SecretForm:
        path: Path = () if form == "value" else (form,)
        if not word:
            raise refuse("empty", "an empty secret", "write a value or remove the key", path)
        if form == "env" and not re.fullmatch(VARIABLE_NAME, word):
            raise refuse("bad-value", "not a name of an environment variable", 'write { env = "HF_TOKEN" }', path)
        if form == "credential" and not re.fullmatch(CREDENTIAL_NAME, word):
            raise refuse("bad-value", "not a name of a credential", "a plain name without slashes", path)
        if form == "sha256" and not re.fullmatch(r"[0-9a-fA-F]{64}", word):
            hint = "llmgw key new prints a key and its hash"
            raise refuse("bad-value", f"not a SHA-256 hash: {len(word)} characters, not 64 hex digits", hint, path)
        return SecretForm(form, word.lower() if form == "sha256" else word)

    def show(self, value: SecretForm) -> Raw:
        return "***" if value.form == "value" else {value.form: value.word}

    def schema(self) -> dict[str, Any]:
        tables = [
            {"type": "object", "properties": {f: {"type": "string"}}, "required": [f], "additionalProperties": False}
            for f in self.forms
        ]
        return {"anyOf": [*([{"type": "string"}] if self.inline else []), *tables]}


def _is_unset(raw: Raw) -> bool:
    return isinstance(raw, dict) and "unset" in raw


def _read_unset(raw: Raw) -> Any:
    if len(raw) != 1 or raw["unset"] is not True:
        raise refuse("bad-value", "unset stands alone and is true", "write { unset = true }")
    return UNSET


@frozen
class EnvEntry:
    """A value in `env`: text, a secret, or `{ unset = true }`."""

    text: str = "string, secret or `{ unset = true }`"
    secret: SecretKind = SecretKind()

    def read(self, raw: Raw) -> Any:
        if type(raw) is str:
            return Text(empty=True, most=131072).read(raw)
        if _is_unset(raw):
            return _read_unset(raw)
        if not isinstance(raw, dict):
            hint = f'write "{_plain(raw)}"' if isinstance(raw, (bool, int, float)) else None
            raise wrong_type("a string", raw, hint or "variables of the environment are strings")
        return self.secret.read(raw)

    def show(self, value: Any) -> Raw:
        if value is UNSET:
            return {"unset": True}
        return self.secret.show(value) if isinstance(value, SecretForm) else value

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"const": {"unset": True}}, *self.secret.schema()["anyOf"]]}


def _plain(raw: bool | int | float) -> str:
    return str(raw).lower() if isinstance(raw, bool) else str(raw)


@frozen
class ArgEntry:
    """A value in `args`: scalar, list, table (JSON for engines that take it) or `{ unset = true }`."""

    text: str = "string, number, bool, list, table or `{ unset = true }`"

    def read(self, raw: Raw) -> Any:
        if _is_unset(raw):
            return _read_unset(raw)
        if isinstance(raw, dict) and len(raw) == 1 and next(iter(raw)) in ("env", "file", "credential"):
            value = next(iter(raw.values()))
            if isinstance(value, str):
                hint = "everybody on the host can read a command line; use env or api_key"
                raise refuse("secret-in-args", "a secret cannot be an option of the engine", hint)
        refusals = list(_unfit(raw, (), 0))
        if refusals:
            raise Refused(*refusals)
        return tuple(raw) if isinstance(raw, list) else raw

    def show(self, value: Any) -> Raw:
        if value is UNSET:
            return {"unset": True}
        return list(value) if isinstance(value, tuple) else value

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "number", "boolean", "array", "object"]}


def _unfit(raw: Raw, path: Path, depth: int) -> list[Refusal]:
    """Parts of an option's value that no command line and no JSON can carry."""
    if depth > 20:
        return [Refusal("bad-value", "tables and lists are nested too deeply", "20 levels are the most", path[:20])]
    if isinstance(raw, dict):
        return [r for key, value in raw.items() for r in _unfit(value, (*path, key), depth + 1)]
    if isinstance(raw, list):
        return [r for index, value in enumerate(raw) for r in _unfit(value, (*path, index), depth + 1)]
    if isinstance(raw, str) and "\0" in raw:
        return [Refusal("bad-value", "a string with a NUL character", "no program can be given one", path)]
    if isinstance(raw, (str, int)) or (isinstance(raw, float) and raw - raw == 0):
        return []
    what = described(raw) if isinstance(raw, float) else "a date or time"
    return [Refusal("wrong-type", f"expected a string, number or boolean, got {what}", "put it into quotes", path)]


@frozen
class GpuRef:
    """A GPU by index, full UUID or PCI bus id."""

    text: str = "int or string"

    def read(self, raw: Raw) -> int | str:
        if type(raw) is int:
            if not 0 <= raw < 1024:
                raise refuse("out-of-range", f"{_number(raw)} is not the index of a GPU", "indexes begin with 0")
            return raw
        if type(raw) is not str:
            raise wrong_type("an index, UUID or PCI bus id", raw)
        if re.fullmatch(r"(?:GPU|MIG)-[0-9A-Za-z/-]{4,80}", raw):
            return raw
        if re.fullmatch(r"(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]", raw):
            return raw.lower()
        hint = (
            "remove the quotes" if re.fullmatch(r"[0-9]{1,4}", raw) else 'for example 0, "GPU-5a1c…" or "0000:17:00.0"'
        )
        raise refuse("bad-value", f"{quoted(raw)} is no index, UUID or PCI bus id of a GPU", hint)

    def show(self, value: int | str) -> Raw:
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": ["integer", "string"]}


@frozen
class Gpus:
    """A number (llmgw chooses) or a list (exactly these)."""

    pinned: bool = True

    @property
    def text(self) -> str:
        return "int or list[int or string]" if self.pinned else "int"

    def read(self, raw: Raw) -> int | tuple[int | str, ...]:
        if isinstance(raw, list):
            if not self.pinned:
                hint = "name the GPUs in each [[shard]]"
                raise refuse("wrong-type", "[defaults] takes only a number of GPUs, got a list", hint)
            found: tuple[int | str, ...] = Many(GpuRef(), distinct=True).read(raw)
            return found
        if type(raw) is int:
            return int(Integer(0, 100_000).read(raw))
        hint = "remove the quotes" if isinstance(raw, str) and raw.isdigit() else "for example 2, or [0, 1]"
        raise wrong_type("a number of GPUs or a list of them" if self.pinned else "a number of GPUs", raw, hint)

    def show(self, value: Any) -> Raw:
        return list(value) if isinstance(value, tuple) else value

    def schema(self) -> dict[str, Any]:
        number = {"type": "integer", "minimum": 0}
        return {"anyOf": [number, {"type": "array", "items": GpuRef().schema()}]} if self.pinned else number


@frozen
class PortRange:
    """`first-last`, read as a pair of ports."""

    text: str = "string"

    def read(self, raw: Raw) -> tuple[int, int]:
        if type(raw) is not str:
            raise wrong_type('a range such as "8101-8499"', raw)
        match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", raw)
        if match is None:
            raise refuse("bad-value", f"{quoted(raw)} is no range of ports", 'write "8101-8499"')
        first, last = int(match[1]), int(match[2])
        if not 1024 <= first <= last <= 65535:
            raise refuse("out-of-range", f"{quoted(raw)} is no range of ports", "first-last, from 1024 to 65535")
        return first, last

    def show(self, value: tuple[int, int]) -> Raw:
        return f"{value[0]}-{value[1]}"

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": r"^[0-9]{1,5}-[0-9]{1,5}$"}


@frozen
class FileMode:
    """Four octal digits in quotes, read as the mode."""

    text: str = "string"

    def read(self, raw: Raw) -> int:
        if type(raw) is not str:
            hint = f'write "{raw:04d}"; the bare number would be decimal' if type(raw) is int and raw < 10000 else None
            raise wrong_type("a mode of four octal digits in quotes", raw, hint or 'for example "0660"')
        if not re.fullmatch(r"0[0-7]{3}", raw):
            raise refuse("bad-value", f"{quoted(raw)} is no mode", 'four octal digits, for example "0660"')
        return int(raw, 8)

    def show(self, value: int) -> Raw:
        return f"{value:04o}"

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": "^0[0-7]{3}$"}


@frozen
class Listen:
    """Where a door listens: host and port, or the path of a unix socket."""

    host: str | None = None
    port: int | None = None
    path: str | None = None

    @property
    def is_local(self) -> bool:
        """Reachable from this machine only."""
        return self.path is not None or (self.host or "").startswith("127.") or self.host in ("::1", "localhost")

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in (self.host or "") else f"{self.host}:{self.port}"


@frozen
class ListenKind:
    text: str = "string"

    def read(self, raw: Raw) -> Listen:
        example = 'for example "127.0.0.1:8080", "[::1]:8080" or "unix:/run/llmgw/gateway.sock"'
        if type(raw) is not str:
            raise wrong_type("host:port or unix:PATH", raw, example)
        if raw.startswith("unix:"):
            if len(raw) == len("unix:") or len(raw) > 4096 or "\0" in raw:
                raise refuse("bad-value", f"{quoted(raw)} names no socket", example)
            return Listen(path=raw[len("unix:") :])
        match = re.fullmatch(
            r"(?:\[([0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,15})?)\]|([A-Za-z0-9._-]{1,253})):([0-9]{1,5})", raw
        )
        if match is None:
            raise refuse("bad-value", f"{quoted(raw)} is no address to listen on", example)
        if not 1 <= int(match[3]) <= 65535:
            raise refuse("out-of-range", f"{quoted(raw)}: no such port", "ports go from 1 to 65535")
        return Listen(host=match[1] or match[2], port=int(match[3]))

    def show(self, value: Listen) -> Raw:
        return str(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "string"}
