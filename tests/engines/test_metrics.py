from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.shard import EngineKind
from llmgw.domain.status import Activity
from llmgw.engines.metrics import read_activity

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 2.0
vllm:num_requests_running{engine="1",model_name="a b"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a b"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a b"} 0.75
vllm:iteration_tokens_total_sum{engine="0"} 8000.0
vllm:iteration_tokens_total_count{engine="0"} 100.0
vllm:iteration_tokens_total_count{engine="1"} 50.0
vllm:generation_tokens_total{engine="0"} 1e3
"""
SGLANG = """sglang:num_running_reqs{model_name="m",tp_rank="0",pp_rank="0",moe_ep_rank="0",engine_type="unified"} 3.0
sglang:num_running_reqs{model_name="m",tp_rank="1",pp_rank="0",moe_ep_rank="0",engine_type="unified"} 3.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.5
sglang:gen_throughput{model_name="m",tp_rank="0"} 71.5
sglang:realtime_tokens_total{mode="decode",tp_rank="0"} 10.0
sglang:realtime_tokens_total{mode="prefill_compute",tp_rank="0"} 5.0
"""
LLAMA = """llamacpp:requests_processing 1
llamacpp:requests_deferred 0
llamacpp:n_decode_total 44
llamacpp:tokens_predicted_total 40
"""


def test_vllm_is_summed_over_its_engines_and_the_fullest_cache_counts() -> None:
    assert read_activity(EngineKind.VLLM, VLLM) == Activity(running=3, waiting=4, steps=150.0, kv_usage=0.75)


def test_of_sglang_the_first_rank_counts_since_every_rank_repeats_the_series() -> None:
    expected = Activity(running=3, waiting=1, steps=15.0, tokens_per_second=71.5, kv_usage=0.5)
    assert read_activity(EngineKind.SGLANG, SGLANG) == expected


def test_llama_servers_plain_lines_are_read() -> None:
    assert read_activity(EngineKind.LLAMACPP, LLAMA.replace("\n", "\r\n")) == Activity(running=1, waiting=0, steps=44.0)


def test_what_is_missing_or_no_number_is_unknown_and_not_zero() -> None:
    text = 'vllm:num_requests_running{engine="0"} NaN\nvllm:kv_cache_usage_perc +Inf\nvllm:num_requests_waiting x\n'
    assert read_activity(EngineKind.VLLM, text) == Activity()


def test_braces_and_spaces_inside_a_label_do_not_confuse() -> None:
    text = 'vllm:num_requests_running{model_name="a} 7 \\" {b",engine="0"} 2.0 1700000000\n'
    assert read_activity(EngineKind.VLLM, text).running == 2


def test_a_command_has_no_counters() -> None:
    assert read_activity(EngineKind.COMMAND, VLLM) == Activity()


@given(
    kind=st.sampled_from(EngineKind),
    text=st.lists(
        st.one_of(
            st.text(),
            st.builds(
                "{}{} {}".format,
                st.sampled_from(["vllm:num_requests_running", "sglang:token_usage", "llamacpp:n_decode_total"]),
                st.sampled_from(["", "{}", '{engine="0"}', '{a="', "{{"]),
                st.one_of(st.floats().map(str), st.text(max_size=8), st.just("9" * 400)),
            ),
        )
    ).map("\n".join),
)
def test_no_page_makes_reading_fail(kind: EngineKind, text: str) -> None:
    activity = read_activity(kind, text)
    assert activity.running is None or activity.running >= 0
    assert activity.kv_usage is None or 0 <= activity.kv_usage <= 1
    assert activity.steps is None or math.isfinite(activity.steps)
