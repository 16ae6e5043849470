"""TLS on the gateway's addresses: trio's stream takes it off, and the plane sees a plain socket like any other."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl

import trio

from llmgw.config.model import TlsConfig

HANDSHAKE_TIMEOUT = 10.0
"""Seconds."""
GOODBYE_TIMEOUT = 2.0
"""Seconds for the last bytes and the closing words of a connection."""
_PIECE = 64 * 1024


def make_context(config: TlsConfig) -> ssl.SSLContext:
    """What the files say now. Raises OSError or ssl.SSLError where they are not to be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # The key may be a credential: OpenSSL wants a file, so it gets one that has no name and only memory behind it.
    descriptor = os.memfd_create("llmgw-tls-key", os.MFD_CLOEXEC)
    with contextlib.closing(os.fdopen(descriptor, "w+")) as file:
        file.write(config.key.reveal())
        file.flush()
        context.load_cert_chain(config.cert, f"/proc/self/fd/{descriptor}")
    if config.client_ca is not None:
        context.load_verify_locations(config.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def unwrap(sock: trio.socket.SocketType, context: ssl.SSLContext, inner: socket.socket) -> None:
    """Carry one connection between TLS on `sock` and plain bytes on `inner` until either side ends. Closes both.

    Raises nothing but cancellation: a client that speaks no TLS is its own trouble.
    """
    stream = trio.SSLStream(trio.SocketStream(sock), context, server_side=True, https_compatible=True)
    plain = trio.SocketStream(trio.socket.from_stdlib_socket(inner))
    try:
        with trio.move_on_after(HANDSHAKE_TIMEOUT) as scope:
            await stream.do_handshake()
        if scope.cancelled_caught:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_copy_in, stream, plain, nursery.cancel_scope)
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await _copy(plain, stream)
            nursery.cancel_scope.cancel(reason="the answer has ended")
        with trio.move_on_after(GOODBYE_TIMEOUT):
            await stream.aclose()
    except (trio.BrokenResourceError, ssl.SSLError, OSError):
        pass
    finally:
        plain.socket.close()
        sock.close()


async def _copy_in(
    stream: trio.SSLStream[trio.SocketStream], plain: trio.SocketStream, scope: trio.CancelScope
) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError):
        await _copy(stream, plain)
    # The client is gone: the plane sees the end of its socket and frees whatever the request holds.
    scope.cancel(reason="the client has left")


async def _copy(source: trio.abc.ReceiveStream, target: trio.abc.SendStream) -> None:
    while data := await source.receive_some(_PIECE):
        await target.send_all(data)
