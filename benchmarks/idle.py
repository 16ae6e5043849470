"""What idle, probed engines cost: `python -m benchmarks.idle [N] [SECONDS]`."""

from __future__ import annotations

import sys
import time

from benchmarks.fleet import circus, llmgw, supervisord
from benchmarks.measure import load_of, machine

SETTLE = 10.0
"""Seconds after the last start until it counts as idle."""


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    print(f"{machine()}; {count} one-process engines, {seconds:g} s each")
    with llmgw(count) as node:
        assert node.process is not None
        time.sleep(SETTLE)
        print(f"llmgw, probing each engine every 5 s   {load_of(node.process.pid, seconds)}")
    with llmgw(count, gpus=8) as node:
        assert node.process is not None
        time.sleep(SETTLE)
        print(f"llmgw, the same on 8 shared GPUs       {load_of(node.process.pid, seconds)}")
    with supervisord(count) as (process, _):
        time.sleep(SETTLE)
        print(f"supervisord, not probing               {load_of(process.pid, seconds)}")
    with circus(count) as process:
        time.sleep(SETTLE)
        print(f"circus, not probing                    {load_of(process.pid, seconds)}")


if __name__ == "__main__":
    main()
