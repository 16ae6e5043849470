"""The first configuration: whatever was found, it parses, nothing in it is wrong, and it names what is there."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from llmgw.config.starter import Found, starter
from llmgw.discovery.classes import gpu_class, mig_class
from llmgw.domain.hardware import (
    Gpu,
    Inventory,
    InventoryError,
    InventoryStatus,
    LostGpu,
    MigInstance,
    OtherGpu,
)


def card(index: int, name: str, memory: int | None = 81559, *, mig: bool = False) -> Gpu:
    kind = gpu_class(name, memory)
    return Gpu(index, f"GPU-{index}", "0", name, memory, 0, memory, (9, 0), gpu_class=kind, mig_enabled=mig)


H100 = "NVIDIA H100 80GB HBM3"


def test_the_class_with_most_cards_becomes_the_example() -> None:
    cards = (card(0, "NVIDIA L4", 23034), *(card(index, H100) for index in range(1, 5)))
    text = starter(Found(Inventory(InventoryStatus.OK, cards), {"vllm": "/opt/vllm/bin/vllm"}))
    assert "4 x h100-80g" in text and "1 x l4-22g" in text
    assert '# gpu_class = "h100-80g"' in text and "# gpus    = 4" in text
    assert '# command = ["/opt/vllm/bin/vllm", "serve"]' in text
    assert "Other classes here: l4-22g" in text


def test_slices_are_named_by_their_class() -> None:
    slice_ = MigInstance(0, 0, "MIG-a", "3g.40gb", mig_class(H100, "3g.40gb"), 40448)
    node = Inventory(InventoryStatus.OK, (card(0, H100, mig=True),), mig_instances=(slice_,))
    text = starter(Found(node, {}))
    assert '# gpu_class = "h100-mig-3g.40gb"' in text
    assert "in MIG mode" in text


def test_without_a_gpu_the_example_is_for_the_cpu() -> None:
    missing = Inventory(InventoryStatus.ERROR, error=InventoryError.COMMAND_MISSING, detail="nvidia-smi is not on PATH")
    text = starter(Found(missing, {}, 24000))
    assert 'engine  = "llamacpp"' in text and "23 GiB" in text and "nvidia-smi is not on PATH" in text


def test_the_example_without_its_marks_is_a_configuration() -> None:
    text = starter(Found(Inventory(InventoryStatus.OK, (card(0, H100),)), {}))
    shard = text[text.index("# [[shard]]") :]
    active = "\n".join(line.removeprefix("# ") for line in shard.splitlines())
    (found,) = tomllib.loads(active)["shard"]
    assert found["gpus"] == 1 and found["gpu_class"] == "h100-80g"


TEXT = st.text(max_size=30)


@given(
    names=st.lists(TEXT, max_size=4),
    engines=st.dictionaries(st.sampled_from(["vllm", "sglang", "llama-server"]), TEXT, max_size=3),
    detail=st.none() | TEXT,
    other=TEXT,
)
def test_whatever_was_found_the_text_parses(
    names: list[str], engines: dict[str, str], detail: str | None, other: str
) -> None:
    cards = tuple(card(index, name, None if index % 2 else 81559) for index, name in enumerate(names))
    node = Inventory(
        InventoryStatus.OK if cards else InventoryStatus.ERROR,
        cards,
        detail=detail,
        lost=(LostGpu(None, other),),
        other_gpus=(OtherGpu("amd", 0, other, ""),),
        mig_instances=(MigInstance(0, 0, "MIG-a", "1g.5gb", other or "x", None),),
    )
    parsed = tomllib.loads(starter(Found(node, engines)))
    assert set(parsed) == {"defaults"}
