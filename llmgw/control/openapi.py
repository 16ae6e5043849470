"""What the control socket offers, as OpenAPI 3.1. A test compares it with what is really answered."""

from __future__ import annotations

from typing import Any

from llmgw import __version__

_NAME = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "A shard, or one of its instances as NAME%2F0 (the slash percent-encoded).",
    "schema": {"type": "string"},
}
_FOLLOW = {"name": "follow", "in": "query", "description": "Go on with what comes.", "schema": {"type": "boolean"}}
_WAIT = {
    "name": "wait",
    "in": "query",
    "description": "Answer when it is done, but not later than this: a duration such as 120s.",
    "schema": {"type": "string"},
}
_ROUTES: tuple[tuple[str, str, str, tuple[dict[str, Any], ...]], ...] = (
    ("get", "/v1/ping", "Whether llmgw answers.", ()),
    ("get", "/v1/status", "The node and every shard, from one snapshot.", ()),
    ("get", "/v1/shards/{name}", "The instances of one shard.", (_NAME,)),
    (
        "get",
        "/v1/shards/{name}/logs",
        "Output of the engine: one JSON object per line, {seq, time, text, cut} or {dropped}.",
        (
            _NAME,
            _FOLLOW,
            {"name": "tail", "in": "query", "description": "So many newest lines; all.", "schema": {"type": "string"}},
            {"name": "since", "in": "query", "description": "A duration such as 5m.", "schema": {"type": "string"}},
            {"name": "after", "in": "query", "description": "Lines above this number.", "schema": {"type": "integer"}},
        ),
    ),
    (
        "get",
        "/v1/events",
        "Transitions and wishes, one JSON object per line, or server-sent events when asked by Accept.",
        (
            _FOLLOW,
            {
                "name": "since",
                "in": "query",
                "description": "A sequence number, or a duration such as 5m.",
                "schema": {"type": "string"},
            },
        ),
    ),
    ("get", "/v1/inventory", "GPUs, adapters and host; after a failure the last good facts, marked stale.", ()),
    ("get", "/v1/config", "The configuration in force, secrets masked.", ()),
    ("get", "/v1/plan", "What a reload would do; 422 with the errors of the file.", ()),
    ("get", "/v1/openapi.json", "This text.", ()),
    ("get", "/metrics", "Everything that is counted, in Prometheus' text format.", ()),
    ("get", "/v1/operations/{id}", "The state of a wish: running, done or failed.", ()),
    ("post", "/v1/shards/{name}/start", "Wish it running.", (_NAME, _WAIT)),
    ("post", "/v1/shards/{name}/stop", "Wish it stopped.", (_NAME, _WAIT)),
    ("post", "/v1/shards/{name}/restart", "Stop it and start it again.", (_NAME, _WAIT)),
    ("post", "/v1/shards/{name}/drain", "No new work; it stays loaded until start or stop.", (_NAME, _WAIT)),
    ("post", "/v1/shards/{name}/load", "Load it now, as a request would.", (_NAME, _WAIT)),
    ("post", "/v1/shards/{name}/unload", "Free its GPUs; the next request loads it again.", (_NAME, _WAIT)),
    ("post", "/v1/shards/{name}/sleep", "Put its engine into sleep mode; a request wakes it.", (_NAME, _WAIT)),
    ("post", "/v1/shards/{name}/wake", "Wake it.", (_NAME, _WAIT)),
    (
        "post",
        "/v1/gpus/{gpu}/release",
        "Give a GPU out again although its memory has not come back.",
        (
            {
                "name": "gpu",
                "in": "path",
                "required": True,
                "description": "Index, UUID or PCI bus id.",
                "schema": {"type": "string"},
            },
        ),
    ),
    (
        "post",
        "/v1/reload",
        "Read the file again; 422 with its errors, and nothing has changed then.",
        ({"name": "dry_run", "in": "query", "description": "Only the plan.", "schema": {"type": "boolean"}},),
    ),
    ("post", "/v1/upgrade", "Go over to the installed llmgw in place; engines are not touched.", ()),
)


def describe_api() -> dict[str, Any]:
    """The document of `GET /v1/openapi.json`."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, parameters in _ROUTES:
        paths.setdefault(path, {})[method] = {
            "summary": summary,
            "parameters": list(parameters),
            "responses": {
                "default": {"description": "JSON unless it says otherwise; errors as {error: {code, message, hint}}."},
            },
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmgw control socket", "version": __version__},
        "paths": paths,
    }
