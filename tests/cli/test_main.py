from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_control import NOW, ControlServer, a_shard, a_status, environment, llmgw

from llmgw.cli.main import verbs
from llmgw.cli.reference import page

REPOSITORY = Path(__file__).parents[2]

HEAVY = {"trio", "httpx", "attrs", "cattrs", "rich", "h11", "psutil", "shtab", "typing", "dataclasses", "asyncio"}


def answer_status(method: str, path: str, body: Any) -> tuple[int, Any]:
    del body
    assert (method, path) == ("GET", "/v1/status")
    return 200, a_status(a_shard(), a_shard("qwen", state="loading", activity=None))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    with ControlServer(tmp_path / "s", answer_status) as server:
        yield server


# -- the line itself ---------------------------------------------------------------------------------------


def test_a_misspelled_verb_is_answered_with_the_nearest_one() -> None:
    done = llmgw("statsu")
    assert done.returncode == 2
    assert done.stderr == (
        "error: cannot read the command line: no verb 'statsu'; did you mean 'status'?\n  see: llmgw --help\n"
    )


def test_without_a_verb_the_verbs_are_listed() -> None:
    done = llmgw()
    assert done.returncode == 2
    for verb in verbs():
        assert f"  {verb.name}" in done.stderr


def test_an_unknown_option_is_told_in_the_same_form() -> None:
    done = llmgw("status", "--frobnicate")
    assert done.returncode == 2
    assert done.stderr == (
        "error: cannot read the command line: unrecognized arguments: --frobnicate\n  see: llmgw status --help\n"
    )


def test_a_wrong_value_points_to_the_help_of_its_verb() -> None:
    done = llmgw("completion", "tcsh")
    assert done.returncode == 2
    assert done.stderr.endswith("\n  see: llmgw completion --help\n")


def test_global_options_may_stand_before_and_after_the_verb(server: ControlServer) -> None:
    for words in (["-s", server.path, "status"], ["status", "-s", server.path], ["ps", f"--socket={server.path}"]):
        assert llmgw(*words).returncode == 3


def test_the_version_can_be_asked_for_in_three_ways() -> None:
    from llmgw import __version__

    assert llmgw("version").stdout == llmgw("--version").stdout == f"llmgw {__version__}\n"
    assert json.loads(llmgw("version", "--json").stdout)["llmgw"] == __version__


@pytest.mark.parametrize("verb", [verb.name for verb in verbs()])
def test_every_verb_has_help_with_an_example_or_its_exit_codes(verb: str) -> None:
    done = llmgw(verb, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: llmgw {verb}")
    assert "global options:" in done.stdout


def test_the_reference_page_is_what_the_command_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert (REPOSITORY / "docs/reference/cli.md").read_text() == page(), (
        "write it anew: python -m llmgw.cli.reference > docs/reference/cli.md"
    )


# -- what is imported --------------------------------------------------------------------------------------


def imported_by(server: ControlServer, *words: str) -> set[str]:
    """Top-level modules that a verb has loaded at its end."""
    program = (
        "import sys; from llmgw.cli.main import main; main(sys.argv[1:]); "
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "-s", server.path, *words],
        capture_output=True, text=True, env=environment(), timeout=60, check=True,
    )  # fmt: skip
    return {name.partition(".")[0] for name in done.stderr.splitlines()}


@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["version"]])
def test_what_only_asks_imports_nothing_heavy(server: ControlServer, words: list[str]) -> None:
    assert imported_by(server, *words) & HEAVY == set()


def test_a_drawn_status_imports_rich_and_nothing_of_the_daemon(server: ControlServer) -> None:
    loaded = imported_by(server, "--color=always", "status")
    assert loaded & {"trio", "httpx", "cattrs", "h11", "psutil", "asyncio"} == set()
    assert "rich" in loaded


@pytest.mark.parametrize(
    "words",
    [["events"], ["logs", "embed"], ["stop", "embed", "--no-wait"], ["wait", "embed"], ["reload"]],
)
def test_verbs_that_talk_to_the_socket_import_neither_trio_nor_attrs(tmp_path: Path, words: list[str]) -> None:
    def script(method: str, path: str, body: Any) -> tuple[int, Any]:
        del body
        if path.startswith(("/v1/events", "/v1/shards/embed/logs")):
            return 200, []
        if method == "POST" and path.startswith("/v1/shards"):
            return 202, {"api": 1, "operation": "op-1"}
        if path == "/v1/reload":
            return 200, {"api": 1, "actions": [], "needs_restart": []}
        return 200, a_status(a_shard())

    with ControlServer(tmp_path / "s", script) as server:
        assert imported_by(server, *words) & (HEAVY - {"typing"}) == set()


