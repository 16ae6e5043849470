"""A small event loop: sockets, pipes, timers and signals in one thread.

Without timers it sleeps in the kernel until something happens, so hundreds of idle fakes cost no CPU.
"""

import heapq
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class Timer:
    """A callback due at a time of the monotonic clock (seconds)."""

    __slots__ = ("call", "cancelled", "due", "number")

    def __init__(self, due: float, number: int, call: Callable[[], None]) -> None:
        self.due = due
        self.number = number
        self.call = call
        self.cancelled = False

    def __lt__(self, other: "Timer") -> bool:
        return (self.due, self.number) < (other.due, other.number)

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Calls back when a file is ready, a timer is due or a signal has come; ends when told to."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._count = 0
        self._signals: dict[int, Callable[[], None]] = {}
        self._exit: int | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, READ, self._read_signals)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        self._count += 1
        timer = Timer(time.monotonic() + seconds, self._count, call)
        heapq.heappush(self._timers, timer)
        return timer

    def watch(self, file: socket.socket | int, events: int, call: Callable[[int], None]) -> None:
        """Call `call(ready_events)` whenever `file` is ready; replaces an earlier watch of the same file."""
        try:
            self._selector.modify(file, events, call)
        except KeyError:
            self._selector.register(file, events, call)

    def unwatch(self, file: socket.socket | int) -> None:
        try:
            self._selector.unregister(file)
        except (KeyError, ValueError):
            pass  # never watched, or already closed

    def on_signal(self, number: int, call: Callable[[], None]) -> None:
        """Handle a signal inside the loop instead of by its default action."""
        self._signals[number] = call
        signal.signal(number, lambda *_: None)

    def stop(self, code: int) -> None:
        """End `run()` with this exit code; the first call wins."""
        if self._exit is None:
            self._exit = code

    def run(self) -> int:
        while self._exit is None:
            wait = self._seconds_to_next_timer()
            for key, events in self._selector.select(wait):
                if self._stopped():
                    break
                if key.fd in self._selector.get_map():  # a callback before may have closed it
                    key.data(events)
            self._run_due_timers()
        return self._exit

    def _stopped(self) -> bool:
        return self._exit is not None

    def _seconds_to_next_timer(self) -> float | None:
        while self._timers and self._timers[0].cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0.0, self._timers[0].due - time.monotonic())

    def _run_due_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0].due <= now and not self._stopped():
            timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                timer.call()

    def _read_signals(self, _events: int) -> None:
        try:
            numbers = self._wake_read.recv(256)
        except BlockingIOError:
            return
        for number in numbers:
            call = self._signals.get(number)
            if call is not None:
                call()

    def forget(self) -> None:
        """In a forked child: give up the parent's epoll and wake-up sockets without touching the parent's."""
        signal.set_wakeup_fd(-1)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, blocking; a reader that is gone is not our concern."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            return
