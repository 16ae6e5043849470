"""`llmgw install-systemd`, below a root directory of the test's own."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

import pytest

from llmgw.cli import install_systemd
from llmgw.cli.errors import CommandError

UNIT = "etc/systemd/system/llmgw.service"


def arguments(root: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-c", "--config", default=None)
    install_systemd.configure(parser)
    return parser.parse_args(["--root", str(root), "--prefix", "/opt/llmgw", *words])


def test_it_writes_unit_user_and_directories(tmp_path: Path) -> None:
    assert install_systemd.run(arguments(tmp_path)) == 0
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert written == [UNIT, "etc/sysusers.d/llmgw.conf", "etc/tmpfiles.d/llmgw.conf"]
    assert (tmp_path / UNIT).stat().st_mode & 0o777 == 0o644


def test_the_unit_starts_the_program_of_the_prefix(tmp_path: Path) -> None:
    install_systemd.run(arguments(tmp_path, "--prefix", "/srv/llmgw-1", "--config", "/etc/x.toml"))
    text = (tmp_path / UNIT).read_text()
    assert "ExecStart=/srv/llmgw-1/bin/llmgw run /etc/x.toml\n" in text
    assert "/opt/llmgw/bin" not in text


def test_a_dry_run_prints_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert install_systemd.run(arguments(tmp_path, "--dry-run", "--with-socket")) == 0
    printed = capsys.readouterr().out
    assert "KillMode=process" in printed
    assert "ListenStream=/run/llmgw/control.sock" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_systemd.run(arguments(tmp_path))
    capsys.readouterr()
    install_systemd.run(arguments(tmp_path))
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"keep"}


def test_an_untouched_older_file_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_systemd.run(arguments(tmp_path, "--prefix", "/opt/older"))
    install_systemd.run(arguments(tmp_path))
    assert f"replace {tmp_path / UNIT}" in capsys.readouterr().out
    assert "/opt/older" not in (tmp_path / UNIT).read_text()


def test_a_file_changed_by_hand_refuses_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_systemd.run(arguments(tmp_path))
    unit = tmp_path / UNIT
    unit.write_text(unit.read_text().replace("RestartSec=2", "RestartSec=9"))
    (tmp_path / "etc/sysusers.d/llmgw.conf").unlink()
    with pytest.raises(CommandError, match="changed by hand; nothing was written"):
        install_systemd.run(arguments(tmp_path))
    assert "-RestartSec=9" in capsys.readouterr().err
    assert "RestartSec=9" in unit.read_text()
    assert not (tmp_path / "etc/sysusers.d/llmgw.conf").exists()


def test_a_file_of_somebody_else_counts_as_changed(tmp_path: Path) -> None:
    unit = tmp_path / UNIT
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    with pytest.raises(CommandError, match="changed by hand"):
        install_systemd.run(arguments(tmp_path))


def test_overwrite_keeps_the_old_file(tmp_path: Path) -> None:
    install_systemd.run(arguments(tmp_path))
    unit = tmp_path / UNIT
    mine = unit.read_text() + "# mine\n"
    unit.write_text(mine)
    assert install_systemd.run(arguments(tmp_path, "--overwrite")) == 0
    assert Path(f"{unit}.old").read_text() == mine
    assert "# mine" not in unit.read_text()


def test_only_groups_that_exist_are_named() -> None:
    texts = install_systemd.shipped()
    files = dict(
        install_systemd.wanted_files(
            texts, program="/opt/llmgw/bin/llmgw", config="/etc/llmgw/llmgw.toml", groups=["video"], with_socket=False
        )
    )
    drop_in = files["/etc/systemd/system/llmgw.service.d/50-device-groups.conf"]
    assert "SupplementaryGroups=video\n" in drop_in
    without = install_systemd.wanted_files(texts, program="/a", config="/b", groups=[], with_socket=False)
    assert not any("groups" in path for path, _ in without)


@pytest.mark.parametrize("prefix", ["/opt/my llmgw", "/opt/100%", "/opt/$x", '/opt/"x"'])
def test_a_path_that_would_need_quoting_is_refused(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(CommandError, match="would need quoting"):
        install_systemd.run(arguments(tmp_path, "--prefix", prefix))
    assert list(tmp_path.iterdir()) == []


def test_without_root_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.root = None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CommandError, match="only root may") as caught:
        install_systemd.run(args)
    assert caught.value.hint is not None
    assert "sudo /opt/llmgw/bin/llmgw install-systemd" in caught.value.hint


def test_a_missing_program_is_warned_about(tmp_path: Path) -> None:
    assert "does not exist" in next(iter(install_systemd.warnings_of(str(tmp_path / "llmgw"))))


def test_an_environment_closed_to_others_is_warned_about(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    program = folder / "llmgw"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert f"{tmp_path}" in next(iter(install_systemd.warnings_of(str(program))))


def test_a_program_of_systemd_that_fails_is_named() -> None:
    with pytest.raises(CommandError, match="false failed"):
        install_systemd.run_command(["false"])
    with pytest.raises(CommandError, match="not installed"):
        install_systemd.run_command(["no-such-program-of-systemd"])
    with pytest.raises(CommandError, match="slow failed"):
        install_systemd.run_command(["slow"], _too_slow)


def _too_slow(command: list[str], **_: object) -> None:
    raise subprocess.TimeoutExpired(command, 60)
