"""Every family that llmgw exposes, once: its name, labels and meaning. The reference page and the tests walk it.

Names follow Prometheus' rules: prefix, base units, `_total` for counters. Labels are bounded: models, tenants, bands
and shards come from the file, reasons and codes from tables. Histograms carry model and band only: with tenants too,
they would be by far the most of the text.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@frozen
class Family:
    """`name` as it is exposed, of a counter with `_total`; `bounds` are a histogram's upper bounds."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names that stand at the beginning of its lines."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))
        return (self.name,)


def _counter(name: str, labels: str, text: str) -> Family:
    return Family(f"llmgw_{name}_total", Kind.COUNTER, tuple(labels.split()), text)


def _gauge(name: str, labels: str, text: str) -> Family:
    return Family(f"llmgw_{name}", Kind.GAUGE, tuple(labels.split()), text)


def _histogram(name: str, text: str, bounds: tuple[float, ...]) -> Family:
    return Family(f"llmgw_{name}", Kind.HISTOGRAM, ("model", "band"), text, bounds)


# -- the node --------------------------------------------------------------------------------------------

BUILD_INFO = _gauge("build_info", "version", "Always 1; the version of llmgw that runs.")
START_TIME = _gauge("start_time_seconds", "", "When llmgw started, in seconds since the epoch.")
CONFIG_IN_FORCE = _gauge(
    "config_in_force", "", "1: the file was read without an error at the last reload. 0: an earlier one is in force."
)
STOPPING = _gauge("stopping", "", "1: llmgw is on its way out.")

SHARD_STATE = _gauge("shard_state", "shard model engine state", "1 for the state that a shard is in, 0 for the others.")
SHARD_CONDITION = _gauge("shard_condition", "shard condition", "1: this is true of the shard, beside its state.")
SHARD_WANTED = _gauge("shard_wanted", "shard", "1: the shard is wished to run.")
SHARD_STATE_SINCE = _gauge(
    "shard_state_since_seconds", "shard", "When the shard came to its state, in seconds since the epoch."
)
SHARD_LOAD_PROGRESS = _gauge("shard_load_progress_ratio", "shard", "How far a load is, 0 to 1; only while it is known.")
SHARD_LOAD_DURATION = _gauge(
    "shard_load_duration_seconds", "shard", "How long the last load took, from launch to ready."
)
SHARD_FAILURES = _gauge("shard_failures_in_a_row", "shard", "Failures since the shard was last stable.")
SHARD_RESTARTS = _counter(
    "shard_restarts", "shard reason", "Launches after the first. The reason is the code of the failure, or `wished`."
)
SHARD_RUNNING = _gauge("shard_running_requests", "shard", "Requests that the engine itself says it works on.")
SHARD_WAITING = _gauge("shard_waiting_requests", "shard", "Requests that wait inside the engine, as it says itself.")
SHARD_TOKENS = _gauge("shard_tokens_per_second", "shard", "Tokens per second, as the engine says itself.")
SHARD_KV = _gauge("shard_kv_cache_usage_ratio", "shard", "How full the engine's KV cache is, 0 to 1.")
SHARD_SLOTS = _gauge("shard_slots", "shard", "Requests that the engine works on at a time, where it tells.")
SHARD_GPU_MEMORY = _gauge("shard_gpu_memory_used_bytes", "shard gpu", "Memory of a GPU that the shard's processes use.")

GPU_INFO = _gauge("gpu_info", "gpu uuid name class", "Always 1; a GPU of this node.")
GPU_MEMORY_TOTAL = _gauge("gpu_memory_total_bytes", "gpu", "Memory of a GPU.")
GPU_MEMORY_USED = _gauge("gpu_memory_used_bytes", "gpu", "Memory of a GPU that is in use, by whomever.")
GPU_FOREIGN_MEMORY = _gauge(
    "gpu_foreign_memory_bytes", "gpu", "Memory of a GPU that processes use which are none of llmgw's engines."
)
GPU_ASSIGNABLE = _gauge("gpu_assignable", "gpu", "1: a new engine may get the GPU, beside those of llmgw on it.")
GPU_UNHEALTHY = _gauge("gpu_unhealthy", "gpu", "1: the driver reports a fault of the GPU.")
GPU_TEMPERATURE = _gauge("gpu_temperature_celsius", "gpu", "Temperature of a GPU.")
GPU_POWER = _gauge("gpu_power_watts", "gpu", "Power that a GPU draws.")
GPU_READ_TIME = _gauge(
    "gpu_read_time_seconds", "", "When the facts about the GPUs were read, in seconds since the epoch."
)
GPU_STALE = _gauge("gpu_facts_stale", "", "1: the GPUs cannot be read now; older facts are shown.")

# -- the gateway -----------------------------------------------------------------------------------------

REQUESTS = _counter(
    "requests",
    "model tenant band code",
    "Requests for a model, and requests that were refused before one was known. Code 499: the client left.",
)
TOKENS = _counter(
    "tokens", "model tenant direction", "Tokens as the engines count them; direction prompt or completion."
)
DURATION = _histogram(
    "request_duration_seconds",
    "From the request's head to the end of its answer; only requests that an engine got.",
    (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
TTFT = _histogram(
    "time_to_first_token_seconds",
    "From the request's head to the first byte of its answer; only streams that began with status 200.",
    (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
INTER_CHUNK = _histogram(
    "inter_chunk_seconds",
    "Pauses between the pieces of an answer, as they come from the engine.",
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
QUEUE_WAIT = _histogram(
    "queue_wait_seconds",
    "From the request's head to the moment it is given to an engine, is refused after waiting, or leaves.",
    (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 300.0, 600.0),
)
REJECTED = _counter("admission_rejected", "reason", "Requests that were not let in, by reason.")
FAILURES = _counter(
    "request_failures", "reason", "Requests that llmgw answered itself or that ended early, for all other reasons."
)
RETRIES = _counter("request_retries", "model", "Requests that were sent once more, to another engine or connection.")
BANDS_CLAMPED = _counter(
    "bands_clamped",
    "tenant",
    "Requests that named a band which is unknown or not the tenant's: the default one counts.",
)
EJECTIONS = _counter("endpoint_ejections", "shard", "How often a shard got no requests for a while after failures.")
QUEUE_DEPTH = _gauge("queue_depth", "model band tenant", "Requests that wait; of those who have waited before, also 0.")
QUEUE_OLDEST = _gauge("queue_oldest_seconds", "model band", "How long the oldest of the waiting requests has waited.")
INFLIGHT = _gauge("inflight_requests", "model band", "Requests that are with an engine.")
TENANT_INFLIGHT = _gauge("tenant_inflight_requests", "tenant", "Requests of a tenant that are with an engine.")
ENDPOINT_INFLIGHT = _gauge("endpoint_inflight_requests", "model shard", "Requests that are with this engine.")
ENDPOINT_SLOTS = _gauge("endpoint_slots", "model shard", "Requests that this engine gets at a time; 0: none for now.")
ENGINE_METRICS_UP = _gauge(
    "engine_metrics_up", "shard", "1: the engine's own series could be read for this answer (`engine_metrics`)."
)

FAMILIES: tuple[Family, ...] = tuple(value for value in globals().values() if isinstance(value, Family))
"""In the order in which they stand above."""
