"""The gateway of a real `llmgw run` before real processes, asked by the real `openai` client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from running_llmgw import Llmgw, Shard, connect, session_members

pytestmark = pytest.mark.slow

ENGINE = [sys.executable, "-m", "llmgw.fake.engine", "llamacpp"]
HELLO = [{"role": "user", "content": "one two three"}]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Served:
    """llmgw with a gateway, and how to ask it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.llmgw = Llmgw("")
        self.weights = self.llmgw.folder / "m.gguf"
        self.weights.write_bytes(b"GGUF")

    def shard(self, name: str, model: str, *fake: str, more: str = "") -> str:
        return (
            f'[[shard]]\nname = "{name}"\nmodel = "{model}"\nengine = "llamacpp"\nweights = "{self.weights}"\n'
            f"command = {json.dumps([*ENGINE, *fake])}\nprobe_interval = '100ms'\ndrain_timeout = '5s'\n{more}\n"
        )

    def write(self, shards: str, gateway: str = "") -> None:
        self.llmgw.write(f'{shards}\n[gateway]\nlisten = "127.0.0.1:{self.port}"\n{gateway}\n')

    def start(self, shards: str, gateway: str = "") -> None:
        self.write(shards, gateway)
        self.llmgw.start()

    def client(self, key: str = "none", **more: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, timeout=60.0, **more)  # type: ignore[arg-type]

    def record(self) -> Path:
        """Of the only engine."""
        (record,) = (self.llmgw.folder / "state" / "shards").glob("**/*.json")
        return record

    def engine_key(self) -> str:
        return str(json.loads(self.record().read_text())["api_key"])

    def busy_slots(self, shard: Shard) -> int:
        """What the only engine itself says."""
        connection = connect(shard["endpoint"], 10.0)
        with contextlib.closing(connection):
            connection.request("GET", "/slots", headers={"authorization": f"Bearer {self.engine_key()}"})
            return sum(slot["is_processing"] for slot in json.loads(connection.getresponse().read()))

    def ask(self, model: str = "m", **more: object) -> str:
        with self.client(**more) as client:
            answer = client.chat.completions.create(model=model, messages=HELLO, max_tokens=3)  # type: ignore[arg-type]
        return answer.choices[0].message.content or ""


@pytest.fixture
def served() -> Iterator[Served]:
    it = Served()
    yield it
    it.llmgw.close()


def test_chat_streams_and_lists_through_the_openai_client(served: Served) -> None:
    served.start(served.shard("a", "m", more='aliases = ["gpt"]'))
    served.llmgw.until_state("a", "ready")
    with served.client() as client:
        answer = client.chat.completions.create(model="gpt", messages=HELLO, max_tokens=3)  # type: ignore[arg-type]
        assert answer.model == "m" and answer.usage is not None and answer.usage.completion_tokens == 3
        pieces = [
            piece.choices[0].delta.content
            for piece in client.chat.completions.create(model="m", messages=HELLO, max_tokens=5, stream=True)  # type: ignore[call-overload]
            if piece.choices
        ]
        assert len([piece for piece in pieces if piece]) == 5
        assert [model.id for model in client.models.list()] == ["m"]
        assert client.completions.create(model="m", prompt="x", max_tokens=2).choices[0].text


def test_an_unknown_model_is_not_found_at_the_first_try_and_near_names_are_told(served: Served) -> None:
    served.start(served.shard("a", "qwen3-8b"))
    served.llmgw.until_state("a", "ready")
    with served.client(max_retries=5) as client, pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="qwen3-8", messages=HELLO)  # type: ignore[arg-type]
    assert "qwen3-8b" in found.value.message
    assert found.value.response.headers["x-should-retry"] == "false"
    assert found.value.response.request.headers.get("x-stainless-retry-count") == "0"


def test_a_full_queue_is_a_429_that_the_client_obeys_and_gets_its_answer_later(served: Served) -> None:
    shard = served.shard("a", "m", "--fake-token-interval", "0.05", more="max_inflight = 1")
    served.start(shard, "queue_limit = 0")
    served.llmgw.until_state("a", "ready")
    with served.client(max_retries=0) as client:
        stream = client.chat.completions.create(model="m", messages=HELLO, max_tokens=40, stream=True)  # type: ignore[call-overload]
        next(stream)
        with pytest.raises(openai.RateLimitError) as found:
            client.chat.completions.create(model="m", messages=HELLO, max_tokens=1)  # type: ignore[arg-type]
        assert float(found.value.response.headers["retry-after"]) >= 1
        assert found.value.response.headers["x-llmgw-reason"] == "queue-full"
        patient = client.with_options(max_retries=5)
        assert patient.chat.completions.create(model="m", messages=HELLO, max_tokens=1).choices  # type: ignore[arg-type]
        stream.close()


def test_a_stream_that_its_client_gives_up_ends_in_the_engine_too(served: Served) -> None:
    served.start(served.shard("a", "m", "--fake-token-interval", "0.05"))
    ready = served.llmgw.until_state("a", "ready")
    with served.client() as client:
        stream = client.chat.completions.create(  # type: ignore[call-overload]
            model="m", messages=HELLO, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        served.llmgw.until(lambda: served.busy_slots(ready) == 1, "one request in the engine")
        stream.close()
        served.llmgw.until(lambda: served.busy_slots(ready) == 0, "no request in the engine")


def test_a_request_for_a_model_that_loads_waits_and_is_answered(served: Served) -> None:
    served.start(served.shard("a", "m", "--fake-load-seconds", "2"))
    assert served.ask()
    assert served.llmgw.shard("a")["state"] == "ready"


def test_who_waits_for_a_load_that_fails_for_good_is_told_why(served: Served) -> None:
    served.start(served.shard("a", "m", "--fake-fail", "llama-load", more='restart = "no"'))
    with served.client(max_retries=3) as client, pytest.raises(openai.InternalServerError) as found:
        client.chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]
    assert found.value.status_code == 503
    reason = served.llmgw.until_state("a", "failed")["reason"]
    assert reason["cause"] in found.value.message


