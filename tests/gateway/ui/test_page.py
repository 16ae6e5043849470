"""The operators' page: what it shows, what it lets nobody do, in a real browser."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from typing import Any

import chromium
import pytest
import trio
from stand import Stand, key_hash, shard_text, stand

from llmgw.gateway import ui

HTML = ui.page()
needs_browser = pytest.mark.skipif(chromium.find() is None, reason="no Chromium: apt-get install chromium")
HOSTILE = '<img src=x onerror="document.title=`taken`"><script>document.title="taken"</script>'


def shard(name: str, **more: Any) -> dict[str, Any]:
    """One row of the status, as the control socket tells it."""
    row = {
        "name": name,
        "shard": name,
        "replica": 0,
        "model": "m",
        "engine": "vllm",
        "state": "ready",
        "since": 1000.0,
        "conditions": [],
        "progress": None,
        "reason": None,
        "detail": "",
        "gpus": [],
        "activity": None,
        "routable": True,
        "next_attempt": None,
        "loadable": False,
    }
    return {**row, **more}


def status(*shards: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "llmgw": "0.1.0",
        "node": "gpu-01",
        "started": 0.0,
        "now": 2000.0,
        "config": {"path": "llmgw.toml", "error": None},
        "hardware": "1x h100-80g",
        "stopping": None,
        "warnings": [],
        "gateway": {"queues": [], "tenants": [], "endpoints": []},
        "inventory": None,
        "shards": list(shards),
        **more,
    }


async def browse(it: Stand, visit: Callable[[chromium.Browser, str], None]) -> None:
    """Visit the page with a browser of its own, in a thread."""

    def in_thread() -> None:
        with chromium.Browser() as browser:
            visit(browser, f"http://127.0.0.1:{it.port}/ui")

    await trio.to_thread.run_sync(in_thread, abandon_on_cancel=True)


def test_the_page_loads_nothing_from_elsewhere_and_has_no_handler_in_its_markup():
    text = HTML.decode()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", text)
    assert not re.search(r"<[^>]+\son[a-z]+\s*=", text.split("<script>")[0])
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "localStorage" not in text


def test_its_policy_lets_exactly_its_own_script_and_style_run():
    policy = dict(ui.headers(HTML))[b"content-security-policy"].decode()
    for tag in (b"script", b"style"):
        (block,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(block).digest()).decode()
        assert f"{tag.decode()}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy


@needs_browser
async def test_it_shows_shards_progress_failures_and_queues():
    rows = (
        shard("chat", gpus=["0-3"]),
        shard(
            "big", state="loading", progress={"phase": "weights", "fraction": 0.5, "done": 1, "total": 2, "eta": 30.0}
        ),
        shard("sick", state="failed", reason={"cause": "GPU memory ran out", "remedy": "lower max_model_len"}),
    )
    gateway = {
        "queues": [{"model": "m", "band": "batch", "waiting": 7, "oldest_seconds": 12.0, "running": 2}],
        "tenants": [{"name": "research", "waiting": 7, "running": 2, "granted": 100, "refused": 3}],
        "endpoints": [{"model": "m", "shard": "chat/0", "running": 2, "slots": 8}],
    }
    answer = status(*rows, gateway=gateway, warnings=["GPU 7 is lost"])

    def visit(browser: chromium.Browser, address: str) -> None:
        browser.go(address)
        browser.wait("document.querySelectorAll('#shards tbody tr').length === 3")
        text = browser.run("document.body.innerText")
        for words in ("gpu-01", "weights 50%, about 30s left", "GPU memory ran out", "lower max_model_len", "2 / 8"):
            assert words in text
        assert "GPU 7 is lost" in text and "research" in text
        assert browser.run("document.querySelector('progress').value") == 0.5
        assert browser.run("document.querySelector('#queues tbody').innerText").split() == [
            "m",
            "batch",
            "7",
            "12s",
            "2",
        ]
        assert browser.run("document.querySelector('#door').hidden") is True
        assert browser.errors == []

    async with stand(status=lambda: answer) as it:
        await browse(it, visit)


@needs_browser
async def test_names_and_texts_of_others_are_text_and_never_markup():
    answer = status(
        shard(HOSTILE, model=HOSTILE, state="failed", reason={"cause": HOSTILE, "remedy": HOSTILE}),
        warnings=[HOSTILE],
        node=HOSTILE,
    )

    def visit(browser: chromium.Browser, address: str) -> None:
        browser.go(address)
        browser.wait("document.querySelectorAll('#shards tbody tr').length === 1")
        assert browser.run("document.querySelectorAll('main img, main script').length") == 0
        assert browser.run("document.title") != "taken"
        assert browser.run("document.querySelector('#shards td').textContent") == HOSTILE

    async with stand(status=lambda: answer) as it:
        await browse(it, visit)


@needs_browser
async def test_it_asks_for_an_operators_key_where_one_is_needed_and_keeps_it_in_memory_alone():
    keys = f"operator_keys = [{key_hash('operator-key-0123')}]"

    def visit(browser: chromium.Browser, address: str) -> None:
        # As if from elsewhere: through a front on this machine.
        browser.send_header("x-forwarded-for", "192.0.2.1")
        browser.go(address)
        browser.wait("!document.querySelector('#door').hidden")
        for key, then in (("wrong", "That is no operator key."), ("operator-key-0123", "live")):
            browser.run(f"document.querySelector('#key').value = '{key}'; document.querySelector('button').click()")
            browser.wait(f"document.body.innerText.includes('{then}')")
        assert browser.run("document.querySelectorAll('#shards tbody tr').length") == 1
        assert browser.run("document.querySelector('#key').value") == ""
        assert browser.run(
            "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}, location.href])"
        ) == (f'["",{{}},{{}},"{address}"]')
        browser.go(address)
        browser.wait("!document.querySelector('#door').hidden")

    async with stand(gateway=keys, status=lambda: status(shard("a"))) as it:
        await browse(it, visit)


@needs_browser
async def test_it_says_when_llmgw_does_not_answer_any_more_and_goes_on_when_it_does():
    answers = [status(shard("a"))]

    def ask() -> dict[str, Any]:
        if not answers:
            raise RuntimeError("asked while it should not answer")
        return answers[0]

    def visit(browser: chromium.Browser, address: str) -> None:
        browser.go(address)
        browser.wait("document.querySelector('#live').textContent === 'live'")
        answers.clear()
        browser.wait("document.querySelector('#live').className === 'lost'")
        assert browser.run("document.querySelectorAll('#shards tbody tr').length") == 1
        answers.append(status(shard("a"), shard("b")))
        browser.wait("document.querySelectorAll('#shards tbody tr').length === 2")

    async with stand(status=ask) as it:
        await browse(it, visit)


async def test_the_page_is_served_with_its_policy_and_kept_by_nobody():
    async with stand(shard_text("a")) as it:
        got = await it.ask(b"GET /ui HTTP/1.1\r\nhost: x\r\n\r\n")
        assert got.status == 200 and got.body == HTML
        assert got.headers["cache-control"] == "no-store" and got.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in got.headers["content-security-policy"]
