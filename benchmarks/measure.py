"""What all benchmarks share: percentiles, CPU and memory of a process, peers in an environment of their own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from attrs import frozen

PEERS = ("supervisor", "circus")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(values: Sequence[float], unit: str = "ms") -> str:
    """p50, p99 and the largest."""
    return (
        f"p50 {percentile(values, 0.5):.2f} {unit}, p99 {percentile(values, 0.99):.2f} {unit}, "
        f"max {max(values):.2f} {unit} (n = {len(values)})"
    )


@frozen
class Load:
    """CPU in percent of one core over a time, and the memory at its end in MiB (RSS and, where readable, PSS)."""

    cpu: float
    rss: float

    def __str__(self) -> str:
        return f"{self.cpu:.2f} % of a core, {self.rss:.1f} MiB"


def load_of(pid: int, seconds: float) -> Load:
    """What a process takes while nothing is asked of it."""
    process = psutil.Process(pid)
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, took = process.cpu_times(), time.monotonic() - began
    spent = (after.user + after.system) - (before.user + before.system)
    return Load(100 * spent / took, process.memory_info().rss / 2**20)


def machine() -> str:
    """One line about where this ran."""
    return (
        f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f}"
    )


def peers() -> Path:
    """The `bin` folder of an environment with the peers; made on first use."""
    folder = Path(tempfile.gettempdir()) / f"llmgw-peers-{platform.python_version()}"
    binary = folder / "bin"
    if not (binary / "supervisord").exists() or not (binary / "circusd").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        # supervisor imports pkg_resources, which setuptools has dropped in its newest releases.
        subprocess.run([str(binary / "pip"), "install", "-q", "setuptools<81", *PEERS], check=True)
    return binary


def wait_for(condition: object, what: str, timeout: float = 120.0) -> None:
    """Wait until `condition()` is true."""
    assert callable(condition)
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {timeout:g} s: {what}")
        time.sleep(0.05)
