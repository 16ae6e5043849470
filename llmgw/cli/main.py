"""The command line: finds the verb, imports its module alone, and turns every ending into an exit code."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module

from llmgw.cli.errors import FAILED, INTERRUPTED, PIPE_CLOSED, CommandError, error_text
from llmgw.cli.errors import USAGE as WRONG_LINE
from llmgw.cli.screen import prepare_streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import NoReturn


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Verb:
    """A word of the command line and the module behind it (`configure(parser)`, `run(args)`)."""

    __slots__ = ("aliases", "module", "name", "summary")

    def __init__(self, name: str, summary: str, *, module: str | None = None, aliases: tuple[str, ...] = ()) -> None:
        self.name = name
        self.summary = summary
        self.module = "llmgw.cli." + (module or name.replace("-", "_"))
        self.aliases = aliases


GROUPS: tuple[tuple[str, tuple[Verb, ...]], ...] = (
    (
        "the file",
        (
            Verb("check", "say everything that is wrong with the configuration", aliases=("validate",)),
            Verb("plan", "show what a reload would change, and the exact command lines"),
            Verb("config", "show the configuration as it is in force", module="config_show"),
            Verb("explain", "type, default and meaning of a key"),
        ),
    ),
    (
        "running",
        (
            Verb("run", "run the engines of the configuration, in the foreground"),
            Verb("demo", "run a real engine with a small real model, and ask it one question"),
            Verb("reload", "read the configuration again; with an error in it nothing changes"),
            Verb("upgrade", "put the installed llmgw in place of the running one; engines run on"),
            Verb("install-systemd", "install the systemd unit"),
            Verb("sweep", "end engines that an llmgw has left running"),
        ),
    ),
    (
        "shards",
        (
            Verb("status", "what every shard is doing, and why one has failed", aliases=("ps",)),
            Verb("top", "shards, GPUs, queues and tenants as they are now, redrawn"),
            Verb("logs", "output of an engine"),
            Verb("start", "start shards"),
            Verb("stop", "stop shards: finish requests, then end the engine"),
            Verb("restart", "stop shards and start them again"),
            Verb("drain", "give shards no new work, but keep them loaded"),
            Verb("load", "load shards now, as a request would"),
            Verb("unload", "free the GPUs of shards; the next request loads them again"),
            Verb("sleep", "put engines into their own sleep mode; a request wakes them"),
            Verb("wake", "wake engines that sleep"),
            Verb("wait", "wait until shards are ready or stopped"),
            Verb("events", "what happened, and who asked for it"),
        ),
    ),
    (
        "hardware",
        (
            Verb("inventory", "GPUs and adapters of this node, and who holds them"),
            Verb("doctor", "what is wrong with this machine, and how to mend it"),
            Verb("init", "write a configuration for the hardware of this machine"),
            Verb("gpu", "give a GPU out again whose memory did not come back"),
        ),
    ),
    (
        "gateway",
        (Verb("key", "make a key for a tenant or an operator, and the hash for the file"),),
    ),
    (
        "other",
        (
            Verb("completion", "print the completion script of a shell"),
            Verb("version", "print the version"),
        ),
    ),
)

EPILOG = """\
exit codes:
  0 done   1 failed   2 wrong command line   3 not all shards ready   4 no such shard
  5 cannot reach the supervisor   6 time is up   78 configuration error   130 interrupted

llmgw VERB --help tells more about each.
"""


def verbs() -> Iterable[Verb]:
    return (verb for _, group in GROUPS for verb in group)


def find_verb(word: str) -> Verb | None:
    return next((verb for verb in verbs() if word == verb.name or word in verb.aliases), None)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help that reads the same on every Python: `-c, --config FILE`, 100 columns at most."""

    def __init__(self, prog: str) -> None:
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() and int(columns) > 40 else 100
        super().__init__(prog, max_help_position=26, width=min(width, 100))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, action.dest.upper())}"


class Parser(argparse.ArgumentParser):
    """Complains in the project's form."""

    def error(self, message: str) -> NoReturn:
        hint = f"see: {self.prog} --help"
        self.exit(WRONG_LINE, error_text(f"cannot read the command line: {message}", hint) + "\n")


