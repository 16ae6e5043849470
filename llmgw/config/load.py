"""The shell around `parse`: reads files, expands includes, and gathers the facts that the files ask about."""

from __future__ import annotations

import contextlib
import glob
import grp
import os
import resource
import socket
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil
from attrs import evolve

from llmgw.config import model_files
from llmgw.config.document import MAX_FILE, SourceFile, read_document
from llmgw.config.parse import Include, Parsed, includes_of, parse
from llmgw.config.reading import SECRET_MAX
from llmgw.discovery.fabric_sysfs import read_fabric
from llmgw.discovery.installed import engine_version, find_program
from llmgw.domain.fabric import FabricInventory
from llmgw.domain.hardware import Inventory
from llmgw.domain.host import HostFacts, PathFact, PortHolder
from llmgw.domain.problem import Problem, Where
from llmgw.domain.shard import ShardSpec
from llmgw.engines.adapter import profile

INCLUDED_MOST = 1000
"""Files; a glob that meets more is a mistaken one."""
ROUNDS = 4
"""Reading again after gathering what was asked: one round for most files; a second where one answer leads to another
question (a credential's second name)."""
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p"})


def load(
    path: str,
    *,
    node: str | None = None,
    offline: bool = False,
    running: bool = True,
    env: Mapping[str, str] | None = None,
    inventory: Inventory | None = None,
    port_holders: Mapping[int, PortHolder] | None = None,
    fabric: FabricInventory | None = None,
    sysfs: str = "/sys",
) -> Parsed:
    """Read a configuration with all its includes. Blocks (files only). Never raises for what a user wrote.

    `running` is for the process that will act on it: what only it can see (credentials) is an error when missing.
    Commands that merely look at a file pass False; an empty text stands for such a secret then.
    `fabric` is that of a node which is not this one; without it the adapters below `sysfs` are read when asked for.
    The facts behind the outcome are in `Parsed.facts`, complete for `preflight` but for inventory and port holders
    that were not given.
    """
    variables = dict(os.environ if env is None else env)
    home = variables.get("HOME") or os.path.expanduser("~")
    facts = gather_host(variables, home, inventory=inventory, port_holders=port_holders)
    facts = evolve(facts, fabric=fabric)
    files, problems = read_files(path, variables, home)
    contents: dict[str, bytes | str] = {}
    parsed = Parsed(None, (), {})
    for _ in range(ROUNDS):
        parsed = parse(files, facts, contents=contents, problems=problems, node=node, offline=offline, running=running)
        paths = parsed.asked.paths - facts.paths.keys()
        secrets = parsed.asked.contents - contents.keys()
        adapters = parsed.asked.adapters and facts.fabric is None
        if not paths and not secrets and not adapters:
            break
        if adapters:
            facts = evolve(facts, fabric=read_fabric(sysfs))
        facts = evolve(facts, paths={**facts.paths, **{p: path_fact(p) for p in paths}})
        contents |= {p: _secret_content(p) for p in secrets}
    return parsed if offline else evolve(parsed, facts=facts_for(parsed.specs, parsed.facts))


# ---------------------------------------------------------------------------------------------------------------- files


def read_files(path: str, env: Mapping[str, str], home: str) -> tuple[list[SourceFile], list[Problem]]:
    """The main file and what it includes, in reading order, with problems for what cannot be read."""
    main, problem = _read(path, path, None)
    if main is None:
        hint = "give the path of an llmgw.toml, or write one: llmgw.toml.example shows everything"
        return [], [evolve(problem, hint=hint) if problem else Problem("unreadable", f"cannot read {path}")]
    files = [main]
    problems: list[Problem] = []
    seen = {main.real: main.path}
    for include in includes_of(read_document(main), env, home):
        for found, shown in _matches(include):
            file, problem = _read(found, shown, include)
            if problem is not None or file is None:
                problems += [problem] if problem else []
            elif file.real in seen:
                message = f"{shown} is included twice (first as {seen[file.real]})"
                problems.append(Problem("included-twice", message, "remove one of the two", include.where))
            else:
                seen[file.real] = shown
                files.append(file)
    if len(files) > INCLUDED_MOST:
        message = f"{len(files) - 1} files are included; {INCLUDED_MOST} are the most"
        problems.append(Problem("too-many-files", message, "name a narrower glob", Where(main.path)))
        files = files[:INCLUDED_MOST]
    return files, problems


def _matches(include: Include) -> list[tuple[str, str]]:
    if not include.is_glob:
        return [(include.pattern, include.shown)]
    found = sorted(p for p in glob.glob(include.pattern, recursive=True) if os.path.isfile(p))
    # Messages show a file as the pattern wrote its folder: relative stays relative.
    prefix_real, prefix_shown = _fixed_part(include.pattern), _fixed_part(include.shown)
    return [(p, prefix_shown + p[len(prefix_real) :] if p.startswith(prefix_real) else p) for p in found]


