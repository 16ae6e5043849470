from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.cli.words import bar, counted, duration, gpu_ranges, listed, rough_duration, seconds_of


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (9.4, "9s"),
        (59.6, "1m"),
        (74, "1m14s"),
        (3600, "1h"),
        (3660, "1h01m"),
        (90_000, "1d01h"),
        (277_200, "3d05h"),
        (-5, "0s"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(min_value=0, max_value=10**9))
def test_a_duration_never_says_sixty_of_a_unit(seconds: float) -> None:
    text = duration(seconds)
    assert "60s" not in text
    assert "m60" not in text
    assert len(text) <= 10


@pytest.mark.parametrize(("seconds", "text"), [(12, "12s"), (94, "1m30s"), (1127, "19m")])
def test_an_estimate_is_rounded_to_what_can_be_known(seconds: float, text: str) -> None:
    assert rough_duration(seconds) == text


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("250ms", 0.25), ("600", 600)])
def test_options_take_durations_with_and_without_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "10 minutes", "-5", "1e3", "nan", "٣", "s"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="write 90s, 10m or 1h30m"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ([], "-"),
        (["7"], "7"),
        (["4", "5"], "4,5"),
        (["3", "2", "1", "0"], "0-3"),
        (["0", "1", "2", "5", "7"], "0-2,5,7"),
        (["GPU-1a2b3c4d-0000-1111", "MIG-x"], "GPU-1a2b3c4d,MIG-x"),
    ],
)
def test_gpus_are_shown_as_ranges(labels: list[str], text: str) -> None:
    assert gpu_ranges(labels) == text


def test_a_bar_falls_back_to_characters_that_every_encoding_has() -> None:
    assert bar(0.45, unicode=True) == "████░░░░░░"
    assert bar(0.45, unicode=False) == "####------"
    assert bar(7, unicode=False) == "##########"


def test_words_are_counted_and_listed_as_people_do() -> None:
    assert (counted(1, "shard"), counted(2, "shard")) == ("1 shard", "2 shards")
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
