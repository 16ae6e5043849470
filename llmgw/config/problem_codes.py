"""Every code that reading a configuration can report, with the paragraph that documents it.

Codes of checks against the machine are in the table of `llmgw.preflight.rules`.
"""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, str] = {
    "adapter-not-active": "A port of `[node] fabric` is there, but engines cannot use it now; the message says why. "
    "`llmgw check` refuses it; for `llmgw run` it is a warning, since engines on one node do without.",
    "alias-taken": "A name among `aliases` already leads to another model. A name leads to one model.",
    "bad-value": "The value has the right type but not the form that this key wants; the message shows the form.",
    "credential-not-visible": "systemd gives credentials to the service alone, so a command in a shell cannot see "
    "them. `llmgw check` warns; for `llmgw run` it is an error.",
    "default-band": "When bands are written, exactly one has `default = true`.",
    "duplicate-name": "Two shards, bands or tenants have one name; the message names the first place.",
    "empty": "An empty text, list or file where something is needed.",
    "engine-cannot": "The chosen engine has no such ability (unix sockets, several nodes, sleep, a counter of steps).",
    "ephemeral-port": "The kernel gives ports of its ephemeral range to outgoing connections, so another program may "
    "hold one just when an engine starts. Choose a range outside, or narrow `net.ipv4.ip_local_port_range`.",
    "file-too-large": "A configuration file has more than 4 MiB; probably the wrong file was named.",
    "given-twice": "One value stands twice in a list, or one setting is written under two names.",
    "gpu-taken": "Two shards on this node name one GPU. Both need `share_gpus` and `gpu_memory`, or both "
    "`idle_timeout`, for that to be meant.",
    "included-twice": "One file is reached by two entries of `include`.",
    "inherit-circle": "Shards inherit from each other in a circle.",
    "key-taken": "One API key belongs to two owners. Requests could not be told apart.",
    "missing-key": "A key that has no default is not written, nor inherited.",
    "needs-cluster": "Something that spans nodes is written, but there is no `[cluster]`.",
    "needs-gateway": "`idle_timeout` counts requests, which only a `[gateway]` sees.",
    "needs-operator-key": "Metrics and the page at `/ui` beyond this machine need `operator_keys`.",
    "nested-include": "An included file includes others. Only the main file may, so that reading order is plain.",
    "network-folder": "`runtime_dir` is on a network file system, where sockets and locks do not work.",
    "no-effect": "A key that does nothing together with the others.",
    "no-such-adapter": "`[node] fabric` names an RDMA device or port that this host does not have. "
    "`llmgw inventory` lists them.",
    "no-such-file": "A file that the configuration names does not exist.",
    "no-such-gpu": "`[node] gpus` names a GPU that this host does not have.",
    "no-such-group": "The group of the control socket does not exist on this host.",
    "not-a-duration": "The text is no duration. Write number and unit without blanks: `90s`, `10m`, `1h30m`, `250ms`.",
    "not-a-folder": "A file or something else stands where a directory should be.",
    "not-a-size": "The text is no size. Write number and unit: `512MiB`, `16GiB`, `80GB`.",
    "not-an-array": "`[shard.NAME]` makes tables inside tables, which TOML accepts silently, above all when a name has "
    'a dot. Shards are an array of tables: `[[shard]]` with `name = "NAME"`.',
    "not-in-defaults": "The key belongs to one shard (or, `command`, to one engine) and cannot be a default for all.",
    "not-readable": "This user may not read a file that the configuration names.",
    "not-this-host": "`address` is none of this host's addresses.",
    "not-writable": "This user may not write to a directory of llmgw. `llmgw check` warns; for `run` it is an error.",
    "not-yet": "The schema knows it, this version cannot serve it. It is refused rather than ignored.",
    "nothing-to-run": "There is neither a shard nor a gateway.",
    "open-engine": "An engine listens beyond loopback without a key: whoever reaches the port may use it.",
    "open-gateway": "The gateway listens beyond this machine and asks nobody for a key.",
    "open-socket": "The control socket's mode lets every user of the host control llmgw.",
    "out-of-range": "The value is below the least or above the most allowed, or contradicts a second limit.",
    "owned-option": "llmgw sets this option of the engine itself, from the key that the message names. In `args` it is "
    "refused; in `extra_args` it is a warning, as the way out.",
    "owned-variable": "llmgw sets this variable itself. For `CUDA_VISIBLE_DEVICES` use `gpus`.",
    "path-too-long": "Unix sockets may have paths of 107 bytes; engines put sockets below a shard's TMPDIR, which may "
    "therefore have 60.",
    "port-taken": "Two shards, or a shard and the gateway, have one port.",
    "ports-overlap": "`engine_ports` and `rendezvous_ports` overlap.",
    "replicas-pinned": "Several instances cannot all have the GPUs or the port that is written.",
    "reserved": "The word has a fixed meaning in llmgw.",
    "secret-file-open": "Every user of the host may read a secret's file. `chmod o-r` it.",
    "secret-form": "A secret says in exactly one way where it is: `value`, `env`, `file`, `credential` (or `sha256`).",
    "secret-in-args": "A secret among an engine's options would be in the process list for every user of the host. Use "
    "`env` or `api_key`.",
    "secret-in-readable-file": "A secret stands as text in a file that every user of the host may read.",
    "secret-missing": "A secret's variable is not set or empty, or its file cannot be read.",
    "secret-too-large": "A secret's file has more than 64 KiB.",
    "set-twice": "Two files set one key. A later file never overrides an earlier one, not even with the same value.",
    "share-needs-memory": "`share_gpus` needs `gpu_memory`, or nobody could tell whether the shards fit.",
    "syntax": "The file is not TOML, or not UTF-8. Nothing else in it is judged before that is mended.",
    "too-long": "A text is longer than programs can be given.",
    "too-many-files": "`include` meets more than 1000 files.",
    "uneven-gpus": "`tensor_parallel` x `pipeline_parallel` x `data_parallel` is not an instance's number of GPUs, "
    "or `nodes` does not divide it.",
    "unknown-key": "No such key in this table. Keys of other tools are recognised and the right one is named.",
    "unknown-model": "A tenant's `models` has an entry that matches no model or alias.",
    "unknown-shard": "`inherit` names no shard.",
    "unknown-value": "The value is none of the allowed words.",
    "unknown-variable": "No such `${llmgw.NAME}`, or it has no value at this place.",
    "unreadable": "A file cannot be read, or is no regular file.",
    "unset-variable": "`${NAME}` is not set where the file is read. `${NAME:-default}` allows that. A shell's "
    "environment can differ from the service's.",
    "variable-not-replaced": "`${NAME}` is replaced in `env`, `command`, `weights` and paths; in options it reaches "
    "the engine as it stands.",
    "weak-key": "An API key of fewer than 16 characters can be guessed. `llmgw key new` makes one.",
    "wrong-type": "The value has another type than the key wants. TOML's types are never converted.",
}
