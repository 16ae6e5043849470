"""The 34 causes for which engines fail to start or to go on, by what they print. Data; `diagnosis` applies it.

Letters of origin: M the text was produced by this project with the engine, S it stands in the engine's source, B in
a library it ships, U it is known from reports only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import frozen

from llmgw.domain.shard import EngineKind


@frozen
class Rule:
    """One cause. The first rule of the table that matches anywhere in the kept output wins.

    `cause` and `remedy` may hold `{shard}`, `{memory}` and `{holder}`, see `diagnosis`. `exact_cause` and
    `exact_remedy` replace them where `exact` (looked for in the matching line) is found; they may use its groups
    by name. `retry` is False where another attempt must fail in the same way.
    """

    code: str
    known: str
    pattern: re.Pattern[str]
    cause: str
    remedy: str
    retry: bool = True
    exact: re.Pattern[str] | None = None
    exact_cause: str | None = None
    exact_remedy: str | None = None


MEMORY_OPTION: Mapping[EngineKind, str] = {
    EngineKind.VLLM: "gpu-memory-utilization",
    EngineKind.SGLANG: "mem-fraction-static",
    EngineKind.LLAMACPP: "n-gpu-layers",
}
"""What `{memory}` stands for: the option in `[shard.args]` that decides how much GPU memory is taken."""

_C = re.compile

RULES: tuple[Rule, ...] = (
    Rule(
        "D1",
        "B",
        _C(r"CUDA out of memory\. Tried to allocate|torch\.OutOfMemoryError"),
        "GPU memory ran out",
        "lower {memory} or max-num-seqs in [shard.args] of {shard}, give it more GPUs or a quantized model, and see "
        "with nvidia-smi who else uses the GPU",
        exact=_C(r"Tried to allocate (?P<size>[\d.]+ [KMGT]iB)"),
        exact_cause="GPU memory ran out: {size} more were asked for",
    ),
    Rule(
        "D2",
        "S",
        _C(r"Free memory on device .* is less than desired GPU memory utilization"),
        "another process holds memory of this GPU already",
        "see with nvidia-smi who it is and end it, or lower {memory} in [shard.args] of {shard}",
        exact=_C(r"\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\)"),
        exact_cause="another process holds memory of this GPU already: {free} of {total} GiB are free",
    ),
    # D3 to D5 are not tried again: memory that others hold is found before, by D2 and by llmgw's own wait for the
    # release, so what is missing here follows from the settings.
    Rule(
        "D3",
        "S",
        _C(r"No available memory for the cache blocks"),
        "the weights fill all the memory the engine may use; nothing is left for the KV cache",
        "raise {memory} in [shard.args] of {shard}, give it more GPUs, or take a smaller or quantized model",
        retry=False,
    ),
    Rule(
        "D4",
        "M",
        _C(r"KV cache is needed, which is larger than the available KV cache memory"),
        "one request of the longest context does not fit into the KV cache",
        "set a smaller max_model_len in {shard}, raise {memory} in its [shard.args], or give it more GPUs",
        retry=False,
        exact=_C(r"estimated maximum model length is (?P<length>\d+)"),
        exact_cause="the longest context does not fit into the KV cache; {length} tokens would",
        exact_remedy="set max_model_len to at most {length} in {shard}, raise {memory} in its [shard.args], or give "
        "it more GPUs",
    ),
    Rule(
        "D5",
        "M, S",
        _C(
            r"leave no GPU memory for the KV cache under --mem-fraction-static"
            r"|Not enough memory\. Please try to increase --mem-fraction-static"
        ),
        "mem-fraction-static leaves nothing for the KV cache",
        "raise mem-fraction-static in [shard.args] of {shard} (the line may name the least), or give it more GPUs",
        retry=False,
    ),
    Rule(
        "D6",
        "M",
        _C(r"max_model_len \((\d+)\) is greater than the derived|context_length \((\d+)\) is greater than the derived"),
        "the context asked for is longer than the model supports",
        "lower max_model_len in {shard} to what the line names",
        retry=False,
        exact=_C(
            r"\((?P<asked>\d+)\) is greater than the derived.*?"
            r"(?:max_position_embeddings|model_max_length|max_model_len|context_length)[=( ]+(?P<length>\d+)"
        ),
        exact_cause="the model supports {length} tokens of context, asked for are {asked}",
        exact_remedy="set max_model_len to at most {length} in {shard}",
    ),
    Rule(
        "D7",
        "M, S",
        _C(
            r"attention heads \((\d+)\) must be divisible by tensor parallel size"
            r"|assert self\.total_num_heads % tp_size"
        ),
        "the number of attention heads cannot be divided by tensor_parallel",
        "set tensor_parallel in {shard} to a number that divides the model's attention heads; pipeline_parallel can "
        "use the other GPUs",
        retry=False,
        exact=_C(r"attention heads \((?P<heads>\d+)\).*tensor parallel size \((?P<size>\d+)\)"),
        exact_cause="{heads} attention heads cannot be divided by tensor_parallel = {size}",
    ),
    Rule(
        "D8",
        "S, U",
        _C(
            r"World size \((\d+)\) is larger than the number of available GPUs \((\d+)\)|invalid device ordinal",
        ),
        "the engine sees fewer GPUs than its parallel sizes need",
        "check gpus of {shard} against nvidia-smi",
        retry=False,
        exact=_C(r"World size \((?P<world>\d+)\).*GPUs \((?P<seen>\d+)\)"),
        exact_cause="the engine needs {world} GPUs and sees {seen}",
    ),
    Rule(
        "D9",
        "M, B",
        _C(
            r"Errno 98\].*(address already in use|attempting to bind)|EADDRINUSE|couldn't bind HTTP server socket"
            r"|is not available in \d+ seconds",
            re.I,
        ),
        "a port it needs is in use{holder}",
        'stop who holds the port, or give {shard} another one (port = "auto" finds one)',
    ),
    Rule(
        "D10",
        "M",
        _C(r"Errno 99\] Cannot assign requested address"),
        "host is no address of this machine",
        "set host in {shard} to an address of this machine; 127.0.0.1 always is one",
    ),
    Rule(
        "D11",
        "M",
        _C(r"Repo id must be in the form"),
        "the weights are not there: the path does not exist on this node, so it was taken for a name on the hub",
        "correct weights in {shard}",
        retry=False,
        exact=_C(r"Repo id must be in the form.*: '(?P<path>[^']+)'"),
        exact_cause="{path} does not exist on this node, so it was taken for a name on the hub",
    ),
    Rule(
        "D12",
        "B",
        _C(r"Cannot access gated repo|You are trying to access a gated repo|GatedRepoError|401 Client Error"),
        "the hub gives this model only to those who accepted its licence",
        'accept the licence on the hub and give {shard} a token: env = {{ HF_TOKEN = {{ file = "…" }} }}',
        retry=False,
    ),
    Rule(
        "D13",
        "B",
        _C(r"Repository Not Found for url|is not a valid model identifier"),
        "the hub knows no model of this name, or it is private",
        "check the spelling of weights in {shard}; a private one needs HF_TOKEN in its env",
        retry=False,
    ),
    Rule(
        "D14",
        "M",
        _C(
            r"We couldn't connect to 'https://huggingface|outgoing traffic has been disabled"
            r"|LocalEntryNotFoundError|offline mode is enabled"
        ),
        "this node cannot reach the hub, and the model is not in its cache",
        "download the model first (see HF_HOME for the cache), or set weights in {shard} to a local folder",
    ),
    Rule(
        "D15",
        "M",
        _C(r"Couldn't instantiate the backend tokenizer|Can't load tokenizer for"),
        "the tokenizer's files are missing in the model folder",
        "complete the download of weights in {shard}",
        retry=False,
    ),
    Rule(
        "D16",
        "M",
        _C(r"Cannot find any model weights with|Error no file named \S.* found in directory"),
        "the model folder has a configuration and no weights: the download is incomplete",
        "complete the download of weights in {shard}",
        retry=False,
    ),
    Rule(
        "D17",
        "M, B",
        _C(
            r"Model architectures \[.*\] are not supported for now|does not recognize this architecture"
            r"|The checkpoint you are trying to load has model type"
        ),
        "this version of the engine does not know the model's architecture",
        "install a newer version of the engine, or try another engine for {shard}",
        retry=False,
    ),
    Rule(
        "D18",
        "M",
        _C(
            r"contains custom code which must be executed|trust_remote_code=True"
            r"|requires you to execute the (configuration|tokenizer) file"
        ),
        "the model brings Python code of its own, which the engine runs only when allowed",
        "read that code, then set trust-remote-code = true in [shard.args] of {shard}",
        retry=False,
    ),
    Rule(
        "D19",
        "M",
        _C(r"Unknown quantization method|argument --quantization: invalid choice|Invalid quantization method"),
        "this engine has no such quantization",
        "set quantization in {shard} to one that the message lists, or leave it out",
        retry=False,
    ),
    Rule(
        "D20",
        "S",
        _C(r"is not supported for the current GPU\. ?Minimum capability: (\d+)\. ?Current capability: (\d+)"),
        "the GPU is too old for this quantization",
        "take another quantization or a newer class of GPU for {shard}",
        retry=False,
        exact=_C(r"Minimum capability: (?P<least>\d+)\. ?Current capability: (?P<has>\d+)"),
        exact_cause="this quantization needs compute capability {least}, the GPU has {has} (tenths)",
    ),
    Rule(
        "D21",
        "S",
        _C(r"Quantization method specified in the model config .* does not match"),
        "quantization contradicts what the checkpoint says about itself",
        "remove quantization from {shard}",
        retry=False,
    ),
    Rule(
        "D22",
        "M, B",
        _C(r"Found no NVIDIA driver|Failed to infer device type|CUDA driver initialization failed"),
        "the engine finds no usable GPU driver",
        "run nvidia-smi as llmgw's user; check the driver, the container's runtime and the rights on /dev/nvidia*; a "
        "CUDA build cannot run on the CPU",
    ),
    Rule(
        "D23",
        "B",
        _C(r"NVIDIA driver on your system is too old|driver version is insufficient"),
        "the GPU driver is too old for this build of the engine",
        "update the driver, or install a build of the engine for an older CUDA",
        retry=False,
    ),
    Rule(
        "D24",
        "S",
        _C(r"libcuda\.so\.1: cannot open shared object file|libcudart\.so\.\d+: cannot open"),
        "the driver's libraries are not visible to the engine",
        "check that the driver is installed, that a container gets it, and LD_LIBRARY_PATH in env of {shard}",
        retry=False,
    ),
    Rule(
        "D25",
        "U",
        _C(r"no kernel image is available for execution on the device"),
        "this build of the engine has no code for this generation of GPU",
        "install a build for it, or use another class of GPU for {shard}",
        retry=False,
    ),
    Rule(
        "D26",
        "B, S",
        _C(r"ncclUnhandledCudaError|ncclSystemError|ncclInternalError|ncclRemoteError|NCCL error( in)?:"),
        "the GPUs cannot talk to each other (NCCL)",
        'set NCCL_DEBUG = "INFO" in env of {shard} and start it again; check the links, the choice of fabric and the '
        "size of /dev/shm",
    ),
    Rule(
        "D27",
        "B",
        _C(r"Bootstrap : no socket interface found|Call to ibv_modify_qp failed|NET/IB : .*incompatible"),
        "NCCL chose a network adapter that does not lead to the others",
        "set fabric in [node] to the adapters that do",
    ),
    Rule(
        "D28",
        "B",
        _C(
            r"Watchdog caught collective operation timeout|Timed out after \d+ seconds waiting for clients"
            r"|DistStoreError"
        ),
        "one of the ranks never came, or hangs",
        "look at the output of the other ranks, and for a firewall on node.rendezvous_ports",
    ),
    Rule(
        "D29",
        "S",
        _C(r"Timed out waiting for engine core processes to start"),
        "loading took longer than the VLLM_ENGINE_READY_TIMEOUT_S that env sets",
        "remove VLLM_ENGINE_READY_TIMEOUT_S from env of {shard}; llmgw sets it to 7 days and limits by load_timeout",
    ),
    Rule(
        "D30",
        "B",
        _C(
            r"unable to (open|allocate|resize|mmap).*shared memory|Bus error|No space left on device.*/dev/shm"
            r"|/dev/shm/nccl-"
        ),
        "/dev/shm is too small, or full of what killed engines left behind",
        "see with df and ls what is in /dev/shm; enlarge it (a container: --shm-size) or remove leftovers nobody uses",
    ),
    Rule(
        "D31",
        "U",
        _C(r"Errno 28\] No space left on device"),
        "the disk is full",
        "make room where caches and downloads go (HF_HOME, VLLM_CACHE_ROOT, TMPDIR)",
    ),
    Rule(
        "D32",
        "U",
        _C(r"Permission denied: '([^']+)'|Read-only file system: '([^']+)'|Errno (13|30)\]"),
        "the engine may not write where it wants to",
        "set its cache or download folder in env of {shard} (HF_HOME, VLLM_CACHE_ROOT), or correct the owner",
        retry=False,
        exact=_C(r"(?:Permission denied|Read-only file system): '(?P<path>[^']+)'"),
        exact_cause="the engine may not use {path}",
        exact_remedy="correct the owner of {path}, or set another folder in env of {shard} (HF_HOME, VLLM_CACHE_ROOT)",
    ),
    Rule(
        "D33",
        "M",
        _C(r"VLLM_PORT '.*' appears to be a URI"),
        "VLLM_PORT holds a URI, as a Kubernetes service called vllm sets it",
        "remove VLLM_PORT from env of {shard}; llmgw drops the inherited one",
        retry=False,
    ),
    Rule(
        "D34",
        "M",
        _C(r"unrecognized arguments: (.*)|invalid argument: (.*)|error: argument|error while handling argument"),
        "this version of the engine does not know an option, or not its value",
        "correct args and extra_args of {shard}, or install the version that has it",
        retry=False,
        exact=_C(
            r"(?:unrecognized arguments: |invalid argument: |error: argument |handling argument )(?P<words>\S.{0,160})"
        ),
        exact_cause="this version of the engine does not take: {words}",
    ),
)


@frozen
class Ending:
    """What an exit itself says when no rule matches. `when` is for the documentation; texts as in `Rule`, and
    `{how}`, `{signal}` and `{said}` besides."""

    code: str
    when: str
    cause: str
    remedy: str
    retry: bool = True


_SEE_LOGS = "read its output with `llmgw logs`"
_MORE_MEMORY = "see who uses the memory; give the machine or llmgw's unit more, or run fewer shards"

ENDINGS: Mapping[str, Ending] = {
    ending.code: ending
    for ending in (
        Ending(
            "oom",
            "the kernel's count of out-of-memory kills rose (the shard's cgroup, else the whole machine)",
            "out of memory: the kernel killed it",
            _MORE_MEMORY,
        ),
        Ending(
            "no-model",
            "llama-server says that it failed to load the model, and that the file is to blame",
            "the model cannot be loaded: the file is incomplete, no GGUF file, or of a model that it does not know",
            "check weights of {shard}",
            retry=False,
        ),
        Ending(
            "model-not-read",
            "llama-server says that it failed to load the model, but nothing that proves a wrong file",
            "the model cannot be loaded: its disk may be away, or the file is missing or damaged",
            "check weights of {shard} and the disk that they lie on",
        ),
        Ending(
            "child-failed",
            "SGLang's leader reports a SIGQUIT from a child; it then ends itself with SIGKILL, which is no proof of "
            "missing memory",
            "a process of the engine failed, so it ended itself",
            _SEE_LOGS,
        ),
        Ending(
            "oom-likely",
            "SIGKILL, and either several shards ended at once or no count can be read",
            "killed by SIGKILL, likely out of memory ({how})",
            f"look for oom-kill in the kernel's log; {_MORE_MEMORY}",
        ),
        Ending(
            "killed",
            "SIGKILL, and the kernel's count did not rise",
            "killed by SIGKILL, and not for lack of memory: the kernel's count did not rise",
            "somebody, or the engine itself, sent the signal; read its output with `llmgw logs`",
        ),
        Ending(
            "illegal-instruction",
            "SIGILL",
            "it was built for another CPU: it used an instruction that this one lacks (SIGILL)",
            "build it on this machine, or install a build for an older CPU",
            retry=False,
        ),
        Ending(
            "native-crash",
            "SIGSEGV, SIGABRT, SIGBUS or SIGFPE",
            "it crashed in native code ({signal})",
            "another version of the engine or of the driver may help; the lines are the last it said",
        ),
        Ending(
            "ended-by-signal",
            "any other signal",
            "it was ended by {signal}, which llmgw did not send",
            "find out who sent it",
        ),
        Ending(
            "not-executable",
            "exit code 126 or 127",
            "the program, or one that it starts, {how}",
            "check command of {shard}: the program, its #! line and its rights",
            retry=False,
        ),
        Ending(
            "engine-died",
            'exit code 0 of a server that nobody asked to end (not `engine = "command"`)',
            "{how} (exit code 0)",
            _SEE_LOGS,
        ),
        Ending(
            "bad-arguments",
            "exit code 2 in the first minute, before it was ready",
            "it refused its arguments (exit code 2)",
            "correct command, args and extra_args of {shard}",
            retry=False,
        ),
        Ending("ended", "everything else", "it ended by itself ({how}){said}", _SEE_LOGS),
    )
}
"""In the order in which they are tried."""

MARKS = (
    "memory", "rror", "EADDRINUSE", "greater than", "divisible", "assert ", "larger than", "invalid", "Invalid",
    "rrno ", "ouldn't", "Couldn't", "an't load", "not available", "must be", "gated", "Not Found", "not a valid",
    "disabled", "offline", "annot ", "not supported", "recognize", "model type", "custom code", "trust_remote",
    "requires you", "Unknown", "does not match", "no NVIDIA", "ailed", "too old", "insufficient", "no kernel",
    "Bootstrap", "NET/IB", "caught", "Timed out", "nable to", "No space", "/dev/shm", "denied", "Read-only",
    "appears", "handling", "xception", "terminate called", "Segmentation", "died",
    "Received sigquit", "SIGQUIT", "encountered",
)  # fmt: skip
"""Pieces of which every line that a rule can match has at least one: a cheap test before the dear ones. "EADDRINUSE"
and the texts of D9 that ignore case are taken as engines write them."""
