"""Which program a shard starts and which version of an engine is installed, from the metadata beside its executable.
Shell: reads files.

Nothing is executed: `vllm --version` takes seconds of imports. An engine lives in a venv of its own as a rule, so
this process' own packages say nothing.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmgw.domain.shard import Secret, ShardSpec, Unset

METADATA_LOOKED_AT = 64 << 10
"""Bytes. The version stands in the first lines; vLLM's file has some 20 kB."""

SHEBANG_LOOKED_AT = 512
"""Bytes; the kernel itself reads at most 256."""

_SITE_FOLDERS = ("lib/python3*/site-packages", "lib64/python3*/site-packages", "lib/python3*/dist-packages")
_VERSION = re.compile(rb"^Version:[ \t]*(\S{1,100})[ \t\r]*$", re.M)


def find_program(spec: ShardSpec, inherited: Mapping[str, str]) -> str | None:
    """Where the program of a shard's command is, on the PATH that the engine gets: its own, else the inherited one."""
    path = spec.env.get("PATH", inherited.get("PATH"))
    if isinstance(path, Secret):
        path = path.reveal()
    # Without the variable it is looked for in the system's folders.
    return shutil.which(spec.command[0], path=os.defpath if path is None or isinstance(path, Unset) else path)


def engine_version(executable: str, distribution: str) -> str | None:
    """The version of `distribution` in the Python environment that runs `executable` (an absolute path).

    Looked at are the environment of the path itself, of what it links to, and of the interpreter in its first
    line. None: not found, not readable, or no Python program.
    """
    try:
        for prefix in _prefixes(Path(executable)):
            found = _newest(prefix, distribution)
            if found is not None:
                return found
    except (OSError, ValueError, RuntimeError):
        # Unreadable folders, a path with a NUL, a circle of links: not known.
        return None
    return None


def _prefixes(executable: Path) -> Iterator[Path]:
    seen = set()
    for path in (executable, executable.resolve(), *_interpreters(executable)):
        prefix = path.parent.parent
        if prefix not in seen:
            seen.add(prefix)
            yield prefix


def _interpreters(executable: Path) -> Iterator[Path]:
    if not executable.is_file():
        return
    with executable.open("rb") as file:
        first = file.read(SHEBANG_LOOKED_AT)
    if not first.startswith(b"#!"):
        return
    words = first[2:].split(b"\n", 1)[0].split()
    if words and words[0].startswith(b"/") and b"python" in words[0].rpartition(b"/")[2]:
        yield Path(words[0].decode(errors="surrogateescape"))


def _newest(prefix: Path, distribution: str) -> str | None:
    # In file names a distribution is written with underscores (PEP 427), by older tools also as it is spelt.
    name = re.sub(r"[-_.]+", "_", distribution).lower()
    found: list[tuple[float, str]] = []
    for folder in _SITE_FOLDERS:
        for metadata in prefix.glob(f"{folder}/*.dist-info/METADATA"):
            stem = metadata.parent.name.removesuffix(".dist-info")
            if re.sub(r"[-_.]+", "_", stem.rpartition("-")[0]).lower() != name:
                continue
            with metadata.open("rb") as file:
                version = _VERSION.search(file.read(METADATA_LOOKED_AT))
            if version is not None:
                found.append((metadata.stat().st_mtime, version[1].decode(errors="replace")))
    # Two of one distribution are left where an update went wrong; the last one installed is what runs.
    return max(found)[1] if found else None
