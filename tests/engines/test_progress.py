from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.shard import EngineKind
from llmgw.domain.status import LoadingSeen, Progress, ProgressSeen
from llmgw.engines.progress import _MARKS, _PHASE_LINES, _READY, _SIGNS, PHASES, WORKERS_KEPT, ProgressReader

V, S, L, C = EngineKind.VLLM, EngineKind.SGLANG, EngineKind.LLAMACPP, EngineKind.COMMAND


def last(kind: EngineKind, *lines: str) -> Progress | None:
    """The progress that is known after the lines."""
    reader = ProgressReader(kind)
    found = [event for line in lines for event in reader.feed(line)]
    return next((event.progress for event in reversed(found) if isinstance(event, ProgressSeen)), None)


def shards(done: int, total: int, worker: str = "", left: str = "00:10") -> str:
    bar = f"{100 * done // total:3}% Completed | {done}/{total} [00:05<{left},  1.1s/it]"
    return f"{worker}Loading safetensors checkpoint shards: {bar}"


@pytest.mark.parametrize(
    ("kind", "line", "phase", "done", "total", "eta"),
    [
        (V, "(Worker_TP0 pid=5) " + shards(11, 49, left="18:47"), "weights", 11, 49, 1127.0),
        (
            S,
            "\x1b[32mMulti-thread loading shards:  54% Completed | 20/37 [01:27<01:19,  4.7s/it]\x1b[0m",
            "weights",
            20,
            37,
            79.0,
        ),
        (V, shards(0, 1, left="?"), "weights", 0, 1, None),
        (V, "Capturing CUDA graphs (decode, FULL): 100%|██| 51/51", "graphs", 51, 51, None),
        (
            V,
            "Capturing CUDA graphs (mixed):  20%|██      | 10/51 [1:00:01<2:00:02, 1it/s]",
            "graphs",
            10,
            51,
            7202.0,
        ),
        (S, "Capturing batches (bs=8 avail_mem=3.1 GB):  50%|█████     | 4/8 [00:01<00:02]", "graphs", 4, 8, 2.0),
        (V, "Fetching 12 files:  25%|██▌       | 3/12 [00:10<00:30,  3.3s/it]", "download", 3, 12, 30.0),
    ],
)
def test_bars_of_the_engines_are_read(
    kind: EngineKind, line: str, phase: str, done: int, total: int, eta: float | None
) -> None:
    assert last(kind, line) == Progress(phase, done / total, done, total, eta)


def test_a_bar_in_bytes_gives_its_percentage() -> None:
    line = "Downloading model.safetensors:  45%|████▌     | 1.2G/2.7G [00:10<00:12, 110MB/s]"
    assert last(V, line) == Progress("download", 0.45, eta=12.0)


@pytest.mark.parametrize(
    ("kind", "line", "phase"),
    [
        (V, "Time spent downloading weights for x: 12.0 seconds", "download"),
        (V, "(EngineCore pid=4) INFO 11-30 10:00:00 [m.py:1] Starting to load model /m...", "weights"),
        (V, "Using cache directory: /c for vLLM's torch.compile", "compile"),
        (V, "GPU KV cache size: 1,024 tokens", "kv-cache"),
        (V, "init engine (profile, create kv cache) took 9.1 seconds", "warm-up"),
        (S, "[2026-11-30 10:00:00 TP0] KV Cache is allocated. #tokens: 16384", "kv-cache"),
        (S, "[2026-11-30 10:00:00] Load weight begin. avail mem=70 GB", "weights"),
        (L, "0.02.000.000 I srv  init: n_slots = 4", "warm-up"),
        (V, "INFO:     Application startup complete.", "serving"),
    ],
)
def test_lines_without_numbers_give_the_phase(kind: EngineKind, line: str, phase: str) -> None:
    assert last(kind, line) == Progress(phase)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (V, "(EngineCore pid=4) INFO 11-30 10:00:00 [m.py:1] Starting to load model /m..."),
        (S, "[2026-11-30 10:00:00] Init parallel begin."),
        (S, "[2026-11-30 10:00:00 TP0] Load weight begin. avail mem=70 GB"),
    ],
)
def test_the_first_sign_of_loading_is_reported_once(kind: EngineKind, line: str) -> None:
    reader = ProgressReader(kind)
    events = reader.feed(line) + reader.feed(line)
    assert [type(event) for event in events].count(LoadingSeen) == 1


