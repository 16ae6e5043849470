"""Any program: the whole command is the operator's, llmgw adds nothing to it."""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.domain.shard import EngineKind, LaunchPlan
from llmgw.engines.profile import Adapter, EngineProfile, Option

PROFILE = EngineProfile(kind=EngineKind.COMMAND, default_command=(), clean_exit_zero=True, loading_on_503=True)


def options(plan: LaunchPlan) -> tuple[Option, ...]:
    """None: `${llmgw.port}` and the other variables carry what the program must know."""
    return ()


def environment(plan: LaunchPlan) -> Mapping[str, str]:
    """None beyond what every engine gets."""
    return {}


ADAPTER = Adapter(PROFILE, options, environment)
