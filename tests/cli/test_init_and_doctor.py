"""`llmgw init` and `llmgw doctor` as commands, on a bare machine and beside a fake nvidia-smi."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "discovery" / "data" / "gpu"
HANGS = "hang"
"""Left out where it would only wait for the end of the deadline, again and again."""
EVERY = sorted(entry.name for entry in CASES.iterdir() if (entry / "bin").is_dir() and entry.name != HANGS)


def llmgw(folder: Path, *words: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    env = {"PATH": path, "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder), "PYTHONPATH": os.getcwd()}
    return subprocess.run(
        [sys.executable, "-m", "llmgw", *words],
        capture_output=True,
        text=True,
        env=env,
        cwd=folder,
        timeout=60,
        check=False,
    )


def with_case(folder: Path, case: str) -> str:
    """A PATH on which that machine's nvidia-smi comes first."""
    return f"{CASES / case / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"


@pytest.mark.parametrize("case", EVERY)
def test_what_init_writes_has_no_error_on_the_machine_it_was_made_for(tmp_path: Path, case: str) -> None:
    path = with_case(tmp_path, case)
    written = llmgw(tmp_path, "init", path=path)
    assert written.returncode == 0, written.stderr
    assert "llmgw check llmgw.toml" in written.stdout
    assert (tmp_path / "llmgw.toml").stat().st_mode & 0o777 == 0o644
    for words in (("check",), ("check", "--offline")):
        checked = llmgw(tmp_path, *words, path=path)
        assert checked.returncode == 0, checked.stdout


def test_init_never_writes_over_a_file_and_print_writes_none(tmp_path: Path) -> None:
    (tmp_path / "llmgw.toml").write_text("mine")
    refused = llmgw(tmp_path, "init")
    assert refused.returncode == 1 and "cannot write llmgw.toml: it exists" in refused.stderr
    assert (tmp_path / "llmgw.toml").read_text() == "mine"
    shown = llmgw(tmp_path, "init", "--print")
    assert shown.returncode == 0 and shown.stdout.startswith("# llmgw.toml, written by llmgw init")
    assert [entry.name for entry in tmp_path.iterdir()] == ["llmgw.toml"]


def test_init_where_it_may_not_write_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    refused = llmgw(tmp_path, "init", str(tmp_path / "none" / "llmgw.toml"))
    assert refused.returncode == 1 and "cannot write" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_doctor_on_a_bare_machine_finds_no_problem_with_gpus_that_are_not_there(tmp_path: Path) -> None:
    done = llmgw(tmp_path, "doctor", "--json")
    found = json.loads(done.stdout)["findings"]
    (driver,) = [finding for finding in found if finding["check"] == "driver"]
    if not shutil.which("nvidia-smi"):
        assert driver["level"] == "ok" or driver["remedy"]
    assert "Traceback" not in done.stderr


def test_doctor_says_that_llmgw_died_and_that_none_was_started(tmp_path: Path) -> None:
    assert "does not run: there is no" in llmgw(tmp_path, "doctor").stdout
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
    done = llmgw(tmp_path, "-s", str(path), "doctor", "--json")
    (finding,) = [found for found in json.loads(done.stdout)["findings"] if found["check"] == "llmgw"]
    assert finding["level"] == "warning" and "nobody listens" in finding["text"] and finding["remedy"]


def test_doctor_tells_a_sick_card_with_what_to_do(tmp_path: Path) -> None:
    done = llmgw(tmp_path, "doctor", path=with_case(tmp_path, "ecc-and-remap"))
    assert done.returncode == 1
    assert "PROBLEM" in done.stdout and "uncorrected ECC" in done.stdout and "reset it" in done.stdout


def test_doctor_tells_a_broken_driver_and_a_broken_configuration(tmp_path: Path) -> None:
    (tmp_path / "llmgw.toml").write_text("[[shard]]\nname = 3\n")
    done = llmgw(tmp_path, "doctor", path=with_case(tmp_path, "driver-mismatch"))
    assert done.returncode == 1
    assert "Driver/library version mismatch" in done.stdout and "reload the module or reboot" in done.stdout
    assert "llmgw check shows them" in done.stdout
