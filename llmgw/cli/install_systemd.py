"""`llmgw install-systemd`: unit, user and directories for a server.

Everything is decided before anything is written: a file that somebody changed refuses the whole run. To know it, each
file starts with a line that holds the digest of the rest; a file whose digest fits is one of ours, untouched, and is
replaced by a newer one without a question.
"""

from __future__ import annotations

import difflib
import grp
import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

from llmgw import __version__
from llmgw.cli.errors import DONE, FAILED, CommandError
from llmgw.cli.errors import USAGE as WRONG_LINE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

USAGE = "llmgw install-systemd [--dry-run] [--prefix DIR] [--with-socket] [--overwrite] [--root DIR]"
DETAILS = """\
Writes the unit, the user llmgw, /etc/llmgw, and a drop-in for the groups of the graphics devices where they exist.
It starts nothing. A file that was changed by hand is shown and left alone.

examples:
  llmgw install-systemd --dry-run
  sudo /opt/llmgw/bin/llmgw install-systemd
"""

SHIPPED_PREFIX = "/opt/llmgw"
"""Where the shipped unit expects the virtual environment."""

SHIPPED_CONFIG = "/etc/llmgw/llmgw.toml"

DEVICE_GROUPS = ("video", "render")
"""Groups that own the device files of AMD cards, and of NVIDIA ones on hosts with strict permissions."""

_SAFE_PATH = re.compile(r"/[A-Za-z0-9._+@/-]*\Z")
"""A path that needs no quoting in ExecStart=: no blank, no `%`, `$`, quote or backslash."""

_MARK = re.compile(r"# Written by llmgw \S+ install-systemd, digest ([0-9a-f]{64})\. .*\n")


class InstalledFile:
    """A file to be written: where, the text without its first line, and what stands there now."""

    __slots__ = ("body", "path", "present")

    def __init__(self, path: Path, body: str, present: str | None) -> None:
        self.path = path
        self.body = body
        self.present = present

    @property
    def text(self) -> str:
        digest = hashlib.sha256(self.body.encode()).hexdigest()
        return (
            f"# Written by llmgw {__version__} install-systemd, digest {digest}. "
            f"Put changes into a drop-in or use --overwrite.\n{self.body}"
        )

    @property
    def is_current(self) -> bool:
        """The same but for the version in the first line."""
        return self.present is not None and not self.is_changed and _MARK.sub("", self.present, count=1) == self.body

    @property
    def is_changed(self) -> bool:
        """Somebody else wrote what stands there."""
        if self.present is None:
            return False
        mark = _MARK.match(self.present)
        return mark is None or hashlib.sha256(self.present[mark.end() :].encode()).hexdigest() != mark[1]

    def difference(self) -> str:
        old = (self.present or "").splitlines(keepends=True)
        return "".join(difflib.unified_diff(old, self.text.splitlines(keepends=True), str(self.path), "llmgw's"))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print what would be written and run")
    parser.add_argument(
        "--prefix",
        metavar="DIR",
        help="the virtual environment whose bin/llmgw the unit starts; else that of this llmgw",
    )
    parser.add_argument("--with-socket", action="store_true", help="also llmgw.socket: clients wait during a restart")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files changed by hand; keeps them as NAME.old"
    )
    parser.add_argument(
        "--root", metavar="DIR", help="write below DIR, for an image or a package; runs no systemd program"
    )


def run(args: argparse.Namespace) -> int:
    prefix = args.prefix or sys.prefix
    program = os.path.join(os.path.abspath(prefix), "bin", "llmgw")
    config = os.path.abspath(args.config) if args.config else SHIPPED_CONFIG
    root = Path(args.root) if args.root else Path("/")
    groups = [] if args.root else [name for name in DEVICE_GROUPS if _group_exists(name)]
    wanted = wanted_files(shipped(), program=program, config=config, groups=groups, with_socket=args.with_socket)
    files = [InstalledFile(root / path.lstrip("/"), body, _read(root / path.lstrip("/"))) for path, body in wanted]
    commands = () if args.root else tuple(commands_after())

    if args.dry_run:
        _print_plan(files, commands)
        for warning in () if args.root else warnings_of(program):
            print(f"warning: {warning}", file=sys.stderr)
        return DONE
    if not args.root and os.geteuid() != 0:
        again = f"sudo {program} install-systemd"
        raise CommandError(
            FAILED, "cannot install the unit: only root may write /etc", f"{again}\nto see what it does: --dry-run"
        )
    if not args.root and shutil.which("systemctl") is None:
        raise CommandError(
            FAILED, "cannot install the unit: no systemctl here", "run it in the foreground: llmgw run llmgw.toml"
        )
    changed = [file for file in files if file.is_changed]
    if changed and not args.overwrite:
        for file in changed:
            print(file.difference(), file=sys.stderr, end="")
        names = ", ".join(str(file.path) for file in changed)
        raise CommandError(
            FAILED,
            f"cannot write {names}: changed by hand; nothing was written",
            "move your changes into a drop-in (systemctl edit llmgw), then: llmgw install-systemd --overwrite",
        )
    for file in files:
        print(f"{write(file)} {file.path}")
    for command in commands:
        print("run", " ".join(command))
        sys.stdout.flush()
        run_command(command)
    if not args.root:
        for warning in warnings_of(program):
            print(f"warning: {warning}", file=sys.stderr)
        print(next_steps(config, with_socket=args.with_socket), end="")
    return DONE


