"""Standard error as a place for reasons: where it cannot take them, they are lost, and nothing else changes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast


class _Reasons(io.TextIOBase):
    """A stream that takes every text, though what is behind it may be a full disk or a reader that has left."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            # what is still buffered would fail once more at exit, and change its status
            forget(self._stream)
        return len(text)

    def flush(self) -> None:
        """Each text was written through."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> Any:  # type: ignore[override]
        """Of the stream behind it."""
        return self._stream.encoding


@contextmanager
def reasons_cannot_fail() -> Iterator[None]:
    """Within, `sys.stderr` takes every text; closed standard error is as if nobody reads it."""
    own = sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nobody:  # noqa: PTH123 - no file
        sys.stderr = cast(TextIO, _Reasons(nobody if own is None else own))
        try:
            yield
        finally:
            sys.stderr = own


def forget(stream: TextIO) -> None:
    """What a stream still holds would be written once more at exit, and fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
