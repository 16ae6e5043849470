"""What is to run: a shard as the file wants it, the plan of one launch, and the command that comes out.

All times are seconds, all sizes bytes. A limit that is `"off"` in the file is None here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from attrs import field, frozen

from llmgw.domain.problem import Problem, Where

Port = int | Literal["auto", "unix"]
ArgValue = str | int | float | bool | tuple[Any, ...] | Mapping[str, Any]
"""A value of `[shard.args]`: scalar, list (a tuple here) or table (becomes JSON)."""


class EngineKind(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    COMMAND = "command"


@frozen(order=True, cache_hash=True)
class ShardId:
    """One instance of a shard. Inside llmgw a shard is always (NAME, i), also when there is one only."""

    name: str
    replica: int = 0

    def __str__(self) -> str:
        return f"{self.name}/{self.replica}"

    def shown(self, replicas: int) -> str:
        """The name that people see: NAME while there is one instance, NAME/i otherwise."""
        return self.name if replicas <= 1 else str(self)


class Secret:
    """A secret's text. Neither `repr`, `str` nor formatting shows it; only `reveal()` gives it out."""

    __slots__ = ("_text", "origin")

    def __init__(self, text: str, origin: str = "file") -> None:
        self._text = text
        self.origin = origin
        """Where it came from, for people: `env HF_TOKEN`, `file /etc/…`, `credential hf_token`, `inline`."""

    def reveal(self) -> str:
        return self._text

    @property
    def digest(self) -> str:
        """A short digest, so that a changed secret changes the hash of a shard without standing in it."""
        return hashlib.sha256(self._text.encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


class Unset:
    """`{ unset = true }`: removes an inherited entry, in `env` also llmgw's own inherited variable."""

    _only: Unset | None = None

    def __new__(cls) -> Unset:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset()
EnvValue = str | Secret | Unset


@frozen
class ParallelLayout:
    """Ranks of one instance: `tensor x pipeline x data` GPUs when it runs on GPUs at all."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data


@frozen
class Limits:
    """Every time that bounds a state, in seconds; None is off."""

    probe_interval: float = 1.0
    probe_interval_ready: float = 5.0
    probe_timeout: float = 5.0
    start_timeout: float = 300.0
    load_timeout: float = 1800.0
    load_timeout_max: float | None = 21600.0
    stall_timeout: float | None = None
    unhealthy_timeout: float | None = None
    drain_timeout: float = 120.0
    stop_timeout: float = 60.0
    gpu_release_timeout: float = 30.0

    @property
    def longest_stop(self) -> float:
        """The worst case of a stop: what systemd's TimeoutStopSec must exceed."""
        return self.drain_timeout + self.stop_timeout + 10.0 + self.gpu_release_timeout


RestartMode = Literal["no", "on-failure", "always"]


@frozen
class RestartPolicy:
    """`limit` failures in a row end the attempts (0 = no limit); `stable` seconds of Ready forget them."""

    mode: RestartMode = "on-failure"
    delay: float = 5.0
    delay_max: float = 300.0
    limit: int = 5
    stable: float = 600.0


@frozen
class ShardSpec:
    """One `[[shard]]` after defaults and inheritance, with values checked. `config_hash` covers the written
    engine keys and the digests of secrets, never argv or defaults, so that a new llmgw with a new default
    restarts nothing.
    """

    name: str
    model: str
    engine: EngineKind
    command: tuple[str, ...]
    config_hash: str
    weights: str | None = None
    aliases: tuple[str, ...] = ()
    unlisted: bool = False
    gpus: int | tuple[int | str, ...] = 0
    """A number: so many, chosen by llmgw; a tuple: exactly these (index, UUID, PCI bus id)."""
    gpu_class: tuple[str, ...] = ()
    gpu_memory: int | None = None
    share_gpus: bool = False
    layout: ParallelLayout = ParallelLayout()
    replicas: int = 1
    nodes: int = 1
    placement_priority: int = 0
    where: Mapping[str, tuple[str, ...]] = field(factory=dict)
    host: str = "127.0.0.1"
    port: Port = "auto"
    args: Mapping[str, ArgValue] = field(factory=dict)
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, EnvValue] = field(factory=dict)
    workdir: str | None = None
    api_key: Secret | None = None
    quantization: str | None = None
    allow: tuple[str, ...] = ()
    max_model_len: int | None = None
    ready_path: str | None = None
    """None: the engine's own."""
    models_path: str = "/v1/models"
    warmup: bool = False
    limits: Limits = Limits()
    restart: RestartPolicy = RestartPolicy()
    autostart: bool = True
    idle_timeout: float | None = None
    idle_action: Literal["stop", "sleep"] = "stop"
    sleep_level: int = 1
    max_inflight: int | None = None
    first_byte_timeout: float | None = None
    chunk_timeout: float | None = None
    origins: Mapping[str, str] = field(factory=dict, eq=False)
    """`file:line` of each written key, keyed by its dotted path inside the shard (`env.HF_HOME`)."""

    @property
    def pinned_gpus(self) -> tuple[int | str, ...]:
        return self.gpus if isinstance(self.gpus, tuple) else ()

    def written_at(self, *keys: str) -> Where | None:
        """Where the first of these keys that is written stands, else where the shard's name does."""
        origin = next((self.origins[key] for key in (*keys, "name") if key in self.origins), None)
        return Where.parse(origin) if origin is not None else None

    @property
    def ids(self) -> tuple[ShardId, ...]:
        return tuple(ShardId(self.name, i) for i in range(self.replicas))


