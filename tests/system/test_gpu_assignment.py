"""GPUs that llmgw chooses, holds back and gives out again, as behaviour of a whole llmgw whose engines hold pretended
memory."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from llmgw.fake.gpu import current_holders
from tests.fake_gpus import STRANGER, FakeGpus
from tests.node import Node, fake, is_alive

QUICK = (
    '[node]\ninventory_interval = "1s"\n'
    '[defaults]\nrestart_delay = "200ms"\nrestart_delay_max = "300ms"\nprobe_interval = "200ms"\n'
)


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def vllm(name: str, gpus: str = "1", *, knobs: str = "", more: str = "") -> str:
    command = fake("vllm", "serve", *knobs.split())
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\ngpus = {gpus}\ncommand = {command}\n{more}\n'


def cards(node: Node, *names: str) -> dict[str, list[str]]:
    return {name: node.shard(name)["gpus"] for name in names}


def all_different(taken: dict[str, list[str]]) -> bool:
    flat = [card for found in taken.values() for card in found]
    return len(set(flat)) == len(flat)


def test_shards_that_start_together_get_cards_of_their_own(node: Node) -> None:
    FakeGpus(node, gpus=8)
    names = ["one", "two", "three", "four", "pair", "other"]
    node.write(QUICK + "".join(vllm(name) for name in names[:4]) + vllm("pair", "2") + vllm("other", "2"))
    node.start()
    for name in names:
        node.wait_state(name, "ready")
    taken = cards(node, *names)
    assert all_different(taken), taken
    assert [len(taken[name]) for name in names] == [1, 1, 1, 1, 2, 2]


def test_a_restart_gets_the_same_cards_and_moves_nobody(node: Node) -> None:
    FakeGpus(node, gpus=4)
    node.write(QUICK + vllm("a") + vllm("b") + vllm("c"))
    node.start()
    for name in ("a", "b", "c"):
        node.wait_state(name, "ready")
    before = cards(node, "a", "b", "c")
    os.kill(node.shard("b")["pid"], signal.SIGKILL)
    node.until(lambda: node.shard("b")["generation"] == 2 and node.state_of("b") == "ready", "b is launched again")
    assert cards(node, "a", "b", "c") == before


def test_a_reload_that_adds_removes_and_reorders_moves_nothing_that_runs(node: Node) -> None:
    FakeGpus(node, gpus=4)
    node.write(QUICK + vllm("a") + vllm("b") + vllm("c"))
    node.start()
    pids = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b", "c")}
    before = cards(node, "a", "c")
    node.write(QUICK + vllm("c") + vllm("new") + vllm("a"))
    assert node.cli("reload").returncode == 0
    node.wait_state("new", "ready")
    assert cards(node, "a", "c") == before
    assert (node.shard("a")["pid"], node.shard("c")["pid"]) == (pids["a"], pids["c"])
    assert all_different(cards(node, "a", "c", "new"))


def test_a_card_that_a_stranger_holds_is_avoided_and_named_where_nothing_else_is_left(node: Node) -> None:
    gpus = FakeGpus(node, gpus=2)
    held = gpus.hold(0, 41000)
    node.write(QUICK + vllm("a") + vllm("b"))
    node.start()
    node.until(
        lambda: sorted(node.state_of(name) for name in ("a", "b")) == ["pending", "ready"], "one runs, one waits"
    )
    running, waiting = ("a", "b") if node.state_of("a") == "ready" else ("b", "a")
    assert cards(node, running) == {running: ["1"]}
    why = node.conditions(waiting)["unplaced"]
    assert f"1 held by pid {STRANGER}" in why and f"1 used by {running}" in why
    assert node.shard(waiting)["failures"] == 0
    assert node.cli("status").returncode == 3
    held.unlink()
    node.wait_state(waiting, "ready")
    assert cards(node, "a", "b")[waiting] == ["0"]


def test_memory_that_comes_back_late_keeps_the_card_until_it_is_back(node: Node) -> None:
    gpus = FakeGpus(node, gpus=1)
    node.write(QUICK + vllm("a", knobs="--fake-gpu-release 2", more='gpu_release_timeout = "30s"') + vllm("b"))
    node.start()
    node.until(lambda: "ready" in (node.state_of("a"), node.state_of("b")), "one runs")
    if node.state_of("b") == "ready":
        node.cli("stop", "b", "--wait")
        node.wait_state("a", "ready")
        node.cli("start", "b", "--no-wait")
    node.until(lambda: "unplaced" in node.conditions("b"), "b waits")
    assert node.cli("stop", "a", "--wait").returncode == 0
    node.wait_state("b", "ready")
    assert gpus.used(0) <= 81559
    assert "failed" not in [event.get("after") for event in node.events() if event.get("shard") == "b"]


def test_memory_that_never_comes_back_is_in_quarantine_and_another_card_is_taken(node: Node) -> None:
    FakeGpus(node, gpus=2)
    node.write(QUICK + vllm("a", knobs="--fake-gpu-release never", more='gpu_release_timeout = "1s"'))
    node.start()
    first = node.wait_state("a", "ready")
    (card,) = first["gpus"]
    os.kill(first["pid"], signal.SIGKILL)
    node.until(lambda: node.shard("a")["generation"] == 2 and node.state_of("a") == "ready", "a runs elsewhere")
    assert node.shard("a")["gpus"] != [card]
    warned = " ".join(node.status()["warnings"])
    assert f"GPU {card} is in quarantine" in warned and f"llmgw gpu release {card}" in warned
    inventory = node.cli("inventory").stdout
    assert "not released after a ended" in inventory
    # It outlives llmgw itself, however that ends.
    node.kill()
    node.start()
    node.until(lambda: any("in quarantine" in text for text in node.status()["warnings"]), "it is remembered")
    released = node.cli("gpu", "release", card)
    assert released.returncode == 0 and f"GPU {card}: released" in released.stdout
    assert not any("in quarantine" in text for text in node.status()["warnings"])
    assert any("released by hand" in event["text"] for event in node.events())


def test_a_card_that_goes_bad_is_told_and_its_engine_left_alone(node: Node) -> None:
    gpus = FakeGpus(node, gpus=2)
    node.write(QUICK + vllm("a"))
    node.start()
    first = node.wait_state("a", "ready")
    (card,) = first["gpus"]
    sick: list[dict[str, str]] = [{}, {}]
    sick[int(card)] = {"ecc.errors.uncorrected.volatile.total": "3"}
    gpus.describe(gpus=sick)
    node.until(lambda: "gpu-unhealthy" in node.conditions("a"), "the condition shows")
    assert node.conditions("a")["gpu-unhealthy"] == f"GPU {card}: uncorrected ECC"
    assert (node.state_of("a"), node.shard("a")["pid"]) == ("ready", first["pid"])
    os.kill(first["pid"], signal.SIGKILL)
    node.until(lambda: node.shard("a")["generation"] == 2 and node.state_of("a") == "ready", "a runs elsewhere")
    assert node.shard("a")["gpus"] != [card]
    gpus.describe(gpus=2)


def test_a_lost_card_is_told_on_the_shard_that_has_it(node: Node) -> None:
    gpus = FakeGpus(node, gpus=2)
    node.write(QUICK + vllm("a", "[1]"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    gpus.describe(gpus=2, behaviour={"lost": [1]})
    node.until(lambda: "gpu-unhealthy" in node.conditions("a"), "the condition shows")
    assert node.conditions("a")["gpu-unhealthy"] == "GPU 1: has dropped off"
    assert node.shard("a")["pid"] == pid
    gpus.describe(gpus=2)
    node.until(lambda: "gpu-unhealthy" not in node.conditions("a"), "it is over when the card is back")


def test_an_nvidia_smi_that_hangs_during_a_launch_holds_up_gpu_shards_alone(node: Node) -> None:
    gpus = FakeGpus(node, gpus=2)
    gpus.describe(gpus=2, behaviour={"hang": 600})
    node.write(QUICK.replace('"1s"\n', '"1s"\ndiscovery_timeout = "1s"\n', 1) + vllm("a") + vllm("cpu", "0"))
    node.start()
    node.wait_state("cpu", "ready")
    node.until(lambda: "unplaced" in node.conditions("a"), "a waits")
    assert node.shard("a")["generation"] == 0
    gpus.describe(gpus=2)
    node.wait_state("a", "ready")


def test_an_nvidia_smi_that_hangs_leaves_older_facts_to_who_looks_and_quarantine_can_be_ended(
    node: Node,
) -> None:
    gpus = FakeGpus(node, gpus=2)
    node.write(QUICK + vllm("a", "[0]", knobs="--fake-gpu-release never", more='gpu_release_timeout = "1s"'))
    node.start()
    node.wait_state("a", "ready")
    node.cli("stop", "a", "--wait")
    node.until(lambda: "in quarantine" in " ".join(node.status()["warnings"]), "its card is in quarantine")
    gpus.hang()
    began = time.monotonic()
    seen = node.ask("GET", "/v1/inventory", timeout=20)["gpu"]
    # The limit for one look is 20 s; who only looks does not wait for it.
    assert time.monotonic() - began < 15
    assert len(seen["gpus"]) == 2 and seen["stale"]["error_kind"] == "timeout"
    assert [gpu["assignable"] for gpu in seen["gpus"]] == [False, False]
    released = node.cli("gpu", "release", "0")
    assert released.returncode == 0 and "GPU 0: released" in released.stdout
    assert "in quarantine" not in " ".join(node.status()["warnings"])
    assert node.end() == 0


def test_cards_of_an_engine_that_died_beside_llmgw_are_given_out_when_their_memory_is_back(node: Node) -> None:
    FakeGpus(node, gpus=2)
    node.write(QUICK + vllm("a", "[0]", knobs="--fake-gpu-release never"))
    node.start()
    first = node.wait_state("a", "ready")
    family = [psutil.Process(first["pid"]), *psutil.Process(first["pid"]).children(recursive=True)]
    node.kill()
    for process in family:
        process.kill()
    node.until(lambda: not any(is_alive(process.pid) for process in family), "all of it is dead")
    node.write(QUICK + vllm("b", "[0]", more="autostart = false"))
    node.start()
    node.until(lambda: "GPU 0 is in quarantine" in " ".join(node.status()["warnings"]), "nobody may have its card")
    node.cli("start", "b", "--no-wait")
    node.until(lambda: node.state_of("b") == "failed" or "unplaced" in node.conditions("b"), "b waits")
    assert node.shard("b")["generation"] == 0
    for held in (node.folder / "gpus" / "held").iterdir():
        held.unlink()
    assert node.wait_state("b", "ready")["gpus"] == ["0"]
    assert "in quarantine" not in " ".join(node.status()["warnings"])


def test_cards_of_engines_that_were_ended_in_a_hurry_are_looked_at_by_the_next_llmgw(node: Node) -> None:
    FakeGpus(node, gpus=1)
    node.write(QUICK + vllm("a", knobs="--fake-gpu-release never", more='gpu_release_timeout = "60s"'))
    node.start()
    node.wait_state("a", "ready")
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    node.until(lambda: "stopping" in node.conditions("a"), "it stops")
    node.process.send_signal(signal.SIGTERM)
    node.process.wait(30)
    node.start()
    node.until(lambda: "GPU 0 is in quarantine" in " ".join(node.status()["warnings"]), "its memory is not back")
    node.until(lambda: "unplaced" in node.conditions("a"), "nothing is started into it")
    assert node.shard("a")["generation"] == 0


def test_cards_stay_with_their_engines_over_a_kill_of_llmgw(node: Node) -> None:
    FakeGpus(node, gpus=3)
    node.write(QUICK + vllm("a") + vllm("b"))
    node.start()
    pids = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")}
    before = cards(node, "a", "b")
    node.kill()
    node.write(QUICK + vllm("new") + vllm("b") + vllm("a"))
    node.start()
    node.wait_state("new", "ready")
    assert {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")} == pids
    assert cards(node, "a", "b") == before
    assert all_different(cards(node, "a", "b", "new"))


def test_sharing_shards_share_a_card_and_others_keep_off_it(node: Node) -> None:
    FakeGpus(node, gpus=2)
    share = 'share_gpus = true\ngpu_memory = "30GiB"\n'
    knobs = "--fake-gpu-mib 20000"
    node.write(
        QUICK
        + vllm("small", knobs=knobs, more=share)
        + vllm("tiny", knobs=knobs, more=share)
        + vllm("whole", knobs=knobs)
        + vllm("unlucky", knobs=knobs, more=share)
    )
    node.start()
    for name in ("small", "tiny", "whole"):
        node.wait_state(name, "ready")
    taken = cards(node, "small", "tiny", "whole")
    sharing = [name for name in ("small", "tiny", "unlucky") if node.state_of(name) == "ready"]
    assert taken["whole"] not in [cards(node, name)[name] for name in sharing]
    # 30 + 30 GiB fit on a card with 79, a third does not.
    assert len(sharing) == 2


def engines_by_card(gpus: FakeGpus) -> dict[str, list[int]]:
    """Living engines that hold memory of a card."""
    found: dict[str, list[int]] = {}
    for holder in current_holders(gpus.directory):
        if is_alive(holder.pid):
            found.setdefault(holder.gpu, []).append(holder.pid)
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_in_a_storm_of_starts_stops_and_kills_no_card_ever_has_two_engines(node: Node, seed: int) -> None:
    chance = random.Random(seed)
    gpus = FakeGpus(node, gpus=4)
    names = [f"s{number}" for number in range(6)]
    knobs = "--fake-gpu-release 0.5"
    node.write(QUICK + "".join(vllm(name, knobs=knobs, more='gpu_release_timeout = "20s"') for name in names))
    node.start()
    for _ in range(14):
        name = chance.choice(names)
        what = chance.choice(["stop", "start", "restart", "kill", "kill llmgw"])
        if what == "kill llmgw":
            node.kill()
            node.start()
        elif what == "kill":
            pid = node.shard(name)["pid"]
            if pid is not None and is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        else:
            node.cli(what, name, "--no-wait")
        time.sleep(chance.random() * 0.6)
        crowded = {card: pids for card, pids in engines_by_card(gpus).items() if len(pids) > 1}
        assert not crowded, (what, name, crowded)
    for name in names:
        node.cli("start", name, "--no-wait")
    node.until(
        lambda: sorted(node.state_of(name) for name in names) == ["pending"] * 2 + ["ready"] * 4,
        "four run and two wait",
        timeout=60,
    )
    assert all(len(pids) == 1 for pids in engines_by_card(gpus).values())
    assert "Traceback" not in node.log()


def environ(node: Node, name: str) -> dict[str, str]:
    return psutil.Process(node.wait_state(name, "ready")["pid"]).environ()


def test_a_slice_is_given_only_where_its_class_is_named_and_by_its_whole_id(node: Node) -> None:
    gpus = FakeGpus(node, gpus=2)
    gpus.slice(0, "3g.40gb", "3g.40gb")
    small = 'gpu_class = "h100-mig-3g.40gb"\n'
    knobs = "--fake-gpu-mib 20000"
    node.write(QUICK + vllm("one", knobs=knobs, more=small) + vllm("two", knobs=knobs, more=small) + vllm("whole"))
    node.start()
    ids = {environ(node, name)["CUDA_VISIBLE_DEVICES"] for name in ("one", "two")}
    assert len(ids) == 2 and all(uuid.startswith("MIG-") for uuid in ids)
    # CUDA may count a card in MIG mode that nvidia-smi counts otherwise: whole ids for all.
    assert environ(node, "whole")["CUDA_VISIBLE_DEVICES"].startswith("GPU-")
    assert node.shard("whole")["gpus"] == ["1"]


def test_cards_with_nvlink_to_each_other_are_preferred(node: Node) -> None:
    gpus = FakeGpus(node, gpus=4)
    gpus.link([0, 3], [1, 2])
    node.write(QUICK + vllm("pair", "2"))
    node.start()
    node.wait_state("pair", "ready")
    assert node.shard("pair")["gpus"] in (["0", "3"], ["1", "2"])


def test_a_card_of_an_engine_that_was_taken_over_and_stopped_is_free_for_others(node: Node) -> None:
    FakeGpus(node, gpus=1)
    node.write(QUICK + vllm("a") + vllm("b", more="autostart = false"))
    node.start()
    node.wait_state("a", "ready")
    node.kill()
    node.start()
    node.wait_state("a", "ready")
    assert node.cli("stop", "a", "--wait").returncode == 0
    node.cli("start", "b", "--no-wait")
    node.wait_state("b", "ready")


def test_a_sharing_shard_restarts_beside_the_other_one_on_its_card(node: Node) -> None:
    FakeGpus(node, gpus=1)
    share = 'share_gpus = true\ngpu_memory = "30GiB"\ngpu_release_timeout = "60s"\n'
    share += "args = { gpu-memory-utilization = 0.3 }\n"
    knobs = "--fake-gpu-mib 20000"
    node.write(QUICK + vllm("a", knobs=knobs, more=share) + vllm("b", knobs=knobs, more=share + "autostart = false\n"))
    node.start()
    node.wait_state("a", "ready")
    node.cli("start", "b", "--no-wait")
    pid = node.wait_state("b", "ready")["pid"]
    assert node.cli("restart", "a", "--no-wait").returncode == 0
    # Without waiting for memory that is the other one's.
    node.until(lambda: node.shard("a")["generation"] == 2 and node.state_of("a") == "ready", "a is back", timeout=25)
    assert not any("quarantine" in text for text in node.status()["warnings"])
    assert node.shard("b")["pid"] == pid


def test_a_release_of_a_card_that_is_in_use_says_by_whom(node: Node) -> None:
    gpus = FakeGpus(node, gpus=2)
    node.write(QUICK + vllm("a", "[0]"))
    node.start()
    node.wait_state("a", "ready")
    used = node.cli("gpu", "release", "0")
    assert (used.returncode, used.stdout) == (0, "GPU 0: nothing to release: a uses it\n")
    gpus.break_ecc(1)
    sick = node.cli("gpu", "release", "1")
    assert sick.returncode == 1 and "GPU 1: nothing to release: uncorrected ECC" in sick.stdout
    for name in ("9" * 5000, "\u0660", "../x"):
        odd = node.cli("gpu", "release", name)
        assert odd.returncode == 1 and "cannot release GPU" in odd.stderr and "Traceback" not in odd.stderr
    assert "Traceback" not in node.log()
