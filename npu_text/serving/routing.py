"""Which of several equal servers a request goes to."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager

__all__ = ["Router", "count_texts"]

_BLOCK = 1024  # bytes of a body that are compared together: some hundred tokens
_MOST_BLOCKS = 64  # of a body that are looked at
_KEPT = 1 << 16  # blocks that are remembered of what a server has seen
_NEAR = 4  # texts that a server may have beyond the fewest, and still get one whose beginning it knows
_MOST_TEXTS = 128  # of one request


class Router:
    """Sends requests where the fewest texts are open; of servers that are nearly equal, to one that knows how the
    request begins, whose cache may then hold what that became.

    Attributes:
        open: For each server, the texts that it has been asked for and has not answered.
    """

    def __init__(self, count: int) -> None:
        """Takes how many servers there are."""
        self.open = [0] * count
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]

    def choose(self, ready: Collection[int], body: bytes) -> int:
        """One of the servers that are ready.

        Args:
            ready: Their numbers; at least one.
            body: Of the request.
        """
        blocks = _blocks(body)
        fewest = min(self.open[number] for number in ready)
        near = [number for number in ready if self.open[number] <= fewest + _NEAR]
        chosen = max(near, key=lambda number: (self._known(number, blocks), -self.open[number]))
        seen = self._seen[chosen]
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > _KEPT:
            seen.popitem(last=False)
        return chosen

    @contextmanager
    def asking(self, number: int, texts: int) -> Iterator[None]:
        """While this lasts, a server has so many texts more."""
        self.open[number] += texts
        try:
            yield
        finally:
            self.open[number] -= texts

    def forget(self, number: int) -> None:
        """A server begins anew: its cache is empty."""
        self._seen[number].clear()

    def _known(self, number: int, blocks: list[int]) -> int:
        seen = self._seen[number]
        return next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))


def _blocks(body: bytes) -> list[int]:
    """For each whole block of a body a number that tells it, and all before it, from others."""
    found, before = [], 0
    for start in range(0, min(len(body) // _BLOCK, _MOST_BLOCKS) * _BLOCK, _BLOCK):
        before = hash((before, body[start : start + _BLOCK]))
        found.append(before)
    return found


def count_texts(body: bytes) -> int:
    """How many texts a request asks for; 1 for what is none, which takes no time to refuse."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return 1
    if not isinstance(request, dict):
        return 1
    given = request.get("prompt", request.get("input"))
    prompts = len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1
    each = request.get("n")
    return min(prompts * (each if isinstance(each, int) and each > 0 else 1), _MOST_TEXTS)
