"""How the nodes of one engine find each other: followers join the head, which is ready only when all have.

The end of a connection means nothing to either side: the real engines do not notice a dead head or follower.
Only the head's word DISMISS, which SGLang's head sends at its own orderly end, is understood.
"""

import socket
from collections.abc import Callable
from functools import partial

from llmgw.fake.http import bind_tcp
from llmgw.fake.loop import READ, Loop

DISMISS = b"x"
RETRY = 0.05
"""Seconds (plain) between two tries of a follower to reach its head."""


class Head:
    """Raises OSError when the address cannot be bound."""

    def __init__(self, loop: Loop, host: str, port: int, followers: int, on_complete: Callable[[], None]) -> None:
        self._loop = loop
        self._missing = followers
        self._on_complete = on_complete
        self._joined: list[socket.socket] = []
        self._listener = bind_tcp(host, port)
        self._listener.listen(64)
        self._listener.setblocking(False)
        loop.watch(self._listener, READ, self._accept)

    def dismiss(self) -> None:
        for follower in self._joined:
            try:
                follower.send(DISMISS, socket.MSG_NOSIGNAL)
            except OSError:
                pass  # it is gone, and nobody minds

    def _accept(self, _events: int) -> None:
        try:
            self._joined.append(self._listener.accept()[0])
        except OSError:
            return
        self._missing -= 1
        if self._missing == 0:
            self._on_complete()


class Follower:
    """Joins the head, however long that takes."""

    def __init__(
        self, loop: Loop, host: str, port: int, on_joined: Callable[[], None], on_dismissed: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._address = (host, port)
        self._on_joined = on_joined
        self._on_dismissed = on_dismissed
        self._try()

    def _try(self) -> None:
        try:
            sock = socket.create_connection(self._address, timeout=1)
        except OSError:
            self._loop.call_later(RETRY, self._try)
            return
        sock.setblocking(False)
        self._loop.watch(sock, READ, partial(self._hear, sock))
        self._on_joined()

    def _hear(self, sock: socket.socket, _events: int) -> None:
        try:
            word = sock.recv(16)
        except OSError:
            word = b""
        if word == DISMISS:
            self._on_dismissed()
        elif not word:
            self._loop.unwatch(sock)
