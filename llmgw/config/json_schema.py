"""The JSON schema for editors: `#:schema ./llmgw.schema.json` in the first line of a file.

`python -m llmgw.config.json_schema` prints it.
"""

from __future__ import annotations

import json
from typing import Any

from llmgw.config.schema import FILE, Record


def json_schema() -> dict[str, Any]:
    """The schema as data. It cannot say what needs two keys; `llmgw check` does."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "llmgw.toml",
        **Record(FILE).schema(),
    }


def json_schema_text() -> str:
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(json_schema_text(), end="")
