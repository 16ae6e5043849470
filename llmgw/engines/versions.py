"""Engine versions: read, compared, and since which one an engine knows the options that llmgw adds by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmgw.domain.shard import EngineKind

Version = tuple[int, ...]

_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)")

KNOWN_SINCE: Mapping[tuple[EngineKind, str], Version] = {
    (EngineKind.VLLM, "shutdown-timeout"): (0, 18),
    (EngineKind.VLLM, "disable-access-log-for-endpoints"): (0, 16),
    (EngineKind.VLLM, "data-parallel-rpc-port"): (0, 8, 5),
    (EngineKind.VLLM, "uds"): (0, 10),
    (EngineKind.SGLANG, "nccl-port"): (0, 4),
    (EngineKind.SGLANG, "enable-metrics"): (0, 4, 3),
}
"""The two first from vLLM's pull requests 36666 and 30011. Where unsure the later version stands here: an option too
few costs comfort, one too many ends the engine."""


def parse_version(text: str | None) -> Version | None:
    """The release numbers of a version (`0.32.0+cpu` -> (0, 32, 0)); None where there are none."""
    match = _RELEASE.match(text.strip()) if text else None
    if match is None:
        return None
    # A version is short; a longer run of digits is no version and int() of it may be slow.
    numbers = match[1].split(".")[:8]
    return tuple(int(number[:9]) for number in numbers)


def is_at_least(version: Version, wanted: Version) -> bool:
    """Compare as numbers, missing ones being 0: 0.9 is older than 0.10, and 0.10 is 0.10.0."""
    width = max(len(version), len(wanted))
    return version + (0,) * (width - len(version)) >= wanted + (0,) * (width - len(wanted))


def too_old_for(kind: EngineKind, option: str, version: str | None) -> Version | None:
    """The version that brought `option`, if this one is older; None where it is known or the version unknown."""
    since = KNOWN_SINCE.get((kind, option))
    found = parse_version(version)
    if since is None or found is None or is_at_least(found, since):
        return None
    return since
