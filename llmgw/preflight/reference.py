"""The documentation of the rules, generated from their table: one list, and a page for each code."""

from __future__ import annotations

from llmgw.preflight import stop_time
from llmgw.preflight.pages import PAGES, Page
from llmgw.preflight.rules import CODES

DOCUMENTED = {**CODES, stop_time.CODE: stop_time.TEXT}
"""Everything that is found out about the machine: by the rules of shards, and about the service's unit."""

HEAD = """\
# Checks against the machine

<!-- Generated from the table of rules: python -m llmgw.preflight.reference > docs/reference/preflight.md -->

`llmgw check` runs all of these, and `llmgw run` runs those of a shard again right before each launch: the shard is
then failed with the reason, which is not counted as a failure of the engine, and tried again when the facts change. A
code in `allow` of a shard turns its error into a warning, which status goes on showing. What llmgw cannot find out
refuses nothing, but where GPUs are named it is no permission either.

Each code has a page with an example and what to do: [docs/rules](../rules/README.md).
"""

INDEX = """\
# Rules

<!-- Generated: python -m llmgw.preflight.reference FOLDER -->

| code | in short |
|---|---|
"""


def reference() -> str:
    """A page in Markdown with one section per code; its heading is the anchor."""
    sections = (f"## {code}\n\n{text}\n" for code, text in sorted(DOCUMENTED.items()))
    return "\n".join((HEAD, *sections))


def pages() -> dict[str, str]:
    """File name -> text, of every page in docs/rules."""
    rows = (f"| [{code}]({code}.md) | {DOCUMENTED[code].split('. ')[0].rstrip('.')}. |" for code in sorted(DOCUMENTED))
    made = {"README.md": INDEX + "\n".join(rows) + "\n"}
    return made | {f"{code}.md": _page(code, text, PAGES[code]) for code, text in DOCUMENTED.items()}


def _page(code: str, text: str, page: Page) -> str:
    kind = "Always a warning." if page.warning else "An error: nothing is launched while it holds."
    if page.warning:
        allow = "There is nothing to allow: it refuses nothing."
    elif page.allow is None:
        allow = f'`allow = ["{code}"]` turns it into a warning, but the engine would fail all the same.'
    else:
        allow = f'`allow = ["{code}"]` in the shard, {page.allow}. Status goes on showing it.'
    return f"""\
# {code}

{kind} {text}

## How it reads

```text
{page.example}
```

## What to do

{page.what_to_do}

## Allowing it

{allow}
"""


def main(words: list[str]) -> None:
    if not words:
        print(reference(), end="")
        return
    for name, text in pages().items():
        with open(f"{words[0]}/{name}", "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
