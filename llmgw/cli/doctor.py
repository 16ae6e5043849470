"""`llmgw doctor`: what is wrong with this machine for engines, and how to mend it."""

from __future__ import annotations

import os
import sys

from llmgw.cli.errors import DONE, FAILED

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from llmgw.config.model import Config
    from llmgw.config.parse import Parsed
    from llmgw.domain.problem import Problem
    from llmgw.preflight.doctor import Control, Finding, Machine

USAGE = "llmgw doctor [--json]"
DETAILS = """\
Looks at the driver, GPUs, adapters, limits, ports, disks, the engines of the configuration (if there is one) and the
installed unit (if there is one), and whether llmgw answers. Nothing is changed.

Exit code: 0 without problems (warnings are none), else 1.

examples:
  llmgw doctor
  llmgw doctor --json | jq '.findings[] | select(.level != "ok")'
"""
PATIENCE = 3.0
"""Seconds for systemctl: it waits for ever on a bus that does not answer."""
PROPERTIES = ("LoadState", "ActiveState", "KillMode", "Delegate", "LimitMEMLOCK", "LimitNOFILE")
SIGNS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from llmgw.preflight.doctor import diagnose

    findings = diagnose(look_at_machine(args))
    if args.json:
        import json

        import attrs

        print(json.dumps({"api": 1, "findings": [attrs.asdict(finding) for finding in findings]}))
    else:
        sys.stdout.write("\n".join(lines(findings)) + "\n")
    return FAILED if any(finding.level == "problem" for finding in findings) else DONE


def lines(findings: tuple[Finding, ...]) -> list[str]:
    from llmgw.domain.display import neutralise

    width = max(len(finding.check) for finding in findings)
    text = []
    for finding in findings:
        text.append(f"{SIGNS[finding.level]}  {finding.check:<{width}}  {finding.text}")
        if finding.remedy is not None and finding.level != "ok":
            text.append(f"{'':<{width + 11}}{finding.remedy}")
    return [neutralise(line) for line in text]


def look_at_machine(args: argparse.Namespace) -> Machine:
    """Gather everything; what cannot be read is left out."""
    import resource

    from llmgw.cli.inventory import look_here
    from llmgw.discovery.pci import has_nvidia_card
    from llmgw.preflight.doctor import Machine

    parsed = configuration(args.config)
    facts = look_here(args.config)
    node = parsed.config.node if parsed is not None and parsed.config is not None else None
    first, last = node.engine_ports if node is not None else (8101, 8499)
    return Machine(
        inventory=facts.inventory,
        has_card=has_nvidia_card(),
        availability=facts.availability,
        fabric=facts.node.fabric,
        host=facts.node.host,
        disks=free_space(parsed),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        pidfd=hasattr(os, "pidfd_open") and can_open_pidfd(),
        proc_hidden=is_proc_hidden(),
        unit=unit_properties(),
        control=ask_llmgw(args, parsed),
        late_stop=late_stop_of(parsed),
        engines=engines_of(parsed),
        config_errors=errors_in(parsed),
        engine_ports=(first, last),
        ephemeral_ports=parsed.facts.ephemeral_ports if parsed is not None else None,
        ports_taken=ports_taken(first, last, parsed.config if parsed is not None else None),
    )


def configuration(config: str | None) -> Parsed | None:
    from llmgw.cli.config_file import config_path
    from llmgw.cli.errors import CommandError
    from llmgw.config.load import load

    try:
        return load(config_path(config), running=False)
    except CommandError:
        return None


def ask_llmgw(args: argparse.Namespace, parsed: Parsed | None) -> Control:
    """Whether the llmgw of the option, of the configuration, or of the usual places answers this user."""
    from llmgw.control import client
    from llmgw.preflight.doctor import Control

    socket = args.socket
    if socket is None and parsed is not None and parsed.config is not None:
        socket = parsed.config.supervisor.socket
    socket = client.find_socket(socket, os.environ, os.getuid())
    try:
        client.request(socket, "GET", "/v1/status")
    except client.ClientError as error:
        absent = isinstance(error.__cause__, FileNotFoundError)
        return Control(socket, error.message, (error.hint or "").replace("\n", "; ") or None, absent)
    return Control(socket)


def late_stop_of(parsed: Parsed | None) -> Problem | None:
    from llmgw.cli.unit import UNIT, ask_systemd
    from llmgw.preflight.stop_time import stop_timeout_problem

    return stop_timeout_problem(UNIT, ask_systemd(), parsed.specs) if parsed is not None else None


def errors_in(parsed: Parsed | None) -> int | None:
    from llmgw.domain.problem import errors_of

    return None if parsed is None else len(errors_of(parsed.problems))


def engines_of(parsed: Parsed | None) -> Mapping[str, tuple[str | None, str | None]]:
    if parsed is None:
        return {}
    programs, versions = parsed.facts.programs, parsed.facts.engine_versions
    words = dict.fromkeys(spec.command[0] for spec in parsed.specs if spec.command)
    return {word: (programs.get(word), versions.get(programs.get(word) or "")) for word in words}


def free_space(parsed: Parsed | None) -> Mapping[str, int]:
    """Free bytes of the disks that records, logs and weights are written to."""
    from llmgw.domain.directories import log_directory, state_directory

    home = os.path.expanduser("~")
    state = state_directory(os.environ, os.getuid(), home)
    logs = log_directory(os.environ, state)
    if parsed is not None and parsed.config is not None:
        state, logs = parsed.config.supervisor.state_dir, parsed.config.supervisor.log_dir
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    weights = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    found = {}
    for name, path in (("state disk", state), ("log disk", logs), ("weights disk", weights)):
        free = _free(path)
        if free is not None:
            found[name] = free
    return found


def _free(path: str) -> int | None:
    while path and not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path or "/")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def ports_taken(first: int, last: int, config: Config | None) -> Mapping[int, str]:
    """Who listens in the range, engines of the running llmgw left out."""
    from llmgw.cli.verdict import own_pids
    from llmgw.supervisor.listeners import port_holders

    holders = port_holders(range(first, last + 1))
    own = own_pids(holders.values(), config)
    return {port: str(holder) for port, holder in holders.items() if holder.pid not in own}


def can_open_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def is_proc_hidden() -> bool:
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return False
    options = [fields[3].split(",") for fields in mounts if len(fields) > 3 and fields[1] == "/proc"]
    hidden = {"hidepid=1", "hidepid=2", "hidepid=noaccess", "hidepid=invisible", "hidepid=ptraceable"}
    return bool(options) and not hidden.isdisjoint(options[-1]) and os.geteuid() != 0


def unit_properties() -> Mapping[str, str] | None:
    """The installed unit as systemctl shows it; None where there is none, or no systemd."""
    import subprocess

    from llmgw.cli.unit import UNIT

    argv = ["systemctl", "show", UNIT, *(word for name in PROPERTIES for word in ("-p", name))]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    return found if done.returncode == 0 and found.get("LoadState") == "loaded" else None
