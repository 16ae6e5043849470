"""How near devices are to one another: the matrix of `topo -m`, and PCI paths."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.topology import PciPlace, nearness, parse_topology

RECORDED = (Path(__file__).parent / "data" / "gpu" / "h100-sxm-8x" / "topo.txt").read_text()


def matrix(*rows: str) -> str:
    return "\n".join(row.replace(" ", "\t") for row in rows) + "\n"


def test_a_recorded_matrix_is_read_with_the_names_of_its_legend() -> None:
    topology = parse_topology(RECORDED)
    assert topology is not None
    assert (topology.gpu_gpu, topology.source) == ("NV18", "nvidia-smi")
    assert topology.nvlink_sets == (tuple(range(8)),)
    assert (topology.nearest_nic[0], topology.nearest_nic[2], topology.nearest_nic[7]) == ("mlx5_0", "mlx5_4", "mlx5_9")


def test_pairs_that_differ_make_groups() -> None:
    text = matrix("_ GPU0 GPU1 GPU2", "GPU0 X NV4 SYS", "GPU1 NV4 X NODE", "GPU2 SYS NODE X").replace("_", "")
    topology = parse_topology(text)
    assert topology is not None
    assert (topology.gpu_gpu, topology.nvlink_sets) == (None, ((0, 1),))
    assert (topology.link(2, 0), topology.link(1, 2)) == ("SYS", "NODE")


def test_drivers_without_a_legend_name_adapters_in_the_columns() -> None:
    text = matrix("_ GPU0 mlx5_0 mlx5_3 GPU1 CPU_Affinity", "GPU0 X NODE PIX SYS 0-5", "GPU1 SYS PHB SYS X 0-5")
    topology = parse_topology(text.replace("CPU_Affinity", "CPU Affinity").replace("_\t", "\t", 1))
    assert topology is not None
    assert (topology.nearest_nic, topology.link(0, 1)) == ({0: "mlx5_3", 1: "mlx5_0"}, "SYS")


def test_an_adapter_that_the_legend_lacks_has_no_name() -> None:
    text = matrix("_ GPU0 NIC0 NIC1", "GPU0 X PIX SYS", "", "NIC_Legend:") + "  NIC1: mlx5_7\n"
    topology = parse_topology(text.replace("_\t", "\t", 1))
    assert topology is not None and topology.nearest_nic == {0: "mlx5_7"}


def test_halves_that_contradict_each_other_say_nothing() -> None:
    text = matrix("_ GPU0 GPU1 GPU2", "GPU0 X NV4 PIX", "GPU1 SYS X SYS", "GPU2 PIX SYS X").replace("_", "")
    topology = parse_topology(text)
    assert topology is not None
    assert (topology.link(0, 1), topology.link(0, 2), topology.nvlink_sets) == (None, "PIX", ())


def test_cards_that_are_not_known_are_left_out() -> None:
    topology = parse_topology(RECORDED, {0, 1, 5})
    assert topology is not None
    assert set(topology.links) == {(0, 1), (0, 5), (1, 5)} and set(topology.nearest_nic) == {0, 1, 5}


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML: Unknown Error\n", "GPU0", "\tGPU0\nGPU0\t X \n"])
def test_a_text_without_a_pair_or_an_adapter_is_no_topology(text: str) -> None:
    assert parse_topology(text) is None


MARKS = st.sampled_from(["\t", "\n", "GPU0", "GPU1", "NIC0", " X ", "NV18", "SYS", "PIX", "NIC0: a", "\x1b[4m", "NV"])


@given(st.lists(MARKS | st.text(max_size=6)).map("".join))
def test_no_text_raises_or_links_a_card_to_itself(text: str) -> None:
    topology = parse_topology(text)
    if topology is not None:
        assert all(a < b for a, b in topology.links)
        assert topology.links or topology.nearest_nic


@given(st.integers(0, len(RECORDED)), st.integers(0, 400))
def test_a_matrix_that_was_cut_never_says_another_link(start: int, length: int) -> None:
    topology = parse_topology(RECORDED[:start] + RECORDED[start + length :])
    if topology is not None and "NV1" not in RECORDED[start : start + length]:
        assert set(topology.links.values()) <= {"NV18", "PIX", "NODE", "SYS"}


# -- PCI paths ------------------------------------------------------------------------------------------------

ROOT, SWITCH = ("pci0000:00", "0000:00:01.0"), "0000:01:00.0"
SAME_SWITCH = [PciPlace(0, (*ROOT, SWITCH, f"0000:02:0{n}.0", f"0000:{n + 3:02x}:00.0")) for n in range(2)]
BELOW_ANOTHER = PciPlace(0, (*ROOT, SWITCH, "0000:02:05.0", "0000:08:00.0", "0000:09:00.0", "0000:0a:00.0"))
SAME_BRIDGE = PciPlace(0, ("pci0000:00", "0000:00:02.0", "0000:20:00.0"))
OTHER_BRIDGE = PciPlace(0, ("pci0000:40", "0000:40:01.0", "0000:41:00.0"))
OTHER_NODE = PciPlace(1, ("pci0000:80", "0000:80:01.0", "0000:81:00.0"))
UNKNOWN = PciPlace(None, ())


@pytest.mark.parametrize(
    ("other", "link"),
    [
        (SAME_SWITCH[1], "PIX"),
        (BELOW_ANOTHER, "PXB"),
        (SAME_BRIDGE, "PHB"),
        (OTHER_BRIDGE, "NODE"),
        (OTHER_NODE, "SYS"),
        (PciPlace(None, OTHER_NODE.path), None),
        (UNKNOWN, None),
    ],
)
def test_bridges_in_common_say_how_near_two_devices_are(other: PciPlace, link: str | None) -> None:
    topology = nearness({0: SAME_SWITCH[0], 1: other}, {})
    assert (topology.link(0, 1) if topology is not None else None) == link


def test_the_nearest_adapter_is_the_first_of_those_with_the_shortest_way() -> None:
    nics = {"mlx5_1": OTHER_NODE, "mlx5_2": SAME_SWITCH[1], "mlx5_10": SAME_SWITCH[1], "rxe0": UNKNOWN}
    topology = nearness({0: SAME_SWITCH[0], 1: OTHER_NODE, 2: UNKNOWN}, nics)
    assert topology is not None
    assert (topology.nearest_nic, topology.source) == ({0: "mlx5_2", 1: "mlx5_1"}, "sysfs")
