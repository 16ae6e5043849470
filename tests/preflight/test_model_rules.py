"""Rules about models: splits, number formats, memory, files; with settings of the shapes that real models have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
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
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "num_local_experts": 8,
    "sliding_window": None,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
QWEN_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
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


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "fp8-capability"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, "fp8-capability"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A16_NVFP4"}}, "nvfp4-capability"),
    ],
)
def test_both_forms_of_modelopts_settings_are_read(written: Mapping[str, Any], code: str) -> None:
    assert code in found(shard(), facts(card(compute_capability=(8, 0)), config={"quantization_config": written}))


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


# -- what an engine would run is not refused


def test_the_cache_of_mixed_and_shared_layers_is_never_counted_too_high() -> None:
    count = model_config.cache_bytes_per_token
    assert count(MIXTRAL, 1, 2.0, 8192) == 2 * 32 * 8 * 128 * 2
    # Half of the layers keep 128 of 8192 tokens.
    assert count(GPT_OSS, 1, 2.0, 8192) == int((18 + 18 * 128 / 8192) * 2 * 8 * 64 * 2)
    # One layer in four has attention, which only the model's own code knows: the least is nothing.
    assert count(QWEN_NEXT, 1, 2.0, 8192) == 0
    told = {**QWEN_NEXT, "layer_types": ["linear_attention"] * 36 + ["full_attention"] * 12}
    assert count(told, 1, 2.0, 8192) == 12 * 2 * 2 * 256 * 2
    # Heads differ by layer, and some have none.
    nas = {**LLAMA_70B, "num_key_value_heads": None, "block_configs": [{"attention": {"no_op": True}}]}
    assert count(nas, 1, 2.0, 8192) == 0
    # All query heads share one.
    star = {"multi_query": True, "n_head": 48, "n_embd": 6144, "n_layer": 40}
    assert count(star, 1, 2.0, 8192) == 2 * 40 * 1 * 128 * 2
    chunked = {**LLAMA_70B, "attention_chunk_size": 1024}
    assert count(chunked, 1, 2.0, 8192) == 2 * 80 * 8 * 128 * 2 / 8
    linear = {**DEEPSEEK, "linear_attn_config": {"full_attn_layers": [4, 8]}}
    assert count(linear, 1, 2.0, 8192) == 0
    assert count({**LLAMA_70B, "architectures": ["XLMRobertaModel"]}, 1, 2.0, 8192) is None


def test_copies_of_a_mixture_divide_its_experts() -> None:
    cards = [card(index, "NVIDIA H200", 143771) for index in range(8)]
    mixture = {**DEEPSEEK, "n_routed_experts": 256}
    folder = ModelFolder("read", weight_bytes=641 * GIB, tokenizer=True)
    spec = shard(gpus=tuple(range(8)), layout=ParallelLayout(1, 1, 8), max_model_len=32768)
    assert found(spec, facts(*cards, config=mixture, folder=folder)) == {}
    dense = found(spec, facts(*cards, config={**LLAMA_70B, "quantization_config": {}}, folder=folder))
    assert "weights 641.0 GiB / (1 x 1)" in dense["model-memory"].message


def test_weights_whose_width_nobody_tells_may_be_halved_on_loading() -> None:
    untold = {key: value for key, value in LLAMA_70B.items() if key != "torch_dtype"}
    folder = ModelFolder("read", weight_bytes=100 * GIB, tokenizer=True)
    spec = shard(max_model_len=4096)
    assert "model-memory" not in found(spec, facts(card(), config=untold, folder=folder))
    assert "model-memory" in found(spec, facts(card(), config=LLAMA_70B, folder=folder))


def test_sglang_takes_the_cache_that_fits_and_needs_its_weights_within_its_share() -> None:
    folder = ModelFolder("read", weight_bytes=60 * GIB, tokenizer=True)
    given = facts(card(), config=LLAMA_70B, folder=folder)
    spec = shard(engine=EngineKind.SGLANG, max_model_len=131072)
    assert found(spec, given) == {}
    message = found(evolve(spec, args={"mem-fraction-static": 0.7}), given)["model-memory"].message
    assert "0.7 x 79.2 GiB" in message and "cache" not in message


def test_ranks_that_divide_a_context_among_themselves_keep_a_part_of_its_cache() -> None:
    folder = ModelFolder("read", weight_bytes=60 * GIB, tokenizer=True)
    given = facts(card(), config=LLAMA_70B, folder=folder)
    spec = shard(max_model_len=65536)
    assert "model-memory" in found(spec, given)
    assert "model-memory" not in found(evolve(spec, args={"decode-context-parallel-size": 4}), given)
    # A checkpoint that asks for a smaller cache gets it without an option.
    small = {**LLAMA_70B, "quantization_config": {"quant_method": "awq", "kv_cache_scheme": {"num_bits": 8}}}
    assert "model-memory" not in found(spec, facts(card(), config=small, folder=folder))


def test_options_in_extra_args_count_as_those_in_args_and_win() -> None:
    tight = facts(card(memory_free=60000))
    for words in (("--gpu-memory-utilization", "0.5"), ("--gpu_memory_utilization=0.5",)):
        assert found(shard(weights=None, extra_args=words), tight) == {}
    given = facts(card(**T4), config=LLAMA_70B)
    assert "bf16-fallback" not in found(shard(extra_args=("--dtype", "half")), given)
    assert found(shard(weights=None, extra_args=("-q", "fp8")), given)["fp8-capability"].is_error
    changed = shard(max_model_len=10**6, extra_args=("--hf-overrides.rope_scaling.factor", "8"))
    assert found(changed, facts(card(), config=LLAMA_70B)) == {}
    longer = shard(extra_args=("--max-model-len", "200000"))
    assert "context-length" in found(longer, facts(card(), config=LLAMA_70B))


def test_attention_that_is_not_split_needs_no_divisor_of_its_heads() -> None:
    spec = shard(engine=EngineKind.SGLANG, gpus=(), layout=ParallelLayout(6))
    assert "heads" in found(spec, facts(config=LLAMA_70B))
    assert found(evolve(spec, args={"enable-dp-attention": True}), facts(config=LLAMA_70B)) == {}


# -- the context


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        # Both engines read these kinds as scaled already.
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072),
        ({"type": "longrope", "factor": 32.0}, 131072),
        ({"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840),
        ({"rope_type": "yarn", "factor": 4.0}, 524288),
        ({"rope_type": "linear", "factor": 2.0}, 262144),
        ({"full_attention": {"rope_type": "linear", "factor": 2.0}}, 262144),
        ({"factor": None}, 131072),
        ({"factor": True}, 131072),
    ],
)
def test_scaled_positions_are_read_as_the_engines_read_them(scaling: Mapping[str, Any], longest: int) -> None:
    assert model_config.context_length({**LLAMA_70B, "rope_scaling": scaling}) == longest


def test_without_a_written_length_vllm_insists_on_the_models_own_and_auto_does_not() -> None:
    llama_8b = {**LLAMA_70B, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    folder = ModelFolder("read", weight_bytes=15 * GIB, tokenizer=True)
    l4 = card(0, "NVIDIA L4", 23034, compute_capability=(8, 9))
    given = facts(l4, config=llama_8b, folder=folder)
    # 2 x 32 layers x 8 heads x 128 x 2 bytes x 131072 tokens.
    assert "cache of one request of 131072 tokens 16.0 GiB" in found(shard(), given)["model-memory"].message
    assert found(shard(args={"max-model-len": "auto"}), given) == {}
    assert found(shard(extra_args=("--max-model-len", "-1")), given) == {}
    assert found(shard(max_model_len=8192), given) == {}
    open_length = {**llama_8b, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert found(shard(), facts(l4, config=open_length, folder=folder)) == {}


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
    second = found(spec, HostFacts(gguf_files={PATH: GgufFile(True, is_first=False)}))["gguf-broken"]
    assert "not the first part" in second.message
    folder = found(spec, HostFacts(model_folders={PATH: ModelFolder("missing")}))["gguf-broken"]
    assert "is a folder" in folder.message


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


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from(
            [*LLAMA_70B, *DEEPSEEK, "layer_types", "sliding_window", "rope_scaling", "architectures", "block_configs"]
        ),
        JSON,
        max_size=8,
    )
)
def test_no_settings_of_a_model_make_a_rule_fail(config: dict[str, Any]) -> None:
    folder = ModelFolder("read", weight_bytes=10 * GIB, tokenizer=True)
    spec = shard(gpus=(0, 1), layout=ParallelLayout(2), max_model_len=4096)
    for problem in preflight((spec,), facts(card(0), card(1), config=config, folder=folder)):
        assert problem.message
