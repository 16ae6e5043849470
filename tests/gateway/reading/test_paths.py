"""Which requests go to an engine, and which path they have there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.gateway.reading.paths import Kind, classify


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        (b"POST", b"/v1/chat/completions", Kind.INFERENCE),
        (b"POST", b"/v1/chat/completions?beta=true", Kind.INFERENCE),
        (b"POST", b"/v1/messages", Kind.INFERENCE),
        (b"POST", b"/v1/audio/transcriptions", Kind.INFERENCE),
        (b"POST", b"/tokenize", Kind.INFERENCE),
        (b"POST", b"/v1/something/new", Kind.INFERENCE),
        (b"GET", b"/v1/chat/completions", Kind.NO_MODEL),
        (b"POST", b"/v1/load_lora_adapter", Kind.NO_MODEL),
        (b"POST", b"/v1/../sleep", Kind.NO_MODEL),
        (b"POST", b"/v1//chat/completions", Kind.NO_MODEL),
        (b"POST", b"/v1/%2e%2e/sleep", Kind.NO_MODEL),
        (b"POST", b"/v1/.hidden", Kind.NO_MODEL),
        (b"POST", b"/sleep", Kind.UNKNOWN),
        (b"POST", b"/wake_up", Kind.UNKNOWN),
        (b"POST", b"/v1", Kind.UNKNOWN),
        (b"GET", b"/v1/models", Kind.MODELS),
        (b"GET", b"/v1/models/Qwen/Qwen3-8B", Kind.MODELS),
        (b"HEAD", b"/health", Kind.HEALTH),
        (b"GET", b"/readiness", Kind.READINESS),
        (b"GET", b"/metrics", Kind.METRICS),
        (b"GET", b"/ui", Kind.UI),
        (b"GET", b"/ui/status", Kind.UI_STATUS),
        (b"GET", b"/upstream/a/metrics", Kind.UPSTREAM),
        (b"GET", b"/upstream/a/0/version", Kind.UPSTREAM),
        (b"POST", b"/upstream/a/metrics", Kind.UNKNOWN),
        (b"GET", b"/upstream/a/sleep", Kind.UNKNOWN),
        (b"OPTIONS", b"/anything", Kind.OPTIONS),
        (b"DELETE", b"/v1/models/m", Kind.NO_MODEL),
    ],
)
def test_a_path_means_one_thing(method: bytes, target: bytes, kind: Kind) -> None:
    assert classify(method, target).kind is kind


@given(st.sampled_from([b"GET", b"POST", b"PUT", b"HEAD"]), st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_what_goes_to_an_engine_has_no_second_spelling(method: bytes, tail: bytes) -> None:
    target = b"/v1/" + tail
    route = classify(method, target)
    if route.kind is Kind.INFERENCE:
        path = target.partition(b"?")[0]
        assert method == b"POST"
        assert b"%" not in path and b"//" not in path and b"/." not in path and b"\\" not in path