def test_of_several_workers_the_slowest_counts() -> None:
    zero, one = "(Worker_TP0 pid=5) ", "(Worker_TP1 pid=6) "
    assert last(V, shards(9, 10, zero), shards(3, 10, one)) == Progress("weights", 0.3, 3, 10, 10.0)


def test_a_worker_that_waits_at_the_end_hides_no_slower_one() -> None:
    zero, one = "(Worker_TP0 pid=5) ", "(Worker_TP1 pid=6) "
    found = last(V, shards(3, 10, one), shards(10, 10, zero), "(Worker_TP0 pid=5) Loading weights took 4 seconds")
    assert found is not None
    assert (found.done, found.total) == (3, 10)


def test_the_line_that_ends_a_phase_fills_the_bar_of_who_says_it() -> None:
    worker = "(Worker_TP0 pid=5) "
    assert last(V, shards(7, 10, worker), worker + "Loading weights took 4 seconds") == Progress(
        "weights", 1.0, 10, 10, 0.0
    )


def test_a_later_phase_ends_a_bar_that_never_got_full() -> None:
    found = last(V, shards(9, 10, "(Worker pid=5) "), "(EngineCore pid=4) GPU KV cache size: 1 tokens")
    assert found == Progress("kv-cache")


def test_unchanged_progress_and_a_new_estimate_alone_are_no_news() -> None:
    reader = ProgressReader(V)
    assert len(reader.feed(shards(1, 4))) == 1
    assert reader.feed(shards(1, 4)) == ()
    assert reader.feed(shards(1, 4, left="00:09")) == ()
    assert len(reader.feed(shards(2, 4))) == 1


def test_an_unmarked_line_costs_nothing_but_no_known_line_is_unmarked() -> None:
    patterns = [pattern for pattern, *_ in _PHASE_LINES] + [*_SIGNS.values(), *_READY.values()]
    alternatives = [word for pattern in patterns for word in pattern.pattern.split("|")]
    assert not [word for word in alternatives if not any(mark in word for mark in _MARKS)]


def test_pieces_of_one_write_are_read_in_order() -> None:
    assert last(V, "\r".join(shards(i, 4) for i in range(5))) == Progress("weights", 1.0, 4, 4, 10.0)


def test_sglangs_startup_line_is_no_hint_of_ready_before_its_warm_up_ends() -> None:
    reader = ProgressReader(S)
    reader.feed("INFO:     Application startup complete.")
    assert not reader.ready_hint
    reader.feed("[2026-11-30 10:00:00] The server is fired up and ready to roll!")
    assert reader.ready_hint


def test_llama_server_listens_before_it_loads_and_that_is_no_hint() -> None:
    reader = ProgressReader(L)
    assert reader.feed("0.00.002.832 I srv  main: HTTP server is listening, hostname: 127.0.0.1") == ()
    assert not reader.ready_hint
    reader.feed("0.02.300.000 I srv  main: model loaded")
    assert reader.ready_hint


def test_lines_that_mean_nothing_change_nothing() -> None:
    reader = ProgressReader(V)
    assert reader.feed("Avg prompt throughput: 10.0 tokens/s, Running: 1 reqs, usage: 5% of 3/4") == ()
    assert reader.feed("") == ()


def test_made_up_worker_names_do_not_grow_the_reader_without_bound() -> None:
    reader = ProgressReader(V)
    for number in range(WORKERS_KEPT * 3):
        reader.feed(shards(1, 4, f"(Worker_{number} pid=5) "))
    assert len(reader._bars) == WORKERS_KEPT


PIECES = st.one_of(
    st.text(max_size=60),
    st.builds(
        "{}% Completed | {}/{} [{}<{}".format,
        st.integers(-1, 10**14),
        st.integers(0, 10**14),
        st.integers(0, 10**14),
        st.text(max_size=5),
        st.text("0123456789:?", max_size=9),
    ),
    st.sampled_from(
        ["Loading x checkpoint shards: ", "Capturing batches ", "Fetching 3 files", "(Worker pid=1)", "\r"]
    ),
)


@given(kind=st.sampled_from(EngineKind), lines=st.lists(st.lists(PIECES, max_size=4).map("".join), max_size=20))
def test_no_output_makes_reading_fail_and_fractions_stay_between_0_and_1(kind: EngineKind, lines: list[str]) -> None:
    reader = ProgressReader(kind)
    for line in lines:
        for event in reader.feed(line):
            if isinstance(event, ProgressSeen):
                assert event.progress.phase in PHASES
                assert event.progress.fraction is None or 0 <= event.progress.fraction <= 1
                assert event.progress.eta is None or event.progress.eta >= 0
