"""What the doctor says of a machine: each fault with a remedy, and nothing bad about what nobody knows."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from llmgw.domain.fabric import FabricInventory, FabricPort, PortKind
from llmgw.domain.hardware import (
    Availability,
    Gpu,
    GpuFlag,
    Hindrance,
    HostHardware,
    Inventory,
    InventoryError,
    InventoryStatus,
    LostGpu,
)
from llmgw.domain.problem import Problem
from llmgw.preflight.doctor import Control, Finding, Machine, diagnose

CARD = Gpu(0, "GPU-0", "0", "NVIDIA L4", 23034, 0, 22000, (8, 9), gpu_class="l4-22g", persistence_mode=True)
WELL = Machine(
    inventory=Inventory(InventoryStatus.OK, (CARD,), driver_version="580.1"),
    has_card=True,
    host=HostHardware(64000, 60000, 32000, 32000, -1, -1, nvidia_uvm=True),
    disks={"state disk": 100 << 30, "weights disk": 500 << 30},
    open_files=1048576,
    config_errors=0,
    ephemeral_ports=(32768, 60999),
    unit={"KillMode": "process", "Delegate": "yes", "LimitMEMLOCK": "infinity", "LimitNOFILE": "1048576"},
)


def bad(machine: Machine) -> list[Finding]:
    return [finding for finding in diagnose(machine) if finding.level != "ok"]


def with_gpu(**keys: Any) -> Machine:
    return evolve(WELL, inventory=evolve(WELL.inventory, gpus=(evolve(CARD, **keys),)))


def test_a_machine_that_is_well_has_no_finding_but_good_ones() -> None:
    assert bad(WELL) == []
    assert {"driver", "memlock", "/dev/shm", "unit", "ports"} <= {finding.check for finding in diagnose(WELL)}


def test_a_machine_without_a_card_and_of_which_nothing_else_is_known_is_no_fault() -> None:
    missing = Inventory(InventoryStatus.ERROR, error=InventoryError.COMMAND_MISSING, detail="not on PATH")
    assert bad(Machine(missing, has_card=False)) == []
    assert [finding.check for finding in bad(Machine(missing, has_card=True))] == ["driver"]


@pytest.mark.parametrize("error", InventoryError)
def test_each_failure_of_nvidia_smi_has_a_remedy(error: InventoryError) -> None:
    broken = evolve(WELL, inventory=Inventory(InventoryStatus.ERROR, error=error, detail="why"))
    (finding,) = bad(broken)
    assert (finding.check, finding.level, finding.text) == ("driver", "problem", "why") and finding.remedy


@pytest.mark.parametrize(
    ("machine", "check", "level", "words"),
    [
        (with_gpu(flags=(GpuFlag.UNCORRECTED_ECC,)), "gpu", "problem", "uncorrected ECC"),
        (with_gpu(persistence_mode=False), "persistence", "warning", "GPU 0"),
        (evolve(WELL, host=evolve(WELL.host, nvidia_uvm=False)), "nvidia-uvm", "problem", "/dev/nvidia-uvm"),
        (evolve(WELL, host=evolve(WELL.host, shm_total=64)), "/dev/shm", "warning", "64 MiB"),
        (evolve(WELL, open_files=1024), "open files", "warning", "1024"),
        (evolve(WELL, pidfd=False), "kernel", "problem", "pidfd"),
        (evolve(WELL, proc_hidden=True), "/proc", "warning", "hidepid"),
        (evolve(WELL, disks={"weights disk": 1 << 30}), "weights disk", "warning", "1.0 GiB"),
        (evolve(WELL, disks={"state disk": 1 << 20}), "state disk", "problem", "0.0 GiB"),
        (evolve(WELL, config_errors=2), "configuration", "problem", "2 errors"),
        (evolve(WELL, engines={"vllm": (None, None)}), "engine", "problem", "vllm is not on PATH"),
        (evolve(WELL, engines={"/opt/vllm": (None, None)}), "engine", "problem", "/opt/vllm is not there"),
        (evolve(WELL, late_stop=Problem("x", "TimeoutStopSec=90 is too short", "set it")), "unit", "warning", "=90"),
        (evolve(WELL, engine_ports=(40000, 40010)), "ports", "warning", "ephemeral"),
        (evolve(WELL, engine_ports=(8101, 8101), ports_taken={8101: "pid 4 (x)"}), "ports", "problem", "8101-8101"),
        (
            evolve(WELL, control=Control("/s", "no right to /s", "join llmgw")),
            "llmgw",
            "warning",
            "no right to /s",
        ),
        (evolve(WELL, control=Control("/s", "nobody listens")), "llmgw", "warning", "nobody listens"),
        (evolve(WELL, unit={"KillMode": "control-group"}), "unit", "warning", "KillMode=control-group"),
    ],
)
def test_each_fault_is_one_line_with_what_to_do(machine: Machine, check: str, level: str, words: str) -> None:
    (finding,) = bad(machine)
    assert (finding.check, finding.level) == (check, level)
    assert words in finding.text and finding.remedy


def test_cards_that_are_lost_or_held_are_told() -> None:
    lost = evolve(WELL, inventory=evolve(WELL.inventory, lost=(LostGpu(3, "0000:04:00.0"),)))
    assert "GPU 3 at 0000:04:00.0 has dropped off" in [finding.text for finding in bad(lost)]
    kept = {"GPU-0": Availability("GPU-0", "held by pid 4411 python", 0, (), Hindrance.HELD)}
    assert [finding.text for finding in bad(evolve(WELL, availability=kept))] == ["GPU 0 is held by pid 4411 python"]


def test_ports_of_adapters_are_told_with_what_their_state_asks_for() -> None:
    waiting = FabricPort(
        "mlx5_2", 1, PortKind.INFINIBAND, "INIT", 400.0, False, reason="no manager", pci="0000:3a:00.0"
    )
    fabric = FabricInventory((waiting,), (), ("mlx5_9",))
    texts = {finding.text: finding.remedy for finding in bad(evolve(WELL, fabric=fabric))}
    assert "subnet manager" in (texts["mlx5_2:1 is INIT: no manager"] or "")
    assert any("mlx5_9" in text for text in texts)


def test_an_llmgw_that_answers_or_is_not_started_yet_is_no_fault() -> None:
    assert bad(evolve(WELL, control=Control("/s"))) == []
    assert bad(evolve(WELL, control=Control("/s", "no llmgw is running here", absent=True))) == []
