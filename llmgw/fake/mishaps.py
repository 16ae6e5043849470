"""What can go wrong with any profile at a time the knobs choose: failed starts, sudden exits, floods of output."""

import os
import resource
import signal

from llmgw.fake.knobs import Knobs, count_attempt
from llmgw.fake.loop import Loop, write_all

FLOOD_TICK = 0.02
FLOOD_LINE = b"INFO flood line of the fake engine, of the length that access lines usually have: GET /v1/models 200\n"


def die(code: int) -> None:
    """End this process at once: with an exit code, or of the signal `-code`."""
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(127)  # the signal was blocked


class Failing:
    """The failed start that was asked for, if this attempt is to fail."""

    def __init__(self, name: str, engine: str, after: float | None) -> None:
        self.name = name
        self._engine = engine
        self._after = after

    @classmethod
    def from_knobs(cls, knobs: Knobs, engine: str) -> "Failing":
        name = knobs.fail
        if knobs.attempts_file:
            attempt = count_attempt(knobs.attempts_file)
            name = (name or "d1") if attempt < knobs.succeed_on_attempt else ""
        return cls(name, engine, knobs.fail_after)

    @property
    def wanted(self) -> bool:
        return bool(self.name)

    def delay(self, total: float) -> float:
        """Seconds from the start to the failure, of a load that takes `total`."""
        from llmgw.fake import failures

        return self._after if self._after is not None else total * failures.find(self.name).moment

    def place(self) -> str:
        """Where it happens: `usage`, `leader` or `child`."""
        from llmgw.fake import failures

        return failures.find(self.name).place

    def cause_lines(self) -> list[str]:
        from llmgw.fake import failures

        return failures.find(self.name).lines(self._engine)

    def exit_code(self, place: str) -> int:
        """The code of the process the supervisor started, when the failure is in the leader or in a child."""
        from llmgw.fake import failures

        return failures.find(self.name).exit_code(self._engine, place)


def arm_exit(loop: Loop, knobs: Knobs) -> None:
    """Once ready: exit or die as the knobs say."""
    if knobs.exit_after is not None:
        code = -knobs.exit_signal if knobs.exit_signal else knobs.exit_code
        loop.call_later(knobs.exit_after, lambda: die(code))


def arm_flood(loop: Loop, knobs: Knobs, descriptor: int) -> None:
    """Write lines at the asked rate, in bursts of one tick, as a real flood comes."""
    if knobs.flood_lines_per_second <= 0:
        return
    per_tick = max(1, int(knobs.flood_lines_per_second * FLOOD_TICK))
    ticks_left = None if knobs.flood_seconds is None else max(1, int(knobs.flood_seconds / FLOOD_TICK))

    def tick() -> None:
        nonlocal ticks_left
        write_all(descriptor, FLOOD_LINE * per_tick)
        if ticks_left is not None:
            ticks_left -= 1
        if ticks_left is None or ticks_left > 0:
            loop.call_later(FLOOD_TICK, tick)

    tick()
