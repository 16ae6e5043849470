"""Who asks: keys by their hashes, headers only from whom the file trusts, operators and tenants apart."""

from __future__ import annotations

import pytest
from stand import configuration, key_hash, shard_text

from llmgw.gateway.reading.answers import Refusal
from llmgw.gateway.reading.identity import OPERATOR, Caller, Doors

TENANTS = f"""
operator_keys = [{key_hash("operator-key")}]
trust_headers_from = ["10.1.0.0/16"]
[[gateway.tenant]]
name = "one"
keys = [{key_hash("key-one")}]
models = ["m"]
bands = ["batch", "normal"]
weight = 3
[[gateway.tenant]]
name = "two"
keys = [{key_hash("key-two")}]
"""


def doors(gateway: str = TENANTS) -> Doors:
    config = configuration(f"{shard_text('a')}\n[gateway]\n{gateway}").gateway
    assert config is not None
    return Doors(config)


def lines(**headers: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]


def caller(found: Caller | Refusal) -> Caller:
    assert isinstance(found, Caller), found
    return found


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer key-one"}, {"authorization": "bearer   key-one "}, {"x_api_key": "key-one"}],
)
def test_a_key_says_whose_request_it_is(headers: dict[str, str]) -> None:
    found = caller(doors().caller(lines(**headers), "192.0.2.1"))
    assert (found.tenant, found.weight, found.band) == ("one", 3, "batch")
    assert found.may_use("m") and not found.may_use("other")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "no-key"),
        ({"authorization": "Bearer nobody"}, "wrong-key"),
        ({"authorization": "Bearer operator-key"}, "wrong-key"),
        ({"authorization": "Basic key-one"}, "no-key"),
        ({"authorization": "Bearer "}, "wrong-key"),
        ({"x_llmgw_tenant": "one"}, "no-key"),
    ],
)
def test_nobody_else_is_let_in(headers: dict[str, str], code: str) -> None:
    found = doors().caller(lines(**headers), "192.0.2.1")
    assert isinstance(found, Refusal) and (found.status, found.code) == (401, code)


def test_a_band_is_chosen_among_those_of_the_tenant_and_another_becomes_its_default_one() -> None:
    for wish, band, clamped in (
        ("normal", "normal", False),
        ("interactive", "batch", True),
        ("nonsense", "batch", True),
    ):
        found = caller(doors().caller(lines(authorization="Bearer key-one", x_llmgw_priority=wish), "192.0.2.1"))
        assert (found.band, found.band_clamped) == (band, clamped)


def test_a_trusted_network_names_tenants_and_others_do_not() -> None:
    assert caller(doors().caller(lines(x_llmgw_tenant="two"), "10.1.2.3")).tenant == "two"
    found = doors().caller(lines(x_llmgw_tenant="two"), "10.2.0.1")
    assert isinstance(found, Refusal) and found.status == 401
    found = doors().caller(lines(x_llmgw_tenant="nobody"), "10.1.2.3")
    assert isinstance(found, Refusal) and found.code == "unknown-tenant"
    assert doors().is_trusted("10.1.255.255") and not doors().is_trusted("::1")


def test_an_ipv4_client_of_an_ipv6_socket_is_known_by_its_network() -> None:
    assert caller(doors().caller(lines(x_llmgw_tenant="two"), "::ffff:10.1.2.3")).tenant == "two"


def test_without_tenants_everybody_is_anonymous_and_may_pick_a_band() -> None:
    found = caller(doors("").caller(lines(authorization="Bearer anything", x_llmgw_priority="batch"), "127.0.0.1"))
    assert (found.tenant, found.band) == ("anonymous", "batch")


@pytest.mark.parametrize(
    ("headers", "peer", "code"),
    [
        ({}, "192.0.2.1", "no-operator-key"),
        ({"authorization": "Bearer key-one"}, "192.0.2.1", "operators-only"),
        ({"x_forwarded_for": "192.0.2.1"}, "127.0.0.1", "no-operator-key"),
        ({"forwarded": "for=192.0.2.1"}, "unix", "no-operator-key"),
        ({}, "nonsense", "no-operator-key"),
    ],
)
def test_operators_pages_are_closed_to_strangers(headers: dict[str, str], peer: str, code: str) -> None:
    found = doors().operator(lines(**headers), peer)
    assert isinstance(found, Refusal) and found.code == code


@pytest.mark.parametrize(
    ("headers", "peer"),
    [
        ({"authorization": "Bearer operator-key"}, "192.0.2.1"),
        ({"x_api_key": "operator-key", "x_forwarded_for": "x"}, "127.0.0.1"),
        ({}, "127.0.0.1"),
        ({}, "::1"),
        ({}, "unix"),
    ],
)
def test_operators_come_with_their_key_or_from_this_machine(headers: dict[str, str], peer: str) -> None:
    assert doors().operator(lines(**headers), peer) is OPERATOR
