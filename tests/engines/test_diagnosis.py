from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.shard import EngineKind
from llmgw.engines.diagnosis import EVIDENCE_LINES, EVIDENCE_WIDTH, ExitFacts, diagnose, is_error_line
from llmgw.engines.rules import ENDINGS, RULES
from llmgw.fake.failures import TABLE

V, S, L, C = EngineKind.VLLM, EngineKind.SGLANG, EngineKind.LLAMACPP, EngineKind.COMMAND

WORKER = "(Worker_TP1 pid=611) ERROR 11-30 10:00:05 [multiproc.py:88] "
CORE = "(EngineCore pid=402) ERROR 11-30 10:00:06 [core.py:1099] "
SERVER = "(APIServer pid=301) ERROR 11-30 10:00:07 [launcher.py:12] "
INFO = "(APIServer pid=301) INFO 11-30 10:00:01 [config.py:7] "
WARNING = "(APIServer pid=301) WARNING 11-30 10:00:01 [system.py:7] "
SGL = "[2026-11-30 10:00:05 TP0] "
SGL_LEADER = "[2026-11-30 10:00:05] "

SAMPLES: Sequence[tuple[str, EngineKind, str, str]] = (
    ("D1", V, WORKER + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 3 is", "1.50 GiB"),
    ("D1", S, SGL + "torch.OutOfMemoryError: the device has no more", "ran out"),
    ("D2", V, CORE + "ValueError: Free memory on device cuda:1 (3.2/79.1 GiB) on startup is less than desired GPU "
     "memory utilization (0.9, 71.2 GiB).", "3.2 of 79.1 GiB"),
    ("D3", V, CORE + "ValueError: No available memory for the cache blocks. Increase something.", "nothing is left"),
    ("D4", V, CORE + "ValueError: 12.0 GiB KV cache is needed, which is larger than the available KV cache memory (3.0 "
     "GiB); the estimated maximum model length is 8192.", "8192 tokens"),
    ("D4", V, CORE + "KV cache is needed, which is larger than the available KV cache memory", "longest context"),
    ("D5", S, SGL + "ValueError: the weights leave no GPU memory for the KV cache under --mem-fraction-static=0.1",
     "mem-fraction-static"),
    ("D5", S, SGL + "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "nothing for"),
    ("D6", V, "pydantic ValidationError: max_model_len (70000) is greater than the derived max_model_len "
     "(max_position_embeddings=4096 or model_max_length=None)", "supports 4096 tokens of context, asked for are 70000"),
    ("D6", S, "ValueError: context_length (9000) is greater than the derived context_length (2048).", "supports 2048"),
    ("D7", V, SERVER + "ValueError: 40 attention heads (40) must be divisible by tensor parallel size (3).",
     "40 attention heads cannot be divided by tensor_parallel = 3"),
    ("D7", S, "    assert self.total_num_heads % tp_size == 0", "attention heads"),
    ("D8", V, SERVER + "ValueError: World size (4) is larger than the number of available GPUs (2) here", "sees 2"),
    ("D8", S, SGL + "torch.AcceleratorError: CUDA error: invalid device ordinal", "fewer GPUs"),
    ("D9", V, "OSError: [Errno 98] Address already in use", "in use"),
    ("D9", S, "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8101)", "in use"),
    ("D9", L, "0.00.090.100 E srv  start: couldn't bind HTTP server socket, hostname: 127.0.0.1", "in use"),
    ("D9", S, SGL_LEADER + "RuntimeError: port 29601 is not available in 30 seconds", "in use"),
    ("D10", V, "OSError: [Errno 99] Cannot assign requested address", "no address of this machine"),
    ("D11", V, "HFValidationError: Repo id must be in the form 'a' or 'b/a': '/models/gone'.", "/models/gone does"),
    ("D12", S, "OSError: You are trying to access a gated repo.", "licence"),
    ("D12", V, "requests.HTTPError: 401 Client Error.", "licence"),
    ("D13", V, "OSError: nobody/none is not a local folder and is not a valid model identifier", "no model of"),
    ("D13", S, "Repository Not Found for url: https://hub.example/x.", "no model"),
    ("D14", V, "OSError: We couldn't connect to 'https://huggingface.co' to load the files", "cannot reach"),
    ("D14", S, "huggingface_hub.errors.LocalEntryNotFoundError: nothing here", "cannot reach"),
    ("D15", V, "OSError: Can't load tokenizer for '/models/half'.", "tokenizer"),
    ("D16", V, CORE + "RuntimeError: Cannot find any model weights with `/models/half`", "incomplete"),
    ("D16", S, "OSError: Error no file named model.safetensors found in directory /models/half.", "incomplete"),
    ("D17", V, "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.", "architecture"),
    ("D17", S, "ValueError: The checkpoint you are trying to load has model type `foo` but", "architecture"),
    ("D18", V, "ValueError: The repository x contains custom code which must be executed", "code of its own"),
    ("D19", V, "vllm serve: error: argument --quantization: invalid choice: 'q3'", "no such quantization"),
    ("D19", S, "ValueError: Unknown quantization method: q3.", "no such quantization"),
    ("D20", V, CORE + "ValueError: The method x is not supported for the current GPU. Minimum capability: 89. Current "
     "capability: 80.", "needs compute capability 89"),
    ("D21", V, "ValueError: Quantization method specified in the model config (awq) does not match the argument (fp8).",
     "contradicts"),
    ("D22", V, "RuntimeError: Failed to infer device type", "no usable GPU driver"),
    ("D22", S, "RuntimeError: Found no NVIDIA driver on your system.", "no usable GPU driver"),
    ("D23", S, "RuntimeError: The NVIDIA driver on your system is too old (found version 12020).", "too old"),
    ("D24", V, "ImportError: libcuda.so.1: cannot open shared object file: No such file", "libraries"),
    ("D25", V, WORKER + "CUDA error: no kernel image is available for execution on the device", "no code for"),
    ("D26", V, WORKER + "torch.distributed.DistBackendError: NCCL error in: x.cpp:77, ncclSystemError", "NCCL"),
    ("D27", S, SGL + "host:1:1 [0] NCCL WARN Bootstrap : no socket interface found", "adapter"),
    ("D28", S, SGL + "[rank1] Watchdog caught collective operation timeout: WorkNCCL", "ranks"),
    ("D29", V, "TimeoutError: Timed out waiting for engine core processes to start.", "VLLM_ENGINE_READY_TIMEOUT_S"),
    ("D30", V, WORKER + "RuntimeError: unable to mmap 1024 bytes from file: shared memory is full", "/dev/shm"),
    ("D31", V, "OSError: [Errno 28] No space left on device", "disk is full"),
    ("D32", S, "PermissionError: [Errno 13] Permission denied: '/var/cache/hub'", "/var/cache/hub"),
    ("D33", V, CORE + "ValueError: VLLM_PORT 'tcp://10.0.0.1:8000' appears to be a URI.", "Kubernetes"),
    ("D34", V, "vllm: error: unrecognized arguments: --frobnicate", "does not take: --frobnicate"),
    ("D34", L, 'error while handling argument "--n-gpu-layers": stoi', 'does not take: "--n-gpu-layers": stoi'),
    ("D34", V, "vllm serve: error: argument --port: invalid int value: 'x'", "take: --port: invalid int value"),
    ("D34", L, "error: invalid argument: --frobnicate", "does not take: --frobnicate"),
)  # fmt: skip

NO_RETRY = {
    "D3", "D4", "D5", "D6", "D7", "D8", "D11", "D12", "D13", "D15", "D16", "D17", "D18", "D19", "D20", "D21", "D23",
    "D24", "D25", "D32", "D33", "D34",
}  # fmt: skip

NOISE = [
    INFO + "Resolved architecture: LlamaForCausalLM",
    WARNING + "Found ulimit of 1024: `OSError: [Errno 24] Too many open files` and [Errno 28] No space left on device",
    "[rank0]: nanobind: leaked 36 instances!",
    "(EngineCore pid=402) INFO 11-30 10:00:04 [x.py:3] trust_remote_code=True, torch.OutOfMemoryError is retried",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    "/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: 1 leaked shm object",
]

GOOD_RUNS: dict[str, tuple[EngineKind, list[str]]] = {
    "vllm start": (
        V,
        [
            *NOISE[:4],
            "(EngineCore pid=402) INFO 11-30 10:00:05 [m.py:1] Starting to load model /models/x...",
            "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  9.1it/s]",
            "(APIServer pid=301) INFO:     Application startup complete.",
        ],
    ),
    "sglang start with all its settings printed": (
        S,
        [
            SGL_LEADER + "server_args=ServerArgs(model_path='/m', trust_remote_code=True, api_key='k3y')" + "x" * 19000,
            SGL + "Load weight begin. avail mem=70.00 GB",
            SGL + "max_total_num_tokens=16384, available_gpu_mem=3.1 GB",
            SGL_LEADER + "INFO:     127.0.0.1:5 - \"GET /ready HTTP/1.1\" 200 OK",
            SGL_LEADER + "The server is fired up and ready to roll!",
        ],
    ),
    "llama-server start": (
        L,
        [
            "0.00.013.444 I srv  init: using 1 thread",
            "0.00.100.000 W srv  no key: error: argument parsing allows all origins",
            "2.30.100.000 I srv  model loaded",
        ],
    ),
    "vllm clean drain": (
        V,
        [
            "(APIServer pid=301) INFO 11-30 10:10:00 [l.py:1] [shutdown] draining",
            "(EngineCore pid=402) INFO 11-30 10:10:01 [core.py:9] engine stopped",
        ],
    ),
}  # fmt: skip


def facts(engine: EngineKind, lines: Sequence[str], code: int | None = 1, **more: object) -> ExitFacts:
    return ExitFacts(engine, code, lines, name="chat", oom_killed=more.pop("oom_killed", False), **more)  # type: ignore[arg-type]


def test_every_rule_has_a_sample() -> None:
    assert {code for code, *_ in SAMPLES} == {rule.code for rule in RULES} == {f"D{i}" for i in range(1, 35)}


@pytest.mark.parametrize(("code", "engine", "line", "said"), SAMPLES)
def test_a_cause_is_found_among_noise_and_proved_by_its_line(
    code: str, engine: EngineKind, line: str, said: str
) -> None:
    reason = diagnose(facts(engine, [*NOISE[:4], line, *NOISE[4:]] if engine is V else [line]))
    assert reason.code == code
    assert said in reason.cause
    assert reason.remedy
    assert line.endswith(reason.evidence[0])
    assert "{" not in reason.cause + reason.remedy.replace('{ HF_TOKEN = { file = "…" } }', "")


@pytest.mark.parametrize(("code", "engine", "line", "said"), SAMPLES)
def test_a_line_that_proves_a_cause_is_pinned(code: str, engine: EngineKind, line: str, said: str) -> None:
    assert is_error_line(engine, line)


def test_causes_that_another_attempt_cannot_cure_are_not_tried_again() -> None:
    assert {rule.code for rule in RULES if not rule.retry} == NO_RETRY
    assert {code for code, ending in ENDINGS.items() if not ending.retry} == {
        "no-model", "illegal-instruction",
        "not-executable", "bad-arguments"
    }  # fmt: skip


@pytest.mark.parametrize("name", GOOD_RUNS)
def test_the_output_of_a_good_run_has_no_cause_and_pins_nothing(name: str) -> None:
    engine, lines = GOOD_RUNS[name]
    assert diagnose(facts(engine, lines)).code == "ended"
    assert not [line for line in lines if is_error_line(engine, line)]


def test_the_remedy_names_the_shard_and_the_key_to_set() -> None:
    line = next(line for code, _, line, _ in SAMPLES if code == "D4")
    remedy = diagnose(facts(V, [line])).remedy or ""
    assert 'set max_model_len to at most 8192 in [[shard]] "chat"' in remedy
    assert "gpu-memory-utilization" in remedy


def test_the_memory_option_is_the_engines_own() -> None:
    assert "mem-fraction-static" in (diagnose(facts(S, ["torch.OutOfMemoryError: x"])).remedy or "")


def test_the_first_rule_of_the_table_wins_wherever_its_line_stands() -> None:
    lines = ["OSError: [Errno 28] No space left on device", "torch.OutOfMemoryError: CUDA out of memory."]
    assert diagnose(facts(V, lines)).code == diagnose(facts(V, lines[::-1])).code == "D1"


def test_of_several_processes_the_worker_is_shown_since_causes_bubble_up() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB"
    lines = [WORKER + text.format(1), CORE + text.format(2), SERVER + text.format(3)]
    assert diagnose(facts(V, lines)).evidence[0] == text.format(1)


def test_a_source_line_of_a_traceback_is_not_shown_where_the_error_itself_is_there() -> None:
    error = "OSError: We couldn't connect to 'https://huggingface.co' to load the files"
    lines = [
        "Traceback (most recent call last):",
        error,
        "    raise OSError(\"We couldn't connect to 'https://huggingface.co'\")",
    ]
    assert diagnose(facts(V, lines)).evidence == (error,)


def test_a_bar_that_overwrote_itself_counts_as_its_last_piece() -> None:
    assert diagnose(facts(V, ["torch.OutOfMemoryError: old\rall fine now"])).code == "ended"


def test_a_consequence_is_never_shown_as_the_cause() -> None:
    lines = [CORE + "EngineCore failed", "RuntimeError: Engine core initialization failed. See root cause above."]
    reason = diagnose(facts(V, lines))
    assert "See root cause" not in reason.cause + "".join(reason.evidence)


def test_the_holder_of_the_port_is_named() -> None:
    reason = diagnose(facts(V, ["OSError: [Errno 98] Address already in use"], port_holder="pid 4411 (python)"))
    assert reason.cause == "a port it needs is in use: pid 4411 (python) holds it"
    assert reason.retry


def test_a_secret_is_never_part_of_the_evidence() -> None:
    reason = diagnose(facts(V, ["ValueError: unrecognized arguments: --api-key sk-1234"], secrets=("sk-1234",)))
    assert "sk-1234" not in repr(reason)
    assert "***" in reason.evidence[0]


def test_evidence_is_bounded_in_lines_and_width() -> None:
    lines = [f"torch.OutOfMemoryError: number {i} " + "y" * 3000 for i in range(50)]
    evidence = diagnose(facts(V, lines)).evidence
    assert len(evidence) == EVIDENCE_LINES
    assert all(len(line) <= EVIDENCE_WIDTH for line in evidence)


@pytest.mark.parametrize(
    ("code", "more", "expected"),
    [
        (-9, {"oom_killed": True}, "oom"),
        (137, {"oom_killed": True}, "oom"),
        (-9, {"oom_killed": None}, "oom-likely"),
        (-9, {"oom_killed": False, "several_died": True}, "oom-likely"),
        (-9, {"oom_killed": False}, "killed"),
        (-11, {}, "native-crash"),
        (-4, {}, "illegal-instruction"),
        (134, {}, "native-crash"),
        (-15, {}, "ended-by-signal"),
        (-64, {}, "ended-by-signal"),
        (127, {}, "not-executable"),
        (126, {}, "not-executable"),
        (0, {"ready": True}, "engine-died"),
        (0, {}, "engine-died"),
        (2, {"seconds_alive": 9.0}, "bad-arguments"),
        (2, {"seconds_alive": 900.0}, "ended"),
        (2, {"seconds_alive": 9.0, "ready": True}, "ended"),
        (1, {}, "ended"),
        (None, {}, "ended"),
    ],
)
def test_an_exit_without_a_known_line_is_explained_by_itself(
    code: int | None, more: dict[str, object], expected: str
) -> None:
    assert diagnose(facts(V, ["nothing to see"], code, **more)).code == expected


def test_sigkill_is_called_out_of_memory_only_with_proof_and_likely_otherwise() -> None:
    assert diagnose(facts(V, [], -9, oom_killed=True)).cause == "out of memory: the kernel killed it"
    assert "likely" in diagnose(facts(V, [], -9, oom_killed=None)).cause
    assert "not for lack of memory" in diagnose(facts(V, [], -9, oom_killed=False)).cause


def test_sglangs_own_sigkill_after_a_failed_child_is_not_called_out_of_memory() -> None:
    lines = [
        SGL + "Scheduler hit an exception: Traceback (most recent call last):",
        SGL + "AttributeError: 'NoneType' object has no attribute 'foo'",
        SGL_LEADER + "Received sigquit from a child process. It usually means the child failed.",
    ]
    reason = diagnose(facts(S, lines, -9, oom_killed=None))
    assert reason.code == "child-failed"
    assert reason.evidence == ("AttributeError: 'NoneType' object has no attribute 'foo'",)


def test_exit_zero_of_a_server_is_the_death_of_its_engine() -> None:
    line = "(EngineCore pid=402) ERROR 11-30 10:00:06 [core.py:1] EngineCore encountered a fatal error."
    reason = diagnose(facts(V, [line, "clean"], 0, ready=True))
    assert reason.code == "engine-died"
    assert reason.evidence == ("EngineCore encountered a fatal error.",)


def test_a_crash_in_native_code_shows_the_block_of_the_fault_handler() -> None:
    lines = ["before", "Fatal Python error: Segmentation fault", "Thread 0x1:", '  File "a.py", line 1']
    reason = diagnose(facts(V, lines, -11))
    assert reason.cause == "it crashed in native code (SIGSEGV)"
    assert reason.evidence == ("Fatal Python error: Segmentation fault", "Thread 0x1:", 'File "a.py", line 1')


LLAMA_FAILED = "0.00.100.1 E srv  load_model: failed to load model, '/models/none.gguf'"


@pytest.mark.parametrize(
    "line",
    [
        "0.00.100.0 E gguf_init_from_file_impl: invalid magic characters: '<!DO', expected 'GGUF'",
        "0.00.100.0 E llama_model_load: error loading model: unknown model architecture: 'none'",
        "0.00.100.0 E llama_model_load: error loading model: tensor 'output.weight' data is not within the file "
        "bounds, model is corrupted or incomplete",
    ],
)
def test_llama_server_with_a_wrong_file_is_not_tried_again(line: str) -> None:
    reason = diagnose(facts(L, [line, LLAMA_FAILED]))
    assert (reason.code, reason.retry) == ("no-model", False)
    assert 'weights of [[shard]] "chat"' in (reason.remedy or "")
    assert reason.evidence[0] in line


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["0.00.100.0 E gguf_init_from_file: failed to open GGUF file '/models/a.gguf' (Stale file handle)"],
        ["0.00.100.0 E llama_model_load: error loading model: read error: Input/output error"],
    ],
)
def test_llama_server_that_cannot_read_its_file_is_tried_again(lines: list[str]) -> None:
    reason = diagnose(facts(L, [*lines, LLAMA_FAILED]))
    assert (reason.code, reason.retry) == ("model-not-read", True)
    assert "disk" in (reason.remedy or "")


