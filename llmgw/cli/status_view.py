"""The answer of `/v1/status` as lines, cells and paragraphs. Pure; shared by status, wait, wishes and demo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llmgw.cli.errors import DONE, FAILED, NOT_READY
from llmgw.cli.words import bar, counted, duration, gpu_ranges, rough_duration
from llmgw.domain.display import neutralise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Shard = Mapping[str, Any]
    Answer = Mapping[str, Any]

COLUMNS = ("SHARD", "MODEL", "ENGINE", "GPUS", "STATE", "FOR", "REQ", "DETAIL")
SPARE_COLUMNS = ("ENGINE", "MODEL", "GPUS", "REQ")
"""What a narrow terminal does without, the first one first: a state that is cut off is no status."""
EVIDENCE_LINES = 4
"""The proving lines of a failure in `status`; `logs` has the rest."""


def chosen(answer: Answer, names: Sequence[str]) -> tuple[list[Shard], list[str]]:
    """The shards asked for, in the answer's order, and the names that no shard has."""
    shards: list[Shard] = list(answer["shards"])
    if not names:
        return shards, []
    unknown = [name for name in names if not any(is_named(shard, name) for shard in shards)]
    return [shard for shard in shards if any(is_named(shard, name) for name in names)], unknown


def is_named(shard: Shard, name: str) -> bool:
    """NAME means all instances of a shard, NAME/0 the one."""
    return name in (shard["name"], shard["shard"], f"{shard['shard']}/{shard['replica']}")


def exit_code(shards: Iterable[Shard]) -> int:
    """0 when all that are wanted are ready, 1 when one has failed, 3 otherwise."""
    worst = DONE
    for shard in shards:
        if shard["state"] == "failed":
            return FAILED
        if shard["intent"]["wish"] == "start" and shard["state"] != "ready":
            worst = NOT_READY
    return worst


def head_lines(answer: Answer) -> list[str]:
    """What stands above the table: the node, then whatever is wrong with llmgw itself."""
    facts = [f"node {answer['node']}", f"llmgw {answer['llmgw']}", f"up {duration(answer['now'] - answer['started'])}"]
    if answer.get("hardware"):
        facts.append(answer["hardware"])
    lines = ["  ".join(facts)]
    if answer.get("stopping"):
        lines.append(f"llmgw is on its way out: {answer['stopping']}")
    config = answer.get("config") or {}
    if config.get("error"):
        lines.append(f"{config['path']} is not in force: {config['error']}; see: llmgw check {config['path']}")
    lines += answer.get("warnings") or ()
    return [neutralise(line) for line in lines]


def row(shard: Shard, now: float, *, unicode: bool) -> tuple[str, ...]:
    activity = shard.get("activity") or {}
    running, waiting = activity.get("running"), activity.get("waiting")
    if running is None:
        requests = "-" if shard["state"] in ("ready", "draining") else "0"
    else:
        requests = f"{running}+{waiting}" if waiting else str(running)
    return (
        shard["name"],
        neutralise(shard["model"]),
        shard["engine"],
        gpu_ranges(shard.get("gpus") or ()),
        shard["state"],
        duration(now - shard["since"]),
        requests,
        detail(shard, now, unicode=unicode),
    )


def detail(shard: Shard, now: float, *, unicode: bool) -> str:
    """What is worth knowing beside the state, the most urgent first."""
    state = shard["state"]
    told = shard.get("detail") or ""
    conditions = "; ".join(text for text in _conditions(shard) if text != told)
    if state == "ready":
        rest = " ".join([*_endpoint(shard), *_activity(shard)])
    elif state in ("starting", "loading"):
        rest = load_progress(shard, now, unicode=unicode)
    elif state == "draining":
        running = (shard.get("activity") or {}).get("running")
        # llmgw counts with the gateway what is left; the engine's own number would only contradict it.
        left = f"{counted(running, 'request')} left" if running and not told.endswith(" left") else ""
        rest = ", ".join(part for part in (told, left) if part)
    elif state == "failed":
        rest = ", ".join(part for part in (told, next_step(shard, now)) if part)
    else:
        rest = ", ".join(part for part in (told, *_not_wanted(shard)) if part)
    return neutralise("; ".join(part for part in (conditions, rest) if part))


def load_progress(shard: Shard, now: float, *, unicode: bool) -> str:
    progress = shard.get("progress")
    if progress is None:
        return ", ".join(part for part in (shard.get("detail") or "", _by_last_load(shard, now)) if part)
    fraction = progress.get("fraction")
    words = [progress["phase"]]
    if progress.get("total"):
        words.append(f"{progress['done']}/{progress['total']}")
    text = " ".join(words)
    if progress.get("eta") is not None:
        text += f", about {rough_duration(progress['eta'])} left"
    elif fraction is None:
        text = ", ".join(part for part in (text, _by_last_load(shard, now)) if part)
    if fraction is None:
        return text
    return f"{bar(fraction, unicode=unicode)} {round(fraction * 100):3}% {text}"


def _by_last_load(shard: Shard, now: float) -> str:
    last, launched = shard.get("load_seconds"), shard.get("launched_at")
    if not last or launched is None:
        return ""
    left = last - (now - launched)
    if left > 0:
        return f"about {rough_duration(max(left, 1.0))} left"
    # One that was taken over may have been ready for days, and is only asked again.
    return "" if shard.get("adopted") else f"longer than last time ({duration(last)})"


def _conditions(shard: Shard) -> list[str]:
    texts = []
    for condition in shard.get("conditions") or ():
        kind, text = condition["kind"], condition["text"]
        if kind == "backoff":
            continue  # next_step() tells it, with the time
        texts.append(f"{kind}: {text}" if text and kind not in ("adopted", "stopping") else text or kind)
    return texts


