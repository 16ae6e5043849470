"""Who is let in to what: tenants, operators, pages of llmgw's own, and strangers."""

from __future__ import annotations

import pytest
import trio
from stand import always_ok, chat, key_hash, post, shard_text, stand

TENANTS = f"""
operator_keys = [{key_hash("operator")}]
[[gateway.tenant]]
name = "one"
keys = [{key_hash("key-one")}]
models = ["m", "ze*"]
[[gateway.tenant]]
name = "two"
keys = [{key_hash("key-two")}]
"""
SHARDS = shard_text("a") + shard_text("b", model="zeta") + shard_text("c", model="secret")


def get(path: str, *lines: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *lines, "", ""]).encode()


def bearer(key: str) -> str:
    return f"authorization: Bearer {key}"


async def test_without_a_key_nobody_asks_a_model_where_there_are_tenants():
    async with stand(SHARDS, gateway=TENANTS) as it:
        engine = await it.engine("a", always_ok)
        got = await it.ask(chat())
        assert got.status == 401 and got.headers["www-authenticate"].lower().startswith("bearer")
        got = await it.ask(post({"model": "m"}, head=bearer("wrong") + "\r\n"))
        assert got.status == 401
        got = await it.ask(post({"model": "m"}, head=bearer("operator") + "\r\n"))
        assert got.status == 401
        assert engine.requests == []
        got = await it.ask(post({"model": "m"}, head=bearer("key-one") + "\r\n"))
        assert got.status == 200
        got = await it.ask(post({"model": "m"}, head="x-api-key: key-two\r\n"))
        assert got.status == 200
        tenants = [record.tenant for record in await it.wait_records(5)]
        assert tenants[-2:] == ["one", "two"]


async def test_a_tenant_sees_and_uses_its_own_models_only():
    async with stand(SHARDS, gateway=TENANTS) as it:
        for name in ("a", "b", "c"):
            await it.engine(name, always_ok)
        got = await it.ask(get("/v1/models", bearer("key-one")))
        assert [row["id"] for row in got.json()["data"]] == ["m", "zeta"]
        got = await it.ask(get("/v1/models", bearer("key-two")))
        assert [row["id"] for row in got.json()["data"]] == ["m", "zeta", "secret"]
        got = await it.ask(post({"model": "secret"}, head=bearer("key-one") + "\r\n"))
        assert (got.status, got.headers["x-llmgw-reason"]) == (403, "model-not-allowed")
        got = await it.ask(post({"model": "secret"}, head=bearer("key-two") + "\r\n"))
        assert got.status == 200


async def test_an_unknown_model_is_a_404_with_near_names_of_ones_own():
    async with stand(SHARDS, gateway=TENANTS) as it:
        await it.engine("b", always_ok)
        got = await it.ask(post({"model": "zetta"}, head=bearer("key-one") + "\r\n"))
        assert got.status == 404
        assert got.headers["x-llmgw-reason"] == got.json()["error"]["code"]
        assert "zeta" in got.json()["error"]["message"]
        assert got.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", ["/metrics", "/ui/status", "/upstream/a/health"])
async def test_operators_pages_are_open_on_this_machine_and_closed_to_tenants_behind_a_front(path):
    async with stand(SHARDS, gateway=TENANTS) as it:
        await it.engine("a", always_ok)
        assert (await it.ask(get(path))).status == 200
        assert (await it.ask(get(path, "x-forwarded-for: 192.0.2.1"))).status == 401
        assert (await it.ask(get(path, "x-forwarded-for: 192.0.2.1", bearer("key-one")))).status == 403
        assert (await it.ask(get(path, "x-forwarded-for: 192.0.2.1", bearer("operator")))).status == 200


async def test_the_page_that_asks_for_the_key_is_open_to_a_browser_that_has_none():
    async with stand(SHARDS, gateway=TENANTS) as it:
        assert (await it.ask(get("/ui", "x-forwarded-for: 192.0.2.1"))).status == 200
    async with stand(SHARDS, gateway="ui = false\n" + TENANTS) as it:
        assert (await it.ask(get("/ui"))).status == 404
        assert (await it.ask(get("/ui/status"))).status == 404


async def test_only_a_few_pages_of_an_engine_are_shown_and_only_to_look_at():
    async with stand(SHARDS) as it:
        engine = await it.engine("a", always_ok)
        assert (await it.ask(get("/upstream/a/metrics"))).status == 200
        assert engine.requests[0][0].startswith(b"GET /metrics HTTP/1.1")
        for path in ("/upstream/a/v1/chat/completions", "/upstream/a/sleep", "/upstream/a/../b/metrics"):
            assert (await it.ask(get(path))).status == 404
        assert (await it.ask(post({}, path="/upstream/a/metrics"))).status in (404, 405)
        assert (await it.ask(get("/upstream/nobody/metrics"))).status == 404
        assert len(engine.requests) == 1


async def test_health_is_about_llmgw_and_readiness_about_whether_anything_can_be_answered():
    async with stand() as it:
        assert (await it.ask(get("/health"))).status == 200
        assert (await it.ask(get("/readiness"))).status == 503
        await it.engine("a", always_ok)
        assert (await it.ask(get("/readiness"))).status == 200


