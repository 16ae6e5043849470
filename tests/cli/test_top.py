from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_control import NOW, ControlServer, a_shard, a_status, environment, llmgw

from llmgw.cli import top_view as view
from llmgw.cli.screen import Screen
from llmgw.cli.table import console
from llmgw.cli.top import plain
from llmgw.cli.top_picture import drawn
from llmgw.domain.display import without_sequences

BOUNDS = [0.1, 1.0, 10.0]


def a_gateway(**changes: Any) -> dict[str, Any]:
    """`gateway` of the status, with changes."""
    gateway = {
        "running": 3,
        "max_inflight": None,
        "queues": [{"model": "m", "band": "normal", "waiting": 4, "oldest_seconds": 12.0, "running": 3}],
        "tenants": [{"name": "search", "waiting": 4, "running": 3, "granted": 100, "refused": 10}],
        "endpoints": [{"model": "m", "shard": "embed/0", "running": 3, "slots": 4}],
        "ejections": {},
        "counted": counted(),
    }
    return {**gateway, **changes}


def counted(requests: int = 100, ttft: tuple[int, ...] = (0, 0, 0, 0), completion: int = 1000) -> dict[str, Any]:
    return {
        "ttft_bounds": BOUNDS,
        "bands": [{"model": "m", "band": "normal", "requests": requests, "chunks": 0, "ttft": list(ttft)}],
        "tokens": [{"model": "m", "tenant": "search", "prompt": 1, "completion": completion}],
    }


def an_inventory() -> dict[str, Any]:
    holder = {"pid": 812, "memory_mib": 3072, "command": "python", "user": "ada", "shard": None, "ours": False}
    ours = {"pid": 4711, "memory_mib": 61440, "command": "vllm", "user": "llmgw", "shard": "embed/0", "ours": True}
    card = {
        "index": 7,
        "class": "h100-80g",
        "compute_cap": "9.0",
        "unified_memory": False,
        "memory_total_mib": 81559,
        "memory_free_mib": 17000,
        "holders": [ours, holder],
        "health_flags": [],
        "why_not": None,
    }
    return {"gpu": {"gpus": [card], "mig_instances": []}, "host": {"memory_total_mib": 1}}


def status(now: float = NOW, **changes: Any) -> dict[str, Any]:
    return a_status(a_shard(), now=now, gateway=a_gateway(), inventory=an_inventory(), **changes)


def two_looks() -> view.History:
    """Two seconds apart: 20 requests, 40 tokens, 10 first tokens."""
    history = view.History()
    history.add(status())
    tenants = [{"name": "search", "waiting": 4, "running": 3, "granted": 120, "refused": 11}]
    after = a_gateway(counted=counted(120, (5, 5, 0, 0), 1040), tenants=tenants)
    history.add({**status(NOW + 2), "gateway": after})
    return history


def test_the_whole_picture() -> None:
    history = two_looks()
    history.note([{"seq": 3, "time": NOW - 60, "shard": "qwen", "before": "ready", "after": "failed", "text": "OOM"}])
    assert "\n".join(plain(history, unicode=True)) == (
        "node gpu-01  llmgw 0.1.0  up 3d05h  8x h100-80g\n"
        "gateway  3 running  4 waiting  10 req/s  20 tokens/s  first token 100ms, p95 910ms\n"
        "\n"
        "SHARD  MODEL   ENGINE  GPUS  STATE  FOR    REQ  DETAIL\n"
        "embed  bge-m3  vllm    7     ready  1m16s  0    :8104\n"
        "\n"
        "MODEL  BAND    WAITING  OLDEST  RUNNING  REQ/S  FIRST TOKEN  P95\n"
        "m      normal  4        12s     3        10     100ms        910ms\n"
        "\n"
        "TENANT  WAITING  RUNNING  REQ/S  REFUSED/S  TOKENS/S\n"
        "search  4        3        10     0.5        20\n"
        "\n"
        "GPU  CLASS     CC   MEMORY    FREE      HELD BY                                         NOTE\n"
        "7    h100-80g  9.0  79.6 GiB  16.6 GiB  embed, pid 812 3.0 GiB (python, ada), not ours  -\n"
        "\n"
        "last failures\n"
        "1m02s ago  qwen  OOM"
    )


def test_before_the_second_look_rates_are_unknown_and_not_0() -> None:
    history = view.History()
    history.add(status())
    picture = plain(history, unicode=True)
    assert picture[1] == "gateway  3 running  4 waiting"
    assert "m      normal  4        12s     3        -      -            -" in picture


def test_an_llmgw_without_a_gateway_shows_its_shards() -> None:
    history = view.History()
    for answer in (a_status(a_shard()), a_status(a_shard(), gateway=None, inventory=None)):
        history.add(answer)
        assert plain(history, unicode=True)[2:] == [
            "SHARD  MODEL   ENGINE  GPUS  STATE  FOR    REQ  DETAIL",
            "embed  bge-m3  vllm    7     ready  1m14s  0    :8104",
        ]


