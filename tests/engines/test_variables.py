from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.shard import EngineKind
from llmgw.engines.variables import VARIABLES, escape, substitute, values_of
from tests.engines.plans import make_plan


def test_every_documented_variable_has_a_value_on_a_tcp_port() -> None:
    assert set(values_of(make_plan(EngineKind.VLLM))) == set(VARIABLES)


def test_two_dollar_signs_are_one_and_foreign_variables_stay() -> None:
    values = values_of(make_plan(EngineKind.VLLM, plan={"devices": ("2", "3")}))
    assert substitute("$$${llmgw.port}/${HOME}/$5/${llmgw.gpus}", values) == "$8101/${HOME}/$5/2,3"


def test_an_escaped_variable_is_not_replaced() -> None:
    assert substitute("$${llmgw.port}", {"port": "1"}) == "${llmgw.port}"


def test_an_unknown_variable_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"there is no \$\{llmgw.prot\}; known are port, host"):
        substitute("${llmgw.prot}", {})


@given(st.text())
def test_escaped_text_comes_back_unchanged(text: str) -> None:
    assert substitute(escape(text), {}) == text
