"""TLS on the gateway's addresses: certificates read again at a reload, and clients that speak something else."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
import trio
from attrs import evolve
from stand import STREAM_HEAD, Caller, Connection, Stand, always_ok, chat, chunk, configuration, shard_text, stand

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")


def certificate(folder: Path, name: str) -> None:
    """A key and a certificate of its own for localhost, as `cert.pem` and `key.pem`."""
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", *kind]
    subprocess.run([*command, *files, *subject], check=True, capture_output=True, timeout=60)
    (folder / "key.pem").chmod(0o600)


def tls_text(folder: Path) -> str:
    return f'[gateway.tls]\ncert = "{folder}/cert.pem"\nkey = {{ file = "{folder}/key.pem" }}\n'


class Reading(trio.abc.AsyncResource):
    """A TLS connection that a `Caller` can read."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream
        self.socket = stream.transport_stream.socket

    async def send_all(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def receive_some(self, size: int) -> bytes:
        return bytes(await self._stream.receive_some(size))

    async def aclose(self) -> None:
        await self._stream.transport_stream.aclose()


async def connect(it: Stand, folder: Path) -> tuple[Caller, str]:
    """A connection that trusts the certificate in the folder alone, and the name in the one that came."""
    context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    tcp = await trio.open_tcp_stream("127.0.0.1", it.port)
    stream = trio.SSLStream(tcp, context, server_hostname="localhost", https_compatible=True)
    await stream.do_handshake()
    found = stream.getpeercert()  # type: ignore[attr-defined]
    name = dict(pair for row in found["subject"] for pair in row)["commonName"]
    caller = Caller(Reading(stream))  # type: ignore[arg-type]
    it.callers.append(caller)
    return caller, name


async def test_requests_and_streams_pass_over_tls(tmp_path: Path) -> None:
    certificate(tmp_path, "one")
    step = trio.Event()

    async def script(connection: Connection) -> None:
        while await connection.request() is not None:
            await connection.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
            await step.wait()
            await connection.send(chunk(b"x" * 300_000) + b"0\r\n\r\n")

    async with stand(gateway=tls_text(tmp_path)) as it:
        await it.engine("a", script)
        caller, _ = await connect(it, tmp_path)
        for _ in range(2):
            await caller.send(chat(stream=True))
            await caller.until(b"data: 1\n\n")
            step.set()
            await caller.until(b"x" * 300_000)
            await caller.until(b"0\r\n\r\n")


async def test_a_client_that_leaves_over_tls_is_gone_for_the_engine(tmp_path: Path) -> None:
    certificate(tmp_path, "one")

    async def hangs(connection: Connection) -> None:
        await connection.request()
        await connection.wait_closed()

    async with stand(gateway=tls_text(tmp_path)) as it:
        engine = await it.engine("a", hangs)
        caller, _ = await connect(it, tmp_path)
        await caller.send(chat())
        while not engine.requests:
            await trio.testing.wait_all_tasks_blocked(0.005)
        await caller.aclose()
        while engine.open:
            await trio.testing.wait_all_tasks_blocked(0.005)


async def test_a_renewed_certificate_counts_from_the_next_reload_on_and_a_broken_one_never(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate(tmp_path, "one")
    text = f"{shard_text('a')}\n[gateway]\n{tls_text(tmp_path)}"
    async with stand(gateway=tls_text(tmp_path)) as it:
        await it.engine("a", always_ok)
        old, name = await connect(it, tmp_path)
        assert name == "one"
        certificate(tmp_path, "two")
        it.config.set(configuration(text + shard_text("b", model="another")))
        await trio.testing.wait_all_tasks_blocked()
        _, name = await connect(it, tmp_path)
        assert name == "two"
        (tmp_path / "cert.pem").write_text("garbage")
        it.config.set(evolve(it.config.value, shards=it.config.value.shards[:1]))
        await trio.testing.wait_all_tasks_blocked()
        assert "cannot use the certificate" in caplog.text and "the earlier one is kept" in caplog.text
        # Who was connected goes on.
        await old.send(chat())
        assert (await old.answer()).status == 200


async def test_a_client_that_speaks_no_tls_gets_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    certificate(tmp_path, "one")
    async with stand(gateway=tls_text(tmp_path)) as it:
        await it.engine("a", always_ok)
        plain = await it.call(chat())
        assert await plain.ended()
        caller, _ = await connect(it, tmp_path)
        await caller.send(chat())
        assert (await caller.answer()).status == 200
