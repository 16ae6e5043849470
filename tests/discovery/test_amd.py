"""Cards of AMD out of rocm-smi."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.amd import parse_rocm
from llmgw.domain.hardware import OtherGpu

SAMPLE = (Path(__file__).parent / "data" / "amd" / "rocm-smi-mi100.json").read_text()


def test_the_recorded_node_has_four_cards() -> None:
    cards = parse_rocm(SAMPLE)
    assert cards is not None and [card.index for card in cards] == [0, 1, 2, 3]
    assert cards[0] == OtherGpu("amd", 0, "Arcturus GL-XL [Instinct MI100]", "0000:83:00.0", 32752, 6)


@pytest.mark.parametrize("key", ["Card series", "Card Series", "CARD SERIES"])
def test_keys_are_read_in_each_spelling(key: str) -> None:
    values = {key: "AMD Instinct MI300X", "GFX Version": "gfx942", "VRAM Total Memory (B)": str(206141652992)}
    assert parse_rocm(json.dumps({"card10": values, "card2": values})) == (
        OtherGpu("amd", 2, "AMD Instinct MI300X", "", 196592, None, "gfx942"),
        OtherGpu("amd", 10, "AMD Instinct MI300X", "", 196592, None, "gfx942"),
    )


def test_warnings_around_the_object_do_no_harm() -> None:
    text = "WARNING: AMD GPU device(s) is/are in a low-power state {check power}\n\n" + SAMPLE + "\nbye\n"
    assert parse_rocm(text) == parse_rocm(SAMPLE)


@pytest.mark.parametrize("value", ["N/A", "", "-1", "1.5", "9" * 30, "\u0663"])
def test_a_size_that_is_no_number_is_unknown_never_zero(value: str) -> None:
    found = parse_rocm(json.dumps({"card0": {"VRAM Total Memory (B)": value, "VRAM Total Used Memory (B)": value}}))
    assert found is not None and (found[0].memory_total, found[0].memory_used, found[0].name) == (None, None, "unknown")


@pytest.mark.parametrize("text", ["", "ERROR: no AMD GPUs", "[]", '{"card0": ', "[" * 100_000, "\n{" * 5000, "{1e999}"])
def test_a_text_that_is_no_answer_is_none(text: str) -> None:
    assert parse_rocm(text) is None


def test_an_answer_without_cards_has_none() -> None:
    assert parse_rocm('{"system": {"Driver version": "6.3.6"}, "card0": "off", "cardx": {}}') == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["card0", "card1", "Card Series", "VRAM Total Memory (B)", "PCI Bus"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(JSON.map(json.dumps) | st.text() | st.integers(0, len(SAMPLE)).map(lambda at: SAMPLE[:at]))
def test_no_text_raises(text: str) -> None:
    cards = parse_rocm(text) or ()
    assert len({card.index for card in cards}) == len(cards)
    assert all("\x1b" not in card.name for card in cards)