def test_tenants_have_keys_of_their_own_and_the_engine_one_that_nobody_sees(served: Served) -> None:
    tenant = '[[gateway.tenant]]\nname = "t"\nkeys = [{ env = "TENANT_KEY" }]\n'
    served.llmgw._env["TENANT_KEY"] = "sk-tenant-0123456789"
    served.start(served.shard("a", "m"), tenant)
    ready = served.llmgw.until_state("a", "ready")
    assert served.ask(key="sk-tenant-0123456789")
    with pytest.raises(openai.AuthenticationError):
        served.ask(key="sk-other")
    key = served.engine_key()
    assert key and served.record().stat().st_mode & 0o777 == 0o600
    seen = Path(f"/proc/{ready['pid']}/cmdline").read_text() + json.dumps(served.llmgw.ask("GET", "/v1/status"))
    assert key not in seen + served.llmgw.log()
    # Past the gateway nobody gets in without that key.
    direct = openai.OpenAI(base_url=f"http://{ready['endpoint']}/v1", api_key="x")
    with direct, pytest.raises(openai.AuthenticationError):
        direct.chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]


def test_after_a_crash_of_llmgw_the_engine_is_served_again_with_the_key_it_was_started_with(served: Served) -> None:
    served.start(served.shard("a", "m"))
    before = served.llmgw.until_state("a", "ready")
    assert served.ask()
    served.llmgw.kill()
    assert session_members(before["pid"])
    served.llmgw.start()
    after = served.llmgw.until_state("a", "ready")
    assert (after["pid"], after["adopted"]) == (before["pid"], True)
    assert served.ask()


class Traffic:
    """Clients that ask one request after the other until told to end; every answer that is not one is kept."""

    def __init__(self, served: Served, clients: int = 4) -> None:
        self._served = served
        self._stop = threading.Event()
        self.answered = 0
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        with self._served.client(max_retries=0) as client:
            while not self._stop.is_set():
                try:
                    answer = client.chat.completions.create(model="m", messages=HELLO, max_tokens=2)  # type: ignore[arg-type]
                    if answer.model != "m":
                        self.wrong.append(f"answered by {answer.model}")
                    self.answered += 1
                except openai.APIError as error:
                    self.wrong.append(f"{error!r} from {error.__cause__!r}")

    def wait_more(self, count: int) -> None:
        wanted = self.answered + count
        deadline = time.monotonic() + 60
        while self.answered < wanted:
            assert time.monotonic() < deadline, self.wrong[-3:]
            time.sleep(0.01)

    def end(self) -> list[str]:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        return self.wrong


def test_reloads_under_traffic_drop_no_request(served: Served) -> None:
    shard = served.shard("a", "m")
    served.start(shard)
    served.llmgw.until_state("a", "ready")
    traffic = Traffic(served)
    try:
        for number in range(5):
            traffic.wait_more(20)
            served.write(shard + f'aliases = ["alias-{number}"]\n')
            assert served.llmgw.run("reload").returncode == 0
            assert served.ask(f"alias-{number}")
        traffic.wait_more(20)
    finally:
        wrong = traffic.end()
    assert wrong == []


def test_an_upgrade_under_traffic_refuses_no_connection_and_breaks_no_answer(served: Served) -> None:
    served.start(served.shard("a", "m"))
    served.llmgw.until_state("a", "ready")
    traffic = Traffic(served)
    try:
        traffic.wait_more(20)
        assert served.llmgw.run("upgrade").returncode == 0
        traffic.wait_more(20)
    finally:
        wrong = traffic.end()
    # A request that meets the old one on its way out is told so in words; none meets a closed door or half an answer.
    assert [error for error in wrong if "InternalServerError" not in error or "503" not in error] == []


def test_a_restart_of_an_engine_under_traffic_is_waited_for_by_requests(served: Served) -> None:
    served.start(served.shard("a", "m") + served.shard("b", "m"))
    served.llmgw.until_state("a", "ready")
    served.llmgw.until_state("b", "ready")
    traffic = Traffic(served)
    try:
        for name in ("a", "b"):
            traffic.wait_more(20)
            assert served.llmgw.run("restart", name).returncode == 0
        traffic.wait_more(20)
    finally:
        wrong = traffic.end()
    assert wrong == []


def test_a_killed_engine_costs_what_it_was_answering_and_nothing_after_that(served: Served) -> None:
    served.start(served.shard("a", "m") + served.shard("b", "m"))
    victim = served.llmgw.until_state("a", "ready")["pid"]
    served.llmgw.until_state("b", "ready")
    traffic = Traffic(served)
    try:
        traffic.wait_more(20)
        os.kill(victim, signal.SIGKILL)
        traffic.wait_more(100)
    finally:
        wrong = traffic.end()
    assert len(wrong) <= 4, "more than one request of each client was lost"


def test_an_address_that_is_taken_ends_the_start_and_refuses_a_reload_in_words(served: Served) -> None:
    served.start(served.shard("a", "m"))
    served.llmgw.until_state("a", "ready")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        good, served.port = served.port, taken.getsockname()[1]
        served.write(served.shard("a", "m"))
        done = served.llmgw.run("reload")
        assert done.returncode != 0
        assert f"cannot listen on 127.0.0.1:{served.port}" in done.stdout + done.stderr
        served.port = good
        assert served.ask()
