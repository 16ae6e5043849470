# ruff: noqa: E501  (lists of names)
"""The engines' own command lines: which options each knows, and how each complains about others."""

from collections.abc import Iterable


class OptionError(Exception):
    """An argument the engine would refuse; the message is worded as the engine words it."""


class Options:
    """What was given: option values by canonical name, and the positional arguments."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        self.positional: list[str] = []

    def has(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str, default: str = "") -> str:
        found = self.values.get(name)
        return found[-1] if found else default

    def many(self, name: str) -> list[str]:
        return self.values.get(name, [])

    def number(self, name: str, default: int) -> int:
        """An integer; `k`/`K`, `m`/`M` and `g`/`G` at the end multiply as the engines do."""
        text = self.text(name)
        if not text:
            return default
        factors = {"k": 1000, "K": 1024, "m": 1000_000, "M": 1024**2, "g": 10**9, "G": 1024**3}
        try:
            if text[-1] in factors:
                return int(float(text[:-1]) * factors[text[-1]])
            return int(text)
        except ValueError:
            raise OptionError(f"argument --{name}: invalid int value: {text!r}") from None


class Grammar:
    """The options of one engine. A name in `switches` takes no value, one in `lists` one or more, others one."""

    def __init__(self, valued: str, switches: str = "", lists: str = "", aliases: dict[str, str] | None = None) -> None:
        self._valued = frozenset(valued.split())
        self._switches = frozenset(switches.split())
        self._lists = frozenset(lists.split())
        self._aliases = aliases or {}

    def parse(self, argv: Iterable[str]) -> tuple[Options, list[str]]:
        """The options given and the arguments that are unknown. Raises OptionError for a missing value."""
        options = Options()
        unknown: list[str] = []
        words = list(argv)
        while words:
            word = words.pop(0)
            if not word.startswith("-") or word == "-":
                options.positional.append(word)
                continue
            name, kind, value = self._recognise(word)
            if kind == "unknown":
                unknown.append(word)
            elif kind == "switch":
                options.values[name] = []
            elif value is not None:
                options.values.setdefault(name, []).append(value)
            else:
                taken = self._take_values(words, many=kind == "list")
                if not taken:
                    raise OptionError(f"argument {word}: expected {'at least ' if kind == 'list' else ''}one argument")
                options.values.setdefault(name, []).extend(taken)
        return options, unknown

    def _recognise(self, word: str) -> tuple[str, str, str | None]:
        flag, equals, value = word.partition("=")
        name = self._aliases.get(flag, flag.lstrip("-").replace("_", "-"))
        name = self._aliases.get("--" + name, name)
        given = value if equals else None
        if name in self._lists:
            return name, "list", given
        if name in self._valued or name.partition(".")[0] in self._valued:
            return name, "valued", given
        if not equals and (name in self._switches or name.removeprefix("no-") in self._switches):
            return name, "switch", None
        return name, "unknown", given

    @staticmethod
    def _take_values(words: list[str], *, many: bool) -> list[str]:
        taken: list[str] = []
        while words and (many or not taken) and not _looks_like_option(words[0]):
            taken.append(words.pop(0))
        return taken


def _looks_like_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not word[1].isdigit()


LLAMACPP = Grammar(
    valued="""
        model alias host port ctx-size threads threads-batch parallel api-key api-key-file gpu-layers n-gpu-layers
        batch-size ubatch-size cache-type-k cache-type-v split-mode tensor-split main-gpu device timeout keep
        chat-template chat-template-file hf-repo hf-file hf-token model-url lora lora-scaled seed temp top-k top-p
        min-p n-predict rope-scaling rope-scale rope-freq-base rope-freq-scale flash-attn cache-reuse log-file
        log-verbosity ssl-key-file ssl-cert-file path slot-save-path threads-http reasoning-format pooling numa
        override-tensor override-kv draft-max draft-min model-draft ctx-size-draft gpu-layers-draft defrag-thold
        slot-prompt-similarity prio cpu-mask reasoning-budget mmproj mmproj-url sleep-idle-seconds
    """,
    switches="""
        metrics slots no-slots props cont-batching no-cont-batching mlock no-mmap no-kv-offload embedding embeddings
        reranking jinja no-webui verbose log-disable log-prefix log-timestamps offline no-warmup warmup
        context-shift no-context-shift swa-full check-tensors no-perf kv-unified special ignore-eos
    """,
    aliases={
        "-m": "model", "-a": "alias", "-c": "ctx-size", "-t": "threads", "-tb": "threads-batch", "-np": "parallel",
        "-ngl": "gpu-layers", "--n-gpu-layers": "gpu-layers", "-b": "batch-size", "-ub": "ubatch-size",
        "-ctk": "cache-type-k", "-ctv": "cache-type-v", "-sm": "split-mode", "-ts": "tensor-split", "-mg": "main-gpu",
        "-dev": "device", "-to": "timeout", "-hf": "hf-repo", "-n": "n-predict", "--predict": "n-predict",
        "-fa": "flash-attn", "-v": "verbose", "-cb": "cont-batching", "-ot": "override-tensor", "-s": "seed",
        "-mu": "model-url", "-lv": "log-verbosity", "-md": "model-draft", "-kvu": "kv-unified",
    },
)  # fmt: skip

VLLM = Grammar(
    valued="""
        model host port uds tensor-parallel-size pipeline-parallel-size data-parallel-size data-parallel-size-local
        data-parallel-rank data-parallel-start-rank data-parallel-address data-parallel-rpc-port data-parallel-backend
        data-parallel-supervisor-port prefill-context-parallel-size decode-context-parallel-size
        gpu-memory-utilization device-memory-utilization kv-cache-memory-bytes num-gpu-blocks-override max-model-len
        dtype quantization kv-cache-dtype download-dir revision tokenizer-revision code-revision hf-token load-format
        shutdown-timeout log-level uvicorn-log-level logging-config log-config disable-access-log-for-endpoints
        max-num-queued-reqs max-num-queued-tokens max-num-seqs max-num-batched-tokens scheduling-policy
        watchdog-config api-server-count nnodes node-rank master-addr master-port distributed-executor-backend seed
        tokenizer tokenizer-mode config chat-template chat-template-content-format block-size swap-space
        cpu-offload-gb max-logprobs hf-config-path hf-overrides config-format model-loader-extra-config
        generation-config override-generation-config speculative-config compilation-config kv-transfer-config
        kv-events-config additional-config limit-mm-per-prompt mm-processor-kwargs mm-processor-cache-gb
        max-loras max-lora-rank lora-dtype tool-call-parser reasoning-parser response-role ssl-keyfile ssl-certfile
        ssl-ca-certs root-path middleware allowed-origins max-log-len task runner convert attention-config
        attention-backend moe-backend eplb-config structured-outputs-config optimization-level max-cpu-loras
        rope-scaling rope-theta long-prefill-token-threshold max-num-partial-prefills served-model-names
        otlp-traces-endpoint collect-detailed-traces show-hidden-metrics-for-version pooler-config profiler-config
        renderer-num-workers timeout-keep-alive max-parallel-loading-workers data-parallel-hosts
        performance-mode language-model-only fully-sharded-loras lora-target-modules
    """,
    switches="""
        enable-expert-parallel enable-eplb trust-remote-code enable-sleep-mode disable-uvicorn-access-log headless
        enforce-eager enable-prefix-caching enable-chunked-prefill enable-lora enable-auto-tool-choice
        enable-log-requests enable-log-outputs disable-log-stats enable-server-load-tracking
        data-parallel-hybrid-lb data-parallel-external-lb data-parallel-multi-port-external-lb
        disable-custom-all-reduce enable-prompt-embeds skip-tokenizer-init async-scheduling
        disable-fastapi-docs enable-request-id-headers return-tokens-as-token-ids enable-prompt-tokens-details
        enable-force-include-usage enable-dbo fail-on-environ-validation use-tqdm-on-load disable-cascade-attn
        disable-sliding-window disable-hybrid-kv-cache-manager enable-tokenizer-info-endpoint
        calculate-kv-scales interleave-mm-strings skip-mm-profiling kv-sharing-fast-prefill allow-credentials
        disable-frontend-multiprocessing enable-ssl-refresh trust-request-chat-template log-error-stack
        exclude-tools-when-tool-choice-none enable-offline-docs ray-workers-use-nsight
    """,
    lists="served-model-name api-key device-ids lora-modules allowed-local-media-path",
    aliases={
        "-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size",
        "-dpl": "data-parallel-size-local", "-dpn": "data-parallel-rank", "-dpr": "data-parallel-start-rank",
        "-dpa": "data-parallel-address", "-dpp": "data-parallel-rpc-port", "-dpb": "data-parallel-backend",
        "-dph": "data-parallel-hybrid-lb", "-dpe": "data-parallel-external-lb", "-q": "quantization",
        "--device-memory-utilization": "gpu-memory-utilization", "-n": "nnodes", "-r": "node-rank",
        "-asc": "api-server-count", "-sc": "speculative-config", "-cc": "compilation-config", "-O": "optimization-level",
        "-ep": "enable-expert-parallel",
    },
)  # fmt: skip
"""vLLM's options; `--no-X` is known for every switch."""

