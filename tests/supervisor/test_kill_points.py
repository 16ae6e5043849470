"""SIGKILL of llmgw at any moment, also between a spawn and its record."""

from __future__ import annotations

import pytest

from tests.kill_points import run_points


@pytest.mark.slow
def test_after_a_kill_at_any_moment_there_is_one_engine_per_shard_and_no_orphan() -> None:
    points = run_points(seed=20261130, count=20)
    assert len(points) == 20
    assert [point for point in points if not point.is_good] == []
