"""How many tokens an answer cost, as the engine counted them."""

from __future__ import annotations

import json
import re

_USAGE = re.compile(rb'"usage"\s*:\s*\{')
"""Begins with plain text, so that re looks for that first: with a condition before it, it took ten times as long."""

_USAGE_MAX = 4096
"""Bytes of one usage object; the longest seen, with all details, has some 400."""

_TOKENS_MAX = 1 << 40
_DECODER = json.JSONDecoder()

Usage = tuple[int | None, int | None]


def read_usage(tail: bytes, is_stream: bool) -> Usage:
    """Prompt and completion tokens out of the end of an answer; None for what it does not say. Never raises.

    `tail` may begin in the middle of the answer. In a stream the counts come piece by piece with Anthropic's form
    (the prompt's at the beginning) and in the last chunk before `[DONE]` with OpenAI's, so later ones count over
    earlier ones. Engines send `"usage": null` in the other chunks, which is no count.
    """
    prompt = completion = None
    for found in _USAGE.finditer(tail):
        if tail[found.start() - 1 : found.start()] == b"\\":
            # Inside a string, where its quotes stand behind backslashes: somebody's text and no key.
            continue
        text = tail[found.end() - 1 : found.end() + _USAGE_MAX].decode("utf-8", "replace")
        try:
            usage, _ = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            continue
        here_prompt = _count(usage, "prompt_tokens", "input_tokens")
        here_completion = _count(usage, "completion_tokens", "output_tokens")
        prompt = prompt if here_prompt is None else here_prompt
        completion = completion if here_completion is None else here_completion
    if prompt is not None and completion is None and not is_stream:
        # Embeddings and scores: there is nothing to complete.
        completion = 0
    return prompt, completion


def _count(usage: dict[str, object], *names: str) -> int | None:
    for name in names:
        value = usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _TOKENS_MAX:
            return value
    return None
