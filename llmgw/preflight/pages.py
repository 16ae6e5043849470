"""What the page of each rule says beside its paragraph: how it reads, what to do, whether allowing it makes sense."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class Page:
    """`example` is a finding as `llmgw check` prints it, without its place. `allow` None: allowing it leads nowhere."""

    example: str
    what_to_do: str
    allow: str | None = None
    warning: bool = False
    """It is never an error."""


PAGES: Mapping[str, Page] = {
    "port-taken": Page(
        'shard "chat" port: 8101 is held by pid 4411 (python, uid 1000)',
        'Stop that process, choose another port, or write `port = "auto"`: llmgw then takes a free one of '
        "`[node] engine_ports`. Engines of the running llmgw are no strangers to `llmgw check`.",
    ),
    "rank-port-taken": Page(
        'shard "b" extra_args: --master-port 29550 is also what shard "a" uses',
        "Leave the option out. llmgw gives each launch a port of `[node] rendezvous_ports`.",
    ),
    "program-missing": Page(
        'shard "chat" command: vllm is not on PATH',
        'Write the whole path: `command = ["/opt/vllm/bin/vllm", "serve"]`. `systemctl show -p Environment llmgw` '
        "tells what the service sees.",
    ),
    "engine-version-unknown": Page(
        'shard "chat": the version of /usr/local/bin/vllm cannot be read: there is no vllm beside it',
        "Name the program inside the environment that the engine is installed in, rather than a wrapper.",
        warning=True,
    ),
    "weights-missing": Page(
        'shard "chat" weights: /models/llama-70b does not exist',
        "Check the path on this machine, and that the user of the service may read it.",
    ),
    "model-config-missing": Page(
        'shard "chat" weights: /models/llama-70b has no config.json',
        'Name the folder of one model, not the one above it. A GGUF file needs `engine = "llamacpp"`.',
        "when the engine loads this format without a config.json",
    ),
    "weight-files-missing": Page(
        'shard "chat" weights: 1 of 30 files of its index are missing: model-00007-of-00030.safetensors',
        "Download the model again; a download that is cut short leaves the index behind.",
        "when the index lists files that this engine does not load",
    ),
    "tokenizer-missing": Page(
        'shard "chat" weights: /models/llama-70b has no tokenizer',
        'Copy the tokenizer\'s files into the folder, or name another one: `args = { tokenizer = "/models/other" }`.',
        "when the engine finds its tokenizer by another way",
    ),
    "gguf-broken": Page(
        'shard "chat" weights: 1 of its parts are missing: model-00002-of-00003.gguf',
        "Name the first part, and keep all parts in one folder.",
    ),
    "workdir-missing": Page(
        'shard "chat" workdir: /srv/chat does not exist',
        "Create the folder, or leave `workdir` out: llmgw makes one in its state directory.",
    ),
    "heads": Page(
        'shard "chat": tensor_parallel = 3 does not divide 40 attention heads; possible here: 1, 2, 4, 5, 8',
        "Use one of the sizes named. `pipeline_parallel` uses further GPUs.",
        "when the engine pads heads (some forks do)",
    ),
    "kv-heads": Page(
        'shard "chat": tensor_parallel = 5 and 8 key-value heads do not divide each other; possible here: 1, 2, 4, 8',
        "Use one of the sizes named.",
        "when the engine pads heads (some forks do)",
    ),
    "context-length": Page(
        'shard "chat" max_model_len: 200000 is above the model\'s own 131072 tokens',
        "Write at most that number. `VLLM_ALLOW_LONG_MAX_MODEL_LEN` or "
        "`SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN` in `env` tells the engine that more is meant.",
        "when the engine scales positions in a way that config.json does not tell",
    ),
    "sglang-sizes": Page(
        'shard "chat" nodes: SGLang needs tensor x pipeline = 3 to be a multiple of 2',
        "Change the sizes named.",
    ),
    "gpu-missing": Page(
        'shard "chat" gpus: GPU 7 is not on this node',
        "`llmgw inventory` lists the GPUs. On a node whose GPUs nvidia-smi does not know, allow it.",
        "to pass the entries on as they are written",
    ),
    "gpu-unknown": Page(
        'shard "chat" gpus: cannot tell what GPU 0 is: nvidia-smi did not end within 20 s',
        "Run `nvidia-smi` by hand and `llmgw doctor`; look at `dmesg` for lines with NVRM. The shard starts by itself "
        "when the GPUs can be read again.",
        "to start it although nobody knows what is free",
    ),
    "gpu-twice": Page('shard "chat" gpus: GPU 0 is given twice', "Name each GPU once."),
    "gpu-taken": Page(
        'shard "b" gpus: GPU 3 already belongs to shard "a"',
        "Give each its own, or set `share_gpus = true` and `gpu_memory` on both.",
    ),
    "gpu-held": Page(
        'shard "chat" gpus: GPU 1 is held by pid 4411 python',
        "End that process. The shard starts by itself when the memory is free. After an engine's end, "
        "`llmgw gpu release` gives a card out again by hand.",
        "when the other process leaves enough for this engine",
    ),
    "gpu-unfit": Page(
        'shard "chat" gpus: GPU 3 is unhealthy: uncorrected ECC',
        "Reset the card (`nvidia-smi --gpu-reset -i 3`) while nothing runs on it, or reboot; if the errors come back, "
        "have it replaced.",
        "to run on a card with errors: results may be wrong",
    ),
    "mixed-gpu-classes": Page(
        'shard "big" gpus: 0 is h100-80g and 4 is l40s-45g; one tensor-parallel group needs GPUs of one class',
        "Give each class a shard of its own. The same product in two classes differs in its ECC mode.",
        "when the slower pace and the smaller memory are meant",
    ),
    "gpu-memory-unknown": Page(
        'shard "chat": the driver does not say how much memory GPU 0 has, so nobody can tell whether the model fits',
        "Look at `nvidia-smi -q`. Nothing is refused for it.",
        warning=True,
    ),
    "gpu-count": Page(
        'shard "big" gpus: 8 are asked for, and this node has 4 of class h100-80g',
        "Ask for fewer, allow further classes in `gpu_class`, or write `gpus = 0` for the CPU.",
    ),
    "unplaced": Page(
        'shard "big": needs 4 GPUs: 4 used by chat, 3 of class l40s-45g, 1 uncorrected ECC',
        "Stop what uses the cards, or wait. `llmgw inventory` shows who is on which, `llmgw plan` who would get which.",
        warning=True,
    ),
    "gpu-class-unknown": Page(
        'shard "big": this node has no GPU of class a100-80g',
        "Compare with the classes that the message lists; the page on classes tells how they are named.",
        warning=True,
    ),
    "gpu-memory": Page(
        'shard "b" gpu_memory: 100.0 GiB together with a are more than GPU 0 has: 79.2 GiB usable',
        "Ask for less on each, or give one of them another card. Usable is the total without what the driver reserves.",
        "when the engines are known to take less than they ask for",
    ),
    "fp8-capability": Page(
        'shard "big": fp8 needs compute capability 8.9, GPU 0 (a100-80g) has 8.0',
        'Use another quantization. With vLLM, `allow = ["fp8-capability"]` runs the weights in 16 bit.',
        "with vLLM, to run them in 16 bit",
    ),
    "capability-unknown": Page(
        'shard "big": fp8 needs compute capability 8.9, and that of GPU 0 (unknown-24g) is not known',
        "Look the card up in the vendor's list of CUDA GPUs.",
        warning=True,
    ),
    "bf16-capability": Page(
        'shard "chat": bfloat16 needs compute capability 8.0, GPU 0 (t4-15g) has 7.5',
        'Write `args = { dtype = "half" }`.',
    ),
    "bf16-fallback": Page(
        'shard "chat": the model is in bfloat16, which GPU 0 (t4-15g, capability 7.5) does not have',
        'Write `args = { dtype = "half" }` to say that float16 is meant.',
        warning=True,
    ),
    "nvfp4-capability": Page(
        'shard "big": NVFP4 needs compute capability 10.0, GPU 0 (h100-80g) has 9.0',
        'Use another quantization. With vLLM, `allow = ["nvfp4-capability"]` runs the weights in 16 bit.',
        "with vLLM, to run them in 16 bit",
    ),
    "nvfp4-kernels": Page(
        'shard "big": GPU 0 (rtx5090-32g) can do NVFP4, but not every build of the engine has its kernels',
        "If the start fails with a missing kernel, use a build of the engine for this card.",
        warning=True,
    ),
    "gpu-memory-free": Page(
        'shard "chat": it wants 0.92 x 79.2 GiB = 72.8 GiB of GPU 0 (h100-80g), of which 58.6 GiB are free',
        "Free the memory, or lower `args.gpu-memory-utilization`.",
        "when the memory will be free by the time the engine asks for it",
    ),
    "model-memory": Page(
        'shard "big": weights 141.0 GiB / (2 x 1) = 70.5 GiB + cache of one request of 32768 tokens 5.0 GiB = 75.5 GiB '
        "on each GPU, but 0.92 x 79.2 GiB = 72.8 GiB is all that it may use of GPU 0 (h100-80g)",
        "Lower `max_model_len`, use more GPUs or a quantized model, or raise `args.gpu-memory-utilization`.",
        "when the engine keeps weights or cache elsewhere",
    ),
    "shm-small": Page(
        'shard "big": /dev/shm has 64 MiB, and its 4 ranks talk through it',
        "`mount -o remount,size=8G /dev/shm`, or `--shm-size=8g` for a container.",
        warning=True,
    ),
    "memlock-small": Page(
        'shard "big": only 8192 KiB of memory may be locked, which RDMA needs more of',
        "`LimitMEMLOCK=infinity` in the unit (the shipped one has it), or `ulimit -l unlimited`.",
        warning=True,
    ),
    "nvidia-uvm": Page(
        'shard "chat": /dev/nvidia-uvm is not there, and CUDA does not start without it',
        "`modprobe nvidia-uvm`, or `nvidia-modprobe -u -c=0`.",
        warning=True,
    ),
    "stop-timeout": Page(
        'TimeoutStopSec=90 is not longer than the longest stop, 250s of shard "chat" '
        "(drain_timeout + stop_timeout + 10s + gpu_release_timeout)",
        "`systemctl edit llmgw` and set `TimeoutStopSec` to what the message says, or shorten the times of the shard.",
        warning=True,
    ),
    "allowance-unknown": Page(
        'shard "chat" allow: "fp8" is the code of no rule, so it allows nothing',
        "Use one of the codes in the list of rules.",
        warning=True,
    ),
}
