"""Names of cards against their classes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.classes import capability_of, gpu_class

with (Path(__file__).parent / "data" / "gpu_names.tsv").open() as _file:
    ROWS = list(csv.DictReader(_file, delimiter="\t"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']}-{row['memory_total_mib']}")
def test_each_known_card_has_its_class_and_capability(row: dict[str, str]) -> None:
    size = int(row["memory_total_mib"]) if row["memory_total_mib"] else None
    major, minor = row["compute_cap"].split(".")
    assert gpu_class(row["name"], size) == row["class"]
    assert capability_of(row["name"]) == (int(major), int(minor))


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("GRID T4-16Q", 16384, "t4-vgpu-16g"),
        ("NVIDIA A100-3-20C", 20480, "a100-vgpu-20g"),
        ("NVIDIA A100-40CME", 40960, "a100-vgpu-40g"),
        ("NVIDIA H100 NVL", 95830, "h100-nvl-94g"),
        ("NVIDIA GeForce RTX 2080 with Max-Q Design", 8192, "rtx2080-maxq-8g"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "rtx4090-laptop-16g"),
        ("NVIDIA GH200 480GB", 97871, "gh200-96g"),
        ("NVIDIA (unknown)", 1024, "unknown-1g"),
        ("", None, "unknown"),
    ],
)
def test_variants_sizes_and_odd_names(name: str, size: int | None, expected: str) -> None:
    assert gpu_class(name, size) == expected


def test_a_size_half_way_is_rounded_up() -> None:
    assert (gpu_class("L4", 23040), gpu_class("L4", 23039)) == ("l4-23g", "l4-22g")


def test_a_name_that_is_not_known_has_no_capability() -> None:
    assert capability_of("NVIDIA Z900") is None


@given(st.text(), st.none() | st.integers(0, 10**9))
def test_any_name_gives_a_class_that_a_file_can_hold(name: str, size: int | None) -> None:
    assert set(gpu_class(name, size)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    capability_of(name)
