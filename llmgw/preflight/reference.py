"""The documentation of the rules, generated from their table."""

from __future__ import annotations

from llmgw.preflight.rules import CODES

HEAD = """\
# Checks against the machine

<!-- Generated from the table of rules: python -m llmgw.preflight.reference > docs/reference/preflight.md -->

`llmgw check` runs all of these, and `llmgw run` runs those of a shard again right before each launch: the shard is
then failed with the reason, which is not counted as a failure of the engine. A code in `allow` of a shard turns its
error into a warning. What llmgw cannot find out refuses nothing, but where GPUs are named it is no permission either.
"""


def reference() -> str:
    """A page in Markdown with one section per code; its heading is the anchor."""
    sections = (f"## {code}\n\n{text}\n" for code, text in sorted(CODES.items()))
    return "\n".join((HEAD, *sections))


if __name__ == "__main__":
    print(reference(), end="")
