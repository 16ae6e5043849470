"""What comes out of the files: resolved values, ready to be acted on. Times are seconds, sizes bytes; None is off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from llmgw.config.kinds import Listen
from llmgw.domain.shard import Secret, ShardSpec

OnStop = Literal["auto", "stop", "leave"]


@frozen
class NodeConfig:
    """This machine."""

    name: str
    labels: Mapping[str, str]
    gpus: Literal["all"] | tuple[int | str, ...]
    fabric: Literal["auto", "none"] | tuple[str, ...]
    island: str | None
    address: str | None
    engine_ports: tuple[int, int]
    rendezvous_ports: tuple[int, int]
    discovery_timeout: float
    inventory_interval: float


@frozen
class SupervisorConfig:
    """The `llmgw run` process."""

    on_stop: OnStop
    state_dir: str
    runtime_dir: str
    log_dir: str
    socket: str
    socket_mode: int
    socket_group: str | None
    log_lines: int
    log_line_max: int
    log_file_max: int
    log_files: int


@frozen
class Hash:
    """A SHA-256 hash of a key, in hex: of keys that stand as text too, so that only one form is compared."""

    sha256: str


@frozen
class TlsConfig:
    cert: str
    key: Secret
    client_ca: str | None


@frozen
class BandConfig:
    """A class of requests; `max_inflight` None is no limit."""

    name: str
    default: bool
    max_inflight: int | None
    reserved: int
    queue_limit: int
    queue_timeout: float | None
    promote_after: float | None


@frozen
class TenantConfig:
    """Who may ask. Keys are kept as hashes alone; `models` None means all."""

    name: str
    keys: tuple[Hash, ...]
    bands: tuple[str, ...]
    weight: int
    max_inflight: int | None
    queue_limit: int | None
    models: tuple[str, ...] | None
    requests_per_minute: int | None
    tokens_per_minute: int | None


@frozen
class GatewayConfig:
    """The OpenAI-compatible door. A limit of 0 in the file is None here."""

    listen: tuple[Listen, ...]
    allow_anonymous: bool
    max_inflight: int | None
    queue_limit: int
    queue_timeout: float | None
    load_wait: float
    routing: str
    fairness: str
    operator_keys: tuple[Hash, ...]
    cors_origins: tuple[str, ...]
    trust_headers_from: tuple[str, ...]
    connect_timeout: float
    first_byte_timeout: float | None
    chunk_timeout: float | None
    head_timeout: float
    body_timeout: float
    write_timeout: float
    keepalive_timeout: float
    drain_timeout: float
    max_body: int
    max_buffered: int
    max_header: int
    access_log: str
    metrics: bool
    engine_metrics: bool
    ui: bool
    workers: int
    tls: TlsConfig | None
    bands: tuple[BandConfig, ...]
    tenants: tuple[TenantConfig, ...]


@frozen
class ClusterConfig:
    """More than one node."""

    name: str
    etcd: tuple[str, ...]
    ca: str | None
    cert: str | None
    key: str | None
    user: str | None
    password: Secret | None
    gateways: tuple[str, ...] | None
    node_grace: float
    self_fence_after: float | None


@frozen
class Config:
    """Everything the files say, for this node: shards whose `where` does not match are left out of `shards`."""

    node: NodeConfig
    supervisor: SupervisorConfig
    shards: tuple[ShardSpec, ...]
    gateway: GatewayConfig | None = None
    cluster: ClusterConfig | None = None
    files: tuple[str, ...] = ()
    secret_variables: frozenset[str] = frozenset()
    """Environment variables that some table reads a secret from: engines do not inherit them."""
    elsewhere: tuple[str, ...] = field(default=())
    """Names of the shards that `where` keeps from this node."""
    shown: Mapping[str, Any] = field(factory=dict, eq=False, repr=False)
    """All files merged, defaults written out, as TOML values; secrets are `***`."""
    origins: Mapping[str, str] = field(factory=dict, eq=False, repr=False)
    """`file:line:column` of each written key in `shown`, by its dotted path (`shard.0.env.HF_HOME`)."""

    def shard(self, name: str) -> ShardSpec | None:
        return next((spec for spec in self.shards if spec.name == name), None)