def test_a_commands_last_line_is_its_reason_and_engine_rules_do_not_apply() -> None:
    reason = diagnose(facts(C, ["torch.OutOfMemoryError: x", "bye: the queue is gone"], 3))
    assert reason.cause == "it ended by itself (exit code 3): bye: the queue is gone"


def test_an_adopted_engines_unknown_exit_code_is_said_and_not_invented() -> None:
    assert "not known" in diagnose(facts(V, [], None)).cause


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (V, CORE + "Worker proc VllmWorker-0 died unexpectedly, shutting down executor."),
        (V, "terminate called after throwing an instance of 'std::bad_alloc'"),
        (V, "Segmentation fault (core dumped)"),
        (V, WORKER + "UnforeseenException: no rule knows it"),
        (S, SGL_LEADER + "Received sigquit from a child process. It usually means the child failed."),
        (L, "0.00.018.977 E common_init: failed to load model '/x.gguf'"),
    ],
)
def test_lines_that_only_an_ending_needs_are_pinned_too(engine: EngineKind, line: str) -> None:
    assert is_error_line(engine, line)


@pytest.mark.parametrize(
    "line", ["RuntimeError: failed. See root cause above.", INFO + "torch.OutOfMemoryError: x", "hi"]
)
def test_consequences_and_harmless_levels_are_not_pinned(line: str) -> None:
    assert not is_error_line(V, line)


