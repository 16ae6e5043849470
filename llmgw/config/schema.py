"""Every table and key of `llmgw.toml`: the one place that knows them.

Reading, defaults, `llmgw explain`, the JSON schema, `llmgw.toml.example` and the reference page all come from the
tables here. Each table is also an attrs class (`Table.cls`) that cattrs structures; a key that is not written is
ABSENT there, because inheritance must tell "not written" from "written with the default's value".
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import field, frozen

from llmgw.config.kinds import (
    VARIABLE_NAME,
    ArgEntry,
    Boolean,
    Choice,
    Duration,
    Entries,
    EnvEntry,
    FileMode,
    GpuRef,
    Gpus,
    Integer,
    Kind,
    ListenKind,
    Many,
    PortRange,
    Raw,
    Refusal,
    SecretKind,
    Size,
    Text,
)
from llmgw.config.toml_text import inline
from llmgw.domain.shard import EngineKind


class Absent(enum.Enum):
    ABSENT = "absent"


ABSENT = Absent.ABSENT
"""The value of a key that is not written."""

Effect = Literal["live", "replace", "scale", "bind", "restart"]
"""What a reload does with a changed key: at once · the shard is replaced · instances are added or ended · sockets are
bound anew · llmgw must be restarted."""

EFFECT_WORDS: Mapping[Effect, str] = {
    "live": "a reload applies it at once",
    "replace": "a reload replaces the shard",
    "scale": "a reload adds or ends instances",
    "bind": "a reload binds the sockets anew",
    "restart": "needs a restart of llmgw; engines live on",
}

Expand = Literal["path", "weights", "command", "text"]
"""Which strings have variables replaced: `path` also `~` and relative paths, `weights` those only when it is a path,
`command` each word, `text` variables alone."""


@frozen
class Key:
    """One key of a table. `default` is written as in a file; `default_text` says in words what depends on others."""

    name: str
    kind: Kind
    meaning: str
    default: Raw = None
    default_text: str | None = None
    required: bool = False
    rule: str = ""
    effect: Effect = "live"
    expand: Expand | None = None
    sample: Raw = None
    """What the example file shows when there is no default."""

    @property
    def default_shown(self) -> str:
        """The default in words, for people."""
        if self.required:
            return "required"
        if self.default_text is not None:
            return self.default_text
        return "none" if self.default is None else inline(self.default)

    @property
    def builtin(self) -> Any:
        """The built-in default as a value; None when there is none."""
        return None if self.default is None else self.kind.read(self.default)


@frozen
class Table:
    """A table of the file. `title` is how headers name it; `foreign` maps words of other tools to its keys."""

    title: str
    keys: tuple[Key, ...]
    meaning: str = ""
    foreign: Mapping[str, str] = field(factory=dict)
    array: bool = False
    cls: type[Any] = field(init=False, eq=False)
    by_name: Mapping[str, Key] = field(init=False, eq=False, repr=False)

    @cls.default
    def _make_class(self) -> type[Any]:
        name = "".join(part.capitalize() for part in re.findall(r"\w+", self.title)) or "File"
        fields = {k.name: attrs.field(default=ABSENT, metadata={"key": k}) for k in self.keys}
        return attrs.make_class(name + "Table", fields, frozen=True, slots=True)

    @by_name.default
    def _index(self) -> Mapping[str, Key]:
        return {k.name: k for k in self.keys}


@frozen
class Record:
    """The kind of a key that holds a table of the schema. Structured by cattrs, see `structure.py`."""

    table: Table

    @property
    def text(self) -> str:
        return "table"

    def read(self, raw: Raw) -> Any:
        raise NotImplementedError("tables are structured by llmgw.config.structure")

    def show(self, value: Any) -> Raw:
        return {k.name: k.kind.show(v) for k in self.table.keys if (v := getattr(value, k.name)) is not ABSENT}

    def schema(self) -> dict[str, Any]:
        properties = {}
        for k in self.table.keys:
            described = dict(k.kind.schema())
            described["description"] = plain(k.meaning)
            if k.default is not None and not k.required:
                described["default"] = k.default
            properties[k.name] = described
        return {"type": "object", "properties": properties, "additionalProperties": False}


@frozen
class Records:
    """The kind of a key that holds an array of tables."""

    table: Table

    @property
    def text(self) -> str:
        return "array of tables"

    def read(self, raw: Raw) -> Any:
        raise NotImplementedError("tables are structured by llmgw.config.structure")

    def show(self, value: Any) -> Raw:
        return [Record(self.table).show(v) for v in value]

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": Record(self.table).schema()}


def plain(text: str) -> str:
    """Without the marks that the reference page uses."""
    return text.replace("**", "").replace("`", "")


# ---------------------------------------------------------------------------------------------------- words and names

NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
_NAME_FORM = "lower-case letters, digits and . _ - (not first), at most 63 characters"
MODEL = r"[A-Za-z0-9._/:-]{1,128}"
_MODEL_FORM = "1 to 128 letters, digits and . _ - / :"
ENGINES = tuple(kind.value for kind in EngineKind)


def _name(kind_text: str = "string") -> Text:
    return Text(NAME, _NAME_FORM, text=kind_text)


def _model() -> Text:
    return Text(MODEL, _MODEL_FORM)


def _label(name: str) -> Refusal | None:
    if re.fullmatch(NAME, name):
        return None
    return Refusal("bad-value", f'"{name[:60]}" cannot be the name of a label', f"allowed: {_NAME_FORM}")


def _own_label(name: str) -> Refusal | None:
    if name == "node":
        return Refusal("reserved", 'the label "node" always holds the name of the node', "choose another word")
    return _label(name)


def _variable(name: str) -> Refusal | None:
    if not re.fullmatch(VARIABLE_NAME, name):
        hint = "letters, digits and _, not a digit first"
        return Refusal("bad-value", f'"{name[:60]}" cannot be the name of an environment variable', hint)
    if name == "CUDA_VISIBLE_DEVICES":
        return Refusal("owned-variable", "CUDA_VISIBLE_DEVICES is set by llmgw", "use gpus")
    if name.startswith("LLMGW_"):
        return Refusal(
            "owned-variable", f"{name[:60]} is llmgw's own", "engines get these from llmgw; use another name"
        )
    return None


_OPTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def _option(name: str) -> Refusal | None:
    if _OPTION.fullmatch(name):
        return None
    stripped = name.lstrip("-")
    if _OPTION.fullmatch(stripped):
        return Refusal("bad-value", f'"{name[:60]}" begins with a dash', f"write {stripped} = …; llmgw adds the dashes")
    return Refusal("bad-value", f'"{name[:60]}" cannot be the name of an option', "letters, digits, - _ and .")


def _variables() -> Entries:
    return Entries(EnvEntry(), _variable, 'HF_HOME = "/var/cache/huggingface"')


def _options() -> Entries:
    return Entries(ArgEntry(), _option, "enable-prefix-caching = true", "extra_args for a list of words")


def _path(**more: Any) -> Text:
    return Text(text="path", **more)


ONE_SECOND = 1.0
TENTH = 0.1
FIVE_MINUTES = 300.0

# ------------------------------------------------------------------------------------------------------------- tables

NODE = Table(
    "node",
    (
        Key(
            "name",
            Text(r"[a-z0-9][a-z0-9.-]{0,62}", "lower-case letters, digits, . and -, at most 63 characters"),
            "Name of this node. `--node` and the variable `LLMGW_NODE` win over it.",
            default_text="host name",
            rule="Lower-case letters, digits, `.` and `-`, at most 63; unique in a cluster.",
            effect="restart",
            sample="gpu-01",
        ),
        Key(
            "labels",
            Entries(Text(), _own_label, 'rack = "r12"'),
            "Free labels, which `where` of a shard asks for.",
            default={},
            rule="Keys like names of shards; `node` is reserved.",
            effect="restart",
            sample={"rack": "r12"},
        ),
        Key(
            "gpus",
            Many(GpuRef(), words=("all",), distinct=True),
            "GPUs llmgw may use here; the others are left to other programs.",
            default="all",
            rule="Index, full UUID or PCI bus id; must exist.",
            effect="restart",
        ),
        Key(
            "fabric",
            Many(
                Text(r"[A-Za-z0-9_.-]{1,32}(?::[0-9]{1,3})?", "device or device:port"),
                least=1,
                words=("auto", "none"),
                distinct=True,
            ),
            "Adapters that engines may use, as `device` or `device:port`; NCCL gets them as an exact list. "
            '`"none"` chooses plain sockets.',
            default="auto",
            rule='Devices must exist and their ports be active. An empty list is refused: write `"none"`.',
            effect="restart",
        ),
        Key(
            "island",
            Text(r"[A-Za-z0-9_.:-]{1,128}", "letters, digits and . _ : -"),
            "Name of the fabric this node is on, instead of what llmgw derives from the preferred one. With "
            '`fabric = "none"`, name of the nodes that reach each other over sockets.',
            default_text="derived",
            effect="restart",
            sample="ib-1",
        ),
        Key(
            "address",
            Text(r"[0-9A-Fa-f:.]{2,45}", "an IPv4 or IPv6 address"),
            "Address by which other nodes reach this one.",
            default_text="that of the interface with the default route",
            rule="An address of this host; not loopback when there is a `[cluster]`.",
            effect="restart",
            sample="10.0.0.5",
        ),
        Key(
            "engine_ports",
            PortRange(),
            'Range that `port = "auto"` draws from.',
            default="8101-8499",
            rule="`first-last`, 1024 to 65535; a warning when it overlaps the kernel's ephemeral range.",
            effect="restart",
        ),
        Key(
            "rendezvous_ports",
            PortRange(),
            "Range for the meeting point of several ranks; a new port for every generation.",
            default="29500-29899",
            rule="As above; must not overlap `engine_ports`.",
            effect="restart",
        ),
        Key(
            "discovery_timeout",
            Duration(ONE_SECOND, FIVE_MINUTES),
            "Longest time for the whole survey of the node.",
            default="20s",
            rule="1s to 5m.",
            effect="restart",
        ),
        Key(
            "inventory_interval",
            Duration(ONE_SECOND),
            "How often the inventory is read again; it is also read before each launch.",
            default="30s",
            rule="1s or more.",
            effect="restart",
        ),
    ),
    "This machine.",
)

SUPERVISOR = Table(
    "supervisor",
    (
        Key(
            "on_stop",
            Choice(("auto", "stop", "leave")),
            "What becomes of the engines when `llmgw run` ends. `auto`: they outlive a restart, a reload and a crash "
            "and end at a stop or shutdown. `stop`: they always end. `leave`: they always live on.",
            default="auto",
            rule="`auto`, `stop`, `leave`.",
        ),
        Key(
            "state_dir",
            _path(),
            "Records of processes, operators' wishes, load times, working and temporary folders, a lock.",
            default_text="`$STATE_DIRECTORY`, else `/var/lib/llmgw` (root) or `$XDG_STATE_HOME/llmgw`",
            rule="Absolute, writable; a shard's TMPDIR below it has at most 60 bytes, since engines put sockets there.",
            effect="restart",
            expand="path",
            sample="/var/lib/llmgw",
        ),
        Key(
            "runtime_dir",
            _path(),
            "The control socket and a lock.",
            default_text="`$RUNTIME_DIRECTORY`, else `/run/llmgw` or `$XDG_RUNTIME_DIR/llmgw`, else `state_dir/run`",
            rule="Absolute, writable; not on a network file system.",
            effect="restart",
            expand="path",
            sample="/run/llmgw",
        ),
        Key(
            "log_dir",
            _path(),
            "One file with the output of each instance. Engines write to it themselves and so survive llmgw.",
            default_text="`$LOGS_DIRECTORY`, else `state_dir/logs`",
            rule="Absolute, writable.",
            effect="restart",
            expand="path",
            sample="/var/lib/llmgw/logs",
        ),
        Key(
            "socket",
            _path(),
            "The control socket. Elsewhere than in `runtime_dir`, its path is written to `runtime_dir/socket`.",
            default_text="`runtime_dir/control.sock`",
            rule="At most 107 bytes.",
            effect="restart",
            expand="path",
            sample="/run/llmgw/control.sock",
        ),
        Key(
            "socket_mode",
            FileMode(),
            "Mode of the socket.",
            default="0660",
            rule="Four octal digits **in quotes**; a warning when others may write.",
            effect="restart",
        ),
        Key(
            "socket_group",
            Text(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?", "the name of a group"),
            "Group of the socket; its members may control llmgw.",
            default_text="group of the process",
            rule="Must exist.",
            effect="restart",
            sample="llmgw",
        ),
        Key(
            "log_lines",
            Integer(100, 100_000),
            "Lines of output kept in memory for each instance, besides those that show a failure.",
            default=2000,
            rule="100 to 100000.",
            effect="restart",
        ),
        Key(
            "log_line_max",
            Size(256, 1 << 20),
            "Longer lines are cut and marked.",
            default="8KiB",
            rule="256B to 1MiB.",
            effect="restart",
        ),
        Key(
            "log_file_max",
            Size(1 << 20),
            "Size at which an output file is rotated (copied, then truncated).",
            default="64MiB",
            rule="At least 1MiB.",
            effect="restart",
        ),
        Key(
            "log_files",
            Integer(0, 100),
            "Rotated files kept.",
            default=3,
            rule="0 to 100.",
            effect="restart",
        ),
    ),
    "The `llmgw run` process itself: directories, socket, logs.",
)

SHARD_FOREIGN: Mapping[str, str] = {
    "tp": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "tensor_parallel_size": "tensor_parallel",
    "pp": "pipeline_parallel",
    "pp_size": "pipeline_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "dp": "data_parallel",
    "dp_size": "data_parallel",
    "data_parallel_size": "data_parallel",
    "gpu": "gpus",
    "devices": "gpus",
    "device_ids": "gpus",
    "cuda_visible_devices": "gpus",
    "class": "gpu_class",
    "allow_weight_only_fp8": "allow",
    "path": "weights",
    "model_path": "weights",
    "served_model_name": "model",
    "usemodelname": "model",
    "context": "max_model_len",
    "ctx_size": "max_model_len",
    "context_length": "max_model_len",
    "preload": "autostart",
    "cmd": "command",
    "execstart": "command",
    "environment": "env",
    "autorestart": "restart",
    "backoff_seconds": "restart_delay",
    "restartsec": "restart_delay",
    "delay": "restart_delay",
    "max_restarts": "restart_limit",
    "startretries": "restart_limit",
    "attempts": "restart_limit",
    "startlimitburst": "restart_limit",
    "startlimitintervalsec": "restart_stable",
    "unloadtimeout": "stop_timeout",
    "stop_grace_period": "stop_timeout",
    "stopwaitsecs": "stop_timeout",
    "timeoutstopsec": "stop_timeout",
    "kill_timeout": "stop_timeout",
    "healthchecktimeout": "load_timeout",
    "startsecs": "load_timeout",
    "timeoutstartsec": "load_timeout",
    "checkendpoint": "ready_path",
    "readiness_probe": "ready_path",
    "model_group_alias": "aliases",
    "ttl": "idle_timeout",
    "concurrencylimit": "max_inflight",
    "max_parallel_requests": "max_inflight",
    "working_dir": "workdir",
    "directory": "workdir",
    "id": "name",
}

NOT_TAKEN: Mapping[str, str] = {
    "depends_on": "shards do not wait for each other",
    "fallbacks": "give several shards the same model instead",
    "num_retries": "the gateway sends a request again only before its first byte",
    "allowed_fails": "a shard that is not ready gets no requests",
    "cooldown_time": "a shard that is not ready gets no requests",
    "stripparams": "requests are passed on as they are",
    "setparams": "requests are passed on as they are",
    "filters": "requests are passed on as they are",
    "groups": "shards with idle_timeout may share GPUs",
    "matrix": "shards with idle_timeout may share GPUs",
}
"""Words of other tools that have no counterpart, with what there is instead."""

_SHARD_KEYS: tuple[Key, ...] = (
    Key(
        "name",
        _name(),
        "Name in `status`, `logs`, events, metrics, paths and cgroups.",
        required=True,
        rule="`[a-z0-9][a-z0-9._-]{0,62}`, unique over all files.",
        effect="replace",
        sample="llama-70b",
    ),
    Key(
        "model",
        _model(),
        "Name that clients ask for. Shards with the same model share its requests.",
        required=True,
        rule='1 to 128 of letters, digits, `. _ - / :`; no `:` with `engine = "sglang"`.',
        effect="replace",
        sample="llama-3.3-70b",
    ),
    Key(
        "aliases",
        Many(_model(), distinct=True),
        "Further names that clients may use.",
        default=[],
        rule="As `model`; not the model or alias of another model.",
        sample=["gpt-4o-mini"],
    ),
    Key("unlisted", Boolean(), "Served, but not shown by `GET /v1/models`.", default=False),
    Key(
        "engine",
        Choice(ENGINES, otherwise='engine = "command" runs any other program'),
        "Adapter that builds the command and reads progress.",
        default="vllm",
        rule="`vllm`, `sglang`, `llamacpp`, `command`.",
        effect="replace",
    ),
    Key(
        "weights",
        Text(),
        "Hub id, folder or file.",
        default_text="value of `model`",
        rule="A path (it begins with `/`, `.` or `~`) must exist.",
        effect="replace",
        expand="weights",
        sample="meta-llama/Llama-3.3-70B-Instruct",
    ),
    Key(
        "inherit",
        _name(),
        "Start from the written keys of another shard, except `name`, `gpus` and `port`.",
        rule="Must name a shard; chains are allowed, circles refused.",
        effect="replace",
        sample="llama-70b-a",
    ),
    Key(
        "gpus",
        Gpus(),
        "List: exactly these, by index (PCI bus order, as `nvidia-smi` prints them), UUID or PCI bus id. Number: so "
        "many free GPUs of one class, chosen by llmgw. For one instance in all, over all its nodes; 0 means CPU.",
        default_text="from the parallel sizes, else `nodes` (vllm, sglang) or 0 (llamacpp, command)",
        rule="No GPU twice; all of one class; not held by another shard; a number is divisible by `nodes`.",
        effect="replace",
        sample=[0, 1, 2, 3],
    ),
    Key(
        "gpu_class",
        Many(Text(r"[a-z0-9][a-z0-9._-]{0,62}", 'a class such as "h100-80g"'), least=1, single=True),
        "Allowed classes when `gpus` is a number.",
        default_text="any",
        rule="A class that this node lacks is a warning.",
        effect="replace",
        sample="h100-80g",
    ),
    Key(
        "gpu_memory",
        Size(1 << 20),
        "Memory this shard needs on each of its GPUs, for the fit check and for sharing.",
        default_text="whole GPU",
        rule="At most the usable memory of the GPU.",
        effect="replace",
        sample="40GiB",
    ),
    Key(
        "share_gpus",
        Boolean(),
        "Allows this shard on a GPU that another sharing shard uses.",
        default=False,
        rule="Every shard on that GPU needs it, and `gpu_memory`; the sum must fit.",
        effect="replace",
    ),
    Key(
        "tensor_parallel",
        Integer(1, 100_000),
        "Ranks that one layer is split over.",
        default_text="from `gpus`",
        rule="1 or more; must divide the attention heads when they can be read.",
        effect="replace",
        sample=4,
    ),
    Key(
        "pipeline_parallel",
        Integer(1, 100_000),
        "Stages the layers are split into.",
        default=1,
        rule="1 or more.",
        effect="replace",
    ),
    Key(
        "data_parallel",
        Integer(1, 100_000),
        "Full copies inside one engine.",
        default=1,
        rule="1 or more; with `nodes` above 1 not for SGLang.",
        effect="replace",
    ),
    Key(
        "replicas",
        Integer(1, 1000),
        "Independent instances, `NAME/0`, `NAME/1` ..., one load-balanced set.",
        default=1,
        rule="1 to 1000; above 1 needs `gpus` as a number and `port` not as a number.",
        effect="scale",
    ),
    Key(
        "nodes",
        Integer(1, 1000),
        "Nodes that one instance spans; it starts, fails and restarts as one unit.",
        default=1,
        rule="Above 1 needs `[cluster]` and vllm or sglang.",
        effect="replace",
    ),
    Key(
        "placement_priority",
        Integer(-1000, 1000),
        "Higher is placed first when GPUs are short. Not the priority of requests.",
        default=0,
        rule="-1000 to 1000.",
        effect="replace",
    ),
    Key(
        "where",
        Entries(Many(Text(), least=1, single=True, distinct=True), _label, 'rack = "r12"'),
        "Only on nodes whose labels match. Works without `[cluster]` too: one file for all machines.",
        default={},
        rule="Values are a string or a list of strings, any of which matches.",
        effect="replace",
        sample={"node": ["gpu-01", "gpu-02"]},
    ),
    Key(
        "host",
        Text(r"[A-Za-z0-9.:-]{1,253}|\$\{node\.address\}", "an address such as 127.0.0.1, 0.0.0.0 or ::1"),
        "Address the engine binds.",
        default="127.0.0.1",
        rule="A warning when it is not loopback and the engine asks for no key.",
        effect="replace",
    ),
    Key(
        "port",
        Integer(1024, 65535, words=("auto", "unix")),
        'HTTP port of the engine. `"auto"` stays the same over restarts while it is free; `"unix"` is a unix socket.',
        default="auto",
        rule='1024 to 65535; used by nobody else; a warning inside the ephemeral range. `"unix"`: vllm only.',
        effect="replace",
    ),
    Key(
        "command",
        Many(Text(most=131072), least=1),
        'Program and its first arguments; the adapter adds the rest. For `engine = "command"` the whole command.',
        default_text='per engine: `["vllm", "serve"]`, `["sglang", "serve"]`, `["llama-server"]`',
        rule='Required for `engine = "command"`. The program: an absolute path or found on `PATH`. No shell.',
        effect="replace",
        expand="command",
        sample=["/opt/vllm/bin/vllm", "serve"],
    ),
    Key(
        "args",
        _options(),
        "Engine options by their own names, with dashes or underscores: `true` is the bare flag, `false` is `--no-` "
        "(vllm) or nothing, a list several values, a table JSON (vllm, sglang).",
        default={},
        rule="An option that llmgw sets itself is refused and the right key named.",
        effect="replace",
        sample={"gpu-memory-utilization": 0.92},
    ),
    Key(
        "extra_args",
        Many(Text(empty=True, most=131072)),
        "Appended last, as written.",
        default=[],
        rule="Strings; secrets are refused.",
        effect="replace",
        sample=["--seed", "1"],
    ),
    Key(
        "env",
        _variables(),
        "Environment of the engine: text, a secret, or `{ unset = true }`.",
        default={},
        rule="`CUDA_VISIBLE_DEVICES` and `LLMGW_*` are refused: use `gpus`.",
        effect="replace",
        sample={"HF_TOKEN": {"file": "/etc/llmgw/secrets/hf_token"}},
    ),
    Key(
        "workdir",
        _path(),
        "Working directory.",
        default_text="own folder in `state_dir`",
        rule="Must exist when written.",
        effect="replace",
        expand="path",
        sample="/srv/llmgw",
    ),
    Key(
        "api_key",
        SecretKind(),
        "Key the engine asks for; probes and the gateway send it. It goes through the environment where the engine "
        "allows that (SGLang does not). With a `[gateway]`, vllm and llamacpp get a new one at each start, which "
        "nobody else knows; an engine that runs when `[gateway]` comes or goes is left as it is until its next start.",
        default_text="none; generated for vllm and llamacpp with a `[gateway]`",
        rule="To have no key made, name the engine's variable in `env`: `VLLM_API_KEY = { unset = true }`.",
        effect="replace",
        sample={"credential": "engine_key"},
    ),
    Key(
        "quantization",
        Text(r"[A-Za-z0-9_.-]{1,64}", "letters, digits and _ . -"),
        "Passed to the engine; preflight needs it.",
        default_text="from the checkpoint",
        rule="fp8 below compute capability 8.9 is refused, see `allow`.",
        effect="replace",
        sample="fp8",
    ),
    Key(
        "allow",
        Many(Text(r"[a-z0-9-]{1,64}", "the code of a rule, as error messages name it"), distinct=True),
        "Codes of preflight rules whose errors become warnings for this shard.",
        default=[],
        rule="Known codes.",
        sample=["fp8-capability"],
    ),
    Key(
        "max_model_len",
        Integer(1, 1 << 40),
        "Longest context in tokens.",
        default_text="the engine's own",
        rule="1 or more; not above the model's own length when that can be read.",
        effect="replace",
        sample=32768,
    ),
    Key(
        "ready_path",
        Text(r"/[!-~]{0,1023}", "a path that begins with /"),
        "First question to an engine: is the server up? 2xx is yes.",
        default_text="per engine: `/health`, SGLang `/ready`",
        rule="Begins with `/`.",
        sample="/health",
    ),
    Key(
        "models_path",
        Text(r"(?:/[!-~]{0,1023})?", "a path that begins with /", empty=True),
        "Second question: is `model` listed as loaded?",
        default="/v1/models",
        rule='`""` asks only the first question; for `engine = "command"`.',
    ),
    Key(
        "probe_interval",
        Duration(TENTH, FIVE_MINUTES),
        "Pause between probes until Ready.",
        default="1s",
        rule="100ms to 5m.",
    ),
    Key(
        "probe_interval_ready",
        Duration(TENTH, FIVE_MINUTES),
        "Pause between probes after Ready; only the first question is asked then.",
        default="5s",
        rule="100ms to 5m.",
    ),
    Key(
        "probe_timeout",
        Duration(TENTH, FIVE_MINUTES),
        "Longest time for one answer. A timeout means busy, a refused connection means dead.",
        default="5s",
        rule="100ms to 5m.",
    ),
    Key(
        "warmup",
        Boolean(),
        "One request of one token after both answers are yes and before Ready.",
        default=False,
        rule="Not with embedding engines.",
    ),
    Key(
        "start_timeout",
        Duration(ONE_SECOND),
        "Starting: from the launch to the first sign of loading.",
        default="5m",
        rule="1s or more.",
    ),
    Key(
        "load_timeout",
        Duration(ONE_SECOND),
        "Loading: longest time **without progress**. A changed counter, percentage or phase starts it anew.",
        default="30m",
        rule="1s or more.",
    ),
    Key(
        "load_timeout_max",
        Duration(ONE_SECOND, off=True),
        "Loading: hard limit.",
        default="6h",
        rule="Not below `load_timeout`.",
    ),
    Key(
        "stall_timeout",
        Duration(10.0, off=True),
        "Ready: requests run but no step is made for so long: the shard is restarted. `off`: only reported.",
        default="off",
        rule="10s or more; engines with a counter (vllm, sglang, llamacpp).",
    ),
    Key(
        "unhealthy_timeout",
        Duration(10.0, off=True),
        "Ready: health says no for so long: the shard is restarted. `off`: not routable, no more.",
        default="off",
        rule="10s or more.",
    ),
    Key(
        "drain_timeout",
        Duration(),
        "Draining: longest wait, without a signal, for running requests.",
        default="2m",
        rule="`0s` does not wait.",
    ),
    Key(
        "stop_timeout",
        Duration(ONE_SECOND),
        "From SIGTERM until what is left of the process group gets SIGTERM and 2 s later SIGKILL.",
        default="60s",
        rule="1s or more.",
    ),
    Key(
        "gpu_release_timeout",
        Duration(ONE_SECOND),
        "Longest wait until the memory of the GPUs is really free after the end.",
        default="30s",
        rule="1s or more.",
    ),
    Key(
        "restart",
        Choice(("no", "on-failure", "always")),
        "When an ended engine is started again. An end that nobody asked for is a failure whatever the exit code; "
        'only `engine = "command"` may end well with 0.',
        default="on-failure",
        rule="`no`, `on-failure`, `always`.",
    ),
    Key(
        "restart_delay",
        Duration(TENTH),
        "First pause; doubled each time, with jitter.",
        default="5s",
        rule="100ms or more.",
    ),
    Key(
        "restart_delay_max",
        Duration(TENTH),
        "Longest pause.",
        default="5m",
        rule="Not below `restart_delay`.",
    ),
    Key(
        "restart_limit",
        Integer(0, 1_000_000),
        "So many failures in a row and the shard stays Failed until `llmgw start`. A cause that cannot heal is not "
        "retried at all.",
        default=5,
        rule="0 = no limit.",
    ),
    Key(
        "restart_stable",
        Duration(ONE_SECOND),
        "Being Ready that long forgets earlier failures.",
        default="10m",
        rule="1s or more.",
    ),
    Key(
        "autostart",
        Boolean(),
        "Started by `llmgw run`. `false`: Pending until `llmgw start`, or a request when `idle_timeout` is set.",
        default=True,
    ),
    Key(
        "idle_timeout",
        Duration(10.0, off=True),
        "Stopped after so long without a request; the next request starts it again. Shards with it may name the same "
        "GPUs: one holds them at a time.",
        default="off",
        rule="10s or more; needs `[gateway]`.",
    ),
    Key(
        "idle_action",
        Choice(("stop", "sleep")),
        "`stop` frees the GPU; `sleep` uses the engine's own sleep mode and keeps the process.",
        default="stop",
        rule="`sleep` for vllm on loopback only.",
        effect="replace",
    ),
    Key(
        "sleep_level",
        Integer(1, 2),
        "1 keeps the weights in the host's memory, 2 loads them again.",
        default=1,
        rule='1 or 2; needs `idle_action = "sleep"`.',
    ),
    Key(
        "max_inflight",
        Integer(1, 1_000_000, words=("auto",)),
        "Requests sent to one instance at a time; the rest waits in the gateway. `auto`: the engine's own limit, from "
        "its options (`max-num-seqs`, `max-running-requests`, `parallel`), else from its own answer (/props of "
        "llama-server, /server_info of SGLang), else 256. `llmgw status SHARD` shows it.",
        default="auto",
        rule="1 or more.",
    ),
    Key(
        "first_byte_timeout",
        Duration(ONE_SECOND, off=True),
        "As in `[gateway]`, for this shard.",
        default_text="the gateway's",
        rule="1s or more.",
        sample="2m",
    ),
    Key(
        "chunk_timeout",
        Duration(ONE_SECOND, off=True),
        "As in `[gateway]`, for this shard.",
        default_text="the gateway's",
        rule="1s or more.",
        sample="1m",
    ),
)

SHARD = Table(
    "shard",
    _SHARD_KEYS,
    "One table for each engine to run.",
    SHARD_FOREIGN,
    array=True,
)

_NOT_IN_DEFAULTS = {
    "name": "each [[shard]] has its own name",
    "model": "each [[shard]] names its model",
    "aliases": "aliases belong to one [[shard]]",
    "weights": "weights belong to one [[shard]]",
    "inherit": "inherit belongs to one [[shard]]",
}
"""Keys of a shard that `[defaults]` refuses, with why."""


def _for_defaults(key: Key) -> Key:
    # A list of GPUs or a port number for every shard could only collide.
    if key.name == "gpus":
        return attrs.evolve(key, kind=Gpus(pinned=False), sample=1)
    if key.name == "port":
        return attrs.evolve(key, kind=Choice(("auto", "unix")))
    return key


_DEFAULT_KEYS = tuple(_for_defaults(k) for k in _SHARD_KEYS if k.name not in _NOT_IN_DEFAULTS and k.name != "engine")
_ENGINE_KEY = SHARD.by_name["engine"]
ENGINE_DEFAULTS: Mapping[str, Table] = {
    engine: Table(f"defaults.{engine}", _DEFAULT_KEYS, f'Values for shards with `engine = "{engine}"`.', SHARD_FOREIGN)
    for engine in ENGINES
}
DEFAULTS = Table(
    "defaults",
    (
        _ENGINE_KEY,
        *(k for k in _DEFAULT_KEYS if k.name != "command"),
        *(
            Key(engine, Record(table), table.meaning, default={}, effect="replace")
            for engine, table in ENGINE_DEFAULTS.items()
        ),
    ),
    "Values that every shard starts from: any key of `[[shard]]` but `name`, `model`, `aliases`, `weights`, `inherit` "
    "and `command`; `gpus` only as a number, `port` only as `auto` or `unix`.",
    SHARD_FOREIGN,
)

RATE = Table(
    "gateway.tenant.rate",
    (
        Key("requests_per_minute", Integer(1, 10**12), "Requests in a minute.", default_text="no limit", sample=600),
        Key("tokens_per_minute", Integer(1, 10**15), "Tokens in a minute.", default_text="no limit", sample=2_000_000),
    ),
    "Limits of a tenant per minute.",
    {"rpm": "requests_per_minute", "tpm": "tokens_per_minute"},
)

TENANT = Table(
    "gateway.tenant",
    (
        Key(
            "name",
            _name(),
            "Name in metrics, logs and events.",
            required=True,
            rule="As names of shards; unique; `anonymous` is reserved.",
            sample="chat-product",
        ),
        Key(
            "keys",
            Many(SecretKind(hashes=True), least=1),
            'Accepted API keys. `{ sha256 = "…" }` stores no key at all; `llmgw key new` prints key and hash.',
            required=True,
            rule="At least one; no key in two tenants; a plain value has 16 characters or more.",
            sample=[{"sha256": "6b3a55e0261b0304143f805a24924d0c1c44524821305f31d9277843b8a10f4e"}],
        ),
        Key(
            "bands",
            Many(_name(), least=1, distinct=True),
            "Bands it may use; the first is its own default.",
            default_text="the default band",
            rule="Must exist; no band twice.",
            sample=["interactive", "normal"],
        ),
        Key(
            "weight", Integer(1, 1000), "Share inside a band, next to the other tenants.", default=1, rule="1 to 1000."
        ),
        Key(
            "max_inflight",
            Integer(0, 1_000_000),
            "Running requests of this tenant.",
            default=0,
            rule="0 = no limit.",
        ),
        Key(
            "queue_limit",
            Integer(0, 1_000_000),
            "Waiting requests of this tenant in one band of a model.",
            default_text="the band's",
            rule="0 or more.",
            sample=100,
        ),
        Key(
            "models",
            Many(Text(r"[A-Za-z0-9._/:*-]{1,128}", _MODEL_FORM + " and *"), least=1, distinct=True),
            "Models and aliases it may use; `*` matches any run of characters.",
            default_text="all",
            rule="Each entry must match at least one model.",
            sample=["llama-3.3-70b"],
        ),
        Key("rate", Record(RATE), "Limits per minute.", default={}, rule="Integers of 1 or more."),
    ),
    "One table for each tenant.",
    {"api_keys": "keys", "apikeys": "keys", "key": "keys", "rpm": "rate", "tpm": "rate", "band": "bands"},
    array=True,
)

BAND = Table(
    "gateway.band",
    (
        Key(
            "name",
            _name(),
            "Name, as clients send it.",
            required=True,
            rule="As names of shards; unique.",
            sample="interactive",
        ),
        Key(
            "default",
            Boolean(),
            "Used when neither tenant nor request names one.",
            default=False,
            rule="Exactly one when bands are written.",
        ),
        Key("max_inflight", Integer(0, 1_000_000), "Running requests of this band.", default=0, rule="0 = no limit."),
        Key(
            "reserved",
            Integer(0, 1_000_000),
            "Slots kept free for this band.",
            default=0,
            rule="The sum must be below the gateway's limit when there is one.",
        ),
        Key(
            "queue_limit",
            Integer(0, 1_000_000),
            "As in `[gateway]`, for this band.",
            default_text="the gateway's",
            sample=200,
        ),
        Key(
            "queue_timeout",
            Duration(ONE_SECOND, off=True),
            "As in `[gateway]`, for this band.",
            default_text="the gateway's",
            sample="30s",
        ),
        Key(
            "promote_after",
            Duration(ONE_SECOND, off=True),
            "A request that waited so long is served like one of the next higher band.",
            default="15s",
            rule="1s or more; below `queue_timeout`.",
        ),
    ),
    "The order in the file is the priority. Writing one band replaces the three built-in ones.",
    array=True,
)

TLS = Table(
    "gateway.tls",
    (
        Key(
            "cert",
            _path(),
            "Certificate chain, PEM.",
            required=True,
            rule="Readable; matches the key.",
            effect="bind",
            expand="path",
            sample="/etc/llmgw/tls/fullchain.pem",
        ),
        Key(
            "key",
            SecretKind(inline=False),
            "Private key, PEM.",
            required=True,
            rule="As `{ file }` or `{ credential }`.",
            effect="bind",
            sample={"credential": "tls_key"},
        ),
        Key(
            "client_ca",
            _path(),
            "Clients must show a certificate signed by it.",
            rule="Readable.",
            effect="bind",
            expand="path",
            sample="/etc/llmgw/tls/clients.pem",
        ),
    ),
    "TLS on the gateway's addresses.",
)

GATEWAY = Table(
    "gateway",
    (
        Key(
            "listen",
            Many(ListenKind(), least=1, single=True, distinct=True),
            "`host:port`, `[v6]:port` or `unix:PATH`.",
            default="127.0.0.1:8080",
            rule="Port 1 to 65535, free; path at most 107 bytes; no address twice.",
            effect="bind",
        ),
        Key(
            "allow_anonymous",
            Boolean(),
            "Requests without a key are accepted.",
            default_text="`true` when every `listen` is local and there is no tenant",
            rule="An open address without tenants needs `true` here.",
            sample=True,
        ),
        Key(
            "max_inflight",
            Integer(0, 10_000_000),
            "Over the whole gateway; the rest queues.",
            default=0,
            rule="0 = no limit.",
        ),
        Key(
            "queue_limit",
            Integer(0, 10_000_000),
            "Waiting requests per band of a model; beyond it 429 with `Retry-After`.",
            default=1000,
            rule="0 = never queue.",
        ),
        Key(
            "queue_timeout",
            Duration(ONE_SECOND, off=True),
            "Longest wait for a slot; then 503 with `Retry-After`.",
            default="60s",
            rule="1s or more.",
        ),
        Key(
            "load_wait",
            Duration(ONE_SECOND),
            "Longest wait for a model that loads.",
            default="10m",
            rule="1s or more.",
        ),
        Key(
            "routing",
            Choice(("least_load", "power_of_two", "round_robin", "random", "prefix", "consistent_hashing")),
            "How one of several instances is chosen.",
            default="least_load",
        ),
        Key(
            "fairness",
            Choice(("requests", "tokens")),
            "What tenants take turns by inside a band.",
            default="requests",
        ),
        Key(
            "operator_keys",
            Many(SecretKind(hashes=True)),
            "Keys for `/metrics`, `/ui` and `/upstream/`; keys of tenants do not open these.",
            default=[],
            rule="As `keys` of a tenant; not the key of one.",
            sample=[{"file": "/etc/llmgw/secrets/operator.key"}],
        ),
        Key(
            "cors_origins",
            Many(
                Text(r"\*|[a-z][a-z0-9+.-]*://[A-Za-z0-9._\[\]:-]+", 'scheme://host[:port] or "*"'),
                distinct=True,
            ),
            'Origins whose pages may call the API; `"*"` = any.',
            default=[],
            rule='`scheme://host[:port]` or `"*"`.',
            sample=["https://chat.example.org"],
        ),
        Key(
            "trust_headers_from",
            Many(Text(), distinct=True),
            "Networks whose headers about tenant, band and client address are believed.",
            default=[],
            rule="CIDR or `unix`.",
            sample=["10.0.0.0/8"],
        ),
        Key("connect_timeout", Duration(TENTH), "To the engine.", default="2s", rule="100ms or more."),
        Key(
            "first_byte_timeout",
            Duration(ONE_SECOND, off=True),
            "From sending to the first byte; prefill may take minutes.",
            default="off",
            rule="1s or more.",
        ),
        Key(
            "chunk_timeout",
            Duration(ONE_SECOND, off=True),
            "Between two chunks of an answer.",
            default="5m",
            rule="1s or more.",
        ),
        Key("head_timeout", Duration(ONE_SECOND), "For a request's head; then 408.", default="10s", rule="1s or more."),
        Key(
            "body_timeout",
            Duration(ONE_SECOND),
            "Longest time without a byte of a request's body; then 408.",
            default="60s",
            rule="1s or more.",
        ),
        Key(
            "write_timeout",
            Duration(ONE_SECOND),
            "A client that does not read for so long is dropped.",
            default="60s",
            rule="1s or more.",
        ),
        Key("keepalive_timeout", Duration(ONE_SECOND), "Idle connections.", default="75s", rule="1s or more."),
        Key(
            "drain_timeout",
            Duration(),
            "When llmgw ends or restarts, running streams go on for so long.",
            default="10s",
            rule="`0s` does not wait.",
        ),
        Key("max_body", Size(1 << 10), "Beyond it 413.", default="64MiB", rule="1KiB or more."),
        Key(
            "max_buffered",
            Size(1 << 10),
            "All request bodies together.",
            default="1GiB",
            rule="Not below `max_body`.",
        ),
        Key("max_header", Size(8 << 10), "Beyond it 431.", default="64KiB", rule="8KiB or more."),
        Key(
            "access_log",
            Choice(("off", "sampled", "on")),
            "Structured, without prompts and keys.",
            default="sampled",
        ),
        Key(
            "metrics",
            Boolean(),
            "`GET /metrics` on the gateway.",
            default=True,
            rule="Beyond local addresses only with an operator key.",
        ),
        Key("engine_metrics", Boolean(), "Adds the engines' own series, with labels of shards.", default=False),
        Key(
            "ui",
            Boolean(),
            "Read-only page at `/ui`.",
            default_text="`true` when every `listen` is local",
            rule="As `metrics`.",
            sample=True,
        ),
        Key(
            "workers",
            Integer(1, 1024),
            "Processes for the data path.",
            default=1,
            rule="More than 1 is refused for now.",
            effect="restart",
        ),
        Key("tls", Record(TLS), "TLS, see `[gateway.tls]`.", default_text="absent", effect="bind"),
        Key("band", Records(BAND), "Bands, see `[[gateway.band]]`.", default_text="`interactive`, `normal`, `batch`"),
        Key("tenant", Records(TENANT), "Tenants, see `[[gateway.tenant]]`.", default=[]),
    ),
    "The OpenAI-compatible door. Absent: engines are supervised, nothing is routed.",
    {"strategy": "routing", "apikeys": "tenant", "bind": "listen", "tenants": "tenant", "bands": "band"},
)

CLUSTER = Table(
    "cluster",
    (
        Key(
            "name",
            _name(),
            "Name of the cluster; separates clusters on one etcd.",
            required=True,
            effect="restart",
            sample="prod",
        ),
        Key(
            "etcd",
            Many(
                Text(r"https?://[A-Za-z0-9._\[\]:-]+/?", "http://host:port or https://host:port"),
                least=1,
                distinct=True,
            ),
            "Endpoints, `http://` or `https://`.",
            required=True,
            effect="restart",
            sample=["https://10.0.0.1:2379"],
        ),
        Key(
            "ca",
            _path(),
            "CA of the etcd servers.",
            default_text="the system's",
            effect="restart",
            expand="path",
            sample="/etc/llmgw/tls/etcd-ca.pem",
        ),
        Key(
            "cert",
            _path(),
            "Client certificate (issued without a CommonName).",
            effect="restart",
            expand="path",
            sample="/etc/llmgw/tls/node.pem",
        ),
        Key(
            "key",
            _path(),
            "Key of the client certificate.",
            effect="restart",
            expand="path",
            sample="/etc/llmgw/tls/node.key",
        ),
        Key("user", Text(), "User of etcd.", effect="restart", sample="agent"),
        Key("password", SecretKind(), "Its password.", effect="restart", sample={"credential": "etcd_password"}),
        Key(
            "gateways",
            Many(_name(), distinct=True),
            "Nodes that run the gateway.",
            default_text="every node with `[gateway]`",
            effect="restart",
            sample=["gw-1", "gw-2"],
        ),
        Key(
            "node_grace",
            Duration(ONE_SECOND),
            "A lease gone for so long lets replicas move.",
            default="60s",
            effect="restart",
        ),
        Key(
            "self_fence_after",
            Duration(ONE_SECOND, off=True),
            "A cut-off node stops its engines after so long.",
            default="off",
            effect="restart",
        ),
    ),
    "More than one node. Its presence is the only switch.",
)

FILE = Table(
    "",
    (
        Key(
            "include",
            Many(Text()),
            "More files of the same format: a path or a glob, relative to the folder of this file.",
            default=[],
            rule="Main file only. A plain path must exist; a glob may match nothing. One file twice is an error.",
            expand="path",
            sample=["conf.d/*.toml"],
        ),
        Key("node", Record(NODE), NODE.meaning, default={}, effect="restart"),
        Key("supervisor", Record(SUPERVISOR), SUPERVISOR.meaning, default={}, effect="restart"),
        Key("defaults", Record(DEFAULTS), DEFAULTS.meaning, default={}, effect="replace"),
        Key("gateway", Record(GATEWAY), GATEWAY.meaning, default_text="absent"),
        Key("cluster", Record(CLUSTER), CLUSTER.meaning, default_text="absent", effect="restart"),
        Key("shard", Records(SHARD), SHARD.meaning, default=[]),
    ),
    "The whole file.",
    {"models": "shard", "shards": "shard", "nodes": "node", "default": "defaults", "services": "shard"},
)

TABLES: tuple[Table, ...] = (
    FILE,
    NODE,
    SUPERVISOR,
    DEFAULTS,
    *ENGINE_DEFAULTS.values(),
    SHARD,
    GATEWAY,
    TLS,
    BAND,
    TENANT,
    RATE,
    CLUSTER,
)
"""All tables, outer ones first."""


def why_not_in_defaults(name: str) -> str | None:
    """Why `[defaults]` has no such key although shards have it; None when that is not the case."""
    if name == "command":
        return "command belongs to one engine: write it in [defaults.ENGINE]"
    return _NOT_IN_DEFAULTS.get(name)
