"""SIGKILL of llmgw at random moments: `python -m benchmarks.kill_points [POINTS] [SEED]`."""

from __future__ import annotations

import sys
import time

from benchmarks.measure import machine
from tests.kill_points import run_points


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    began = time.monotonic()
    points = run_points(seed, count)
    bad = [point for point in points if not point.is_good]
    print(f"{machine()}; seed {seed}, {time.monotonic() - began:.0f} s")
    print(f"{count} kills, {len(bad)} with another number of engines than one per shard, or with an orphan")
    for point in bad:
        print(f"  {point}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
