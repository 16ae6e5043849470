"""How far a load is, read from what an engine prints. A hint for people and for `load_timeout`, never for Ready."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import evolve, frozen

from llmgw.domain.shard import EngineKind
from llmgw.domain.status import LoadingSeen, Progress, ProgressSeen

LINE_LOOKED_AT = 600
"""Characters of a line that are looked at: every known line is shorter, and SGLang prints one of 19 kB."""

WORKERS_KEPT = 256
"""Printing workers kept apart; far above the ranks of one node, and a bound for output that makes up names."""

PHASES = ("download", "weights", "compile", "kv-cache", "graphs", "warm-up", "serving")
"""In the order in which engines go through them."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_WORKER = re.compile(r"\((\w{1,40}) pid=\d{1,10}\) ?|\[[-\d]{10} [:\d]{8}((?: [A-Z]+\d+)+)\] ?")
_BAR = re.compile(
    r"(?P<percent>\d{1,3})%(?: Completed \| *|\|[^|]{0,200}\| *)"
    r"(?P<done>\d[\d.]{0,11}[kKMGT]?)/(?P<total>\d[\d.]{0,11}[kKMGT]?)"
    r"(?: \[(?P<elapsed>[\d:]{1,12})<(?P<left>[\d:?]{1,12}))?"
)
_BAR_PHASES = (
    (re.compile(r"checkpoint shards:|loading shards:", re.I), "weights"),
    (re.compile(r"Captur(?:ing|e) (?:CUDA graph|cuda graph|batches)"), "graphs"),
    (re.compile(r"\b(?:Fetching|Downloading)\b"), "download"),
)
_PHASE_LINES = (
    (re.compile(r"\bFetching \d+ files|Time spent downloading|\bDownloading\b"), "download", False),
    (re.compile(r"Loading weights took|Load weight end|Model loading took"), "weights", True),
    (re.compile(r"Starting to load model|Load weight begin|llama_model_load|loading model"), "weights", False),
    (re.compile(r"torch\.compile|\bCompiling\b"), "compile", False),
    (
        re.compile(r"KV cache size|Available KV cache memory|KV Cache is allocated|max_total_num_tokens="),
        "kv-cache",
        False,
    ),
    (re.compile(r"Graph capturing finished|Capture cuda graph end"), "graphs", True),
    (re.compile(r"Graph capturing|Capture cuda graph begin"), "graphs", False),
    (re.compile(r"init engine .{0,80}took|warming up the model|n_slots ="), "warm-up", False),
)
_MARKS = (
    "%", "Fetching", "Downloading", "downloading", "weight", "load", "took", "compile", "Compiling", "KV", "Graph",
    "graph", "max_total_num_tokens", "warming", "n_slots", "Init ", "startup", "fired up",
)  # fmt: skip
"""Pieces of which every line of interest has at least one: a cheap test first, because engines can print a lot."""
_SIGNS: Mapping[EngineKind, re.Pattern[str]] = {
    EngineKind.VLLM: re.compile(r"Starting to load model"),
    EngineKind.SGLANG: re.compile(r"Init parallel begin|Init torch distributed begin|Load weight begin"),
    EngineKind.LLAMACPP: re.compile(r"loading model"),
}
_READY: Mapping[EngineKind, re.Pattern[str]] = {
    EngineKind.VLLM: re.compile(r"Application startup complete"),
    EngineKind.SGLANG: re.compile(r"The server is fired up and ready to roll"),
    EngineKind.LLAMACPP: re.compile(r"model loaded"),
}
"""SGLang's uvicorn says "startup complete" seconds before its warm-up ends, so that line counts for vLLM only."""


@frozen
class _Step:
    """A bar with its fraction, or a line that only names a phase, or (`ended`) its end."""

    phase: int
    fraction: float | None = None
    done: int | None = None
    total: int | None = None
    eta: float | None = None
    ended: bool = False


