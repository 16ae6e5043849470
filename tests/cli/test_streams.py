from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_control import NOW, ControlServer, a_shard, a_status, environment, llmgw


def a_line(seq: int, text: str, **more: Any) -> dict[str, Any]:
    return {"seq": seq, "time": NOW + seq, "text": text, "cut": False, "own": False, "progress": False, **more}


LINES = [a_line(1, "INFO\x1b[31m start\x07"), {"dropped": 512}, a_line(2, "y" * 10, cut=True)]


def script(method: str, path: str, body: Any) -> tuple[int, Any]:
    del method, body
    if "/logs?" in path:
        return 200, LINES
    return 200, a_status(a_shard(), a_shard("qwen"))


def logs(tmp_path: Path, *words: str) -> tuple[Any, list[str]]:
    with ControlServer(tmp_path / "s", script) as server:
        done = llmgw("-s", server.path, "logs", *words, env=environment(TZ="UTC"))
        return done, [path for _, path, _ in server.asked if "/logs" in path]


def test_logs_are_what_the_engine_wrote_but_for_control_characters(tmp_path: Path) -> None:
    done, asked = logs(tmp_path, "embed")
    assert done.stdout.splitlines() == [
        "INFO start\\x07",
        "-- llmgw: 512 lines skipped, this reader is too slow --",
        "yyyyyyyyyy -- llmgw: line cut --",
    ]
    assert asked == ["/v1/shards/embed/logs?follow=0&tail=100"]


@pytest.mark.parametrize(
    ("words", "query"),
    [
        (["-n", "3"], "tail=3"),
        (["-n", "0"], "after=10"),
        (["--since", "5m"], "since=300s"),
        (["--since", "12d"], "since=1036800s"),
        (["--since", "5m", "-n", "3"], "since=300s&tail=3"),
    ],
)
def test_how_far_back_a_log_begins(tmp_path: Path, words: list[str], query: str) -> None:
    _, asked = logs(tmp_path, "embed", *words)
    assert asked == [f"/v1/shards/embed/logs?follow=0&{query}"]


def test_of_all_shards_each_line_begins_with_the_name(tmp_path: Path) -> None:
    done, _ = logs(tmp_path, "--all", "-t")
    assert done.stdout.splitlines()[0] == "embed  1970-01-12T13:46:41.000 INFO start\\x07"
    assert done.stdout.splitlines()[3].startswith("qwen  ")


def test_log_lines_as_json_carry_shard_and_version(tmp_path: Path) -> None:
    done, _ = logs(tmp_path, "embed", "--json")
    first, dropped, _ = [json.loads(line) for line in done.stdout.splitlines()]
    assert (first["api"], first["shard"], first["seq"]) == (1, "embed", 1)
    assert dropped["dropped"] == 512


@pytest.mark.parametrize("words", [[], ["embed", "--all"], ["embed", "-n", "many"]])
def test_logs_refuse_an_unclear_line(tmp_path: Path, words: list[str]) -> None:
    assert logs(tmp_path, *words)[0].returncode == 2


def test_a_followed_log_goes_on_when_llmgw_comes_back_and_repeats_nothing(tmp_path: Path) -> None:
    answers = [
        [a_line(1, "one"), a_line(2, "two")],
        # After its restart the numbers begin anew; what was shown is known by its time.
        [a_line(1, "one"), a_line(2, "two"), a_line(3, "three")],
    ]

    def coming_back(method: str, path: str, body: Any) -> tuple[int, Any]:
        del method, body
        if "/logs?" not in path:
            return 200, a_status(a_shard())
        if answers:
            return 200, answers.pop(0)
        return 404, {"error": {"code": "no-such-shard", "message": "there is no shard 'embed'", "hint": None}}

    with ControlServer(tmp_path / "s", coming_back) as server:
        done = llmgw("-s", server.path, "logs", "embed", "-f")
    assert done.stdout == "one\ntwo\nthree\n"
    assert done.returncode == 4
    assert "connection lost, waiting for llmgw to come back" in done.stderr


def test_events_say_what_happened_and_who_asked(tmp_path: Path) -> None:
    events = [
        {"seq": 1, "time": NOW, "shard": "embed", "kind": "wish", "text": "stop by uid 1000 (ada)",
         "before": None, "after": None, "by": "uid 1000 (ada)"},
        {"seq": 2, "time": NOW + 1, "shard": "embed", "kind": "state", "text": "SIGTERM",
         "before": "ready", "after": "draining", "by": None},
        {"seq": 3, "time": NOW + 2, "shard": "", "kind": "llmgw", "text": "reload", "before": None, "after": None,
         "by": "uid 0 (root)"},
    ]  # fmt: skip
    with ControlServer(tmp_path / "s", lambda *_: (200, events)) as server:
        done = llmgw("-s", server.path, "events", "--since", "1h", env=environment(TZ="UTC"))
        as_json = llmgw("-s", server.path, "events", "--json")
        assert [path for _, path, _ in server.asked] == [
            "/v1/events?since=3600s&follow=0",
            "/v1/events?since=0&follow=0",
        ]
    assert done.stdout.splitlines() == [
        "1970-01-12 13:46:40  embed  stop by uid 1000 (ada)",
        "1970-01-12 13:46:41  embed  ready -> draining  SIGTERM",
        "1970-01-12 13:46:42  llmgw  reload  (by uid 0 (root))",
    ]
    assert [json.loads(line)["seq"] for line in as_json.stdout.splitlines()] == [1, 2, 3]


