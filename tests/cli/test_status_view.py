from __future__ import annotations

from typing import Any

import pytest
from scripted_control import NOW, a_shard, a_status

from llmgw.cli import status_view as view
from llmgw.cli.status import plain

GOLDEN = """\
node gpu-01  llmgw 0.1.0  up 3d05h  8x h100-80g

SHARD        MODEL          ENGINE  GPUS  STATE     FOR    REQ  DETAIL
llama-70b-a  llama-3.3-70b  vllm    0-3   ready     1d01h  12   :8101 612 tok/s kv 41%
llama-70b-b  llama-3.3-70b  vllm    4,5   loading   1m14s  0    ████░░░░░░  45% weights 13/30, about 1m30s left
qwen-32b     qwen2.5-32b    sglang  6     starting  9s     0    importing
embed        bge-m3         vllm    7     failed    31s    0    exit 1, retry 3/5 in 40s

embed: CUDA out of memory while loading (GPU 7 has 19.4 GiB free)
  | torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.
  lower gpu-memory-utilization, or end pid 4411\
"""


def the_sample() -> dict[str, Any]:
    activity = {"running": 12, "waiting": 0, "tokens_per_second": 612.4, "kv_usage": 0.41}
    progress = {"phase": "weights", "fraction": 0.45, "done": 13, "total": 30, "eta": 92.0}
    reason = {
        "code": "D4",
        "cause": "CUDA out of memory while loading (GPU 7 has 19.4 GiB free)",
        "remedy": "lower gpu-memory-utilization, or end pid 4411",
        "evidence": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB."],
        "retry": True,
    }
    return a_status(
        a_shard(
            "llama-70b-a", model="llama-3.3-70b", gpus=["0", "1", "2", "3"], activity=activity, since=NOW - 90_000,
            endpoint="http://127.0.0.1:8101",
        ),
        a_shard(
            "llama-70b-b", model="llama-3.3-70b", gpus=["4", "5"], state="loading", activity=None, progress=progress
        ),
        a_shard(
            "qwen-32b", model="qwen2.5-32b", engine="sglang", gpus=["6"], state="starting", since=NOW - 9,
            activity=None, detail="importing", load_seconds=None,
        ),
        a_shard(
            state="failed", since=NOW - 31, activity=None, detail="exit 1", failures=3, next_attempt=NOW + 40,
            reason=reason,
        ),
    )  # fmt: skip


def test_the_whole_picture_of_a_node() -> None:
    answer = the_sample()
    assert "\n".join(plain(answer, answer["shards"], unicode=True)) == GOLDEN


def test_without_block_characters_everything_is_ascii() -> None:
    answer = the_sample()
    text = "\n".join(plain(answer, answer["shards"], unicode=False))
    assert text.isascii()
    assert "####------  45% weights 13/30" in text


def test_a_node_without_shards_says_so() -> None:
    assert plain(a_status(), [], unicode=True)[-1] == "no shards"


def test_a_file_that_is_not_in_force_is_told_above_the_table() -> None:
    answer = a_status(config={"path": "/etc/llmgw/llmgw.toml", "error": "3 errors since 10:41"}, stopping="SIGTERM")
    lines = view.head_lines(answer)
    assert lines[1] == "llmgw is on its way out: SIGTERM"
    assert lines[2].startswith("/etc/llmgw/llmgw.toml is not in force: 3 errors since 10:41; see: llmgw check")


def test_how_many_requests_an_engine_gets_is_told_of_shards_that_were_asked_for_by_name() -> None:
    shards = [
        a_shard("a", slots=4, slots_from="props"),
        a_shard("b", slots=1, slots_from="max_inflight"),
        a_shard("c", slots=None, slots_from=""),
        a_shard("d", slots=7, slots_from="a-newer-way"),
    ]
    wanted = [
        "",
        "a: the gateway sends it 4 requests at a time at most (by its own /props)",
        "b: the gateway sends it 1 request at a time at most (by max_inflight)",
        "d: the gateway sends it 7 requests at a time at most (a-newer-way)",
    ]
    assert plain(a_status(*shards), shards, unicode=False, named=True)[-4:] == wanted
    assert not any("at a time" in line for line in plain(a_status(*shards), shards, unicode=False))
    # Of an llmgw that does not know it yet.
    assert view.facts([a_shard("old")]) == []


