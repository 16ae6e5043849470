"""How many requests an engine works on at a time: from its command line and from its own pages."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.shard import EngineKind, ParallelLayout
from llmgw.engines.adapter import build_command
from llmgw.engines.slots import Slots, slots_in_answer, slots_in_command
from tests.engines.plans import make_plan

ONE = ParallelLayout()
VLLM, SGLANG, LLAMACPP, COMMAND = EngineKind


def in_command(kind: EngineKind, **keys: object) -> Slots | None:
    """As a launch finds it: in the command that is built from the keys of a shard."""
    plan = make_plan(kind, **keys)
    return slots_in_command(kind, build_command(plan).argv, plan.spec.layout)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (VLLM, {"args": {"max-num-seqs": 12}}),
        (VLLM, {"args": {"max_num_seqs": "12"}}),
        (VLLM, {"extra_args": ("--max-num-seqs=12",)}),
        (VLLM, {"extra_args": ("--max_num_seqs", "12")}),
        (VLLM, {"args": {"max-num-seqs": 99}, "extra_args": ("--max-num-seqs", "12")}),
        (VLLM, {"command": ("vllm", "serve", "--max-num-seqs", "12")}),
        (SGLANG, {"args": {"max-running-requests": 12}}),
        (LLAMACPP, {"args": {"parallel": 12}}),
        (LLAMACPP, {"extra_args": ("-np", "12")}),
    ],
)
def test_the_limit_on_the_command_line_is_found_wherever_it_was_written(
    kind: EngineKind, keys: dict[str, object]
) -> None:
    assert in_command(kind, **keys) == Slots(12, "args")


def test_each_data_parallel_copy_has_its_own_limit_unless_the_engine_divides_it() -> None:
    two = ParallelLayout(data=2)
    assert in_command(VLLM, args={"max-num-seqs": 12}, layout=two) == Slots(24, "args")
    assert in_command(SGLANG, args={"max-running-requests": 12}, layout=two) == Slots(24, "args")
    shared = {"max-running-requests": 12, "enable-dp-attention": True}
    assert in_command(SGLANG, args=shared, layout=two) == Slots(12, "args")


@pytest.mark.parametrize("words", [(), ("-np", "-1"), ("-np", "0"), ("--parallel", "four"), ("--parallel",)])
def test_what_is_no_number_of_requests_on_the_command_line_is_not_known(words: tuple[str, ...]) -> None:
    assert slots_in_command(LLAMACPP, ("llama-server", *words), ONE) is None


def test_a_plain_command_has_no_limit_that_llmgw_knows() -> None:
    assert slots_in_command(COMMAND, ("serve", "--parallel", "4", "--max-num-seqs", "4"), ONE) is None
    assert slots_in_answer(COMMAND, '{"total_slots": 4}') is None


def test_llama_server_tells_its_slots() -> None:
    assert slots_in_answer(LLAMACPP, '{"default_generation_settings": {}, "total_slots": 4}') == Slots(4, "props")


def test_sglang_tells_what_each_rank_has_room_for() -> None:
    ranks = [{"effective_max_running_requests_per_dp": 52}, {"effective_max_running_requests_per_dp": 50}]
    answer = {"max_running_requests": 200, "internal_states": ranks, "version": "0.5.23"}
    assert slots_in_answer(SGLANG, json.dumps(answer)) == Slots(102, "server_info")
    older = {"max_running_requests": 200, "internal_states": [{"last_gen_throughput": 1.0}]}
    assert slots_in_answer(SGLANG, json.dumps(older)) == Slots(200, "server_info")
    assert slots_in_answer(SGLANG, '{"max_running_requests": null, "internal_states": []}') is None


@pytest.mark.parametrize(
    "body", ["", "[]", "null", "[" * 100_000, '{"total_slots": true}', '{"total_slots": -1}', '{"total_slots": 1e99}']
)
def test_an_answer_of_another_kind_tells_nothing(body: str) -> None:
    assert slots_in_answer(LLAMACPP, body) is None
    assert slots_in_answer(SGLANG, body) is None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["total_slots", "internal_states", "max_running_requests", "effective_max_running_requests_per_dp"]
            ),
            inner,
        )
    ),
)


@given(st.sampled_from(EngineKind), values)
def test_whatever_an_engine_answers_the_count_is_a_positive_number_or_unknown(kind: EngineKind, answer: object) -> None:
    found = slots_in_answer(kind, json.dumps(answer))
    assert found is None or found.count >= 1
