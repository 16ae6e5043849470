"""`llmgw init`: a first configuration for the hardware of this machine."""

from __future__ import annotations

import os
import sys

from llmgw.cli.errors import DONE, FAILED, CommandError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw init [PATH] [--print]"
DETAILS = """\
Writes a commented llmgw.toml for the GPUs, MIG slices and engines that are found here, also for none. An existing file
is never written over. Which model to run is left to you: the shards in it are examples to fill in.

Exit code: 0; 1 when the file exists or cannot be written.

examples:
  llmgw init
  llmgw init --print | less
"""
DEFAULT = "llmgw.toml"
ENGINES = ("vllm", "sglang", "llama-server")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", default=DEFAULT, metavar="PATH", help=f"the file to write ({DEFAULT})")
    parser.add_argument("--print", action="store_true", dest="show", help="to standard output, and write nothing")


def run(args: argparse.Namespace) -> int:
    if not args.show and os.path.lexists(args.path):
        raise CommandError(
            FAILED, f"cannot write {args.path}: it exists", "name another file, or see what it would be: --print"
        )
    text = text_for_this_machine()
    if args.show:
        sys.stdout.write(text)
        return DONE
    write_new(args.path, text)
    if not args.quiet:
        print(f"wrote {args.path}\nnext: fill in a shard, then\n  llmgw check {args.path}\n  llmgw run {args.path}")
    return DONE


def text_for_this_machine() -> str:
    import shutil

    from llmgw.cli.inventory import look_at
    from llmgw.config.starter import Found, starter
    from llmgw.supervisor.node_look import NodeSettings, Sources
    from llmgw.supervisor.ownership import Records

    facts = look_at(Sources.of_this_host(), NodeSettings("here"), 20.0, Records(()))
    engines = {name: path for name in ENGINES if (path := shutil.which(name)) is not None}
    return starter(Found(facts.inventory, engines, facts.node.host.memory_total))


def write_new(path: str, text: str) -> None:
    """Whole or not at all, and never over another file. Raises CommandError."""
    scratch = f"{path}.{os.getpid()}.new"
    try:
        with open(scratch, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # It holds no secret, and whoever checks it may be another user than the service.
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        try:
            # Unlike a rename this fails where somebody was faster.
            os.link(scratch, path)
        finally:
            os.unlink(scratch)
    except FileExistsError as error:
        raise CommandError(FAILED, f"cannot write {path}: it exists", "name another file") from error
    except OSError as error:
        if os.path.exists(scratch):
            os.unlink(scratch)
        raise CommandError(FAILED, f"cannot write {path}: {error.strerror or error}") from error
