"""What the gateway costs beside other proxies: `python -m benchmarks.gateway [--quick] [--peers] [--json FILE]`.

Two C programs stand for engine and clients (`engine.c`, `load.c`, compiled on first use), so that the gateway is what
limits. The figures are CPU microseconds, user and system, of each proxy's whole process tree, per request and per chunk
of a paced stream: the median of three runs with their range, and its ratio to nginx in the same run. On a machine that
does something else they mean little; the load average is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from attrs import frozen

from benchmarks.gateway.bare import KEY
from benchmarks.measure import machine, wait_for

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmgw-benchmarks"
RUNS = 3

PEERS = {"sglang-router": "sglang-router", "vllm-router": "vllm-router", "litellm": "litellm[proxy]"}
"""Python packages, each installed into an environment of its own."""

TARGETS = {"bare": (0.40, 2.0), "full": (0.25, 2.2)}
"""At least so many times nginx's requests per CPU second, at most so many times its CPU per paced chunk."""


@frozen
class Profile:
    """One kind of load. `counts` is what the CPU time is divided by."""

    name: str
    connections: int
    words: str
    stream: bool
    counts: str

    @property
    def body(self) -> str:
        message = {"role": "user", "content": f"BENCH {self.words} "}
        return json.dumps({"model": "m", "messages": [message], "stream": self.stream})


PROFILES = (
    Profile("request", 32, "d=0 n=0 g=0 s=1024", False, "reqs"),
    Profile("chunk", 100, "d=0 n=150 g=20 s=1024", True, "chunks"),
)


@frozen
class Proxy:
    """Something between load and engine. `command` gets the port to listen on and the engine's."""

    name: str
    command: Callable[[int, int, Path], list[str]]
    headers: str = ""


def nginx(port: int, engine: int, folder: Path) -> list[str]:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    text = f"""
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/log;
events {{ worker_connections 20000; }}
http {{ access_log off; keepalive_requests 100000000; {temporary}
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 512; keepalive_requests 100000000; }}
  server {{ listen 127.0.0.1:{port}; client_max_body_size 64m;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; }} }} }}
"""
    (folder / "nginx.conf").write_text(text)
    return ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def haproxy(port: int, engine: int, folder: Path) -> list[str]:
    text = f"""
global
    nbthread 1
defaults
    mode http
    option http-no-delay
    timeout connect 5s
    timeout client 1h
    timeout server 1h
listen all
    bind 127.0.0.1:{port}
    http-reuse always
    server engine 127.0.0.1:{engine}
"""
    (folder / "haproxy.cfg").write_text(text)
    return ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")]


def llmgw(row: str) -> Proxy:
    def command(port: int, engine: int, folder: Path) -> list[str]:
        return [sys.executable, "-m", "benchmarks.gateway.bare", str(port), str(engine), row]

    return Proxy(row, command, f"authorization: Bearer {KEY}\r\n" if row == "full" else "")


def peer(name: str) -> Proxy:
    binary = CACHE / name / "bin"

    def command(port: int, engine: int, folder: Path) -> list[str]:
        target = f"http://127.0.0.1:{engine}"
        if name == "litellm":
            model = {
                "model_name": "m",
                "litellm_params": {"model": "openai/m", "api_base": f"{target}/v1", "api_key": "x"},
            }
            (folder / "litellm.yaml").write_text(json.dumps({"model_list": [model]}))
            return [str(binary / "litellm"), "--config", str(folder / "litellm.yaml"), "--port", str(port)]
        module = "sglang_router.launch_router" if name == "sglang-router" else "vllm_router.launch_router"
        options = ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--worker-urls", target]
        return [str(binary / "python"), "-m", module, *options]

    return Proxy(name, command)


def compile_tools() -> dict[str, str]:
    CACHE.mkdir(parents=True, exist_ok=True)
    tools = {}
    for name in ("engine", "load"):
        source, target = HERE / f"{name}.c", CACHE / name
        if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
            subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", str(target), str(source)], check=True)
        tools[name] = str(target)
    return tools


