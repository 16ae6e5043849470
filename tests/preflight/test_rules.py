"""What preflight refuses, warns of, and lets pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.classes import gpu_class
from llmgw.domain.hardware import Availability, Gpu, GpuFlag, Hindrance, Inventory, InventoryError, InventoryStatus
from llmgw.domain.host import HostFacts, PathFact, PortHolder
from llmgw.domain.problem import Problem, Where
from llmgw.domain.shard import EngineKind, ParallelLayout, ShardSpec
from llmgw.preflight.model_config import attention_heads, context_length, has_fp8_weights
from llmgw.preflight.needs import needs
from llmgw.preflight.rules import CODES, RULES, preflight


def shard(name: str = "big", **keys: Any) -> ShardSpec:
    made: dict[str, Any] = {
        "model": "m",
        "engine": EngineKind.VLLM,
        "command": ("vllm", "serve"),
        "config_hash": "h",
        **keys,
    }
    return ShardSpec(name=name, **made)


def card(index: int, name: str = "NVIDIA A100-SXM4-80GB", memory: int | None = 81920, **keys: Any) -> Gpu:
    made = {"gpu_class": gpu_class(name, memory), "compute_capability": (8, 0), **keys}
    capability = made.pop("compute_capability")
    return Gpu(index, f"GPU-{index:04}", f"00000000:0{index}:00.0", name, memory, 0, memory, capability, **made)


def node(*gpus: Gpu, **facts: Any) -> HostFacts:
    return HostFacts(inventory=Inventory(InventoryStatus.OK, gpus), **facts)


def codes(problems: tuple[Problem, ...]) -> list[tuple[str, str]]:
    return [(problem.code, problem.severity) for problem in problems]


def test_nothing_known_is_nothing_found() -> None:
    spec = shard(gpus=(0, 1), layout=ParallelLayout(2), port=8101, weights="/models/x", quantization="fp8")
    assert preflight((spec,), HostFacts()) == ()


# -- ports


def test_a_port_in_a_strangers_hand_names_the_holder() -> None:
    facts = HostFacts(port_holders={8101: PortHolder(8101, 4411, "python", 1000)})
    (problem,) = preflight((shard(port=8101),), facts)
    assert problem.code == "port-taken"
    assert problem.message == 'shard "big" port: 8101 is held by pid 4411 (python, uid 1000)'


def test_a_port_that_our_own_engine_holds_is_no_problem() -> None:
    facts = HostFacts(port_holders={8101: PortHolder(8101, 4411, "python", 1000)})
    assert preflight((shard(port=8101),), facts, own_pids={4411}) == ()


def test_a_holder_that_cannot_be_seen_is_still_a_stranger() -> None:
    (problem,) = preflight((shard(port=8101),), HostFacts(port_holders={8101: PortHolder(8101)}), own_pids={4411})
    assert problem.message.endswith("8101 is held by a process that cannot be seen")


# -- files and programs


def test_a_program_that_is_not_on_path_says_how_to_name_it() -> None:
    (problem,) = preflight((shard(),), HostFacts(programs={"vllm": None}))
    assert problem.message == 'shard "big" command: vllm is not on PATH'
    assert preflight((shard(),), HostFacts(programs={"vllm": "/usr/bin/vllm"})) == ()


def test_a_program_given_by_path_that_is_missing() -> None:
    spec = shard(command=("/opt/vllm/bin/vllm",))
    (problem,) = preflight((spec,), HostFacts(programs={"/opt/vllm/bin/vllm": None}))
    assert "/opt/vllm/bin/vllm does not exist" in problem.message


@pytest.mark.parametrize(
    ("fact", "text"),
    [(PathFact(False), "does not exist"), (PathFact(True, is_dir=True, readable=False), "cannot be read")],
)
def test_weights_that_are_missing_or_unreadable(fact: PathFact, text: str) -> None:
    (problem,) = preflight((shard(weights="/models/llama-70b"),), HostFacts(paths={"/models/llama-70b": fact}))
    assert problem.code == "weights-missing" and text in problem.message


def test_a_hub_name_is_not_looked_for_on_disk() -> None:
    spec = shard(weights="meta-llama/Llama-3.3-70B-Instruct")
    assert needs((spec,)).paths == frozenset()
    assert preflight((spec,), HostFacts()) == ()


def test_a_command_need_not_use_its_weights() -> None:
    spec = shard(engine=EngineKind.COMMAND, weights="/gone")
    assert preflight((spec,), HostFacts(paths={"/gone": PathFact(False)})) == ()


@pytest.mark.parametrize(
    ("fact", "text"), [(PathFact(False), "/w does not exist"), (PathFact(True), "/w is no folder")]
)
def test_a_working_folder_must_be_one(fact: PathFact, text: str) -> None:
    (problem,) = preflight((shard(workdir="/w"),), HostFacts(paths={"/w": fact}))
    assert problem.code == "workdir-missing" and text in problem.message


# -- the model


def with_model(config: Mapping[str, Any], **facts: Any) -> HostFacts:
    return HostFacts(model_configs={"/models/x": config}, **facts)


HEADS = {"num_attention_heads": 40, "num_key_value_heads": 40}


@pytest.mark.parametrize("config", [HEADS, {"text_config": HEADS, "model_type": "llava"}])
def test_a_size_that_does_not_divide_the_heads_lists_those_that_do(config: Mapping[str, Any]) -> None:
    spec = shard(weights="/models/x", layout=ParallelLayout(3))
    (problem,) = preflight((spec,), with_model(config))
    assert (
        problem.message
        == 'shard "big": tensor_parallel = 3 does not divide 40 attention heads; possible here: 1, 2, 4, 5, 8'
    )
    assert "pipeline_parallel" in (problem.hint or "")


@pytest.mark.parametrize("tensor", [1, 2, 4, 5, 8])
def test_a_size_that_divides_the_heads_passes(tensor: int) -> None:
    assert preflight((shard(weights="/models/x", layout=ParallelLayout(tensor)),), with_model(HEADS)) == ()


@pytest.mark.parametrize("config", [{}, {"num_attention_heads": "40"}, {"num_attention_heads": 0}, {"text_config": 3}])
def test_heads_that_are_not_told_are_not_guessed(config: Mapping[str, Any]) -> None:
    assert preflight((shard(weights="/models/x", layout=ParallelLayout(3)),), with_model(config)) == ()


def test_a_context_above_the_models_own_is_refused() -> None:
    config = {"max_position_embeddings": 32768}
    (problem,) = preflight((shard(weights="/models/x", max_model_len=32769),), with_model(config))
    assert problem.code == "context-length" and "32768" in problem.message
    assert preflight((shard(weights="/models/x", max_model_len=32768),), with_model(config)) == ()


def test_scaled_positions_and_a_persons_own_word_allow_a_longer_context() -> None:
    scaled = {"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert preflight((shard(weights="/models/x", max_model_len=131072),), with_model(scaled)) == ()
    plain = with_model({"max_position_embeddings": 32768})
    told = shard(weights="/models/x", max_model_len=131072, env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    assert preflight((told,), plain) == ()


def test_options_that_change_the_model_silence_what_its_file_says() -> None:
    spec = shard(weights="/models/x", max_model_len=10**6, args={"hf_overrides": {"a": 1}})
    assert preflight((spec,), with_model({"max_position_embeddings": 32768})) == ()


# -- GPUs


def test_a_gpu_that_is_not_here_is_reported_where_the_file_names_it() -> None:
    spec = shard(gpus=(0, 9), origins={"name": "a.toml:2", "gpus": "a.toml:5:8"})
    (problem,) = preflight((spec,), node(card(0)))
    assert (problem.code, problem.where) == ("gpu-missing", Where("a.toml", 5, 8))


def test_one_card_by_index_and_by_uuid_belongs_to_two_shards() -> None:
    (problem,) = preflight((shard("a", gpus=(3,)), shard("b", gpus=("GPU-0003",))), node(card(3)))
    assert problem.code == "gpu-taken"
    assert problem.message == 'shard "b" gpus: GPU 3 already belongs to shard "a"'


def test_the_same_word_for_one_card_was_reported_when_the_files_were_read() -> None:
    assert preflight((shard("a", gpus=(3,)), shard("b", gpus=(3,))), node(card(3))) == ()


@pytest.mark.parametrize("keys", [{"share_gpus": True}, {"idle_timeout": 60.0}])
def test_shards_that_share_or_take_turns_may_name_one_gpu(keys: dict[str, Any]) -> None:
    assert preflight((shard("a", gpus=(3,), **keys), shard("b", gpus=("GPU-0003",), **keys)), node(card(3))) == ()


@pytest.mark.parametrize("flag", [flag for flag in GpuFlag if flag not in (GpuFlag.MEMORY_IN_USE, GpuFlag.LOST)])
def test_a_sick_or_split_card_is_refused(flag: GpuFlag) -> None:
    assert codes(preflight((shard(gpus=(0,)),), node(card(0, flags=(flag,))))) == [("gpu-unfit", "error")]


def test_memory_in_use_is_no_sickness() -> None:
    assert preflight((shard(gpus=(0,)),), node(card(0, flags=(GpuFlag.MEMORY_IN_USE,)))) == ()


PAIR = {"gpus": (0, 4), "layout": ParallelLayout(2)}


def test_two_classes_in_one_tensor_parallel_group_are_refused() -> None:
    cards = (card(0, "NVIDIA H100 80GB HBM3", 81559), card(4, "NVIDIA L40S", 46068))
    (problem,) = preflight((shard(**PAIR),), node(*cards))
    assert problem.message == (
        'shard "big" gpus: 0 is h100-80g and 4 is l40s-45g; one tensor-parallel group needs GPUs of one class'
    )


@pytest.mark.parametrize(
    "other",
    [
        card(4, "NVIDIA A100-SXM4-40GB", 40960),
        card(4, "NVIDIA A800-SXM4-80GB", 81920),
        card(4, compute_capability=(8, 6)),
    ],
    ids=["other memory", "other name", "other capability"],
)
def test_what_is_refused_as_one_group_is_allowed_as_two_shards(other: Gpu) -> None:
    facts = node(card(0), other)
    assert codes(preflight((shard(**PAIR),), facts)) == [("mixed-gpu-classes", "error")]
    assert preflight((shard("a", gpus=(0,)), shard("b", gpus=(4,))), facts) == ()


def test_an_unknown_memory_is_a_warning() -> None:
    facts = node(card(0), card(4, memory=None))
    assert codes(preflight((shard(**PAIR),), facts)) == [("gpu-memory-unknown", "warning")]


def test_cards_of_unified_memory_are_alike_without_a_size() -> None:
    cards = [card(i, "NVIDIA GB10", None, unified_memory=True, gpu_class="gb10-122g") for i in (0, 4)]
    assert preflight((shard(**PAIR),), node(*cards)) == ()


def test_one_product_with_and_without_ecc_is_explained() -> None:
    cards = (card(0, "NVIDIA L40S", 46068, ecc_enabled=True), card(4, "NVIDIA L40S", 49140, ecc_enabled=False))
    (problem,) = preflight((shard(**PAIR),), node(*cards))
    assert "ECC mode differs" in (problem.hint or "")


def test_llama_cpp_may_mix_cards() -> None:
    cards = (card(0), card(4, "NVIDIA L40S", 46068))
    assert preflight((shard(engine=EngineKind.LLAMACPP, **PAIR),), node(*cards)) == ()


# -- fp8


def test_fp8_on_an_old_card_is_refused_with_the_way_out() -> None:
    (problem,) = preflight((shard(gpus=(0,), quantization="fp8"),), node(card(0)))
    assert problem.message == 'shard "big": fp8 needs compute capability 8.9, GPU 0 (a100-80g) has 8.0'
    assert problem.hint == 'use another quantization, or allow = ["fp8-capability"] to run it in 16 bit'


def test_the_way_out_is_offered_for_vllm_only() -> None:
    spec = shard(gpus=(0,), quantization="fp8", engine=EngineKind.SGLANG)
    (problem,) = preflight((spec,), node(card(0)))
    assert problem.code == "fp8-capability" and "allow" not in (problem.hint or "")


def test_what_is_allowed_stays_visible_as_a_warning() -> None:
    spec = shard(gpus=(0,), quantization="fp8", allow=("fp8-capability",))
    assert codes(preflight((spec,), node(card(0)))) == [("fp8-capability", "warning")]


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 1)])
def test_fp8_passes_from_8_9_on_also_above_ten(capability: tuple[int, int]) -> None:
    assert preflight((shard(gpus=(0,), quantization="fp8"),), node(card(0, compute_capability=capability))) == ()


def test_an_unknown_capability_is_a_warning() -> None:
    spec = shard(gpus=(0,), quantization="fp8")
    assert codes(preflight((spec,), node(card(0, compute_capability=None)))) == [("capability-unknown", "warning")]


def test_an_fp8_kv_cache_is_not_fp8_weights() -> None:
    spec = shard(gpus=(0,), args={"kv-cache-dtype": "fp8_e5m2"})
    assert preflight((spec,), node(card(0, compute_capability=(8, 6)))) == ()


FLOAT8 = {"weights": {"num_bits": 8, "type": "float"}}
INT8 = {"weights": {"num_bits": 8, "type": "int"}}


@pytest.mark.parametrize(
    ("quantization", "fp8"),
    [
        ({"quant_method": "fp8"}, True),
        ({"quant_method": "fbgemm_fp8"}, True),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": FLOAT8}}, True),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}},
            False,
        ),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, False),
        ({"quant_method": "awq"}, False),
        ("fp8", False),
        (None, False),
    ],
)
def test_fp8_is_found_in_the_checkpoint_too(quantization: Any, fp8: bool) -> None:
    facts = attrs.evolve(node(card(0)), model_configs={"/models/x": {"quantization_config": quantization}})
    found = codes(preflight((shard(gpus=(0,), weights="/models/x"),), facts))
    assert (("fp8-capability", "error") in found) is fp8


# -- all of them


def test_everything_is_reported_at_once_in_the_order_of_the_shards() -> None:
    facts = attrs.evolve(
        node(card(0), card(4, "NVIDIA L40S", 46068, compute_capability=(8, 9))),
        programs={"vllm": None},
        port_holders={8101: PortHolder(8101)},
    )
    specs = (shard("a", port=8101), shard("b", quantization="fp8", **PAIR))
    assert [(problem.code, problem.message.split('"')[1]) for problem in preflight(specs, facts)] == [
        ("port-taken", "a"),
        ("program-missing", "a"),
        ("program-missing", "b"),
        ("mixed-gpu-classes", "b"),
        ("fp8-capability", "b"),
    ]


def test_one_shard_is_judged_alone_but_against_all_others() -> None:
    specs = (shard("a", gpus=(3,)), shard("b", gpus=("GPU-0003",)))
    assert preflight(specs, node(card(3)), only={"a"}) == ()
    assert codes(preflight(specs, node(card(3)), only={"b"})) == [("gpu-taken", "error")]


def test_a_failing_nvidia_smi_refuses_pinned_gpus_and_nobody_else() -> None:
    broken = Inventory(InventoryStatus.ERROR, error=InventoryError.DRIVER_MISMATCH, detail="Driver/library mismatch")
    facts = HostFacts(inventory=broken)
    assert codes(preflight((shard("a", gpus=(0,)), shard("b")), facts)) == [("gpu-unknown", "error")]


def test_every_code_stands_once_in_the_table_with_a_paragraph() -> None:
    listed = [code for rule in RULES for code in rule.codes]
    assert len(listed) == len(set(listed)) == len(CODES)
    assert all(text.endswith(".") for text in CODES.values())


def test_an_allowance_for_no_rule_is_a_warning_that_lists_the_codes() -> None:
    (problem,) = preflight((shard(allow=("fp8-capability", "fp8")),), HostFacts())
    assert (problem.code, problem.severity) == ("allowance-unknown", "warning")
    assert problem.message == 'shard "big" allow: "fp8" is the code of no rule, so it allows nothing'
    assert "fp8-capability" in (problem.hint or "")


def test_needs_names_what_the_rules_look_up() -> None:
    spec = shard(port=8101, weights="/models/x", workdir="/w", gpus=(0,))
    wanted = needs((spec, shard("cpu", command=("llama-server",))))
    assert wanted.paths == {"/models/x", "/w"} and wanted.programs == {"vllm", "llama-server"}
    assert wanted.ports == {8101} and wanted.model_configs == {"/models/x"} and wanted.inventory
    assert not needs((shard(),)).inventory


NAMES = st.sampled_from(
    (
        *("text_config", "num_attention_heads", "max_position_embeddings", "rope_scaling", "factor"),
        *("quantization_config", "quant_method", "config_groups", "weights", "num_bits", "type"),
    )
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(NAMES, JSON, max_size=6))
def test_no_model_file_raises(config: dict[str, Any]) -> None:
    heads, longest = attention_heads(config), context_length(config)
    assert heads is None or heads > 0
    assert longest is None or longest > 0
    assert has_fp8_weights(config) in (True, False)


# -- memory that did not come back


@pytest.mark.parametrize("kind", [Hindrance.HELD, Hindrance.QUARANTINED])
def test_a_gpu_whose_memory_is_not_free_is_not_handed_out_unless_allowed(kind: Hindrance) -> None:
    uuid = card(1).uuid
    held = {uuid: Availability(uuid, "held by pid 4190001 (not visible)", 500, (), kind)}
    facts = node(card(0), card(1), availability=held)
    (problem,) = preflight((shard(gpus=(1,)),), facts)
    assert (problem.code, problem.severity) == ("gpu-held", "error")
    assert "GPU 1 is held by pid 4190001" in problem.message
    assert codes(preflight((shard(gpus=(1,), allow=("gpu-held",)),), facts)) == [("gpu-held", "warning")]
    assert preflight((shard(gpus=(0,)),), facts) == ()