def shipped() -> Mapping[str, str]:
    """The files of contrib/systemd: inside the installed package, or beside it in a checkout."""
    packaged = resources.files("llmgw") / "contrib" / "systemd"
    checkout = Path(__file__).resolve().parents[2] / "contrib" / "systemd"
    folder = packaged if packaged.is_dir() else checkout
    names = ("llmgw.service", "llmgw.socket", "llmgw.sysusers", "llmgw.tmpfiles", "drop-ins/device-groups.conf")
    try:
        return {name: folder.joinpath(*name.split("/")).read_text("utf-8") for name in names}
    except OSError as error:
        raise CommandError(
            FAILED,
            f"cannot find the unit that llmgw ships: {error}",
            "install llmgw anew: this installation is incomplete",
        ) from error


def wanted_files(
    texts: Mapping[str, str], *, program: str, config: str, groups: Sequence[str], with_socket: bool
) -> list[tuple[str, str]]:
    """(path, text) of everything to be written, in the order in which it is safe to write it."""
    for what, path in (("program", program), ("configuration", config)):
        if not _SAFE_PATH.match(path):
            raise CommandError(
                WRONG_LINE,
                f"cannot write the {what} {path!r} into a unit: it has characters that would need quoting",
                "use a path of letters, digits and ._+@-/ only",
            )
    service = texts["llmgw.service"]
    service = service.replace(f"{SHIPPED_PREFIX}/bin/llmgw", program).replace(SHIPPED_CONFIG, config)
    files = [
        ("/etc/sysusers.d/llmgw.conf", texts["llmgw.sysusers"]),
        ("/etc/tmpfiles.d/llmgw.conf", texts["llmgw.tmpfiles"]),
        ("/etc/systemd/system/llmgw.service", service),
    ]
    if groups:
        listed = " ".join(groups)
        text = re.sub(
            r"(?m)^SupplementaryGroups=.*$", f"SupplementaryGroups={listed}", texts["drop-ins/device-groups.conf"]
        )
        files.append(("/etc/systemd/system/llmgw.service.d/50-device-groups.conf", text))
    if with_socket:
        files.append(("/etc/systemd/system/llmgw.socket", texts["llmgw.socket"]))
    return files


def commands_after() -> Iterable[tuple[str, ...]]:
    """What makes the written files count. Nothing is enabled or started."""
    yield ("systemd-sysusers", "llmgw.conf")
    yield ("systemd-tmpfiles", "--create", "llmgw.conf")
    yield ("systemctl", "daemon-reload")


def next_steps(config: str, *, with_socket: bool) -> str:
    units = "llmgw.socket llmgw" if with_socket else "llmgw"
    return (
        f"next:\n  write {config} (owner root), then: llmgw check {config}\n"
        f"  systemctl enable --now {units}\n"
        "  llmgw status   (whoever is in the group llmgw may: usermod -aG llmgw NAME)\n"
    )


def write(file: InstalledFile) -> str:
    """Write one file atomically, mode 0644; says in a word what was done."""
    if file.is_current:
        return "keep"
    file.path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    if file.is_changed:
        shutil.copy2(file.path, f"{file.path}.old")
    # No name that systemd reads, and in the same directory, so that the rename is atomic.
    temporary = file.path.with_name(f".{file.path.name}.new")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            os.fchmod(stream.fileno(), 0o644)
            stream.write(file.text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file.path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CommandError(FAILED, f"cannot write {file.path}: {error.strerror}") from error
    return "write" if file.present is None else "replace"


def run_command(command: Sequence[str], execute: Callable[..., object] = subprocess.run) -> None:
    """Run one of systemd's programs, its output passed through."""
    try:
        execute(command, check=True, timeout=60, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise CommandError(
            FAILED,
            f"cannot run {command[0]}: it is not installed",
            "it comes with systemd; install it and call this again",
        ) from error
    except subprocess.SubprocessError as error:
        raise CommandError(
            FAILED, f"cannot finish the installation: {' '.join(command)} failed", "cure that and call this again"
        ) from error


def warnings_of(program: str) -> Iterable[str]:
    """What will keep the unit from starting although it is installed."""
    if not os.access(program, os.X_OK):
        yield f"{program} does not exist or cannot be run: install llmgw there, or name its environment with --prefix"
        return
    # The interpreter behind the script counts too: one below /root (pyenv, uv) is closed to the user llmgw.
    for path in dict.fromkeys(
        (Path(program), Path(os.path.realpath(os.path.join(os.path.dirname(program), "python"))))
    ):
        closed = next(
            (folder for folder in path.parents if folder.exists() and not folder.stat().st_mode & 0o001), None
        )
        if closed is not None:
            yield (
                f"the user llmgw cannot reach {path}: {closed} is closed to others. Put the environment and its "
                "Python somewhere public, for example /opt/llmgw"
            )


def _print_plan(files: Sequence[InstalledFile], commands: Sequence[Sequence[str]]) -> None:
    for file in files:
        if file.is_current:
            print(f"# {file.path}: is there already")
        elif file.is_changed:
            print(f"# {file.path}: changed by hand, would be refused without --overwrite")
            print(file.difference())
        else:
            print(f"# {file.path}: would be {'written' if file.present is None else 'replaced'}")
            print(file.text)
    for command in commands:
        print("# run:", " ".join(command))


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommandError(FAILED, f"cannot read {path}: {error.strerror}") from error


def _group_exists(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True
