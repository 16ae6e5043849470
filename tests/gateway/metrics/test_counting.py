from __future__ import annotations

import gc
import time

from prometheus_client.parser import text_string_to_metric_families
from stand import configuration, shard_text

from llmgw.board import Board, Cell
from llmgw.domain.shard import ShardId
from llmgw.domain.status import Intent, ShardStatus, Wish
from llmgw.gateway.admission.snapshot import AdmissionSnapshot, EndpointLoad, Queued, TenantUse
from llmgw.gateway.metrics.counting import Counters
from llmgw.gateway.metrics.series import GatewaySeries
from llmgw.gateway.record import RequestRecord
from llmgw.metrics.exposition import Exposition

TEXT = (
    shard_text("a")
    + """
[gateway]
[[gateway.tenant]]
name = "search"
keys = [{ sha256 = "%s" }]
"""
    % ("0" * 64)
)


def record(**fields: object) -> RequestRecord:
    it = RequestRecord(100.0)
    it.ended = 103.0
    it.path = "/v1/chat/completions"
    for name, value in {"model": "m", "tenant": "search", "band": "normal", "code": 200, **fields}.items():
        setattr(it, name, value)
    return it


def forwarded(**fields: object) -> RequestRecord:
    return record(**{"granted": 100.5, "first_byte": 101.0, "shard": "a", **fields})


class Gateway:
    """One that serves, with what a test says waits and runs in it."""

    def __init__(self) -> None:
        self.snapshot = AdmissionSnapshot((), (), (), 0, None)
        self.queue: dict[tuple[str, str, str], int] = {}
        self.ejected: dict[str, int] = {}

    def admission(self) -> AdmissionSnapshot:
        return self.snapshot

    def waiting(self) -> dict[tuple[str, str, str], int]:
        return self.queue


class Page:
    """What the gateway exposes after these records."""

    def __init__(self, *records: RequestRecord, text: str = TEXT) -> None:
        self.counters = Counters()
        for each in records:
            self.counters.ended(each)
        self.config = Cell(configuration(text))
        self.board = Board(strict=True)
        self.gateway = Gateway()
        self.series = GatewaySeries(self.counters, self.board, self.config, lambda: self.gateway)

    async def samples(self) -> dict[str, float]:
        text = (await Exposition(lambda: [self.series.parts]).render()).decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if value)
                found[f"{sample.name}{{{labels}}}"] = sample.value
        return found


async def test_a_request_is_counted_under_model_tenant_band_and_code() -> None:
    found = await Page(forwarded(), forwarded(), forwarded(code=499, reason="client-gone")).samples()
    assert found["llmgw_requests_total{band=normal,code=200,model=m,tenant=search}"] == 2
    assert found["llmgw_requests_total{band=normal,code=499,model=m,tenant=search}"] == 1
    assert found["llmgw_request_failures_total{reason=client-gone}"] == 1


async def test_times_of_a_stream_are_in_the_histograms_of_its_model_and_band() -> None:
    found = await Page(forwarded(stream=True)).samples()
    at = "{band=normal,model=m}"
    assert found[f"llmgw_queue_wait_seconds_sum{at}"] == 0.5
    assert found[f"llmgw_time_to_first_token_seconds_sum{at}"] == 1.0
    assert found[f"llmgw_request_duration_seconds_sum{at}"] == 3.0


async def test_only_streams_that_began_well_have_a_first_token() -> None:
    found = await Page(forwarded(), forwarded(stream=True, code=500), forwarded(stream=True, first_byte=None)).samples()
    assert found["llmgw_time_to_first_token_seconds_count{band=normal,model=m}"] == 0


async def test_pauses_between_chunks_are_counted_while_the_stream_runs() -> None:
    page = Page()
    series = page.counters.series("m", "normal")
    series.chunk(0.02)
    series.chunk(0.03)
    found = await page.samples()
    assert found["llmgw_inter_chunk_seconds_bucket{band=normal,le=0.025,model=m}"] == 1
    assert found["llmgw_inter_chunk_seconds_count{band=normal,model=m}"] == 2


async def test_tokens_are_counted_in_both_directions_where_the_engine_tells_them() -> None:
    page = Page(forwarded(prompt_tokens=10, completion_tokens=None), forwarded(prompt_tokens=5, completion_tokens=7))
    found = await page.samples()
    assert found["llmgw_tokens_total{direction=prompt,model=m,tenant=search}"] == 15
    assert found["llmgw_tokens_total{direction=completion,model=m,tenant=search}"] == 7


async def test_a_request_that_was_not_let_in_is_no_failure_and_its_wait_counts_if_it_waited() -> None:
    refused = record(code=429, reason="queue-full", ended=100.0)
    waited = record(code=503, reason="queue-timeout", ended=130.0)
    found = await Page(refused, waited).samples()
    assert found["llmgw_admission_rejected_total{reason=queue-full}"] == 1
    assert found["llmgw_admission_rejected_total{reason=queue-timeout}"] == 1
    assert not [name for name in found if name.startswith("llmgw_request_failures_total")]
    assert found["llmgw_queue_wait_seconds_sum{band=normal,model=m}"] == 30.0
    assert found["llmgw_request_duration_seconds_count{band=normal,model=m}"] == 0


