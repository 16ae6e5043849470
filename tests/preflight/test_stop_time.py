"""systemd's patience against the longest stop."""

from __future__ import annotations

import pytest

from llmgw.domain.shard import EngineKind, Limits, ShardSpec
from llmgw.preflight.stop_time import longest_stop, stop_timeout_problem


def shard(name: str, **limits: float) -> ShardSpec:
    return ShardSpec(name, "m", EngineKind.VLLM, ("vllm",), "h", limits=Limits(**limits))


SPECS = (shard("quick", drain_timeout=0.0), shard("llama-70b-a"))


def test_the_longest_stop_is_that_of_one_shard_because_they_stop_side_by_side() -> None:
    assert longest_stop(SPECS) == (220.0, "llama-70b-a")
    assert longest_stop(()) is None


def test_a_unit_that_is_less_patient_is_warned_of_with_the_arithmetic() -> None:
    problem = stop_timeout_problem("llmgw.service", 150.0, SPECS)
    assert problem is not None and problem.severity == "warning"
    assert str(problem.where) == "unit llmgw.service"
    assert problem.message == (
        'TimeoutStopSec=150 is not longer than the longest stop, 220s of shard "llama-70b-a" '
        "(drain_timeout + stop_timeout + 10s + gpu_release_timeout)"
    )


@pytest.mark.parametrize(("timeout", "fine"), [(220.0, False), (220.5, True), (None, True)])
def test_only_more_than_the_longest_stop_is_enough(timeout: float | None, fine: bool) -> None:
    assert (stop_timeout_problem("llmgw.service", timeout, SPECS) is None) is fine


def test_without_shards_any_patience_is_enough() -> None:
    assert stop_timeout_problem("llmgw.service", 1.0, ()) is None