def detail(**changes: Any) -> str:
    return view.detail(a_shard(**changes), NOW, unicode=False)


def test_a_load_without_numbers_is_estimated_by_the_last_one() -> None:
    assert detail(state="loading", detail="compiling", load_seconds=100.0) == "compiling, about 10s left"
    assert detail(state="loading", load_seconds=60.0) == "longer than last time (1m)"
    assert detail(state="loading", load_seconds=90.1) == "about 1s left"


def test_an_engine_that_was_taken_over_is_not_called_late() -> None:
    assert detail(state="starting", load_seconds=60.0, adopted=True) == ""


def test_an_estimate_that_is_not_known_is_left_out() -> None:
    progress = {"phase": "weights", "fraction": 0.0, "done": 0, "total": 1, "eta": None}
    assert detail(state="loading", progress=progress) == "----------   0% weights 0/1"


def test_what_is_left_in_a_drained_engine_is_told_once() -> None:
    activity = {"running": 2, "waiting": 0, "tokens_per_second": None, "kv_usage": None}
    told = "draining, 3 requests left"
    assert detail(state="draining", detail=told, activity=activity) == told
    assert detail(state="draining", detail="drained by ada", activity=activity) == "drained by ada, 2 requests left"


def test_conditions_stand_in_the_detail_with_their_text() -> None:
    conditions = [
        {"kind": "unhealthy", "text": "health says 503", "since": NOW},
        {"kind": "adopted", "text": "taken over", "since": NOW},
    ]
    assert detail(conditions=conditions) == "unhealthy: health says 503; taken over; :8104"


def test_a_draining_shard_says_how_many_requests_are_left() -> None:
    text = detail(state="draining", detail="drained by uid 1000 (ada)", activity={"running": 1})
    assert text == "drained by uid 1000 (ada), 1 request left"


def test_a_stop_is_told_once() -> None:
    text = "stop wished by uid 0 (root)"
    conditions = [{"kind": "stopping", "text": text, "since": NOW}]
    assert detail(state="draining", detail=text, conditions=conditions, activity=None) == text
    intent = {"wish": "stop", "by": "uid 0 (root)", "at": NOW, "operator": True}
    assert detail(state="stopped", detail="stopped by uid 0 (root) (SIGTERM)", intent=intent).count("root") == 1


def test_what_an_operator_has_stopped_names_the_operator() -> None:
    intent = {"wish": "stop", "by": "uid 1000 (ada)", "at": NOW, "operator": True}
    assert (
        detail(state="stopped", detail="SIGTERM, 4.2 s", intent=intent) == "SIGTERM, 4.2 s, stopped by uid 1000 (ada)"
    )


def test_a_shard_that_requests_load_says_what_that_costs() -> None:
    intent = {"wish": "stop", "by": "file", "at": NOW, "operator": False}
    fresh = {"state": "pending", "intent": intent, "loadable": True, "load_seconds": None}
    assert detail(**fresh) == "loads on request"
    measured = {**fresh, "load_seconds": 161.0, "unload_seconds": 4.2}
    assert detail(**measured) == "loads on request (loaded in 2m41s last time, unloaded in 4s last time)"
    told = "stopped by gateway, idle for 300 s (SIGTERM, 4.2 s)"
    stopped = {**measured, "state": "stopped", "detail": told, "unload_seconds": None}
    assert detail(**stopped) == f"{told}, loads on request (loaded in 2m41s last time)"


def test_a_shard_without_autostart_says_why_it_waits() -> None:
    intent = {"wish": "stop", "by": "file", "at": NOW, "operator": False}
    assert detail(state="pending", intent=intent) == "not started by itself (autostart = false)"


