"""What stands above the table of `llmgw status` when something is wrong with the GPUs: what, since when, what to do."""

from __future__ import annotations

from attrs import evolve

from llmgw.domain.hardware import Gpu, GpuFlag, Inventory, InventoryError, InventoryStatus, LostGpu, Stale
from llmgw.supervisor.node_words import node_warnings
from llmgw.supervisor.quarantine import Quarantined

CARD = Gpu(0, "GPU-0", "00000000:17:00.0", "NVIDIA L4", 23034, 4, 22000, (8, 9))
GOOD = Inventory(InventoryStatus.OK, (CARD,))


def words(inventory: Inventory | None, *quarantined: Quarantined, in_use: str = "", now: float = 4600.0) -> list[str]:
    return node_warnings(inventory, quarantined, in_use={in_use}, now=now)


def test_nothing_is_said_where_nothing_is_wrong_or_nobody_looked() -> None:
    assert words(GOOD) == [] and words(None) == []


def test_a_stale_inventory_says_since_when_why_and_what_to_do() -> None:
    stale = evolve(GOOD, stale=Stale(InventoryError.TIMEOUT, "nvidia-smi did not end within 20 s", 1000.0))
    (text,) = words(stale)
    assert "for 60m (nvidia-smi did not end within 20 s)" in text and "nothing new is placed" in text


def test_gpus_that_could_never_be_read_are_told_with_the_tools_own_words() -> None:
    (text,) = words(Inventory(InventoryStatus.ERROR, error=InventoryError.NVML_INIT_FAILED, detail="Unknown Error"))
    assert "Unknown Error" in text and "llmgw doctor" in text


def test_a_card_in_quarantine_is_told_with_holder_age_and_the_way_out() -> None:
    (text,) = words(GOOD, Quarantined("GPU-0", "0", "a", 4, 4510.0, "41000 MiB used by pid 7 (not ours)"))
    assert text.startswith("GPU 0 is in quarantine for 1m, not released after a ended: 41000 MiB used by pid 7")
    assert "llmgw gpu release 0" in text


def test_a_bad_card_is_told_unless_a_shard_that_has_it_tells_it() -> None:
    sick = evolve(GOOD, gpus=(evolve(CARD, flags=(GpuFlag.UNCORRECTED_ECC,)),))
    (text,) = words(sick)
    assert "GPU 0" in text and "uncorrected ECC" in text
    assert words(sick, in_use="GPU-0") == []


def test_a_lost_card_is_told_once() -> None:
    lost = evolve(CARD, flags=(GpuFlag.LOST,))
    (text,) = words(evolve(GOOD, gpus=(lost,), lost=(LostGpu(0, CARD.bus_id),), status=InventoryStatus.PARTIAL))
    assert text.startswith("GPU 0 at 00000000:17:00.0 is lost: reboot")


def test_a_clock_that_was_set_back_makes_no_negative_ages() -> None:
    (text,) = words(GOOD, Quarantined("GPU-0", "0", "a", 4, 9e9, "x"))
    assert "for 0s" in text