@frozen
class TcpEndpoint:
    """Where the engine is asked to listen."""

    host: str
    port: int

    @property
    def probe_host(self) -> str:
        """The address to ask: what the engine binds, never a name (0.0.0.0 -> 127.0.0.1, :: -> ::1)."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    @property
    def base_url(self) -> str:
        host = f"[{self.probe_host}]" if ":" in self.probe_host else self.probe_host
        return f"http://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return self.host == "::1" or self.host == "localhost" or self.host.startswith("127.")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@frozen
class UnixEndpoint:
    """A unix socket of at most 107 bytes (the kernel's limit)."""

    path: str

    @property
    def base_url(self) -> str:
        return "http://localhost"

    @property
    def is_loopback(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"unix:{self.path}"


Endpoint = TcpEndpoint | UnixEndpoint


@frozen
class LaunchPlan:
    """All that a command depends on, for one launch of one instance."""

    id: ShardId
    spec: ShardSpec
    endpoint: Endpoint
    generation: int
    run_id: str
    """Unique per launch: the marker by which processes of this launch are found again."""
    node: str
    state_dir: str
    tmp_dir: str
    work_dir: str
    inherited_env: Mapping[str, str]
    """The environment of `llmgw run`, before anything is dropped."""
    devices: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES gets: indexes in PCI bus order, or full UUIDs. Empty: no GPU."""
    engine_version: str | None = None
    """As found beside the executable; None is unknown."""
    secret_variables: frozenset[str] = frozenset()
    """Names of environment variables that some table uses as a secret: dropped unless written in `env`."""
    rendezvous_ports: tuple[int, int] = (29500, 29899)
    """`node.rendezvous_ports`: where the ranks of one instance find each other."""
    group_env: Mapping[str, str] = field(factory=dict)
    """What an instance over several nodes is told about the network, see `engines.nccl`."""

    @property
    def name(self) -> str:
        return self.id.shown(self.spec.replicas)


EnvOrigin = str
"""`generated`, `inherited` or the `file:line` that wrote it."""


@frozen
class Command:
    """What is executed. `secret_env` and `secret_args` (indexes into argv) are masked wherever it is shown."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    origins: Mapping[str, EnvOrigin] = field(factory=dict)
    secret_env: frozenset[str] = frozenset()
    secret_args: frozenset[int] = frozenset()
    warnings: tuple[Problem, ...] = ()

    def masked_argv(self) -> tuple[str, ...]:
        return tuple("***" if i in self.secret_args else arg for i, arg in enumerate(self.argv))

    def masked_env(self) -> dict[str, str]:
        return {name: "***" if name in self.secret_env else value for name, value in self.env.items()}
