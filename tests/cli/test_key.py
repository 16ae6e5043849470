"""`llmgw key`: keys are shown once, kept by nobody, and known to the file by their hash."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.config.document import SourceFile
from llmgw.config.model import Hash
from llmgw.config.parse import parse
from llmgw.domain.host import HostFacts


def llmgw(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmgw", *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def keys_in(text: str) -> tuple[Hash, ...]:
    """What llmgw understands of a file with these lines."""
    shard = '[[shard]]\nname = "a"\nmodel = "m"\nengine = "command"\ncommand = ["true"]\n'
    source = SourceFile("llmgw.toml", f"{shard}{text}\n".encode(), "/etc", "/etc/llmgw.toml")
    config = parse([source], HostFacts(hostname="n", uid=0, home="/root", env={}, groups=frozenset({"root"}))).config
    assert config is not None and config.gateway is not None
    return (*config.gateway.operator_keys, *(key for tenant in config.gateway.tenants for key in tenant.keys))


@pytest.mark.parametrize("whose", [("--tenant", "research"), ("--operator",)])
def test_the_lines_that_it_prints_make_the_file_know_the_key(whose: tuple[str, ...]) -> None:
    done = llmgw("key", "new", *whose)
    assert done.returncode == 0, done.stderr
    key, _, rest = done.stdout.partition("\n")
    assert key.startswith("sk-llmgw-") and len(key) > 40
    lines = rest[rest.index("[") :]
    assert key not in lines
    assert keys_in(lines) == (Hash(hashlib.sha256(key.encode()).hexdigest()),)


def test_every_key_is_another_one() -> None:
    assert llmgw("key", "new").stdout.splitlines()[0] != llmgw("key", "new").stdout.splitlines()[0]


def test_a_key_that_goes_into_a_file_is_not_shown_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    done = llmgw("key", "new", "--out", str(path), "--json")
    key = path.read_text().strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in done.stdout and "key" not in json.loads(done.stdout)
    assert json.loads(done.stdout)["sha256"] == hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_key_is_never_written_over_what_is_there(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key"
    if kind == "file":
        path.write_text("precious")
    else:
        os.symlink(tmp_path / "elsewhere", path)
    done = llmgw("key", "new", "--out", str(path))
    assert done.returncode == 1
    assert f"cannot write the key to {path}" in done.stderr
    assert not (tmp_path / "elsewhere").exists()
    if kind == "file":
        assert path.read_text() == "precious"


def test_the_hash_of_a_key_that_exists_comes_from_standard_input() -> None:
    done = llmgw("key", "hash", "--json", text="sk-old-0123456789\n")
    assert json.loads(done.stdout)["sha256"] == hashlib.sha256(b"sk-old-0123456789").hexdigest()
    assert "sk-old" not in done.stdout


@pytest.mark.parametrize("text", ["", "\n", "two words\n", "x" * 5000, "schlüssel\n"])
def test_what_is_no_key_is_refused_in_words(text: str) -> None:
    done = llmgw("key", "hash", text=text)
    assert done.returncode == 1 and "cannot hash what came on standard input" in done.stderr


def test_a_key_cannot_be_given_on_the_command_line() -> None:
    assert llmgw("key", "hash", "sk-secret").returncode == 2
