"""Keys that llmgw makes for engines which its gateway serves, in a whole llmgw with fake engines."""

from __future__ import annotations

import json
import os
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.node import Node, fake, free_port
from tests.scripted import scripted

KINDS = {"llamacpp": ("llamacpp",), "vllm": ("vllm", "serve"), "sglang": ("sglang", "serve")}
VARIABLES = {"llamacpp": "LLAMA_API_KEY", "vllm": "VLLM_API_KEY"}


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def shard(kind: str, more: str = "") -> str:
    return (
        f'[[shard]]\nname = "{kind}"\nmodel = "m-{kind}"\nengine = "{kind}"\ngpus = 0\n'
        f"command = {fake(*KINDS[kind])}\n{more}\n"
    )


def gateway() -> str:
    return f'[gateway]\nlisten = "127.0.0.1:{free_port()}"\n'


def key_of(node: Node, name: str) -> str | None:
    """The key in the shard's record."""
    record = next(record for record in node.records() if record["shard"] == name)
    key: str | None = record["api_key"]
    return key


def listed(one: dict[str, Any], key: str | None) -> int:
    """The status of the engine's own answer to who asks for its models."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://{one['endpoint']}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize("kind", ["llamacpp", "vllm"])
def test_a_served_engine_asks_for_a_key_that_is_seen_nowhere_but_in_its_record(node: Node, kind: str) -> None:
    node.write(gateway() + shard(kind))
    node.start()
    ready = node.wait_state(kind, "ready")
    key = key_of(node, kind)
    assert key is not None and len(key) >= 32
    assert (listed(ready, None), listed(ready, "another"), listed(ready, key)) == (401, 401, 200)

    process = psutil.Process(ready["pid"])
    assert process.environ()[VARIABLES[kind]] == key
    for one in (process, *process.children(recursive=True)):
        assert key not in " ".join(one.cmdline())
    for verb in (["status", "--json"], ["events", "--json"], ["plan", kind], ["config", "show"], ["logs", kind]):
        said = node.cli(*verb)
        assert key not in said.stdout + said.stderr, verb
    holders = [path for path in node.folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert [path.name for path in holders] == [f"{kind}.0.json"]
    assert stat.S_IMODE(os.stat(holders[0]).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(holders[0].parent).st_mode) == 0o700


def test_each_start_has_a_key_of_its_own(node: Node) -> None:
    node.write(gateway() + shard("llamacpp"))
    node.start()
    node.wait_state("llamacpp", "ready")
    first = key_of(node, "llamacpp")
    assert node.cli("restart", "llamacpp", "--wait").returncode == 0
    ready = node.wait_state("llamacpp", "ready")
    second = key_of(node, "llamacpp")
    assert ready["generation"] == 2
    assert second not in (None, first)
    assert (listed(ready, first), listed(ready, second)) == (401, 200)


def test_an_engine_that_is_taken_over_after_a_kill_keeps_its_key_and_answers_the_probes(node: Node) -> None:
    node.write(gateway() + shard("llamacpp", 'probe_interval_ready = "100ms"'))
    node.start()
    before = node.wait_state("llamacpp", "ready")
    key = key_of(node, "llamacpp")
    node.kill()
    node.start()
    after = node.wait_state("llamacpp", "ready")
    assert (after["pid"], after["adopted"]) == (before["pid"], True)
    assert key_of(node, "llamacpp") == key
    # Its counters are behind the key.
    node.until(lambda: node.shard("llamacpp")["activity"], "its counters are read")
    assert node.conditions("llamacpp").keys() == {"adopted"}


def test_without_a_gateway_an_engine_asks_for_no_key(node: Node) -> None:
    node.write(shard("llamacpp"))
    node.start()
    ready = node.wait_state("llamacpp", "ready")
    assert key_of(node, "llamacpp") is None
    assert listed(ready, None) == 200


def test_an_engine_that_would_show_its_key_gets_none(node: Node) -> None:
    node.write(gateway() + shard("sglang") + scripted(node, "server.serve_forever()", name="plain"))
    node.start()
    for name in ("sglang", "plain"):
        node.wait_state(name, "ready")
        assert key_of(node, name) is None
    assert node.cli("plan", "sglang").stdout.splitlines()[-1] == (
        "  note: no key is made for it: sglang takes a key on its command line only, where every user of the machine "
        "can read it"
    )


def test_a_key_of_the_file_is_used_as_it_is(node: Node) -> None:
    node.write(gateway() + shard("llamacpp", 'api_key = "written-in-the-file"'))
    node.config.chmod(0o600)
    node.start()
    ready = node.wait_state("llamacpp", "ready")
    assert key_of(node, "llamacpp") == "written-in-the-file"
    assert listed(ready, "written-in-the-file") == 200


def test_a_gateway_that_comes_or_goes_replaces_no_engine(node: Node) -> None:
    node.write(shard("llamacpp"))
    node.start()
    pid = node.wait_state("llamacpp", "ready")["pid"]
    node.write(gateway() + shard("llamacpp"))
    assert node.cli("reload").returncode == 0
    assert node.wait_state("llamacpp", "ready")["pid"] == pid
    assert key_of(node, "llamacpp") is None

    assert node.cli("restart", "llamacpp", "--wait").returncode == 0
    pid, key = node.wait_state("llamacpp", "ready")["pid"], key_of(node, "llamacpp")
    assert key is not None
    node.write(shard("llamacpp"))
    assert node.cli("reload").returncode == 0
    # It goes on as it was started, and the probes know its key.
    assert node.wait_state("llamacpp", "ready")["pid"] == pid
    assert key_of(node, "llamacpp") == key


def test_plan_shows_that_a_key_is_made_and_not_which(node: Node) -> None:
    node.write(gateway() + shard("vllm"))
    said = node.cli("plan", "vllm", "--offline")
    assert said.returncode == 0, said.stderr
    lines = [line.split() for line in said.stdout.splitlines()]
    assert ["VLLM_API_KEY=***", "generated"] in lines
    assert said.stdout.splitlines()[-1] == "  note: VLLM_API_KEY is a new one at each start, which the gateway sends"
    document = json.loads(node.cli("plan", "vllm", "--offline", "--json").stdout)
    variables = {one["name"]: one["value"] for one in document["shards"][0]["env"]}
    assert variables["VLLM_API_KEY"] == "***"
