"""How an inventory is shown to people: GPUs that are alike in one line, adapters, and what is wrong with them."""

from __future__ import annotations

from llmgw.cli.inventory import is_without_card
from llmgw.cli.table import plain_lines
from llmgw.cli.words import counted, duration, gpu_ranges
from llmgw.domain.display import neutralise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

GPU_COLUMNS = ("GPU", "CLASS", "CC", "MEMORY", "FREE", "HELD BY", "NOTE")
PORT_COLUMNS = ("FABRIC", "KIND", "RATE", "ADAPTERS", "NOTE")
KINDS = {"infiniband": "InfiniBand", "roce": "RoCE", "other": "other"}


def inventory_lines(
    answer: Mapping[str, Any], *, has_card: bool, now: float | None = None, shards: Mapping[str, str] | None = None
) -> list[str]:
    """The whole picture, one string a line, without control characters of anybody else. `shards`: how to call those
    that hold GPUs."""
    gpu, fabric = answer["gpu"], answer["fabric"]
    text = [heading(answer, has_card=has_card, now=now)]
    stale = gpu.get("stale")
    if stale is not None:
        age = f" for {duration(max(0.0, now - stale['since']))}" if now is not None else ""
        why = stale["detail"] or stale["error_kind"]
        text.append(f"stale: nvidia-smi has failed{age} ({why}): these are older facts, nothing new is placed")
    elif gpu["status"] != "ok":
        word = "no GPU" if is_without_card(answer, has_card=has_card) else gpu["status"]
        text.append(f"{word}: {gpu['detail'] or gpu['error_kind'] or 'a GPU is missing'}")
    for lost in gpu["lost"]:
        name = f"GPU {lost['index']}" if lost["index"] is not None else "a GPU"
        text.append(f"{name} at {lost['bus_id']} is lost: reboot; if it comes back, have the card looked at")
    if gpu["gpus"] or gpu["mig_instances"]:
        text += ["", *plain_lines(GPU_COLUMNS, list(gpu_rows(answer, shards or {})))]
    for other in gpu["other_gpus"]:
        size = gibibytes(other["memory_total_mib"])
        text.append(f"{other['vendor']} {other['index']}  {other['name']}  {size}  listed only: not placed on yet")
    if fabric["ports"] or fabric["unreadable_devices"]:
        text += ["", *plain_lines(PORT_COLUMNS, list(fabric_rows(fabric)))]
    return [neutralise(line) for line in text]


def heading(answer: Mapping[str, Any], *, has_card: bool, now: float | None) -> str:
    gpu = answer["gpu"]
    parts = [f"node {answer['node']}"]
    if gpu["driver_version"]:
        parts.append(f"driver {gpu['driver_version']}")
    if gpu["gpus"] or gpu["status"] != "error" or not has_card:
        # Where nvidia-smi failed, nobody knows how many there are.
        parts.append(counted(len(gpu["gpus"]), "GPU"))
    fabrics = answer["fabric"]["fabrics"]
    if fabrics:
        parts.append(counted(len(fabrics), "fabric"))
    if now is not None and gpu["read_at"] is not None:
        parts.append(f"read {duration(max(0.0, now - gpu['read_at']))} ago")
    return "   ".join(parts)


