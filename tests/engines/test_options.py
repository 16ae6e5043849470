from __future__ import annotations

from typing import Any

import pytest

from llmgw.domain.shard import EngineKind
from llmgw.engines.adapter import profile
from llmgw.engines.options import normal_name, render_args

V, S, L, C = EngineKind.VLLM, EngineKind.SGLANG, EngineKind.LLAMACPP, EngineKind.COMMAND


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (V, "x", ["--a-b", "x"]),
        (V, 0.92, ["--a-b", "0.92"]),
        (V, 4, ["--a-b", "4"]),
        (V, -1, ["--a-b", "-1"]),
        (V, "-x", ["--a-b=-x"]),
        (L, "-x", ["--a-b", "-x"]),
        (V, True, ["--a-b"]),
        (V, False, ["--no-a-b"]),
        (S, False, []),
        (L, False, []),
        (C, False, []),
        (V, (1, "b", True), ["--a-b", "1", "b", "true"]),
        (S, ("a", "b"), ["--a-b", "a", "b"]),
        (L, ("a", "b"), ["--a-b", "a", "--a-b", "b"]),
        (C, ("a",), ["--a-b", "a"]),
        (V, {"k": [1, True, None], "ü": "y"}, ["--a-b", '{"k": [1, true, null], "ü": "y"}']),
        (S, {"k": {"n": 1.5}}, ["--a-b", '{"k": {"n": 1.5}}']),
    ],
)
def test_values_of_args_are_written_as_each_engine_reads_them(kind: EngineKind, value: Any, words: list[str]) -> None:
    assert render_args(profile(kind), {"a_b": value}, lambda text: text) == words


@pytest.mark.parametrize("kind", [L, C])
def test_a_table_is_refused_where_the_engine_reads_no_json(kind: EngineKind) -> None:
    with pytest.raises(ValueError, match=r"a-b: .* takes no table"):
        render_args(profile(kind), {"a_b": {"x": 1}}, lambda text: text)


def test_a_number_that_json_does_not_have_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="a-b: JSON has neither nan nor inf"):
        render_args(profile(V), {"a_b": {"x": float("inf")}}, lambda text: text)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="the list is empty"):
        render_args(profile(V), {"a": ()}, lambda text: text)


def test_variables_are_replaced_deep_inside_values() -> None:
    words = render_args(profile(V), {"c": {"path": ["${x}"]}, "d": ("${x}",)}, lambda text: text.replace("${x}", "!"))
    assert words == ["--c", '{"path": ["!"]}', "--d", "!"]


def test_only_the_part_before_the_first_dot_of_a_name_gets_dashes() -> None:
    assert normal_name("--compilation_config.cudagraph_mode=x") == "compilation-config.cudagraph_mode"
