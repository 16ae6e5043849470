import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.display import neutralise


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, ünïcode 漢字 █\ttab", "plain text, ünïcode 漢字 █\ttab"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;a new title\x07rest", "rest"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;c3RlYWw", ""),
        ("\x1bcreset\x1b(B", "reset"),
        ("\x9b31mred", "red"),
        ("end\x1b", "end"),
        ("bell\x07 back\x08\x7f", "bell\\x07 back\\x08\\x7f"),
        ("over\rwritten\n", "over\\x0dwritten\\x0a"),
        ("admin\u202etxt.exe\u2066", "admin\\u202etxt.exe\\u2066"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_nothing_reaches_a_terminal_unfiltered(text: str, shown: str) -> None:
    assert neutralise(text) == shown


@given(st.text(st.characters(codec=None)))
def test_whatever_comes_in_no_control_character_comes_out(text: str) -> None:
    shown = neutralise(text)
    assert not any((ord(c) < 0x20 and c != "\t") or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in shown)
    assert "\u202e" not in shown
    assert neutralise(shown) == shown