async def test_a_model_that_does_not_exist_never_becomes_a_label() -> None:
    unknown = record(model="", code=404, reason="unknown-model")
    found = await Page(unknown).samples()
    assert found["llmgw_requests_total{band=normal,code=404,tenant=search}"] == 1
    assert found["llmgw_request_failures_total{reason=unknown-model}"] == 1


async def test_health_lists_and_the_operators_pages_are_not_counted() -> None:
    health = record(model="", tenant="", band="", path="/health")
    look = record(path="/upstream/{shard}/metrics", tenant="", band="")
    assert not [name for name in await Page(health, look).samples() if name.startswith("llmgw_requests_total")]


async def test_a_status_that_is_none_gets_the_label_other() -> None:
    found = await Page(forwarded(code=999), forwarded(code=0, reason="engine-died")).samples()
    assert found["llmgw_requests_total{band=normal,code=other,model=m,tenant=search}"] == 2


async def test_what_a_reload_took_out_of_the_file_is_forgotten() -> None:
    page = Page(forwarded(prompt_tokens=3), forwarded(model="old", retried=True), forwarded(tenant="gone"))
    page.counters.series("m", "old band").chunk(1.0)
    found = await page.samples()
    assert not [name for name in found if "=old" in name or "=gone" in name]
    assert found["llmgw_requests_total{band=normal,code=200,model=m,tenant=search}"] == 1


async def test_the_queue_is_shown_by_model_band_and_tenant() -> None:
    page = Page()
    page.gateway.queue = {("m", "normal", "search"): 4}
    key = (ShardId("a"), 1)
    page.gateway.snapshot = AdmissionSnapshot(
        queues=(Queued("m", "normal", 4, 2.5, 3),),
        tenants=(TenantUse("search", 4, 3, 10, 1),),
        endpoints=(EndpointLoad("m", key, 2, 8), EndpointLoad("m", (ShardId("a"), 2), 1, 8)),
        running=3,
        limit=None,
    )
    found = await page.samples()
    assert found["llmgw_queue_depth{band=normal,model=m,tenant=search}"] == 4
    assert found["llmgw_queue_oldest_seconds{band=normal,model=m}"] == 2.5
    assert found["llmgw_queue_oldest_seconds{band=batch,model=m}"] == 0
    assert found["llmgw_inflight_requests{band=normal,model=m}"] == 3
    assert found["llmgw_tenant_inflight_requests{tenant=search}"] == 3
    # Two lives of one shard, the old one draining, are one series.
    shard = str(ShardId("a"))
    assert found[f"llmgw_endpoint_inflight_requests{{model=m,shard={shard}}}"] == 3
    assert found[f"llmgw_endpoint_slots{{model=m,shard={shard}}}"] == 16


async def test_a_queue_that_has_run_dry_is_0_and_one_that_the_file_has_no_more_is_gone() -> None:
    page = Page()
    page.gateway.queue = {("m", "normal", "search"): 4, ("m", "batch", "left"): 1}
    await page.samples()
    page.gateway.queue = {}
    page.config.set(configuration(TEXT + "# read anew"))
    found = await page.samples()
    assert [(name, value) for name, value in found.items() if name.startswith("llmgw_queue_depth")] == [
        ("llmgw_queue_depth{band=normal,model=m,tenant=search}", 0.0)
    ]


async def test_a_shard_that_was_never_taken_out_has_a_zero_and_one_that_is_gone_has_none() -> None:
    page = Page()
    for name in ("a", "b"):
        page.board.add(ShardStatus(ShardId(name), name, "m", "vllm"), Intent(Wish.START))
    page.gateway.ejected = {"a": 2, "gone": 5}
    found = await page.samples()
    shown = {name: value for name, value in found.items() if name.startswith("llmgw_endpoint_ejections_total")}
    assert shown == {
        "llmgw_endpoint_ejections_total{shard=a}": 2,
        "llmgw_endpoint_ejections_total{shard=b}": 0,
    }


async def test_retries_are_counted_by_model() -> None:
    found = await Page(forwarded(retried=True)).samples()
    assert found["llmgw_request_retries_total{model=m}"] == 1


async def test_a_band_that_a_tenant_may_not_use_is_counted() -> None:
    found = await Page(forwarded(band_clamped=True), forwarded(), forwarded(tenant="gone", band_clamped=True)).samples()
    assert {name: value for name, value in found.items() if name.startswith("llmgw_bands_clamped")} == {
        "llmgw_bands_clamped_total{tenant=search}": 1
    }


async def test_without_a_gateway_in_the_file_there_are_no_families_of_it() -> None:
    page = Page(forwarded(), text=shard_text("a"))
    assert await page.samples() == {}


def test_a_chunk_costs_less_than_a_microsecond() -> None:
    chunk = Counters().series("m", "normal").chunk
    best = 1.0
    gc.disable()
    try:
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(1000):
                chunk(0.021)
            best = min(best, time.perf_counter() - began)
    finally:
        gc.enable()
    assert best / 1000 < 1e-6


async def test_a_page_leaves_the_garbage_collector_nothing_to_look_through() -> None:
    """A full collection takes longer than any slice, and looks at the whole process."""
    page = Page(*(forwarded(code=code) for code in range(100, 600) for _ in range(3)))
    await page.samples()
    exposition = Exposition(lambda: [page.series.parts])
    await exposition.render()
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        await exposition.render()
        # What is new since and still alive: far less than one object for each line.
        assert gc.get_count()[0] - before < 300
    finally:
        gc.enable()
