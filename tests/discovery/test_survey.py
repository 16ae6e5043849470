"""The whole way from a program to an inventory, with replayed programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from llmgw.discovery.gpus import CORE_QUERY
from llmgw.discovery.inventory_json import gpu_json, node_json, read_node
from llmgw.discovery.survey import survey
from llmgw.domain.hardware import Inventory, InventoryError, InventoryStatus, NodeInventory
from llmgw.supervisor.children import Children
from llmgw.supervisor.tools import ToolResult, run_tool

DATA = Path(__file__).parent / "data"
CASES = sorted(path.name for path in (DATA / "gpu").iterdir())
NOT_PRINTED = {"needs_retry_without", "tp_group_of_both_allowed", "note"}
"""Expectations for other tests and for people."""


async def look(case: Path, timeout: float = 30.0) -> Inventory:
    children = Children()

    async def tool(argv: Sequence[str], *, timeout: float) -> ToolResult:
        return await run_tool(children, argv, timeout=timeout)

    meminfo = case / "meminfo"
    return await survey(
        tool,
        nvidia_smi=str(case / "bin" / "nvidia-smi"),
        timeout=timeout,
        now=lambda: 1000.0,
        meminfo=meminfo.read_text() if meminfo.exists() else None,
    )


def differences(found: Any, expected: Any, place: str = "") -> list[str]:
    """Places where keys that the expectation has differ."""
    if isinstance(expected, dict):
        return [
            text
            for key, value in expected.items()
            if key not in NOT_PRINTED
            for text in differences(found[key], value, f"{place}.{key}")
        ]
    if isinstance(expected, list) and place.endswith("health_flags"):
        return [] if set(found) == set(expected) else [f"{place}: {found} is not {expected}"]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [text for i, (one, other) in pairs for text in differences(one, other, f"{place}[{i}]")]
    return [] if found == expected else [f"{place}: {found!r} is not {expected!r}"]


@pytest.mark.parametrize("name", CASES)
async def test_each_recorded_node_is_read_as_expected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVIDIA_SMI_MAX_HANG", "60")
    case = DATA / "gpu" / name
    inventory = await look(case, timeout=2.0 if name == "hang" else 60.0)
    assert differences(gpu_json(inventory), json.loads((case / "expected.json").read_text())) == []
    assert inventory.read_at == 1000.0
    printed = json.loads(json.dumps(node_json(NodeInventory("gpu-01", inventory), source="local")))
    assert read_node(printed).gpu == inventory


@pytest.mark.parametrize("name", CASES)
async def test_fields_that_a_driver_does_not_know_are_left_out_one_call_each(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = json.loads((DATA / "gpu" / name / "expected.json").read_text())
    if expected["status"] == "error":
        pytest.skip("no rows")
    log = tmp_path / "calls"
    monkeypatch.setenv("FAKE_NVIDIA_SMI_LOG", str(log))
    await look(DATA / "gpu" / name, timeout=60.0)
    calls = [" ".join(json.loads(line)) for line in log.read_text().splitlines()]
    queries = [call.split()[0].partition("=")[2].split(",") for call in calls if call.startswith("--query-gpu=index")]
    missing = set(CORE_QUERY) - set(queries[-1])
    # The expectation is of a query without memory.reserved, which the same old drivers lack.
    assert missing - {"memory.reserved"} == set(expected.get("needs_retry_without", ()))
    assert len(queries) == 1 + len(missing)


@pytest.mark.parametrize("name", ["mixed-3090-4090", "h100-sxm-8x", "cloud-l4-a10g-t4"])
async def test_cards_of_one_class_and_capability_may_form_a_group(name: str) -> None:
    expected = json.loads((DATA / "gpu" / name / "expected.json").read_text())
    inventory = await look(DATA / "gpu" / name)
    kinds = {(gpu.gpu_class, gpu.compute_capability) for gpu in inventory.gpus}
    assert (len(kinds) == 1) is expected.get("tp_group_of_both_allowed", name == "h100-sxm-8x")


async def test_rows_before_a_hang_are_no_inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVIDIA_SMI_MAX_HANG", "60")
    shutil.copytree(DATA / "tools", tmp_path / "tools")
    shutil.copytree(DATA / "gpu" / "hang", tmp_path / "gpu" / "hang")
    case = tmp_path / "gpu" / "hang"
    data = json.loads((case / "case.json").read_text())
    data |= {"ignore_sigterm": True, "partial_stdout": "0, GPU-1, NVIDIA L4, 00000000:31:00.0, 23034, "}
    (case / "case.json").write_text(json.dumps(data))
    with trio.fail_after(30):
        inventory = await look(case, timeout=2.0)
    assert (inventory.status, inventory.error, inventory.gpus) == (InventoryStatus.ERROR, InventoryError.TIMEOUT, ())
    assert inventory.detail == "nvidia-smi did not end within 2 s"


@attrs.frozen
class Answer:
    code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False


class Script:
    """Answers in order, each after some seconds; keeps what it was asked."""

    def __init__(self, *answers: tuple[float, Answer]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, float]] = []

    async def __call__(self, argv: Sequence[str], *, timeout: float) -> Answer:
        self.asked.append((argv[1], timeout))
        seconds, answer = self.answers.pop(0)
        if seconds > timeout:
            await trio.sleep(timeout)
            return Answer(None, answer.stdout, timed_out=True)
        await trio.sleep(seconds)
        return answer


GOOD = Answer(
    0,
    b"0, GPU-1, NVIDIA L4, 00000000:31:00.0, 23034, 400, 4, 22630, 8.9, 535.1, [N/A], Enabled, 0, No, No, "
    b"Enabled, 34, 71.52, 72.00\n",
)


OPTIONAL_FAIL = ((0.1, Answer(2)), (0.1, Answer(255)))
"""The recovery action and the topology, of a driver that knows neither."""


async def scripted(*answers: tuple[float, Answer]) -> tuple[Inventory, Script]:
    script = Script(*answers)
    return await survey(script, nvidia_smi="/usr/bin/nvidia-smi", timeout=20.0, now=lambda: 7.0), script


async def test_one_limit_covers_all_calls(autojump_clock: MockClock) -> None:
    inventory, script = await scripted((15.0, GOOD), (15.0, Answer(0)))
    assert [timeout for _, timeout in script.asked] == [20.0, pytest.approx(5.0)]
    assert inventory.error is InventoryError.TIMEOUT and inventory.gpus == ()
    assert trio.current_time() - script.asked[0][1] < 20.0 + 1


async def test_a_failed_process_list_leaves_the_gpus_and_says_unknown(autojump_clock: MockClock) -> None:
    inventory, _ = await scripted(
        (0.1, GOOD), (0.1, Answer(255, b"Failed to initialize NVML: Unknown Error")), *OPTIONAL_FAIL
    )
    assert inventory.status is InventoryStatus.OK and len(inventory.gpus) == 1
    assert not inventory.processes_known and "Unknown Error" in (inventory.detail or "")


async def test_unknown_fields_are_dropped_one_by_one_and_required_ones_are_not(autojump_clock: MockClock) -> None:
    def unknown(field: str) -> tuple[float, Answer]:
        return 0.1, Answer(2, f'Field "{field}" is not a valid field to query.\n'.encode())

    inventory, script = await scripted(unknown("memory.reserved"), unknown("memory.reserved"))
    assert inventory.status is InventoryStatus.ERROR and len(script.asked) == 2
    inventory, script = await scripted(unknown("uuid"))
    assert inventory.status is InventoryStatus.ERROR and len(script.asked) == 1


async def test_no_program_asks_nothing() -> None:
    script = Script()
    inventory = await survey(script, nvidia_smi=None, timeout=20.0, now=lambda: 7.0)
    assert (inventory.error, inventory.read_at, script.asked) == (InventoryError.COMMAND_MISSING, 7.0, [])


async def test_a_program_that_cannot_be_started_is_missing(autojump_clock: MockClock) -> None:
    inventory, _ = await scripted((0.0, Answer(126, stderr=b"/usr/bin/nvidia-smi: Permission denied")))
    assert inventory.error is InventoryError.COMMAND_MISSING and "Permission denied" in (inventory.detail or "")


@pytest.mark.parametrize("answer", [None, [], {}, {"api": 2}, {"api": 1, "gpu": {}}, {"api": 1, "gpu": {"status": 5}}])
def test_what_is_no_inventory_is_refused_in_words(answer: object) -> None:
    with pytest.raises(ValueError, match="not an inventory"):
        read_node(answer)
