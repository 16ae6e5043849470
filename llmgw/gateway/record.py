"""What one request was, from its head to its end. Filled by the data path, read by counters and access log."""

from __future__ import annotations


class RequestRecord:
    """One request. Times are seconds of a monotonic clock, None while that moment has not come.

    A plain object with slots: one is made for each request, and most of its fields are set a microsecond apart.
    """

    __slots__ = (
        "arrived",
        "band",
        "band_clamped",
        "bytes_in",
        "bytes_out",
        "chunks",
        "code",
        "completion_tokens",
        "ended",
        "first_byte",
        "granted",
        "method",
        "model",
        "path",
        "peer",
        "position",
        "prompt_tokens",
        "reason",
        "request_id",
        "retried",
        "shard",
        "stream",
        "tenant",
    )

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        """The head was complete."""
        self.granted: float | None = None
        """It left the queue."""
        self.position: int | None = None
        """Its place in the queue when it came there; None: it went at once."""
        self.first_byte: float | None = None
        """The first byte of the answer came from the engine."""
        self.ended: float | None = None
        self.method = ""
        self.path = ""
        """Without its query, and one of the paths that are known; else empty."""
        self.peer = ""
        self.request_id = ""
        self.model = ""
        """The model's own name, not an alias; empty where it is not known."""
        self.tenant = ""
        self.band = ""
        self.band_clamped = False
        """It named a band that is unknown or not its tenant's, and runs in the default one."""
        self.stream = False
        self.code = 0
        """The status that the client saw; 499 when it left before."""
        self.reason = ""
        """Why llmgw answered itself or the answer ended early (`queue-full`, `client-gone`); else empty."""
        self.shard = ""
        self.retried = False
        self.bytes_in = 0
        self.bytes_out = 0
        self.chunks = 0
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
