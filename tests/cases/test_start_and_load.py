"""The reported failures before the launch, at the start and while loading, as behaviour of a whole llmgw."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from tests.fake_gpus import STRANGER, FakeGpus
from tests.node import Node, fake, free_port, is_alive

QUICK = '[defaults]\nrestart_delay = "200ms"\nrestart_delay_max = "300ms"\nprobe_interval = "200ms"\n'


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def vllm(name: str = "a", *, knobs: str = "", more: str = "", gpus: str = "0") -> str:
    command = fake("vllm", "serve", *knobs.split())
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\ngpus = {gpus}\ncommand = {command}\n{more}\n'


def llamacpp(name: str = "a", *, knobs: str = "", more: str = "") -> str:
    command = fake("llamacpp", *knobs.split())
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\nengine = "llamacpp"\ncommand = {command}\n{more}\n'


def cause(shard: dict[str, object]) -> str:
    """The reason with its proof, as one text; empty when there is none."""
    reason = shard["reason"]
    return f"{reason['cause']} {' '.join(reason['evidence'])}" if isinstance(reason, dict) else ""


# -- F04: GPU memory that comes back late, never, or is another's


def test_gpu_memory_that_comes_back_late_is_waited_for_before_the_next_launch(node: Node) -> None:
    gpus = FakeGpus(node)
    node.write(QUICK + vllm(gpus="[0]", knobs="--fake-gpu-release 2", more='gpu_release_timeout = "30s"'))
    node.start()
    first = node.wait_state("a", "ready")
    assert gpus.used(0) == 70000
    os.kill(first["pid"], signal.SIGKILL)
    node.until(lambda: node.shard("a")["pid"] not in (None, first["pid"]), "it is launched again")
    # It was launched once, when the memory was back, and not into the memory of the first.
    assert node.wait_state("a", "ready")["generation"] == 2
    assert node.conditions("a") == {}


def test_a_gpu_that_stays_held_keeps_the_next_launch_waiting_and_says_by_whom(node: Node) -> None:
    gpus = FakeGpus(node)
    node.write(QUICK + vllm(gpus="[0]", more='gpu_release_timeout = "1s"'))
    node.start()
    first = node.wait_state("a", "ready")
    stranger = gpus.hold(0, 41000)
    os.kill(first["pid"], signal.SIGKILL)
    held = f"41000 MiB used by pid {STRANGER} (not ours, not visible)"
    node.until(lambda: held in cause(node.shard("a")), "the launch is refused with the holder", timeout=40)
    shard = node.shard("a")
    assert node.conditions("a")["gpu-held"] == f"GPU 0: {held}"
    # One failure, the kill; what is held back is none, and nothing was launched for it.
    assert (shard["failures"], shard["generation"], shard["reason"]["code"]) == (1, 1, "gpu-held")
    stranger.unlink()
    again = node.wait_state("a", "ready")
    assert again["generation"] == 2
    assert "gpu-held" not in node.conditions("a")


def test_a_stopped_shard_does_not_tell_for_ever_of_memory_that_is_back(node: Node) -> None:
    FakeGpus(node)
    node.write(vllm(gpus="[1]", knobs="--fake-gpu-release 4", more='gpu_release_timeout = "1s"'))
    node.start()
    node.wait_state("a", "ready")
    stopped = node.cli("stop", "a", "--wait")
    assert "GPU 1: 70000 MiB used" in stopped.stdout
    assert node.state_of("a") == "stopped"
    node.until(lambda: "gpu-held" not in node.conditions("a"), "the condition goes when the memory is back")
    assert node.state_of("a") == "stopped"


def test_a_held_gpu_can_be_allowed(node: Node) -> None:
    gpus = FakeGpus(node)
    node.write(QUICK + vllm(gpus="[0]", more='gpu_release_timeout = "1s"\nallow = ["gpu-held"]'))
    node.start()
    first = node.wait_state("a", "ready")
    gpus.hold(0, 9000)
    os.kill(first["pid"], signal.SIGKILL)
    node.until(lambda: node.shard("a")["generation"] == 2, "it is launched all the same")
    node.wait_state("a", "ready")


def test_a_survey_that_fails_after_the_end_is_not_taken_for_free_memory(node: Node) -> None:
    gpus = FakeGpus(node)
    node.write(QUICK + vllm(gpus="[0]", more='gpu_release_timeout = "1s"'))
    node.start()
    first = node.wait_state("a", "ready")
    gpus.describe(behaviour={"fail": "unknown_error"})
    os.kill(first["pid"], signal.SIGKILL)
    node.until(lambda: "gpu-held" in node.conditions("a"), "it is not confirmed free")
    assert "not confirmed free" in node.conditions("a")["gpu-held"]
    assert "Unknown Error" in node.conditions("a")["gpu-held"]
    gpus.describe()
    assert node.wait_state("a", "ready")["generation"] == 2


def test_a_stranger_on_a_gpu_at_the_first_start_is_named_before_anything_is_launched(node: Node) -> None:
    gpus = FakeGpus(node)
    gpus.hold(0, 41000, os.getpid())
    node.write('[defaults]\nrestart = "no"\n' + vllm(gpus="[0]"))
    node.start()
    refused = node.wait_state("a", "failed")
    assert (refused["failures"], refused["generation"]) == (0, 0)
    assert f"held by pid {os.getpid()}" in cause(refused)


def test_an_engine_that_is_let_onto_a_held_gpu_says_itself_that_memory_ran_out(node: Node) -> None:
    gpus = FakeGpus(node)
    gpus.hold(0, 41000, os.getpid())
    node.write('[defaults]\nrestart = "no"\n' + vllm(gpus="[0]", more='allow = ["gpu-held"]'))
    node.start()
    failed = node.wait_state("a", "failed")
    assert failed["failures"] == 1
    assert "memory" in cause(failed)
    assert is_alive(os.getpid())


# -- F01: a slow load is not a failed load


def test_a_load_that_moves_outlives_the_load_limit_many_times(node: Node) -> None:
    node.write(
        QUICK + vllm(knobs="--fake-load-seconds 7 --fake-progress lines", more='load_timeout = "2s"\nrestart = "no"')
    )
    node.start()
    shard = node.wait_state("a", "ready", "failed")
    assert (shard["state"], shard["generation"]) == ("ready", 1), cause(shard)
    assert shard["load_seconds"] > 5


def test_a_load_that_says_nothing_ends_at_its_limit_and_can_be_started_again(node: Node) -> None:
    silent = "--fake-never-ready --fake-progress silent --fake-burst-lines 0"
    node.write(QUICK + vllm(knobs=silent, more='load_timeout = "2s"\nrestart = "no"'))
    node.start()
    loading = node.wait_state("a", "loading")
    node.until(lambda: node.shard("a")["detail"] == "not listening yet", "status says what is waited for")

    def shows_what_the_engine_said_last() -> bool:
        last = node.shard("a")["log"]["last"]
        return bool(last) and last in node.cli("status").stdout

    node.until(shows_what_the_engine_said_last, "status shows the last line")
    failed = node.wait_state("a", "failed")
    assert failed["reason"]["code"] == "load-timeout"
    assert "no progress of the load in 2 s" in failed["reason"]["cause"]
    assert failed["reason"]["evidence"], "the last line is the proof"
    assert not is_alive(loading["pid"])
    assert node.engine_processes() == []
    assert node.cli("start", "a", "--no-wait").returncode == 0
    assert node.wait_state("a", "loading")["generation"] == 2


@pytest.mark.proof
def test_a_load_that_moves_for_ever_ends_at_the_hard_limit(node: Node) -> None:
    more = 'load_timeout = "2s"\nload_timeout_max = "5s"\nrestart = "no"'
    node.write(QUICK + vllm(knobs="--fake-never-ready --fake-progress lines", more=more))
    node.start()
    failed = node.wait_state("a", "failed")
    assert failed["reason"]["code"] == "load-timeout-max"
    assert node.engine_processes() == []


def test_a_start_without_any_sign_of_loading_ends_at_its_own_limit(node: Node) -> None:
    node.write(
        f'[[shard]]\nname = "a"\nmodel = "a"\nengine = "command"\ncommand = {fake("plain")}\n'
        'start_timeout = "2s"\nrestart = "no"\n'
    )
    node.start()
    failed = node.wait_state("a", "failed")
    assert failed["reason"]["code"] == "start-timeout"
    assert node.engine_processes() == []


# -- F02: crash loops


def test_an_engine_that_always_exits_is_tried_so_often_and_no_more(node: Node) -> None:
    node.write(QUICK + "restart_limit = 3\n" + vllm(knobs="--fake-fail exit-7 --fake-fail-after 0.2"))
    node.start()
    node.until(lambda: node.shard("a")["next_attempt"] is not None, "the next attempt has a time")
    waiting = node.shard("a")
    if waiting["next_attempt"] is not None:
        assert waiting["attempt_limit"] == 3
        assert "backoff" in {condition["kind"] for condition in waiting["conditions"]}
    node.until(lambda: "3 times in a row" in node.shard("a")["detail"], "it is given up", timeout=60)
    shard = node.shard("a")
    assert (shard["state"], shard["failures"], shard["generation"], shard["next_attempt"]) == ("failed", 3, 3, None)
    assert "7" in shard["reason"]["cause"]
    assert "not tried again" in node.cli("status").stdout
    assert node.cli("start", "a", "--no-wait").returncode == 0
    node.until(lambda: node.shard("a")["generation"] > 3, "a wish starts it anew")


def test_an_engine_that_dies_after_every_ready_is_shown_as_flapping_and_ends(node: Node) -> None:
    more = 'restart_limit = 3\nrestart_stable = "10m"'
    node.write(QUICK + llamacpp(knobs="--fake-exit-after 0.5 --fake-exit-code 3", more=more))
    node.start()
    node.until(lambda: node.shard("a")["restarts"] == 2, "its restarts are counted")
    node.until(lambda: "3 times in a row" in node.shard("a")["detail"], "it is given up", timeout=60)
    events = [event for event in node.events() if event["shard"] == "a"]
    assert sum(event.get("after") == "ready" for event in events) == 3
    assert node.shard("a")["failures"] == 3


def test_an_engine_that_works_at_the_third_attempt_becomes_ready_and_its_failures_are_forgotten(node: Node) -> None:
    knobs = f"--fake-succeed-on-attempt 3 --fake-attempts-file {node.folder}/attempts"
    node.write(QUICK + vllm(knobs=knobs, more='restart_stable = "3s"'))
    node.start()
    shard = node.wait_state("a", "ready", timeout=60)
    assert (shard["generation"], shard["restarts"]) == (3, 2)
    node.until(lambda: node.shard("a")["failures"] == 0, "what is long past is forgotten")


@pytest.mark.parametrize("profile", ["vllm serve", "sglang serve", "llamacpp"])
def test_wrong_arguments_are_tried_once(node: Node, profile: str) -> None:
    engine = profile.split()[0]
    node.write(
        f'{QUICK}[[shard]]\nname = "a"\nmodel = "a"\nengine = "{engine}"\ngpus = 0\n'
        f'command = {fake(*profile.split())}\nextra_args = ["--no-such-thing"]\n'
    )
    node.start()
    node.until(lambda: "not restart" in node.shard("a")["detail"], "it is given up")
    shard = node.shard("a")
    assert (shard["state"], shard["generation"], shard["failures"]) == ("failed", 1, 1)
    assert "no-such-thing" in cause(shard)


# -- F03: the port is another's


class Impostor:
    """A server that says yes to both questions, in this very process. It can take a port that is bound, not heard."""

    def __init__(self, port: int, model: str) -> None:
        body = json.dumps({"object": "list", "data": [{"id": model}]}).encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def test_who_takes_the_port_after_the_launch_is_named_and_never_taken_for_the_engine(node: Node) -> None:
    port = free_port()
    node.write(QUICK + vllm(knobs="--fake-load-seconds 5", more=f"port = {port}"))
    node.start()
    node.wait_state("a", "starting", "loading")
    impostor = Impostor(port, "a")
    try:
        told = f"another process answers on its port: pid {os.getpid()}"
        node.until(lambda: node.shard("a")["detail"].startswith(told), "it says who answers")
        assert told in node.cli("status").stdout
        failed = node.wait_state("a", "failed")
        assert f"pid {os.getpid()}" in cause(failed)
        assert str(port) in cause(failed)
        assert node.state_of("a") != "ready"
    finally:
        impostor.close()
    assert node.wait_state("a", "ready")["generation"] >= 2


@pytest.mark.proof
def test_two_llmgw_whose_shards_choose_one_port_while_loading_both_become_ready(node: Node) -> None:
    with Node() as other:
        other.ports = node.ports
        for one in (node, other):
            one.write(QUICK + vllm(knobs="--fake-load-seconds 4"))
        node.start()
        other.start()
        first, second = node.wait_state("a", "ready", timeout=60), other.wait_state("a", "ready", timeout=60)
        assert first["endpoint"] != second["endpoint"]
        assert first["generation"] + second["generation"] <= 3


def test_a_chosen_port_is_kept_over_restarts(node: Node) -> None:
    node.write(QUICK + llamacpp("a") + llamacpp("b"))
    node.start()
    before = {name: node.wait_state(name, "ready") for name in ("a", "b")}
    for shard in before.values():
        os.kill(shard["pid"], signal.SIGKILL)
    for name, shard in before.items():
        node.until(lambda name=name: node.shard(name)["generation"] == 2, "it is launched again")
        assert node.wait_state(name, "ready")["endpoint"] == shard["endpoint"]


def test_each_sglang_shard_has_a_rendezvous_port_of_its_own(node: Node) -> None:
    command = fake("sglang", "serve")
    node.write(
        "".join(
            f'[[shard]]\nname = "{name}"\nmodel = "{name}"\nengine = "sglang"\ngpus = 0\ncommand = {command}\n'
            for name in ("a", "b", "c")
        )
    )
    node.start()
    ports = set()
    for name in ("a", "b", "c"):
        argv = psutil.Process(node.wait_state(name, "ready")["pid"]).cmdline()
        ports.add(argv[argv.index("--nccl-port") + 1])
    assert len(ports) == 3


# -- F05, F06, F07: what can be known before the launch


def check(node: Node, text: str) -> tuple[int, str]:
    node.write(text)
    result = node.cli("check")
    return result.returncode, result.stdout + result.stderr


def test_fp8_is_refused_on_old_cards_and_an_fp8_cache_is_not(node: Node) -> None:
    gpus = FakeGpus(node, gpus=[{"name": "NVIDIA A100-SXM4-80GB", "compute_cap": "8.0"}])
    fp8 = vllm(gpus="[0]", more='quantization = "fp8"')
    code, text = check(node, fp8)
    assert code == 78 and "fp8 needs compute capability 8.9" in text and 'allow = ["fp8-capability"]' in text
    assert check(node, fp8 + 'allow = ["fp8-capability"]\n')[0] == 0
    gpus.describe(gpus=[{"name": "NVIDIA RTX A6000", "compute_cap": "8.6"}])
    code, text = check(node, vllm(gpus="[0]", more='args = { kv-cache-dtype = "fp8_e5m2" }'))
    assert code == 0 and "fp8" not in text
    gpus.describe(gpus=[{"name": "NVIDIA GB10", "compute_cap": "12.1"}])
    assert check(node, fp8)[0] == 0
    gpus.describe(gpus=[{"name": "NVIDIA X9000", "compute_cap": "[N/A]"}])
    code, text = check(node, fp8)
    assert code == 0 and "not known" in text


def test_a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do(node: Node) -> None:
    FakeGpus(node, gpus=4)
    folder = node.folder / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(100))
    (folder / "tokenizer.json").write_text("{}")
    shard = vllm(gpus="[0, 1, 2]", more=f'weights = "{folder}"')
    for config in (
        {"num_attention_heads": 40, "num_key_value_heads": 8},
        {"text_config": {"num_attention_heads": 40, "num_key_value_heads": 8}},
    ):
        (folder / "config.json").write_text(json.dumps(config))
        code, text = check(node, shard)
        # 5 divides the 40 heads, but not the 8 for keys and values.
        assert code == 78 and "1, 2, 4, 8" in text and "pipeline_parallel" in text
    (folder / "config.json").write_text("[" * 5000)
    code, text = check(node, shard)
    assert code == 78 and "config.json cannot be read" in text and "heads" not in text


def test_different_cards_are_no_tensor_parallel_group_but_two_shards(node: Node) -> None:
    gpus = FakeGpus(node)
    big, small = (
        {"name": "NVIDIA A100-SXM4-80GB", "memory.total": "81920"},
        {
            "name": "NVIDIA A100-SXM4-40GB",
            "memory.total": "40960",
        },
    )
    one_group = vllm(gpus="[0, 1]")
    for pair in (
        [big, {**big, "memory.total": "40960"}],
        [{"name": "NVIDIA GeForce RTX 3090", "memory.total": "24576"}, {"name": "NVIDIA L4", "memory.total": "24576"}],
        [big, small],
    ):
        gpus.describe(gpus=pair)
        code, text = check(node, one_group)
        assert code == 78 and "one class" in text
        assert check(node, vllm("a", gpus="[0]") + vllm("b", gpus="[1]"))[0] == 0
    gpus.describe(gpus=[big, {**big, "memory.total": "[Unknown Error]", "memory.free": "[Unknown Error]"}])
    code, text = check(node, one_group)
    assert code == 0 and "warning" in text
