"""What every rule sees, and the form of what it finds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from attrs import frozen

from llmgw.discovery import pins
from llmgw.domain.hardware import Gpu
from llmgw.domain.host import HostFacts
from llmgw.domain.problem import Problem, Severity
from llmgw.domain.shard import ArgValue, EngineKind, ShardSpec
from llmgw.preflight.needs import weights_path

SPLITTING = frozenset({EngineKind.VLLM, EngineKind.SGLANG})
"""Engines that split each layer evenly over their GPUs and size by one of them. llama.cpp spreads whole layers by
free memory, and of a plain command nothing is known."""

MODEL_OVERRIDES = frozenset(
    {"hf-overrides", "json-model-override-args", "hf-config-path", "load-format", "config-format"}
)
"""Options under which the model is not what its config.json says."""

PLAIN = 'shard "{name}": {text}'
"""The form of a finding that belongs to no single key."""


@frozen
class Situation:
    """What rules see: all shards of the node, the host, and pids that llmgw knows as its own."""

    specs: Sequence[ShardSpec]
    facts: HostFacts
    own_pids: Collection[int] = ()


Check = Callable[[ShardSpec, Situation], Iterator[Problem]]


@frozen
class Rule:
    """One rule. `codes` are all it can report, each with the paragraph that documents it."""

    check: Check
    codes: Mapping[str, str]


def problem(
    spec: ShardSpec,
    code: str,
    key: str,
    text: str,
    hint: str | None,
    *,
    severity: Severity = "error",
    form: str = 'shard "{name}" {key}: {text}',
    position: int | None = None,
) -> Problem:
    """A finding about `key` of a shard, where it is written."""
    keys = (f"{key}.{position}", key) if position is not None else (key,)
    message = form.format(name=spec.name, key=key, text=text)
    return Problem(code, message, hint, where=spec.written_at(*keys), severity=severity)


def warning(spec: ShardSpec, code: str, key: str, text: str, hint: str | None, *, form: str = PLAIN) -> Problem:
    return problem(spec, code, key, text, hint, severity="warning", form=form)


def option(spec: ShardSpec, *names: str) -> ArgValue | None:
    """The value of an engine's option in `args` or `extra_args`, by any of its names with dashes; None where it is
    not written. In `extra_args`, whose words come last and therefore win, an option without a value is True."""
    written = options_of(spec)
    return next((written[name] for name in names if name in written), None)


def options_of(spec: ShardSpec) -> Mapping[str, ArgValue]:
    """All options by their names with dashes; of a dotted one (`--hf-overrides.rope_scaling.factor`) the first part."""
    written = {name.replace("_", "-").partition(".")[0]: value for name, value in spec.args.items()}
    words = spec.extra_args
    for at, word in enumerate(words):
        if not word.startswith("-"):
            continue
        name, equals, value = word.partition("=")
        after = words[at + 1] if at + 1 < len(words) else "-"
        name = name.lstrip("-").replace("_", "-").partition(".")[0]
        alone = after.startswith("-") and not after[1:2].isdecimal()
        written[name] = value if equals else True if alone else after
    return written


def number(spec: ShardSpec, *names: str) -> float | None:
    """An option that is a number, also one that is written as a string."""
    value = option(spec, *names)
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def is_overridden(spec: ShardSpec) -> bool:
    """Whether options say that the model is not what its folder says."""
    return not MODEL_OVERRIDES.isdisjoint(options_of(spec))


def model_of(spec: ShardSpec, situation: Situation) -> Mapping[str, object] | None:
    """The parsed config.json of an engine that reads one, unless options say that something else counts."""
    if spec.engine not in SPLITTING or is_overridden(spec):
        return None
    path = weights_path(spec)
    return situation.facts.model_configs.get(path) if path is not None else None


def pins_of(spec: ShardSpec, situation: Situation) -> tuple[pins.Pin, ...]:
    """The cards and slices that a shard has, as far as they can be looked up."""
    found = pins.resolve_pins(spec, situation.facts.inventory)
    return () if isinstance(found, pins.Refused) else found


def gpus_of(spec: ShardSpec, situation: Situation) -> tuple[Gpu, ...]:
    return tuple(pin.gpu for pin in pins_of(spec, situation) if pin.gpu is not None)


def dotted(capability: tuple[int, int] | None) -> str:
    return "unknown" if capability is None else f"{capability[0]}.{capability[1]}"


def gibibytes(size: float) -> str:
    """Bytes, as people compare them."""
    return f"{size / (1 << 30):.1f} GiB"
