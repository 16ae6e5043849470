"""What an answer cost, out of its last bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.gateway.reading.usage import read_usage


def test_a_plain_answer_says_both() -> None:
    answer = {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17}}
    assert read_usage(json.dumps(answer).encode(), is_stream=False) == (12, 5)


def test_the_other_names_are_read_too() -> None:
    assert read_usage(b'{"usage": {"input_tokens": 3, "output_tokens": 4}}', is_stream=False) == (3, 4)


def test_an_answer_that_completes_nothing_has_cost_its_prompt() -> None:
    assert read_usage(b'{"usage": {"prompt_tokens": 8, "total_tokens": 8}}', is_stream=False) == (8, 0)


def test_in_a_stream_the_last_chunk_counts_and_null_is_no_count() -> None:
    stream = (
        b'data: {"usage": null}\n\ndata: {"usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
    )
    assert read_usage(stream, is_stream=True) == (9, 2)


def test_counts_that_come_in_two_events_belong_together() -> None:
    stream = b'data: {"usage": {"input_tokens": 30}}\n\ndata: {"usage": {"output_tokens": 7}}\n\n'
    assert read_usage(stream, is_stream=True) == (30, 7)


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"usage": {"prompt_tokens": "many"}}',
        b'{"usage": {"prompt_tokens": -1, "completion_tokens": true}}',
        b'{"usage": {"prompt_tok',
        b'{"content": "\\"usage\\": {\\"prompt_tokens\\": 1}"}',
        b'{"usage": {"prompt_tokens": 1e99}}',
    ],
)
def test_what_says_nothing_is_nothing(tail: bytes) -> None:
    assert read_usage(tail, is_stream=True) == (None, None)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_no_bytes_make_it_raise(noise: bytes) -> None:
    read_usage(noise + b'"usage":{' + noise, is_stream=False)