def _endpoint(shard: Shard) -> list[str]:
    endpoint = shard.get("endpoint")
    if not endpoint:
        return []
    address = endpoint.removeprefix("http://")
    host, _, port = address.rpartition(":")
    return [f":{port}" if host in ("127.0.0.1", "[::1]", "localhost") else address]


def _activity(shard: Shard) -> list[str]:
    activity = shard.get("activity") or {}
    parts = []
    if activity.get("tokens_per_second"):
        parts.append(f"{activity['tokens_per_second']:.0f} tok/s")
    if activity.get("kv_usage") is not None:
        parts.append(f"kv {activity['kv_usage'] * 100:.0f}%")
    return parts


def _not_wanted(shard: Shard) -> list[str]:
    intent = shard["intent"]
    if shard.get("loadable"):
        return [_on_request(shard)]
    if intent["wish"] != "stop":
        return []
    if intent.get("operator"):
        # Who it was stands in the detail while the stop was an engine's end, and nowhere otherwise.
        return [] if intent["by"] in (shard.get("detail") or "") else [f"stopped by {intent['by']}"]
    return ["not started by itself (autostart = false)"] if shard["state"] == "pending" else []


def _on_request(shard: Shard) -> str:
    """What the next request costs, as it was measured last: the load, and the end of what has its GPUs then."""
    measured = [
        f"{word} {duration(shard[key])} last time"
        for key, word in (("load_seconds", "loaded in"), ("unload_seconds", "unloaded in"))
        if shard.get(key) is not None
    ]
    return "loads on request" + (f" ({', '.join(measured)})" if measured else "")


def next_step(shard: Shard, now: float) -> str:
    """What llmgw does next with a failed shard."""
    at = shard.get("next_attempt")
    if at is None:
        return ""
    attempt = shard.get("failures") or 0
    limit = shard.get("attempt_limit") or 0
    count = f" {attempt}/{limit}" if limit else f" {attempt}" if attempt else ""
    left = at - now
    return f"retry{count} in {duration(left)}" if left > 0 else f"retry{count} now"


WAITS_FOR_GPUS = "it starts by itself when they are free; llmgw inventory shows who is on which"
NEVER_FITS = "it cannot start as it is written: ask for fewer, or allow other classes in gpu_class"
TOO_FEW = "this node has only"
"""By these words of placement: not even with all of them free."""
MOVE_AWAY = "it runs on, and nothing new goes to that card; llmgw restart {name} moves it to another one if one is free"


SLOTS_FROM = {
    "max_inflight": "by max_inflight",
    "args": "by its own arguments",
    "props": "by its own /props",
    "server_info": "by its own /server_info",
    "default": "its own limit is not known",
}


def facts(shards: Iterable[Shard]) -> list[list[str]]:
    """What is told of shards that were asked for by name, and would only fill the picture of a whole node."""
    lines = []
    for shard in shards:
        slots = shard.get("slots")
        if slots is not None:
            why = SLOTS_FROM.get(shard["slots_from"], shard["slots_from"])
            lines.append(f"{shard['name']}: the gateway sends it {counted(slots, 'request')} at a time at most ({why})")
    return [[neutralise(line) for line in lines]] if lines else []


def _about_gpus(shard: Shard) -> list[str]:
    """What to do where its GPUs are the matter; empty when they are not."""
    texts = {condition["kind"]: condition["text"] for condition in shard.get("conditions") or ()}
    if "unplaced" in texts:
        what_next = NEVER_FITS if TOO_FEW in texts["unplaced"] else WAITS_FOR_GPUS
        return [f"{shard['name']}: no GPUs: {texts['unplaced']}", f"  {what_next}"]
    if "gpu-unhealthy" in texts:
        return [f"{shard['name']}: {texts['gpu-unhealthy']}", f"  {MOVE_AWAY.format(name=shard['name'])}"]
    return []


def paragraphs(shards: Iterable[Shard], now: float) -> list[list[str]]:
    """For each shard that failed, or that failed before and is tried again: the cause, its proof, what to do. For one
    that loads: what is waited for, and the last line of its log. For one whose GPUs are the matter: what to do."""
    found = []
    for shard in shards:
        reason = shard.get("reason")
        about_gpus = _about_gpus(shard)
        if about_gpus:
            found.append([neutralise(line) for line in about_gpus])
        if not reason:
            last = (shard.get("log") or {}).get("last")
            if shard["state"] in ("starting", "loading") and last:
                waits = shard.get("detail") or shard["state"]
                found.append([neutralise(f"{shard['name']}: {waits}"), neutralise(f"  | {last}")])
            continue
        lines = [f"{shard['name']}: {reason['cause']}"]
        lines += [f"  | {line}" for line in (reason.get("evidence") or ())[:EVIDENCE_LINES]]
        if reason.get("remedy"):
            lines.append(f"  {reason['remedy']}")
        if shard["state"] == "failed" and shard.get("next_attempt") is None:
            lines.append(
                f"  it is not tried again by itself; afterwards: llmgw start {shard['name']}, "
                "or llmgw reload where the file was changed"
            )
        found.append([neutralise(line) for line in lines])
    return found


def one_line(shard: Shard, now: float, *, unicode: bool) -> str:
    """A shard in one line, for a pipe or a line that is rewritten."""
    text = f"{shard['name']}  {shard['state']}"
    more = detail(shard, now, unicode=unicode)
    return f"{text}  {more}" if more else text
