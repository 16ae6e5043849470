"""How many GPUs one instance has and how its ranks are laid out."""

from __future__ import annotations

from attrs import frozen

from llmgw.domain.shard import EngineKind, ParallelLayout


@frozen
class Sizes:
    """What is written; None is not written."""

    engine: EngineKind
    gpus: int | tuple[int | str, ...] | None = None
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    nodes: int = 1


@frozen
class Uneven:
    """The numbers do not fit; `key` is the one to look at."""

    key: str
    message: str
    hint: str


def lay_out(sizes: Sizes) -> tuple[int | tuple[int | str, ...], ParallelLayout] | Uneven:
    """GPUs of one instance and its layout, or why the written numbers contradict each other."""
    pipeline, data = sizes.pipeline or 1, sizes.data or 1
    gpus = sizes.gpus
    if gpus is None:
        if sizes.tensor or sizes.pipeline or sizes.data:
            gpus = (sizes.tensor or 1) * pipeline * data
        else:
            gpus = sizes.nodes if sizes.engine in (EngineKind.VLLM, EngineKind.SGLANG) else 0
    count = gpus if isinstance(gpus, int) else len(gpus)
    if count == 0:
        return 0, ParallelLayout(sizes.tensor or 1, pipeline, data)
    verb = "is" if isinstance(gpus, int) else "lists"
    tensor = sizes.tensor
    if tensor is None:
        if count % (pipeline * data):
            product = f"pipeline_parallel x data_parallel = {pipeline} x {data}"
            key = "gpus" if sizes.gpus is not None else "pipeline_parallel"
            return Uneven(key, f"gpus {verb} {count}, which {product} does not divide", "make it a multiple")
        tensor = count // (pipeline * data)
    if tensor * pipeline * data != count:
        if pipeline * data == 1:
            message = f"tensor_parallel = {tensor} but gpus {verb} {count}"
            hint = "make them equal, or drop tensor_parallel (it defaults to the number of gpus)"
        else:
            written = f"tensor_parallel x pipeline_parallel x data_parallel = {tensor} x {pipeline} x {data}"
            message = f"{written} = {tensor * pipeline * data} but gpus {verb} {count}"
            hint = "make them equal, or drop tensor_parallel (it follows from the others)"
        return Uneven("tensor_parallel", message, hint)
    if count % sizes.nodes:
        return Uneven("nodes", f"nodes = {sizes.nodes} does not divide {count} GPUs", "gpus counts all nodes together")
    return gpus, ParallelLayout(tensor, pipeline, data)
