"""Cards whose memory has not come back: given to nobody, over a restart too, until free or until somebody says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.availability import availability
from llmgw.domain.hardware import Gpu, GpuProcess, Inventory, InventoryError, InventoryStatus, MigInstance, Stale
from llmgw.supervisor.gpu_release import HeldGpu
from llmgw.supervisor.quarantine import Quarantine

HELD = HeldGpu("GPU-0", "0", 41000, "by pid 4190001 (not ours, not visible)")


def node(used: int, *processes: GpuProcess) -> Inventory:
    card = Gpu(0, "GPU-0", "0", "NVIDIA L4", 46068, used, None, (8, 9), processes)
    return Inventory(InventoryStatus.OK, (card,))


def quarantine(folder: Path, boot: str = "boot") -> Quarantine:
    return Quarantine(str(folder), now=lambda: 1000.0, boot=lambda: boot)


async def kept(folder: Path) -> Quarantine:
    made = quarantine(folder)
    made.enter("llama", (HELD,), {"GPU-0": 4})
    await made.save()
    return made


async def test_it_outlives_llmgw_and_not_a_reboot(tmp_path: Path) -> None:
    await kept(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    (entry,) = quarantine(tmp_path).entries
    assert (entry.uuid, entry.shard, entry.before, entry.since) == ("GPU-0", "llama", 4, 1000.0)
    assert quarantine(tmp_path, boot="another").entries == ()


async def test_a_card_that_is_free_again_leaves_and_one_that_nobody_can_ask_about_stays(tmp_path: Path) -> None:
    made = await kept(tmp_path)
    failed = Inventory(InventoryStatus.ERROR, error=InventoryError.TIMEOUT, detail="hung")
    assert "hung" in made.recheck(failed)["GPU-0"]
    stale = evolve(node(4), stale=Stale(InventoryError.TIMEOUT, "hung", 1.0))
    assert "hung" in made.recheck(stale)["GPU-0"]
    assert "41000 MiB" in made.recheck(node(41000))["GPU-0"]
    assert made.recheck(node(4)) == {}
    await made.save()
    assert list(tmp_path.iterdir()) == []


async def test_a_card_that_is_entered_again_keeps_its_time(tmp_path: Path) -> None:
    times = iter((1000.0, 2000.0))
    made = Quarantine(str(tmp_path), now=lambda: next(times), boot=lambda: "boot")
    made.enter("llama", (HELD,), {"GPU-0": 4})
    made.enter("llama", (HELD,), {"GPU-0": 4})
    assert [entry.since for entry in made.entries] == [1000.0]


async def test_an_operators_word_lets_it_go_and_its_holder_counts_as_nobody_while_it_stays(tmp_path: Path) -> None:
    made = await kept(tmp_path)
    held = node(41000, GpuProcess(77, 41000))
    assert made.release("GPU-0", held.gpus[0])
    assert made.entries == () and set(made.accepted["GPU-0"]) == {77}
    assert made.recheck(held) == {} and set(made.accepted["GPU-0"]) == {77}
    made.recheck(node(4))
    assert made.accepted == {}
    assert not made.release("GPU-0", node(4).gpus[0])


async def test_memory_that_nobody_admits_to_can_be_released_too_until_it_changes(tmp_path: Path) -> None:
    made = await kept(tmp_path)
    held = node(41000)
    assert made.release("GPU-0", held.gpus[0])
    made.recheck(held)
    assert availability(held, {}, quarantined=made.texts(), accepted=made.accepted)["GPU-0"].assignable
    another = node(41000, GpuProcess(78, 40990))
    made.recheck(another)
    assert not availability(another, {}, quarantined=made.texts(), accepted=made.accepted)["GPU-0"].assignable


async def test_engines_of_ours_on_a_card_are_not_what_an_operator_accepts(tmp_path: Path) -> None:
    made = quarantine(tmp_path)
    assert not made.release("GPU-0", node(20000, GpuProcess(77, 20000)).gpus[0], ours={77})
    assert made.accepted == {}


async def test_an_operators_word_outlives_llmgw_and_not_a_reboot(tmp_path: Path) -> None:
    made = await kept(tmp_path)
    made.release("GPU-0", node(41000, GpuProcess(77, 41000)).gpus[0])
    await made.save()
    again = quarantine(tmp_path)
    assert again.entries == () and set(again.accepted["GPU-0"]) == {77}
    assert quarantine(tmp_path, boot="another").accepted == {}
    again.recheck(node(4))
    await again.save()
    assert list(tmp_path.iterdir()) == []


async def test_a_card_that_nobody_can_see_leaves_at_an_operators_word(tmp_path: Path) -> None:
    made = await kept(tmp_path)
    assert made.release("GPU-0", None)
    assert made.entries == () and made.accepted == {}


async def test_a_holder_of_many_words_does_not_make_the_file_unreadable(tmp_path: Path) -> None:
    made = quarantine(tmp_path)
    made.enter("llama", (evolve(HELD, holders="x" * 4000),), {"GPU-0": 4})
    await made.save()
    assert [entry.uuid for entry in quarantine(tmp_path).entries] == ["GPU-0"]


async def test_a_slice_is_kept_only_as_long_as_a_process_of_ours_is_on_its_card(tmp_path: Path) -> None:
    made = quarantine(tmp_path)
    made.enter("llama", (HeldGpu("MIG-1", "MIG-1", None, "held by pid 77"),), {}, pids=(77,))
    slices = (MigInstance(0, 0, "MIG-1", "3g.20gb", "l4-mig-3g.20gb", None),)
    assert "MIG-1" in made.recheck(evolve(node(9000, GpuProcess(77, 9000)), mig_instances=slices))
    assert made.recheck(evolve(node(9000, GpuProcess(78, 9000)), mig_instances=slices)) == {}


async def test_a_process_of_ours_that_cannot_be_killed_keeps_it_whatever_the_memory_says(tmp_path: Path) -> None:
    made = quarantine(tmp_path)
    made.enter("llama", (HELD,), {"GPU-0": 4}, pids=(77,))
    assert "GPU-0" in made.recheck(node(4, GpuProcess(77, 0)))
    assert made.recheck(node(4)) == {}


KEYS = ["boot_id", "gpus", "uuid", "since", "holder", "label", "accepted"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=10,
)


@given(document=JSON)
def test_whatever_stands_in_the_file_llmgw_starts(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    folder = tmp_path_factory.mktemp("state")
    (folder / "quarantine.json").write_text(json.dumps(document))
    assert quarantine(folder).entries == ()


@pytest.mark.parametrize("data", [b"", b"\x80", b"[" * 100_000, b"x" * (2 << 20)])
def test_a_file_that_is_no_json_is_no_quarantine(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "quarantine.json").write_bytes(data)
    assert quarantine(tmp_path).entries == ()


async def test_a_full_disk_is_told_and_llmgw_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("no folder")
    made = quarantine(tmp_path / "state")
    made.enter("llama", (HELD,), {"GPU-0": 4})
    await made.save()
    await made.save()
    made.save_now()
    assert caplog.text.count("cannot keep the quarantine") == 1
    assert len(made.entries) == 1
