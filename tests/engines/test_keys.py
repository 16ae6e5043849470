"""Keys of llmgw's own making: for whom, and that no command line and no hash ever shows them."""

from __future__ import annotations

import pytest

from llmgw.domain.shard import UNSET, EngineKind, Secret, ShardSpec
from llmgw.engines.adapter import build_command
from llmgw.engines.keys import why_no_key, with_key
from tests.engines.plans import make_plan

KEY = "k3y-of-this-start"
READS_ITS_ENVIRONMENT = {EngineKind.VLLM: "VLLM_API_KEY", EngineKind.LLAMACPP: "LLAMA_API_KEY"}


def why_not(spec: ShardSpec, *, served: bool = True) -> str | None:
    return why_no_key(spec.engine, spec.env, written=spec.api_key is not None, served=served)


def spec_of(kind: EngineKind, **keys: object) -> ShardSpec:
    if kind is EngineKind.COMMAND:
        keys.setdefault("command", ("/opt/serve",))
    return make_plan(kind, **keys).spec


@pytest.mark.parametrize(("kind", "variable"), READS_ITS_ENVIRONMENT.items())
def test_an_engine_that_reads_its_key_from_the_environment_gets_one_that_no_command_line_shows(
    kind: EngineKind, variable: str
) -> None:
    spec = spec_of(kind)
    assert why_not(spec) is None
    keyed = with_key(spec, KEY)
    assert keyed.config_hash == spec.config_hash
    command = build_command(make_plan(kind, plan={"spec": keyed}))
    assert command.env[variable] == KEY
    assert KEY not in " ".join(command.argv)
    assert command.masked_env()[variable] == "***"
    assert KEY not in repr(keyed)


@pytest.mark.parametrize("kind", list(EngineKind))
def test_without_a_gateway_nobody_would_send_it(kind: EngineKind) -> None:
    assert why_not(spec_of(kind), served=False) == "there is no [gateway] to send it"


@pytest.mark.parametrize("kind", list(EngineKind))
def test_a_key_of_the_file_is_left_alone(kind: EngineKind) -> None:
    assert why_not(spec_of(kind, api_key=Secret("written"))) == "api_key is written"


def test_a_key_that_every_user_could_read_is_not_made() -> None:
    why = why_not(spec_of(EngineKind.SGLANG))
    assert why == "sglang takes a key on its command line only, where every user of the machine can read it"
    assert why_not(spec_of(EngineKind.COMMAND)) == "llmgw does not know how this program takes a key"


@pytest.mark.parametrize("value", ["mine", Secret("mine"), UNSET])
@pytest.mark.parametrize(("kind", "variable"), READS_ITS_ENVIRONMENT.items())
def test_what_the_shards_env_says_about_the_key_counts(kind: EngineKind, variable: str, value: object) -> None:
    assert why_not(spec_of(kind, env={variable: value})) == f"{variable} is written in env"
