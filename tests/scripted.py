"""Engines of a few lines: a Python program that says yes at its port and otherwise does what a test wants."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from typing import Any

from tests.node import Node

BEGINNING = """\
import ctypes, http.server, mmap, os, signal, sys, threading, time

class Yes(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Yes)

def child(main):
    if os.fork() == 0:
        server.socket.close()
        try:
            main()
        finally:
            os._exit(0)

def sleep():
    while True:
        signal.pause()

"""


def scripted(node: Node, body: str, *, name: str = "a", more: str = "") -> str:
    """The table of a shard that runs `body`, which has to end in `server.serve_forever()` to become ready."""
    path = node.folder / f"{name}.py"
    path.write_text(BEGINNING + body)
    command = json.dumps([sys.executable, "-u", str(path), "${llmgw.port}"])
    return (
        f'[[shard]]\nname = "{name}"\nmodel = "{name}"\nengine = "command"\nmodels_path = ""\n'
        f"command = {command}\n{more}\n"
    )


class Stream(threading.Thread):
    """One request for `tokens` tokens, read to its end. `done`: all of them came, and the last event."""

    def __init__(self, shard: dict[str, Any], tokens: int) -> None:
        super().__init__(daemon=True)
        self.began = threading.Event()
        self._missing = tokens
        self.done = False
        self.status = 0
        self._where = shard["endpoint"].removeprefix("http://").rstrip("/")
        self._body = json.dumps(
            {"model": shard["model"], "prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        )
        self.start()
        assert self.began.wait(30) and self.status == 200, f"no token came, status {self.status}"

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._where, timeout=60)
        try:
            connection.request("POST", "/v1/completions", self._body, {"content-type": "application/json"})
            with connection.getresponse() as answer:
                self.status = answer.status
                for line in answer:
                    self.began.set()
                    self._missing -= line.startswith(b"data: {")
                    self.done = self.done or (self._missing <= 0 and line.startswith(b"data: [DONE]"))
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
            self.began.set()

    def ended(self) -> bool:
        self.join(30)
        return self.done
