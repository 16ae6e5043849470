from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_control import NOW, ControlServer, a_shard, a_status, llmgw

from llmgw.cli.wishes import outcome


class Script:
    """Answers a wish with an operation whose states follow one another, look by look."""

    def __init__(self, verb: str, *steps: tuple[str, dict[str, Any]]) -> None:
        self.verb = verb
        self.steps = list(steps)

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        del body
        if method == "POST":
            return 202, {"api": 1, "operation": "op-1", "state": "running", "shards": []}
        if path == "/v1/operations/op-1":
            state, shard = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
            return 200, {"api": 1, "verb": self.verb, "at": NOW, "state": state, "shards": [shard]}
        return 200, a_status(self.steps[0][1])


def wish(tmp_path: Path, script: Script, *words: str) -> tuple[Any, list[tuple[str, str, Any]]]:
    with ControlServer(tmp_path / "s", script) as server:
        return llmgw("-s", server.path, script.verb, *words), server.asked


def test_in_a_pipe_a_wish_is_not_waited_for_unless_asked(tmp_path: Path) -> None:
    done, asked = wish(tmp_path, Script("stop", ("running", a_shard())), "embed")
    assert (done.returncode, done.stdout) == (0, "embed: stop is asked for\n")
    assert asked[-1][:2] == ("POST", "/v1/shards/embed/stop")


def test_a_stop_that_is_waited_for_tells_each_state_in_a_line(tmp_path: Path) -> None:
    draining = a_shard(state="draining", detail="draining", activity={"running": 3})
    stopped = a_shard(state="stopped", detail="SIGTERM, 4.2 s", since=NOW + 1, activity=None)
    script = Script("stop", ("running", draining), ("running", draining), ("done", stopped))
    done, _ = wish(tmp_path, script, "embed", "--wait")
    assert done.returncode == 0
    assert done.stdout == "embed  draining  draining, 3 requests left\nembed: stopped (SIGTERM, 4.2 s); GPU 7 free\n"


def test_a_drain_is_over_when_llmgw_says_so_and_not_when_the_engine_counts_nothing(tmp_path: Path) -> None:
    waits = a_shard(state="draining", detail="drained by ada, 1 request left")
    idle = a_shard(state="draining", detail="drained by ada")
    script = Script("drain", ("running", waits), ("running", waits), ("done", idle))
    done, _ = wish(tmp_path, script, "embed", "--wait")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "embed  draining  drained by ada, 1 request left",
        "embed: drained; it stays loaded until llmgw start or llmgw stop",
    ]


def test_a_start_that_cannot_succeed_ends_with_cause_proof_and_remedy(tmp_path: Path) -> None:
    reason = {
        "code": "D9",
        "cause": "the engine does not know --foo",
        "remedy": "correct [shard.args]",
        "evidence": ["error: unrecognized arguments: --foo"],
        "retry": False,
    }
    failed = a_shard(state="failed", since=NOW + 2, reason=reason, detail="will not be retried")
    done, _ = wish(
        tmp_path, Script("start", ("running", a_shard(state="starting")), ("failed", failed)), "embed", "--wait"
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: cannot start embed: the engine does not know --foo\n"
        "  | error: unrecognized arguments: --foo\n"
        "  correct [shard.args]\n"
        "  see: llmgw logs embed\n"
    )


def test_a_later_wish_of_somebody_else_ends_the_wait(tmp_path: Path) -> None:
    intent = {"wish": "stop", "by": "uid 1000 (ada)", "at": NOW + 3, "operator": True}
    done, _ = wish(tmp_path, Script("start", ("failed", a_shard(state="draining", intent=intent))), "embed", "--wait")
    assert done.returncode == 1
    assert "stop was wished by uid 1000 (ada) in the meantime" in done.stderr


def test_when_time_is_up_it_is_exit_6_and_says_that_llmgw_goes_on(tmp_path: Path) -> None:
    done, _ = wish(tmp_path, Script("start", ("running", a_shard(state="loading"))), "embed", "--timeout", "1s")
    assert done.returncode == 6
    assert (
        done.stderr
        == "error: cannot wait longer than 1s: embed is loading\n  llmgw goes on with it; see: llmgw status\n"
    )


def test_all_means_each_shard_once_with_all_its_replicas(tmp_path: Path) -> None:
    shards = a_status(a_shard("a/0"), a_shard("a/1", replica=1), a_shard("b"))
    answers = {"GET": (200, shards), "POST": (202, {"operation": "op"})}
    with ControlServer(tmp_path / "s", lambda method, *_: answers[method]) as server:
        assert llmgw("-s", server.path, "drain", "--all", "--no-wait").returncode == 0
        posted = [path for method, path, _ in server.asked if method == "POST"]
    assert posted == ["/v1/shards/a/drain", "/v1/shards/b/drain"]


def test_the_slash_of_a_replica_is_encoded_in_the_path(tmp_path: Path) -> None:
    answers = {"GET": (200, a_status(a_shard("a/0"))), "POST": (202, {"operation": "op"})}
    with ControlServer(tmp_path / "s", lambda method, *_: answers[method]) as server:
        assert llmgw("-s", server.path, "restart", "a/0", "--no-wait").returncode == 0
        assert server.asked[-1][1] == "/v1/shards/a%2F0/restart"


@pytest.mark.parametrize("words", [[], ["embed", "--all"]])
def test_it_must_be_clear_which_shards_are_meant(tmp_path: Path, words: list[str]) -> None:
    done, asked = wish(tmp_path, Script("stop", ("running", a_shard())), *words)
    assert done.returncode == 2
    assert "cannot tell which shards" in done.stderr
    assert asked == []


