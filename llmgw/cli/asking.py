"""The running llmgw, as verbs ask it: every answer that is not the wanted one becomes a CommandError."""

from __future__ import annotations

import os
from collections.abc import Iterator

from llmgw.cli.errors import CONFIG, FAILED, NO_SUCH_SHARD, UNREACHABLE, CommandError
from llmgw.control import client

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

API = 1


class Asker:
    """Asks at one socket; which one is settled once, by the option, $LLMGW_SOCKET and the usual places."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.socket = client.find_socket(args.socket, os.environ, os.getuid())

    def status(self) -> dict[str, Any]:
        return self.get("/v1/status")

    def get(self, path: str, *, timeout: float = 5.0) -> dict[str, Any]:
        return self.call("GET", path, timeout=timeout)

    def post(self, path: str, body: dict[str, Any] | None = None, *, timeout: float = 5.0) -> dict[str, Any]:
        return self.call("POST", path, body, timeout=timeout)

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float = 5.0
    ) -> dict[str, Any]:
        """The answer of a request that must succeed. Raises CommandError, ClientError."""
        code, answer = client.request(self.socket, method, path, body, timeout=timeout)
        if code >= 400:
            raise refused(code, answer)
        return answer

    def stream(self, path: str) -> Iterator[dict[str, Any]]:
        yield from client.stream(self.socket, path)


def refused(code: int, answer: dict[str, Any]) -> CommandError:
    """The daemon's own words, with the exit code that belongs to them."""
    error = answer.get("error") or {}
    message = error.get("message") or f"llmgw answered with HTTP status {code}"
    exit_code = {404: NO_SUCH_SHARD, 422: CONFIG, 503: UNREACHABLE}.get(code, FAILED)
    return CommandError(exit_code, message, error.get("hint"))


def shard_path(name: str, rest: str = "") -> str:
    """The path of a shard; a replica's NAME/0 is one segment of it."""
    from urllib.parse import quote

    return f"/v1/shards/{quote(name, safe='')}{rest}"