# -- reload, plan and upgrade against a running llmgw ------------------------------------------------------

PLAN = {
    "api": 1,
    "actions": [
        {"name": "a", "shard": "a", "replica": 0, "action": "keep", "changes": []},
        {"name": "embed", "shard": "embed", "replica": 0, "action": "replace",
         "changes": [{"key": "args.gpu-memory-utilization", "before": 0.92, "after": 0.9}]},
        {"name": "new", "shard": "new", "replica": 0, "action": "start", "changes": []},
    ],
    "needs_restart": ["node.name"],
    "problems": [],
}  # fmt: skip


def answering(**answers: tuple[int, Any]) -> Any:
    def choose(method: str, path: str, body: Any) -> tuple[int, Any]:
        del body
        key = path.removeprefix("/v1/").partition("?")[0]
        return answers.get(f"{method}_{key}") or answers.get(key) or (200, a_status(a_shard()))

    return choose


def test_a_reload_shows_what_it_does(tmp_path: Path) -> None:
    with ControlServer(tmp_path / "s", answering(reload=(200, PLAN))) as server:
        done = llmgw("-s", server.path, "reload")
        dry = llmgw("-s", server.path, "reload", "--dry-run")
        assert [path for method, path, _ in server.asked if method == "POST"] == [
            "/v1/reload",
            "/v1/reload?dry_run=1",
        ]
    assert done.returncode == 0
    assert dry.stdout == done.stdout + "This is what a reload would do; nothing was changed.\n"
    assert done.stdout == (
        "  = a       keep\n"
        "  ~ embed   replace    args.gpu-memory-utilization 0.92 -> 0.9\n"
        "                       gpus 7  loading took 16s last time\n"
        "  + new     start\n"
        "\n"
        "1 keep, 1 replace, 1 start.\n"
        "not before llmgw itself is restarted (engines run on): node.name\n"
    )


def test_a_refused_reload_shows_the_line_with_a_caret_and_no_secret(tmp_path: Path) -> None:
    config = tmp_path / "llmgw.toml"
    config.write_text('[[shard]]\nname = "x"\nport = "8101"\napi_key = "sk-secret"\n')
    problems = [
        {"file": str(config), "line": line, "column": 8, "path": [], "severity": "error", "code": "wrong-type",
         "message": message, "hint": "remove the quotes", "context": '[shard "x"]'}
        for line, message in ((3, "expected an integer"), (4, "no such key"))
    ]  # fmt: skip
    error = {"code": "config", "message": "cannot reload: the configuration has 2 errors", "hint": "see: llmgw check"}
    answer = {"error": error, "errors": problems}
    with ControlServer(tmp_path / "s", answering(reload=(422, answer))) as server:
        done = llmgw("-s", server.path, "reload")
        as_json = llmgw("-s", server.path, "reload", "--json")
    assert done.returncode == as_json.returncode == 78
    assert f'{config}:3:8: error: expected an integer; remove the quotes   [shard "x"]' in done.stderr
    assert '     3 | port = "8101"\n       |        ^\n' in done.stderr
    assert "sk-secret" not in done.stderr
    assert "error: cannot reload: the configuration has 2 errors\n  see: llmgw check\n" in done.stderr
    assert json.loads(as_json.stdout)["errors"] == problems


def test_plan_asks_the_running_llmgw_and_tells_changes_by_its_exit_code(tmp_path: Path) -> None:
    with ControlServer(tmp_path / "s", answering(plan=(200, PLAN))) as server:
        done = llmgw("-s", server.path, "plan", "--exit-code")
    assert done.returncode == 3
    assert done.stdout.startswith("/etc/llmgw/llmgw.toml against the running llmgw on gpu-01\n\n  = a ")


def test_an_upgrade_waits_for_the_new_llmgw_under_the_same_pid(tmp_path: Path) -> None:
    status = [a_status(a_shard())] * 3 + [a_status(a_shard(), started=NOW + 1, llmgw="0.2.0")]

    def upgrading(method: str, path: str, body: Any) -> tuple[int, Any]:
        del path, body
        if method == "POST":
            return 202, {"api": 1}
        return 200, status.pop(0) if len(status) > 1 else status[0]

    with ControlServer(tmp_path / "s", upgrading) as server:
        done = llmgw("-s", server.path, "upgrade")
    assert (done.returncode, done.stdout) == (0, "llmgw 0.1.0 -> 0.2.0, pid 812 as before; engines run on\n")


def test_an_upgrade_that_does_not_happen_is_exit_6(tmp_path: Path) -> None:
    with ControlServer(tmp_path / "s", answering(upgrade=(202, {"api": 1}))) as server:
        done = llmgw("-s", server.path, "upgrade", "--timeout", "1s")
    assert done.returncode == 6
    assert "cannot see the new llmgw: the old one still answers" in done.stderr
