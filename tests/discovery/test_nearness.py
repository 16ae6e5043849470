"""PCI paths out of a tree that stands for /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.discovery.nearness import sysfs_nearness
from llmgw.domain.hardware import Gpu


def gpu(index: int, bus_id: str) -> Gpu:
    return Gpu(index, f"GPU-{index}", bus_id, "NVIDIA L4", 23034, 4, 22630, (8, 9))


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    # The folder's own name must not be taken for a part of the bus.
    root = tmp_path / "pci-tree" / "sys"
    places = {
        "0000:01:00.0": ("pci0000:00/0000:00:01.0/0000:01:00.0", "0"),
        "0000:02:00.0": ("pci0000:00/0000:00:02.0/0000:02:00.0", "0"),
        "10000:81:00.0": ("pci10000:80/10000:80:01.0/10000:81:00.0", "1"),
        "0000:03:00.0": ("pci0000:00/0000:00:01.0/0000:03:00.0", "-1"),
    }
    for address, (path, numa) in places.items():
        folder = root / "devices" / path
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(numa + "\n")
        link = root / "bus" / "pci" / "devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    for name, path in (("mlx5_10", "pci0000:00/0000:00:01.0/0000:03:00.0"), ("mlx5_2", "pci0000:00/nothing")):
        device = root / "class" / "infiniband" / name
        device.mkdir(parents=True)
        (device / "device").symlink_to(root / "devices" / path)
    return root


def test_cards_and_adapters_are_found_by_their_addresses(sysfs: Path) -> None:
    cards = [gpu(0, "00000000:01:00.0"), gpu(1, "00000000:02:00.0"), gpu(2, "00010000:81:00.0")]
    topology = sysfs_nearness(cards, str(sysfs))
    assert topology is not None and topology.source == "sysfs"
    assert topology.links == {(0, 1): "PHB", (0, 2): "SYS", (1, 2): "SYS"}
    assert topology.nearest_nic == {0: "mlx5_10", 1: "mlx5_10"}
    assert topology.nvlink_sets == ()


@pytest.mark.parametrize("address", ["", "../../../etc", "00000000:7F:00.0", "\x00"])
def test_a_card_without_a_place_is_near_to_nothing(sysfs: Path, address: str) -> None:
    assert sysfs_nearness([gpu(0, address), gpu(1, "00000000:01:00.0")], str(sysfs)) is not None
    assert sysfs_nearness([gpu(0, address)], str(sysfs)) is None


def test_a_tree_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert sysfs_nearness([gpu(0, "00000000:01:00.0"), gpu(1, "00000000:02:00.0")], str(tmp_path / "no")) is None
