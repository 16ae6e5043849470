"""Folders of weights as they lie on disk: finished, cut short, hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llmgw.config import model_files
from llmgw.config.model_files import read_config, read_folder, read_gguf


def index(folder: Path, *names: str) -> None:
    weights = {f"layer.{at}": name for at, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def test_files_that_an_index_names_and_that_are_not_there_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"x" * 10)
    index(tmp_path, "a.safetensors", "b.safetensors", "below/c.safetensors", "/etc/passwd", "../d")
    folder = read_folder(str(tmp_path), {})
    assert (folder.listed, folder.missing) == (3, ("b.safetensors", "below/c.safetensors"))
    assert (folder.config, folder.weight_bytes, folder.tokenizer) == ("read", 10, True)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "c.safetensors").write_bytes(b"")
    assert read_folder(str(tmp_path), {}).missing == ("b.safetensors",)


def test_an_index_without_end_asks_the_disk_a_bounded_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "FILES_MAX", 20)
    index(tmp_path, *(f"below/{at}.safetensors" for at in range(500)))
    folder = read_folder(str(tmp_path), {})
    # What was not asked for is not called missing.
    assert (folder.listed, len(folder.missing)) == (500, 20)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    assert read_config(str(tmp_path)) is None
    assert read_folder(str(tmp_path), None).config == "unreadable"


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_settings_that_are_no_settings_are_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    assert read_config(str(tmp_path)) is None


def test_a_format_that_stands_in_a_file_of_its_own_is_read_with_the_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 8}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    found = read_config(str(tmp_path))
    assert found == {
        "num_attention_heads": 8,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    }


def test_parts_of_a_split_model_are_looked_for_beside_it(tmp_path: Path) -> None:
    for part in (1, 3):
        (tmp_path / f"m-0000{part}-of-00003.gguf").write_bytes(b"GGUF\x03")
    first = read_gguf(str(tmp_path / "m-00001-of-00003.gguf"))
    assert (first.is_gguf, first.is_first, first.missing) == (True, True, ("m-00002-of-00003.gguf",))
    assert not read_gguf(str(tmp_path / "m-00003-of-00003.gguf")).is_first
    (tmp_path / "m.gguf").write_bytes(b"PK")
    assert not read_gguf(str(tmp_path / "m.gguf")).is_gguf
