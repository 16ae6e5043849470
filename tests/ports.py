"""Ports for engines under test: those of tests that run beside each other never overlap.

An engine listens only once it has loaded, so another test could take a port that is free for the moment.
"""

from __future__ import annotations

import os
import random

FIRST, PER_WORKER, WORKERS = 10_000, 2_240, 8
"""Below the kernel's ephemeral ports (32768), and below the default of `rendezvous_ports` (29500)."""


def engine_ports(count: int) -> tuple[int, int]:
    """The first and the last of so many ports, somewhere in the part that this worker has for itself."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "")
    worker = int(name.removeprefix("gw")) % WORKERS if name else random.SystemRandom().randrange(WORKERS)
    first = FIRST + worker * PER_WORKER + count * random.SystemRandom().randrange(PER_WORKER // count)
    return first, first + count - 1
