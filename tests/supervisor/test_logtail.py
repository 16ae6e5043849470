from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.supervisor.logtail import PINNED, LogTail

PIECES = st.lists(
    st.sampled_from(
        [
            b"\n",
            b"\r",
            b"\r\n",
            b"a",
            b"line of text",
            b"ERROR it broke",
            b"x" * 70,
            "grün €uro \U0001f600".encode(),
            b"\xff\xfe",
            b"\xe2\x82",
            b"\x1b[31mred\x1b[0m",
            b"GET /health",
            b"-- llmgw: start",
            b"",
        ]
    ),
    max_size=60,
)


def tail(lines: int = 100, size: int = 100_000, line_max: int = 64) -> LogTail:
    return LogTail(
        lines,
        size,
        line_max,
        pin=lambda text: text.startswith("ERROR"),
        drop=lambda text: text == "GET /health",
    )


def texts(log: LogTail) -> list[str]:
    return [line.text for line in log.read(0)[1]]


def test_lines_end_at_newlines_and_the_rest_waits() -> None:
    log = tail()
    fresh = log.feed(b"one\ntwo\nthr", 5.0)
    assert [(line.seq, line.at, line.text) for line in fresh] == [(1, 5.0, "one"), (2, 5.0, "two")]
    assert [line.text for line in log.feed(b"ee\n", 6.0)] == ["three"]
    assert log.last_text == "three"


def test_of_a_progress_bar_the_newest_state_is_kept() -> None:
    log = tail(lines=3)
    log.feed(b"before\n", 1.0)
    for percent in range(101):
        log.feed(b"\rLoading shards: %d%%" % percent, 1.0)
    assert texts(log) == ["before", "Loading shards: 99%"]
    log.feed(b"\nafter\n", 1.0)
    assert texts(log) == ["before", "Loading shards: 100%", "after"]


def test_one_read_of_a_bar_gives_its_newest_state_only() -> None:
    fresh = tail().feed(b"\rbar 1\rbar 2\rbar 3\r", 1.0)
    assert [(line.text, line.progress) for line in fresh] == [("bar 3", True)]


def test_carriage_return_and_newline_are_one_end_also_over_a_chunks_end() -> None:
    log = tail()
    log.feed(b"one\r\ntwo\r", 1.0)
    log.feed(b"\n\r\nthree\r\r\nfour\n", 1.0)
    assert texts(log) == ["one", "two", "", "three", "four"]
    assert not any(line.progress for line in log.read(0)[1])


def test_a_reader_sees_each_new_state_of_a_bar_under_a_new_number() -> None:
    log = tail()
    log.feed(b"\rbar 1\r", 1.0)
    seen = log.sequence
    log.feed(b"bar 2\r", 2.0)
    dropped, lines = log.read(seen)
    assert (dropped, [line.text for line in lines]) == (0, ["bar 2"])


def test_an_unterminated_bar_is_shown_when_nothing_follows() -> None:
    log = tail()
    log.feed(b"\rLoading: 45%", 1.0)
    assert [line.text for line in log.settle(2.0)] == ["Loading: 45%"]
    assert log.settle(3.0) == ()
    log.feed(b"\rLoading: 50%\n", 4.0)
    assert texts(log) == ["Loading: 50%"]


def test_a_half_line_that_was_shown_early_becomes_one_line() -> None:
    log = tail()
    log.feed(b"listening on", 1.0)
    log.settle(2.0)
    log.feed(b" port 80\nnext\n", 3.0)
    assert texts(log) == ["listening on port 80", "next"]
    log.feed(b"whole", 4.0)
    log.settle(5.0)
    log.feed(b"\n", 6.0)
    assert texts(log)[-1] == "whole"
    assert not log.read(0)[1][-1].progress


def test_long_lines_are_cut_and_marked() -> None:
    log = tail(line_max=10)
    log.feed(b"0123456789abc", 1.0)
    log.feed(b"def" * 100_000 + b"\nshort\n", 1.0)
    (long, short) = log.read(0)[1]
    assert (long.text, long.cut) == ("0123456789", True)
    assert (short.text, short.cut) == ("short", False)


def test_a_character_that_the_cut_went_through_is_left_out() -> None:
    log = tail(line_max=3)
    log.feed("a€uro\n".encode(), 1.0)
    log.feed("ab€\n".encode(), 1.0)
    assert texts(log) == ["a", "ab"]


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    log = tail()
    log.feed(b"caf\xe9 \xff\n\xe2\x82\n", 1.0)
    assert texts(log) == ["caf\ufffd \ufffd", "\ufffd"]


def test_a_character_split_over_chunks_is_whole() -> None:
    log = tail()
    for byte in "grün €\n".encode():
        log.feed(bytes([byte]), 1.0)
    assert texts(log) == ["grün €"]


def test_error_lines_outlive_the_access_lines_that_evict_them() -> None:
    log = tail(lines=10)
    log.feed(b"ERROR out of memory\n", 1.0)
    log.feed(b"POST /v1/chat/completions 200\n" * 1000, 2.0)
    assert "ERROR out of memory" not in texts(log)
    assert [line.text for line in log.pinned] == ["ERROR out of memory"]
    assert log.evidence()[0] == "ERROR out of memory"
    assert len(log.evidence()) == 11