def gpu_rows(answer: Mapping[str, Any], shards: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Cards, then slices. Neighbours that differ in nothing but their number share a line."""
    gpu, of_host = answer["gpu"], answer["host"]["memory_total_mib"]
    groups: list[tuple[tuple[str, ...], list[str]]] = []
    for card in gpu["gpus"]:
        rest = gpu_row(card, of_host, shards)
        if groups and groups[-1][0] == rest:
            groups[-1][1].append(str(card["index"]))
        else:
            groups.append((rest, [str(card["index"])]))
    for rest, indexes in groups:
        yield (gpu_ranges(indexes), *rest)
    for slice_ in gpu["mig_instances"]:
        known = gpu["mig_assignable"].get(slice_["uuid"], {})
        yield (
            f"{slice_['parent_index']}:{slice_['device']}",
            slice_["class"],
            "-",
            gibibytes(slice_["memory_total_mib"]),
            "-",
            ", ".join(holder_texts(known.get("holders", ()), shards)) or "-",
            ", ".join(part for part in (slice_["uuid"], known.get("why_not")) if part),
        )


def gpu_row(card: Mapping[str, Any], of_host: int | None, shards: Mapping[str, str]) -> tuple[str, ...]:
    memory = gibibytes(of_host) + " unified" if card["unified_memory"] else gibibytes(card["memory_total_mib"])
    return (
        card["class"] or "-",
        card["compute_cap"] or "-",
        memory,
        gibibytes(card.get("memory_free_mib")),
        ", ".join(holder_texts(card["holders"], shards)) or "-",
        card.get("why_not") or ", ".join(flag for flag in card["health_flags"] if flag != "memory_in_use") or "-",
    )


def holder_texts(holders: Sequence[Mapping[str, Any]], shards: Mapping[str, str]) -> Iterator[str]:
    """Our shards by name, others by pid, memory, command and user."""
    ours = dict.fromkeys(holder["shard"] for holder in holders if holder["shard"] is not None)
    yield from (shards.get(shard, shard) for shard in ours)
    for holder in holders:
        if holder["shard"] is None:
            size = f" {gibibytes(holder['memory_mib'])}" if holder["memory_mib"] is not None else ""
            details = [str(part) for part in (holder["command"], holder["user"]) if part]
            whose = "not ours" if holder["ours"] is False else "whose it is cannot be told"
            yield f"pid {holder['pid']}{size}" + (f" ({', '.join(details)})" if details else "") + f", {whose}"


def fabric_rows(fabric: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    shown = set()
    for number, one in enumerate(fabric["fabrics"]):
        shown |= set(one["ports"])
        ports = [port for port in fabric["ports"] if f"{port['device']}:{port['port']}" in one["ports"]]
        if one["kind"] == "infiniband":
            note = f"subnet {one.get('subnet_prefix', '-')}, manager at LID {one.get('sm_lid', '-')}"
        else:
            note = ", ".join(one["networks"]) or "its networks are not known: it reaches no other node"
        if number == 0:
            note += ", used between nodes"
        yield (str(number), KINDS[one["kind"]], rates(ports), adapters(one["ports"]), note)
    for port in fabric["ports"]:
        label = f"{port['device']}:{port['port']}"
        if label not in shown:
            why = port.get("reason") or "left out by [node] fabric"
            yield ("-", KINDS[port["kind"]], rates([port]), label, f"{port['state'] or 'unreadable'}: {why}")
    for device in fabric["unreadable_devices"]:
        yield ("-", "-", "-", device, "it is listed, but cannot be read")


def adapters(ports: Sequence[str]) -> str:
    """`mlx5_0:1` to `mlx5_3:1` as mlx5_0..3, where all are port 1."""
    names = [port.rpartition(":")[0] if port.endswith(":1") else port for port in ports]
    if len(names) < 3 or len({name.rstrip("0123456789") for name in names}) != 1:
        return ",".join(names)
    stem = names[0].rstrip("0123456789")
    numbers = [name[len(stem) :] for name in names]
    if not all(number.isdecimal() for number in numbers):
        return ",".join(names)
    found = [int(number) for number in numbers]
    if found == list(range(found[0], found[0] + len(found))):
        return f"{stem}{found[0]}..{found[-1]}"
    return ",".join(names)


def rates(ports: Sequence[Mapping[str, Any]]) -> str:
    known = {port["rate_gbps"] for port in ports}
    if None in known or not known:
        return "-"
    return "/".join(f"{rate:g}G" for rate in sorted(known, reverse=True))


def gibibytes(mebibytes: int | None) -> str:
    return "-" if mebibytes is None else f"{mebibytes / 1024:.1f} GiB"
