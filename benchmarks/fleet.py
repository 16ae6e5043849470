"""The same programs under llmgw, supervisord and circus."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.measure import peers, wait_for
from tests.fake_gpus import FakeGpus
from tests.node import FAKE, Node, fake

FIRST_PORT = 12000


def write_fleet(node: Node, count: int, more: str = "") -> None:
    """`count` one-process engines, each with a port of its own, probed as by default."""
    command = fake("llamacpp", "--fake-time-factor=0.001")
    shards = "\n".join(f'[[shard]]\nname = "s{n}"\nmodel = "m{n}"\nport = {FIRST_PORT + n}\n' for n in range(count))
    node.write(
        f'[defaults]\nengine = "llamacpp"\nrestart_delay = "100ms"\nrestart_limit = 0\n{more}\n'
        f"[defaults.llamacpp]\ncommand = {command}\n{shards}"
    )


@contextmanager
def llmgw(count: int, more: str = "", *, gpus: int = 0) -> Iterator[Node]:
    """llmgw with all of them Ready; with `gpus` they share so many pretended cards."""
    with Node(LLMGW_STRICT="") as node:
        if gpus:
            FakeGpus(node, gpus=gpus)
            more += '\ngpus = 1\nshare_gpus = true\ngpu_memory = "500MiB"'
        write_fleet(node, count, more)
        node.start()
        wait_for(
            lambda: all(shard["state"] == "ready" for shard in node.status()["shards"]),
            "every shard is ready",
            60 + count,
        )
        yield node


def _program(number: int) -> str:
    return " ".join([*FAKE, "llamacpp", "--fake-time-factor=0.001", "--port", str(FIRST_PORT + number)])


@contextmanager
def supervisord(count: int) -> Iterator[tuple[psutil.Process, Path]]:
    """supervisord with the same programs; yields its process and its configuration."""
    folder = Path(tempfile.mkdtemp(prefix="sv"))
    config = folder / "supervisord.conf"
    programs = "\n".join(
        f"[program:s{n}]\ncommand={_program(n)}\nautorestart=true\nstartsecs=0\nstopasgroup=true\nkillasgroup=true\n"
        f"stdout_logfile={folder}/s{n}.log\nredirect_stderr=true\n"
        for n in range(count)
    )
    config.write_text(
        f"[supervisord]\nnodaemon=true\nlogfile={folder}/log\npidfile={folder}/pid\nminfds={1024 + 8 * count}\n"
        f"[unix_http_server]\nfile={folder}/sock\n[supervisorctl]\nserverurl=unix://{folder}/sock\n"
        "[rpcinterface:supervisor]\n"
        "supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface\n" + programs
    )
    process = subprocess.Popen(
        [str(peers() / "supervisord"), "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        found = psutil.Process(process.pid)
        wait_for(lambda: len(found.children()) >= count, "supervisord has started everything", 60 + count)
        yield found, config
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def circus(count: int) -> Iterator[psutil.Process]:
    """circusd with the same programs."""
    folder = Path(tempfile.mkdtemp(prefix="ci"))
    config = folder / "circus.ini"
    watchers = "\n".join(f"[watcher:s{n}]\ncmd={_program(n)}\ncopy_env=True\n" for n in range(count))
    config.write_text(
        f"[circus]\nendpoint=ipc://{folder}/e\npubsub_endpoint=ipc://{folder}/p\nstats_endpoint=ipc://{folder}/s\n"
        + watchers
    )
    process = subprocess.Popen(
        [str(peers() / "circusd"), str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        found = psutil.Process(process.pid)
        wait_for(lambda: len(found.children()) >= count, "circus has started everything", 60 + count)
        yield found
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            for child in found.children(recursive=True):
                child.kill()
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


if sys.platform != "linux":  # pragma: no cover
    raise SystemExit("Linux only")
