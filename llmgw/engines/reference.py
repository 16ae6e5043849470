"""The reference pages about engines, made from the tables that decide, so that they cannot say anything else.

`python -m llmgw.engines.reference FOLDER` writes them; a test compares the files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from llmgw.domain.shard import EngineKind
from llmgw.engines.adapter import ADAPTERS, EngineProfile
from llmgw.engines.environment import DROPPED_VARIABLES
from llmgw.engines.rules import ENDINGS, MEMORY_OPTION, RULES
from llmgw.engines.variables import VARIABLES
from llmgw.engines.versions import KNOWN_SINCE

_NAMES = {
    EngineKind.VLLM: "vLLM",
    EngineKind.SGLANG: "SGLang",
    EngineKind.LLAMACPP: "llama.cpp",
    EngineKind.COMMAND: "any command",
}
_HEAD = "<!-- Made by `python -m llmgw.engines.reference docs/reference`; do not edit. -->\n"
_KNOWN = {"M": "produced with the engine", "S": "in its source", "B": "in a library", "U": "reported"}


def pages() -> Mapping[str, str]:
    """File name -> text."""
    return {"failures.md": failures_page(), "engines.md": engines_page()}


def failures_page() -> str:
    """Each code that a failed shard's `reason` can carry because of what an engine printed or how it ended."""
    out = [
        "# Why a shard failed",
        _HEAD,
        "When an engine ends although nobody asked it to, llmgw looks for the cause in the lines it kept: first for "
        "the rules below, in this order, then at the exit itself. The first rule that matches anywhere wins; of its "
        "lines the one nearest to the cause is shown (a worker's before the engine core's before the server's). "
        "Lines of level INFO and WARNING are not looked at where the engine prints levels. `llmgw status` shows the "
        "code, the cause, what to do, and the lines.",
        "",
        "Where it says *not tried again*, another attempt would fail in the same way: the shard stays failed until "
        "`llmgw start` or a changed file. All others are tried again as `restart` says.",
        "",
        "## By what the engine printed",
        "",
    ]
    for rule in RULES:
        out += [f"### {rule.code}", "", f"{_sentence(_general(rule.cause))}", ""]
        out += [f"- **What to do:** {_general(rule.remedy)}."]
        out += [f"- **Tried again:** {'yes' if rule.retry else 'no'}."]
        known = ", ".join(_KNOWN[letter] for letter in rule.known.split(", "))
        out += [f"- **Looked for** ({known}): `` {rule.pattern.pattern} ``", ""]
    out += ["## By how it ended", ""]
    for ending in ENDINGS.values():
        out += [f"### {ending.code}", "", f"When: {ending.when}.", ""]
        out += [f"- **Said:** {_general(ending.cause)}."]
        out += [f"- **What to do:** {_general(ending.remedy)}."]
        out += [f"- **Tried again:** {'yes' if ending.retry else 'no'}.", ""]
    return "\n".join(out).rstrip() + "\n"


