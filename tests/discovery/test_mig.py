"""MIG slices out of `-L` and `-q -x`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.mig import XML_MAX, memory_of, parse_list, with_memory
from llmgw.domain.hardware import Gpu, MigInstance

CASE = Path(__file__).parent / "data" / "gpu" / "h100-mig"
LIST = (CASE / "list.txt").read_text()
XML = (CASE / "query.xml").read_text()
ADDRESS = "00000000:00:09.0"


def card(index: int = 0, uuid: str = "GPU-42cc45f1-484d-e27c-84f7-2187ad5c7644", bus_id: str = ADDRESS) -> Gpu:
    return Gpu(index, uuid, bus_id, "NVIDIA H100 80GB HBM3", 81559, 59, 81022, (9, 0), mig_enabled=True)


def test_slices_stand_under_their_card_and_have_a_class_of_their_own() -> None:
    slices = parse_list(LIST, [card()])
    assert slices is not None
    assert [(one.parent_index, one.device, one.gpu_class, one.memory_total) for one in slices] == [
        (0, 0, "h100-mig-3g.40gb", None),
        (0, 1, "h100-mig-2g.20gb", None),
        (0, 2, "h100-mig-1g.10gb", None),
        (0, 3, "h100-mig-1g.10gb", None),
    ]
    sized = with_memory(slices, memory_of(XML), [card()])
    assert [one.memory_total for one in sized] == [40448, 20096, 9984, 9984]


def test_the_uuids_of_old_drivers_are_kept_as_they_are() -> None:
    text = "GPU 0: A100-SXM4-40GB (UUID: GPU-5d)\n  MIG 3g.20gb Device 0: (UUID: MIG-GPU-5d/1/0)\n"
    slices = parse_list(text, [card(uuid="GPU-5d")])
    assert slices is not None and [one.uuid for one in slices] == ["MIG-GPU-5d/1/0"]


def test_memory_is_never_taken_from_the_profiles_name() -> None:
    slices = parse_list(LIST, [card()])
    assert slices is not None
    assert {one.memory_total for one in with_memory(slices, {}, [card()])} == {None}


@pytest.mark.parametrize(
    "text",
    [
        "GPU 0: Z (UUID: GPU-other)\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\n",
        "GPU 3: Z (UUID: GPU-42cc45f1-484d-e27c-84f7-2187ad5c7644)\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\n",
        "GPU 0: Z (UUID: GPU-42cc45f1-484d-e27c-84f7-2187ad5c7644)\nerror\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\n",
    ],
)
def test_a_slice_of_a_card_that_is_not_known_is_no_slice(text: str) -> None:
    assert parse_list(text, [card()]) == ()


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML: Unknown Error\n", "\x00", "  MIG 1g.10gb Device 0:"])
def test_a_text_that_lists_no_card_is_no_answer(text: str) -> None:
    assert parse_list(text, [card()]) is None


def test_of_a_document_that_was_cut_the_whole_entries_count() -> None:
    third = XML.index("<index>2</index>")
    assert memory_of(XML[:third]) == {(ADDRESS, 0): 40448, (ADDRESS, 1): 20096}


def test_a_notice_before_the_document_does_no_harm() -> None:
    notice = "Unable to determine the device handle for GPU3: 0000:04:00.0: Unknown Error\n"
    assert len(memory_of(notice + XML)) == 4


def test_a_size_that_is_no_number_is_unknown() -> None:
    assert memory_of(XML.replace("40448 MiB", "[N/A]"))[ADDRESS, 0] is None


def test_a_document_that_defines_entities_is_refused() -> None:
    laughs = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10 if n else "ha" * 10}">' for n in range(12))
    bomb = f'<?xml version="1.0"?><!DOCTYPE x [{laughs}]><x>&l11;</x>'
    assert memory_of(bomb) == {}
    outside = XML.replace(
        '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">',
        '<!DOCTYPE nvidia_smi_log [<!ENTITY e SYSTEM "file:///etc/passwd">]>',
    )
    assert memory_of(outside) == {}


def test_a_document_as_deep_as_a_well_is_refused() -> None:
    assert memory_of("<a>" * 100_000) == {}


def test_a_node_with_all_cards_in_slices_is_read_whole() -> None:
    padding = "\t\t<clocks><graphics_clock>345 MHz</graphics_clock></clocks>\n" * 600
    devices = "".join(
        f"<mig_device><index>{n}</index><fb_memory_usage><total>9984 MiB</total></fb_memory_usage></mig_device>"
        for n in range(7)
    )
    cards = "".join(
        f'<gpu id="00000000:{n:02X}:00.0"><mig_devices>{devices}</mig_devices>{padding}</gpu>\n' for n in range(16)
    )
    text = f"<nvidia_smi_log>\n{cards}</nvidia_smi_log>"
    assert 500_000 < len(text) < XML_MAX
    found = memory_of(text)
    assert len(found) == 16 * 7 and set(found.values()) == {9984}


MARKS = st.sampled_from(["GPU 0: ", "MIG 1g.10gb", " Device 0: ", "(UUID: MIG-", "(UUID: GPU-", ")", "\n", "  ", "7"])


@given(st.lists(MARKS | st.text(max_size=8)).map("".join))
def test_no_list_raises_or_gives_one_slice_twice(text: str) -> None:
    slices = parse_list(text, [card()]) or ()
    assert len({one.uuid for one in slices}) == len(slices)
    assert all(one.memory_total is None and one.uuid.startswith("MIG-") for one in slices)


NAMES = ("nvidia_smi_log", "mig_device", "index", "fb_memory_usage", "total")
TAGS = st.sampled_from(
    [f'<gpu id="{ADDRESS}">', "</gpu>", *(f"<{name}>" for name in NAMES), *(f"</{name}>" for name in NAMES)]
) | st.sampled_from(["0", "12 MiB", "[N/A]", "<!--", "&amp;", "&x;"])


@given(st.lists(TAGS | st.text(max_size=4), max_size=40).map("".join))
def test_no_document_raises_and_no_size_comes_from_nothing(text: str) -> None:
    found = memory_of(text)
    assert all(size is None or str(size) in text for size in found.values())
    slices = [MigInstance(0, device, f"MIG-{device}", "p", "c", None) for _, device in found]
    assert len(with_memory(slices, found, [card()])) == len(slices)


@given(st.integers(0, len(XML)), st.text(max_size=20))
def test_a_document_with_garbage_in_it_never_gives_a_wrong_size(at: int, garbage: str) -> None:
    right = memory_of(XML)
    found = memory_of(XML[:at] + garbage + XML[at:])
    if not any(character.isdigit() or character in "<>&" for character in garbage):
        for key, size in found.items():
            if key in right:
                assert size in (right[key], None)
