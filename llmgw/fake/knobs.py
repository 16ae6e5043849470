# ruff: noqa: E501  (one row of the table is one knob)
"""The knobs of the fakes: one table of `--fake-...` options, readable from argv and from the environment.

Precedence, weakest first: `FAKE_ENGINE_FLAGS` (a whole list, split like a shell line), one variable per knob
(`FAKE_ENGINE_TIME_FACTOR=0.1`), the command line. Seconds given in a knob are plain seconds; only the built-in
times of the imitated engine are multiplied by the factor.
"""

import os
from collections.abc import Callable, Mapping


class KnobError(Exception):
    """A knob that does not exist or has a value that does not fit."""


def _switch(text: str) -> bool:
    if text in ("", "1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither on nor off")


def _failure(text: str) -> str:
    from llmgw.fake import failures

    if text and text.lower() not in failures.TABLE:
        raise ValueError(f"no failure is called {text!r}; --fake-failures lists them")
    return text


def _choice(*allowed: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return convert


GARBAGE = (
    "none", "not-http", "not-json", "other-json", "html-404", "empty", "huge", "endless", "drip", "silent", "close",
    "deep-json",
)  # fmt: skip


class Knobs:
    """All settings of one fake. The class attributes are the defaults."""

    # time and loading
    time_factor: float = 0.02
    load_seconds: float | None = None
    never_ready: bool = False
    progress: str = "bar"
    progress_writes: str = "fragments"
    short_children: bool = True
    # failing
    fail: str = ""
    fail_after: float | None = None
    attempts_file: str = ""
    succeed_on_attempt: int = 0
    exit_after: float | None = None
    exit_code: int = 1
    exit_signal: int = 0
    # answers
    health_delay: float = 0.0
    health_503_after: float | None = None
    health_503_for: float | None = None
    health_garbage: str = "none"
    models_garbage: str = "none"
    wrong_model_name: bool = False
    token_interval: float = 0.02
    first_token_delay: float = 0.0
    tokens: int = 16
    stall_after: int | None = None
    wake_fails: bool = False
    metrics: bool = True
    access_log: bool = True
    # log
    noise: bool = True
    burst_lines: int = 45
    flood_lines_per_second: int = 0
    flood_seconds: float | None = None
    long_line: int = 19000
    bad_bytes: bool = True
    # processes
    wrapper: str = "none"
    title: bool = True
    detached: str = "none"
    ignore_term: bool = False
    worker_ignores_term: bool = False
    # stopping
    streams_at_stop: str = "hang"
    swallow_term: bool = True
    # leftovers and memory
    shm: bool = True
    shm_bytes: int = 16384
    temp_files: bool = True
    gpu_mib: int = 70000
    gpu_release: str = "0"
    # plain
    ready_line: str = ""
    children: str = ""
    serve: bool = False
    port: int = 0


Converter = Callable[[str], object]

TABLE: dict[str, tuple[Converter, str]] = {
    "time-factor": (float, "all built-in times are multiplied by this; 1 is as slow as the real engine"),
    "load-seconds": (float, "seconds from the start to ready, in place of the engine's own time"),
    "never-ready": (_switch, "load for ever; progress goes on as --fake-progress says"),
    "progress": (_choice("bar", "lines", "silent"), "how a load shows progress: a bar by carriage returns, a line each, not at all"),
    "progress-writes": (_choice("fragments", "one-write", "split"), "a bar's fragments: one by one, all in one write, or cut inside a number"),
    "short-children": (_switch, "children that end with 0 during the load and mean nothing"),
    "fail": (_failure, "fail while starting: d1 to d34, or oom-kill, segfault, abort, exit-0, exit-7, llama-load (see --fake-failures)"),
    "fail-after": (float, "seconds until --fake-fail happens, in place of the usual moment"),
    "attempts-file": (str, "file that counts the starts, for --fake-succeed-on-attempt"),
    "succeed-on-attempt": (int, "--fake-fail (d1 if not given) happens before the attempt with this number only"),
    "exit-after": (float, "seconds of being ready after which the leader exits on its own"),
    "exit-code": (int, "exit code for --fake-exit-after"),
    "exit-signal": (int, "with --fake-exit-after: die of this signal instead"),
    "health-delay": (float, "seconds that each health answer takes"),
    "health-503-after": (float, "seconds of being ready after which health says 503"),
    "health-503-for": (float, "how long that 503 lasts; without it, for ever"),
    "health-garbage": (_choice(*GARBAGE), "answer health with this instead: " + ", ".join(GARBAGE)),
    "models-garbage": (_choice(*GARBAGE), "the same for /v1/models"),
    "wrong-model-name": (_switch, "list another model than the one asked for"),
    "token-interval": (float, "seconds between two tokens"),
    "first-token-delay": (float, "seconds before the first token of each request"),
    "tokens": (int, "tokens of an answer when the request sets no max_tokens"),
    "stall-after": (int, "after so many steps no token comes any more, while health stays well"),
    "wake-fails": (_switch, "an engine that was put to sleep cannot be woken"),
    "metrics": (_switch, "serve /metrics (where the engine's own flags allow it)"),
    "access-log": (_switch, "write access lines (unless the engine's own flags stop them)"),
    "noise": (_switch, "the lines that look like errors in every start and exit and are none"),
    "burst-lines": (int, "filler lines written at once during the load; 0 leaves them out"),
    "flood-lines-per-second": (int, "write so many lines a second once started, for --fake-flood-seconds or for ever"),
    "flood-seconds": (float, "length of the flood"),
    "long-line": (int, "bytes of the longest line of the start (SGLang's server_args, vLLM has a fifth of it)"),
    "bad-bytes": (_switch, "one line of the start is no UTF-8"),
    "wrapper": (_choice("none", "exec", "stay", "deserter"), "start by a shell: that execs after 0.1 s, that stays, or that leaves on SIGTERM without telling its child"),
    "title": (_switch, "children overwrite their command line and environment as setproctitle does"),
    "detached": (_choice("none", "setpgrp", "setsid", "setsid-ignore-term", "double-fork"), "an extra child that leaves the group or the session"),
    "ignore-term": (_switch, "the leader ignores SIGTERM when ready"),
    "worker-ignores-term": (_switch, "workers ignore SIGTERM"),
    "streams-at-stop": (_choice("hang", "cut"), "what SIGTERM does to open streams where the engine races: hang for ever or be cut short"),
    "swallow-term": (_switch, "vLLM swallows SIGTERM while loading, once its core exists"),
    "shm": (_switch, "shared memory names in /dev/shm, left there by SIGKILL"),
    "shm-bytes": (int, "size of each such name (the real ones are 160 and 240 MiB, sparse)"),
    "temp-files": (_switch, "files and sockets in TMPDIR that nobody removes"),
    "gpu-mib": (int, "memory held on each GPU by its worker, where FAKE_GPU_DIR is set"),
    "gpu-release": (str, "seconds after the holder's end until its GPU memory is free, or 'never'"),
    "ready-line": (str, "plain: print this line when started"),
    "children": (str, "plain: comma-separated children: plain, setpgrp, setsid, ignore-term, setsid-ignore-term, double-fork"),
    "serve": (_switch, "plain: answer HTTP on --port or --fake-port as llama-server does"),
    "port": (int, "plain: the port for --fake-serve"),
}  # fmt: skip


def parse(argv: list[str], environ: Mapping[str, str]) -> tuple[Knobs, list[str]]:
    """Take the knobs out of `argv`; returns them and what is left for the engine's own parser.

    Raises KnobError.
    """
    knobs = Knobs()
    whole = environ.get("FAKE_ENGINE_FLAGS", "").strip()
    if whole:
        import shlex

        left = _take(knobs, shlex.split(whole))
        if left:
            raise KnobError(f"FAKE_ENGINE_FLAGS: not a knob: {left[0]}")
    for name in TABLE:
        text = environ.get("FAKE_ENGINE_" + name.upper().replace("-", "_"))
        if text is not None:
            _set(knobs, name, text)
    return knobs, _take(knobs, argv)


def _take(knobs: Knobs, argv: list[str]) -> list[str]:
    rest = []
    words = iter(argv)
    for word in words:
        if not word.startswith("--fake-"):
            rest.append(word)
            continue
        name, equals, value = word.removeprefix("--fake-").partition("=")
        turned_off = name.startswith("no-") and name.removeprefix("no-") in TABLE
        if turned_off:
            name, value, equals = name.removeprefix("no-"), "off", "="
        if name not in TABLE:
            raise KnobError(f"--fake-{name}: no such knob; --fake-help lists them")
        if not equals and TABLE[name][0] is not _switch:
            try:
                value = next(words)
            except StopIteration:
                raise KnobError(f"--fake-{name}: a value is missing") from None
        _set(knobs, name, value)
    return rest


def _set(knobs: Knobs, name: str, text: str) -> None:
    try:
        value = TABLE[name][0](text)
    except ValueError as error:
        raise KnobError(f"--fake-{name}: {error}") from None
    setattr(knobs, name.replace("-", "_"), value)


def help_text() -> str:
    lines = [
        "usage: llmgw-fake-engine [--fake-KNOB VALUE ...] PROFILE [the engine's own arguments]",
        "",
        "profiles:  vllm serve MODEL ... | sglang serve --model-path MODEL ... | llamacpp -m MODEL ... | plain",
        "",
        "Knobs may stand anywhere, as --fake-KNOB VALUE or --fake-KNOB=VALUE; switches also as --fake-KNOB and",
        "--fake-no-KNOB. They can come from FAKE_ENGINE_FLAGS or from FAKE_ENGINE_KNOB in the environment.",
        "Seconds in a knob or in an engine's own flag are real seconds; built-in times are scaled by time-factor.",
        "",
    ]
    for name, (convert, text) in TABLE.items():
        default = getattr(Knobs, name.replace("-", "_"))
        shown = ("on" if default else "off") if convert is _switch else default
        lines.append(f"  --fake-{name}  [{'-' if shown in (None, '') else shown}]")
        lines.append(f"      {text}")
    return "\n".join(lines) + "\n"


def count_attempt(path: str) -> int:
    """Add one start to the counter file and return its new value; safe when several start at once."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        number = int(os.read(descriptor, 32) or b"0") + 1
        os.pwrite(descriptor, b"%d\n" % number, 0)
        return number
    finally:
        os.close(descriptor)
