"""Is there a card at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.discovery.pci import has_nvidia_card


@pytest.mark.parametrize(
    ("vendor", "class_", "is_card"),
    [
        ("0x10de", "0x030000", True),
        ("0x10de", "0x030200", True),
        ("0x10de", "0x040300", False),
        ("0x10de", "0x068000", False),
        ("0x1002", "0x030000", False),
    ],
)
def test_a_card_is_a_display_device_of_nvidia_and_not_its_sound_or_its_switch(
    tmp_path: Path, vendor: str, class_: str, is_card: bool
) -> None:
    for name, texts in {"0000:00:00.0": ("0x8086", "0x060000"), "0000:17:00.0": (vendor, class_)}.items():
        (tmp_path / name).mkdir()
        for file, text in zip(("vendor", "class"), texts, strict=True):
            (tmp_path / name / file).write_text(text + "\n")
    (tmp_path / "0000:18:00.0").mkdir()
    assert has_nvidia_card(str(tmp_path)) is is_card


def test_without_sysfs_no_card_is_known(tmp_path: Path) -> None:
    assert not has_nvidia_card(str(tmp_path / "none"))
