from __future__ import annotations

import json
import os
import pwd
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from llmgw.control import client
from llmgw.control.openapi import describe_api
from llmgw.domain.problem import Problem, Reason, Where
from llmgw.domain.status import (
    Activity,
    ActivitySeen,
    Awoken,
    ConditionKind,
    ConditionSet,
    DrainBegan,
    Failed,
    GaveUp,
    Requeued,
    RetryScheduled,
    Wish,
)

if TYPE_CHECKING:
    from .conftest import Daemon


async def test_status_is_one_snapshot_with_the_nodes_header(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    daemon.make_ready(id_)
    daemon.report(id_, ActivitySeen(Activity(running=3, tokens_per_second=612.0)))
    daemon.logs[id_].write("one\ntwo\n")
    code, status = await daemon.ask("GET", "/v1/status")
    assert code == 200
    assert (status["api"], status["node"], status["revision"]) == (1, "gpu-01", daemon.board.snapshot.revision)
    (shard,) = status["shards"]
    assert (shard["name"], shard["state"], shard["pid"], shard["generation"]) == ("llama", "ready", 4711, 1)
    assert shard["intent"] == {"wish": "start", "by": "file", "at": 1000.0, "operator": False}
    assert shard["activity"]["running"] == 3
    assert shard["log"] == {"lines": 2, "skipped": 0, "last": "two"}


async def test_a_failed_shard_says_why(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    daemon.report(id_, Failed(Reason("D4", "out of memory", "smaller", ("CUDA \x1b[31mOOM",))), GaveUp("given up"))
    _, answer = await daemon.ask("GET", "/v1/shards/llama")
    reason = answer["shards"][0]["reason"]
    assert (reason["cause"], reason["remedy"], reason["evidence"]) == ("out of memory", "smaller", ["CUDA \x1b[31mOOM"])


async def test_a_name_means_all_its_replicas_and_a_replica_is_one_segment(daemon: Daemon) -> None:
    first, second = daemon.add("m", 0, replicas=2), daemon.add("m", 1, replicas=2)
    _, both = await daemon.ask("GET", "/v1/shards/m")
    _, one = await daemon.ask("GET", "/v1/shards/m%2F1")
    assert [shard["name"] for shard in both["shards"]] == ["m/0", "m/1"]
    assert [shard["replica"] for shard in one["shards"]] == [1]
    await daemon.ask("POST", "/v1/shards/m/stop")
    assert [daemon.board.snapshot.shards[id_].intent.wish for id_ in (first, second)] == [Wish.STOP, Wish.STOP]


async def test_a_wish_holds_the_name_of_who_wished_it(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    code, operation = await daemon.ask("POST", "/v1/shards/llama/stop")
    intent = daemon.board.snapshot.shards[id_].intent
    assert (code, operation["state"]) == (202, "running")
    assert (intent.wish, intent.operator) == (Wish.STOP, True)
    assert intent.by.startswith(f"uid {os.getuid()}")
    _, lines = daemon.board.history(0)
    assert [line.text for line in lines] == [f"stop by {intent.by}"]


async def test_a_name_that_could_not_be_looked_up_is_asked_for_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def hang(uid: int) -> None:
        released.wait(60)
        raise KeyError(uid)

    monkeypatch.setattr("llmgw.control.api.NAME_LOOKUP", 0.05)
    with monkeypatch.context() as away:
        away.setattr("llmgw.control.api.pwd.getpwuid", hang)
        try:
            await daemon.ask("POST", "/v1/reload")
            await daemon.ask("POST", "/v1/reload")
        finally:
            released.set()
    monkeypatch.setattr("llmgw.control.api.NAME_LOOKUP", 60.0)
    await daemon.ask("POST", "/v1/reload")
    name = pwd.getpwuid(os.getuid()).pw_name
    uid = f"uid {os.getuid()}"
    assert [by for by, _ in daemon.reloads] == [uid, uid, f"{uid} ({name})"]


async def test_the_same_wish_made_twice_is_one_operation(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    daemon.make_ready(id_)
    _, first = await daemon.ask("POST", "/v1/shards/llama/restart")
    _, second = await daemon.ask("POST", "/v1/shards/llama/restart")
    assert first["operation"] == second["operation"]
    assert daemon.board.snapshot.shards[id_].intent.restarts == 1
    daemon.make_stopped(id_)
    daemon.report(id_, Requeued())
    daemon.make_ready(id_)
    code, state = await daemon.ask("GET", f"/v1/operations/{first['operation']}")
    assert (code, state["state"]) == (200, "done")
    _, third = await daemon.ask("POST", "/v1/shards/llama/restart")
    assert third["operation"] != first["operation"]


async def test_an_operation_that_was_done_stays_done(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    _, operation = await daemon.ask("POST", "/v1/shards/llama/start")
    daemon.make_ready(id_)
    await trio.testing.wait_all_tasks_blocked(0.01)
    daemon.report(id_, Failed(Reason("x", "crashed")), GaveUp("given up"))
    _, state = await daemon.ask("GET", f"/v1/operations/{operation['operation']}")
    assert state["state"] == "done"


async def test_waiting_ends_when_the_board_shows_it(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    answers: list[tuple[int, dict[str, Any]]] = []

    async def wish() -> None:
        answers.append(await daemon.ask("POST", "/v1/shards/llama/start?wait=60s"))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wish)
            await daemon.board.wait_shards(lambda snapshot: snapshot.shards[id_].intent.operator)
            assert not answers
            daemon.make_ready(id_)
    ((code, answer),) = answers
    assert (code, answer["state"], answer["shards"][0]["state"]) == (200, "done", "ready")


async def test_waiting_for_a_shard_that_cannot_start_gives_its_reason(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    answers: list[tuple[int, dict[str, Any]]] = []

    async def wish() -> None:
        answers.append(await daemon.ask("POST", "/v1/shards/llama/start?wait=1m"))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wish)
            await daemon.board.wait_shards(lambda snapshot: snapshot.shards[id_].intent.operator)
            daemon.report(id_, Failed(Reason("x", "no such weights", "fetch them")), GaveUp("cannot be cured"))
    ((code, answer),) = answers
    assert (code, answer["state"]) == (409, "failed")
    assert answer["error"]["message"] == "cannot start llama: no such weights"
    assert answer["error"]["hint"] == "fetch them"


async def test_a_wait_that_ends_too_early_says_that_it_still_runs(daemon: Daemon) -> None:
    daemon.add("llama")
    code, answer = await daemon.ask("POST", "/v1/shards/llama/start?wait=10ms")
    assert (code, answer["state"]) == (202, "running")


async def test_while_leaving_wishes_are_refused_and_questions_answered(daemon: Daemon) -> None:
    daemon.add("llama")
    daemon.leave()
    for path in ("/v1/shards/llama/start", "/v1/reload", "/v1/upgrade"):
        code, answer = await daemon.ask("POST", path)
        assert (code, answer["error"]["code"]) == (503, "leaving")
    code, _ = await daemon.ask("GET", "/v1/status")
    assert code == 200


@pytest.mark.parametrize(
    ("method", "path", "code", "word"),
    [
        ("GET", "/v1/shards/nobody", 404, "no-such-shard"),
        ("POST", "/v1/shards/nobody/stop", 404, "no-such-shard"),
        ("GET", "/v1/shards/nobody/logs", 404, "no-such-shard"),
        ("POST", "/v1/shards/llama/explode", 404, "not-found"),
        ("GET", "/nothing", 404, "not-found"),
        ("GET", "/v1/operations/op-99", 404, "no-such-operation"),
        ("DELETE", "/v1/status", 405, "method-not-allowed"),
        ("GET", "/v1/shards/llama/stop", 405, "method-not-allowed"),
        ("POST", "/v1/shards/llama/start?wait=soon", 400, "bad-request"),
        ("GET", "/v1/shards/llama/logs?tail=-1", 400, "bad-request"),
        ("GET", "/v1/shards/llama/logs?follow=maybe", 400, "bad-request"),
        ("GET", "/v1/events?since=yesterday", 400, "bad-request"),
    ],
)
async def test_mistakes_are_named(daemon: Daemon, method: str, path: str, code: int, word: str) -> None:
    daemon.add("llama")
    got, answer = await daemon.ask(method, path)
    assert (got, answer["error"]["code"]) == (code, word)
    assert set(answer["error"]) == {"code", "message", "hint"}


async def test_a_reload_answers_with_its_plan_or_with_all_errors(daemon: Daemon) -> None:
    code, answer = await daemon.ask("POST", "/v1/reload")
    assert (code, answer["actions"]) == (200, [])
    assert daemon.reloads[0][0].startswith("uid ") and not daemon.reloads[0][1]
    daemon.refuse_reload(Problem("unknown-key", "there is no key 'gpu'", "write gpus", Where("a.toml", 3, 1)))
    code, answer = await daemon.ask("POST", "/v1/reload")
    assert code == 422
    assert (answer["errors"][0]["line"], answer["errors"][0]["hint"]) == (3, "write gpus")
    code, _ = await daemon.ask("GET", "/v1/plan")
    assert (code, daemon.reloads[-1]) == (422, ("", True))


async def test_logs_give_the_newest_lines(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    daemon.logs[id_].write("".join(f"line {n}\n" for n in range(300)))
    lines = await daemon.lines("/v1/shards/llama/logs?tail=3")
    assert [line["text"] for line in lines] == ["line 297", "line 298", "line 299"]
    assert set(lines[0]) >= {"seq", "time", "text", "cut"}
    assert len(await daemon.lines("/v1/shards/llama/logs")) == 100
    assert len(await daemon.lines("/v1/shards/llama/logs?tail=all")) == 300
    assert [line["text"] for line in await daemon.lines("/v1/shards/llama/logs?after=298")] == ["line 298", "line 299"]


async def test_logs_since_a_while_ago(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    daemon.logs[id_].write("old\n", at=100.0)
    daemon.logs[id_].write("new\n", at=950.0)
    assert [line["text"] for line in await daemon.lines("/v1/shards/llama/logs?since=1m30s")] == ["new"]


async def test_a_follower_sees_what_comes_and_how_much_it_missed(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    log = daemon.logs[id_]
    log.write("first\n")
    with trio.fail_after(20):
        async with await trio.open_unix_socket(daemon.path) as stream:
            await stream.send_all(b"GET /v1/shards/llama/logs?follow HTTP/1.0\r\n\r\n")
            await read_until(stream, b'"first"')
            # Between two turns of the loop more lines come than the tail holds: the reader cannot have seen them.
            log.write("".join(f"line {n}\n" for n in range(1500)))
            rest = await read_until(stream, b'"line 1499"')
    objects = [json.loads(line) for line in rest.splitlines() if line.startswith(b"{")]
    assert objects[0] == {"dropped": 500}
    assert objects[1]["text"] == "line 500"


async def read_until(stream: trio.SocketStream, mark: bytes) -> bytes:
    found = bytearray()
    while mark not in found:
        piece = await stream.receive_some()
        assert piece
        found += piece
    # To the end of that line.
    while not found.endswith(b"\n"):
        found += await stream.receive_some()
    return bytes(found)


async def test_events_since_a_number_go_on_with_what_comes(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    daemon.make_ready(id_)
    with trio.fail_after(20):
        async with await trio.open_unix_socket(daemon.path) as stream:
            await stream.send_all(b"GET /v1/events?since=1 HTTP/1.0\r\n\r\n")
            first = await read_until(stream, b'"ready')
            daemon.report(id_, DrainBegan("ada"))
            second = await read_until(stream, b"drained by ada")
    lines = [json.loads(line) for line in (first + second).splitlines() if line.startswith(b"{")]
    assert [line["seq"] for line in lines] == [2, 3, 4]
    assert (lines[-1]["before"], lines[-1]["after"]) == ("ready", "draining")


async def test_events_of_the_last_minutes(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    daemon.make_ready(id_)
    daemon.time += 600.0
    daemon.report(id_, DrainBegan("ada"))
    events = await daemon.lines("/v1/events?since=5m&follow=0")
    assert [event["text"] for event in events] == ["drained by ada"]
    assert len(await daemon.lines("/v1/events?follow=0")) == 4


async def test_a_late_reader_of_events_is_told_what_it_missed(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    for _ in range(600):
        daemon.board.ask(id_, Wish.STOP, "ada")
        daemon.board.ask(id_, Wish.START, "ada")
    events = await daemon.lines("/v1/events?since=50&follow=0")
    assert events[0] == {"dropped": 150}
    assert len(events) == 1001
    assert "dropped" not in (await daemon.lines("/v1/events?follow=0"))[0]


async def test_a_browser_gets_server_sent_events(daemon: Daemon) -> None:
    daemon.make_ready(daemon.add("llama"))
    with trio.fail_after(20):
        async with await trio.open_unix_socket(daemon.path) as stream:
            head = b"GET /v1/events HTTP/1.0\r\nAccept: text/event-stream\r\nLast-Event-ID: 2\r\n\r\n"
            await stream.send_all(head)
            answer = await read_until(stream, b'"ready')
    assert b"content-type: text/event-stream" in answer.lower()
    assert b"\r\n\r\nid: 3\ndata: {" in answer


async def test_every_described_route_is_there_and_every_other_is_not(daemon: Daemon) -> None:
    id_ = daemon.add("llama", on_demand=True, can_sleep=True)
    daemon.make_ready(id_)
    _, operation = await daemon.ask("POST", "/v1/shards/llama/start")
    for template, methods in describe_api()["paths"].items():
        path = template.replace("{name}", "llama").replace("{id}", operation["operation"])
        path = path.replace("{gpu}", "0")
        for method in methods:
            if path == "/metrics":
                # Text: test_the_page_of_metrics_is_text.
                continue
            if path.endswith(("/logs", "/events")):
                assert await daemon.lines(path + "?follow=0") is not None
                continue
            code, answer = await daemon.ask(method.upper(), path)
            assert code in (200, 202), (method, path, answer)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_curl_is_a_client(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    daemon.logs[id_].write("\x1b[31mred\n")
    base = ["curl", "-sS", "--max-time", "20", "--unix-socket", daemon.path]

    async def curl(*arguments: str) -> str:
        # A thread of its own: this test's loop is the server.
        import subprocess

        run = lambda: subprocess.run([*base, *arguments], capture_output=True, text=True, check=True).stdout  # noqa: E731
        return await trio.to_thread.run_sync(run)

    assert json.loads(await curl("http://llmgw/v1/ping")) == {"api": 1, "llmgw": client.__version__}
    logs = await curl("-N", "http://llmgw/v1/shards/llama/logs")
    assert "\x1b" not in logs and json.loads(logs)["text"] == "\x1b[31mred"
    stopped = await curl("-X", "POST", "http://llmgw/v1/shards/llama/stop")
    assert json.loads(stopped)["verb"] == "stop"


async def test_the_page_of_metrics_is_text(daemon: Daemon) -> None:
    async with await trio.open_unix_socket(daemon.path) as stream:
        await stream.send_all(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = await read_until(stream, b"gauge\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: text/plain; version=0.0.4; charset=utf-8" in head.lower()
    assert body == b"# TYPE llmgw_build_info gauge\n"


async def test_the_log_of_several_instances_is_asked_for_one_by_one(daemon: Daemon) -> None:
    daemon.add("m", 0, replicas=2)
    id_ = daemon.add("m", 1, replicas=2)
    code, answer = await daemon.ask("GET", "/v1/shards/m/logs")
    assert (code, answer["error"]["hint"]) == (400, "ask for one of: m/0, m/1")
    daemon.logs[id_].write("of the second\n")
    assert [line["text"] for line in await daemon.lines("/v1/shards/m%2F1/logs")] == ["of the second"]


async def test_a_shard_without_a_log_says_so(daemon: Daemon) -> None:
    del daemon.logs[daemon.add("llama")]
    code, answer = await daemon.ask("GET", "/v1/shards/llama/logs")
    assert (code, answer["error"]["message"]) == (409, "cannot show the log of llama: it has none yet")


async def test_old_operations_are_forgotten_and_running_ones_kept(daemon: Daemon) -> None:
    daemon.add("slow")
    quick = daemon.add("quick")
    daemon.make_ready(quick)
    _, running = await daemon.ask("POST", "/v1/shards/slow/start")
    _, first = await daemon.ask("POST", "/v1/shards/quick/start")
    for _ in range(300):
        await daemon.ask("POST", "/v1/shards/quick/start")
    assert (await daemon.ask("GET", f"/v1/operations/{running['operation']}"))[0] == 200
    assert (await daemon.ask("GET", f"/v1/operations/{first['operation']}"))[0] == 404


async def test_a_removed_shard_ends_a_waiting_start(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    answers: list[tuple[int, dict[str, Any]]] = []

    async def wish() -> None:
        answers.append(await daemon.ask("POST", "/v1/shards/llama/start?wait=60s"))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wish)
            await daemon.board.wait_shards(lambda snapshot: snapshot.shards[id_].intent.operator)
            daemon.board.remove(id_)
    ((code, answer),) = answers
    assert (code, answer["error"]["message"]) == (409, "cannot start llama/0: it was removed from the configuration")


async def test_a_start_that_is_being_retried_is_still_running(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    _, operation = await daemon.ask("POST", "/v1/shards/llama/start")
    daemon.report(id_, Failed(Reason("x", "crashed")), RetryScheduled(daemon.time + 5, 1, 5))
    _, state = await daemon.ask("GET", f"/v1/operations/{operation['operation']}")
    assert state["state"] == "running"


async def test_a_later_wish_of_somebody_else_ends_an_operation(daemon: Daemon) -> None:
    id_ = daemon.add("llama")
    _, operation = await daemon.ask("POST", "/v1/shards/llama/start")
    daemon.board.ask(id_, Wish.STOP, "uid 7 (eve)")
    _, state = await daemon.ask("GET", f"/v1/operations/{operation['operation']}")
    assert state["state"] == "failed"


async def test_an_unload_leaves_a_shard_to_requests_and_a_stop_does_not(daemon: Daemon) -> None:
    id_ = daemon.add("llama", on_demand=True)
    daemon.make_ready(id_)
    code, answer = await daemon.ask("POST", "/v1/shards/llama/unload")
    assert (code, answer["verb"]) == (202, "unload")
    assert not daemon.board.intent_cell(id_).value.operator
    daemon.make_stopped(id_)
    (shard,) = (await daemon.ask("GET", "/v1/shards/llama"))[1]["shards"]
    assert shard["loadable"] and shard["state"] == "stopped"
    await daemon.ask("POST", "/v1/shards/llama/stop")
    (shard,) = (await daemon.ask("GET", "/v1/shards/llama"))[1]["shards"]
    assert not shard["loadable"]
    await daemon.ask("POST", "/v1/shards/llama/load")
    assert (await daemon.ask("GET", "/v1/shards/llama"))[1]["shards"][0]["loadable"]


async def test_what_a_shard_cannot_do_is_refused_with_what_to_do_instead(daemon: Daemon) -> None:
    plain, sleeper = daemon.add("plain"), daemon.add("sleeper", can_sleep=True)
    daemon.make_ready(plain)
    before = daemon.board.sequence
    for verb, name, message, hint in (
        ("unload", "plain", "cannot unload plain: no request would load it again", "llmgw stop plain"),
        ("load", "plain", "cannot load plain: no request would load it again", "llmgw start plain"),
        ("sleep", "plain", "cannot sleep plain: it has no sleep mode", "idle_action"),
        ("sleep", "sleeper", "cannot sleep sleeper: it is pending", "llmgw load sleeper"),
        ("wake", "sleeper", "cannot wake sleeper: it is pending and not asleep", "llmgw load sleeper"),
    ):
        code, answer = await daemon.ask("POST", f"/v1/shards/{name}/{verb}")
        assert code == 409
        assert answer["error"]["message"].startswith(message) and hint in answer["error"]["hint"]
    assert daemon.board.sequence == before and daemon.board.snapshot.shards[sleeper].intent.serial == 0


async def test_a_sleep_is_done_when_it_sleeps_and_a_wake_when_it_answers(daemon: Daemon) -> None:
    id_ = daemon.add("llama", can_sleep=True)
    daemon.make_ready(id_)
    _, asked = await daemon.ask("POST", "/v1/shards/llama/sleep")
    assert asked["state"] == "running"
    daemon.report(id_, ConditionSet(ConditionKind.SLEEPING, "asleep"))
    assert (await daemon.ask("GET", f"/v1/operations/{asked['operation']}"))[1]["state"] == "done"
    _, asked = await daemon.ask("POST", "/v1/shards/llama/wake")
    assert asked["state"] == "running"
    daemon.report(id_, Awoken(1.6))
    _, answer = await daemon.ask("GET", f"/v1/operations/{asked['operation']}")
    assert (answer["state"], answer["shards"][0]["wake_seconds"]) == ("done", 1.6)
