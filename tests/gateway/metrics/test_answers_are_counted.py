from __future__ import annotations

import socket

import trio
from stand import always_ok, chat, stand

TRIES = 100


async def test_a_client_that_leaves_right_behind_its_answer_has_had_it() -> None:
    async with stand() as it:
        await it.engine("a", always_ok)

        def ask_and_leave() -> None:
            for _ in range(TRIES):
                with socket.create_connection(("127.0.0.1", it.port)) as sock:
                    sock.sendall(chat())
                    data = b""
                    while not data.endswith(b'{"ok": true}'):
                        data += sock.recv(65536)

        await trio.to_thread.run_sync(ask_and_leave)
        records = await it.wait_records(TRIES)
        assert [(record.code, record.reason) for record in records] == [(200, "")] * TRIES