def test_rates_are_taken_over_the_last_seconds_only() -> None:
    history = view.History()
    for second in range(60):
        # A burst long ago, then one request per second.
        requests = 1000 * min(second, 1) + second
        history.add({**status(NOW + second), "gateway": a_gateway(counted=counted(requests))})
    assert view.WINDOW <= history.rates.seconds <= view.WINDOW + 1
    assert history.rates.requests["m", "normal"] == 1.0


def test_an_llmgw_that_began_anew_counts_anew() -> None:
    history = two_looks()
    history.note([{"seq": 9, "time": NOW, "shard": "qwen", "before": "ready", "after": "failed", "text": "OOM"}])
    history.add({**status(NOW + 5, started=NOW + 4), "gateway": a_gateway(counted=counted(0))})
    assert history.rates.seconds == 0
    assert (history.sequence, list(history.failures)) == (0, [])


def test_a_counter_that_a_reload_took_away_is_no_negative_rate() -> None:
    history = view.History()
    history.add({**status(), "gateway": a_gateway(counted=counted(100, (9, 0, 0, 0)))})
    history.add({**status(NOW + 1), "gateway": a_gateway(counted=counted(3, (1, 0, 0, 0)))})
    assert history.rates.requests["m", "normal"] == 0.0
    assert history.rates.ttft["m", "normal"] == [0, 0, 0, 0]


def test_the_busiest_rows_stay_and_the_others_are_counted() -> None:
    tenants = [
        {"name": f"t{i:02}", "waiting": i, "running": 0, "granted": 0, "refused": 0} for i in range(view.ROWS_SHOWN + 5)
    ]
    history = view.History()
    history.add({**status(), "gateway": a_gateway(tenants=tenants)})
    table = view.tables(history, unicode=True)[2]
    assert table.left_out == 5
    assert [row[0] for row in table.rows[:2]] == ["t16", "t15"]
    assert "and 5 more, less busy" in plain(history, unicode=True)


def test_names_and_failures_cannot_write_to_the_terminal() -> None:
    history = two_looks()
    history.note(
        [{"seq": 1, "time": NOW, "shard": "a", "before": "ready", "after": "failed", "text": "\x1b]0;x\x07bad\x1b[2J"}]
    )
    assert view.failure_lines(history) == ["2s ago  a  bad"]


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ([0, 0, 0, 0], 0.5, None),
        ([10, 0, 0, 0], 0.5, 0.05),
        ([0, 10, 0, 0], 0.5, 0.55),
        ([5, 5, 0, 0], 0.5, 0.1),
        ([0, 0, 0, 3], 0.5, math.inf),
    ],
)
def test_a_quantile_is_spread_over_its_bucket(counts: list[int], share: float, value: float | None) -> None:
    found = view.quantile(BOUNDS, counts, share)
    assert found == (value if value is None else pytest.approx(value))


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4).filter(any), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_that_holds_its_rank(counts: list[int], share: float) -> None:
    found = view.quantile(BOUNDS, counts, share)
    assert found is not None
    rank = share * sum(counts)
    bucket = len(BOUNDS) if math.isinf(found) else sum(bound < found - 1e-9 for bound in BOUNDS)
    assert sum(counts[:bucket]) <= rank + 1e-9
    assert sum(counts[: bucket + 1]) >= rank - 1e-9


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0, "0"), (0.01, "<0.1"), (0.44, "0.4"), (12.4, "12"), (1234.0, "1234")]
)
def test_rates_are_short(value: float | None, text: str) -> None:
    assert view.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0804, "80ms"), (1.24, "1.2s"), (35.2, "35s"), (math.inf, ">10s")]
)
def test_times_are_short(value: float | None, text: str) -> None:
    assert view.seconds(value, BOUNDS) == text


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("colour", [True, False])
def test_no_line_is_wider_than_the_terminal(width: int, colour: bool) -> None:
    screen = Screen(terminal=True, colour=colour, live=True, unicode=True, width=width)
    history = two_looks()
    history.note([{"seq": 1, "time": NOW, "shard": "a", "before": "ready", "after": "failed", "text": "x" * 500}])
    out = console(screen)
    with out.capture() as captured:
        out.print(drawn(history, screen, lost="cannot reach llmgw; trying again"))
    text = captured.get()
    assert ("\x1b[3" in text) == colour
    lines = [without_sequences(line).rstrip() for line in text.splitlines()]
    # What is left of a table without its spare columns needs this much.
    assert max(map(len, lines)) <= max(width, 52)
    assert any("STATE" in line for line in lines)


# -- as a process ------------------------------------------------------------------------------------------