# -- status as a process -----------------------------------------------------------------------------------


def test_status_as_json_is_the_servers_answer_in_one_line(server: ControlServer) -> None:
    done = llmgw("-s", server.path, "status", "--json")
    answer = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert answer["api"] == 1
    assert [shard["name"] for shard in answer["shards"]] == ["embed", "qwen"]
    assert done.returncode == 3


def test_a_piped_status_has_no_colours_no_blanks_at_the_end_and_nothing_cut(server: ControlServer) -> None:
    done = llmgw("-s", server.path, "status", "embed", env=environment(COLUMNS="20"))
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert lines[3] == "embed  bge-m3  vllm    7     ready  1m14s  0    :8104"


def test_an_ascii_stdout_gets_an_ascii_bar(tmp_path: Path) -> None:
    progress = {"phase": "weights", "fraction": 0.5, "done": 1, "total": 2, "eta": None}
    status = a_status(a_shard(state="loading", progress=progress, model="modèle"))
    with ControlServer(tmp_path / "s", lambda *_: (200, status)) as server:
        done = llmgw("-s", server.path, "status", env=environment(PYTHONUTF8="0", PYTHONIOENCODING="ascii"))
    assert "#####-----  50% weights 1/2" in done.stdout
    assert "mod\\xe8le" in done.stdout
    assert done.stderr == ""


def test_a_name_that_no_shard_has_is_exit_4_with_the_names_there_are(server: ControlServer) -> None:
    done = llmgw("-s", server.path, "status", "emebd")
    assert done.returncode == 4
    assert done.stderr == "error: cannot find 'emebd': no such shard\n  there are: embed, qwen\n"
    assert done.stdout == ""


def test_without_a_supervisor_it_is_exit_5_and_says_how_to_start_one(tmp_path: Path) -> None:
    done = llmgw("-s", str(tmp_path / "none"), "status")
    assert done.returncode == 5
    assert done.stderr.startswith(f"error: no llmgw is running here ({tmp_path}/none does not exist)\n  start one with")


def test_an_error_of_the_server_keeps_its_words_and_its_hint(tmp_path: Path) -> None:
    refusal = {"error": {"code": "leaving", "message": "cannot stop embed: llmgw is on its way out", "hint": "wait"}}
    with ControlServer(tmp_path / "s", lambda *_: (503, refusal)) as server:
        done = llmgw("-s", server.path, "status")
    assert done.returncode == 5
    assert done.stderr == "error: cannot stop embed: llmgw is on its way out\n  wait\n"


def test_a_reader_that_leaves_early_gets_no_traceback(tmp_path: Path) -> None:
    lines = [{"seq": i, "time": NOW, "text": "x" * 200, "cut": False} for i in range(20_000)]

    def script(method: str, path: str, body: Any) -> tuple[int, Any]:
        del method, body
        return (200, lines) if "/logs" in path else (200, a_status(a_shard()))

    with ControlServer(tmp_path / "s", script) as server:
        child = subprocess.Popen(
            [sys.executable, "-m", "llmgw", "-s", server.path, "logs", "embed"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        )  # fmt: skip
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline().startswith(b"xxx")
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(60) == 141
        child.stderr.close()


def test_ctrl_c_ends_a_watch_with_130_and_no_traceback(server: ControlServer) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "llmgw", "-s", server.path, "status", "-w"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.readline() == b"embed  ready  :8104\n"
    child.send_signal(signal.SIGINT)
    assert child.stderr.read() == b""
    assert child.wait(60) == 130
    child.stdout.close()
    child.stderr.close()


def test_a_watch_in_a_pipe_prints_one_line_per_change(tmp_path: Path) -> None:
    states = iter([a_shard(state="starting", activity=None, detail="importing"), a_shard(generation=1)])
    shown = [next(states)]

    def script(*_: Any) -> tuple[int, Any]:
        answer = a_status(shown[-1])
        shown.append(next(states, shown[-1]))
        return 200, answer

    with ControlServer(tmp_path / "s", script) as server:
        child = subprocess.Popen(
            [sys.executable, "-m", "llmgw", "-s", server.path, "status", "-w"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(),
        )  # fmt: skip
        assert child.stdout is not None
        # The first answer goes to the check of the names.
        assert child.stdout.readline() == b"embed  ready  :8104\n"
        while len(server.asked) < 5:
            time.sleep(0.01)
        child.terminate()
        assert child.stdout.read() == b""
        child.wait(60)
        child.stdout.close()
