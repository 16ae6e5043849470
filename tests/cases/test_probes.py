"""The reported failures of readiness and health probes, as behaviour of a whole llmgw."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.node import Node, fake, is_alive

QUICK = (
    '[defaults]\nrestart_delay = "200ms"\nrestart_delay_max = "300ms"\nprobe_interval = "200ms"\n'
    'probe_interval_ready = "1s"\nprobe_timeout = "1s"\n'
)
KEY = "sk-never-to-be-seen-4711"


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def shard(profile: str, name: str = "a", *, knobs: str = "", more: str = "") -> str:
    engine = profile.split()[0]
    command = fake(*profile.split(), *knobs.split())
    gpus = "" if engine == "llamacpp" else "gpus = 0\n"
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\nengine = "{engine}"\n{gpus}command = {command}\n{more}\n'


VLLM, SGLANG, LLAMACPP = "vllm serve", "sglang serve", "llamacpp"

SCRIPTED = """
import pathlib, socket, sys, threading
port, answers = int(sys.argv[1]), pathlib.Path(sys.argv[2])
door = socket.socket()
door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
door.bind(("127.0.0.1", port))
door.listen()
def serve(client):
    try:
        head = b""
        while b"\\r\\n\\r\\n" not in head:
            data = client.recv(65536)
            if not data:
                return
            head += data
        which = "models" if b"/v1/models" in head.split(b"\\r\\n")[0] else "health"
        with open(answers / "seen", "ab") as seen:
            seen.write(head)
        client.sendall((answers / which).read_bytes())
    except OSError:
        pass
    finally:
        client.close()
while True:
    threading.Thread(target=serve, args=(door.accept()[0],), daemon=True).start()
