"""The rules, one function each. A rule that lacks a fact says nothing or warns: unknown is not "no" and not "yes".

What the files alone show (two shards with one port, a port in the ephemeral range) is found when they are read.
`RULES` is the one table of these; its codes are what `allow` takes and the anchors in the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from attrs import evolve, frozen

from llmgw.discovery import pins
from llmgw.discovery.classes import gpu_class
from llmgw.domain.hardware import Gpu, GpuFlag, Hindrance
from llmgw.domain.host import HostFacts
from llmgw.domain.problem import Problem, Severity
from llmgw.domain.shard import EngineKind, ShardSpec
from llmgw.preflight import model_config
from llmgw.preflight.needs import weights_path

SPLITTING = frozenset({EngineKind.VLLM, EngineKind.SGLANG})
"""Engines that split each layer evenly over their GPUs and size by one of them. llama.cpp spreads whole layers by
free memory, and of a plain command nothing is known."""

FP8_FROM: dict[EngineKind, tuple[int, int]] = {EngineKind.VLLM: (8, 9), EngineKind.SGLANG: (8, 9)}
"""Compute capability from which fp8 weights run natively. vLLM itself starts at 7.5 and SGLang at 8.0 (read in vLLM
0.33 and SGLang 0.5.23): below 8.9 the one falls back to 16 bit and the other fails on first use. Hence a refusal by
default and `allow` as the way out."""

LONGER_CONTEXT = frozenset({"VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"})
"""Variables by which a person tells the engine to accept more than the model's own length."""

MODEL_OVERRIDES = frozenset({"hf-overrides", "json-model-override-args", "hf-config-path", "load-format"})
"""Options under which the model is not what its config.json says."""


@frozen
class Situation:
    """What rules see: all shards of the node, the host, and pids that llmgw knows as its own."""

    specs: Sequence[ShardSpec]
    facts: HostFacts
    own_pids: Collection[int] = ()


Check = Callable[[ShardSpec, Situation], Iterator[Problem]]


@frozen
class Rule:
    """One rule. `codes` are all it can report, each with the paragraph that documents it."""

    check: Check
    codes: Mapping[str, str]


def preflight(
    specs: Sequence[ShardSpec],
    facts: HostFacts,
    *,
    only: Collection[str] | None = None,
    own_pids: Collection[int] = (),
) -> tuple[Problem, ...]:
    """All findings about `specs` on this host, in the order of the specs; `only` limits them to shards of these
    names, still against all others. `own_pids` are processes of engines that llmgw itself runs: a port they hold is
    held by no stranger. An error whose code stands in `allow` of its shard comes back as a warning.
    """
    situation = Situation(specs, facts, own_pids)
    found = []
    for spec in specs:
        if only is not None and spec.name not in only:
            continue
        for rule in RULES:
            for problem in rule.check(spec, situation):
                allowed = problem.is_error and problem.code in spec.allow
                found.append(evolve(problem, severity="warning") if allowed else problem)
    return tuple(found)


# -- ports ----------------------------------------------------------------------------------------------------


