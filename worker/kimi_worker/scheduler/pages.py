"""Who owns which page of the MLA cache."""

from collections.abc import Sequence
from typing import NewType

PageId = NewType("PageId", int)


class PageAllocator:
    """Hands out the pages 0 .. num_pages - 1, each to one owner at a time."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._free = [PageId(page) for page in reversed(range(num_pages))]
        self._taken: set[PageId] = set()

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, num_pages: int) -> list[PageId] | None:
        """Take `num_pages` pages, or none and return None. The page freed last is taken first."""
        if num_pages > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_pages)]
        self._taken.update(pages)
        return pages

    def release(self, pages: Sequence[PageId]) -> None:
        """Give pages back. Each must be taken: a second release is a bug of the caller."""
        for page in pages:
            assert page in self._taken, f"page {page} is released but not taken"
            self._taken.remove(page)
            self._free.append(page)

    def check(self) -> None:
        """Assert that every page is either free or taken, once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._taken, f"pages both free and taken: {sorted(free & self._taken)}"
        assert free | self._taken == set(range(self._num_pages)), "a page is neither free nor taken"
