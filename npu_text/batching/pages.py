"""Pages of the cache: who has which, and what texts that begin alike share.

A page that is full is known by what is in it: its tokens, and the page before it. Whoever begins with the same tokens
reads it too. Nobody writes to a page that others may read; who has to write in the middle of one takes a copy. Pages
that no text has any more keep what they hold until another text needs the room; the longest unused go first.

No page is ever missing in the middle of a text: what a text may need is promised to it before it starts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from npu_compiler.errors import InputError
from npu_compiler.integers import ceil_div

__all__ = ["PagePool", "PageTable"]


@dataclass(eq=False)
class _Known:
    """A page whose content is known, or the beginning of all texts.

    Attributes:
        page: Which; -1 for the beginning.
        tokens: What it holds, behind what `parent` holds; fewer than a page's only where a text ended.
        siblings: What follows the page before it, by their tokens; this one is among them.
        children: What follows this one.
    """

    page: int
    tokens: tuple[int, ...]
    siblings: dict[tuple[int, ...], _Known] = field(default_factory=dict)
    children: dict[tuple[int, ...], _Known] = field(default_factory=dict)


class PagePool:
    """All pages of a cache.

    Attributes:
        count: How many there are.
        page_tokens: Tokens of each.
        promised: How many more the texts that have started may still ask for.
    """

    def __init__(self, count: int, page_tokens: int) -> None:
        if count < 1 or page_tokens < 1:
            raise InputError(f"given {count} pages of {page_tokens} tokens, expected at least one of each")
        self.count, self.page_tokens, self.promised = count, page_tokens, 0
        self._free = list(range(count - 1, -1, -1))
        self._users = [0] * count
        self._known: dict[int, _Known] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, without users, the longest unused first
        self._root = _Known(-1, ())

    @property
    def used(self) -> int:
        """Pages that texts have."""
        return self.count - self.available

    @property
    def kept(self) -> int:
        """Pages that no text has, with what they hold."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Pages that no text has; some of them may be promised."""
        return len(self._free) + len(self._idle)

    def pages_of(self, tokens: int) -> int:
        """How many pages so many tokens of one text take."""
        return ceil_div(tokens, self.page_tokens)

    def admit(self, prompt: Sequence[int], most: int, share: bool = True) -> PageTable | None:
        """The pages of a new text.

        Args:
            prompt: Its first tokens.
            most: So many tokens it has at most in the cache.
            share: Whether it may read what others computed.

        Returns:
            Its table, with every page it may ever need promised; None while others hold too many.
        """
        found = self._matching(self._root, prompt, 0) if share else []
        needed = self.pages_of(most) - len(found)
        idle = sum(self._users[known.page] == 0 for known in found)
        if self.available - idle - self.promised < needed:
            return None
        table = PageTable(self, needed, share)
        self.promised += needed
        for known in found:
            table.adopt(known)
        return table

    def forget(self) -> None:
        """Forgets what pages without users hold."""
        while self._idle:
            self._free.append(self._forgotten())

    # What follows is for tables.

    def _matching(self, after: _Known, prompt: Sequence[int], start: int) -> list[_Known]:
        """The known pages that hold what `prompt` has from `start` on; its last token is always computed."""
        found: list[_Known] = []
        size = self.page_tokens
        while start + size < len(prompt):
            known = after.children.get(tuple(prompt[start : start + size]))
            if known is None:
                break
            found.append(known)
            after, start = known, start + size
        return found

    def _alike(self, after: _Known, tokens: tuple[int, ...], least: int) -> tuple[_Known | None, int]:
        """What follows `after` and shares the most of its first tokens with others, at least so many; and how many."""
        best, most, first = None, 0, tokens[:least]
        for known in after.children.values():
            if known.tokens[:least] == first and (count := _common(known.tokens, tokens)) > most:
                best, most = known, count
        return best, most

    def _draw(self) -> int:
        """A page to write to; one was promised."""
        page = self._free.pop() if self._free else self._forgotten()
        self._users[page] = 1
        self.promised -= 1
        return page

    def _forgotten(self) -> int:
        """The page that was unused for longest, which holds nothing any more."""
        page, _ = self._idle.popitem(last=False)
        known = self._known.pop(page)
        del known.siblings[known.tokens]
        return page

    def _take(self, page: int) -> None:
        if self._users[page] == 0:
            del self._idle[page]
        self._users[page] += 1

    def _drop(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page] == 0:
            if page in self._known:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _learn(self, page: int, tokens: tuple[int, ...], after: _Known) -> _Known:
        """Says what a page holds; gives the page that is known for it, which may be another."""
        known = after.children.get(tokens)
        if known is None:
            known = after.children[tokens] = self._known[page] = _Known(page, tokens, after.children)
        return known


