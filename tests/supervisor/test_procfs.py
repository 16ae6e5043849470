"""Reading /proc."""

from __future__ import annotations

import subprocess
import time

from hypothesis import given
from hypothesis import strategies as st

from llmgw.supervisor.oom import oom_kills, parse_oom_kills
from llmgw.supervisor.procfs import (
    environment_value,
    identify,
    own_children,
    parse_stat,
    read_stat,
    ticks_now,
)

TAIL = "S 10 20 30 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 98765 1000 10"


@given(st.text(st.characters(blacklist_characters="\n\0"), max_size=15))
def test_fields_count_from_the_last_bracket_whatever_the_name_is(comm: str) -> None:
    stat = parse_stat(f"42 ({comm}) {TAIL}")
    assert stat is not None
    assert (stat.pid, stat.comm, stat.state) == (42, comm, "S")
    assert (stat.ppid, stat.pgrp, stat.session, stat.start) == (10, 20, 30, 98765)


@given(st.text())
def test_any_other_text_is_no_stat(text: str) -> None:
    stat = parse_stat(text)
    assert stat is None or stat.start >= 0


def test_the_clock_of_start_times_is_the_clock_of_now() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            stat = read_stat(process.pid)
            assert stat is not None
            assert ticks_now() - 1000 < stat.start <= ticks_now()
            assert process.pid in own_children()
            identity = identify(process.pid)
            assert identity is not None
            assert identity.start_ticks == stat.start
        finally:
            process.kill()
    assert identify(process.pid) is None


def test_a_variable_is_read_by_its_whole_name() -> None:
    with subprocess.Popen(["sleep", "600"], env={"LLMGW_RUN_ID": "abc", "EMPTY": ""}) as process:
        try:
            # The kernel closes our end of the exec's pipe a moment before it sets up the environment.
            deadline = time.monotonic() + 30
            while environment_value(process.pid, "LLMGW_RUN_ID") is None and time.monotonic() < deadline:
                time.sleep(0.001)
            assert environment_value(process.pid, "LLMGW_RUN_ID") == "abc"
            assert environment_value(process.pid, "EMPTY") == ""
            assert environment_value(process.pid, "RUN_ID") is None
        finally:
            process.kill()
    assert environment_value(process.pid, "LLMGW_RUN_ID") is None


def test_oom_kills_are_read_from_the_unit_or_the_host_or_are_unknown() -> None:
    assert parse_oom_kills("low 0\noom 3\noom_kill 2\noom_group_kill 9\n") == 2
    assert parse_oom_kills("nr_free_pages 5\n") is None
    assert oom_kills("/nonexistent") == oom_kills(None)
