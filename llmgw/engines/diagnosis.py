"""Why did it end? An exit, the kept output and facts about the host become a cause, a remedy and the proving lines.

Only exits that nobody asked for belong here: a clean drain prints errors too. `diagnose` never raises.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence

from attrs import frozen

from llmgw.domain.display import hide, without_sequences
from llmgw.domain.problem import Reason
from llmgw.domain.shard import EngineKind
from llmgw.engines.rules import ENDINGS, MARKS, MEMORY_OPTION, RULES, Rule

LINE_LOOKED_AT = 4096
"""Characters of a line that are looked at. Causes stand near the beginning, and some patterns are not linear."""

EVIDENCE_LINES = 5
EVIDENCE_WIDTH = 500
"""Characters of one shown line: an engine's message with its numbers fits."""

QUICK_EXIT = 60.0
"""Seconds. vLLM and SGLang need 7 to 12 s of imports before they refuse an option with code 2."""

SIGQUIT_LINES = ("Received sigquit from a child process", "SIGQUIT received")

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_VLLM_PROCESS = re.compile(r"\((\w{1,40})[^ )]{0,40} pid=\d+\) ?")
_VLLM_RECORD = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) [-\d]+ [:\d]+ \[[^\]]*\] ?")
_UVICORN_RECORD = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL): {2,}")
_SGLANG_RECORD = re.compile(r"\[[-\d]+ [:\d]+((?: \w+)*)\] ?")
_LLAMACPP_RECORD = re.compile(r"[\d.]+ ([DIWE]) ")
_QUIET_LEVELS = frozenset({"DEBUG", "INFO", "WARNING", "D", "I", "W"})
_CONSEQUENCE = re.compile(
    r"See root cause above|WorkerProc initialization failed|Received sigquit from a child|SIGQUIT received"
    r"|nanobind: leaked|resource_tracker:|died unexpectedly \(exit code: 0\)"
)
_SETTINGS_DUMP = re.compile(r"^(?:server_args=|non-default args:|Initializing a \S+ LLM engine|args: Namespace\()")
"""Lines that print all settings back; `trust_remote_code=True` in one of them is no demand."""
_FOLLOWING_ERROR = re.compile(r"\b\w*(?:Error|Exception)\b: ?\S|\b\w+Error$")
_ENGINE_DIED = re.compile(r"died unexpectedly|EngineCore encountered")
_FATAL_BLOCK = re.compile(r"Fatal Python error|terminate called after throwing|Segmentation fault")
_LOAD_FAILED = re.compile(r"failed to load model|failed to open GGUF|error loading model")
_WRONG_FILE = re.compile(r"invalid magic|unknown model architecture|model is corrupted or incomplete")
"""What llama.cpp says of a file that it could read and that another attempt will not change (read in its source)."""

_CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE})

_WORKER, _CORE, _LEADER = range(3)


@frozen
class ExitFacts:
    """Everything a diagnosis depends on.

    `lines` are the kept lines in order, pinned ones included. `code` is the exit code, negative for a signal, None
    where nobody could learn it. `oom_killed`: True is proof that the kernel's count rose, False that it did not,
    None that no count could be read. `several_died`: other shards ended in the same moment.
    """

    engine: EngineKind
    code: int | None
    lines: Sequence[str] = ()
    name: str = ""
    ready: bool = False
    """It had been Ready in this life."""
    oom_killed: bool | None = None
    several_died: bool = False
    seconds_alive: float | None = None
    port: int | None = None
    """Where the shard was to listen."""
    port_holder: str | None = None
    """Who holds that port now, in words."""
    secrets: tuple[str, ...] = ()
    """Texts that must not be shown, such as the engine's key."""


@frozen
class _Line:
    """One line without its record's prefix; `role` orders who is nearer to the cause."""

    text: str
    role: int
    quiet: bool

    @property
    def is_source(self) -> bool:
        """A source line or frame of a traceback, which quotes the error instead of being it."""
        return self.text[:1] in (" ", "\t")