class PageTable:
    """The pages of one text, in order.

    Attributes:
        pages: Which; another tuple when they change.
        shared_tokens: How many of its first tokens others computed.
    """

    def __init__(self, pool: PagePool, promised: int, share: bool) -> None:
        """For `PagePool.admit`."""
        self.pages: tuple[int, ...] = ()
        self.shared_tokens = 0
        self._pool, self._promised, self._share = pool, promised, share
        self._sources: list[int] = []  # of copies that may not have been made yet
        self._last = pool._root  # the last page whose content is known
        self._learned = 0  # how many pages that makes

    def adopt(self, known: _Known) -> None:
        """Reads a page that others filled, behind those it reads already."""
        self._pool._take(known.page)
        self.pages += (known.page,)
        self._last = known
        self._learned += 1
        self.shared_tokens += self._pool.page_tokens

    def begin(self, prompt: Sequence[int]) -> list[tuple[int, int]]:
        """Shares what was computed since the text was admitted, and what begins like its next page.

        To be called once, before anything is written.

        Returns:
            Pages to copy before anything is written, each with what it is copied to; `copied` is to follow.
        """
        if not self._share:
            return []
        for known in self._pool._matching(self._last, prompt, self.shared_tokens):
            self._give_back_promise(1)
            self.adopt(known)
        return self._copied(prompt)

    def _copied(self, prompt: Sequence[int]) -> list[tuple[int, int]]:
        pool, start = self._pool, self.shared_tokens
        wanted = tuple(prompt[start : min(start + pool.page_tokens, len(prompt) - 1)])
        least = ceil_div(pool.page_tokens, 4)  # a copy for a few tokens is more work than those
        known, count = pool._alike(self._last, wanted, least)
        if known is None or count < least:
            return []
        pool._take(known.page)
        if pool.available < pool.promised:  # others need it
            pool._drop(known.page)
            return []
        self._sources.append(known.page)
        target = self._draw()
        self.pages += (target,)
        self.shared_tokens += count
        return [(known.page, target)]

    def copied(self) -> None:
        """Says that the copies of `begin` have been made: what was copied may be written to from now on."""
        for page in self._sources:
            self._pool._drop(page)
        self._sources = []

    def room(self, tokens: int) -> None:
        """Has pages for the first so many tokens."""
        missing = self._pool.pages_of(tokens) - len(self.pages)
        self.pages += tuple(self._draw() for _ in range(missing))

    def fill(self, tokens: Sequence[int]) -> None:
        """Says what is in the cache, or on its way there: all tokens of the text so far.

        Full pages are shared from here on. Where others have computed the same, the text keeps its own page: the other
        may still be on its way.
        """
        size = self._pool.page_tokens
        if not self._share:
            return
        while (self._learned + 1) * size <= len(tokens):
            at = self._learned
            page, held = self.pages[at], tuple(tokens[at * size : (at + 1) * size])
            self._last, self._learned = self._pool._learn(page, held, self._last), at + 1

    def release(self, tokens: Sequence[int]) -> None:
        """Gives all pages back; what they hold, `tokens`, is kept until another text needs the room."""
        self.copied()
        self.fill(tokens)
        size = self._pool.page_tokens
        rest = tuple(tokens[self._learned * size :])
        if self._share and rest:
            self._pool._learn(self.pages[self._learned], rest, self._last)
        for page in reversed(self.pages):  # so that a page goes before those that lead to it
            self._pool._drop(page)
        self.pages = ()
        self._give_back_promise(self._promised)

    def _draw(self) -> int:
        if self._promised == 0:
            raise InputError("a text asked for more pages than it was promised; this is an error of the scheduler")
        self._promised -= 1
        return self._pool._draw()

    def _give_back_promise(self, count: int) -> None:
        self._promised -= count
        self._pool.promised -= count


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of their first elements are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
