"""What lies in a local folder of weights, read within bounds. Shell: a network disk may be slow, so this runs in a
thread wherever something waits."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from typing import Any, Literal

from llmgw.domain.host import GgufFile, ModelFolder

CONFIG_MAX = 4 << 20
"""Bytes of a config.json that are read; the largest genuine ones have some 100 KiB."""
INDEX_MAX = 64 << 20
"""Bytes of an index: 4 MiB for models of a thousand files."""
FILES_MAX = 10_000
"""Entries of a folder that are looked at."""

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "consolidated.safetensors.index.json")
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
"""Endings of files with weights; the first kind that there is counts, since engines load one of them."""
TOKENIZERS = frozenset(
    {
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
        "tekken.json",
        "spiece.model",
        "sentencepiece.bpe.model",
        "qwen.tiktoken",
    }
)
NATIVE = "params.json"
"""Settings of a model as Mistral gives it out."""
GGUF = b"GGUF"
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.ASCII)


def read_config(folder: str) -> Mapping[str, Any] | None:
    """Its config.json; None where there is none that can be used. What modelopt wrote into a file of its own about
    the weights' format is put where other tools put it."""
    found = _json(os.path.join(folder, "config.json"), CONFIG_MAX)
    if not isinstance(found, dict):
        return None
    if "quantization_config" not in found:
        beside = _json(os.path.join(folder, "hf_quant_config.json"), CONFIG_MAX)
        if isinstance(beside, dict) and isinstance(beside.get("quantization"), dict):
            found["quantization_config"] = {"quant_method": "modelopt", **beside["quantization"]}
    return found


def read_folder(folder: str, config: Mapping[str, Any] | None) -> ModelFolder:
    """Never raises."""
    try:
        names = set(sorted(os.listdir(folder))[:FILES_MAX])
    except OSError:
        return ModelFolder("unreadable" if config is None else "read")
    listed = _listed(folder, names)
    return ModelFolder(
        config=_state(names, config),
        listed=len(listed),
        missing=_missing(folder, names, listed),
        weight_bytes=_weight_bytes(folder, names, listed),
        tokenizer=not TOKENIZERS.isdisjoint(names) or any(name.endswith(".tiktoken") for name in names),
    )


def _state(names: set[str], config: Mapping[str, Any] | None) -> Literal["read", "native", "missing", "unreadable"]:
    if config is not None:
        return "read"
    if "config.json" in names:
        return "unreadable"
    return "native" if NATIVE in names else "missing"


def read_gguf(path: str) -> GgufFile:
    """Never raises; a file that cannot be read is told elsewhere and passes here."""
    try:
        with open(path, "rb") as file:
            is_gguf = file.read(len(GGUF)) == GGUF
    except OSError:
        return GgufFile(is_gguf=True)
    split = _SPLIT.fullmatch(os.path.basename(path))
    if split is None:
        return GgufFile(is_gguf)
    parts = int(split["parts"])
    names = (f"{split['stem']}-{part:05}-of-{parts:05}.gguf" for part in range(1, min(parts, FILES_MAX) + 1))
    folder = os.path.dirname(path)
    missing = tuple(name for name in names if not os.path.exists(os.path.join(folder, name)))
    return GgufFile(is_gguf, missing, is_first=int(split["part"]) == 1)


def _listed(folder: str, names: set[str]) -> frozenset[str]:
    """The files that the first index names."""
    for index in INDEXES:
        if index not in names:
            continue
        found = _json(os.path.join(folder, index), INDEX_MAX)
        files = found.get("weight_map") if isinstance(found, dict) else None
        if isinstance(files, dict):
            return frozenset(name for name in files.values() if isinstance(name, str) and _is_name(name))
    return frozenset()


def _weight_bytes(folder: str, names: set[str], listed: frozenset[str]) -> int | None:
    wanted = sorted(listed & names) if listed else []
    if not listed:
        kind = next((end for end in WEIGHTS if any(name.endswith(end) for name in names)), None)
        # Some folders hold the same weights twice, in the vendor's own layout too.
        wanted = [name for name in names if kind and name.endswith(kind) and not name.startswith("consolidated")]
        wanted = wanted or [name for name in names if kind and name.endswith(kind)]
    try:
        return sum(os.stat(os.path.join(folder, name)).st_size for name in wanted)
    except OSError:
        return None


def _is_name(name: str) -> bool:
    return 0 < len(name) <= 255 and not name.startswith("/") and ".." not in name.split("/")


def _missing(folder: str, names: set[str], listed: frozenset[str]) -> tuple[str, ...]:
    """Those that are not there. What lies in a folder below, or beyond what was listed, is asked for one by one: as
    many as a folder may have, since each may be a question to a slow disk."""
    absent = sorted(listed - names)
    unseen = absent if len(names) >= FILES_MAX else [name for name in absent if "/" in name]
    there = {name for name in unseen[:FILES_MAX] if os.path.exists(os.path.join(folder, name))}
    unknown = set(unseen[FILES_MAX:])
    return tuple(name for name in absent if name not in there and name not in unknown)


def _json(path: str, limit: int) -> Any:
    try:
        # Not a pipe, which would never end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, "rb") as file:
            data = file.read(limit + 1)
        return json.loads(data) if len(data) <= limit else None
    except (OSError, ValueError, RecursionError):
        return None