SGLANG = Grammar(
    valued="""
        model-path host port served-model-name tp-size pp-size dp-size attn-dp-size ep-size mem-fraction-static
        max-total-tokens context-length dtype quantization kv-cache-dtype api-key admin-api-key download-dir revision
        load-format log-level log-level-http base-gpu-id gpu-id-step max-running-requests max-queued-requests
        watchdog-timeout nnodes node-rank dist-init-addr nccl-port dist-timeout schedule-policy
        schedule-conservativeness chunked-prefill-size max-prefill-tokens page-size device tokenizer-path
        tokenizer-mode tokenizer-worker-num chat-template tool-call-parser reasoning-parser attention-backend
        sampling-backend grammar-backend decode-attention-backend prefill-attention-backend mm-attention-backend
        speculative-algorithm speculative-draft-model-path speculative-num-steps speculative-eagle-topk
        speculative-num-draft-tokens cuda-graph-max-bs random-seed stream-interval decode-log-interval
        disaggregation-mode disaggregation-bootstrap-port disaggregation-transfer-backend disaggregation-ib-device
        json-model-override-args model-impl fp8-gemm-backend moe-a2a-backend moe-runner-backend lora-backend
        max-loras-per-batch max-lora-rank model-loader-extra-config load-balance-method preferred-sampling-params
        crash-dump-folder file-storage-path hicache-ratio hicache-size hicache-write-policy cpu-offload-gb
        weight-version dllm-algorithm skip-server-warmup-timeout soft-watchdog-timeout constrained-json-whitespace-pattern
        quantization-param-path lora-target-modules
    """,
    switches="""
        trust-remote-code enable-metrics enable-dp-attention enable-memory-saver sleep-on-idle disable-radix-cache
        disable-cuda-graph disable-overlap-schedule skip-server-warmup skip-tokenizer-init enable-torch-compile
        enable-mixed-chunk enable-p2p-check disable-custom-all-reduce enable-lora enable-multimodal
        enable-hierarchical-cache enable-deterministic-inference log-requests show-time-cost enable-trace
        is-embedding enable-cache-report disable-chunked-prefix-cache enable-nccl-nvls enable-symm-mem
        enable-two-batch-overlap enable-eplb delete-ckpt-after-loading disable-outlines-disk-cache
        triton-attention-reduce-in-fp32 enable-metrics-for-all-schedulers enable-dp-lm-head allow-auto-truncate
    """,
    lists="cuda-graph-bs lora-paths bucket-time-to-first-token",
    aliases={
        "--model": "model-path", "--tp": "tp-size", "--tensor-parallel-size": "tp-size", "--pp": "pp-size",
        "--pipeline-parallel-size": "pp-size", "--dp": "dp-size", "--data-parallel-size": "dp-size",
        "--attention-data-parallel-size": "attn-dp-size", "--ep": "ep-size", "--expert-parallel-size": "ep-size",
        "--nnode": "nnodes", "--dist-init-address": "dist-init-addr", "--random-seed": "random-seed",
    },
)  # fmt: skip