def add_global_options(parser: argparse.ArgumentParser, *, inherit: bool) -> None:
    """Accepted before and after the verb; after it they must not put a default over what stood before it."""

    def default(value: object) -> object:
        return argparse.SUPPRESS if inherit else value

    group = parser.add_argument_group("global options")
    group.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        default=default(None),
        help="the configuration; else $LLMGW_CONFIG, ./llmgw.toml, /etc/llmgw/llmgw.toml",
    )
    group.add_argument(
        "-s",
        "--socket",
        metavar="PATH",
        default=default(None),
        help="the control socket; else $LLMGW_SOCKET, your own runtime directory, /run/llmgw",
    )
    group.add_argument("-q", "--quiet", action="store_true", default=default(False), help="errors only")
    group.add_argument("-v", "--verbose", action="store_true", default=default(False), help="more detail")
    group.add_argument(
        "--color", choices=("auto", "always", "never"), default=default("auto"), help="when to use colours"
    )


def top_parser() -> Parser:
    lines = ["Runs LLM engines on your own GPU servers from one file, and says what is wrong.", ""]
    for title, group in GROUPS:
        lines.append(f"{title}:")
        lines += [f"  {', '.join((verb.name, *verb.aliases)):<18}{verb.summary}" for verb in group]
        lines.append("")
    parser = Parser(
        prog="llmgw",
        usage="llmgw [global options] VERB ...",
        description="\n".join(lines).rstrip(),
        epilog=EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    add_global_options(parser, inherit=False)
    parser.add_argument("--version", action="store_true", help="print the version")
    return parser


def add_verb(
    subparsers: argparse._SubParsersAction[Parser],
    verb: Verb,
    module: ModuleType,
    *,
    with_global_options: bool = True,
) -> Parser:
    parser = subparsers.add_parser(
        verb.name,
        aliases=verb.aliases,
        usage=module.USAGE,
        description=verb.summary[0].upper() + verb.summary[1:] + ".",
        epilog=module.DETAILS,
        formatter_class=Formatter,
        allow_abbrev=False,
        help=verb.summary,
    )
    module.configure(parser)
    if with_global_options:
        add_global_options(parser, inherit=True)
    parser.set_defaults(run=module.run)
    return parser


def full_parser() -> Parser:
    """Every verb with every option: for completion scripts and the reference."""
    parser = top_parser()
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    for verb in verbs():
        add_verb(subparsers, verb, import_module(verb.module))
    return parser


def verb_in(words: Sequence[str]) -> str | None:
    """The first word that is neither a global option nor the value of one."""
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("-c", "--config", "-s", "--socket", "--color"):
            skip = True
        elif not word.startswith("-"):
            return word
    return None


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Options of the one verb that was called. Exits with 2 where the line cannot be read."""
    word = verb_in(words)
    parser = top_parser()
    if word is None:
        args = parser.parse_args(words)
        if args.version:
            args.run = import_module("llmgw.cli.version").run
            return args
        parser.print_help(sys.stderr)
        sys.exit(WRONG_LINE)
    verb = find_verb(word)
    if verb is None:
        import difflib

        near = difflib.get_close_matches(word, [name for verb in verbs() for name in (verb.name, *verb.aliases)], n=1)
        parser.error(f"no verb {word!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser, prog="llmgw")
    subparser = add_verb(subparsers, verb, import_module(verb.module))
    args, unknown = parser.parse_known_args(words)
    if unknown:
        subparser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; never raises for what a person or a pipe does."""
    try:
        prepare_streams()
        args = parse(sys.argv[1:] if argv is None else argv)
        run: Callable[[argparse.Namespace], int] = args.run
        code = run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has left (`| head`).
        _write_into_nothing()
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is not None or error.errno not in DISK_FULL:
            raise
        _write_into_nothing()
        return _told(f"cannot write the output: {error.strerror}", None, FAILED)
    except CommandError as error:
        return _told(error.message, error.hint, error.exit_code)
    except Exception as error:
        told = _known(error)
        if told is None:
            raise
        return told


def _known(error: Exception) -> int | None:
    """Failures with a text for people that come from below; looked up only where their module is loaded at all."""
    for module, name in (("llmgw.control.client", "ClientError"), ("llmgw.domain.problem", "LlmgwError")):
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            exit_code = getattr(error, "exit_code", FAILED)
            return _told(getattr(error, "message", str(error)), getattr(error, "hint", None), exit_code)
    return None


def _told(message: str, hint: str | None, exit_code: int) -> int:
    try:
        sys.stdout.flush()
        print(error_text(message, hint), file=sys.stderr)
    except BrokenPipeError:
        return PIPE_CLOSED
    except OSError:
        # A full disk behind it: the exit code still tells.
        _write_into_nothing()
    return exit_code


def _write_into_nothing() -> None:
    """The interpreter flushes its streams once more at its end, and would complain about what cannot be written."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError:
            os.dup2(nothing, number)
    os.close(nothing)


def entry() -> None:
    """The console script."""
    sys.exit(main())
