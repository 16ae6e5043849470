"""What one `vllm serve` was asked for, shared by all of its processes."""

import os

from llmgw.fake import options
from llmgw.fake.knobs import Knobs
from llmgw.fake.mishaps import Failing
from llmgw.fake.timeline import Timeline

READY = 54.5
"""Seconds from the start until ready (one API server, measured); multiplied by the time factor."""

DEFAULT_READY_TIMEOUT = 600.0
"""vLLM's own limit for loading, when VLLM_ENGINE_READY_TIMEOUT_S is not set; multiplied by the time factor."""


class Setup:
    """Raises options.OptionError for values that vLLM would refuse."""

    def __init__(self, given: options.Options, knobs: Knobs) -> None:
        self.knobs = knobs
        self.given = given
        self.factor = knobs.time_factor
        self.timeline = Timeline(knobs, READY)
        self.model = given.positional[0] if given.positional else "Qwen/Qwen3-0.6B"
        self.names = given.many("served-model-name") or [self.model]
        self.host = given.text("host", "")
        self.port = given.number("port", 8000)
        self.uds = given.text("uds")
        self.tensor = given.number("tensor-parallel-size", 1)
        self.pipeline = given.number("pipeline-parallel-size", 1)
        self.data = given.number("data-parallel-size", 1)
        self.api_servers = given.number("api-server-count", self.data)
        self.nodes = given.number("nnodes", 1)
        self.node_rank = given.number("node-rank", 0)
        self.master_host = given.text("master-addr", "127.0.0.1")
        self.master_port = given.number("master-port", 29501)
        self.headless = given.has("headless") or self.node_rank > 0
        self.max_model_len = self._context()
        self.max_running = given.number("max-num-seqs", 256)
        most = given.number("max-num-queued-reqs", -1)
        self.max_waiting = None if most < 0 else most
        self.shutdown_timeout = float(given.text("shutdown-timeout", "0"))
        self.keys = {key for key in given.many("api-key") if key}
        if not self.keys and os.environ.get("VLLM_API_KEY"):
            self.keys = {os.environ["VLLM_API_KEY"]}
        self.quiet_paths = frozenset(given.text("disable-access-log-for-endpoints").split(","))
        self.access_lines = knobs.access_log and not given.has("disable-uvicorn-access-log")
        self.dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE", "0") == "1"
        self.sleep_mode = given.has("enable-sleep-mode")
        self.keep_alive_on_death = os.environ.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "0") == "1"
        limit = os.environ.get("VLLM_ENGINE_READY_TIMEOUT_S")
        self.ready_timeout = float(limit) if limit else DEFAULT_READY_TIMEOUT * self.factor
        self.failing = Failing.from_knobs(knobs, "vllm")
        if not self.failing.wanted and "://" in os.environ.get("VLLM_PORT", ""):
            self.failing = Failing("d33", "vllm", None)

    @property
    def local_ranks(self) -> int:
        """Workers of one engine core on this node."""
        return max(1, self.tensor * self.pipeline // self.nodes)

    def title(self, name: str) -> str:
        return f"{os.environ.get('VLLM_PROCESS_NAME_PREFIX', 'VLLM')}::{name}"

    def rank_name(self, rank: int) -> str:
        """The suffix of a worker's name: nothing for the only one."""
        if self.tensor * self.pipeline == 1:
            return ""
        rank += self.node_rank * self.local_ranks
        stage = f"_PP{rank // self.tensor}" if self.pipeline > 1 else ""
        return f"{stage}_TP{rank % self.tensor}"

    def core_name(self, index: int) -> str:
        return f"EngineCore_DP{index}" if self.data > 1 else "EngineCore"

    def _context(self) -> int:
        text = self.given.text("max-model-len")
        return 32768 if text in ("", "auto", "-1") else self.given.number("max-model-len", 32768)
