"""What a GPU is called in llmgw, and what its name says about it. Pure tables and one naming rule.

A class is `base[-variant]-<GiB>g`, for example `h100-pcie-80g`: two cards have one class exactly when an engine may
split a layer over them. Marketing words, mountings and sizes inside the name are dropped, because the same chip
carries different ones; everything else stays, because four products are called "RTX 6000".
"""

from __future__ import annotations

import re

MIB_PER_GIB = 1024

_BRACKETS = re.compile(r"\([^)]*\)")
_VGPU = re.compile(r"(?:nvidia|grid) ([a-z0-9]+)-(?:\d+-)?\d+[abcq](?:me)?")
_SEPARATORS = re.compile(r"[ \-_]+")
_NOISE = re.compile(
    r"nvidia|tesla|geforce|gpu|graphics|device|generation|edition|server|workstation|blackwell|ac|with|design"
    r"|\d+gb?|hbm.*|sxm\d*"
)
_VARIANTS = {"pcie": "pcie", "pci": "pcie", "nvl": "nvl", "maxq": "maxq", "laptop": "laptop"}
_NOT_IN_A_BASE = re.compile(r"[^a-z0-9]")

# Compute capability by base name, for drivers that do not report it (470). A name that matches nothing has none:
# a rule that needs the number then asks the operator instead of guessing.
_CAPABILITIES: tuple[tuple[str, tuple[int, int]], ...] = (
    (r"v100", (7, 0)),
    (r"t4|rtx20[5-9]0\w*|quadrortx\d+|titanrtx", (7, 5)),
    (r"a100|a30|a800", (8, 0)),
    (r"a10g?|a40|a16|a2|rtx30[5-9]0\w*|rtxa\d+", (8, 6)),
    (r"orin", (8, 7)),
    (r"l4|l40s?|rtx40[5-9]0\w*|rtx\d+\w*ada", (8, 9)),
    (r"h100|h200|h20|h800|gh200", (9, 0)),
    (r"g?b200", (10, 0)),
    (r"g?b300", (10, 3)),
    (r"thor", (11, 0)),
    (r"rtx50[5-9]0\w*|rtxpro\d+", (12, 0)),
    (r"gb10", (12, 1)),
)


def gpu_class(name: str, memory_mib: int | None) -> str:
    """The class of a card by the driver's name and its total memory in MiB; without a size, no size part."""
    base, variant = _split(name)
    parts = [base]
    if variant:
        parts.append(variant)
    if memory_mib is not None:
        # Nearest, half up: the floor would call a card of 44.99 GiB 44g, the ceiling would claim what is not there.
        parts.append(f"{(memory_mib + MIB_PER_GIB // 2) // MIB_PER_GIB}g")
    return "-".join(parts)


def mig_class(name: str, profile: str) -> str:
    """The class of a MIG slice: the card's base and the profile, `h100-mig-3g.40gb`."""
    return f"{_split(name)[0]}-mig-{profile}"


def is_virtual(name: str) -> bool:
    """Whether the driver's name is that of a vGPU profile."""
    return _split(name)[1] == "vgpu"


def capability_of(name: str) -> tuple[int, int] | None:
    """The compute capability that the driver's name stands for, or None for a name that is not known."""
    base, _ = _split(name)
    return next((pair for pattern, pair in _CAPABILITIES if re.fullmatch(pattern, base)), None)


def _split(name: str) -> tuple[str, str]:
    text = " ".join(_BRACKETS.sub(" ", name.lower()).split())
    vgpu = _VGPU.fullmatch(text)
    if vgpu:
        return vgpu.group(1), "vgpu"
    variant = ""
    words = []
    for word in _SEPARATORS.split(text.replace("max-q", "maxq")):
        if word in _VARIANTS:
            variant = _VARIANTS[word]
        elif not _NOISE.fullmatch(word):
            words.append(word)
    return _NOT_IN_A_BASE.sub("", "".join(words)) or "unknown", variant
