# ruff: noqa: E501  (an engine's message stays one line)
"""The failed starts: for each cause the lines an engine prints about it, when, where, and the exit code.

Named d1 to d34 like the supervisor's rules of diagnosis, plus ends that print no cause at all. Wordings differ
between engines; where an engine has one of its own it is listed for it.
"""

IMPORTS, CONFIG, LOADING, LATE = 0.15, 0.3, 0.75, 0.9
"""Moments, as fractions of the whole load."""


class Failure:
    """One way to fail. `place`: `usage` (arguments), `leader`, or `child` (an engine process)."""

    def __init__(
        self,
        title: str,
        text: str,
        *,
        place: str = "child",
        moment: float = LOADING,
        sglang: str = "",
        llamacpp: str = "",
        code: int | None = None,
    ) -> None:
        self.title = title
        self.place = place
        self.moment = moment
        self._texts = {"vllm": text, "sglang": sglang or text, "llamacpp": llamacpp or text}
        self._code = code

    def lines(self, engine: str) -> list[str]:
        text = self._texts[engine]
        return text.split("\n") if text else []

    def exit_code(self, engine: str, place: str) -> int:
        """Of the leader: measured for the three engines."""
        if self._code is not None:
            return self._code
        if self.place == "usage":
            return 1 if engine == "llamacpp" else 2
        return -9 if engine == "sglang" and place == "child" else 1