class Llmgw:
    """Answers looks two seconds apart, each with ten more requests per second."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        assert (method, body) == ("GET", None)
        if path.startswith("/v1/events"):
            return 200, []
        assert path == "/v1/status"
        self.looks += 1
        gateway = a_gateway(counted=counted(20 * self.looks, (0, 10 * self.looks, 0, 0)))
        return 200, {**status(NOW + 2 * self.looks), "gateway": gateway}


def test_once_takes_two_looks_and_prints_one_picture(tmp_path: Path) -> None:
    with ControlServer(tmp_path / "s", Llmgw()) as server:
        done = llmgw("-s", server.path, "top", "--once", "-i", "0.2")
        assert [path for _, path, _ in server.asked].count("/v1/status") == 2
    assert (done.returncode, done.stderr) == (0, "")
    assert "m      normal  4        12s     3        10     550ms        955ms" in done.stdout
    assert "\x1b" not in done.stdout


def test_in_a_pipe_once_is_meant(tmp_path: Path) -> None:
    with ControlServer(tmp_path / "s", Llmgw()) as server:
        done = llmgw("-s", server.path, "top", "-i", "0.2")
    assert done.stdout.startswith("node gpu-01")
    assert done.stdout.count("TENANT") == 1


def test_json_has_the_status_and_the_rates(tmp_path: Path) -> None:
    with ControlServer(tmp_path / "s", Llmgw()) as server:
        done = llmgw("-s", server.path, "top", "--once", "--json", "-i", "0.2")
    found = json.loads(done.stdout)
    assert found["api"] == 1
    assert found["window_seconds"] == 2.0
    assert found["shards"][0]["name"] == "embed"
    assert "counted" not in found["gateway"]
    assert found["bands"] == [
        {
            "model": "m",
            "band": "normal",
            "requests_per_second": 10.0,
            "first_token_p50_seconds": pytest.approx(0.55),
            "first_token_p95_seconds": pytest.approx(0.955),
        }
    ]


def test_colours_are_obeyed_in_a_pipe(tmp_path: Path) -> None:
    with ControlServer(tmp_path / "s", Llmgw()) as server:
        words = ("-s", server.path, "top", "--once", "-i", "0.2")
        assert "\x1b[32mready" in llmgw(*words, "--color", "always").stdout
        assert "\x1b" not in llmgw(*words, env=environment(FORCE_COLOR="1", NO_COLOR="1")).stdout


def test_without_a_supervisor_it_ends_at_once(tmp_path: Path) -> None:
    done = llmgw("-s", str(tmp_path / "none"), "top")
    assert done.returncode == 5
    assert done.stderr.startswith("error: no llmgw is running here")


@pytest.mark.parametrize("text", ["0", "x", "nan", "1e9"])
def test_an_interval_that_is_none_is_refused(text: str) -> None:
    done = llmgw("top", "-i", text)
    assert done.returncode == 2
    assert "is no number of seconds from 0.2 to 3600" in done.stderr


class Terminal:
    """A terminal of this size, and the command in it."""

    def __init__(self, words: list[str], columns: int = 100, lines: int = 40) -> None:
        self.shown = ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        env = environment(TERM="xterm-256color")
        command = [sys.executable, "-m", "llmgw", *words]
        self.child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
        os.close(slave)

    def until(self, wanted: str, patience: float = 30.0) -> None:
        """Until this is shown anew."""
        self.shown = ""
        deadline = time.monotonic() + patience
        while wanted not in without_sequences(self.shown):
            assert time.monotonic() < deadline, f"{wanted!r} was not shown: {self.shown[-2000:]!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self.shown += os.read(self._master, 65536).decode("utf-8", "replace")

    def interrupt(self) -> int:
        self.child.send_signal(signal.SIGINT)
        # A terminal that nobody reads would hold the command up.
        while self.child.poll() is None:
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._master, 65536).decode("utf-8", "replace")
                except OSError:
                    break
        return self.child.wait(30)

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        os.close(self._master)


@contextmanager
def terminal(words: list[str], columns: int = 100) -> Iterator[Terminal]:
    it = Terminal(words, columns)
    try:
        yield it
    finally:
        it.close()


def test_an_llmgw_that_goes_away_is_waited_for_and_its_last_picture_stays(tmp_path: Path) -> None:
    server = ControlServer(tmp_path / "s", Llmgw())
    with terminal(["-s", str(tmp_path / "s"), "top", "-i", "0.2"]) as it:
        with server:
            it.until("10 req/s")
        os.unlink(tmp_path / "s")
        it.until("trying again")
        it.until("embed  bge-m3")
        with ControlServer(tmp_path / "s", Llmgw()):
            it.until("node gpu-01")
            it.until("10 req/s")
            assert "trying again" not in without_sequences(it.shown)
            assert it.interrupt() == 130
        assert "Traceback" not in it.shown
