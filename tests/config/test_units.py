import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.config.units import BYTES, SECONDS, format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        ("1.5h", 5400.0),
        ("0s", 0.0),
        ("2d3h4m5s6ms", 183845.006),
        ("1m500ms", 60.5),
    ],
)
def test_durations_are_pairs_of_number_and_unit(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "90", "s", "10 minutes", "1m1h", "1s1s", "-1s", "1,5h", "1h ", " 1h", "off", "9999999999d", "1hh"],
)
def test_other_texts_are_no_durations(text):
    assert parse_duration(text) is None


@given(st.integers(min_value=0, max_value=10**9))
def test_a_formatted_duration_is_read_back(milliseconds):
    assert parse_duration(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000, abs=1e-6)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (90, "1m30s"), (5400, "1h30m"), (0.25, "250ms"), (-60, "-1m"), (86400, "1d")]
)
def test_durations_are_printed_large_to_small(seconds, text):
    assert format_duration(seconds) == text


@given(st.text(max_size=30))
def test_no_text_breaks_the_readers(text):
    assert parse_duration(text) is None or parse_duration(text) >= 0
    assert parse_size(text) is None or parse_size(text) >= 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 << 20), ("1.5TiB", 3 << 39), ("80 GB", 80 * 10**9), ("256B", 256), ("0B", 0), ("4KB", 4000)],
)
def test_sizes_have_binary_and_decimal_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "512", "MiB", "1 000MB", "-1GiB", "1gib", "1Gi", "16GiB ", "1  GiB"])
def test_other_texts_are_no_sizes(text):
    assert parse_size(text) is None


@given(st.integers(min_value=0, max_value=2**50))
def test_a_formatted_size_is_read_back(size):
    assert parse_size(format_size(size)) == size


def test_the_units_are_those_of_the_documentation():
    assert list(SECONDS) == ["d", "h", "m", "s", "ms"]
    assert set(BYTES) == {"B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"}