def is_error_line(engine: EngineKind, text: str) -> bool:
    """Whether a line may prove a cause and must outlive the flood of others. Never raises."""
    text = text[:LINE_LOOKED_AT]
    if not any(mark in text for mark in MARKS):
        return False
    line = _read(engine, text)
    if line.quiet:
        return False
    if _ENGINE_DIED.search(line.text) or _FATAL_BLOCK.search(line.text) or any(s in line.text for s in SIGQUIT_LINES):
        return True
    if engine is EngineKind.LLAMACPP and _LOAD_FAILED.search(line.text):
        return True
    if _CONSEQUENCE.search(line.text):
        return False
    return _FOLLOWING_ERROR.search(line.text) is not None or any(rule.pattern.search(line.text) for rule in RULES)


def diagnose(facts: ExitFacts) -> Reason:
    """The most likely cause, what to do, the lines that prove it, and whether another attempt makes sense."""
    lines = tuple(_read_all(facts.engine, facts.lines))
    if facts.engine is not EngineKind.COMMAND:
        for rule in RULES:
            proof = _proof(rule, lines)
            if proof:
                return _explain(rule, proof, facts)
    return _by_exit(facts, lines)


def _read_all(engine: EngineKind, lines: Iterable[str]) -> Iterator[_Line]:
    for raw in lines:
        for text in raw.split("\n"):
            # Of a run of pieces that overwrote each other on a terminal the last is what one would have seen.
            kept = next((piece for piece in reversed(text.split("\r")) if piece.strip()), "")
            if kept:
                yield _read(engine, kept)


def _read(engine: EngineKind, text: str) -> _Line:
    text = _CONTROL.sub("", without_sequences(text[:LINE_LOOKED_AT])).rstrip()
    role, level = _LEADER, ""
    if engine is EngineKind.VLLM:
        if process := _VLLM_PROCESS.match(text):
            role = _role(process[1])
            text = text[process.end() :]
        if record := _VLLM_RECORD.match(text) or _UVICORN_RECORD.match(text):
            level = record[1]
            text = text[record.end() :]
    elif engine is EngineKind.SGLANG:
        if record := _SGLANG_RECORD.match(text):
            role = _WORKER if record[1] else _LEADER
            text = text[record.end() :]
        if record := _UVICORN_RECORD.match(text):
            level = record[1]
            text = text[record.end() :]
    elif engine is EngineKind.LLAMACPP and (record := _LLAMACPP_RECORD.match(text)):
        level = record[1]
        text = text[record.end() :].lstrip()
    return _Line(text, role, level in _QUIET_LEVELS or _SETTINGS_DUMP.match(text) is not None)


def _role(process: str) -> int:
    if process.startswith(("Worker", "VllmWorker")):
        return _WORKER
    return _CORE if process.startswith("EngineCore") else _LEADER


def _proof(rule: Rule, lines: Sequence[_Line]) -> tuple[_Line, ...]:
    """Matching lines, the one to show first."""
    found = [
        line
        for line in lines
        if not line.quiet and rule.pattern.search(line.text) and not _CONSEQUENCE.search(line.text)
    ]
    if not found:
        return ()
    spoken = [line for line in found if not line.is_source] or found
    # Causes bubble up from worker to leader; of one process the last line is the exception itself.
    nearest = min(line.role for line in spoken)
    best = [line for line in spoken if line.role == nearest][-1]
    return (best, *(line for line in reversed(spoken) if line.text != best.text))


def _words(facts: ExitFacts) -> dict[str, str]:
    return {
        "shard": f'[[shard]] "{facts.name}"' if facts.name else "the shard",
        "memory": MEMORY_OPTION.get(facts.engine, "the memory option"),
        "holder": f": {facts.port_holder} holds {facts.port or 'it'}" if facts.port_holder else "",
    }


def _explain(rule: Rule, proof: Sequence[_Line], facts: ExitFacts) -> Reason:
    words = _words(facts)
    cause, remedy = rule.cause, rule.remedy
    exact = rule.exact.search(proof[0].text) if rule.exact is not None else None
    if exact is not None:
        words |= {name: text.strip() for name, text in exact.groupdict().items() if text}
        cause = rule.exact_cause or cause
        remedy = rule.exact_remedy or remedy
    return Reason(
        rule.code,
        hide(cause.format_map(words), facts.secrets),
        hide(remedy.format_map(words), facts.secrets),
        _evidence((line.text for line in proof), facts),
        retry=rule.retry,
    )


