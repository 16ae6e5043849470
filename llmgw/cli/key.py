"""`llmgw key new`: a key for a tenant or an operator, and the hash of it that the file needs."""

from __future__ import annotations

from llmgw.cli.errors import DONE, FAILED, CommandError
from llmgw.cli.errors import USAGE as WRONG_LINE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

USAGE = "llmgw key (new | hash) [--tenant NAME | --operator] [--out FILE] [--json]"
DETAILS = """\
`new` makes a key, shows it this once, and with it the lines for llmgw.toml: only the hash stands there, so the file
need not be kept secret for its sake. `hash` reads a key from standard input and prints its hash alone. A key is never
taken from the command line, where others could read it.

examples:
  llmgw key new --tenant research
  llmgw key new --operator --out ~/operator.key
  llmgw key hash < old.key
"""

PREFIX = "sk-llmgw-"
"""So that a key in a log or a repository is known for what it is, by people and by scanners."""

KEY_BYTES = 32

KEY_MAX = 4096
"""Bytes of a key that are read; a header could not carry more of use."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["new", "hash"], metavar="ACTION", help="new or hash")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--tenant", metavar="NAME", help="print the table of this tenant")
    whose.add_argument("--operator", action="store_true", help="print the line for operators' pages")
    parser.add_argument("--out", metavar="FILE", help="write the key there (0600) instead of showing it")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    import hashlib
    import json

    if args.action == "hash":
        if args.out is not None:
            raise CommandError(WRONG_LINE, "cannot write a key with `key hash`: it makes none", "leave out --out")
        key = read_key()
    else:
        key = new_key()
        if args.out is not None:
            write_key(args.out, key)
    digest = hashlib.sha256(key.encode()).hexdigest()
    lines = toml_lines(digest, tenant=args.tenant, operator=args.operator)
    is_shown = args.action == "new" and args.out is None
    if args.json:
        answer = {"api": 1, "sha256": digest, "toml": "\n".join(lines)}
        print(json.dumps({**answer, "key": key} if is_shown else answer))
        return DONE
    if is_shown:
        print(f"{key}\n\nThis key is not kept anywhere: hand it on now. In llmgw.toml:\n")
    elif args.action == "new":
        print(f"The key is in {args.out}. In llmgw.toml:\n")
    print("\n".join(lines))
    return DONE


def new_key() -> str:
    import secrets

    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def read_key() -> str:
    """A key from standard input, without the end of its line."""
    import sys

    data = sys.stdin.buffer.read(KEY_MAX + 1)
    text = data.decode("utf-8", "replace").strip()
    if not text or len(data) > KEY_MAX or not text.isascii() or any(c.isspace() for c in text):
        raise CommandError(
            FAILED,
            "cannot hash what came on standard input: a key is one word of printable ASCII characters",
            "llmgw key hash < FILE",
        )
    return text


def write_key(path: str, key: str) -> None:
    """Never over a file that is there."""
    import os

    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        hint = "name another file; keys are not written over each other"
        raise CommandError(FAILED, f"cannot write the key to {path}: a file is there already", hint) from error
    except OSError as error:
        raise CommandError(FAILED, f"cannot write the key to {path}: {error.strerror}") from error
    try:
        with os.fdopen(fd, "w") as file:
            file.write(key + "\n")
    except OSError as error:
        os.unlink(path)
        raise CommandError(FAILED, f"cannot write the key to {path}: {error.strerror}") from error


def toml_lines(digest: str, *, tenant: str | None, operator: bool) -> list[str]:
    """What the file needs to know the key by."""
    from llmgw.config.toml_text import assignment

    form = {"sha256": digest}
    if tenant is not None:
        return ["[[gateway.tenant]]", assignment("name", tenant), assignment("keys", [form])]
    if operator:
        return ["[gateway]", assignment("operator_keys", [form])]
    return [assignment("keys", [form])]
