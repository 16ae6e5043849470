"""What holds for every test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

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

WHOLE_MACHINE = ("system/", "test_systemd.py")
"""Tests that need the machine for themselves: they look at all of it, or measure."""

ONE_AT_A_TIME = ("fake/",)
"""Tests that look at a part of the machine (/dev/shm) that others of the same folder change."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests may run beside others, and leave the long proofs to who asks for them."""
    for item in items:
        place = item.path.relative_to(TESTS).as_posix()
        is_system = item.get_closest_marker("systemd") is not None or item.get_closest_marker("real_llama") is not None
        if is_system or place.startswith(WHOLE_MACHINE):
            item.add_marker(pytest.mark.alone)
        elif (folder := next((name for name in ONE_AT_A_TIME if place.startswith(name)), None)) is not None:
            item.add_marker(pytest.mark.xdist_group(folder))
    if os.environ.get("LLMGW_TEST_PROOF") == "1":
        return
    skip = pytest.mark.skip(reason="a long proof: set LLMGW_TEST_PROOF=1")
    for item in items:
        if item.get_closest_marker("proof") is not None:
            item.add_marker(skip)