def _by_exit(facts: ExitFacts, lines: Sequence[_Line]) -> Reason:
    """No line tells the cause: what the exit itself says."""
    code = facts.code
    if code is not None and 128 < code <= 128 + 64:
        code = 128 - code  # A shell that ran the engine reports its signal so.
    telling = [line for line in lines if line.text.strip() and not _CONSEQUENCE.search(line.text)]
    errors = [line for line in telling if not line.is_source and _FOLLOWING_ERROR.search(line.text)]
    spoken = [line for line in errors if not line.quiet]
    is_server = facts.engine is not EngineKind.COMMAND

    def end(ending: str, proof: Iterable[_Line] = (), **words: str) -> Reason:
        shown = _evidence((line.text for line in proof), facts)
        shown = shown or _evidence((line.text for line in (spoken or telling)[-1:]), facts)
        table = ENDINGS[ending]
        said = f": {shown[0]}" if shown else ""
        words = _words(facts) | {"said": said} | words
        cause = hide(table.cause.format_map(words), facts.secrets)
        return Reason(ending, cause, table.remedy.format_map(words), shown, retry=table.retry)

    if facts.oom_killed is True:
        return end("oom", telling[-1:])
    if facts.engine is EngineKind.LLAMACPP:
        load = [line for line in lines if not line.quiet and _LOAD_FAILED.search(line.text)]
        proof = [line for line in lines if not line.quiet and _WRONG_FILE.search(line.text)] if load else []
        if load:
            # Anything else may be a network disk that is away for a while: another attempt can succeed.
            return end("no-model", proof) if proof else end("model-not-read", load)
    if is_server and any(text in line.text for line in lines for text in SIGQUIT_LINES):
        return end("child-failed", errors[-1:])
    if code == -signal.SIGKILL:
        if facts.several_died:
            return end("oom-likely", telling[-1:], how="several shards ended at once")
        if facts.oom_killed is None:
            return end("oom-likely", telling[-1:], how="the kernel's count cannot be read")
        return end("killed", telling[-1:])
    if code == -signal.SIGILL:
        return end("illegal-instruction", _crash(telling))
    if code is not None and -code in _CRASH_SIGNALS:
        return end("native-crash", _crash(telling), signal=_signal_name(code))
    if code is not None and code < 0:
        return end("ended-by-signal", telling[-1:], signal=_signal_name(code))
    if code in (126, 127):
        return end("not-executable", how="cannot be executed" if code == 126 else "was not found")
    if code == 0 and is_server:
        died = [line for line in telling if _ENGINE_DIED.search(line.text)]
        how = "the engine died at work and its server closed itself" if facts.ready else "it left before it was ready"
        return end("engine-died", died[-EVIDENCE_LINES:], how=how)
    if code == 2 and not facts.ready and facts.seconds_alive is not None and facts.seconds_alive <= QUICK_EXIT:
        return end("bad-arguments")
    # A command's last line is its reason; an engine's last error is.
    how = "its exit code is not known: an earlier llmgw started it" if code is None else f"exit code {code}"
    return end("ended", () if is_server else telling[-1:], how=how)


def _crash(telling: Sequence[_Line]) -> Sequence[_Line]:
    """The block of Python's fault handler or of the C++ runtime where there is one, else the last lines."""
    for i in range(len(telling) - 1, -1, -1):
        if _FATAL_BLOCK.search(telling[i].text):
            return telling[i : i + EVIDENCE_LINES]
    return telling[-EVIDENCE_LINES:]


def _evidence(texts: Iterable[str], facts: ExitFacts) -> tuple[str, ...]:
    """The first lines, each once, cut to a width that can be read."""
    shown: dict[str, None] = {}
    for text in texts:
        # Hidden before it is cut, so that no half of a secret is left at the edge.
        text = hide(text.strip(), facts.secrets)
        shown[text if len(text) <= EVIDENCE_WIDTH else f"{text[: EVIDENCE_WIDTH - 1]}…"] = None
        if len(shown) == EVIDENCE_LINES:
            break
    return tuple(shown)


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
