"""The reference names every answer that llmgw gives by itself."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from llmgw.gateway.admission import messages
from llmgw.gateway.reading import answers

ROWS = re.findall(
    r"^\| (\d{3}) \| ([^|]+) \|", (Path(__file__).parents[3] / "docs/reference/gateway.md").read_text(), re.M
)
DOCUMENTED = {(int(status), reason) for status, cell in ROWS for reason in re.findall(r"`([a-z-]+)`", cell)}


def given() -> set[tuple[int, str]]:
    """Status and reason of every refusal in the code."""
    text = inspect.getsource(answers)
    found = {(int(status), reason) for status, reason in re.findall(r'Refusal\((\d{3}), "([a-z-]+)"', text)}
    found |= {(408, f"{part}-timeout") for part in ("head", "body")}
    for reason in re.findall(r"`([a-z-]+)`", inspect.getsource(messages.Refused)):
        refusal = answers.from_admission(messages.Refused(reason, 1.0, ""))
        found.add((refusal.status, reason))
    return found


def test_every_answer_of_the_code_stands_in_the_reference_and_no_other() -> None:
    assert given() == DOCUMENTED
