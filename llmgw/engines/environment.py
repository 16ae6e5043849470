"""The environment of an engine: inherited minus one list, plus what llmgw sets, plus the shard's own `env`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from attrs import frozen

from llmgw.domain.secret_names import sounds_secret
from llmgw.domain.shard import EnvOrigin, LaunchPlan, Secret, Unset

DROPPED_VARIABLES: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "`gpus` decides",
    "RANK": "of a job launcher: the engine would join that job",
    "LOCAL_RANK": "of a job launcher",
    "LOCAL_WORLD_SIZE": "of a job launcher",
    "WORLD_SIZE": "of a job launcher",
    "MASTER_*": "address and port of a job launcher",
    "NCCL_*": "meant for another job; write what this shard needs into its `env`",
    "HOST_IP": "read by SGLang as its own address",
    "VLLM_PORT": "base of vLLM's internal ports; a Kubernetes service called vllm sets it to a URI",
    "VLLM_DP_*": "data-parallel rank and address of another vLLM",
    "VLLM_PROCESS_NAME_PREFIX": "changes the process titles by which llmgw sees that loading has begun",
    "VLLM_API_KEY": "a key that llmgw's probes would not know; use `api_key`",
    "LLAMA_API_KEY": "a key that llmgw's probes would not know; use `api_key`",
    "LLAMA_ARG_API_KEY_FILE": "keys that llmgw's probes would not know; use `api_key`",
    "NOTIFY_SOCKET": "systemd's, meant for llmgw",
    "WATCHDOG_*": "systemd's, meant for llmgw",
    "LISTEN_*": "systemd's, meant for llmgw",
    "CREDENTIALS_DIRECTORY": "systemd's, meant for llmgw",
    "STATE_DIRECTORY": "systemd's, meant for llmgw",
    "RUNTIME_DIRECTORY": "systemd's, meant for llmgw",
    "CACHE_DIRECTORY": "systemd's, meant for llmgw",
    "LOGS_DIRECTORY": "systemd's, meant for llmgw",
    "CONFIGURATION_DIRECTORY": "systemd's, meant for llmgw",
    "INVOCATION_ID": "systemd's, meant for llmgw",
    "JOURNAL_STREAM": "systemd's; engines write to a file",
    "LLMGW_*": "llmgw's own",
}
"""What an engine never inherits, with the reason. A `*` at the end stands for any rest. Besides these, every
variable that some table names as a secret is dropped. A shard that needs one of them writes it into its `env`.
"""

_EXACT = frozenset(name for name in DROPPED_VARIABLES if not name.endswith("*"))
_PREFIXES = tuple(name[:-1] for name in DROPPED_VARIABLES if name.endswith("*"))

_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]*@")
"""A URL with a password in it, as proxy variables may hold."""

LOOPBACK = ("127.0.0.1", "::1")
"""What NO_PROXY gains: engines talk to themselves (SGLang's warm-up) and must not ask a proxy for it."""


def is_dropped(name: str) -> bool:
    """Whether `DROPPED_VARIABLES` names this variable."""
    return name in _EXACT or name.startswith(_PREFIXES)


def looks_secret(name: str, value: str) -> bool:
    """Whether a variable is masked wherever it is shown although nobody declared it a secret."""
    return bool(value) and (sounds_secret(name) or _SECRET_VALUE.search(value) is not None)


@frozen
class Environment:
    """The merged variables, where each comes from, and which of them are not to be shown."""

    values: Mapping[str, str]
    origins: Mapping[str, EnvOrigin]
    secret: frozenset[str]


def merge_env(
    plan: LaunchPlan,
    generated: Mapping[str, str],
    secret_names: frozenset[str],
    substitute: Callable[[str, str], str],
) -> Environment:
    """Merge the three layers, the shard's own `env` last.

    `generated` is what the engine's adapter adds, `secret_names` which of those are secrets. `substitute(name,
    text)` resolves llmgw's variables in a written value and may raise what it likes.
    """
    values: dict[str, str] = {}
    origins: dict[str, EnvOrigin] = {}
    secret: set[str] = set()
    for name, value in plan.inherited_env.items():
        if not is_dropped(name) and name not in plan.secret_variables:
            values[name] = value
            origins[name] = "inherited"
    for name, value in {**_common(plan), **generated, **plan.group_env}.items():
        values[name] = value
        origins[name] = "generated"
        if name in secret_names:
            secret.add(name)
    for name, written in plan.spec.env.items():
        secret.discard(name)
        if isinstance(written, Unset):
            values.pop(name, None)
            origins.pop(name, None)
            continue
        origins[name] = plan.spec.origins.get(f"env.{name}", "file")
        if isinstance(written, Secret):
            values[name] = written.reveal()
            secret.add(name)
        else:
            values[name] = substitute(name, written)
    _add_loopback(plan, values, origins)
    secret.update(name for name, value in values.items() if looks_secret(name, value))
    return Environment(values, origins, frozenset(secret))


def _common(plan: LaunchPlan) -> dict[str, str]:
    return {
        "LLMGW_SHARD_ID": str(plan.id),
        "LLMGW_RUN_ID": plan.run_id,
        # Keeps /proc/PID/environ readable although the engines rewrite their titles: the marker stays visible.
        "SPT_NOENV": "1",
        "TMPDIR": plan.tmp_dir,
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # Empty hides every GPU from CUDA, which is meant for a shard on CPU: unset, it would take memory of GPU 0.
        # vLLM's own code reads empty like unset, but the CUDA library below it does not.
        "CUDA_VISIBLE_DEVICES": ",".join(plan.devices),
    }


def _add_loopback(plan: LaunchPlan, values: dict[str, str], origins: dict[str, EnvOrigin]) -> None:
    before = {name: values.get(name) for name in ("NO_PROXY", "no_proxy")}
    for name, other in (("NO_PROXY", "no_proxy"), ("no_proxy", "NO_PROXY")):
        if isinstance(plan.spec.env.get(name), Unset):
            continue
        # Programs read one of the two, so each gets what stands in the other where it is missing itself.
        kept = before[name] if before[name] is not None else before[other]
        entries = [entry.strip() for entry in (kept or "").split(",") if entry.strip()]
        if "*" not in entries:
            entries += [address for address in LOOPBACK if address not in entries]
        text = ",".join(entries)
        if text != before[name]:
            values[name] = text
            if origins.get(name) in (None, "inherited"):
                origins[name] = "generated"
