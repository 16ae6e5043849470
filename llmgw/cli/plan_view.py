"""What a reload does, as lines. Pure: takes the answer of `/v1/plan`, `/v1/reload` or a diff made here."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.cli.words import duration, gpu_ranges
from llmgw.domain.display import neutralise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIGNS = {"keep": "=", "take_over": "=", "replace": "~", "in_place": "*", "start": "+", "stop": "-"}
WORDS = {
    "keep": "keep", "take_over": "take over", "replace": "replace", "in_place": "in place", "start": "start",
    "stop": "stop",
}  # fmt: skip
UNCHANGED = ("keep", "take_over")


def has_changes(plan: dict[str, Any]) -> bool:
    return bool(plan.get("needs_restart")) or any(action["action"] not in UNCHANGED for action in plan["actions"])


def plan_lines(plan: dict[str, Any], running: dict[str, Any] | None = None) -> list[str]:
    """One block per shard, then the sums. `running`: name -> shard of the status, for what is known of it."""
    width = max((len(action["name"]) for action in plan["actions"]), default=0)
    lines = []
    for action in plan["actions"]:
        kind = action["action"]
        head = f"  {SIGNS[kind]} {action['name']:<{width}}   {WORDS[kind]:<8}"
        notes = [*changed(action["changes"]), *known(kind, (running or {}).get(action["name"]))]
        lines.append(f"{head}   {notes[0]}" if notes else head.rstrip())
        lines += [" " * (len(head) + 3) + note for note in notes[1:]]
    lines.append("" if lines else "  no shards")
    lines.append(sums(plan))
    restart = plan.get("needs_restart") or ()
    if restart:
        lines.append(f"not before llmgw itself is restarted (engines run on): {', '.join(restart)}")
    return [neutralise(line) for line in lines]


def sums(plan: dict[str, Any]) -> str:
    counts = {kind: sum(action["action"] == kind for action in plan["actions"]) for kind in SIGNS}
    parts = [f"{count} {WORDS[kind]}" for kind, count in counts.items() if count]
    return (", ".join(parts) or "nothing to do") + "."


def changed(changes: list[dict[str, Any]]) -> Iterator[str]:
    for change in changes:
        yield f"{change['key']} {value(change['before'])} -> {value(change['after'])}"


def known(kind: str, shard: dict[str, Any] | None) -> Iterator[str]:
    """What the present engine has and costs, where it goes; what the file says, where one comes."""
    if shard is None or kind not in ("replace", "stop", "start"):
        return
    parts = [shard["engine"]] if kind == "start" else []
    if shard.get("gpus"):
        parts.append(f"gpus {gpu_ranges(shard['gpus'])}")
    if kind == "replace" and shard.get("load_seconds"):
        parts.append(f"loading took {duration(shard['load_seconds'])} last time")
    if kind == "start" and "port" in shard:
        parts.append(f"port {shard['port']}")
    running = (shard.get("activity") or {}).get("running")
    if running:
        parts.append(f"{running} requests running")
    if parts:
        yield "  ".join(parts)


def value(given: Any) -> str:
    if given is None:
        return "(not set)"
    if isinstance(given, bool):
        return "true" if given else "false"
    if isinstance(given, str):
        return given or '""'
    if isinstance(given, list):
        return "[" + ", ".join(value(entry) for entry in given) + "]"
    return str(given)


def card_lines(cards: list[dict[str, Any]]) -> list[str]:
    """Which GPUs each shard gets and why, or what it waits for; below one over several nodes what NCCL is told."""
    if not cards:
        return []
    lines = ["", "GPUs:"]
    width = max(len(card["name"]) for card in cards)
    for card in cards:
        if not card["slots"]:
            lines.append(f"  - {card['name']:<{width}}  none: {card['why']}")
            continue
        where = "; ".join(f"{slot['node']} {gpu_ranges(slot['gpus'])}" for slot in card["slots"])
        kind = f"  {card['class']}" if card["class"] else ""
        lines.append(f"  + {card['name']:<{width}}  {where}{kind}  ({card['why']})")
        lines += network_lines(card["network"])
    return [neutralise(line) for line in lines]


def network_lines(network: dict[str, Any] | None) -> Iterator[str]:
    if network is None:
        return
    if "problem" in network:
        yield f"      {network['problem']}; {network['hint']}"
        return
    for node, told in network.items():
        for name, value, why in told["variables"]:
            overridden = "  (env of the shard overrides it)" if name in told["overrides"] else ""
            yield f"      {node}: {name}={value}  {why}{overridden}"
        others = [name for name in told["overrides"] if name not in {variable[0] for variable in told["variables"]}]
        if others:
            yield f"      {node}: from env of the shard: {', '.join(others)}"
        for note in told["notes"]:
            yield f"      {node}: {note}"
