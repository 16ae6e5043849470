"""Verbs that read a configuration, alone on a machine without a llmgw and without GPUs."""

from __future__ import annotations

import json
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
from scripted_control import ControlServer, a_shard, a_status, environment, llmgw

from llmgw.cli.config_file import choose
from llmgw.cli.errors import CommandError
from llmgw.cli.unit import stop_timeout_of

GOOD = """\
[supervisor]
state_dir = "{dir}/state"
runtime_dir = "{dir}/run"

[[shard]]
name = "tiny"
model = "tiny"
engine = "command"
command = ["python3", "-m", "http.server", "${{llmgw.port}}", "--bind", "127.0.0.1"]
port = 18931
api_key = "sk-very-secret"
[shard.env]
PLAIN = "a b"
"""


@pytest.fixture
def good(short_path: Path) -> str:
    path = short_path / "llmgw.toml"
    path.write_text(GOOD.format(dir=short_path))
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    path = tmp_path / "bad.toml"
    path.write_text('[[shard]]\nname = "a"\nmodel = "m"\nengine = "vlm"\nport = "8101"\n')
    return str(path)


def alone(tmp_path: Path, **changes: str) -> dict[str, str]:
    """No llmgw is found from here."""
    return environment(LLMGW_SOCKET=str(tmp_path / "no-socket"), TMPDIR=str(tmp_path), **changes)


# -- which file --------------------------------------------------------------------------------------------


def test_the_file_is_the_option_then_the_variable_then_the_usual_places() -> None:
    env = {"LLMGW_CONFIG": "/env.toml"}
    assert choose("/given.toml", env, lambda _: True) == "/given.toml"
    assert choose(None, env, lambda _: True) == "/env.toml"
    assert choose(None, {}, lambda _: True) == "llmgw.toml"
    assert choose(None, {}, lambda path: path.startswith("/etc")) == "/etc/llmgw/llmgw.toml"


def test_without_any_file_it_is_a_configuration_error_that_says_what_to_do() -> None:
    with pytest.raises(CommandError) as caught:
        choose(None, {}, lambda _: False)
    assert caught.value.exit_code == 78
    assert "--config" in (caught.value.hint or "")


# -- check -------------------------------------------------------------------------------------------------


def test_a_good_file_is_ok_with_its_sums(tmp_path: Path, good: str) -> None:
    done = llmgw("check", good, env=alone(tmp_path))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("ok: 1 shard, 1 file, ")


def test_check_says_everything_that_is_wrong_at_once(tmp_path: Path, bad: str) -> None:
    done = llmgw("validate", bad, env=alone(tmp_path))
    assert done.returncode == 78
    assert f"{bad}:4:10: error: 'vlm' is not one of" in done.stdout
    assert f"{bad}:5:8: error: " in done.stdout
    assert done.stdout.endswith(f"2 errors in {bad}; nothing was changed\n")


def test_check_as_json_has_the_errors_first(tmp_path: Path, bad: str) -> None:
    done = llmgw("check", bad, "--json", env=alone(tmp_path))
    answer = json.loads(done.stdout)
    assert done.returncode == 78
    assert (answer["api"], answer["ok"], answer["config"]) == (1, False, bad)
    assert answer["errors"][0]["line"] == 4
    assert answer["errors"][0]["severity"] == "error"


def test_strict_makes_warnings_errors(tmp_path: Path, good: str) -> None:
    Path(good).chmod(0o644)  # a secret that others may read is a warning
    assert llmgw("check", good, env=alone(tmp_path)).returncode == 0
    done = llmgw("check", good, "--strict", env=alone(tmp_path))
    assert done.returncode == 78
    assert ": error: a secret stands in" in done.stdout
    assert "sk-very-secret" not in done.stdout


def test_offline_looks_at_nothing_of_this_machine(tmp_path: Path, good: str) -> None:
    text = Path(good).read_text().replace('"python3"', '"no-such-program-anywhere"')
    Path(good).write_text(text)
    online, offline = (llmgw("check", good, *words, env=alone(tmp_path)) for words in ([], ["--offline"]))
    assert online.returncode == 78
    assert "no-such-program-anywhere is not on PATH" in online.stdout
    assert offline.returncode == 0


