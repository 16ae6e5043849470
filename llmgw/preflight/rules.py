"""The rules in one table, and the way through them. A rule that lacks a fact says nothing or warns: unknown is not "no"
and not "yes".

What the files alone show (two shards with one port, a port in the ephemeral range) is found when they are read. The
codes of `RULES` are what `allow` takes, and each has a page in docs/rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from attrs import evolve

from llmgw.discovery import pins
from llmgw.domain.host import HostFacts
from llmgw.domain.problem import Problem
from llmgw.domain.shard import ShardSpec
from llmgw.preflight import files, gpus, host, memory, model, ports
from llmgw.preflight.situation import Rule, Situation, problem


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

    Cards that llmgw chose come in as if the file had named them by UUID.
    """
    situation = Situation(specs, facts, own_pids)
    findings = []
    for spec in specs:
        if only is not None and spec.name not in only:
            continue
        for rule in RULES:
            for found in rule.check(spec, situation):
                allowed = found.is_error and found.code in spec.allow
                findings.append(evolve(found, severity="warning") if allowed else found)
    return tuple(findings)


def allowance_unknown(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    for position, code in enumerate(spec.allow):
        if code not in CODES:
            yield problem(
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
        ports.port_taken,
        {
            "port-taken": "Another process holds the port. It is named as far as /proc shows it; a process that cannot "
            "be seen belongs to another user or to another container.",
        },
    ),
    Rule(
        ports.derived_port_twice,
        {
            "rank-port-taken": "Two shards were given one port for their ranks through `extra_args`. llmgw gives each "
            "launch a port of its own out of `[node] rendezvous_ports`; the engines' defaults (vLLM: 29501 and 29550) "
            "would meet.",
        },
    ),
    Rule(
        files.program_missing,
        {
            "program-missing": "The program of `command` is not on the PATH of this process, or cannot be executed. "
            "The PATH of a service is short: an engine in a virtual environment needs its whole path.",
        },
    ),
    Rule(
        files.version_unreadable,
        {
            "engine-version-unknown": "Beside the engine's program there is no metadata of its package, so nobody "
            "knows which options this version has.",
        },
    ),
    Rule(
        files.weights_missing,
        {
            "weights-missing": "The path of `weights` does not exist, or the user that llmgw runs as may not read it. "
            "Engines would take it for a name on a hub and fail later. Hub names are not looked up.",
        },
    ),
    Rule(
        files.model_incomplete,
        {
            "model-config-missing": "The folder of `weights` has no `config.json` that can be read. vLLM and SGLang "
            "need one, and say so only after their imports.",
            "weight-files-missing": "The folder's index names files that are not there, or there are no weights at "
            "all: a download that was cut short.",
            "tokenizer-missing": "The folder has no file of a tokenizer, and no option names another one.",
        },
    ),
    Rule(
        files.gguf_broken,
        {
            "gguf-broken": "What llama.cpp is to load is a folder, does not begin like a GGUF file, or is a part of a "
            "split model that is not the first or not complete.",
        },
    ),
    Rule(files.workdir_missing, {"workdir-missing": "The folder of `workdir` does not exist, or is no folder."}),
    Rule(
        model.heads_not_divisible,
        {
            "heads": "vLLM and SGLang give each GPU of a tensor-parallel group the same number of attention heads, so "
            "the size must divide them. Further GPUs can be used with `pipeline_parallel`. Only asked when `weights` "
            "is a local folder with a `config.json`.",
        },
    ),
    Rule(
        model.kv_heads_not_divisible,
        {
            "kv-heads": "Key-value heads are divided over the ranks or repeated on them, so one of the two numbers "
            "must divide the other. Models with compressed attention (MLA) have none.",
        },
    ),
    Rule(
        model.context_too_long,
        {
            "context-length": "`max_model_len` is above what the model's `config.json` gives, scaled positions "
            "included. The engine would refuse to start; its own variable for longer contexts in `env` ends the rule.",
        },
    ),
    Rule(
        model.sizes_of_sglang,
        {
            "sglang-sizes": "SGLang asserts some relations of sizes without saying which: tensor x pipeline must be a "
            "multiple of `nodes`, data parallel copies stay on one node, chunks of prefill are whole pages.",
        },
    ),
    Rule(
        gpus.gpus_not_there,
        {
            pins.MISSING: "A GPU that `gpus` names is not on this node, has dropped off, or there is no `nvidia-smi`. "
            "Allowed, the entries are passed on as they are written.",
            pins.UNKNOWN: "`nvidia-smi` failed or hung, so nothing is known about the GPUs. Unknown is not free: "
            "nothing is started on them.",
            pins.TWICE: "Two entries of `gpus` mean one card.",
        },
    ),
    Rule(
        gpus.gpu_taken,
        {
            "gpu-taken": "Two shards name one GPU in two ways, such as by index and by UUID. Both need `share_gpus`, "
            "or both `idle_timeout`, for that to be meant.",
        },
    ),
    Rule(
        gpus.gpu_held,
        {
            "gpu-held": "The memory of an engine that has ended did not come back within `gpu_release_timeout`, or "
            "another process has taken it. A new engine would run out of memory, so it is held back, which counts as "
            "no failure, and starts when the memory is free. Processes of others are never ended.",
        },
    ),
    Rule(
        gpus.gpu_unfit,
        {
            "gpu-unfit": "A GPU is lost, needs a reset, has uncorrected memory errors or failed row remaps, or is in "
            "MIG mode and cannot be used as a whole.",
        },
    ),
    Rule(
        gpus.mixed_gpus,
        {
            "mixed-gpu-classes": "vLLM and SGLang split evenly and size by one card: in a mixed tensor-parallel group "
            "the smaller card runs out of memory or the slower one sets the pace. Nor can MIG slices be a group, or "
            "vGPUs be mixed with whole cards. Two shards may use the two classes.",
            "gpu-memory-unknown": "The driver does not say how much memory a card has, so whether cards are alike or a "
            "model fits cannot be told.",
        },
    ),
    Rule(
        gpus.unplaced,
        {
            "gpu-count": "`gpus` asks for more GPUs than the node has, also if all of them were free.",
            "unplaced": "No GPUs are free for the shard now. The reason counts what stands in the way of each card. "
            "The shard is pending and starts by itself.",
        },
    ),
    Rule(
        gpus.class_unknown,
        {"gpu-class-unknown": "No GPU of this node has a class of `gpu_class`: the shard waits for one for ever."},
    ),
    Rule(
        gpus.gpu_memory,
        {
            "gpu-memory": "`gpu_memory` is more than a card has, alone or together with the shards that share it.",
        },
    ),
    Rule(
        model.fp8_capability,
        {
            "fp8-capability": "Weights in fp8 need compute capability 8.9 (Ada, Hopper, Blackwell). Below it vLLM runs "
            "them in 16 bit, slower than the file promises, and SGLang fails on first use; so it is refused unless "
            "allowed. A key-value cache in fp8 is a storage format and always allowed.",
            "capability-unknown": "The driver does not tell the compute capability that a number format needs.",
        },
    ),
    Rule(
        model.bf16_capability,
        {
            "bf16-capability": 'The engine is told to compute in bfloat16 (`dtype = "bfloat16"`), which cards below '
            "compute capability 8.0 do not have; it would refuse to start.",
            "bf16-fallback": "The model is in bfloat16 and the card does not have it: left to itself the engine "
            "computes in float16, whose range is smaller.",
        },
    ),
    Rule(
        model.nvfp4_capability,
        {
            "nvfp4-capability": "Weights in NVFP4 need compute capability 10.0 (Blackwell). Below it vLLM computes "
            "in 16 bit, slower than the file promises, and others fail; so it is refused unless allowed.",
            "nvfp4-kernels": "Cards of capability 12 can do NVFP4, but not every build of an engine has kernels for "
            "it.",
        },
    ),
    Rule(
        memory.memory_free,
        {
            "gpu-memory-free": "vLLM takes `gpu-memory-utilization` (0.92 by default) of what a card has, without what "
            "the driver reserves, and stops at the start when so much is not free.",
        },
    ),
    Rule(
        memory.memory_for_model,
        {
            "model-memory": "Weights, split over tensor and pipeline ranks, and the key-value cache of one request of "
            "`max_model_len` tokens (of the model's own length where vLLM is told none) are more than the engine may "
            "use of a card. Lower bounds are counted: activations and graphs come on top, and layers whose cache is "
            "not told count as nothing. SGLang takes the cache that fits, so only weights count. Only asked when "
            "`weights` is a local folder.",
        },
    ),
    Rule(
        host.shm_small,
        {
            "shm-small": "The ranks of an engine talk through /dev/shm; a container gives it 64 MiB unless told "
            "otherwise."
        },
    ),
    Rule(
        host.memlock_small,
        {
            "memlock-small": "RDMA locks the memory that it sends from. With a small limit the first transfer fails, "
            "long after the start.",
        },
    ),
    Rule(host.uvm_missing, {"nvidia-uvm": "The device that CUDA opens first is missing: the module is not loaded."}),
    Rule(allowance_unknown, {"allowance-unknown": "A word in `allow` is the code of no rule."}),
)

CODES: Mapping[str, str] = {code: text for rule in RULES for code, text in rule.codes.items()}
"""Every code that preflight can report, with the paragraph that documents it."""
