"""What the page on classes and fabrics promises is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from llmgw.config.schema import NODE
from llmgw.discovery.classes import gpu_class
from llmgw.engines.nccl import HOST_ADDRESS

PAGE = (Path(__file__).parents[2] / "docs" / "classes-and-fabrics.md").read_text()


def test_every_card_of_the_table_has_the_class_that_stands_there() -> None:
    rows = re.findall(r"^\| (NVIDIA [^|]+?) \| ?(\d*) ?\| `([^`]+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) == 10
    assert [(name, gpu_class(name, int(size) if size else None)) for name, size, _ in rows] == [
        (name, wanted) for name, _, wanted in rows
    ]


def test_the_keys_and_variables_that_it_names_are_there() -> None:
    section = PAGE.partition("## What `[node]` can say")[2].partition("## ")[0]
    assert set(re.findall(r"^\| `(\w+) = ", section, re.MULTILINE)) <= {key.name for key in NODE.keys}
    assert all(f"`{name}`" in PAGE for name in HOST_ADDRESS.values())
