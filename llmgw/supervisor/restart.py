"""May it be tried again, and when? Pure: chance is an argument.

There is no window of time: so many failures in a row end the attempts, however long each one takes, because a
load that fails after minutes would never fill a window and be retried for ever.
"""

from __future__ import annotations

from attrs import frozen

from llmgw.domain.problem import Reason
from llmgw.domain.shard import RestartPolicy

JITTER = 0.2
"""Share by which a pause is stretched or shortened, so that shards that died together do not load together."""


@frozen
class Retry:
    """Try again after `delay` seconds. `attempt` is the number of failures so far."""

    delay: float
    attempt: int


@frozen
class GiveUp:
    """Stay failed until somebody says `llmgw start`; `text` says why."""

    text: str


def backoff(policy: RestartPolicy, attempt: int, chance: float) -> float:
    """The pause before the retry that follows failure number `attempt` (1 is the first), in seconds.

    Doubled each time up to the policy's cap. `chance` is a random number from 0 to 1.
    """
    # The exponent is bounded: 2 ** 60 times any pause is far above any cap, and a float must not overflow.
    pause = min(policy.delay_max, policy.delay * 2.0 ** min(max(attempt, 1) - 1, 60))
    return min(policy.delay_max, pause * (1.0 - JITTER + 2.0 * JITTER * chance))


def decide_restart(policy: RestartPolicy, reason: Reason, failures: int, chance: float) -> Retry | GiveUp:
    """What follows a failure. `failures` counts those in a row, this one included."""
    if policy.mode == "no":
        return GiveUp('will not restart: restart = "no"')
    if not reason.retry:
        return GiveUp("will not restart: trying again cannot help")
    if policy.limit and failures >= policy.limit:
        times = "once" if failures == 1 else f"{failures} times in a row"
        return GiveUp(f"will not restart: failed {times}")
    return Retry(backoff(policy, failures, chance), failures)