"""


def http_answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(headers or (f"content-length: {len(body)}",)), "connection: close"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


LISTED = json.dumps({"object": "list", "data": [{"id": "a"}]}).encode()
YES = http_answer(LISTED)
WRONG = {
    "not http": b"\x16\x03\x01\x02\x00\x01\x00 SSH-2.0-OpenSSH_9\r\n\xff\xfe\r\n\r\n",
    "no bytes": b"",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "an absurd status": b"HTTP/1.1 999999999999 Fine\r\n\r\n",
    "a negative length": http_answer(LISTED, "200 OK", "content-length: -5"),
    "two lengths": http_answer(LISTED, "200 OK", "content-length: 3", "content-length: 5000"),
    "a length beyond the body": http_answer(LISTED, "200 OK", "content-length: 5000"),
    "a wrong chunk": http_answer(b"zz\r\nhello\r\n0\r\n\r\n", "200 OK", "transfer-encoding: chunked"),
    "a huge header": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000 + b"\r\n\r\n",
    "fifty thousand headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000 + b"\r\n",
    "a redirect to itself": http_answer(b"", "302 Found", "location: /health", "content-length: 0"),
    "a redirect to nonsense": http_answer(b"", "301 Gone", "location: http://[::bad/\x00", "content-length: 0"),
    "an early answer for ever": b"HTTP/1.1 100 Continue\r\n\r\n" * 5000,
    "a switch of protocols": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n\x00\x01",
    "http 0.9": b"<html>hello</html>",
    "nul bytes": b"\x00" * 70_000,
}
WRONG_LISTS = {
    "not json": b"all fine",
    "deep json": b"[" * 100_000,
    "a number": b"7",
    "a list of nulls": b'{"data": [null, 7, {"id": null}, {"id": ["a"]}, {"id": {"id": "a"}}]}',
    "an endless number": b'{"data": ' + b"9" * 100_000 + b"}",
    "another name": b'{"data": [{"id": "b"}, {"id": "A"}, {"id": "a "}]}',
    "gzip": gzip.compress(LISTED),
    "utf-16": LISTED.decode().encode("utf-16"),
    "lone surrogates": b'{"data": [{"id": "\\ud800"}]}',
}


class Scripted:
    """An engine whose bytes are files, so that they can change while it runs."""

    def __init__(self, node: Node) -> None:
        self.folder = node.folder / "answers"
        self.folder.mkdir()
        program = node.folder / "scripted.py"
        program.write_text(SCRIPTED)
        command = json.dumps([sys.executable, str(program), "${llmgw.port}", str(self.folder)])
        self.shard = (
            f'[[shard]]\nname = "a"\nmodel = "a"\nengine = "command"\ncommand = {command}\nready_path = "/health"\n'
        )

    def say(self, health: bytes, models: bytes = YES) -> None:
        for name, data in (("health", health), ("models", models)):
            hidden = self.folder / f".{name}"
            hidden.write_bytes(data)
            hidden.replace(self.folder / name)

    def seen(self) -> str:
        path = self.folder / "seen"
        return path.read_bytes().decode("latin-1") if path.exists() else ""

    def wait_asked(self, node: Node, times: int = 2) -> None:
        """Until it was asked again so often."""
        before = self.seen().count("GET ")
        node.until(lambda: self.seen().count("GET ") >= before + times, "it was asked again")


# -- F08: answers in every order and of every kind


def test_no_answer_of_whatever_kind_is_ready_or_breaks_anything(node: Node) -> None:
    engine = Scripted(node)
    engine.say(b"")
    node.write(QUICK.replace('"200ms"\nprobe_interval_ready', '"100ms"\nprobe_interval_ready') + engine.shard)
    node.start()
    node.wait_state("a", "starting", "loading")
    pid = node.shard("a")["pid"]
    for kind, data in WRONG.items():
        engine.say(data)
        engine.wait_asked(node)
        now = node.shard("a")
        assert (now["state"], now["pid"]) in {("starting", pid), ("loading", pid)}, kind
        assert now["detail"], kind
    for kind, body in WRONG_LISTS.items():
        engine.say(YES, http_answer(body))
        engine.wait_asked(node, 3)
        now = node.shard("a")
        assert (now["state"] in ("starting", "loading"), now["pid"]) == (True, pid), kind
    engine.say(YES)
    node.wait_state("a", "ready")
    assert "Traceback" not in node.log() and "bug" not in node.conditions("a")


@pytest.mark.proof
def test_no_answer_of_whatever_kind_ends_a_ready_engine(node: Node) -> None:
    engine = Scripted(node)
    engine.say(YES)
    node.write(QUICK + engine.shard)
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    for kind in ("not http", "no bytes", "a huge header", "a redirect to itself", "a length beyond the body"):
        engine.say(WRONG[kind], b"")
        engine.wait_asked(node)
        assert (node.state_of("a"), node.shard("a")["pid"]) == ("ready", pid), kind
    # A well-formed answer that is not yes is a no.
    engine.say(http_answer(b"", "503 Busy", "content-length: 0"))
    node.until(lambda: "unhealthy" in node.conditions("a"), "it says no")
    assert not node.shard("a")["routable"]
    engine.say(YES)
    node.until(lambda: node.shard("a")["routable"], "the first yes takes it away")
    assert node.shard("a")["pid"] == pid
    assert "Traceback" not in node.log()


@pytest.mark.parametrize("profile", [VLLM, SGLANG, LLAMACPP])
def test_ready_takes_the_name_and_not_only_a_list(node: Node, profile: str) -> None:
    node.write(QUICK + shard(profile, knobs="--fake-wrong-model-name"))
    node.start()
    node.until(lambda: "it lists" in node.shard("a")["detail"], "it says what is listed")
    assert node.state_of("a") == "loading"
    assert node.shard("a")["detail"].endswith("not a")


@pytest.mark.parametrize("garbage", ["silent", "endless", "huge", "drip", "close"])
def test_an_answer_without_an_end_is_not_yet(node: Node, garbage: str) -> None:
    node.write(QUICK + shard(LLAMACPP, knobs=f"--fake-models-garbage {garbage}"))
    node.start()
    node.until(lambda: "list of models" in node.shard("a")["detail"], "it says which question is not answered")
    assert node.state_of("a") == "loading"
    assert node.process is not None
    assert psutil.Process(node.process.pid).memory_info().rss < 200 << 20


def test_a_warm_up_is_one_request_before_ready(node: Node) -> None:
    node.write(QUICK + shard(LLAMACPP, knobs="--fake-first-token-delay 2", more="warmup = true"))
    node.start()
    node.until(lambda: "warming up" in node.shard("a")["detail"], "it warms up")
    assert node.state_of("a") == "loading"
    node.wait_state("a", "ready")
    log = (node.folder / "l" / "a.0.log").read_text(errors="replace")
    assert log.count("/v1/completions") <= 1


# -- F09: keys


@pytest.mark.parametrize("profile", [VLLM, SGLANG, LLAMACPP])
def test_probes_carry_the_key_and_nobody_sees_it(node: Node, profile: str) -> None:
    node.env["MY_KEY"] = KEY
    node.write(QUICK + shard(profile, more='api_key = { env = "MY_KEY" }'))
    node.start()
    ready = node.wait_state("a", "ready")
    os.kill(ready["pid"], signal.SIGKILL)
    node.until(lambda: node.shard("a")["generation"] == 2, "it failed once")
    node.wait_state("a", "ready")
    shown = [
        json.dumps(node.status()),
        json.dumps(node.events()),
        json.dumps(node.ask("GET", "/v1/config")),
        node.log(),
        node.cli("status").stdout,
        node.cli("plan", "a").stdout,
        node.cli("plan", "--json", "a").stdout,
        node.cli("config", "show").stdout,
    ]
    assert [text for text in shown if KEY in text] == []
    for path in node.folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o077 and path.name != "a.0.log":
            assert KEY.encode() not in path.read_bytes(), path
    argv = psutil.Process(node.shard("a")["pid"]).cmdline()
    # SGLang takes its key on the command line only, which is said.
    assert any(KEY in word for word in argv) == (profile == SGLANG)
    if profile == SGLANG:
        assert "process list" in node.log() or "command line" in node.log()


@pytest.mark.parametrize("profile", [VLLM, SGLANG])
def test_an_engine_that_asks_for_a_key_nobody_wrote_is_told_as_such_and_not_ended(node: Node, profile: str) -> None:
    node.write(QUICK + shard(profile, more=f'extra_args = ["--api-key", "{KEY}"]\nallow = []'))
    if node.cli("check").returncode:
        # Owned by llmgw there; a key of the engine's own comes by a wrapper.
        wrapper = node.folder / "wrapper"
        wrapper.write_text(f'#!/bin/sh\nexec "$@" --api-key {KEY}\n')
        wrapper.chmod(0o755)
        text = shard(profile)
        node.write(QUICK + text.replace("command = [", f'command = ["{wrapper}", ', 1))
    node.start()
    node.until(lambda: "asks for a key" in node.shard("a")["detail"], "it says what is missing")
    before = node.shard("a")
    assert "api_key" in before["detail"] and before["state"] == "loading"
    node.until(lambda: time.time() - before["since"] > 3, "some more probes")
    assert node.shard("a")["pid"] == before["pid"] and is_alive(before["pid"])


# -- F10: busy is not dead


def test_slow_health_changes_nothing_and_a_no_only_the_routing(node: Node) -> None:
    knobs = "--fake-health-delay 1.5 --fake-tokens 400 --fake-token-interval 0.02"
    node.write(QUICK.replace('probe_timeout = "1s"', 'probe_timeout = "5s"') + shard(LLAMACPP, knobs=knobs))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    node.write(QUICK + shard(LLAMACPP, knobs=knobs))
    assert node.cli("reload").returncode == 0
    host, _, port = node.shard("a")["endpoint"].rpartition(":")
    client = http.client.HTTPConnection(host, int(port), timeout=30)
    client.request("POST", "/v1/completions", json.dumps({"model": "a", "prompt": "x", "stream": True}))
    stream = client.getresponse()
    received = b""
    while b"word150 " not in received:
        received += stream.read1(65536)
    now = node.shard("a")
    assert (now["state"], now["pid"], now["routable"]) == ("ready", pid, True)
    assert "unhealthy" not in node.conditions("a")
    client.close()


def test_a_time_of_503_is_unhealthy_and_over_with_the_first_yes(node: Node) -> None:
    node.write(QUICK + shard(LLAMACPP, knobs="--fake-health-503-after 1 --fake-health-503-for 4"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    node.until(lambda: node.conditions("a").get("unhealthy") == "health answers 503", "it is unhealthy")
    assert not node.shard("a")["routable"] and node.state_of("a") == "ready"
    node.until(lambda: "unhealthy" not in node.conditions("a"), "it is well again")
    assert (node.shard("a")["pid"], node.shard("a")["failures"]) == (pid, 0)


@pytest.mark.proof
def test_an_engine_that_stays_ill_or_without_a_worker_is_restarted_where_that_is_wished(node: Node) -> None:
    more = 'unhealthy_timeout = "10s"'
    node.write(QUICK + shard(LLAMACPP, knobs="--fake-health-503-after 1", more=more) + with_worker("b", more))
    node.start()
    first, second = node.wait_state("a", "ready"), node.wait_state("b", "ready")
    os.kill(psutil.Process(second["pid"]).children()[0].pid, signal.SIGKILL)
    for name, pid in (("a", first["pid"]), ("b", second["pid"])):
        node.until(lambda name=name: node.shard(name)["generation"] == 2, "it is restarted")
        assert not is_alive(pid)
    events = json.dumps(node.events())
    assert "health answers 503 for" in events and "a process of it is gone" in events
    node.wait_state("b", "ready")
    assert "member-lost" not in node.conditions("b")


# -- F11: the API lives, the engine is dead


def with_worker(name: str, more: str = "") -> str:
    """A shard whose leader answers and whose child stands for what computes."""
    command = fake("plain", "--fake-serve", "--fake-port", "${llmgw.port}", "--fake-children", "plain")
    return f'[[shard]]\nname = "{name}"\nmodel = "plain"\nengine = "command"\ncommand = {command}\n{more}\n'


def test_the_death_of_a_worker_is_said_while_the_api_goes_on_saying_yes(node: Node) -> None:
    node.write(QUICK + with_worker("a"))
    node.start()
    (worker,) = psutil.Process(node.wait_state("a", "ready")["pid"]).children()
    worker.kill()
    node.until(lambda: "member-lost" in node.conditions("a"), "the loss is said")
    assert f"pid {worker.pid}" in node.conditions("a")["member-lost"]
    assert node.state_of("a") == "ready"


# -- F12: proxies


def test_proxies_of_the_environment_are_for_the_engine_and_not_for_its_probes(node: Node) -> None:
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.setblocking(False)
        proxy = f"127.0.0.1:{trap.getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            node.env[name] = node.env[name.lower()] = f"http://{proxy}"
        node.env["ALL_PROXY"] = node.env["all_proxy"] = f"socks5://{proxy}"
        node.env["SSL_CERT_FILE"] = node.env["SSL_CERT_DIR"] = "/nowhere/at/all"
        node.env["NO_PROXY"] = node.env["no_proxy"] = "example.org"
        node.write(QUICK + shard(LLAMACPP) + shard(VLLM, "b", more='port = "unix"'))
        node.start()
        pid = node.wait_state("a", "ready")["pid"]
        node.wait_state("b", "ready")
        assert node.cli("status").returncode == 0
        with pytest.raises(BlockingIOError):
            trap.accept()
        environ = psutil.Process(pid).environ()
        assert environ["HTTP_PROXY"] == f"http://{proxy}"
        assert "127.0.0.1" in environ["NO_PROXY"] and "example.org" in environ["NO_PROXY"]


# -- F13: what the engine binds is what is asked


@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0", "::", "::1"])
def test_the_address_that_the_engine_binds_is_asked(node: Node, host: str) -> None:
    key = 'api_key = { env = "MY_KEY" }' if host in ("0.0.0.0", "::") else ""
    node.env["MY_KEY"] = KEY
    node.write(QUICK + shard(LLAMACPP, more=f'host = "{host}"\n{key}'))
    node.start()
    assert host in node.wait_state("a", "ready")["endpoint"]


# -- the third question: does it make steps?


@pytest.mark.proof
def test_a_stalled_engine_is_told_and_restarted_where_that_is_wished(node: Node) -> None:
    node.write(
        QUICK
        + shard(LLAMACPP, "told", knobs="--fake-stall-after 3")
        + shard(LLAMACPP, "ended", knobs="--fake-stall-after 3", more='stall_timeout = "31s"')
    )
    node.start()
    clients = []
    pids = {}
    for name in ("told", "ended"):
        pids[name] = node.wait_state(name, "ready")["pid"]
        host, _, port = node.shard(name)["endpoint"].rpartition(":")
        client = http.client.HTTPConnection(host, int(port), timeout=120)
        client.request("POST", "/v1/completions", json.dumps({"model": name, "prompt": "x", "stream": True}))
        clients.append(client)
    node.until(lambda: "stalled" in node.conditions("told"), "the stall is told", timeout=60)
    node.until(lambda: node.shard("ended")["generation"] == 2, "the other is restarted", timeout=60)
    assert node.shard("told")["pid"] == pids["told"]
    assert "running" in node.conditions("told")["stalled"]
    for client in clients:
        client.close()
