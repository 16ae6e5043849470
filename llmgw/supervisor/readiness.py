"""What do the answers mean? Answers in, verdicts out; nothing is asked here.

Refused means dead, a time-out means busy, an error in asking means that nothing was learnt. Ready takes both
questions, and both of *our* process: is it up, and does it list the model under the name we serve it by?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attrs import frozen

from llmgw.domain.shard import Limits
from llmgw.domain.status import Activity, ShardState

# -- answers: what came back from asking ------------------------------------------------------------------


@frozen
class Refused:
    """Nobody listens (or the socket file is missing: `absent`)."""

    absent: bool = False


@frozen
class TimedOut:
    """No complete answer in time: busy."""

    seconds: float


@frozen
class Unknown:
    """It could not be asked, or the answer was no HTTP: nothing learnt."""

    text: str


@frozen
class Answered:
    """A complete HTTP answer. `body` is bounded and decoded with replacement."""

    status: int
    body: str = ""

    @property
    def is_yes(self) -> bool:
        return 200 <= self.status < 300

    @property
    def wants_key(self) -> bool:
        return self.status in (401, 403)


Answer = Refused | TimedOut | Unknown | Answered


@frozen
class Listed:
    """A well-formed list of models."""

    names: tuple[str, ...]


ModelsAnswer = Answer | Listed

ListenerKind = Literal["ours", "anothers", "not-visible", "none"]


@frozen
class ListenerFact:
    """Whose the listening socket is; `holder` names another's in words."""

    kind: ListenerKind
    holder: str = ""


# -- verdicts ---------------------------------------------------------------------------------------------


@frozen
class Verdict:
    """The meaning of one round of questions before Ready.

    `detail` is what is being waited for, in a short phrase. `loading` is the sign of loading, when the answers
    themselves are one. `blocked` says that another process answers in our place.
    """

    ready: bool
    detail: str = ""
    loading: str | None = None
    listener_unverified: bool = False
    blocked: bool = False


def judge(
    health: Answer,
    models: ModelsAnswer | None,
    served: Sequence[str],
    listener: ListenerFact | None,
    *,
    loading_on_503: bool,
    unix: bool,
    ask_models: bool,
) -> Verdict:
    """Is it ready? `models` is None when the first question was not a yes; `listener` when not asked yet.

    Another's listener is told before anything it answers. `served` are the names it may be listed under,
    `ask_models` is False where only the first question counts.
    """
    if isinstance(health, Refused):
        if unix and not health.absent:
            return Verdict(False, "its socket exists, not listening yet", loading="socket file exists")
        return Verdict(False, "not listening yet")
    if listener is not None and listener.kind == "anothers":
        return Verdict(False, f"another process answers on its port: {listener.holder}", blocked=True)
    if isinstance(health, TimedOut):
        return Verdict(False, f"no answer to the health question within {health.seconds:g} s")
    if isinstance(health, Unknown):
        return Verdict(False, f"no valid answer yet: {health.text}")
    if health.wants_key:
        return Verdict(False, f"health answers {health.status}: it asks for a key; set api_key to the engine's key")
    if health.status == 503 and loading_on_503:
        return Verdict(False, "loading (health 503)", loading="health answers 503")
    if not health.is_yes:
        return Verdict(False, f"health answers {health.status}")
    if ask_models:
        text = _models_missing(models, served)
        if text is not None:
            return Verdict(False, text)
    if listener is None or listener.kind == "none":
        return Verdict(False, "it answers, but whose socket that is was not found out yet")
    return Verdict(True, listener_unverified=listener.kind == "not-visible")


def _models_missing(models: ModelsAnswer | None, served: Sequence[str]) -> str | None:
    """Why the second question is not a yes; None when it is."""
    match models:
        case None:
            return "the list of models was not asked yet"
        case Listed(names=names):
            if any(name in names for name in served):
                return None
            shown = ", ".join(names[:3]) or "nothing"
            return f"it lists {shown}, not {served[0]}"
        case Answered() as answer if answer.wants_key:
            return f"the list of models answers {answer.status}: it asks for a key; set api_key to the engine's key"
        case Answered(status=status):
            return f"the list of models answers {status}" if status != 200 else "the list of models is no valid JSON"
        case Refused():
            return "the list of models: connection refused"
        case TimedOut(seconds=seconds):
            return f"no list of models within {seconds:g} s"
        case Unknown(text=text):
            return f"no valid list of models yet: {text}"


@frozen
class Health:
    """The meaning of one answer after Ready.

    `gone`: nobody listens any more. `no`: it says that it is not well. `yes`: it is. `busy`: nothing changes.
    """

    kind: Literal["yes", "no", "busy", "gone"]
    text: str = ""


def judge_health(answer: Answer) -> Health:
    """After Ready only the first question is asked. A key that is refused is a setting, not ill health."""
    match answer:
        case Refused():
            return Health("gone", "its port is closed")
        case TimedOut(seconds=seconds):
            return Health("busy", f"no answer within {seconds:g} s")
        case Unknown(text=text):
            return Health("busy", text)
        case Answered() as answered if answered.is_yes or answered.wants_key:
            return Health("yes")
        case Answered(status=status):
            return Health("no", f"health answers {status}")


# -- limits -----------------------------------------------------------------------------------------------


@frozen
class Deadline:
    """When the present state has taken too long, and which key says so. Times on the monotonic clock."""

    at: float
    key: Literal["start_timeout", "load_timeout", "load_timeout_max"]
    limit: float


def deadline_of(limits: Limits, state: ShardState, launched: float, progressed: float) -> Deadline | None:
    """The limit that ends the present state first; None where none does.

    `launched` is when the process was started, `progressed` when the first sign of loading or the last progress was
    seen: a load that moves is never ended by `load_timeout`.
    """
    if state is ShardState.STARTING:
        return Deadline(launched + limits.start_timeout, "start_timeout", limits.start_timeout)
    if state is ShardState.LOADING:
        still = Deadline(progressed + limits.load_timeout, "load_timeout", limits.load_timeout)
        if limits.load_timeout_max is None:
            return still
        whole = Deadline(launched + limits.load_timeout_max, "load_timeout_max", limits.load_timeout_max)
        return min(still, whole, key=lambda deadline: deadline.at)
    return None


STALL_NOTICE = 30.0
"""Seconds without a step, with requests running, until a stall is reported. Long prefills take some seconds, a
graph capture at first use up to twenty; a stall report changes nothing by itself."""


@frozen
class StallWatch:
    """Progress liveness: requests run, yet the engine's step counter stands still since `since`."""

    steps: float | None = None
    since: float | None = None

    def seen(self, activity: Activity, now: float) -> StallWatch:
        """The watch after one reading; a reading without a counter learns nothing."""
        if activity.steps is None or activity.running is None:
            return self
        if activity.running <= 0 or activity.steps != self.steps:
            return StallWatch(activity.steps, now if activity.running > 0 else None)
        return self if self.since is not None else StallWatch(self.steps, now)

    def stalled_for(self, now: float) -> float:
        """Seconds without a step while requests run; 0 when it works or is idle."""
        return max(0.0, now - self.since) if self.since is not None else 0.0
