from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmgw.metrics.families import FAMILIES, Family, Kind
from llmgw.metrics.reference import page

REPOSITORY = Path(__file__).parents[2]


def test_the_reference_page_is_the_table() -> None:
    made = "python -m llmgw.metrics.reference > docs/reference/metrics.md"
    assert (REPOSITORY / "docs/reference/metrics.md").read_text() == page(), f"write it anew: {made}"


def test_the_reference_page_names_every_family() -> None:
    assert [family.name for family in FAMILIES if f"`{family.name}" not in page()] == []


def test_no_name_is_used_twice() -> None:
    names = [name for family in FAMILIES for name in family.sample_names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_follow_the_rules_of_prometheus(family: Family) -> None:
    assert re.fullmatch(r"llmgw_[a-z][a-z0-9_]*", family.name)
    assert (family.kind is Kind.COUNTER) == family.name.endswith("_total")
    assert family.help.endswith(".")
    assert len(set(family.labels)) == len(family.labels)
    assert "le" not in family.labels
    assert (family.kind is Kind.HISTOGRAM) == bool(family.bounds)
    assert list(family.bounds) == sorted(set(family.bounds))


def test_a_tenant_is_on_no_histogram() -> None:
    for family in FAMILIES:
        if family.kind is Kind.HISTOGRAM:
            assert set(family.labels) <= {"model", "band"}
