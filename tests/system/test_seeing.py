"""What a real `llmgw run` tells of its work: one page of metrics at two doors, the access log, `llmgw top`."""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_llmgw import Llmgw

pytestmark = pytest.mark.slow

ENGINE = [sys.executable, "-m", "llmgw.fake.engine", "vllm", "serve"]
TENANT_KEY, OPERATOR_KEY = "sk-the-tenants-own", "sk-the-operators-own"
PROMPT = "the words of a secret prompt"


def sha256(key: str) -> str:
    return f'{{ sha256 = "{hashlib.sha256(key.encode()).hexdigest()}" }}'


class Seen:
    """llmgw with a gateway, and how to look at it."""

    def __init__(self) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        self.llmgw = Llmgw("")
        self.write()

    def write(self, gateway: str = "", shards: str = "", more: str = "") -> None:
        self.llmgw.write(
            f'{shards}\n[[shard]]\nname = "a"\nmodel = "m"\nengine = "vllm"\ngpus = 0\n{more}\n'
            f'command = {json.dumps(ENGINE)}\nprobe_interval = "100ms"\n'
            f'[gateway]\nlisten = "127.0.0.1:{self.port}"\nengine_metrics = true\naccess_log = "on"\n{gateway}\n'
            f"operator_keys = [{sha256(OPERATOR_KEY)}]\n"
            f'[[gateway.tenant]]\nname = "search"\nkeys = [{sha256(TENANT_KEY)}]\n'
        )

    def ask(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        # The next answer on this connection comes after the last one was counted.
        connection.request("GET", "/health")
        connection.getresponse().read()
        connection.close()
        return answer.status, text

    def chat(self, model: str = "m", **more: Any) -> int:
        body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, **more}
        return self.ask("POST", "/v1/chat/completions", body, key=TENANT_KEY)[0]

    def page(self) -> str:
        code, text = self.ask("GET", "/metrics")
        assert code == 200
        return text

    def page_of_control(self) -> str:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(self.llmgw.socket)
            sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            data = b""
            while more := sock.recv(65536):
                data += more
        return data.partition(b"\r\n\r\n")[2].decode()


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if value)
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


@pytest.fixture
def seen() -> Iterator[Seen]:
    it = Seen()
    it.llmgw.start()
    it.llmgw.until_state("a", "ready")
    yield it
    it.llmgw.close()


def test_gateway_and_control_socket_serve_one_page(seen: Seen) -> None:
    assert seen.chat() == 200
    assert seen.chat(stream=True, stream_options={"include_usage": True}) == 200
    assert seen.chat("no-such-model") == 404
    gateway, control = seen.page(), seen.page_of_control()
    found = samples(gateway)
    at = "model=m,tenant=search"
    assert found[f"llmgw_requests_total{{band=normal,code=200,{at}}}"] == 2
    assert found["llmgw_requests_total{band=normal,code=404,tenant=search}"] == 1
    assert found[f"llmgw_tokens_total{{direction=completion,{at}}}"] == 8
    assert found["llmgw_time_to_first_token_seconds_count{band=normal,model=m}"] == 1
    assert found["llmgw_inter_chunk_seconds_count{band=normal,model=m}"] >= 3
    assert found["llmgw_shard_state{engine=vllm,model=m,shard=a,state=ready}"] == 1
    assert found["llmgw_endpoint_slots{model=m,shard=a}"] >= 1
    # The engine's own series, asked for with the key that was made for it.
    assert found["llmgw_engine_metrics_up{shard=a}"] == 1
    assert [name for name in found if name.startswith("vllm:") and "shard=a" in name]
    names = {name.partition("{")[0] for name in found}
    assert names == {name.partition("{")[0] for name in samples(control)}
    for secret in (TENANT_KEY, OPERATOR_KEY, PROMPT):
        assert secret not in gateway + control + seen.llmgw.log()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
def test_promtool_complains_of_nothing_but_the_engines_names(seen: Seen) -> None:
    assert seen.chat() == 200
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=seen.page(), capture_output=True, text=True, check=False, timeout=60
    )
    assert "error while linting" not in done.stdout + done.stderr
    assert [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("vllm:")] == []


def test_the_access_log_is_json_with_what_happened(seen: Seen) -> None:
    assert seen.chat() == 200
    assert seen.ask("POST", "/v1/chat/completions", {"model": "m"}, key="sk-wrong")[0] == 401

    def lines() -> list[dict[str, Any]]:
        told = [json.loads(line) for line in seen.llmgw.log().splitlines() if line.startswith("{")]
        return [line for line in told if line.get("path") != "/health"]

    good, refused = seen.llmgw.until(lambda: len(lines()) == 2 and lines(), "two lines of the access log")
    assert (good["code"], good["model"], good["tenant"], good["shard"]) == (200, "m", "search", "a")
    assert good["prompt_tokens"] > 0 and good["duration_seconds"] > 0
    assert (refused["code"], refused["reason"]) == (401, "wrong-key")
    assert "sk-wrong" not in seen.llmgw.log()


def test_a_reload_that_is_refused_and_a_restart_are_seen(seen: Seen) -> None:
    assert samples(seen.page())["llmgw_config_in_force{}"] == 1
    assert seen.llmgw.run("restart", "a", "--wait").returncode == 0
    good = seen.llmgw.file.read_text()
    seen.llmgw.file.write_text(good + "nonsense = 1\n")
    assert seen.llmgw.run("reload").returncode == 78
    found = samples(seen.page_of_control())
    assert found["llmgw_config_in_force{}"] == 0
    assert found["llmgw_shard_restarts_total{reason=wished,shard=a}"] == 1


def test_counters_go_on_while_a_reload_takes_the_gateway_away_and_brings_it_back(seen: Seen) -> None:
    assert seen.chat() == 200
    good = seen.llmgw.file.read_text()
    seen.llmgw.file.write_text(good.partition("[gateway]")[0])
    assert seen.llmgw.run("reload").returncode == 0
    seen.llmgw.until(lambda: "llmgw_requests_total" not in seen.page_of_control(), "a page without a gateway")
    assert "llmgw_shard_state" in seen.page_of_control()
    seen.llmgw.file.write_text(good)
    assert seen.llmgw.run("reload").returncode == 0
    name = "llmgw_requests_total{band=normal,code=200,model=m,tenant=search}"
    assert seen.llmgw.until(lambda: samples(seen.page_of_control()).get(name), "the gateway's families") == 1


def test_top_shows_the_gateway_of_a_running_llmgw(seen: Seen) -> None:
    assert seen.chat() == 200
    done = seen.llmgw.run("top", "--once", "--interval", "0.3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "gateway  0 running  0 waiting" in done.stdout
    assert "search" in done.stdout
    found = json.loads(seen.llmgw.run("top", "--once", "--json", "--interval", "0.3").stdout)
    assert found["gateway"]["tenants"][0]["name"] == "search"
