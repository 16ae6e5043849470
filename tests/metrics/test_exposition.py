from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from llmgw.metrics import exposition
from llmgw.metrics.exposition import Exposition, Group, Labels, Part, Source, Text
from llmgw.metrics.families import Family, Kind
from llmgw.metrics.histogram import Histogram

GAUGE = Family("llmgw_test_things", Kind.GAUGE, ("name",), "Things.")
COUNTER = Family("llmgw_test_things_total", Kind.COUNTER, ("name", "kind"), "Things.")
HISTOGRAM = Family("llmgw_test_seconds", Kind.HISTOGRAM, ("name",), "Times.", (0.1, 1.0))


def source(*parts: Part) -> Source:
    async def read() -> Iterable[Part]:
        return parts

    return read


async def page(*parts: Part) -> str:
    return (await Exposition(lambda: [source(*parts)]).render()).decode()


def read(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample, as the library's own parser reads it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_family_has_its_help_and_type_once_and_before_its_series() -> None:
    text = await page(Group(COUNTER, [(("a", "x"), 1), (("b", "x"), 2.5)]))
    assert text.split("\n") == [
        "# HELP llmgw_test_things_total Things.",
        "# TYPE llmgw_test_things_total counter",
        'llmgw_test_things_total{kind="x",name="a"} 1',
        'llmgw_test_things_total{kind="x",name="b"} 2.5',
        "",
    ]


async def test_a_family_without_series_is_left_out() -> None:
    assert await page(Group(GAUGE, [])) == ""


async def test_the_buckets_of_a_histogram_are_summed_up() -> None:
    histogram = Histogram(HISTOGRAM.bounds)
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    found = read(await page(Group(HISTOGRAM, [(("a",), histogram)])))
    name = ("name", "a")
    assert found == {
        ("llmgw_test_seconds_bucket", (("le", "0.1"), name)): 2,
        ("llmgw_test_seconds_bucket", (("le", "1.0"), name)): 3,
        ("llmgw_test_seconds_bucket", (("le", "+Inf"), name)): 4,
        ("llmgw_test_seconds_count", (name,)): 4,
        ("llmgw_test_seconds_sum", (name,)): 7.65,
    }


@given(st.lists(st.floats(0, 1e6), max_size=30))
def test_every_value_is_in_the_bucket_of_the_smallest_bound_that_holds_it(values: list[float]) -> None:
    bounds = (0.001, 0.5, 3.0, 1000.0)
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    reached = [sum(histogram.counts[: i + 1]) for i in range(len(bounds))]
    assert reached == [sum(value <= bound for value in values) for bound in bounds]
    assert sum(histogram.counts) == len(values)


@given(st.lists(st.tuples(st.text(max_size=20), st.integers(0, 2**53)), unique_by=lambda row: row[0], max_size=10))
def test_whatever_a_label_holds_is_read_back_as_it_was(rows: list[tuple[str, int]]) -> None:
    rows = [(name.encode("utf-8", "replace").decode(), number) for name, number in rows]
    rows = list(dict(rows).items())
    text = trio.run(page, Group(GAUGE, [((name,), number) for name, number in rows]))
    assert {labels[0][1]: value for (_, labels), value in read(text).items()} == {
        name: float(number) for name, number in rows
    }


async def test_numbers_are_new_on_each_page_and_a_series_that_is_gone_is_forgotten() -> None:
    rows: dict[Labels, float] = {("a",): 1, ("b",): 1}

    async def now() -> Iterable[Part]:
        return (Group(GAUGE, tuple(rows.items())),)

    exposition = Exposition(lambda: [now])
    first = read((await exposition.render()).decode())
    rows[("a",)] = 7
    del rows[("b",)]
    second = read((await exposition.render()).decode())
    assert list(first.values()) == [1, 1]
    assert second == {("llmgw_test_things", (("name", "a"),)): 7}


async def test_lines_that_are_written_already_stand_as_they_are() -> None:
    text = await page(Text(["# TYPE vllm:x gauge\n", "", "vllm:x 1\n"]), Group(GAUGE, [(("a",), 1)]))
    assert text.startswith("# TYPE vllm:x gauge\nvllm:x 1\n# HELP llmgw_test_things Things.\n")


class Clock:
    """Each look at it takes a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


async def test_others_have_a_turn_after_every_slice() -> None:
    # Each row takes a millisecond of this clock, so a slice is over after SLICE / 0.001 of them.
    rows = 100
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    group = Group(GAUGE, [((str(i),), i) for i in range(rows)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(others)
        await trio.lowlevel.checkpoint()
        turns = 0
        text = await Exposition(lambda: [source(group)], clock=Clock()).render()
        nursery.cancel_scope.cancel()
    assert text.count(b"\n") == rows + 2
    assert turns >= rows * 0.001 / exposition.SLICE - 2


async def test_a_page_is_whole_although_series_come_and_go_while_it_is_written() -> None:
    counts: dict[Labels, float] = {(str(i),): i for i in range(50)}

    async def now() -> Iterable[Part]:
        return (Group(GAUGE, ((labels, count) for labels, count in tuple(counts.items()))),)

    async def change() -> None:
        for i in range(1000):
            await trio.lowlevel.checkpoint()
            counts[f"new {i}",] = i
            counts.pop((str(i),), None)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        text = await Exposition(lambda: [now], clock=Clock()).render()
    assert len(read(text.decode())) == 50


async def test_two_who_ask_at_once_get_one_page_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    open_pages = 0
    most = 0

    async def counted() -> Iterable[Part]:
        nonlocal open_pages, most
        open_pages += 1
        most = max(most, open_pages)
        await trio.lowlevel.checkpoint()

        def rows() -> Iterator[tuple[Labels, float]]:
            nonlocal open_pages
            yield ("a",), 1
            open_pages -= 1

        return (Group(GAUGE, rows()),)

    exposition = Exposition(lambda: [counted])
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(exposition.render)
    assert (most, open_pages) == (1, 0)
