"""How many requests an engine gets at a time, in a whole llmgw with fake engines: from each source, to the status."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.node import Node, fake

KINDS = {"llamacpp": ("llamacpp",), "vllm": ("vllm", "serve"), "sglang": ("sglang", "serve")}


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def shard(kind: str, more: str = "", *, name: str = "a", command: str = "") -> str:
    return (
        f'[[shard]]\nname = "{name}"\nmodel = "{name}"\nengine = "{kind}"\ngpus = 0\n'
        f"command = {command or fake(*KINDS[kind])}\n{more}\n"
    )


def slots(one: dict[str, Any]) -> tuple[int | None, str]:
    return one["slots"], one["slots_from"]


def test_each_engine_tells_its_limit_in_its_own_way(node: Node) -> None:
    node.write(
        shard("vllm", "args = { max-num-seqs = 12 }", name="v-args")
        + shard("vllm", name="v-silent")
        + shard("sglang", "args = { max-running-requests = 5 }", name="s-args")
        + shard("sglang", name="s-asked")
        + shard("llamacpp", 'extra_args = ["-np", "3"]', name="l-args")
        + shard("llamacpp", name="l-asked")
        + shard("llamacpp", "max_inflight = 2", name="written")
    )
    node.start()
    wanted = {
        "v-args": (12, "args"),
        "v-silent": (256, "default"),
        "s-args": (5, "args"),
        "s-asked": (256, "server_info"),
        "l-args": (3, "args"),
        "l-asked": (4, "props"),
        "written": (2, "max_inflight"),
    }
    # Known in the moment in which it is Ready: who routes need not guess first.
    assert {name: slots(node.wait_state(name, "ready")) for name in wanted} == wanted
    said = node.cli("status", "s-asked", "l-args", "v-silent").stdout
    assert "s-asked: the gateway sends it 256 requests at a time at most (by its own /server_info)" in said
    assert "l-args: the gateway sends it 3 requests at a time at most (by its own arguments)" in said
    assert "v-silent: the gateway sends it 256 requests at a time at most (its own limit is not known)" in said
    assert "at a time" not in node.cli("status").stdout


def test_an_engine_that_was_taken_over_is_not_asked_again(node: Node) -> None:
    node.write(shard("llamacpp") + shard("vllm", "args = { max-num-seqs = 12 }", name="b"))
    node.start()
    for name in ("a", "b"):
        node.wait_state(name, "ready")
    node.until(lambda: all(record["ready_at"] for record in node.records()), "both records are complete")
    assert [(record["slots"], record["slots_from"]) for record in node.records()] == [(4, "props"), (12, "args")]
    node.kill()
    node.start()
    after = {name: node.wait_state(name, "ready") for name in ("a", "b")}
    assert all(one["adopted"] for one in after.values())
    assert {name: slots(one) for name, one in after.items()} == {"a": (4, "props"), "b": (12, "args")}


def test_a_reload_of_max_inflight_counts_at_once_and_leaves_the_engine_alone(node: Node) -> None:
    node.write(shard("llamacpp"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    for line, wanted in (("max_inflight = 9", (9, "max_inflight")), ('max_inflight = "auto"', (4, "props"))):
        node.write(shard("llamacpp", line))
        assert node.cli("reload").returncode == 0
        node.until(lambda wanted=wanted: slots(node.shard("a")) == wanted, f"{wanted} is in force")  # type: ignore[misc]
        assert node.shard("a")["pid"] == pid


SILENT_AT_FIRST = """\
import http.server, json, sys, threading

asked = []

class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        pages = {"/health": {}, "/v1/models": {"data": [{"id": "a"}]}, "/props": {"total_slots": 6}}
        if self.path == "/props":
            asked.append(self.path)
            if len(asked) == 1:
                threading.Event().wait(600)
        body = json.dumps(pages.get(self.path)).encode()
        self.send_response(200 if self.path in pages else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answers)
server.daemon_threads = True
server.serve_forever()
"""


def test_an_engine_that_does_not_say_it_in_time_is_ready_all_the_same_and_asked_again(node: Node) -> None:
    program = node.folder / "silent.py"
    program.write_text(SILENT_AT_FIRST)
    times = 'probe_timeout = "300ms"\nprobe_interval_ready = "100ms"'
    node.write(shard("llamacpp", times, command=json.dumps([sys.executable, str(program)])))
    node.start()
    node.wait_state("a", "ready")
    node.until(lambda: slots(node.shard("a")) == (6, "props"), "it has said its limit")


def test_an_engine_without_such_a_page_is_ready_with_the_default(node: Node) -> None:
    program = node.folder / "none.py"
    program.write_text(SILENT_AT_FIRST.replace('"/props": {"total_slots": 6}', '"/other": {}').replace("600", "0"))
    node.write(shard("llamacpp", command=json.dumps([sys.executable, str(program)])))
    node.start()
    assert slots(node.wait_state("a", "ready")) == (256, "default")
