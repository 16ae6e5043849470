"""Hashes of beginnings: equal where the bytes are equal up to there, whatever pieces they came in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.shard import ShardId
from llmgw.gateway.routing.prefix import BLOCK, BLOCKS, Memory, block_hashes

A, B, C = ((ShardId("qwen", i), 1) for i in range(3))
bodies = st.builds(lambda seed, size: (seed * size)[:size], st.binary(min_size=1, max_size=40), st.integers(0, 40_000))


@given(bodies)
def test_whole_blocks_are_hashed_and_at_most_64(body: bytes) -> None:
    found = block_hashes([body])
    assert len(found) == min(len(body) // BLOCK, BLOCKS)
    assert all(len(block) == 8 for block in found)


@given(bodies, st.lists(st.integers(0, 40_000), max_size=6))
def test_the_pieces_that_a_body_came_in_make_no_difference(body: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(body)]
    parts = [body[a:b] for a, b in pairwise(places)]
    assert block_hashes(parts) == block_hashes([body])


def test_pieces_behind_the_last_block_are_not_looked_at() -> None:
    def pieces() -> Iterator[bytes]:
        yield bytes(BLOCK * BLOCKS)
        raise AssertionError("looked further")

    assert len(block_hashes(pieces())) == BLOCKS


def test_a_hash_covers_everything_before_its_block() -> None:
    one = block_hashes([b"a" * BLOCK + b"same" * 128 + b"c" * BLOCK])
    other = block_hashes([b"b" * BLOCK + b"same" * 128 + b"c" * BLOCK])
    assert len(set(one) | set(other)) == 6


def test_equal_blocks_in_a_row_have_different_hashes() -> None:
    assert len(set(block_hashes([bytes(BLOCK * BLOCKS)]))) == BLOCKS


@given(bodies, st.binary(max_size=2000), st.binary(max_size=2000))
def test_what_two_bodies_share_at_their_beginning_they_share_in_hashes(start: bytes, one: bytes, other: bytes) -> None:
    shared = min(len(start) // BLOCK, BLOCKS)
    assert block_hashes([start, one])[:shared] == block_hashes([start, other])[:shared] == block_hashes([start])


def test_a_body_of_less_than_a_block_has_no_beginning() -> None:
    assert block_hashes([b"x" * (BLOCK - 1)]) == ()
    assert block_hashes([]) == ()


# -- the memory --------------------------------------------------------------------------------------------


def test_holders_come_by_the_length_of_what_they_hold() -> None:
    memory = Memory()
    memory.note([b"1", b"2", b"3"], A)
    memory.note([b"1", b"2"], B)
    memory.note([b"1"], C)
    assert list(memory.holders([b"1", b"2", b"3", b"4"])) == [A, B, C]
    assert list(memory.holders([b"9"])) == []


def test_the_memory_is_bounded_and_forgets_what_was_used_least_recently() -> None:
    memory = Memory(limit=4)
    memory.note([b"a1", b"a2"], A)
    memory.note([b"b1", b"b2"], B)
    memory.note([b"a1", b"a2"], A)
    memory.note([b"c1"], C)
    assert len(memory) == 4
    assert list(memory.holders([b"b1", b"b2"])) == [B], "the end of the oldest goes first, its beginning stays"
    assert list(memory.holders([b"a1", b"a2"])) == [A, A]


@given(st.lists(st.lists(st.binary(min_size=1, max_size=1), max_size=9), max_size=30), st.integers(1, 5))
def test_the_memory_never_grows_beyond_its_limit(requests: list[list[bytes]], limit: int) -> None:
    memory = Memory(limit)
    for request in requests:
        memory.note(request, A)
        assert len(memory) <= limit