def _fixed_part(pattern: str) -> str:
    magic = min((i for i in (pattern.find(c) for c in "*?[") if i >= 0), default=len(pattern))
    return pattern[: pattern.rfind("/", 0, magic) + 1]


def _read(path: str, shown: str, include: Include | None) -> tuple[SourceFile | None, Problem | None]:
    where = include.where if include else Where(shown)
    try:
        # Not a device or a pipe, which would never end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None, Problem("unreadable", f"{shown} is not a regular file", where=where)
        with open(path, "rb") as file:
            data = file.read(MAX_FILE + 1)
    except (OSError, ValueError) as error:
        why = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
        return None, Problem("unreadable", f"cannot read {shown}: {why}", where=where)
    real = os.path.realpath(path)
    folder = os.path.dirname(os.path.abspath(path))
    return SourceFile(shown, data, folder, real, include.where.path if include else None), None


def _secret_content(path: str) -> bytes | str:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "is not a regular file"
        with open(path, "rb") as file:
            return file.read(SECRET_MAX + 1)
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {(error.strerror or str(error)).lower()}"


# ---------------------------------------------------------------------------------------------------------------- facts


def gather_host(
    env: Mapping[str, str],
    home: str,
    *,
    inventory: Inventory | None = None,
    port_holders: Mapping[int, PortHolder] | None = None,
    with_groups: bool = True,
) -> HostFacts:
    """Facts that do not depend on what the files ask for. The groups are left out where nobody asks for them: with a
    directory service their list is long, and may come from a machine that does not answer.
    """
    return HostFacts(
        hostname=socket.gethostname(),
        uid=os.geteuid(),
        home=home,
        env=env,
        groups=frozenset(group.gr_name for group in grp.getgrall()) if with_groups else frozenset(),
        port_holders=port_holders or {},
        ephemeral_ports=_ephemeral_ports(),
        addresses=_addresses(),
        inventory=inventory,
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK),
    )


def facts_for(specs: Iterable[ShardSpec], facts: HostFacts) -> HostFacts:
    """The facts with what preflight asks about these shards: programs, weights, folders, models' own settings."""
    programs = dict(facts.programs)
    paths = dict(facts.paths)
    models = dict(facts.model_configs)
    versions = dict(facts.engine_versions)
    folders = dict(facts.model_folders)
    ggufs = dict(facts.gguf_files)
    for spec in specs:
        if spec.command and spec.command[0] not in programs:
            programs[spec.command[0]] = find_program(spec, facts.env)
        program, distribution = (
            programs.get(spec.command[0]) if spec.command else None,
            profile(spec.engine).distribution,
        )
        if program and distribution and program not in versions:
            versions[program] = engine_version(program, distribution)
        for path in (spec.weights, spec.workdir):
            if path and path.startswith("/"):
                paths[path] = path_fact(path)
        weights = spec.weights
        if weights and weights.startswith("/") and weights not in models and weights not in folders:
            config = model_files.read_config(weights)
            if config is not None:
                models[weights] = config
            if os.path.isdir(weights):
                folders[weights] = model_files.read_folder(weights, config)
            elif os.path.isfile(weights) and weights not in ggufs:
                ggufs[weights] = model_files.read_gguf(weights)
    return evolve(
        facts,
        programs=programs,
        paths=paths,
        model_configs=models,
        model_folders=folders,
        gguf_files=ggufs,
        engine_versions=versions,
    )


def path_fact(path: str) -> PathFact:
    """What stands at a path; a link is followed."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return PathFact(exists=False)
    return PathFact(
        exists=True,
        is_dir=stat.S_ISDIR(status.st_mode),
        is_socket=stat.S_ISSOCK(status.st_mode),
        mode=stat.S_IMODE(status.st_mode),
        owner=status.st_uid,
        readable=os.access(path, os.R_OK, effective_ids=True),
        writable=os.access(path, os.W_OK, effective_ids=True),
        network=_file_system(path) in NETWORK_FILE_SYSTEMS,
    )


def _file_system(path: str) -> str | None:
    """Type of the file system that holds a path, by the longest mount point above it."""
    real = os.path.realpath(path)
    best, found = "", None
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            fields = line.split(" ")
            if len(fields) < 3:
                continue
            point = fields[1].replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, found = point, fields[2]
    return found


def _ephemeral_ports() -> tuple[int, int] | None:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return int(low), int(high)
    except (OSError, ValueError):
        return None


def _addresses() -> frozenset[str] | None:
    try:
        interfaces = psutil.net_if_addrs()
    except (OSError, psutil.Error):
        return None
    families = (socket.AF_INET, socket.AF_INET6)
    return frozenset(
        address.address.split("%")[0]
        for found in interfaces.values()
        for address in found
        if address.family in families
    )
