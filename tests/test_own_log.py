from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from llmgw.own_log import KEPT, PatientHandler


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def stuff(writer: int) -> int:
    """Fill the pipe through a description of its own; the number of bytes in it."""
    other = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)
    size = 0
    try:
        while True:
            size += os.write(other, b"x" * 4096)
    except BlockingIOError:
        return size
    finally:
        os.close(other)


def line(text: str) -> logging.LogRecord:
    return logging.LogRecord("llmgw", logging.INFO, "", 0, text, (), None)


def test_lines_that_wait_for_a_reader_come_in_order_when_it_reads_again(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    handler = PatientHandler(writer)
    size = stuff(writer)
    handler.handle(line("one"))
    handler.handle(line("two"))
    assert os.read(reader, size) == b"x" * size
    handler.handle(line("three"))
    assert os.read(reader, 100) == b"one\ntwo\nthree\n"


def test_what_nobody_reads_is_bounded_and_counted(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    handler = PatientHandler(writer)
    size = stuff(writer)
    for _ in range(10):
        handler.handle(line("y" * (KEPT // 8)))
    assert os.read(reader, size) == b"x" * size
    handler.flush(0)
    # Seven of them fit with their newlines.
    assert os.read(reader, size).startswith(b"(3 lines of llmgw's log were lost: nobody read them)\n")


def test_a_reader_that_has_gone_is_no_error(pipe: tuple[int, int]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = PatientHandler(writer)
    handler.handle(line("into nothing"))
    os.close(writer)
    handler.handle(line("into nothing at all"))
    assert not handler._waiting


def test_a_record_that_cannot_be_formatted_is_written_as_it_is(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    PatientHandler(writer).handle(logging.LogRecord("llmgw", logging.INFO, "", 0, "%d", ("a",), None))
    assert os.read(reader, 100) == b"INFO '%d' ('a',)\n"
