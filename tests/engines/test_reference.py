from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.engines.environment import DROPPED_VARIABLES
from llmgw.engines.reference import engines_page, failures_page, pages
from llmgw.engines.rules import ENDINGS, RULES

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", pages())
def test_the_reference_pages_say_what_the_tables_say(name: str) -> None:
    """After a change: `python -m llmgw.engines.reference docs/reference`."""
    assert (FOLDER / name).read_text(encoding="utf-8") == pages()[name]


def test_every_code_of_a_reason_has_its_paragraph() -> None:
    page = failures_page()
    codes = [rule.code for rule in RULES] + list(ENDINGS)
    assert not [code for code in codes if f"\n### {code}\n" not in page]
    assert len(set(codes)) == len(codes)


def test_every_dropped_variable_is_documented_with_its_reason() -> None:
    page = engines_page()
    assert not [name for name, why in DROPPED_VARIABLES.items() if f"| `{name}` | {why} |" not in page]
