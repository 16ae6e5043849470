"""The reported failures before the launch, at the start and while loading, as behaviour of a whole llmgw."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

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
    held = f"GPU 0: 41000 MiB used by pid {STRANGER} (not ours, not visible)"
    node.until(lambda: held in cause(node.shard("a")), "the launch is refused with the holder", timeout=40)
    shard = node.shard("a")
    assert node.conditions("a")["gpu-held"] == held
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


def test_a_stranger_on_a_gpu_at_the_first_start_is_named_when_the_engine_runs_out_of_memory(node: Node) -> None:
    gpus = FakeGpus(node)
    gpus.hold(0, 41000, os.getpid())
    node.write('[defaults]\nrestart = "no"\n' + vllm(gpus="[0]"))
    node.start()
    failed = node.wait_state("a", "failed")
    assert failed["failures"] == 1
    assert "memory" in cause(failed)
    assert is_alive(os.getpid())
