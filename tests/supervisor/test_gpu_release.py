"""GPU memory that comes back late, never, or to nobody knows whom."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from llmgw.discovery.survey import survey
from llmgw.domain.hardware import Gpu, GpuProcess, Inventory, InventoryError, InventoryStatus, Stale
from llmgw.supervisor.children import Children
from llmgw.supervisor.gpu_release import GpuRelease, describe_process, used_before, wait_gpu_release
from llmgw.supervisor.tools import ToolResult, run_tool


def gpu(index: int, used: int | None, *processes: GpuProcess) -> Gpu:
    return Gpu(index, f"GPU-{index}", f"00000000:0{index}:00.0", "L40S", 46068, used, None, (8, 9), processes)


def node(*gpus: Gpu, known: bool = True) -> Inventory:
    return Inventory(InventoryStatus.OK, gpus, processes_known=known)


def failed(kind: InventoryError, detail: str) -> Inventory:
    return Inventory(InventoryStatus.ERROR, error=kind, detail=detail)


async def release(
    answer: Callable[[], Inventory],
    gpus: tuple[str, ...] = ("GPU-0",),
    before: dict[str, int | None] | None = None,
    ours: frozenset[int] = frozenset(),
    describe: Callable[[int], str | None] = lambda pid: None,
) -> GpuRelease:
    async def ask() -> Inventory:
        await trio.sleep(0.1)
        return answer()

    level = {"GPU-0": 4} if before is None else before
    return await wait_gpu_release(
        ask, gpus, level, timeout=30.0, is_ours=ours.__contains__, describe=describe, labels={"GPU-0": "0"}
    )


async def test_memory_that_comes_back_late_is_waited_for(autojump_clock: MockClock) -> None:
    back = trio.current_time() + 6.0
    result = await release(lambda: node(gpu(0, 41000 if trio.current_time() < back else 4)))
    assert result.freed and result.held == ()
    assert 6.0 <= result.seconds <= 9.0


async def test_memory_that_never_comes_back_names_its_holder(autojump_clock: MockClock) -> None:
    result = await release(lambda: node(gpu(0, 41000, GpuProcess(4190001, 41000))))
    assert not result.freed and result.seconds == pytest.approx(30.0)
    assert str(result) == "GPU 0: 41000 MiB used by pid 4190001 (not ours, not visible)"


async def test_several_holders_are_told_with_their_shares(autojump_clock: MockClock) -> None:
    holders = (GpuProcess(812, 20000), GpuProcess(4411, None))
    names = {4411: "python, uid 1000"}
    result = await release(lambda: node(gpu(0, 41000, *holders)), ours=frozenset({812}), describe=names.get)
    assert str(result) == "GPU 0: 41000 MiB used by pid 812 20000 MiB (ours), pid 4411 (python, uid 1000, not ours)"


async def test_memory_that_nobody_admits_to_is_held_too(autojump_clock: MockClock) -> None:
    result = await release(lambda: node(gpu(0, 41000)))
    assert str(result) == "GPU 0: 41000 MiB used by a process that nvidia-smi does not show, 4 MiB before the launch"


async def test_a_process_of_ours_holds_whatever_the_memory_says(autojump_clock: MockClock) -> None:
    result = await release(lambda: node(gpu(0, 4, GpuProcess(812, 0))), ours=frozenset({812}))
    assert not result.freed


async def test_what_strangers_used_before_the_launch_is_not_ours_to_wait_for(autojump_clock: MockClock) -> None:
    result = await release(lambda: node(gpu(0, 9040, GpuProcess(77, 9000))), before={"GPU-0": 9004})
    assert result.freed and result.seconds < 1


async def test_seventy_mib_too_many_pass_but_a_left_over_context_does_not(autojump_clock: MockClock) -> None:
    assert (await release(lambda: node(gpu(0, 74)))).freed
    assert not (await release(lambda: node(gpu(0, 304)))).freed


async def test_a_failed_query_is_not_confirmed_never_free(autojump_clock: MockClock) -> None:
    result = await release(lambda: failed(InventoryError.TIMEOUT, "nvidia-smi did not end within 20 s"))
    assert not result.freed and result.asked
    assert str(result) == "GPU 0: not confirmed free: nvidia-smi did not end within 20 s"


async def test_a_query_that_fails_once_is_asked_again(autojump_clock: MockClock) -> None:
    answers = iter([failed(InventoryError.NVML_INIT_FAILED, "Unknown Error"), node(gpu(0, 4))])
    assert (await release(lambda: next(answers))).freed


async def test_a_question_that_hangs_ends_with_the_limit(autojump_clock: MockClock) -> None:
    result = await wait_gpu_release(
        trio.sleep_forever, ("GPU-0",), {"GPU-0": 4}, timeout=30.0, is_ours=lambda pid: False
    )  # type: ignore[arg-type]
    assert not result.freed and "no answer within 30 s" in str(result)


async def test_a_gpu_that_is_gone_from_the_list_is_not_confirmed(autojump_clock: MockClock) -> None:
    result = await release(lambda: node(gpu(0, 4)), gpus=("GPU-0", "GPU-3"), before={"GPU-0": 4, "GPU-3": 4})
    assert [held.uuid for held in result.held] == ["GPU-3"]


async def test_without_gpus_nothing_is_asked() -> None:
    async def ask() -> Inventory:
        raise AssertionError("asked for nothing")

    result = await wait_gpu_release(ask, (), {}, timeout=30.0, is_ours=lambda pid: False)
    assert result.freed and not result.asked


async def test_a_node_without_nvidia_smi_does_not_wait(autojump_clock: MockClock) -> None:
    result = await release(lambda: failed(InventoryError.COMMAND_MISSING, "not on PATH"), before={"GPU-0": None})
    assert result.freed and not result.asked and result.seconds < 1


async def test_an_nvidia_smi_that_vanished_since_the_launch_proves_nothing(autojump_clock: MockClock) -> None:
    result = await release(lambda: failed(InventoryError.COMMAND_MISSING, "not on PATH"), before={"GPU-0": 4})
    assert not result.freed


@pytest.mark.parametrize(
    ("known", "processes", "freed"),
    [(True, (), True), (False, (), False), (True, (GpuProcess(9, None),), False), (True, (GpuProcess(9, 300),), True)],
)
async def test_without_a_size_only_a_complete_list_of_processes_frees(
    known: bool, processes: tuple[GpuProcess, ...], freed: bool, autojump_clock: MockClock
) -> None:
    result = await release(lambda: node(gpu(0, None, *processes), known=known), before={"GPU-0": None})
    assert result.freed is freed


def test_the_level_before_a_launch_is_unknown_where_the_driver_does_not_say() -> None:
    assert used_before(node(gpu(0, 17), gpu(1, None)), ("GPU-0", "GPU-1")) == {"GPU-0": 17, "GPU-1": None}


async def test_stale_facts_free_nothing(autojump_clock: MockClock) -> None:
    stale = evolve(node(gpu(0, 4)), stale=Stale(InventoryError.TIMEOUT, "nvidia-smi did not end within 20 s", 1.0))
    result = await release(lambda: stale)
    assert str(result) == "GPU 0: not confirmed free: nvidia-smi did not end within 20 s"


def test_a_process_is_told_by_name_and_user_and_one_that_is_gone_not_at_all() -> None:
    assert (describe_process(os.getpid()) or "").endswith(f", uid {os.getuid()}")
    # Above the largest pid that Linux gives out.
    assert describe_process(1 << 22) is None


# -- with a program that stands in for nvidia-smi


def fake(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "llmgw.fake.nvidia_smi", *arguments], check=True, timeout=60)


async def look(nvidia_smi: Path) -> Inventory:
    children = Children()

    async def tool(argv: Sequence[str], *, timeout: float) -> ToolResult:
        return await run_tool(children, argv, timeout=timeout)

    return await survey(tool, nvidia_smi=str(nvidia_smi), timeout=60.0, now=lambda: 1.0)


async def test_a_strangers_memory_holds_a_gpu_until_it_is_given_back(tmp_path: Path) -> None:
    fake("--fake-install", str(tmp_path / "bin"), "--fake-gpu-dir", str(tmp_path / "gpus"))
    program = tmp_path / "bin" / "nvidia-smi"
    first = (await look(program)).gpus[0].uuid
    before = used_before(await look(program), (first,))
    assert before[first] is not None
    subprocess.run([program, "--fake-hold", "0", "41000", "4190001"], check=True, timeout=60)
    with trio.fail_after(120):
        held = await wait_gpu_release(
            lambda: look(program), (first,), before, timeout=3.0, is_ours=lambda pid: False, describe=lambda pid: None
        )
        assert not held.freed
        assert "MiB used by pid 4190001 (not ours, not visible)" in str(held)
        subprocess.run([program, "--fake-drop", "0"], check=True, timeout=60)
        freed = await wait_gpu_release(lambda: look(program), (first,), before, timeout=60.0, is_ours=lambda pid: False)
    assert freed.freed
