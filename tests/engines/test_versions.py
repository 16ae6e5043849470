from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.shard import EngineKind
from llmgw.engines.adapter import ADAPTERS, build_command
from llmgw.engines.versions import KNOWN_SINCE, is_at_least, parse_version, too_old_for
from tests.engines.plans import make_plan


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0+cpu", (0, 32, 0)),
        ("0.5.23.post1", (0, 5, 23)),
        ("v1.2rc1", (1, 2)),
        ("", None),
        (None, None),
        ("unknown", None),
    ],
)
def test_the_release_numbers_are_read(text: str | None, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


def test_versions_are_compared_as_numbers_and_not_as_text() -> None:
    assert is_at_least((0, 10), (0, 9))
    assert is_at_least((0, 10), (0, 10, 0))
    assert not is_at_least((0, 9, 9), (0, 10))


@given(st.text())
def test_no_text_makes_reading_a_version_fail(text: str) -> None:
    version = parse_version(text)
    assert version is None or all(number >= 0 for number in version)


def test_an_option_an_old_engine_does_not_know_is_left_out_with_a_warning() -> None:
    command = build_command(make_plan(EngineKind.VLLM, plan={"engine_version": "0.11.2"}))
    assert "--shutdown-timeout" not in command.argv
    assert {problem.code for problem in command.warnings} == {"option-left-out"}
    assert "known since vllm 0.18, this is 0.11.2" in command.warnings[0].message


def test_an_unknown_version_is_taken_for_a_new_one() -> None:
    assert too_old_for(EngineKind.VLLM, "shutdown-timeout", None) is None
    assert "--shutdown-timeout" in build_command(make_plan(EngineKind.VLLM)).argv


def test_the_table_names_options_of_engines_that_tell_their_version() -> None:
    assert all(ADAPTERS[kind].profile.distribution for kind, _ in KNOWN_SINCE)
