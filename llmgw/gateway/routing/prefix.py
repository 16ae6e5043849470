"""Which engine has seen the beginning of a request before, and so has it in its cache of prefixes.

The beginning is known by hashes of the raw bytes of the body, block by block, each of which covers all bytes before
it too. There is no tokenizer: two bodies that begin with the same bytes begin with the same tokens.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from llmgw.gateway.routing.table import Key

BLOCK = 512
"""Bytes in a block: some 100 tokens, a few blocks of an engine's own cache."""

BLOCKS = 64
"""Blocks that are looked at: 32 KiB. What two requests share beyond that they shared long before."""

REMEMBERED = 32_768
"""Blocks known per model: 512 conversations of full length, at some 200 bytes each."""


def block_hashes(parts: Iterable[bytes]) -> tuple[bytes, ...]:
    """Hashes of the whole blocks at the beginning of a body, which came in these pieces; shortest prefix first.

    A body of less than a block has none. 32 KiB take some 75 microseconds, 2 KiB some 5.
    """
    first: list[bytes] = []
    wanted = BLOCK * BLOCKS
    for part in parts:
        first.append(part[:wanted])
        wanted -= len(first[-1])
        if not wanted:
            break
    data = b"".join(first)
    found = []
    hasher = hashlib.blake2b(digest_size=8)
    for start in range(0, len(data) - BLOCK + 1, BLOCK):
        # A digest leaves the hasher as it is: the next one covers this block too.
        hasher.update(data[start : start + BLOCK])
        found.append(hasher.digest())
    return tuple(found)


class Memory:
    """Which endpoint got which block last, for one model; the blocks that were used least recently are forgotten."""

    __slots__ = ("_limit", "_seen")

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._seen: OrderedDict[bytes, Key] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def holders(self, hashes: Sequence[bytes]) -> Iterable[Key]:
        """Endpoints that got a beginning of it, the longest first; the same one may come again."""
        seen = self._seen
        for block in reversed(hashes):
            key = seen.get(block)
            if key is not None:
                yield key

    def note(self, hashes: Sequence[bytes], key: Key) -> None:
        """A request with these blocks goes to this endpoint."""
        seen = self._seen
        # Backwards, so that of one request the end is forgotten before the beginning, without which it is no use.
        for block in reversed(hashes):
            seen[block] = key
            seen.move_to_end(block)
        while len(seen) > self._limit:
            seen.popitem(last=False)