def test_the_first_and_the_newest_error_lines_are_kept() -> None:
    log = tail()
    for number in range(1000):
        log.feed(b"ERROR %d\n" % number, 1.0)
    pinned = [line.text for line in log.pinned]
    assert pinned[:2] == ["ERROR 0", "ERROR 1"]
    assert pinned[-1] == "ERROR 999"
    assert len(pinned) == 2 * PINNED


def test_access_lines_of_our_own_probes_take_no_place() -> None:
    log = tail()
    log.feed(b"GET /health\nreal\nGET /health\n", 1.0)
    assert [(line.seq, line.text) for line in log.read(0)[1]] == [(1, "real")]
    assert log.last_text == "real"


def test_the_unterminated_rest_comes_out_at_the_end() -> None:
    log = tail()
    log.feed(b"last words", 1.0)
    assert [(line.text, line.progress) for line in log.flush(2.0)] == [("last words", False)]
    assert log.flush(3.0) == ()


def test_a_reader_is_told_how_many_lines_fell_out() -> None:
    log = tail(lines=3)
    log.feed(b"1\n2\n", 1.0)
    seen = log.sequence
    log.feed(b"3\n4\n5\n6\n7\n", 1.0)
    dropped, lines = log.read(seen)
    assert dropped == 2
    assert [line.text for line in lines] == ["5", "6", "7"]


def test_llmgws_own_lines_are_marked_and_prove_nothing() -> None:
    log = tail()
    log.feed(b"-- llmgw: started --\nengine speaks\n", 1.0)
    assert [line.own for line in log.read(0)[1]] == [True, False]
    assert log.evidence() == ("engine speaks",)
    assert log.last_text == "engine speaks"


def test_a_new_launch_forgets_the_errors_of_the_last_one_but_shows_its_lines() -> None:
    log = tail()
    log.feed(b"ERROR old\n", 1.0)
    log.begin()
    log.feed(b"fresh\n", 2.0)
    assert log.pinned == ()
    assert log.evidence() == ("fresh",)
    assert texts(log) == ["ERROR old", "fresh"]


def test_a_scan_counts_lines_and_pins_errors_without_reading_the_rest() -> None:
    log = tail()
    log.feed(b"normal\nhal", 1.0)
    assert log.scan(b"f\n" + b"noise\n" * 500 + b"ERROR found\n" + b"noise\n" * 10 + b"begin", 2.0) == 512
    log.feed(b"ning\n", 3.0)
    assert log.skipped == 512
    assert texts(log) == ["normal", "-- llmgw: 512 lines skipped, the engine writes too fast --", "beginning"]
    assert log.evidence() == ("ERROR found", "normal", "beginning")


def test_scans_in_a_row_show_one_line_with_their_sum() -> None:
    log = tail()
    log.scan(b"noise\n" * 10, 1.0)
    log.scan(b"noise\n" * 5, 1.0)
    assert texts(log) == ["-- llmgw: 15 lines skipped, the engine writes too fast --"]
    log.feed(b"read\n", 1.0)
    log.scan(b"noise\n", 1.0)
    assert len(texts(log)) == 3


def test_a_scanned_flood_without_a_line_end_stays_bounded() -> None:
    log = tail(line_max=100)
    for _ in range(50):
        log.scan(b"x" * 100_000, 1.0)
    log.feed(b"\n", 1.0)
    (line,) = log.read(0)[1]
    assert (len(line.text), line.cut) == (100, True)


@given(PIECES, st.data())
@settings(max_examples=300, deadline=None)
def test_any_chunking_gives_the_same_tail(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    one, many = tail(lines=8, size=200), tail(lines=8, size=200)
    one.feed(whole, 1.0)
    for start, end in itertools.pairwise([0, *cuts, len(whole)]):
        many.feed(whole[start:end], 1.0)
    one.flush(1.0)
    many.flush(1.0)
    assert many.read(0) == one.read(0)
    assert many.pinned == one.pinned
    assert many.last_text == one.last_text


@given(st.lists(st.tuples(st.sampled_from(["feed", "scan", "settle", "flush", "begin"]), PIECES), max_size=12))
@settings(max_examples=300, deadline=None)
def test_the_bounds_always_hold(steps: list[tuple[str, list[bytes]]]) -> None:
    log = tail(lines=5, size=150)
    for step, pieces in steps:
        match step:
            case "feed":
                log.feed(b"".join(pieces), 1.0)
            case "scan":
                log.scan(b"".join(pieces), 1.0)
            case "settle":
                log.settle(1.0)
            case "flush":
                log.flush(1.0)
            case _:
                log.begin()
        lines = log.read(0)[1]
        assert len(lines) <= 5
        sizes = [len(line.text.encode()) for line in lines if "\ufffd" not in line.text]
        assert sum(sizes) <= 150
        assert all(line.own or len(line.text) <= 64 for line in lines)
        assert [line.seq for line in lines] == sorted({line.seq for line in lines})
        assert len(log.pinned) <= 2 * PINNED


@pytest.mark.parametrize("data", [bytes(range(256)) * 40, b"\r" * 5000, b"\n" * 5000, b"\x00" * 5000, b"\r\n" * 999])
def test_no_bytes_raise(data: bytes) -> None:
    log = tail()
    log.feed(data, 1.0)
    log.scan(data, 1.0)
    log.flush(1.0)
    assert len(log.read(0)[1]) <= 100