class ProgressReader:
    """The progress of one launch. Feed it lines; it returns what is new and never raises, whatever it is fed.

    Several workers print the same bar: the slowest counts. A bar that is full counts only when no other is
    still growing, and a line that announces a later phase ends the bars of the phases before it.
    """

    def __init__(self, kind: EngineKind) -> None:
        self._kind = kind
        self._bars: dict[str, _Step] = {}
        self._announced: _Step | None = None
        self._shown: Progress | None = None
        self._sign_seen = False
        self.ready_hint = False
        """The engine has said that it serves. Only the probes decide."""

    def feed(self, text: str) -> tuple[LoadingSeen | ProgressSeen, ...]:
        """Read one line, or several with `\\r` or `\\n` between them. New counters, percentages and phases come
        back as events; a changed estimate alone does not."""
        events: list[LoadingSeen | ProgressSeen] = []
        for line in re.split(r"[\r\n]+", text) if "\r" in text or "\n" in text else (text,):
            seen = line[:LINE_LOOKED_AT]
            if any(mark in seen for mark in _MARKS):
                self._read(_ANSI.sub("", seen) if "\x1b" in seen else seen, events)
        return tuple(events)

    def _read(self, line: str, events: list[LoadingSeen | ProgressSeen]) -> None:
        sign = _SIGNS.get(self._kind)
        if not self._sign_seen and sign is not None and (found := sign.search(line)):
            self._sign_seen = True
            events.append(LoadingSeen(f"log: {found[0]}"))
        ready = _READY.get(self._kind)
        if ready is not None and ready.search(line):
            self.ready_hint = True
            step: _Step | None = _Step(PHASES.index("serving"))
        else:
            step = _step_of(line)
        if step is None:
            return
        worker = _WORKER.match(line)
        self._note(step, (worker[1] or worker[2] or "") if worker else "")
        now = self._now() or step
        progress = Progress(PHASES[now.phase], now.fraction, now.done, now.total, now.eta)
        if self._shown is None or _without_eta(self._shown) != _without_eta(progress):
            self._shown = progress
            events.append(ProgressSeen(progress))

    def _note(self, step: _Step, worker: str) -> None:
        if step.fraction is not None:
            if worker in self._bars or len(self._bars) < WORKERS_KEPT:
                self._bars[worker] = step
            return
        self._announced = step
        # A later phase begins when everybody is through the ones before it.
        self._bars = {name: bar for name, bar in self._bars.items() if bar.phase >= step.phase}
        bar = self._bars.get(worker)
        if step.ended and bar is not None and bar.phase == step.phase:
            # "Loading weights took" fills the bar of who says it, also when its last piece was lost.
            self._bars[worker] = evolve(bar, fraction=1.0, done=bar.total, eta=0.0)

    def _now(self) -> _Step | None:
        running = [bar for bar in self._bars.values() if bar.fraction != 1.0]
        if running:
            return min(running, key=lambda bar: (bar.phase, bar.fraction or 0.0))
        full = max(self._bars.values(), key=lambda bar: bar.phase, default=None)
        if full is None or (self._announced is not None and self._announced.phase > full.phase):
            return self._announced
        return full


def _without_eta(progress: Progress) -> tuple[object, ...]:
    return progress.phase, progress.fraction, progress.done, progress.total


def _step_of(line: str) -> _Step | None:
    bar = _BAR.search(line)
    if bar is not None:
        for pattern, phase in _BAR_PHASES:
            if pattern.search(line):
                return _bar_step(PHASES.index(phase), bar)
        return None
    for pattern, phase, ended in _PHASE_LINES:
        if pattern.search(line):
            return _Step(PHASES.index(phase), ended=ended)
    return None


def _bar_step(phase: int, bar: re.Match[str]) -> _Step:
    done, total = bar["done"], bar["total"]
    eta = _seconds(bar["left"])
    if done.isdecimal() and total.isdecimal() and int(total) > 0:
        # The percentage is rounded down, so the counters are more exact.
        return _Step(phase, min(1.0, int(done) / int(total)), int(done), int(total), eta)
    return _Step(phase, min(1.0, int(bar["percent"]) / 100), eta=eta)


def _seconds(text: str | None) -> float | None:
    """`18:47` or `1:02:03`; `?` is unknown."""
    if text is None:
        return None
    parts = text.split(":")
    if not 2 <= len(parts) <= 3 or not all(part.isdecimal() for part in parts):
        return None
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return float(seconds)