def install_peers() -> Iterator[Proxy]:
    for name, package in PEERS.items():
        folder = CACHE / name
        try:
            if not (folder / "installed").exists():
                subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
                subprocess.run([str(folder / "bin/pip"), "install", "-q", package], check=True, timeout=900)
                (folder / "installed").touch()
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{name}: cannot be installed here: {error}")
            continue
        yield peer(name)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def running(command: list[str], port: int, folder: Path, cpu: int) -> Iterator[psutil.Process]:
    """A program on one core, from when it listens until the end of its whole tree."""
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(process.pid, {cpu})
    try:
        wait_for(lambda: process.poll() is not None or answers(port), f"{command[0]} listens")
        if process.poll() is not None:
            raise SystemExit(f"{command[0]} ended: {(folder / 'output').read_text()[-500:]}")
        yield psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def spent(process: psutil.Process) -> float:
    """CPU seconds of a tree so far, children that have ended included."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


@frozen
class Figure:
    """CPU microseconds for one of what the profile counts, of each run."""

    values: tuple[float, ...]
    errors: int

    @property
    def median(self) -> float:
        return statistics.median(self.values) if self.values else float("nan")

    def __str__(self) -> str:
        if not self.values:
            return f"failed ({self.errors} errors)"
        range_ = f"{self.median:.1f} ({min(self.values):.1f} to {max(self.values):.1f})"
        return range_ if not self.errors else f"{range_}, {self.errors} errors"


def ask(load: str, port: int, profile: Profile, seconds: float, headers: str, cpu: int) -> dict[str, Any]:
    words = [load, f"127.0.0.1:{port}", str(profile.connections), str(seconds), profile.body, headers]
    pinned = ["taskset", "-c", str(cpu), *words] if shutil.which("taskset") else words
    done = subprocess.run(pinned, capture_output=True, check=True, timeout=seconds + 60)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def measure(proxy: Proxy, tools: dict[str, str], engine: int, seconds: float, runs: int) -> dict[str, Figure]:
    figures = {}
    cores = sorted(os.sched_getaffinity(0))
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(proxy.command(port, engine, folder), port, folder, cores[-1]) as process:
            ask(tools["load"], port, PROFILES[0], 1.0, proxy.headers, cores[0])
            for profile in PROFILES:
                values, errors = [], 0
                for _ in range(runs):
                    time.sleep(0.7)
                    before = spent(process)
                    answer = ask(tools["load"], port, profile, seconds, proxy.headers, cores[0])
                    after = spent(process)
                    errors += answer["errs"]
                    if answer[profile.counts]:
                        values.append((after - before) * 1e6 / answer[profile.counts])
                figures[profile.name] = Figure(tuple(values), errors)
    return figures


def verdicts(all_figures: dict[str, dict[str, Figure]]) -> Iterator[str]:
    """Each row beside its targets."""
    floor = all_figures["nginx"]
    for row, (least, most) in TARGETS.items():
        figures = all_figures[row]
        speed = floor["request"].median / figures["request"].median
        cost = figures["chunk"].median / floor["chunk"].median
        yield f"{row}: {speed:.2f} x nginx per request (at least {least}): {'reached' if speed >= least else 'missed'}"
        yield f"{row}: {cost:.2f} x nginx per paced chunk (at most {most}): {'reached' if cost <= most else 'missed'}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run of each")
    parser.add_argument("--peers", action="store_true", help="also routers from PyPI, installed on first use")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    seconds, runs = (1.5, 1) if args.quick else (3.0, RUNS)
    tools = compile_tools()
    proxies = [Proxy("nginx", nginx), Proxy("haproxy", haproxy), llmgw("bare"), llmgw("full")]
    proxies = [proxy for proxy in proxies if proxy.name in TARGETS or shutil.which(proxy.name)]
    if args.peers:
        proxies += install_peers()
    print(machine())
    engine = free_port()
    everything: dict[str, dict[str, Figure]] = {}
    with tempfile.TemporaryDirectory() as name, running([tools["engine"], str(engine)], engine, Path(name), 0):
        for proxy in proxies:
            everything[proxy.name] = measure(proxy, tools, engine, seconds, runs)
    print("\n| proxy | CPU us per request | CPU us per paced chunk |\n|---|---|---|")
    for row, figures in everything.items():
        print(f"| {row} | {figures['request']} | {figures['chunk']} |")
    print()
    if "nginx" in everything:
        print("\n".join(verdicts(everything)))
    if args.json:
        plain = {row: {name: list(f.values) for name, f in figures.items()} for row, figures in everything.items()}
        Path(args.json).write_text(json.dumps({"machine": machine(), "cpu_us": plain}, indent=1) + "\n")


if __name__ == "__main__":
    main()
