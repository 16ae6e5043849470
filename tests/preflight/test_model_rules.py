"""Rules about models: splits, number formats, memory, files; with settings of the shapes that real models have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.classes import gpu_class
from llmgw.domain.hardware import Availability, Gpu, Hindrance, HostHardware, Inventory, InventoryStatus, MigInstance
from llmgw.domain.host import GgufFile, HostFacts, ModelFolder
from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ParallelLayout, ShardSpec
from llmgw.preflight import model_config
from llmgw.preflight.rules import preflight

GIB = 1 << 30
PATH = "/models/x"

LLAMA_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8"},
}
GEMMA = {
    "text_config": {
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }
}
MIXED = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "mamba_d_state": 16}


def card(index: int = 0, name: str = "NVIDIA H100 80GB HBM3", memory: int = 81559, **keys: Any) -> Gpu:
    made = {"compute_capability": (9, 0), "memory_reserved": 479, "memory_free": memory - 479, **keys}
    return Gpu(
        index=index,
        uuid=f"GPU-{index:04}",
        bus_id=f"00000000:0{index}:00.0",
        name=name,
        memory_total=memory,
        memory_used=0,
        gpu_class=gpu_class(name, memory),
        **made,
    )


T4 = {"name": "Tesla T4", "memory": 15360, "compute_capability": (7, 5)}


def shard(**keys: Any) -> ShardSpec:
    made = {"name": "big", "engine": EngineKind.VLLM, "gpus": (0,), "weights": PATH, **keys}
    return ShardSpec(model="m", command=("vllm",), config_hash="h", **made)


def facts(
    *gpus: Gpu, config: Mapping[str, Any] | None = None, folder: ModelFolder | None = None, **more: Any
) -> HostFacts:
    return HostFacts(
        inventory=Inventory(InventoryStatus.OK, gpus),
        availability={gpu.uuid: Availability(gpu.uuid, None, gpu.memory_free) for gpu in gpus},
        model_configs={PATH: config} if config is not None else {},
        model_folders={PATH: folder} if folder is not None else {},
        **more,
    )


def found(spec: ShardSpec, given: HostFacts) -> dict[str, Problem]:
    return {problem.code: problem for problem in preflight((spec,), given)}


# -- how it can be split


@pytest.mark.parametrize(
    ("heads", "kv", "tensor", "good"),
    [
        (64, 8, 8, True),
        (64, 8, 16, True),
        (40, 8, 5, False),
        (48, 6, 4, False),
        (12, 1, 4, True),
        (28, 4, 7, False),
    ],
)
def test_key_value_heads_are_divided_or_repeated_evenly_or_not_at_all(
    heads: int, kv: int, tensor: int, good: bool
) -> None:
    config = {"num_attention_heads": heads, "num_key_value_heads": kv}
    spec = shard(gpus=(), layout=ParallelLayout(tensor))
    assert ("kv-heads" not in found(spec, facts(config=config))) is good


def test_compressed_attention_has_no_heads_to_divide() -> None:
    config = {**DEEPSEEK, "num_key_value_heads": 7}
    assert found(shard(gpus=(), layout=ParallelLayout(8)), facts(config=config)) == {}


@pytest.mark.parametrize(
    ("args", "layout", "nodes", "bad"),
    [
        ({}, ParallelLayout(3), 2, True),
        ({}, ParallelLayout(2, 1, 2), 2, True),
        ({"chunked-prefill-size": 1000, "page-size": 64}, ParallelLayout(), 1, True),
        ({"chunked-prefill-size": 8192, "page-size": 64}, ParallelLayout(), 1, False),
        ({}, ParallelLayout(4), 2, False),
    ],
)
def test_what_sglang_asserts_without_a_text_is_told(
    args: dict[str, Any], layout: ParallelLayout, nodes: int, bad: bool
) -> None:
    spec = shard(engine=EngineKind.SGLANG, gpus=0, layout=layout, nodes=nodes, args=args)
    assert ("sglang-sizes" in found(spec, facts())) is bad


# -- number formats


def test_bfloat16_that_is_asked_for_is_refused_below_8_0_and_one_that_is_not_falls_back() -> None:
    given = facts(card(**T4), config=LLAMA_70B)
    assert found(shard(args={"dtype": "bfloat16"}), given)["bf16-capability"].is_error
    fallback = found(shard(), given)["bf16-fallback"]
    assert not fallback.is_error and "float16" in fallback.message
    assert "bf16-fallback" not in found(shard(args={"dtype": "half"}), given)
    assert "bf16-capability" not in found(shard(args={"dtype": "bfloat16"}), facts(card(), config=LLAMA_70B))


def test_nvfp4_is_refused_below_10_0_doubted_on_12_and_open_where_nothing_is_known() -> None:
    nvfp4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    refused = found(shard(), facts(card(), config=nvfp4))["nvfp4-capability"]
    assert refused.is_error and "9.0" in refused.message and "nvfp4-capability" in (refused.hint or "")
    assert not found(shard(allow=("nvfp4-capability",)), facts(card(), config=nvfp4))["nvfp4-capability"].is_error
    assert found(shard(), facts(card(compute_capability=(10, 0)), config=nvfp4)) == {}
    assert not found(shard(), facts(card(compute_capability=(12, 0)), config=nvfp4))["nvfp4-kernels"].is_error
    assert not found(shard(), facts(card(compute_capability=None), config=nvfp4))["capability-unknown"].is_error


def test_mxfp4_is_no_nvfp4() -> None:
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    assert found(shard(), facts(card(), config=config)) == {}
    assert found(shard(quantization="mxfp4"), facts(card())) == {}


# -- memory


def test_the_cache_of_a_token_is_counted_by_hand() -> None:
    # 2 (key and value) x 80 layers x 8 heads x 128 numbers x 2 bytes; on 4 ranks 2 heads each.
    assert model_config.cache_bytes_per_token(LLAMA_70B, 1, 2.0, 8192) == 2 * 80 * 8 * 128 * 2
    assert model_config.cache_bytes_per_token(LLAMA_70B, 4, 2.0, 8192) == 2 * 80 * 2 * 128 * 2
    # More ranks than heads: each has one.
    assert model_config.cache_bytes_per_token(LLAMA_70B, 16, 2.0, 8192) == 2 * 80 * 1 * 128 * 2
    # One compressed vector per layer, whole on every rank.
    assert model_config.cache_bytes_per_token(DEEPSEEK, 8, 2.0, 8192) == 61 * (512 + 64) * 2
    # Five of six layers keep 1024 of 8192 tokens.
    assert model_config.cache_bytes_per_token(GEMMA, 1, 2.0, 8192) == int((1 + 5 / 8) * 2 * 4 * 256 * 2)
    # Which of its layers have attention is not told in a form that is known: the least is nothing.
    assert model_config.cache_bytes_per_token(MIXED, 1, 2.0, 8192) == 0


def test_a_model_that_cannot_fit_is_refused_with_the_arithmetic() -> None:
    folder = ModelFolder("read", weight_bytes=141 * GIB, tokenizer=True)
    given = facts(card(0), card(1), config=LLAMA_70B, folder=folder)
    spec = shard(gpus=(0, 1), layout=ParallelLayout(2), max_model_len=32768)
    message = found(spec, given)["model-memory"].message
    assert "weights 141.0 GiB / (2 x 1) = 70.5 GiB" in message
    assert "cache of one request of 32768 tokens 5.0 GiB" in message
    assert "0.92 x 79.2 GiB = 72.8 GiB" in message
    assert "max_model_len" in (found(spec, given)["model-memory"].hint or "")
    assert "model-memory" not in found(evolve(spec, max_model_len=8192), given)
    assert "model-memory" not in found(evolve(spec, args={"gpu-memory-utilization": 0.97}), given)


def test_nothing_is_refused_for_a_size_that_nobody_knows() -> None:
    assert found(shard(max_model_len=8192), facts(card(), config=LLAMA_70B)) == {}
    unknown = ModelFolder("read", weight_bytes=None, tokenizer=True)
    assert found(shard(max_model_len=8192), facts(card(), config=LLAMA_70B, folder=unknown)) == {}


def test_a_share_of_the_card_that_is_not_free_is_refused_with_the_share_that_would_be() -> None:
    given = facts(card(memory_free=60000))
    problem = found(shard(weights=None), given)["gpu-memory-free"]
    assert "0.92 x 79.2 GiB = 72.8 GiB" in problem.message and "58.6 GiB are free" in problem.message
    assert "0.73" in (problem.hint or "") or "0.74" in (problem.hint or "")
    assert found(shard(weights=None, args={"gpu-memory-utilization": 0.7}), given) == {}
    assert found(shard(weights=None, args={"kv-cache-memory-bytes": 1 << 30}), given) == {}


def test_free_memory_that_is_not_known_refuses_nothing() -> None:
    assert found(shard(weights=None), facts(card(memory_free=None))) == {}


def test_a_holder_is_told_by_name_and_not_a_second_time_as_missing_memory() -> None:
    given = facts(card(memory_free=100))
    held = {"GPU-0000": Availability("GPU-0000", "held by pid 4411 python", 100, (), Hindrance.HELD)}
    assert list(found(shard(weights=None), evolve(given, availability=held))) == ["gpu-held"]


# -- shared and wanted memory


def test_gpu_memory_is_measured_against_the_card_alone_and_with_its_sharers() -> None:
    given = facts(card())
    assert found(shard(weights=None, gpu_memory=90 * GIB), given)["gpu-memory"].is_error
    one = shard(name="one", weights=None, gpu_memory=50 * GIB, share_gpus=True, args={"gpu-memory-utilization": 0.5})
    two = evolve(one, name="two")
    problems = [problem for problem in preflight((one, two), given) if problem.code == "gpu-memory"]
    assert [problem.message.split(":")[0] for problem in problems] == ['shard "two" gpu_memory']
    assert "together with one" in problems[0].message


def test_slices_are_no_group_and_vgpus_mix_with_nothing() -> None:
    node = Inventory(
        InventoryStatus.OK,
        (card(0, mig_enabled=True), card(1), card(2, virtual=True)),
        mig_instances=(
            MigInstance(0, 0, "MIG-a", "3g.40gb", "h100-mig-3g.40gb", 40448),
            MigInstance(0, 1, "MIG-b", "3g.40gb", "h100-mig-3g.40gb", 40448),
        ),
    )
    for gpus in (("MIG-a", "MIG-b"), (1, 2)):
        spec = shard(gpus=gpus, weights=None, layout=ParallelLayout(2))
        assert found(spec, HostFacts(inventory=node))["mixed-gpu-classes"].is_error
    assert found(shard(gpus=("MIG-a",), weights=None), HostFacts(inventory=node)) == {}


def test_a_class_that_the_node_lacks_is_a_warning_with_those_that_it_has() -> None:
    problem = found(shard(gpus=1, weights=None, gpu_class=("a100-80g",)), facts(card()))["gpu-class-unknown"]
    assert not problem.is_error and "h100-80g" in (problem.hint or "")
    assert found(shard(gpus=1, weights=None, gpu_class=("a100-80g", "h100-80g")), facts(card())) == {}


# -- files


def test_a_folder_that_lacks_what_the_engine_asks_for_is_told_file_by_file() -> None:
    cut = ModelFolder("read", 30, ("model-00007-of-00030.safetensors",), 100, tokenizer=True)
    message = found(shard(), facts(card(), config=LLAMA_70B, folder=cut))["weight-files-missing"].message
    assert "1 of 30 files" in message and "model-00007-of-00030.safetensors" in message
    bare = ModelFolder("missing", tokenizer=False)
    assert set(found(shard(), facts(card(), folder=bare))) == {"model-config-missing"}
    mute = ModelFolder("read", weight_bytes=100, tokenizer=False)
    assert "tokenizer-missing" in found(shard(), facts(card(), config=LLAMA_70B, folder=mute))
    other = shard(args={"tokenizer": "/models/y"})
    assert "tokenizer-missing" not in found(other, facts(card(), config=LLAMA_70B, folder=mute))
    empty = ModelFolder("read", weight_bytes=0, tokenizer=True)
    assert "weight-files-missing" in found(shard(), facts(card(), config=LLAMA_70B, folder=empty))


def test_a_file_that_llama_cpp_cannot_load_is_refused() -> None:
    spec = shard(engine=EngineKind.LLAMACPP, gpus=0)
    assert found(spec, HostFacts(gguf_files={PATH: GgufFile(False)}))["gguf-broken"].is_error
    parts = GgufFile(True, ("m-00002-of-00003.gguf",))
    assert "m-00002-of-00003" in found(spec, HostFacts(gguf_files={PATH: parts}))["gguf-broken"].message
    assert found(spec, HostFacts(gguf_files={PATH: GgufFile(True)})) == {}


# -- the host, and ports of ranks


def test_little_shared_memory_and_a_small_lock_limit_are_warnings_where_ranks_need_them() -> None:
    small = HostHardware(shm_total=64, memlock_hard=8 << 20, nvidia_uvm=False)
    pair = shard(gpus=(0, 1), weights=None, layout=ParallelLayout(2), nodes=2)
    problems = found(pair, facts(card(0), card(1), hardware=small))
    assert {"shm-small", "memlock-small", "nvidia-uvm"} <= set(problems)
    assert not any(problem.is_error for problem in problems.values())
    assert "shm-small" not in found(shard(weights=None), facts(card(), hardware=small))
    unlimited = HostHardware(shm_total=64000, memlock_hard=-1, nvidia_uvm=True)
    assert found(pair, facts(card(0), card(1), hardware=unlimited)) == {}


def test_one_port_for_the_ranks_of_two_shards_is_refused() -> None:
    one = shard(name="one", gpus=0, weights=None, extra_args=("--data-parallel-rpc-port", "29550"))
    two = evolve(one, name="two", extra_args=("--master-port=29550",))
    codes = [(problem.code, problem.is_error) for problem in preflight((one, two), HostFacts())]
    assert codes == [("rank-port-taken", True)]
    assert preflight((one, evolve(two, extra_args=("--master-port=29551",))), HostFacts()) == ()


def test_an_engine_without_its_metadata_is_a_warning() -> None:
    given = HostFacts(programs={"vllm": "/opt/vllm"}, engine_versions={"/opt/vllm": None})
    assert not found(shard(gpus=0, weights=None), given)["engine-version-unknown"].is_error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*LLAMA_70B, *DEEPSEEK, "layer_types", "sliding_window", "head_dim", "text_config"]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from([*LLAMA_70B, *DEEPSEEK, "layer_types", "sliding_window"]), JSON, max_size=8))
def test_no_settings_of_a_model_make_a_rule_fail(config: dict[str, Any]) -> None:
    folder = ModelFolder("read", weight_bytes=10 * GIB, tokenizer=True)
    spec = shard(gpus=(0, 1), layout=ParallelLayout(2), max_model_len=4096)
    for problem in preflight((spec,), facts(card(0), card(1), config=config, folder=folder)):
        assert problem.message
