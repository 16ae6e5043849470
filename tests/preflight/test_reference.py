"""The page about the rules is the one that the rules give."""

from __future__ import annotations

from pathlib import Path

from llmgw.preflight.pages import PAGES
from llmgw.preflight.reference import DOCUMENTED, pages, reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "preflight.md"


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert PAGE.read_text() == reference()


def test_every_code_has_a_page_of_its_own_that_is_up_to_date() -> None:
    folder = PAGE.parents[1] / "rules"
    assert set(PAGES) == set(DOCUMENTED)
    assert {path.name: path.read_text() for path in folder.iterdir()} == pages()
