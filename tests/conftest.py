"""What holds for every test."""

from __future__ import annotations

import os
import signal

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long proofs run when they are asked for; the rest is CI's, which has fifteen minutes on two cores."""
    if os.environ.get("LLMGW_TEST_PROOF") == "1":
        return
    skip = pytest.mark.skip(reason="a long proof: set LLMGW_TEST_PROOF=1")
    for item in items:
        if item.get_closest_marker("proof") is not None:
            item.add_marker(skip)
