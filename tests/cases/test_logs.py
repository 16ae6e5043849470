"""Whatever an engine writes, and whatever happens to its file: neither it nor llmgw nor a terminal is harmed."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.node import Node, is_alive
from tests.scripted import scripted

SERVE = "server.serve_forever()\n"


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def printing(node: Node, code: str, *, name: str = "a", more: str = "") -> str:
    """A shard that runs `code` with `out(bytes)` in a thread as soon as the file `go` is there, and is ready before."""
    body = (
        "def out(data):\n"
        "    while data:\n"
        "        data = data[os.write(1, data):]\n"
        "def work():\n"
        f"    while not os.path.exists({str(node.folder / 'go')!r}): time.sleep(0.01)\n"
        + "".join(f"    {line}\n" for line in code.splitlines())
        + "    out(b'\\nthe end of it\\n')\n"
        "threading.Thread(target=work, daemon=True).start()\n"
    )
    return scripted(node, body + SERVE, name=name, more=more)


def go(node: Node, name: str = "a") -> str:
    """Let it print; returns the tail when the end has come."""
    (node.folder / "go").touch()
    node.until(lambda: node.shard(name)["log"]["last"] == "the end of it", "all of it was read")
    return node.cli("logs", name, "-n", "100000").stdout


def on_terminal(node: Node, *words: str) -> bytes:
    """What a verb writes to a terminal of 200 columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "llmgw", "-s", str(node.socket), "-c", str(node.config), *words],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**node.env, "TERM": "xterm-256color", "COLUMNS": "200"},
    )
    os.close(theirs)
    seen = b""
    while select.select([ours], [], [], 30)[0]:
        try:
            data = os.read(ours, 65536)
        except OSError:
            break
        if not data:
            break
        seen += data
    os.close(ours)
    assert process.wait(30) == 0
    return seen


BYTES = {
    "NULs": "out(bytes(100_000))",
    "no UTF-8": "out(b'\\xff\\xfe\\xc3\\x28\\xf0\\x9f' * 20_000)",
    "a line of 50 MB": "out(b'x' * 50_000_000)",
    "half characters": "for byte in 'äöü€😀'.encode() * 200: out(bytes([byte]))",
    "carriage returns only": "for n in range(20_000): out(b'\\r%6d/20000' % n)",
    "empty lines": "out(b'\\n' * 300_000)",
    "all bytes": "out(bytes(range(256)) * 2000)",
    "random": "out(os.urandom(3_000_000))",
    "open strings": "out(b'\\x1b]0;' * 10_000 + b'\\x1bP' * 10_000 + b'\\x90\\x9d' * 10_000)",
    "surrogates": "out('\\ud800\\udfff'.encode('utf-8', 'surrogatepass') * 10_000)",
    "our own marker": "out(b'-- llmgw: launch 99 of a --\\n' * 1000)",
}


@pytest.mark.proof
@pytest.mark.parametrize("what", list(BYTES))
def test_no_bytes_of_an_engine_stop_it_or_llmgw(node: Node, what: str) -> None:
    node.write(printing(node, BYTES[what]))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    text = go(node)
    assert text.endswith("the end of it\n")
    shard = node.shard("a")
    assert (shard["state"], shard["pid"]) == ("ready", pid)
    # Bounded: a line of 8 KiB, a tail of 2000 lines, and llmgw itself.
    assert max(map(len, text.splitlines())) < 8192 * 6
    assert len(text.splitlines()) <= 2001
    assert psutil.Process(node.status()["pid"]).memory_info().rss < 250 << 20
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    # Whoever adopts it reads the same bytes again.
    node.kill()
    node.start()
    assert node.wait_state("a", "ready")["pid"] == pid
    assert node.cli("logs", "a").returncode == 0
    assert all(json.loads(line)["shard"] == "a" for line in node.cli("logs", "a", "--json").stdout.splitlines())


def test_nothing_that_an_engine_writes_commands_a_terminal(node: Node) -> None:
    attack = (
        "out(b'\\x1b[2J\\x1b[31mred\\x1b]0;owned\\x07\\x1b]52;c;cm0gLXJm\\x1b\\\\\\n')\n"
        "out(b'\\x1bP+q544e\\x1b\\\\\\x1b[6n\\x1b[5i\\x1bc\\n')\n"
        "out('\\x9b31mcsi \\u202ereversed\\u2066 \\u200bhidden\\n'.encode())\n"
        "out(b'over\\b\\b\\b\\bwritten\\x07\\x0e\\n')\n"
    )
    node.write(
        printing(node, attack + "out(b'RuntimeError: \\x1b[2Jbad \\x1b]0;owned\\x07news\\n'); os._exit(3)").replace(
            'engine = "command"', 'engine = "command"\nrestart = "no"'
        )
    )
    node.start()
    node.wait_state("a", "ready")
    (node.folder / "go").touch()
    failed = node.wait_state("a", "failed")
    assert "news" in failed["reason"]["cause"]
    ours = re.compile(rb"\x1b\[[0-9;]*m")
    for words in (["logs", "a"], ["logs", "--all"], ["logs", "a", "-t"], ["status"], ["events"]):
        seen = on_terminal(node, *words) if words != ["status"] else on_terminal_of_failed(node)
        bare = ours.sub(b"", seen).replace(b"\r\n", b"\n")
        assert b"owned" not in bare and b"\x1b" not in bare and b"\x07" not in bare and b"\x08" not in bare, seen
        assert "\u202e".encode() not in bare and b"\xc2\x9b" not in bare
    # Nor by way of llmgw's own log, which stands in a terminal too.
    assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", node.output.read_bytes())


