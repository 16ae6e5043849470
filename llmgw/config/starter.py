"""A first `llmgw.toml` for the hardware that was found: text alone. Pure.

What would start something is commented out but for one thing: which model to run is for a person to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from attrs import frozen

from llmgw.config.toml_text import inline
from llmgw.domain.display import neutralise
from llmgw.domain.hardware import Inventory, InventoryStatus

HEAD = """\
# llmgw.toml, written by llmgw init for this machine. Fill in a shard, then:
#   llmgw check    everything that is wrong with the file, and with this machine for it
#   llmgw run      run it in the foreground; llmgw install-systemd makes a service of it
# llmgw.toml.example shows every key, llmgw explain KEY tells about one.
"""


@frozen
class Found:
    """What was found: `engines` are programs on PATH, kind -> path."""

    inventory: Inventory
    engines: Mapping[str, str]
    host_memory: int | None = None
    """MiB."""


def starter(found: Found) -> str:
    """The text. It parses, and nothing in it is wrong on the machine that it was made for."""
    return "\n".join([HEAD, *_hardware(found), "", "[defaults]", *_defaults(), "", *_shards(found)]) + "\n"


def _hardware(found: Found) -> Iterator[str]:
    inventory = found.inventory
    yield "# Found here:"
    if inventory.status is InventoryStatus.ERROR:
        yield f"#   no GPU that can be used: {_comment(inventory.detail or 'nvidia-smi failed')}"
    for name, count in sorted(_classes(inventory).items()):
        card = next(gpu for gpu in inventory.gpus if gpu.gpu_class == name)
        size = f"{card.memory_total / 1024:.0f} GiB" if card.memory_total is not None else "memory of the host"
        yield f"#   {count} x {_comment(name)}  ({_comment(card.name)}, {size})"
    for gpu in inventory.gpus:
        if gpu.mig_enabled:
            yield f"#   GPU {gpu.index} is in MIG mode: its slices are used one by one"
    for instance in inventory.mig_instances:
        yield f"#   slice {_comment(instance.gpu_class)}  {_comment(instance.uuid)}"
    for lost in inventory.lost:
        yield f"#   a GPU at {_comment(lost.bus_id)} is lost"
    for other in inventory.other_gpus:
        yield f"#   {_comment(other.vendor)}: {_comment(other.name)} (listed only: not placed on yet)"
    for kind, path in found.engines.items():
        yield f"#   {kind} at {_comment(path)}"
    if not found.engines:
        yield "#   no engine on PATH: give its whole path in `command`"


def _defaults() -> Iterator[str]:
    yield 'restart = "on-failure"     # other words: "no", "always"'
    yield 'load_timeout = "30m"       # without progress; a load that makes progress is not ended'


def _shards(found: Found) -> Iterator[str]:
    classes = _classes(found.inventory)
    if found.inventory.mig_instances:
        yield from _slice_example(found)
    if classes:
        name, count = max(classes.items(), key=lambda entry: (entry[1], entry[0]))
        yield from _gpu_example(found, name, count)
        if len(classes) > 1:
            yield "#"
            others = _comment(", ".join(sorted(set(classes) - {name})))
            yield f"# Other classes here: {others}. A shard has GPUs of one class."
    elif not found.inventory.mig_instances:
        yield from _cpu_example(found)


def _gpu_example(found: Found, name: str, count: int) -> Iterator[str]:
    kind = "sglang" if "sglang" in found.engines and "vllm" not in found.engines else "vllm"
    number = 1 if count < 2 else 2 if count < 4 else 4
    yield "# [[shard]]"
    yield '# name    = "chat"'
    yield '# model   = "my-model"                 # the name clients ask for'
    yield f'# engine  = "{kind}"'
    yield from _command(found, kind)
    yield '# weights = "/models/my-model"         # a folder, or a name on the Hugging Face hub'
    yield f"# gpus    = {number}                          # of {count}; llmgw chooses free ones of one class"
    yield f"# gpu_class = {inline(name)}"
    yield "# max_model_len = 8192"


def _slice_example(found: Found) -> Iterator[str]:
    instance = found.inventory.mig_instances[0]
    yield "# [[shard]]"
    yield '# name    = "small"'
    yield '# model   = "my-small-model"'
    yield '# engine  = "vllm"'
    yield from _command(found, "vllm")
    yield '# weights = "/models/my-small-model"'
    yield "# gpus    = 1"
    yield f"# gpu_class = {inline(instance.gpu_class)}       # a MIG slice is used only when it is named"
    yield ""


def _cpu_example(found: Found) -> Iterator[str]:
    size = f" (this machine has {found.host_memory / 1024:.0f} GiB)" if found.host_memory is not None else ""
    yield f"# Without a GPU: a small model on the CPU{size}."
    yield "# [[shard]]"
    yield '# name    = "tiny"'
    yield '# model   = "my-small-model"           # the name clients ask for'
    yield '# engine  = "llamacpp"'
    yield from _command(found, "llama-server")
    yield '# weights = "/models/my-small-model.gguf"'
    yield "# max_model_len = 4096"


def _command(found: Found, kind: str) -> Iterator[str]:
    path = found.engines.get(kind)
    words = [path or f"/opt/{kind}/bin/{kind}", *(["serve"] if kind != "llama-server" else [])]
    yield f"# command = [{', '.join(inline(word) for word in words)}]"


def _classes(inventory: Inventory) -> Counter[str]:
    return Counter(gpu.gpu_class for gpu in inventory.gpus if gpu.gpu_class is not None and not gpu.mig_enabled)


def _comment(text: str) -> str:
    """For a comment: one line, and nothing that TOML refuses there."""
    return " ".join(neutralise(text).split())[:200]