def test_an_unknown_name_asks_for_nothing_at_all(tmp_path: Path) -> None:
    done, asked = wish(tmp_path, Script("stop", ("running", a_shard())), "embed", "nope")
    assert done.returncode == 4
    assert [method for method, *_ in asked] == ["GET"]


def test_json_carries_the_shards_as_they_are_at_the_end(tmp_path: Path) -> None:
    done, _ = wish(tmp_path, Script("stop", ("done", a_shard(state="stopped"))), "embed", "--wait", "--json")
    answer = json.loads(done.stdout)
    assert answer["api"] == 1
    assert answer["shards"][0]["state"] == "stopped"


def test_quiet_prints_nothing_where_nothing_is_wrong(tmp_path: Path) -> None:
    done, _ = wish(tmp_path, Script("stop", ("done", a_shard(state="stopped"))), "embed", "--wait", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_memory_that_is_still_held_is_told_instead_of_free() -> None:
    held = [{"kind": "gpu-held", "text": "GPU 7 still held by pid 812", "since": NOW}]
    shard = a_shard(state="stopped", detail="SIGKILL", conditions=held)
    assert outcome("stop", shard, NOW) == "stopped (SIGKILL); GPU 7 still held by pid 812"


def test_an_engine_from_before_a_restart_is_not_the_new_one() -> None:
    assert outcome("restart", a_shard(since=NOW - 5), NOW) is None
    assert outcome("restart", a_shard(since=NOW + 5, launched_at=NOW + 1), NOW) == "ready after 16s"
    assert outcome("start", a_shard(since=NOW + 5), NOW) == "ready"  # back from a drain, not loaded anew
    assert outcome("start", a_shard(since=NOW - 5), NOW) == "is ready already"


def test_drained_means_that_no_request_is_left() -> None:
    assert outcome("drain", a_shard(state="draining", activity={"running": 1}), NOW) is None
    assert outcome("drain", a_shard(state="draining", activity={"running": 0}), NOW) is not None


# -- wait --------------------------------------------------------------------------------------------------


def waited(tmp_path: Path, steps: list[dict[str, Any]], *words: str) -> Any:
    # The first look is at the names.
    left = [steps[0], *steps]

    def script(*_: Any) -> tuple[int, Any]:
        return 200, a_status(left.pop(0) if len(left) > 1 else left[0])

    with ControlServer(tmp_path / "s", script) as server:
        return llmgw("-s", server.path, "wait", *words)


def test_wait_ends_when_the_shard_is_ready(tmp_path: Path) -> None:
    done = waited(tmp_path, [a_shard(state="loading", load_seconds=None), a_shard(load_seconds=161.0)], "embed")
    assert done.returncode == 0
    assert done.stdout == "embed  loading\nembed: ready after 2m41s\n"


def test_wait_goes_on_while_another_attempt_is_due(tmp_path: Path) -> None:
    reason = {"code": "D1", "cause": "it crashed", "remedy": None, "evidence": [], "retry": True}
    failed = a_shard(state="failed", reason=reason, next_attempt=NOW + 5, failures=1)
    done = waited(tmp_path, [failed, a_shard()], "embed")
    assert done.returncode == 0
    assert done.stdout.startswith("embed  failed  retry 1/5 in 5s\n")


def test_wait_ends_with_1_when_nobody_tries_again(tmp_path: Path) -> None:
    reason = {"code": "D1", "cause": "it crashed", "remedy": None, "evidence": [], "retry": False}
    done = waited(tmp_path, [a_shard(state="failed", reason=reason)], "embed")
    assert done.returncode == 1
    assert "cannot wait for embed: it crashed" in done.stderr


def test_wait_for_stopped_takes_what_never_ran(tmp_path: Path) -> None:
    assert waited(tmp_path, [a_shard(state="pending")], "--all", "--for", "stopped").returncode == 0


def test_wait_gives_up_in_time_with_6(tmp_path: Path) -> None:
    done = waited(tmp_path, [a_shard(state="loading")], "embed", "--timeout", "1s")
    assert done.returncode == 6


def test_a_sleep_and_a_wake_are_told_by_the_condition_and_the_time_it_took() -> None:
    asleep = a_shard(conditions=[{"kind": "sleeping", "text": "", "since": NOW}])
    assert outcome("sleep", asleep, NOW) == "asleep"
    assert outcome("sleep", a_shard(), NOW) is None
    assert outcome("wake", asleep, NOW) is None
    assert outcome("start", asleep, NOW) is None
    assert outcome("wake", a_shard(wake_seconds=1.6), NOW) == "awake after 2s"
    assert outcome("unload", a_shard(state="stopped", detail="SIGTERM, 1.0 s"), NOW) == (
        "stopped (SIGTERM, 1.0 s); GPU 7 free"
    )
    assert outcome("load", a_shard(since=NOW + 17, launched_at=NOW + 1), NOW) == "ready after 16s"


def test_wait_for_all_leaves_out_what_only_a_request_loads_and_a_sleeper_is_not_ready(tmp_path: Path) -> None:
    intent = {"wish": "stop", "by": "file", "at": NOW, "operator": False}
    resting = a_shard("rests", state="pending", intent=intent, loadable=True)
    with ControlServer(tmp_path / "s", lambda *_: (200, a_status(a_shard(), resting))) as server:
        assert llmgw("-s", server.path, "wait", "--all", "--timeout", "5s").returncode == 0
        assert llmgw("-s", server.path, "wait", "rests", "--timeout", "1s").returncode == 6
    asleep = a_shard(conditions=[{"kind": "sleeping", "text": "", "since": NOW}])
    with ControlServer(tmp_path / "t", lambda *_: (200, a_status(asleep))) as server:
        assert llmgw("-s", server.path, "wait", "embed", "--timeout", "1s").returncode == 6
