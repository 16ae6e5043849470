"""Connections to engines: kept for the next request, and none left behind when their engine goes."""

from __future__ import annotations

import pytest
import trio

from llmgw.domain.shard import TcpEndpoint
from llmgw.gateway.plane import Plane
from llmgw.gateway.upstream import IDLE_LIMIT, Pool


class Listening:
    """A port where connections are accepted by the kernel alone."""

    def __init__(self) -> None:
        self.sock = trio.socket.socket()

    async def __aenter__(self) -> Listening:
        await self.sock.bind(("127.0.0.1", 0))
        self.sock.listen(8)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sock.close()

    @property
    def endpoint(self) -> TcpEndpoint:
        return TcpEndpoint("127.0.0.1", self.sock.getsockname()[1])


async def test_the_connection_that_was_used_last_is_used_next() -> None:
    plane = Plane()
    async with Listening() as it:
        pool = Pool(it.endpoint, plane, trio.current_time)
        first, second = await pool.connect(5), await pool.connect(5)
        pool.put(first)
        pool.put(second)
        assert pool.take() is second and second.reused
        assert pool.take() is first and pool.take() is None
        first.close()
        second.close()
    plane.close()


async def test_a_connection_that_comes_back_to_a_closed_pool_is_closed() -> None:
    plane = Plane()
    async with Listening() as it:
        pool = Pool(it.endpoint, plane, trio.current_time)
        idle, away = await pool.connect(5), await pool.connect(5)
        pool.put(idle)
        pool.close("endpoint-gone")
        assert idle.sock.fileno() == -1 and away.sock.fileno() != -1
        pool.put(away)
        assert away.sock.fileno() == -1 and pool.take() is None
    plane.close()


async def test_what_is_idle_for_too_long_is_closed_before_the_engine_would() -> None:
    now = 0.0
    plane = Plane()
    async with Listening() as it:
        pool = Pool(it.endpoint, plane, lambda: now)
        upstream = await pool.connect(5)
        pool.put(upstream)
        now = IDLE_LIMIT - 0.1
        pool.sweep()
        assert upstream.sock.fileno() != -1
        now = IDLE_LIMIT + 0.1
        pool.sweep()
        assert upstream.sock.fileno() == -1 and pool.take() is None
    plane.close()


async def test_where_nobody_listens_an_error_says_so_and_no_socket_is_left() -> None:
    plane = Plane()
    async with Listening() as it:
        endpoint = it.endpoint
    with pytest.raises(OSError, match="ECONNREFUSED"):
        await Pool(endpoint, plane, trio.current_time).connect(5)
    plane.close()