async def test_a_head_request_ends_at_the_head_and_the_connection_goes_on():
    async with stand() as it:
        caller = await it.call(get("/health", method="HEAD") + get("/health"))
        first = await caller.answer(is_head=True)
        assert first.status == 200 and first.headers["content-length"] != "0"
        assert (await caller.answer()).json() == {"status": "ok"}


async def test_a_path_without_a_model_is_a_404_that_says_no_model():
    async with stand() as it:
        got = await it.ask(get("/v1/files"))
        assert (got.status, got.headers["x-llmgw-reason"]) == (404, "no-model")
        assert (await it.ask(get("/nothing"))).status == 404


@pytest.mark.parametrize("body", [b"", b"[]", b"3", b"{", b'{"model": 3}', b'{"messages": []}', b"\xff\xfe", b"nul"])
async def test_a_body_without_a_readable_model_is_a_400_and_never_reaches_an_engine(body):
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        got = await it.ask(post(body))
        assert got.status == 400 and got.headers["x-llmgw-reason"] == got.json()["error"]["code"]
        assert engine.requests == []


async def test_a_page_of_an_allowed_origin_may_ask_and_read_and_another_may_not():
    async with stand(gateway='cors_origins = ["https://app.example"]') as it:
        await it.engine("a", always_ok)
        asks = ("access-control-request-method: POST", "access-control-request-headers: authorization")
        got = await it.ask(get("/v1/chat/completions", "origin: https://app.example", *asks, method="OPTIONS"))
        assert got.status == 204 and got.headers["access-control-allow-origin"] == "https://app.example"
        assert got.headers["access-control-allow-headers"] == "authorization"
        got = await it.ask(get("/v1/chat/completions", "origin: https://evil.example", *asks, method="OPTIONS"))
        assert "access-control-allow-origin" not in got.headers
        got = await it.ask(post({"model": "m"}, head="origin: https://app.example\r\n"))
        assert got.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n", 411),
        (b"GET /health HTTP/2.0\r\nhost: x\r\n\r\n", 505),
        (b"GET /health HTTP/0.9\r\nhost: x\r\n\r\n", 505),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nfolded: a\r\n b\r\n\r\n", 400),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * 90_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 5000 + b"\r\n", 431),
        (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", 501),
        (b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", 501),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)
async def test_what_no_proxy_may_accept_is_refused_with_its_own_status_and_the_connection_ends(data, status):
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        caller = await it.call(data + get("/health"))
        got = await caller.answer()
        assert got.status == status
        assert got.headers["connection"] == "close"
        assert await caller.ended()
        assert engine.requests == []


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_trailers_of_a_request_never_become_headers_of_the_engines():
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        body = b'{"model": "m"}'
        trailers = b"x-trailer: 1\r\nauthorization: Bearer evil\r\n\r\n"
        caller = await it.call(CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(body), body) + trailers + chat())
        assert (await caller.answer()).status == 200
        assert (await caller.answer()).status == 200
        assert b"x-trailer" not in engine.requests[0][0] and b"evil" not in engine.requests[0][0]


@pytest.mark.parametrize("flood", [b"0\r\nx-trailer: ", b"5;a="])
async def test_trailers_and_chunk_extensions_without_end_are_refused(flood):
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        caller = await it.call(CHUNKED + flood)
        for _ in range(200):
            try:
                await caller.send(b"y" * 4096)
            except trio.BrokenResourceError:
                break
            await trio.testing.wait_all_tasks_blocked()
        assert (await caller.answer()).status == 431
        assert engine.requests == []


async def test_an_offer_of_http_2_is_ignored_and_the_body_served():
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        offer = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
        caller = await it.call(post({"model": "m"}, head=offer) + chat())
        assert (await caller.answer()).status == 200
        assert (await caller.answer()).status == 200
        assert engine.requests[0][1] == b'{"model": "m"}'


async def test_bodies_that_would_not_fit_together_are_refused_before_they_are_read():
    async with stand(gateway='max_body = "1MiB"\nmax_buffered = "1MiB"') as it:
        await it.engine("a", always_ok)
        big = b'{"model": "m", "x": "' + b"y" * 800_000 + b'"}'
        first = await it.call(post(big)[:-100])
        second = await it.ask(post(big))
        while second.status == 200:
            # The first one's head has not been read yet.
            second = await it.ask(post(big))
        assert (second.status, second.headers["x-llmgw-reason"]) == (503, "body-memory")
        await first.send(post(big)[-100:])
        assert (await first.answer()).status == 200
        assert (await it.ask(post(big))).status == 200


async def test_a_band_that_a_tenant_may_not_use_becomes_its_default_one():
    async with stand(SHARDS, gateway=TENANTS) as it:
        await it.engine("a", always_ok)
        head = bearer("key-one") + "\r\nx-llmgw-priority: interactive\r\n"
        assert (await it.ask(post({"model": "m"}, head=head))).status == 200
        (record,) = await it.wait_records(1)
        assert record.band == "normal"
