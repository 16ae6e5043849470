"""Facts about this host that rules need and a shell gathers. What could not be read is None or missing: unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from llmgw.domain.fabric import FabricInventory
from llmgw.domain.hardware import Availability, HostHardware, Inventory


@frozen
class PathFact:
    """What stands at a path. `mode` holds the permission bits; None where it could not be asked."""

    exists: bool
    is_dir: bool = False
    is_socket: bool = False
    mode: int | None = None
    owner: int | None = None
    readable: bool = True
    writable: bool = True
    network: bool = False
    """It lies on a network file system."""


@frozen
class PortHolder:
    """Who holds a listening TCP port; pid, name and uid are None where /proc did not show them."""

    port: int
    pid: int | None = None
    name: str | None = None
    uid: int | None = None

    def __str__(self) -> str:
        if self.pid is None:
            return "a process that cannot be seen"
        details = ", ".join(str(x) for x in (self.name, f"uid {self.uid}" if self.uid is not None else None) if x)
        return f"pid {self.pid} ({details})" if details else f"pid {self.pid}"


@frozen
class ModelFolder:
    """What lies in a local folder with weights."""

    config: Literal["read", "native", "missing", "unreadable"]
    """Of its config.json; `native`: there is none, but settings in the form of the model's maker, which vLLM reads."""
    listed: int = 0
    """Files that its index names, 0 without an index."""
    missing: tuple[str, ...] = ()
    """Those of them that are not there."""
    weight_bytes: int | None = None
    """All weights together; None is unknown."""
    tokenizer: bool | None = None
    """Whether there are files of a tokenizer; None is unknown."""


@frozen
class GgufFile:
    """A file that llama.cpp is to load."""

    is_gguf: bool
    missing: tuple[str, ...] = ()
    """Parts of a split model that are not beside it."""
    is_first: bool = True
    """It is the first part, or the only one."""


@frozen
class HostFacts:
    """The host as it was at one moment."""

    hostname: str = "localhost"
    uid: int = 0
    home: str = "/root"
    env: Mapping[str, str] = field(factory=dict)
    groups: frozenset[str] = frozenset()
    """Names of all groups that exist."""
    paths: Mapping[str, PathFact] = field(factory=dict)
    """Each absolute path that a rule asks about."""
    programs: Mapping[str, str | None] = field(factory=dict)
    """First word of a command -> absolute path of the executable, None when there is none."""
    port_holders: Mapping[int, PortHolder] = field(factory=dict)
    ephemeral_ports: tuple[int, int] | None = None
    addresses: frozenset[str] | None = None
    """Addresses of this host's interfaces; None is unknown."""
    inventory: Inventory | None = None
    availability: Mapping[str, Availability] = field(factory=dict)
    """UUID -> whether it may be handed out now; a GPU that is missing here was not asked about."""
    unplaced: Mapping[str, str] = field(factory=dict)
    """Shard -> why llmgw would find no GPUs for it now, in words."""
    hardware: HostHardware | None = None
    fabric: FabricInventory | None = None
    model_configs: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    """Local weights folder -> its parsed config.json."""
    model_folders: Mapping[str, ModelFolder] = field(factory=dict)
    """Local weights folder -> what lies in it."""
    gguf_files: Mapping[str, GgufFile] = field(factory=dict)
    """Local weights file -> what it is."""
    engine_versions: Mapping[str, str | None] = field(factory=dict)
    """Executable -> version from the metadata beside it."""
    memlock: tuple[int, int] | None = None
    """Soft and hard limit of locked memory in bytes; -1 is unlimited."""