def test_unknown_requests_of_a_ready_shard_are_a_dash_and_waiting_ones_are_added() -> None:
    assert view.row(a_shard(activity=None), NOW, unicode=True)[6] == "-"
    assert view.row(a_shard(activity={"running": 3, "waiting": 9}), NOW, unicode=True)[6] == "3+9"


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("http://127.0.0.1:8104", ":8104"),
        ("http://[::1]:8104", ":8104"),
        ("http://10.0.0.5:8104", "10.0.0.5:8104"),
        ("unix:/run/llmgw/embed.sock", "unix:/run/llmgw/embed.sock"),
    ],
)
def test_an_endpoint_on_loopback_is_its_port(endpoint: str, shown: str) -> None:
    assert detail(endpoint=endpoint) == shown


def test_a_failure_that_is_not_retried_says_what_to_do_then() -> None:
    reason = {"code": "D9", "cause": "no such option", "remedy": "correct [shard.args]", "evidence": [], "retry": False}
    (lines,) = view.paragraphs([a_shard(state="failed", reason=reason)], NOW)
    assert lines == [
        "embed: no such option",
        "  correct [shard.args]",
        "  it is not tried again by itself; afterwards: llmgw start embed, or llmgw reload where the file was changed",
    ]


def test_engine_output_cannot_drive_the_terminal() -> None:
    reason = {
        "code": "D1",
        "cause": "a\x1b[2Jb",
        "remedy": None,
        "evidence": ["\x1b]0;title\x07x\u202ey"],
        "retry": True,
    }
    answer = a_status(a_shard(state="failed", reason=reason, model="m\x1b[31m", detail="\x07"))
    text = "\n".join(plain(answer, answer["shards"], unicode=True))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text


def shard_in(state: str, wish: str = "start") -> dict[str, Any]:
    return a_shard(state=state, intent={"wish": wish, "by": "file", "at": NOW, "operator": False})


@pytest.mark.parametrize(
    ("shards", "code"),
    [
        ([], 0),
        ([("ready", "start")], 0),
        ([("ready", "start"), ("loading", "start")], 3),
        ([("loading", "start"), ("failed", "start")], 1),
        ([("ready", "start"), ("stopped", "stop")], 0),
        ([("draining", "drain")], 0),
        ([("stopped", "start")], 3),
    ],
)
def test_the_exit_code_is_about_the_shards_that_are_wanted(shards: list[tuple[str, str]], code: int) -> None:
    assert view.exit_code([shard_in(*words) for words in shards]) == code


def test_a_name_means_all_its_replicas_and_one_may_be_named_alone() -> None:
    answer = a_status(a_shard("a/0"), a_shard("a/1", replica=1), a_shard("b"))
    assert [shard["name"] for shard in view.chosen(answer, ["a"])[0]] == ["a/0", "a/1"]
    assert [shard["name"] for shard in view.chosen(answer, ["a/1"])[0]] == ["a/1"]
    assert view.chosen(answer, ["b/0", "c"]) == ([answer["shards"][2]], ["c"])


def test_a_shard_without_gpus_and_one_whose_card_went_bad_are_told_with_what_to_do() -> None:
    def with_condition(kind: str, text: str, **changes: Any) -> list[str]:
        shard = a_shard(conditions=[{"kind": kind, "text": text, "since": NOW}], **changes)
        (lines,) = view.paragraphs([shard], NOW)
        return lines

    waits = with_condition("unplaced", "needs 2 GPUs: 8 held by pid 4411 python", state="pending")
    assert waits[0] == "embed: no GPUs: needs 2 GPUs: 8 held by pid 4411 python"
    assert "starts by itself" in waits[1] and "llmgw inventory" in waits[1]
    bad = with_condition("gpu-unhealthy", "GPU 7: uncorrected ECC")
    assert bad[0] == "embed: GPU 7: uncorrected ECC" and "llmgw restart embed" in bad[1]
