"""The engines' registry, and the one function that turns a launch plan into the command that is executed."""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.domain.problem import ConfigError, Problem, Where
from llmgw.domain.shard import UNSET, Command, EngineKind, LaunchPlan, UnixEndpoint, Unset
from llmgw.engines import command, llamacpp, sglang, vllm
from llmgw.engines.environment import DROPPED_VARIABLES, Environment, merge_env
from llmgw.engines.options import normal_name, render_args
from llmgw.engines.profile import Adapter, EngineProfile, MetricNames, Option
from llmgw.engines.variables import substitute, values_of
from llmgw.engines.versions import too_old_for

__all__ = [
    "ADAPTERS",
    "DROPPED_VARIABLES",
    "EngineProfile",
    "Environment",
    "MetricNames",
    "build_command",
    "is_probe_line",
    "merge_env",
    "owning_key",
    "profile",
]

ADAPTERS: Mapping[EngineKind, Adapter] = {
    EngineKind.VLLM: vllm.ADAPTER,
    EngineKind.SGLANG: sglang.ADAPTER,
    EngineKind.LLAMACPP: llamacpp.ADAPTER,
    EngineKind.COMMAND: command.ADAPTER,
}

REQUIRED = frozenset({"uds"})
"""Options without which the engine would not do what the file says, so they cannot be left out."""

LINE_LOOKED_AT = 400
"""Characters; an access line is shorter, and an engine's line may have 20 kB."""


def profile(kind: EngineKind) -> EngineProfile:
    """What llmgw knows about this kind of engine."""
    return ADAPTERS[kind].profile


def owning_key(kind: EngineKind, option: str) -> str | None:
    """The llmgw key that sets this option, or None when it is free.

    `option` may be a key of `args` or a word of `extra_args`: with or without dashes, underscores or `=value`.
    """
    return profile(kind).owned.get(normal_name(option))


def is_probe_line(kind: EngineKind, text: str) -> bool:
    """Whether a line of output is the engine's access line for one of llmgw's own questions.

    A client's request for the same path is dropped with them; other paths and all errors stay.
    """
    pattern = profile(kind).probe_lines
    return pattern is not None and pattern.match(text[:LINE_LOOKED_AT]) is not None


def build_command(plan: LaunchPlan) -> Command:
    """The exact argv and environment of one launch.

    Order: `command`, llmgw's own options, `args` in file order, `extra_args`. Raises ConfigError with one Problem
    per value that cannot be put into a command. What is merely worth knowing stands in `Command.warnings`.
    """
    adapter = ADAPTERS[plan.spec.engine]
    return _Builder(plan, adapter).build()


class _Builder:
    """Collects words and findings of one plan; made for one call."""

    def __init__(self, plan: LaunchPlan, adapter: Adapter) -> None:
        self._plan = plan
        self._adapter = adapter
        self._variables = values_of(plan)
        self._problems: list[Problem] = []
        self._words: list[str] = []
        self._secret_words: set[int] = set()

    def build(self) -> Command:
        spec = self._plan.spec
        profile = self._adapter.profile
        self._check_endpoint()
        for word in spec.command:
            self._words.append(self._substitute("command", word))
        for option in self._adapter.options(self._plan):
            self._add_option(option)
        for key, value in spec.args.items():
            try:
                self._words += render_args(profile, {key: value}, lambda text: substitute(text, self._variables))
            except ValueError as error:
                self._problem("bad-argument", f"args.{key}", str(error))
        for word in spec.extra_args:
            self._words.append(self._substitute("extra_args", word))
        environment = self._environment()
        if profile.quantization_flag is None and spec.quantization is not None and profile.kind != EngineKind.COMMAND:
            self._warn("quantization-unused", "quantization", "the file of the weights decides, nothing is passed")
        if not self._words:
            self._problem("bad-command", "command", "the command is empty")
        for word in (*self._words, *(f"{name}={value}" for name, value in environment.values.items())):
            if "\0" in word:
                # The kernel ends every argument and variable at its first NUL.
                self._problem("bad-argument", "args", "a value has a NUL character, which no program can be given")
        errors = [problem for problem in self._problems if problem.is_error]
        if errors:
            what = f"cannot build the command for {self._plan.name}: {errors[0].message}"
            raise ConfigError(what, errors, errors[0].hint)
        return Command(
            argv=tuple(self._words),
            env=environment.values,
            cwd=spec.workdir or self._plan.work_dir,
            origins=environment.origins,
            secret_env=environment.secret,
            secret_args=frozenset(self._secret_words),
            warnings=tuple(self._problems),
        )

    def _check_endpoint(self) -> None:
        profile = self._adapter.profile
        if isinstance(self._plan.endpoint, UnixEndpoint) and not profile.supports_unix:
            self._problem(
                "no-unix-socket", "port", f"{profile.kind} cannot listen on a unix socket", 'write port = "auto"'
            )

    def _add_option(self, option: Option) -> None:
        kind = self._plan.spec.engine
        written = {normal_name(name) for name in self._plan.spec.args}
        if option.soft and option.name in written:
            return
        version = self._plan.engine_version
        since = too_old_for(kind, option.name, version)
        if since is not None:
            brought = ".".join(str(number) for number in since)
            lost = f"--{option.name} is known since {kind} {brought}, this is {version}"
            if option.name in REQUIRED:
                self._problem("engine-too-old", "port", lost, f'update {kind}, or write port = "auto"')
            else:
                self._warn("option-left-out", "engine", f"{lost}; left out: {option.reason}".rstrip(": "))
            return
        start = len(self._words)
        self._words += option.words
        if option.secret:
            self._secret_words.update(range(start + 1, len(self._words)))
            self._warn(
                "key-in-process-list",
                "api_key",
                f"{kind} takes its key on the command line only, so every user of this machine can read it there",
                "keep host on loopback and leave api_key out, or trust the machine's users",
            )

    def _environment(self) -> Environment:
        spec = self._plan.spec
        profile = self._adapter.profile
        key = profile.key_variable
        if spec.api_key is not None and profile.kind is EngineKind.LLAMACPP and "," in spec.api_key.reveal():
            self._problem("bad-key", "api_key", "llama-server splits its key at commas", "use a key without commas")
        if key is not None and not isinstance(spec.env.get(key, UNSET), Unset):
            self._warn(
                "key-not-probed",
                f"env.{key}",
                f"{key} is set in env, and llmgw's probes do not carry that key",
                "write it as api_key",
            )
        secret = frozenset({key}) if key is not None else frozenset()
        return merge_env(
            self._plan,
            self._adapter.environment(self._plan),
            secret,
            lambda name, text: self._substitute(f"env.{name}", text),
        )

    def _substitute(self, key: str, text: str) -> str:
        try:
            return substitute(text, self._variables)
        except ValueError as error:
            self._problem("bad-variable", key, str(error))
            return text

    def _problem(self, code: str, key: str, message: str, hint: str | None = None) -> None:
        self._problems.append(self._found(code, key, message, hint))

    def _warn(self, code: str, key: str, message: str, hint: str | None = None) -> None:
        found = self._found(code, key, message, hint)
        self._problems.append(Problem(code, message, hint, found.where, "warning", found.context))

    def _found(self, code: str, key: str, message: str, hint: str | None) -> Problem:
        where = None
        origin = self._plan.spec.origins.get(key)
        if origin is not None:
            file, _, line = origin.rpartition(":")
            where = Where(file, int(line)) if file and line.isdigit() else Where(origin)
        return Problem(code, message, hint, where, "error", f'[shard "{self._plan.spec.name}"] {key}')