def test_a_missing_file_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    done = llmgw("check", str(tmp_path / "none.toml"), env=alone(tmp_path))
    assert done.returncode == 78
    assert "Traceback" not in done.stderr
    assert "no such file" in done.stdout


@pytest.mark.parametrize("content", ["{}", "[1", '{"api": 2}'])
def test_what_is_no_inventory_is_refused_in_words(tmp_path: Path, good: str, content: str) -> None:
    path = tmp_path / "inventory.json"
    path.write_text(content)
    done = llmgw("check", good, "--inventory", str(path), env=alone(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot use {path}: ")
    assert "llmgw inventory --json > FILE" in done.stderr


@pytest.mark.parametrize(
    ("shown", "seconds"),
    [
        ("LoadState=loaded\nTimeoutStopUSec=2min 30s\n", 150.0),
        ("TimeoutStopUSec=1h 500ms\nLoadState=loaded\n", 3600.5),
        ("LoadState=loaded\nTimeoutStopUSec=infinity\n", None),
        ("LoadState=not-found\nTimeoutStopUSec=1min 30s\n", None),
        ("garbage", None),
    ],
)
def test_the_units_stop_timeout_is_read_as_systemd_prints_it(shown: str, seconds: float | None) -> None:
    assert stop_timeout_of(shown) == seconds


def test_a_unit_that_kills_too_early_is_a_warning(tmp_path: Path, good: str) -> None:
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text("#!/bin/sh\necho LoadState=loaded\necho 'TimeoutStopUSec=1min 30s'\n")
    systemctl.chmod(0o755)
    env = alone(tmp_path)
    done = llmgw("check", good, env={**env, "PATH": f"{systemctl.parent}:{env['PATH']}"})
    assert done.returncode == 0
    assert "unit llmgw.service: warning: TimeoutStopSec=90 is not longer than the longest stop, 220s" in done.stdout


# -- plan --------------------------------------------------------------------------------------------------


def test_without_a_llmgw_everything_would_be_started(tmp_path: Path, good: str) -> None:
    done = llmgw("plan", "-c", good, "--exit-code", env=alone(tmp_path))
    assert done.returncode == 3
    title, _, rest = done.stdout.partition("\n")
    assert title.startswith(f"{good} against nothing: no llmgw answers at /")
    assert rest == "\n  + tiny   start      command  port 18931\n\n1 start.\n"


def test_the_plan_of_a_shard_is_its_exact_command_with_secrets_masked(tmp_path: Path, good: str) -> None:
    env = alone(tmp_path, HF_TOKEN="hf_inherited", KEYBOARD="us")
    done = llmgw("plan", "tiny", "-c", good, env=env)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "tiny:"
    assert lines[2:5] == ["  python3 \\", "      -m http.server 18931 \\", "      --bind 127.0.0.1"]
    by_name = {line.split("=")[0].strip(): line.split() for line in lines if "=" in line}
    assert by_name["PLAIN"] == ["PLAIN='a", "b'", f"{good}:13:9"]
    assert by_name["HF_TOKEN"] == ["HF_TOKEN=***", "inherited"]
    assert by_name["KEYBOARD"] == ["KEYBOARD=us", "inherited"]
    assert "sk-very-secret" not in done.stdout


def test_the_plan_of_a_shard_as_json(tmp_path: Path, good: str) -> None:
    done = llmgw("plan", "tiny", "-c", good, "--json", env=alone(tmp_path))
    (shard,) = json.loads(done.stdout)["shards"]
    assert shard["argv"][:3] == ["python3", "-m", "http.server"]
    assert {"name": "PLAIN", "value": "a b", "origin": f"{good}:13:9"} in shard["env"]


def test_the_plan_of_an_unknown_shard_is_exit_4(tmp_path: Path, good: str) -> None:
    done = llmgw("plan", "nope", "-c", good, env=alone(tmp_path))
    assert done.returncode == 4
    assert "there are: tiny" in done.stderr


def test_the_plan_of_a_wrong_file_is_its_errors(tmp_path: Path, bad: str) -> None:
    done = llmgw("plan", "-c", bad, env=alone(tmp_path))
    assert done.returncode == 78
    assert f"{bad}:4:10: error:" in done.stderr
    assert done.stdout == ""


def test_where_the_file_says_auto_the_plan_shows_the_port_that_is_in_use(tmp_path: Path, good: str) -> None:
    Path(good).write_text(Path(good).read_text().replace("port = 18931", 'port = "auto"'))
    running = a_shard("tiny", endpoint="http://127.0.0.1:8177")
    with ControlServer(tmp_path / "s", lambda *_: (200, a_status(running))) as server:
        done = llmgw("-s", server.path, "plan", "tiny", "-c", good, env=alone(tmp_path))
    assert "http.server 8177" in done.stdout


def test_replicas_are_planned_on_ports_of_their_own_past_one_that_is_taken(tmp_path: Path, good: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if port > 65000:
            pytest.skip("the port is too near the end")
        text = Path(good).read_text().replace("port = 18931", 'port = "auto"\nreplicas = 2')
        Path(good).write_text(f'[node]\nengine_ports = "{port}-{port + 30}"\n{text}')
        offline = llmgw("plan", "tiny", "-c", good, "--offline", env=alone(tmp_path)).stdout
        online = llmgw("plan", "tiny", "-c", good, env=alone(tmp_path)).stdout
    assert f"http.server {port}" in offline and f"http.server {port + 1}" in offline
    first, second = re.findall(r"http\.server ([0-9]+)", online)
    assert str(port) not in (first, second) and first != second


def test_inherited_secrets_are_known_by_their_names(tmp_path: Path, good: str) -> None:
    env = {**alone(tmp_path), "TEAM_DB_PASS": "hunter2", "KEYBOARD": "qwertz"}
    shown = llmgw("plan", "tiny", "-c", good, "--offline", env=env).stdout
    assert "TEAM_DB_PASS=***" in shown and "hunter2" not in shown
    assert "KEYBOARD=qwertz" in shown


# -- config show, explain, inventory, completion, sweep ----------------------------------------------------


def test_the_shown_configuration_is_toml_with_defaults_and_without_secrets(tmp_path: Path, good: str) -> None:
    done = llmgw("config", "show", good, env=alone(tmp_path))
    shown = tomllib.loads(done.stdout)
    assert shown["shard"][0]["api_key"] == "***"
    assert shown["shard"][0]["load_timeout"] == "30m"
    with_origins = llmgw("config", "show", good, "--origin", env=alone(tmp_path)).stdout
    assert f'name = "tiny"  # {good}:6:8' in with_origins


def test_what_is_in_force_comes_from_the_running_llmgw(tmp_path: Path) -> None:
    answer = {"api": 1, "path": "/etc/llmgw/llmgw.toml", "text": "[node]\nname = 'gpu-01'\n"}
    with ControlServer(tmp_path / "s", lambda *_: (200, answer)) as server:
        done = llmgw("-s", server.path, "config", "show")
    assert (done.returncode, done.stdout) == (0, answer["text"])


def test_explain_tells_type_default_and_meaning(tmp_path: Path) -> None:
    done = llmgw("explain", "shard.load_timeout", env=alone(tmp_path))
    assert done.returncode == 0
    assert done.stdout.startswith("shard.load_timeout   duration\n  default: ")
    assert json.loads(llmgw("explain", "shard.load_timeout", "--json").stdout)["keys"][0]["table"] == "shard"
    unknown = llmgw("explain", "shard.nope", env=alone(tmp_path))
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("error: cannot explain 'shard.nope'")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_every_verb(shell: str) -> None:
    done = llmgw("completion", shell)
    assert done.returncode == 0
    for verb in ("status", "install-systemd", "restart"):
        assert verb in done.stdout
    assert "no-wait" in done.stdout


def test_a_sweep_where_nothing_ever_ran_has_nothing_to_do(tmp_path: Path) -> None:
    done = llmgw("sweep", "--state-dir", str(tmp_path / "none"), "--json")
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0
    assert (answer["ended"], answer["failed"]) == ([], [])
