"""`llmgw sweep`: ends engines that a llmgw has left running, by the records in the state directory alone."""

from __future__ import annotations

import os
import shutil

from llmgw.cli.errors import DONE, FAILED, CommandError
from llmgw.cli.words import counted
from llmgw.domain import directories

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from llmgw.supervisor.sweep import SweepReport
    from llmgw.systemd import Job

USAGE = "llmgw sweep [--state-dir DIR] [--if-stopping] [--json]"
DETAILS = """\
SIGTERM, 10 s, SIGKILL; obeys the on_stop of each engine's record. Refused while a llmgw is running.
It needs no configuration file, and works where that is wrong.
Exit code: 0 nothing is left that should not be, 1 something does not die, 2 a llmgw is running.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-dir", metavar="DIR", help="the state directory; else $STATE_DIRECTORY, or where llmgw run has it"
    )
    parser.add_argument(
        "--if-stopping", action="store_true", help="only if systemd is stopping the unit for good (its ExecStopPost=)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    import trio

    state_dir = args.state_dir or directories.state_directory(os.environ, os.getuid(), os.path.expanduser("~"))
    report: SweepReport = trio.run(sweep_now, state_dir, args.if_stopping, args.quiet or args.json)
    if args.json:
        import json

        import attrs

        print(json.dumps({"api": 1, "state_dir": state_dir, **attrs.asdict(report)}))
    elif not args.quiet:
        print(summary(report, state_dir))
    if report.failed:
        if args.json:
            return FAILED
        raise CommandError(
            FAILED,
            f"cannot end {counted(len(report.failed), 'engine')}: {', '.join(report.failed)}",
            "a process that cannot be killed waits in the kernel; its record stays, and its GPUs stay taken",
        )
    return DONE


async def sweep_now(state_dir: str, if_stopping: bool, quiet: bool) -> SweepReport:
    from llmgw.supervisor.sweep import sweep

    job = await job_of_unit(cgroup_of_self()) if if_stopping else "none"

    def say(line: str) -> None:
        if not quiet:
            print(line, flush=True)

    return await sweep(state_dir, if_stopping=if_stopping, job=job, on_line=say)


async def job_of_unit(cgroup: str) -> Job:
    """What systemd is doing with the unit that this process runs in; `unreadable` is no proof of a stop."""
    from llmgw.supervisor.children import Children
    from llmgw.supervisor.tools import ToolResult, run_tool
    from llmgw.systemd import own_unit, pending_job

    children = Children()

    async def tool(argv: Sequence[str], *, timeout: float) -> ToolResult:
        return await run_tool(children, argv, timeout=timeout)

    if shutil.which("systemctl") is None:
        return "unreadable"
    return await pending_job(tool, own_unit(cgroup))


def cgroup_of_self() -> str:
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def summary(report: SweepReport, state_dir: str) -> str:
    # With the folder: "0 engines" of the wrong one would be taken for good news.
    parts = [f"{counted(len(report.ended), 'engine')} of {state_dir} ended"]
    if report.stayed:
        parts.append(f"{len(report.stayed)} left running as their on_stop says ({', '.join(report.stayed)})")
    if report.bad:
        parts.append(f"{counted(len(report.bad), 'record')} unreadable ({', '.join(report.bad)})")
    return "; ".join(parts)
