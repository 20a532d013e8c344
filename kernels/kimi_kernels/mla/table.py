"""Where the cache rows of decoding requests lie."""

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of R requests, the longest request first.

    page_ids      [R, max_pages]  int, on the cache's device; entries past a length are ignored but are valid page ids
    lengths       [R]             int, on the cache's device: rows in the cache, the new token's included
    host_lengths  R ints          the same numbers on the host, so that no operator has to wait for the device

    Raises ValueError when the lengths do not fall or one is below 1.
    """

    page_ids: Tensor
    lengths: Tensor
    host_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.host_lengths) != self.page_ids.shape[0] or len(self.host_lengths) != self.lengths.shape[0]:
            raise ValueError(
                f"page table of {self.page_ids.shape[0]} requests has {self.lengths.shape[0]} lengths on the device "
                f"and {len(self.host_lengths)} on the host; give one of each a request"
            )
        if (
            any(earlier < later for earlier, later in pairwise(self.host_lengths))
            or min(self.host_lengths, default=1) < 1
        ):
            raise ValueError(
                f"page table has lengths {self.host_lengths}, expected numbers >= 1 that do not rise; "
                "sort the requests by length, longest first"
            )

    @property
    def longest(self) -> int:
        """Rows of the longest request; 0 without requests."""
        return self.host_lengths[0] if self.host_lengths else 0
