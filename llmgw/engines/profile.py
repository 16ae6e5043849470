"""What llmgw knows about one kind of engine, as data: options it owns, paths, signals, signs of loading, counters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

from attrs import field, frozen

from llmgw.domain.shard import EngineKind, LaunchPlan


@frozen
class MetricNames:
    """Names in the engine's /metrics text; None where it has no such series.

    `steps` are counters that move only while the engine works, the most exact first; `only` keeps one rank of
    engines that repeat every series per rank.
    """

    running: str
    waiting: str
    steps: tuple[str, ...]
    kv_usage: str | None = None
    tokens_per_second: str | None = None
    only: Mapping[str, str] = field(factory=dict)


@frozen
class Call:
    """One request to an engine's own control pages."""

    method: str
    path: str
    body: Mapping[str, str] | None = None


@frozen
class SleepMode:
    """How an engine is put to sleep and woken: the calls by level, in order."""

    fall_asleep: Callable[[int], tuple[Call, ...]]
    wake: Callable[[int], tuple[Call, ...]]
    is_sleeping_path: str
    """Answers `{"is_sleeping": true}`."""
    deepest: int
    """The level whose wake is right after every sleep."""


@frozen
class EngineProfile:
    """One kind of engine. Times are seconds."""

    kind: EngineKind
    default_command: tuple[str, ...]
    distribution: str | None = None
    """Name of the Python distribution whose metadata tells the version; None: not a Python program."""
    supported_versions: str = "any"
    """For people: which versions the options and texts here were checked with."""
    ready_path: str = "/health"
    models_path: str = "/v1/models"
    deep_health_path: str | None = None
    """A second, dearer question that alone finds a hung engine; asked rarely."""
    deep_health_interval: float = 45.0
    deep_health_timeout: float = 25.0
    """SGLang answers 503 only after its own 20 s, so a shorter limit would never see the no."""
    term_to: Literal["leader", "group"] = "group"
    kill_while_loading: bool = False
    """Nothing is in flight while it loads, and its SIGTERM is swallowed or orphans children: SIGKILL at once."""
    clean_exit_zero: bool = False
    """Code 0 by itself is a good end. Of servers it never is: vLLM leaves with 0 after its engine died."""
    loading_titles: tuple[str, ...] = ()
    """Beginnings of `comm` (15 characters) of a descendant that prove that loading has begun."""
    loading_on_503: bool = False
    """It listens from the first moment and answers 503 while it loads."""
    socket_before_ready: bool = False
    """With a unix socket: the file is there, connections are refused, and that means loading."""
    supports_unix: bool = False
    supports_nodes: bool = False
    key_variable: str | None = None
    """Environment variable the engine reads its API key from."""
    key_in_argv: bool = False
    slots_options: tuple[str, ...] = ()
    """Options (dashes, without the leading ones) that limit how many requests it works on at a time."""
    slots_divided_by: str | None = None
    """With this switch that limit is for all data-parallel copies together; otherwise it is for each."""
    slots_path: str | None = None
    """The page on which it tells that limit."""
    max_model_len_flag: str | None = None
    quantization_flag: str | None = None
    max_model_len_aliases: tuple[str, ...] = ()
    """Names in `args` that mean `max_model_len`, dashes, without the leading ones."""
    quantization_aliases: tuple[str, ...] = ()
    owned: Mapping[str, str] = field(factory=dict)
    """Option name (dashes, without the leading ones) -> the llmgw key to use instead. Refused in `args`."""
    list_style: Literal["once", "repeated"] = "repeated"
    """A list in `args`: one flag with several values, or one flag per value."""
    negates: bool = False
    """`false` in `args` becomes `--no-NAME`; otherwise it is left out."""
    json_tables: bool = False
    """A table in `args` becomes JSON; otherwise it is refused."""
    equals_form: bool = False
    """The engine understands `--name=value`, needed for values that begin with a dash."""
    metrics: MetricNames | None = None
    sleep: SleepMode | None = None
    probe_lines: re.Pattern[str] | None = None
    """Access lines of llmgw's own questions: they are dropped from the log tail."""


@frozen
class Option:
    """An option that llmgw adds by itself. `soft`: the same name in `args` replaces it. `reason` says in a few
    words what is lost where an older engine does not know it."""

    name: str
    values: tuple[str, ...] = ()
    soft: bool = False
    secret: bool = False
    reason: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """As it stands on the command line; an empty name is a positional argument."""
        return (f"--{self.name}", *self.values) if self.name else self.values


@frozen
class Adapter:
    """One engine: its profile and the two functions that make what it needs for one launch."""

    profile: EngineProfile
    options: Callable[[LaunchPlan], tuple[Option, ...]]
    environment: Callable[[LaunchPlan], Mapping[str, str]]