def engines_page() -> str:
    """What llmgw adds to and takes away from an engine's command line and environment."""
    out = ["# Engines: command line and environment", _HEAD]
    out += ["`llmgw plan SHARD` shows the result for one shard, with the origin of each variable.", ""]
    for kind, adapter in ADAPTERS.items():
        profile = adapter.profile
        out += [f"## {_NAMES[kind]}", ""]
        if profile.default_command:
            out += [f"Command unless written: `{' '.join(profile.default_command)}`. Versions: "]
            out[-1] += f"{profile.supported_versions}."
        else:
            out += ["The whole `command` is yours; nothing is added to it but `args` and `extra_args`."]
        out += [""]
        if profile.owned:
            out += ["These options are llmgw's own; in `args` they are refused:", ""]
            out += ["| option | use instead |", "|---|---|"]
            out += [f"| `{name}` | `{key}` |" for name, key in profile.owned.items()]
            out += [""]
        since = [(name, version) for (of, name), version in KNOWN_SINCE.items() if of is kind]
        if since:
            text = ", ".join(f"`--{name}` {'.'.join(map(str, version))}" for name, version in since)
            out += [f"Options that llmgw adds only from a version on: {text}.", ""]
    out += ["## Variables in `command`, `args`, `extra_args` and `env`", "", "| variable | meaning |", "|---|---|"]
    out += [f"| `${{llmgw.{name}}}` | {meaning} |" for name, meaning in VARIABLES.items()]
    out += [
        "",
        "`$$` is a dollar sign. Secrets are passed on as they are.",
        "",
        "## Variables that an engine does not inherit",
        "",
        "A shard that needs one of them writes it into its `env`. Besides these, every variable that some table of "
        'the file uses as a secret (`{ env = "NAME" }`) is left out.',
        "",
        "| variable | why |",
        "|---|---|",
    ]
    out += [f"| `{name}` | {why} |" for name, why in DROPPED_VARIABLES.items()]
    out += [
        "",
        "## Variables that every engine gets",
        "",
        "| variable | value | why |",
        "|---|---|---|",
        "| `LLMGW_SHARD_ID`, `LLMGW_RUN_ID` | the instance, and a name for this launch | processes are found again |",
        "| `SPT_NOENV` | `1` | process titles leave the environment readable |",
        "| `TMPDIR` | a short folder of its own below `state_dir` | sockets go there; it is removed afterwards |",
        "| `PYTHONUNBUFFERED` | `1` | the last words before a crash are not lost |",
        "| `CUDA_DEVICE_ORDER` | `PCI_BUS_ID` | the order of nvidia-smi |",
        "| `CUDA_VISIBLE_DEVICES` | the shard's GPUs; empty without GPUs | empty hides all GPUs from CUDA, so that a "
        "shard on the CPU takes no memory of one. Other back ends (Vulkan) do not read it: give llama-server "
        '`device = "none"` in `args` |',
        "| `NO_PROXY`, `no_proxy` | what was there, `127.0.0.1`, `::1` | engines ask themselves over loopback |",
        "",
        "vLLM also gets `VLLM_ENGINE_READY_TIMEOUT_S` (7 days, so that `load_timeout` is the only limit), SGLang "
        "the three variables that end its waits for core dumps and stack dumps after a crash (some 65 s in which it "
        "would hold its GPUs).",
        "",
        "## The engine's key",
        "",
        "`api_key` reaches vLLM as `VLLM_API_KEY` and llama-server as `LLAMA_API_KEY`, in the environment, which "
        "other users cannot read. SGLang takes it on the command line only, where every user of the machine can; "
        "llmgw warns. llama-server splits its key at commas, so a key with one is refused.",
        "",
        "With a `[gateway]`, a shard of vLLM or llama.cpp without `api_key` gets a key of llmgw's making, another one "
        "at each start: only the gateway and llmgw's own questions can use the engine then. It stands in the shard's "
        "record below `state_dir` (mode 0600), so that an engine which is taken over keeps it, and nowhere else; "
        "`llmgw plan SHARD` shows `***`. It is no key of the file: when `[gateway]` is added or removed, running "
        "engines go on as they are until their next start. Name the variable in the shard's `env` to have none made "
        "(`VLLM_API_KEY = { unset = true }`), or write `api_key` for one that others know too. For SGLang and for "
        '`engine = "command"` none is made: keep those on loopback.',
        "",
        "## How many requests it works on at a time",
        "",
        'With `max_inflight = "auto"` the gateway sends an engine as many requests at a time as it works on:',
        "",
        "| engine | option on its command line | else asked when it becomes ready |",
        "|---|---|---|",
        *(_slots_row(adapter.profile) for adapter in ADAPTERS.values() if adapter.profile.slots_options),
        "",
        "What neither says counts as 256. With data parallel copies the option counts for each copy, as the engine "
        "reads it; SGLang with `--enable-dp-attention` divides it among them.",
    ]
    return "\n".join(out).rstrip() + "\n"


def _slots_row(profile: EngineProfile) -> str:
    options = " or ".join(f"`{'-' if len(name) < 3 else '--'}{name}`" for name in profile.slots_options)
    asked = f"`{profile.slots_path}`" if profile.slots_path is not None else "no"
    return f"| {_NAMES[profile.kind]} | {options} | {asked} |"


def _general(text: str) -> str:
    """A text of a table without a particular shard: the words that a launch would put in are spelt out."""
    words = {
        "shard": "the shard",
        "memory": " or ".join(f"`{name}`" for name in MEMORY_OPTION.values()),
        "holder": "",
        "how": "…",
        "signal": "its name",
        "said": ": the last error",
    }
    return text.format_map(words)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def main(folder: str) -> None:
    """Write the pages into `folder`."""
    for name, text in pages().items():
        with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main(sys.argv[1])
