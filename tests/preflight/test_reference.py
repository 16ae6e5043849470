"""The page about the rules is the one that the rules give."""

from __future__ import annotations

from pathlib import Path

from llmgw.preflight.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "preflight.md"


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert PAGE.read_text() == reference()
