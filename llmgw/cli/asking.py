"""The running llmgw, as verbs ask it: every answer that is not the wanted one becomes a ClientError."""

from __future__ import annotations

import os
from collections.abc import Iterator

from llmgw.control import client

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any


class Asker:
    """Asks at one socket; which one is settled once, by the option, $LLMGW_SOCKET and the usual places."""

    def __init__(self, socket: str) -> None:
        self.socket = socket

    @classmethod
    def of(cls, args: argparse.Namespace) -> Asker:
        return cls(client.find_socket(args.socket, os.environ, os.getuid()))

    def status(self) -> dict[str, Any]:
        return self.get("/v1/status")

    def get(self, path: str, *, timeout: float = 5.0) -> dict[str, Any]:
        return self.call("GET", path, timeout=timeout)

    def post(self, path: str, body: dict[str, Any] | None = None, *, timeout: float = 5.0) -> dict[str, Any]:
        return self.call("POST", path, body, timeout=timeout)

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float = 5.0
    ) -> dict[str, Any]:
        """The answer of a request that must succeed. Raises ClientError."""
        code, answer = client.request(self.socket, method, path, body, timeout=timeout)
        if code >= 400:
            raise client.refusal(code, answer)
        return answer

    def stream(self, path: str) -> Iterator[dict[str, Any]]:
        yield from client.stream(self.socket, path)


def shard_path(name: str, rest: str = "") -> str:
    """The path of a shard; a replica's NAME/0 is one segment of it."""
    from urllib.parse import quote

    return f"/v1/shards/{quote(name, safe='')}{rest}"
