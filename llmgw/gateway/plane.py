"""Where bytes move: every client and engine socket stands once in a private epoll, and callbacks do the moving.

trio would register a socket anew for each wait and switch tasks for each chunk, which costs several times what the
system calls cost (docs/decisions/0007). So one trio task sleeps until the epoll itself is readable and then calls the
callbacks of what is ready; whatever needs a decision wakes the task of its connection by a `Latch`.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable

import outcome
import trio

log = logging.getLogger(__name__)

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
GONE = select.EPOLLRDHUP
"""The peer has shut down its direction; told beside READ only where it is asked for."""
BROKEN = select.EPOLLERR | select.EPOLLHUP

BATCH = 256
"""Events taken at once: at 15 microseconds each some 4 ms, after which trio's deadlines and other tasks have a turn."""

Handler = Callable[[int], None]


class Plane:
    """The private epoll. Handlers are short, never wait, raise nothing, and may close descriptors but open none:
    a number that is freed and taken again within one batch would get a stranger's event.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}

    def add(self, descriptor: int, events: int, handler: Handler) -> None:
        self._epoll.register(descriptor, events)
        self._handlers[descriptor] = handler

    def change(self, descriptor: int, events: int) -> None:
        self._epoll.modify(descriptor, events)

    def remove(self, descriptor: int) -> None:
        """To be called before the descriptor is closed."""
        del self._handlers[descriptor]
        self._epoll.unregister(descriptor)

    async def run(self) -> None:
        """Move bytes until cancelled."""
        epoll, handlers = self._epoll, self._handlers
        descriptor = epoll.fileno()
        while True:
            await trio.lowlevel.wait_readable(descriptor)
            for ready, events in epoll.poll(0, BATCH):
                handler = handlers.get(ready)
                if handler is None:
                    # Closed by an earlier callback of this batch.
                    continue
                try:
                    handler(events)
                except Exception:
                    # An error here must end one connection and not all of them; its own handler failed to contain it.
                    log.exception("an error in llmgw itself; one connection is dropped")
                    if handlers.get(ready) is handler:
                        self.remove(ready)

    def close(self) -> None:
        self._epoll.close()
        self._handlers.clear()


class Latch:
    """Wakes one task, which then looks at what has changed. A wake-up that comes while it does not sleep is kept.

    It carries no reason: of two that come at once, one would be lost. What happened stands in the connection.
    """

    __slots__ = ("_is_set", "_task")

    def __init__(self) -> None:
        self._is_set = False
        self._task: trio.lowlevel.Task | None = None

    def set(self) -> None:
        if self._task is not None:
            # An outcome object may be used once only.
            trio.lowlevel.reschedule(self._task, outcome.Value(None))
            self._task = None
        else:
            self._is_set = True

    async def wait(self) -> None:
        """Sleep until `set` is called, or not at all if it was since the last time."""
        if not self._is_set:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        self._is_set = False

    def _abort(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
