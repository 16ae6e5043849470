"""Gateway and engines in one llmgw: the key that is made is the key that is sent, and a stop waits for streams."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.node import Node, fake, free_port
from tests.scripted import Stream

QUICK = "--fake-token-interval 0.02"


class Served:
    """One engine behind a gateway."""

    def __init__(self, node: Node, kind: tuple[str, ...], engine: str, more: str = "", gateway: str = "") -> None:
        self.node = node
        self.listen = f"127.0.0.1:{free_port()}"
        self._table = (
            f'[[shard]]\nname = "a"\nmodel = "a"\nengine = "{engine}"\ngpus = 0\n'
            f"command = {fake(*kind, *QUICK.split())}\n{more}\n"
        )
        node.write(f'[gateway]\nlisten = "{self.listen}"\n{gateway}\n' + self._table)
        node.start()
        self.engine: dict[str, Any] = node.wait_state("a", "ready")

    @property
    def key(self) -> str | None:
        key: str | None = self.node.records()[0]["api_key"]
        return key

    def stream(self, tokens: int) -> Stream:
        """Through the gateway."""
        return Stream({**self.engine, "endpoint": self.listen}, tokens)

    def complete(self, where: str) -> int:
        body = json.dumps({"model": "a", "prompt": "x", "max_tokens": 2}).encode()
        request = urllib.request.Request(
            f"http://{where}/v1/completions", body, {"Content-Type": "application/json", "Authorization": "Bearer mine"}
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                status: int = answer.status
                return status
        except urllib.error.HTTPError as error:
            with error:
                return error.code


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


@pytest.mark.parametrize(("kind", "engine"), [(("llamacpp",), "llamacpp"), (("vllm", "serve"), "vllm")])
def test_the_gateway_sends_the_key_that_was_made_also_to_an_engine_that_was_taken_over(
    node: Node, kind: tuple[str, ...], engine: str
) -> None:
    served = Served(node, kind, engine)
    assert served.key is not None
    assert (served.complete(served.engine["endpoint"]), served.complete(served.listen)) == (401, 200)
    node.kill()
    node.start()
    again = node.wait_state("a", "ready")
    assert (again["adopted"], again["pid"]) == (True, served.engine["pid"])
    assert served.complete(served.listen) == 200
    assert node.cli("restart", "a", "--wait").returncode == 0
    assert served.complete(served.listen) == 200


def test_a_stop_waits_for_a_stream_through_the_gateway_and_nothing_of_it_is_lost(node: Node) -> None:
    served = Served(node, ("llamacpp",), "llamacpp")
    stream = served.stream(60)
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert stream.ended()
    assert node.state_of("a") == "stopped"


def test_a_stop_that_waited_long_enough_ends_the_streams_and_then_the_engine(node: Node) -> None:
    served = Served(node, ("llamacpp",), "llamacpp", 'drain_timeout = "500ms"\nstop_timeout = "60s"')
    stream = served.stream(3_000)
    began = time.monotonic()
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert not stream.ended()
    # It leaves when its last client is gone: had the gateway held on, stop_timeout would have ended it.
    assert time.monotonic() - began < 20
    texts = [event["text"] for event in node.events()]
    assert "1 request still running, waited long enough" in texts


def test_the_end_of_llmgw_waits_for_the_gateways_drain_and_no_longer(node: Node) -> None:
    served = Served(node, ("llamacpp",), "llamacpp", 'drain_timeout = "60s"', 'drain_timeout = "1s"')
    stream = served.stream(3_000)
    began = time.monotonic()
    assert node.end() == 0
    assert not stream.ended()
    assert 1.0 <= time.monotonic() - began < 20
    assert node.leftovers() == []