def port_taken(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    holder = situation.facts.port_holders.get(spec.port) if isinstance(spec.port, int) else None
    if holder is not None and (holder.pid is None or holder.pid not in situation.own_pids):
        yield _problem(
            spec,
            "port-taken",
            "port",
            f"{spec.port} is held by {holder}",
            'stop that process, choose another port, or write port = "auto"',
        )


# -- files and programs ---------------------------------------------------------------------------------------


def program_missing(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    word = spec.command[0] if spec.command else ""
    if situation.facts.programs.get(word, word) is not None:
        return
    if "/" in word:
        text, hint = f"{word} does not exist or cannot be executed", "check the path"
    else:
        text, hint = f"{word} is not on PATH", f'install it, or write its whole path: command = ["/…/{word}", …]'
    yield _problem(spec, "program-missing", "command", text, hint)


def weights_missing(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    path = weights_path(spec)
    fact = situation.facts.paths.get(path) if path is not None else None
    if fact is None:
        return
    if not fact.exists:
        yield _problem(spec, "weights-missing", "weights", f"{path} does not exist", "check the path on this machine")
    elif not fact.readable:
        yield _problem(
            spec,
            "weights-missing",
            "weights",
            f"{path} cannot be read by this user",
            "change its mode or owner, or run llmgw as a user who may",
        )


def workdir_missing(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    fact = situation.facts.paths.get(spec.workdir) if spec.workdir is not None else None
    if fact is not None and not fact.is_dir:
        text = f"{spec.workdir} is no folder" if fact.exists else f"{spec.workdir} does not exist"
        yield _problem(spec, "workdir-missing", "workdir", text, "create it, or leave workdir out")


# -- the model ------------------------------------------------------------------------------------------------


def heads_not_divisible(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    config = _model(spec, situation)
    heads = model_config.attention_heads(config) if config is not None else None
    tensor = spec.layout.tensor
    if heads is None or heads % tensor == 0:
        return
    most = max(8, tensor, len(situation.facts.inventory.gpus) if situation.facts.inventory else 0)
    sizes = ", ".join(str(size) for size in range(1, most + 1) if heads % size == 0)
    yield _problem(
        spec,
        "heads",
        "tensor_parallel",
        f"{tensor} does not divide {heads} attention heads; possible here: {sizes}",
        "use one of these sizes, and pipeline_parallel for further GPUs",
        text_form='shard "{name}": tensor_parallel = {text}',
    )


def context_too_long(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    config = _model(spec, situation)
    longest = model_config.context_length(config) if config is not None else None
    if longest is None or spec.max_model_len is None or spec.max_model_len <= longest:
        return
    if LONGER_CONTEXT.isdisjoint(spec.env):
        yield _problem(
            spec,
            "context-length",
            "max_model_len",
            f"{spec.max_model_len} is above the model's own {longest} tokens",
            f"write at most {longest}",
        )


def _model(spec: ShardSpec, situation: Situation) -> dict[str, object] | None:
    """The parsed config.json of an engine that reads one, unless options say that something else counts."""
    if spec.engine not in SPLITTING or not MODEL_OVERRIDES.isdisjoint(name.replace("_", "-") for name in spec.args):
        return None
    path = weights_path(spec)
    config = situation.facts.model_configs.get(path) if path is not None else None
    return dict(config) if config is not None else None


# -- GPUs -----------------------------------------------------------------------------------------------------


def gpus_not_there(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    if isinstance(spec.gpus, int):
        return
    found = pins.resolve_pins(spec, situation.facts.inventory)
    if isinstance(found, pins.Refused):
        yield _problem(spec, found.code, "gpus", found.message, found.hint, position=found.position)


def gpu_taken(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    """Two shards that mean one card and write it differently, such as by index and by UUID. The same word in both is
    found when the files are read, without any GPU."""
    mine = {pin.label: pin for pin in _pins(spec, situation)}
    for other in situation.specs:
        if other.name == spec.name:
            return
        takes_turns = spec.idle_timeout is not None and other.idle_timeout is not None
        if takes_turns or (spec.share_gpus and other.share_gpus):
            continue
        for pin in _pins(other, situation):
            if pin.label in mine and mine[pin.label].entry != pin.entry:
                yield _problem(
                    spec,
                    "gpu-taken",
                    "gpus",
                    f'GPU {pin.label} already belongs to shard "{other.name}"',
                    "set share_gpus = true and gpu_memory on both if that is meant",
                )


def gpu_held(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    known = situation.facts.availability
    found = ((pin, known.get(pin.uuid)) for pin in _pins(spec, situation) if pin.uuid is not None)
    texts = [
        f"GPU {pin.label} is {may.why_not}"
        for pin, may in found
        if may is not None and may.hindrance in (Hindrance.HELD, Hindrance.QUARANTINED)
    ]
    if texts:
        yield _problem(
            spec,
            "gpu-held",
            "gpus",
            "; ".join(texts),
            'it starts by itself when the memory is free; end that process, or write allow = ["gpu-held"]',
        )


UNFIT = {
    GpuFlag.MIG_ENABLED: ("is in MIG mode", "name one of its slices by UUID (nvidia-smi -L), or end MIG mode"),
    GpuFlag.REQUIRES_RESET: ("needs a reset", "reset it (nvidia-smi --gpu-reset) or reboot"),
    GpuFlag.ROW_REMAP_PENDING: ("has a row remap pending", "reset it (nvidia-smi --gpu-reset) or reboot"),
    GpuFlag.ROW_REMAP_FAILURE: ("failed to remap a bad row", "have the card replaced"),
    GpuFlag.UNCORRECTED_ECC: ("has uncorrected memory errors", "reset it; if they come back, have it replaced"),
}


def gpu_unfit(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    for gpu in _gpus(spec, situation):
        for flag in gpu.flags:
            if flag in UNFIT:
                text, hint = UNFIT[flag]
                yield _problem(spec, "gpu-unfit", "gpus", f"GPU {gpu.index} {text}", hint)


def mixed_gpus(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    gpus = _gpus(spec, situation)
    if spec.engine not in SPLITTING or spec.layout.tensor < 2 or len(gpus) < 2:
        return
    first, *others = gpus
    for other in others:
        unknown = [gpu for gpu in (first, other) if gpu.memory_total is None and not gpu.unified_memory]
        of_one_product = gpu_class(first.name, None) == gpu_class(other.name, None)
        if unknown and of_one_product:
            yield _problem(
                spec,
                "gpu-memory-unknown",
                "gpus",
                f"the driver does not say how much memory GPU {unknown[0].index} has, so nobody can tell whether "
                f"{first.index} and {other.index} are alike",
                "look at nvidia-smi -q; a group with a smaller card runs out of memory on it",
                severity="warning",
            )
            return
        if first.gpu_class != other.gpu_class:
            ecc = of_one_product and first.ecc_enabled is not other.ecc_enabled
            yield _problem(
                spec,
                "mixed-gpu-classes",
                "gpus",
                f"{first.index} is {first.gpu_class} and {other.index} is {other.gpu_class}; one tensor-parallel "
                "group needs GPUs of one class",
                "the same product with different usable memory: its ECC mode differs"
                if ecc
                else "give each class a shard of its own",
            )
            return
        if None not in (pair := (first.compute_capability, other.compute_capability)) and pair[0] != pair[1]:
            yield _problem(
                spec,
                "mixed-gpu-classes",
                "gpus",
                f"{first.index} has compute capability {_dotted(pair[0])} and {other.index} has {_dotted(pair[1])}; "
                "one tensor-parallel group needs GPUs of one class",
                "give each class a shard of its own",
            )
            return


def fp8_capability(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    least = FP8_FROM.get(spec.engine)
    if least is None or not _wants_fp8(spec, situation):
        return
    for gpu in _gpus(spec, situation):
        # Compared as pairs of integers: as text, 12.0 would be below 8.9.
        if gpu.compute_capability is None:
            yield _problem(
                spec,
                "capability-unknown",
                "quantization",
                f"fp8 needs compute capability {_dotted(least)}, and that of GPU {gpu.index} ({gpu.gpu_class}) is not "
                "known",
                "look it up in the vendor's list of CUDA GPUs; below it the engine is slow or fails",
                severity="warning",
                text_form=_PLAIN,
            )
            return
        if gpu.compute_capability < least:
            way_out = ', or allow = ["fp8-capability"] to run it in 16 bit' if spec.engine is EngineKind.VLLM else ""
            yield _problem(
                spec,
                "fp8-capability",
                "quantization",
                f"fp8 needs compute capability {_dotted(least)}, GPU {gpu.index} ({gpu.gpu_class}) has "
                f"{_dotted(gpu.compute_capability)}",
                f"use another quantization{way_out}",
                text_form=_PLAIN,
            )
            return


def _wants_fp8(spec: ShardSpec, situation: Situation) -> bool:
    # kv-cache-dtype is not asked: there fp8 is a storage format, and works on older cards.
    if spec.quantization is not None and "fp8" in spec.quantization.lower():
        return True
    config = _model(spec, situation)
    return config is not None and model_config.has_fp8_weights(config)


def _pins(spec: ShardSpec, situation: Situation) -> tuple[pins.Pin, ...]:
    """The cards that a shard names, as far as they can be looked up."""
    if isinstance(spec.gpus, int):
        return ()
    found = pins.resolve_pins(spec, situation.facts.inventory)
    return () if isinstance(found, pins.Refused) else found


def _gpus(spec: ShardSpec, situation: Situation) -> tuple[Gpu, ...]:
    return tuple(pin.gpu for pin in _pins(spec, situation) if pin.gpu is not None)


def _dotted(capability: tuple[int, int] | None) -> str:
    return "unknown" if capability is None else f"{capability[0]}.{capability[1]}"


# -- the table ------------------------------------------------------------------------------------------------

_PLAIN = 'shard "{name}": {text}'


def _problem(
    spec: ShardSpec,
    code: str,
    key: str,
    text: str,
    hint: str | None,
    *,
    severity: Severity = "error",
    text_form: str = 'shard "{name}" {key}: {text}',
    position: int | None = None,
) -> Problem:
    keys = (f"{key}.{position}", key) if position is not None else (key,)
    message = text_form.format(name=spec.name, key=key, text=text)
    return Problem(code, message, hint, where=spec.written_at(*keys), severity=severity)


def allowance_unknown(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    for position, code in enumerate(spec.allow):
        if code not in CODES:
            yield _problem(
                spec,
                "allowance-unknown",
                "allow",
                f'"{code}" is the code of no rule, so it allows nothing',
                f"codes: {', '.join(sorted(CODES))}",
                severity="warning",
                position=position,
            )


RULES: tuple[Rule, ...] = (
    Rule(
        port_taken,
        {
            "port-taken": "Another process holds the port. It is named as far as /proc shows it; a process that cannot "
            "be seen belongs to another user or to another container.",
        },
    ),
    Rule(
        program_missing,
        {
            "program-missing": "The program of `command` is not on the PATH of this process, or cannot be executed. "
            "The PATH of a service is short: an engine in a virtual environment needs its whole path.",
        },
    ),
    Rule(
        weights_missing,
        {
            "weights-missing": "The path of `weights` does not exist, or the user that llmgw runs as may not read it. "
            "Engines would take it for a name on a hub and fail later. Hub names are not looked up.",
        },
    ),
    Rule(workdir_missing, {"workdir-missing": "The folder of `workdir` does not exist, or is no folder."}),
    Rule(
        heads_not_divisible,
        {
            "heads": "vLLM and SGLang give each GPU of a tensor-parallel group the same number of attention heads, so "
            "the size must divide them. Further GPUs can be used with `pipeline_parallel`. Only asked when `weights` "
            "is a local folder with a `config.json`.",
        },
    ),
    Rule(
        context_too_long,
        {
            "context-length": "`max_model_len` is above what the model's `config.json` gives, scaled positions "
            "included. The engine would refuse to start; its own variable for longer contexts in `env` ends the rule.",
        },
    ),
    Rule(
        gpus_not_there,
        {
            pins.MISSING: "A GPU that `gpus` names is not on this node, has dropped off, or there is no `nvidia-smi`. "
            "Allowed, the entries are passed on as they are written.",
            pins.UNKNOWN: "`nvidia-smi` failed or hung, so nothing is known about the GPUs. Unknown is not free: "
            "nothing is started on them.",
            pins.TWICE: "Two entries of `gpus` mean one card.",
        },
    ),
    Rule(
        gpu_taken,
        {
            "gpu-taken": "Two shards name one GPU in two ways, such as by index and by UUID. Both need `share_gpus`, "
            "or both `idle_timeout`, for that to be meant.",
        },
    ),
    Rule(
        gpu_held,
        {
            "gpu-held": "The memory of an engine that has ended did not come back within `gpu_release_timeout`, or "
            "another process has taken it. A new engine would run out of memory, so it is held back, which counts as "
            "no failure, and starts when the memory is free. Processes of others are never ended.",
        },
    ),
    Rule(
        gpu_unfit,
        {
            "gpu-unfit": "A GPU needs a reset, has uncorrected memory errors or failed row remaps, or is in MIG mode "
            "and cannot be used as a whole.",
        },
    ),
    Rule(
        mixed_gpus,
        {
            "mixed-gpu-classes": "vLLM and SGLang split evenly and size by one card: in a mixed tensor-parallel group "
            "the smaller card runs out of memory or the slower one sets the pace. Two shards may use the two classes.",
            "gpu-memory-unknown": "The driver does not say how much memory a card of the group has.",
        },
    ),
    Rule(
        fp8_capability,
        {
            "fp8-capability": "Weights in fp8 need compute capability 8.9 (Ada, Hopper, Blackwell). Below it vLLM runs "
            "them in 16 bit, slower than the file promises, and SGLang fails on first use; so it is refused unless "
            "allowed. A key-value cache in fp8 is a storage format and always allowed.",
            "capability-unknown": "The driver does not tell the compute capability that fp8 needs.",
        },
    ),
    Rule(allowance_unknown, {"allowance-unknown": "A word in `allow` is the code of no rule."}),
)

CODES: Mapping[str, str] = {code: text for rule in RULES for code, text in rule.codes.items()}
"""Every code that preflight can report, with the paragraph that documents it."""
