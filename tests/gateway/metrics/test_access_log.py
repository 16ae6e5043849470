from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from llmgw.gateway.metrics.access_log import BURST, SAMPLES_PER_SECOND, SLOW, AccessLog, line
from llmgw.gateway.record import RequestRecord
from llmgw.own_log import ACCESS, Format


def record(**fields: object) -> RequestRecord:
    it = RequestRecord(100.0)
    it.ended = 101.0
    values = {"model": "m", "path": "/v1/chat/completions", "method": "POST", "code": 200, "tenant": "search", **fields}
    for name, value in values.items():
        setattr(it, name, value)
    return it


class Log:
    """The access log over a clock that a test moves."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.now = 1000.0
        self.lines: list[dict[str, Any]] = []
        self._log = AccessLog(lambda: self.mode, clock=lambda: 1.7e9, now=lambda: self.now)
        self._handler = logging.Handler()
        self._handler.emit = lambda it: self.lines.append(json.loads(it.getMessage()))  # type: ignore[method-assign]

    def tell(self, *records: RequestRecord) -> list[dict[str, Any]]:
        before = len(self.lines)
        for each in records:
            self._log.ended(each)
        return self.lines[before:]


@pytest.fixture
def access(request: pytest.FixtureRequest) -> Iterator[Log]:
    it = Log(request.param)
    logger = logging.getLogger(ACCESS)
    logger.addHandler(it._handler)
    logger.setLevel(logging.INFO)
    yield it
    logger.removeHandler(it._handler)
    logger.setLevel(logging.NOTSET)


with_mode = pytest.mark.parametrize


def test_a_line_tells_who_what_how_long_and_nothing_that_is_not_so() -> None:
    it = record(granted=100.25, first_byte=100.5, model="m", band="batch", shard="a", stream=True, completion_tokens=7)
    assert json.loads(line(it, 1.7e9)) == {
        "time": 1.7e9,
        "method": "POST",
        "path": "/v1/chat/completions",
        "code": 200,
        "model": "m",
        "tenant": "search",
        "band": "batch",
        "shard": "a",
        "stream": True,
        "queued_seconds": 0.25,
        "first_byte_seconds": 0.5,
        "duration_seconds": 1.0,
        "bytes_in": 0,
        "bytes_out": 0,
        "chunks": 0,
        "completion_tokens": 7,
    }


def test_a_line_is_one_line_of_ascii_whatever_a_client_sends() -> None:
    text = line(record(method="GET\r\n\x1b[31m\x7f\u202e", request_id="x" * 500), 0.0)
    assert text.isascii() and text.isprintable()
    assert json.loads(text)["method"] == "GET\\x0d\\x0a\\x7f\\u202e"
    assert len(json.loads(text)["request_id"]) == 200


@with_mode("access", ["on"], indirect=True)
def test_on_tells_every_request(access: Log) -> None:
    assert len(access.tell(*(record() for _ in range(500)))) == 500


@with_mode("access", ["off"], indirect=True)
def test_off_tells_none(access: Log) -> None:
    assert access.tell(record(), record(code=500)) == []


@with_mode("access", ["sampled"], indirect=True)
def test_sampled_bounds_what_went_well_and_says_how_many_it_left_out(access: Log) -> None:
    assert len(access.tell(*(record() for _ in range(500)))) == BURST
    access.now += 1.0
    told = access.tell(*(record() for _ in range(500)))
    assert len(told) == SAMPLES_PER_SECOND
    assert told[0]["omitted_before"] == 500 - BURST


@with_mode("access", ["sampled"], indirect=True)
def test_sampled_tells_all_errors_and_all_slow_ones(access: Log) -> None:
    access.tell(*(record() for _ in range(500)))
    errors = [record(code=502, reason="engine-died"), record(code=200, reason="engine-died"), record(code=499)]
    slow = record(first_byte=100.0 + SLOW)
    never = record(ended=100.0 + SLOW)
    assert len(access.tell(*errors, slow, never)) == 5
    # A long stream that began soon is not slow.
    assert access.tell(record(first_byte=100.1, ended=900.0)) == []


@with_mode("access", ["sampled"], indirect=True)
def test_strangers_cannot_fill_the_log_with_refusals(access: Log) -> None:
    refused = [record(model="", tenant="", code=401, reason="no-key") for _ in range(500)]
    assert len(access.tell(*refused)) == BURST


@with_mode("access", ["sampled"], indirect=True)
def test_what_a_load_balancer_asks_all_the_time_takes_no_place_in_a_sampled_log(access: Log) -> None:
    health = [record(model="", tenant="", path="/health") for _ in range(500)]
    assert access.tell(*health, record()) == [json.loads(line(record(), 1.7e9))]


@with_mode("access", ["off"], indirect=True)
def test_a_reload_changes_the_mode(access: Log) -> None:
    assert access.tell(record()) == []
    access.mode = "on"
    assert len(access.tell(record())) == 1


@with_mode("access", ["on"], indirect=True)
def test_a_log_level_above_info_turns_it_off(access: Log) -> None:
    logging.getLogger(ACCESS).setLevel(logging.WARNING)
    assert access.tell(record()) == []


@pytest.mark.parametrize(("journal", "start"), [(False, "{"), (True, "<6>{")])
def test_a_line_of_the_access_log_stands_for_itself(journal: bool, start: str) -> None:
    told = logging.LogRecord(ACCESS, logging.INFO, "", 0, "%s", ('{"code": 200}',), None)
    assert Format(journal).format(told) == f'{start}"code": 200}}'
    other = logging.LogRecord("llmgw.daemon", logging.INFO, "", 0, "hello", (), None)
    assert Format(journal).format(other).endswith("hello" if journal else "I hello")
