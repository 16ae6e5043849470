"""Which kind of request a method and a target are.

A path that goes to an engine is taken literally and must be plain: without percent-encoding, empty segments and dots,
so that no spelling of it means another path to the engine than it does here.
"""

from __future__ import annotations

import enum
import re
from urllib.parse import unquote_to_bytes

from attrs import frozen


class Kind(enum.Enum):
    INFERENCE = "inference"
    """Goes to an engine of the model that its body names."""
    MODELS = "models"
    """The list of models, or one of them (`Route.what`)."""
    HEALTH = "health"
    READINESS = "readiness"
    METRICS = "metrics"
    UI = "ui"
    """The page for operators, which holds nothing by itself."""
    UI_STATUS = "ui-status"
    """What that page shows."""
    UPSTREAM = "upstream"
    """An operator's look at one engine: `Route.shard`, `Route.what`."""
    OPTIONS = "options"
    NO_MODEL = "no-model"
    """Below /v1/, but nothing that could name a model."""
    UNKNOWN = "unknown"


@frozen
class Route:
    kind: Kind
    name: str = ""
    """The path, where it is one of those that are known; else empty. Bounded, so fit for a log or a label."""
    shard: str = ""
    """UPSTREAM: the shard as the path names it (`NAME` or `NAME/i`)."""
    what: str = ""
    """UPSTREAM: the engine's path. MODELS: the name of the one model that is asked for, or empty."""
    is_known: bool = True
    """INFERENCE: a path that always takes a model; without one in its body that is the client's mistake (400). Any
    other one below /v1/ without a model has nobody who could answer it (404)."""


_INFERENCE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/pooling",
    "/v1/moderations",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/tokenize",
    "/detokenize",
)

_ADMINISTRATION = (b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter")
"""Paths of vLLM that change the engine (they read files of its host). A `model` in the body does not open them."""

_LOOKS = {"health": "/health", "metrics": "/metrics", "models": "/v1/models", "version": "/version"}
"""What an operator may GET of an engine."""

_ITS_OWN = {
    b"/v1/models": Kind.MODELS,
    b"/health": Kind.HEALTH,
    b"/readiness": Kind.READINESS,
    b"/metrics": Kind.METRICS,
    b"/ui": Kind.UI,
    b"/ui/": Kind.UI,
}

_PLAIN = re.compile(rb"/v1(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
_SHARD = re.compile(rb"/upstream/([A-Za-z0-9._-]+(?:/[0-9]+)?)/(health|metrics|models|version)")
_MODEL_PREFIX = b"/v1/models/"
_MODEL_NAME_MAX = 1024
"""Bytes; longer is no model's name."""

_ROUTES = {
    **{(b"POST", name.encode()): Route(Kind.INFERENCE, name) for name in _INFERENCE},
    **{(method, path): Route(kind, path.decode()) for path, kind in _ITS_OWN.items() for method in (b"GET", b"HEAD")},
    (b"GET", b"/ui/status"): Route(Kind.UI_STATUS, "/ui/status"),
}
_OPTIONS = Route(Kind.OPTIONS)
_NO_MODEL = Route(Kind.NO_MODEL)
_UNKNOWN = Route(Kind.UNKNOWN)
_OTHER = Route(Kind.INFERENCE, is_known=False)


def classify(method: bytes, target: bytes) -> Route:
    """What a request is for. Never raises."""
    path = target.partition(b"?")[0]
    return _ROUTES.get((method, path)) or _classify_rarer(method, path)


def _classify_rarer(method: bytes, path: bytes) -> Route:
    if method == b"OPTIONS":
        return _OPTIONS
    is_get = method in (b"GET", b"HEAD")
    if is_get and path.startswith(_MODEL_PREFIX):
        name = unquote_to_bytes(path[len(_MODEL_PREFIX) :])
        if 0 < len(name) <= _MODEL_NAME_MAX:
            return Route(Kind.MODELS, "/v1/models/{model}", what=name.decode("utf-8", "replace"))
        return _NO_MODEL
    if is_get and (found := _SHARD.fullmatch(path)):
        look = found[2].decode()
        return Route(Kind.UPSTREAM, f"/upstream/{{shard}}/{look}", shard=found[1].decode(), what=_LOOKS[look])
    if not path.startswith(b"/v1/"):
        return _UNKNOWN
    if method == b"POST" and _PLAIN.fullmatch(path) and not path.startswith(_ADMINISTRATION):
        return _OTHER
    return _NO_MODEL