def on_terminal_of_failed(node: Node) -> bytes:
    """`status` ends with 1 for a failed shard, which the shell in between forgets."""
    words = [sys.executable, "-m", "llmgw", "-s", str(node.socket), "status"]
    line = " ".join(words) + "; true"
    return subprocess.run(
        ["script", "-qec", line, "/dev/null"], capture_output=True, check=True, stdin=subprocess.DEVNULL, env=node.env
    ).stdout


if shutil.which("script") is None:  # pragma: no cover
    test_nothing_that_an_engine_writes_commands_a_terminal = pytest.mark.skip(reason="no script(1)")(
        test_nothing_that_an_engine_writes_commands_a_terminal
    )


def test_the_end_of_an_engine_shows_its_last_line_though_it_was_not_ended(node: Node) -> None:
    node.write(printing(node, "out(b'ValueError: cut off in the mid'); os._exit(3)", more='restart = "no"'))
    node.start()
    node.wait_state("a", "ready")
    (node.folder / "go").touch()
    failed = node.wait_state("a", "failed")
    assert "cut off in the mid" in failed["reason"]["cause"]
    assert node.cli("logs", "a").stdout.splitlines()[-1].endswith("cut off in the mid")


def test_a_flood_is_skipped_and_counted_and_other_shards_answer(node: Node) -> None:
    flood = "for _ in range(400): out(b'a line of a flood, one of very many in a row\\n' * 5000)"
    node.write(printing(node, flood) + scripted(node, SERVE, name="b"))
    node.start()
    node.wait_state("a", "ready")
    node.wait_state("b", "ready")
    (node.folder / "go").touch()
    node.until(lambda: node.shard("a")["log"]["skipped"] > 100_000, "lines are skipped")
    assert node.state_of("b") == "ready"
    assert len(go(node).splitlines()) <= 2001
    assert node.shard("a")["log"]["skipped"] < 2_000_000
    # The file was rotated more than once and does not grow without end.
    files = sorted((node.folder / "l").glob("a.0.log*"))
    assert sum(file.stat().st_size for file in files) < 400 << 20


LOSSES = {
    "deleted": lambda path: path.unlink(),
    "renamed": lambda path: path.rename(f"{path}.old"),
    "truncated": lambda path: os.truncate(path, 0),
    "replaced": lambda path: (path.rename(f"{path}.old"), path.write_text("not yours\n")),
    "a folder gone": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.proof
@pytest.mark.parametrize("how", list(LOSSES))
def test_a_file_that_is_lost_from_outside_stops_nobody(node: Node, how: str) -> None:
    node.write(printing(node, "for n in range(100): out(b'line %d\\n' % n); time.sleep(0.005)"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    LOSSES[how](node.folder / "l" / "a.0.log")
    text = go(node)
    assert "line 99" in text
    assert node.wait_state("a", "ready")["pid"] == pid
    # The next launch has a file again, and the next llmgw takes the engine over without one.
    node.kill()
    node.start()
    assert node.wait_state("a", "ready")["pid"] == pid
    result = node.cli("restart", "a", "--wait")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (node.folder / "l" / "a.0.log").exists()
    assert not is_alive(pid)


@pytest.mark.proof
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("mount") is None, reason="needs root for a mount")
def test_a_log_folder_that_is_full_costs_lines_and_nothing_else(node: Node) -> None:
    folder = node.folder / "l"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        # An engine that does not mind a failing print, and one that starts when there is no byte left.
        chatter = (
            "def safe(data):\n    try: os.write(1, data)\n    except OSError: pass\n"
            "for _ in range(6000): safe(b'0123456789abcdef' * 64)\n"
            "time.sleep(0.5)\nout(b'\\nthere is room again\\n')"
        )
        node.write(printing(node, chatter) + "\n[[shard]]\n" + scripted(node, SERVE, name="b").split("\n", 1)[1])
        node.config.write_text(node.config.read_text().replace("[supervisor]", '[supervisor]\nlog_file_max = "1MiB"'))
        node.start()
        pids = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")}
        (node.folder / "go").touch()
        node.until(lambda: node.shard("a")["log"]["lines"] > 0, "it prints")
        filler = folder / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        os.kill(pids["b"], 9)
        node.until(lambda: node.shard("b")["pid"] != pids["b"], "its end is seen")
        assert node.wait_state("a", "ready")["pid"] == pids["a"]
        assert node.cli("status").returncode in (0, 1, 3)
        filler.unlink()
        node.wait_state("b", "ready")
        node.until(lambda: node.shard("a")["log"]["last"] == "the end of it", "it is read on")
    finally:
        node.__exit__(None, None, None)
        subprocess.run(["umount", "-l", str(folder)], check=True)
        shutil.rmtree(node.folder, ignore_errors=True)
