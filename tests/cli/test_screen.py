from __future__ import annotations

import io
import sys

import pytest

from llmgw.cli.screen import UNBOUNDED, Screen, judge, look


def colour(option: str = "auto", *, terminal: bool = True, **env: str) -> bool:
    return judge(option, env, terminal=terminal, encoding="utf-8", width=80).colour


def test_colours_are_for_terminals_unless_asked_for_otherwise() -> None:
    assert colour()
    assert not colour(terminal=False)
    assert colour(terminal=False, FORCE_COLOR="1")
    assert not colour(NO_COLOR="1")
    assert not colour(NO_COLOR="1", FORCE_COLOR="1")
    assert not colour(TERM="dumb", FORCE_COLOR="1")
    assert colour(NO_COLOR="")


def test_the_option_wins_over_the_environment() -> None:
    assert colour("always", terminal=False, NO_COLOR="1", TERM="dumb")
    assert not colour("never", FORCE_COLOR="1")


def test_a_dumb_terminal_gets_no_rewritten_lines() -> None:
    screen = judge("auto", {"TERM": "dumb"}, terminal=True, encoding="utf-8", width=80)
    assert not screen.live
    assert screen.terminal


@pytest.mark.parametrize(
    ("encoding", "unicode"), [("utf-8", True), ("ascii", False), ("latin-1", False), ("no", False)]
)
def test_block_characters_need_an_encoding_that_has_them(encoding: str, unicode: bool) -> None:
    assert judge("auto", {}, terminal=True, encoding=encoding, width=80).unicode is unicode


def test_a_pipe_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert look("auto").width == UNBOUNDED


def a_screen(width: int, *, colour: bool = False) -> Screen:
    return Screen(terminal=True, colour=colour, live=True, unicode=True, width=width)


def test_a_drawn_status_keeps_every_column_and_one_line_per_shard(capsys: pytest.CaptureFixture[str]) -> None:
    from scripted_control import a_shard, a_status

    from llmgw.cli.status_picture import print_drawn

    text = "a very long text that cannot fit into the line of a terminal, [gpu:0] :smile: and goes on and on"
    shards = [a_shard(conditions=[{"kind": "unhealthy", "text": text, "since": 0}]), a_shard("qwen")]
    print_drawn(a_status(*shards), shards, a_screen(100), named=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["SHARD", "MODEL", "ENGINE", "GPUS", "STATE", "FOR", "REQ", "DETAIL"]
    assert lines[3].endswith("…")
    assert all(len(line) <= 100 for line in lines[:5])
    assert lines[4].startswith("qwen")
    # What was cut stands below, as it is: neither markup nor emoji.
    assert lines[6] == f"embed: unhealthy: {text}; :8104"


def test_a_terminal_that_is_too_narrow_loses_no_column(capsys: pytest.CaptureFixture[str]) -> None:
    from scripted_control import a_shard, a_status

    from llmgw.cli.status_picture import print_drawn

    shards = [a_shard("a-rather-long-name-of-a-shard")]
    print_drawn(a_status(*shards), shards, a_screen(40), named=False)
    out = capsys.readouterr().out
    for word in ("a-rather-long-name-of-a-shard", "STATE", "ready", "DETAIL", ":8104"):
        assert word in out


def test_a_narrow_terminal_leaves_out_what_is_least_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    from scripted_control import a_shard, a_status

    from llmgw.cli.status_picture import print_drawn

    shards = [a_shard(), a_shard("qwen", state="failed")]
    heads = []
    for width in (80, 50, 40):
        print_drawn(a_status(*shards), shards, a_screen(width), named=False)
        lines = capsys.readouterr().out.splitlines()[2:5]
        assert all(len(line) <= width for line in lines)
        assert "failed" in lines[2]
        heads.append(lines[0].split())
    assert heads == [
        ["SHARD", "MODEL", "ENGINE", "GPUS", "STATE", "FOR", "REQ", "DETAIL"],
        ["SHARD", "GPUS", "STATE", "FOR", "REQ", "DETAIL"],
        ["SHARD", "STATE", "FOR", "REQ", "DETAIL"],
    ]


def test_a_picture_that_is_redrawn_breaks_long_lines_instead_of_losing_their_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from scripted_control import a_shard, a_status

    from llmgw.cli.status_picture import drawn
    from llmgw.cli.table import console

    remedy = "lower gpu-memory-utilization, use more GPUs, or look for another process on the GPU"
    reason = {"code": "D1", "cause": "GPU memory ran out", "remedy": remedy, "evidence": ["x" * 100], "retry": True}
    shards = [a_shard(state="failed", reason=reason)]
    screen = a_screen(40)
    out = console(screen)
    with out.capture() as captured:
        out.print(drawn(a_status(*shards), shards, screen, wrapped=True))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert all(len(line) <= 40 for line in lines)
    assert " ".join(remedy.split()) in " ".join(" ".join(lines).split())
    assert sum(line.count("x") for line in lines) >= 100


def test_states_have_colours_and_nothing_else_has_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    from scripted_control import a_shard, a_status

    from llmgw.cli.status_picture import print_drawn

    shards = [a_shard()]
    print_drawn(a_status(*shards), shards, a_screen(120, colour=True), named=False)
    coloured = capsys.readouterr().out
    print_drawn(a_status(*shards), shards, a_screen(120), named=False)
    assert "\x1b[32mready" in coloured
    assert "\x1b" not in capsys.readouterr().out