TABLE: dict[str, Failure] = {
    "d1": Failure(
        "GPU memory ran out",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of "
        "79.19 GiB of which 1.06 GiB is free.",
        llamacpp="ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: CUDA out of memory. Tried to allocate 9.2 GiB",
    ),
    "d2": Failure(
        "another process holds the GPU memory",
        "ValueError: Free memory on device cuda:0 (9.31/79.19 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 71.27 GiB).",
        moment=0.5,
    ),
    "d3": Failure(
        "the weights leave no room for the cache",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        moment=LATE,
    ),
    "d4": Failure(
        "the KV cache does not fit",
        "ValueError: To serve at least one request with the model's max seq len (131072), 16.0 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (6.5 GiB). Based on the available memory, the "
        "estimated maximum model length is 53248.",
        moment=LATE,
    ),
    "d5": Failure(
        "no room for the KV cache under the memory fraction",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.05",
        sglang="ValueError: weights leave no GPU memory for the KV cache under --mem-fraction-static=0.05; at least "
        "0.21 is needed",
    ),
    "d6": Failure(
        "context longer than the model's",
        "ValueError: User-specified max_model_len (99999) is greater than the derived max_model_len "
        "(max_position_embeddings=2048).",
        sglang="ValueError: User-specified context_length (99999) is greater than the derived context_length (2048).",
        place="leader",
        moment=CONFIG,
    ),
    "d7": Failure(
        "heads not divisible by the tensor parallel size",
        "ValueError: Total number of attention heads (40) must be divisible by tensor parallel size (3).",
        sglang="    assert self.total_num_heads % tp_size == 0\nAssertionError",
        place="leader",
        moment=CONFIG,
    ),
    "d8": Failure(
        "fewer GPUs visible than needed",
        "ValueError: World size (8) is larger than the number of available GPUs (4) in this node.",
        sglang="torch.AcceleratorError: CUDA error: invalid device ordinal",
        place="leader",
        moment=CONFIG,
    ),
    "d9": Failure(
        "the port is taken",
        "OSError: [Errno 98] Address already in use",
        sglang="ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
        llamacpp="srv  start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080",
        place="leader",
        moment=IMPORTS,
    ),
    "d10": Failure(
        "the host is no address of this machine",
        "OSError: [Errno 99] Cannot assign requested address",
        place="leader",
        moment=IMPORTS,
    ),
    "d11": Failure(
        "the model path does not exist",
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
        "'namespace/repo_name': '/models/not-there'.",
        place="leader",
        moment=CONFIG,
    ),
    "d12": Failure(
        "gated model",
        "OSError: You are trying to access a gated repo.\nMake sure to have access to it. 401 Client Error.",
        place="leader",
        moment=CONFIG,
    ),
    "d13": Failure(
        "no such model",
        "OSError: nobody/no-such-model is not a local folder and is not a valid model identifier listed on the hub",
        place="leader",
        moment=CONFIG,
    ),
    "d14": Failure(
        "the hub cannot be reached",
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.",
        place="leader",
        moment=CONFIG,
    ),
    "d15": Failure(
        "tokenizer files are missing",
        "OSError: Can't load tokenizer for '/models/half'. Make sure all its files are there.",
        place="leader",
        moment=CONFIG,
    ),
    "d16": Failure(
        "a folder without weights",
        "RuntimeError: Cannot find any model weights with `/models/half`",
    ),
    "d17": Failure(
        "unknown architecture",
        "ValueError: Model architectures ['NovelForCausalLM'] are not supported for now. Supported architectures: "
        "['LlamaForCausalLM']",
        sglang="ValueError: The checkpoint you are trying to load has model type `novel` but Transformers does not "
        "recognize this architecture.",
        place="leader",
        moment=CONFIG,
    ),
    "d18": Failure(
        "the model brings its own code",
        "ValueError: The repository /models/custom contains custom code which must be executed to correctly load the "
        "model. Pass the argument `trust_remote_code=True` to allow it.",
        place="leader",
        moment=CONFIG,
    ),
    "d19": Failure(
        "unknown quantization",
        "vllm: error: argument --quantization: invalid choice: 'q3' (choose from 'awq', 'fp8', 'gptq')",
        sglang="launch_server.py: error: argument --quantization: invalid choice: 'q3' (choose from 'awq', 'fp8', 'gptq')",
        llamacpp="Invalid quantization method: q3",
        place="usage",
        moment=IMPORTS,
    ),
    "d20": Failure(
        "the GPU is too old for the quantization",
        "ValueError: The quantization method modelopt_fp4 is not supported for the current GPU. Minimum capability: "
        "89. Current capability: 80.",
        moment=CONFIG,
    ),
    "d21": Failure(
        "quantization contradicts the checkpoint",
        "ValueError: Quantization method specified in the model config (awq) does not match the quantization method "
        "specified in the `quantization` argument (fp8).",
        place="leader",
        moment=CONFIG,
    ),
    "d22": Failure(
        "no usable GPU driver",
        "RuntimeError: Failed to infer device type, please set the environment variable to see more",
        sglang="RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        place="leader",
        moment=IMPORTS,
    ),
    "d23": Failure(
        "the driver is too old",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12040).",
        moment=CONFIG,
    ),
    "d24": Failure(
        "driver libraries are not visible",
        "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
        place="leader",
        moment=IMPORTS,
    ),
    "d25": Failure(
        "no code for this GPU",
        "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
    ),
    "d26": Failure(
        "GPUs cannot talk",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error, ncclSystemError",
        moment=0.5,
    ),
    "d27": Failure(
        "NCCL chose a wrong adapter",
        "node1:77:77 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",
        moment=0.5,
    ),
    "d28": Failure(
        "a rank is missing",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        moment=0.5,
    ),
    "d29": Failure(
        "vLLM's own limit for loading",
        "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow weight loading.",
        place="leader",
        moment=LATE,
    ),
    "d30": Failure(
        "/dev/shm too small",
        "RuntimeError: unable to open shared memory object </torch_77_1> in read-write mode: No space left on device (28)",
        moment=0.5,
    ),
    "d31": Failure("disk full", "OSError: [Errno 28] No space left on device", moment=CONFIG),
    "d32": Failure(
        "a path cannot be written",
        "PermissionError: [Errno 13] Permission denied: '/var/cache/models/hub'",
        place="leader",
        moment=CONFIG,
    ),
    "d33": Failure(
        "VLLM_PORT from Kubernetes",
        "ValueError: VLLM_PORT 'tcp://10.0.0.7:8000' appears to be a URI. This may be caused by a Kubernetes service discovery issue.",
        moment=LATE,
    ),
    "d34": Failure(
        "unknown option",
        "vllm: error: unrecognized arguments: --no-such-option",
        sglang="launch_server.py: error: unrecognized arguments: --no-such-option",
        llamacpp="error: invalid argument: --no-such-option",
        place="usage",
        moment=IMPORTS,
    ),
    "llama-load": Failure(
        "the file is missing or no GGUF",
        "OSError: Error no file named model.safetensors found in directory",
        llamacpp="gguf_init_from_file: failed to open GGUF file\nllama_model_load: error loading model: failed to load model",
        place="leader",
        moment=0.04,
    ),
    "oom-kill": Failure("SIGKILL out of nowhere", "", place="leader", code=-9),
    "segfault": Failure(
        "crash in native code",
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n"
        '  File "model_runner.py", line 77 in load_model',
        place="leader",
        code=-11,
    ),
    "abort": Failure(
        "abort in native code",
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  kernel launch failed",
        place="leader",
        code=-6,
    ),
    "exit-0": Failure("ends with 0 while loading", "", place="leader", code=0),
    "exit-7": Failure("ends with 7 and says nothing", "", place="leader", code=7),
}


def find(name: str) -> Failure:
    """Raises KeyError for an unknown name."""
    return TABLE[name.lower()]


def list_text() -> str:
    return "".join(f"{name:<12}{failure.title}\n" for name, failure in TABLE.items())


def traceback_lines(cause: list[str], frames: int, package: str) -> list[str]:
    """A Python traceback of `2 * frames + 1` lines and then the cause; indented source lines as Python prints them."""
    lines = ["Traceback (most recent call last):"]
    for number in range(frames):
        lines.append(
            f'  File "/opt/engine/lib/python3.12/site-packages/{package}/layer_{number}.py", line {70 + number}, in step_{number}'
        )
        lines.append(f"    return self._step_{number + 1}(*args, **kwargs)")
    return lines + cause