def test_marks_cover_every_rule_so_that_the_cheap_test_loses_nothing() -> None:
    lost = [line for _, engine, line, _ in SAMPLES if not is_error_line(engine, line)]
    assert not lost


@pytest.mark.parametrize("engine", [V, S, L])
@pytest.mark.parametrize("number", range(1, 35))
def test_what_the_shipped_fake_prints_is_diagnosed_by_the_rule_it_imitates(engine: EngineKind, number: int) -> None:
    failure = TABLE[f"d{number}"]
    lines = failure.lines(engine.value)
    reason = diagnose(facts(engine, lines, failure.exit_code(engine.value, failure.place)))
    assert reason.code == f"D{number}"
    assert any(is_error_line(engine, line) for line in lines)


LINES = st.lists(
    st.one_of(
        st.text(),
        st.sampled_from([line for _, _, line, _ in SAMPLES] + NOISE),
        st.builds(lambda a, b: a + b, st.sampled_from([WORKER, INFO, SGL, "1.2 E "]), st.text()),
    ),
    max_size=20,
)


@given(
    engine=st.sampled_from(EngineKind),
    code=st.none() | st.integers(-300, 300),
    lines=LINES,
    oom=st.none() | st.booleans(),
    several=st.booleans(),
    ready=st.booleans(),
)
def test_no_output_and_no_exit_code_makes_a_diagnosis_fail(
    engine: EngineKind, code: int | None, lines: list[str], oom: bool | None, several: bool, ready: bool
) -> None:
    reason = diagnose(ExitFacts(engine, code, lines, oom_killed=oom, several_died=several, ready=ready))
    assert reason.code in {rule.code for rule in RULES} | set(ENDINGS)
    assert reason.cause
    assert not re.search(r"[\x00-\x08\x1b]", "".join(reason.evidence))
    assert all(isinstance(is_error_line(engine, line), bool) for line in lines)
